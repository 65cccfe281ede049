"""IDX, the format of MNIST: four bytes of magic, big-endian sizes, unsigned bytes."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import torch

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import DataFile, DataFolder
from dpfy.data.config import DataConfig
from dpfy.data.dataset import DataSource, Encoded, assemble, labelled

UNSIGNED_BYTE, SIGNED_INT = 0x08, 0x0C
WRITER = 2
"""The column of QMNIST's labels that holds the writer."""
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}


def read(file: DataFile, dimensions: int) -> np.ndarray:
    """The array in `file`. A foreign magic number, another rank, or any other length than the
    header says is an error.
    """
    content = file.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE:
        start = content[:4].hex() or "nothing"
        raise Corrupt(
            file.name, f"not an IDX file of unsigned bytes (starts with {start}, expected 000008..)"
        )
    if content[3] != dimensions:
        raise Corrupt(
            file.name, f"holds an array of {content[3]} dimensions, expected {dimensions}"
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise Corrupt(file.name, "truncated inside the header")
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    expected, found = math.prod(sizes), len(content) - header
    if found != expected:
        trouble = "truncated" if found < expected else "too long"
        raise Corrupt(
            file.name,
            f"{trouble}: the header announces {expected} bytes of data, the file holds {found}",
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(sizes)


def images_and_labels(images: DataFile, labels: DataFile, classes: int) -> Encoded:
    """Images as float32 in [0, 1] with one channel, and labels as int64."""
    pixels, answers = read(images, 3), read(labels, 1)
    if len(pixels) != len(answers):
        raise Corrupt(
            labels.name,
            f"holds {len(answers)} labels, but {images.name} holds {len(pixels)} images",
        )
    if pixels.size == 0:
        raise InvalidInput(
            "data file", images.name, "must hold at least 1 image of at least 1 pixel"
        )
    scaled = torch.from_numpy(pixels.astype(np.float32) / 255.0).unsqueeze(1)
    return Encoded(
        labelled(scaled, torch.from_numpy(answers.astype(np.int64)), classes, images.name)
    )


def well_known(config: DataConfig) -> DataSource:
    """MNIST or Fashion-MNIST from the four files in its folder, compressed or not."""
    folder = DataFolder.find(config.dir)

    def part(prefix: str) -> Encoded:
        images = f"{prefix}-images-idx3-ubyte"
        answers = f"{prefix}-labels-idx1-ubyte"
        return images_and_labels(
            folder.file(config.kind, f"{images}.gz", images),
            folder.file(config.kind, f"{answers}.gz", answers),
            classes=10,
        )

    train = part("train")
    if config.user is not None:
        train = replace(train, owners=writers(folder, len(train.records)))
    return assemble(train, part("t10k"), config, 10, TITLES[config.kind])


def writers(folder: DataFolder, images: int) -> np.ndarray:
    """Who wrote each training image of MNIST, by QMNIST's extended labels (Yadav & Bottou 2019):
    rows of eight whole numbers.
    """
    name = "qmnist-train-labels-idx2-int"
    file = folder.file("qmnist", f"{name}.gz", name)
    content = file.read()
    if (
        content[:12] != struct.pack(">4B2I", 0, 0, SIGNED_INT, 2, images, 8)
        or len(content) != 12 + 4 * 8 * images
    ):
        raise Corrupt(file.name, f"not an IDX file of {images} rows of 8 whole numbers")
    return np.frombuffer(content, ">i4", offset=12).reshape(images, 8)[:, WRITER].astype(np.int64)


def from_config(config: DataConfig) -> DataSource:
    """Images and labels from the files that the configuration names."""
    assert config.path is not None
    assert config.labels_path is not None
    assert config.classes is not None
    train = images_and_labels(
        DataFile.given(config.path), DataFile.given(config.labels_path), config.classes
    )
    test = None
    if config.test_path is not None and config.test_labels_path is not None:
        test = images_and_labels(
            DataFile.given(config.test_path),
            DataFile.given(config.test_labels_path),
            config.classes,
        )
    return assemble(train, test, config, config.classes, "images from IDX files")
