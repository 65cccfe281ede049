"""A picture as a vector of fixed length, and back: its low frequencies. Public, and for each
picture by itself.

The vector of a picture is computed in whole numbers, so that not a bit of it depends on which
pictures lie beside it in memory. That is what makes the bound on a picture's part in a sum a proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.synthetic.evolution import Array, fine

Bytes = NDArray[np.uint8]

WHITE = 255
MOST_PIXELS = 1 << 14
LEAST_SIDE = 4
CHUNK = 1 << 12


@dataclass(frozen=True)
class Encoding:
    """The map for pictures of `height` x `width` grey pixels: the lowest `frequencies` x
    `frequencies` of the cosine transform.
    """

    height: int
    width: int
    frequencies: int = 12

    def __post_init__(self) -> None:
        for name, side in (("height", self.height), ("width", self.width)):
            check.integer(name, side, least=LEAST_SIDE, most=MOST_PIXELS)
        if self.height * self.width > MOST_PIXELS:
            raise Unsupported(
                f"pictures of {self.height} x {self.width} pixels",
                f"scale them to at most {MOST_PIXELS} pixels",
            )
        check.integer("frequencies", self.frequencies, most=32)

    @property
    def side(self) -> int:
        """Cosines along each side."""
        return min(self.frequencies, self.height, self.width)

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self.side**2

    @property
    def pixels(self) -> int:
        """Of one picture."""
        return self.height * self.width

    @cached_property
    def cosines(self) -> tuple[Array, Array]:
        """Those of the rows and of the columns."""
        return _cosines(self.height, self.side), _cosines(self.width, self.side)

    def vectors(self, pictures: Bytes) -> Array:
        """(n, height, width) bytes -> (n, size).

        Guarantees: row `i` depends on picture `i` alone, down to the last bit.
        """
        found = np.empty((len(pictures), self.size))
        rows, columns = self.cosines
        for part in _parts(len(pictures)):
            held = pictures[part].astype(np.float64)
            found[part] = (rows @ held @ columns.T).reshape(len(held), -1) / WHITE
        return found

    def pictures(self, vectors: Array) -> Array:
        """Vectors as pictures again, from 0 (black) to 1, though noise may lead beyond."""
        rows, columns = self.cosines
        found: Array = rows.T @ vectors.reshape(-1, self.side, self.side) @ columns
        return found


def _cosines(points: int, count: int) -> Array:
    """Rows of the discrete cosine transform, of length one up to rounding."""
    angles = math.pi / points * np.outer(np.arange(count), np.arange(points) + 0.5)
    made = np.cos(angles) * math.sqrt(2 / points)
    made[0] *= math.sqrt(0.5)
    return fine(made)


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))
