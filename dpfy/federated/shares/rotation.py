"""A random rotation that everybody knows: vectors whose length sits in few coordinates come out
spread over all of them.

Coordinates of a rotated vector are about equally large, so that few bits are enough for each, and a
sum seldom leaves its range. Nothing about privacy depends on it: the length that is billed is
measured after it, on integers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpfy.noise.shares import padded

Array = NDArray[np.float64]

RADIX = 32
"""Coordinates that one small matrix mixes."""


@lru_cache(maxsize=16)
def _matrix(size: int) -> Array:
    rows = np.arange(size)
    signs = np.array([[bin(i & j).count("1") & 1 for j in rows] for i in rows])
    return (1.0 - 2.0 * signs) / np.sqrt(size)


def hadamard(rows: Array) -> Array:
    """The Walsh-Hadamard transform of the last axis, a power of two long, divided by the root of
    its length: its own inverse.
    """
    size, width = rows.shape[-1], 1
    out = rows.reshape(-1, size)
    while width < size:
        block = min(RADIX, size // width)
        out = (
            np.matmul(_matrix(block), out.reshape(-1, block, width))
            if width > 1
            else out.reshape(-1, block) @ _matrix(block)
        )
        width *= block
    return out.reshape(rows.shape)


@dataclass(frozen=True)
class Rotation:
    """Random signs and then a Hadamard transform, for one round: a function of a public seed.
    Vectors are padded with zeros.
    """

    seed: int
    round: int
    dimension: int

    def signs(self) -> Array:
        """+1 or -1 for each coordinate of a padded vector."""
        key = hashlib.blake2b(
            f"rotation {self.seed} of round {self.round}".encode(), digest_size=16
        ).digest()
        drawn = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).integers(
            0, 2, padded(self.dimension), dtype=np.int8
        )
        return 1.0 - 2.0 * drawn.astype(np.float64)

    def forward(self, rows: Array) -> Array:
        """Vectors, one a row, rotated."""
        wide = np.zeros((*rows.shape[:-1], padded(self.dimension)))
        wide[..., : self.dimension] = rows
        return hadamard(wide * self.signs())

    def inverse(self, rows: Array) -> Array:
        """Rotated vectors as they were."""
        return np.asarray((hadamard(rows) * self.signs())[..., : self.dimension])
