"""Soft trees (Hazimeh et al. 2020) as functions, with the gradient of every record in closed form.

A split sends a record to both sides, by shares that a smooth step of a linear score gives. A leaf's
share is the product of those on its way, and a tree's score the sum of its leaves' values by their
shares. With V the score of a part of the tree, the derivative in the score of a split is (share of
the node) step' (V right - V left): no matrix of gradients is ever made.

Splits stand level by level, in each level tree by tree. Arrays have records last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Ensemble:
    """So many trees of one depth, whose leaves have values for so many scores."""

    trees: int
    depth: int
    outputs: int

    @property
    def splits(self) -> int:
        """Of all trees."""
        return self.trees * (2**self.depth - 1)

    @property
    def values(self) -> tuple[int, int, int]:
        """The shape of the values of all leaves."""
        return self.trees, 2**self.depth, self.outputs

    def levels(self, rows: Array) -> list[Array]:
        """Rows of splits by level: [trees, nodes, ...] each."""
        ends = [self.trees * (2**level - 1) for level in range(self.depth + 1)]
        return [
            rows[a:b].reshape(self.trees, (b - a) // self.trees, *rows.shape[1:])
            for a, b in pairwise(ends)
        ]


def smooth_step(scores: Array) -> tuple[Array, Array]:
    """0 below -1/2, 1 above 1/2, and between them the cubic that meets both smoothly; and its
    slope.
    """
    part = np.clip(scores, -0.5, 0.5)
    square = part * part
    return 0.5 + part * (1.5 - 2 * square), 1.5 - 6 * square


class ForwardPass:
    """Records sent through the trees: `scores` [outputs, records], from scores of splits [splits,
    records] and values of leaves.

    Guarantees: sums are made tree after tree by correctly rounded operations, so that what a record
    gets depends on nothing but itself, the splits and the leaves.
    """

    def __init__(self, shape: Ensemble, splits: Array, values: Array) -> None:
        self.shape = shape
        right, self._slopes = zip(
            *(smooth_step(level) for level in shape.levels(splits)), strict=True
        )
        self._reached = [np.ones((shape.trees, 1, splits.shape[1]), splits.dtype)]
        for share in right:
            part = self._reached[-1] * share
            self._reached.append(
                np.stack([self._reached[-1] - part, part], axis=2).reshape(
                    shape.trees, 2 * part.shape[1], splits.shape[1]
                )
            )
        self._differ: list[Array] = []
        below = values.astype(splits.dtype)[:, :, :, None]
        for share in reversed(right):
            self._differ.insert(0, below[:, 1::2] - below[:, 0::2])
            below = below[:, 0::2] + share[:, :, None] * self._differ[0]
        self.scores = np.zeros((shape.outputs, splits.shape[1]), splits.dtype)
        for tree in below:
            self.scores += tree[0]

    @property
    def leaves(self) -> Array:
        """The share of every leaf [leaves, records]."""
        return _flat(self._reached[-1])

    def derivatives(self, residuals: Sequence[Array]) -> Array:
        """Of sum_k residual_k score_k in the scores of splits [splits, records]."""
        found = []
        for slope, reached, differ in zip(self._slopes, self._reached, self._differ, strict=False):
            total = residuals[0] * differ[:, :, 0]
            for k in range(1, self.shape.outputs):
                total = total + residuals[k] * differ[:, :, k]
            found.append(_flat(slope * reached * total))
        return np.concatenate(found)


def _flat(nodes: Array) -> Array:
    """Of all trees, one after the other [trees * nodes, records]; there may be no record."""
    trees, many, records = nodes.shape
    return nodes.reshape(trees * many, records)
