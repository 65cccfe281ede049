"""A sheet of pictures as one PNG file, a row for each class. Written here, so that nothing else has
to be installed.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from dpfy_lab.synthetic_images.encoding import Bytes

COLUMNS, ROWS = 20, 20
GREY = 0
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def sheet(pictures: Bytes, labels: Bytes, classes: int) -> bytes:
    """The first pictures of the first classes, as many as there is room for; places that stay empty
    are black.
    """
    height, width = pictures.shape[1:]
    rows = min(classes, ROWS)
    found = np.zeros((rows, COLUMNS, height, width), np.uint8)
    for label in range(rows):
        mine = pictures[np.flatnonzero(labels == label)[:COLUMNS]]
        found[label, : len(mine)] = mine
    return png(found.transpose(0, 2, 1, 3).reshape(rows * height, COLUMNS * width))


def png(pixels: Bytes) -> bytes:
    """(height, width) grey pixels as PNG."""
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)  # every line begins with its filter: none
    lines[:, 1:] = pixels
    header = struct.pack(">IIBBBBB", width, height, 8, GREY, 0, 0, 0)
    return (
        SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )
