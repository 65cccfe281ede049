"""Random trees: every level asks one question of all records, which column and which of its cells
being drawn at random.

The questions come from a public seed and public sizes, or from counts that were released, so that a
tree by itself costs nothing: only what is summed in its leaves needs noise (Geurts et al. 2006;
Fletcher & Islam 2017). All nodes of a level ask the same, which makes a leaf a number of `depth`
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfy.estimators.trees.cells import Places

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trees:
    """`columns[t, l]` is the column that level l of tree t asks for; `right[t, l, c]` whether its
    cell c goes right.
    """

    columns: NDArray[np.int64]
    right: NDArray[np.uint8]

    @property
    def count(self) -> int:
        """How many trees."""
        return len(self.columns)

    @property
    def leaves(self) -> int:
        """How many leaves each has."""
        return 1 << self.columns.shape[1]

    def leaf(self, tree: int, places: Sequence[Places]) -> NDArray[np.uint16]:
        """The leaf of each record."""
        found = np.zeros(len(places[0]), np.uint16)
        for level, column in enumerate(self.columns[tree]):
            found |= self.right[tree, level].astype(np.uint16)[places[column]] << np.uint16(level)
        return found


def grown(
    sizes: Sequence[int],
    ordered: Sequence[bool],
    count: int,
    depth: int,
    seed: int,
    counts: Sequence[Floats] | None = None,
) -> Trees:
    """Random trees over columns of these sizes.

    A number is cut between two of its cells; of a category, every word goes right with probability
    one half, and so do missing values. With `counts` of the cells, a number is cut at a random
    quantile.

    Guarantees: depends on the arguments alone.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    columns = _asked(draw, len(sizes), count, depth)
    right = np.zeros((count, depth, max(sizes)), np.uint8)
    for t in range(count):
        for level, f in enumerate(columns[t].tolist()):
            if ordered[f]:
                right[t, level, : sizes[f] - 1] = np.arange(sizes[f] - 1) >= _cut(
                    draw, sizes[f] - 1, None if counts is None else counts[f]
                )
                right[t, level, sizes[f] - 1] = draw.integers(2)
            else:
                right[t, level, : sizes[f]] = draw.integers(2, size=sizes[f])
    return Trees(columns, right)


def _asked(draw: np.random.Generator, columns: int, count: int, depth: int) -> NDArray[np.int64]:
    """The columns of each tree, from one shuffled deck after the other: all are asked equally
    often, none twice in a tree while others are left.
    """
    found, deck = np.empty((count, depth), np.int64), list[int]()
    for t in range(count):
        for level in range(depth):
            used = set(found[t, level - level % columns : level].tolist())
            place = next((k for k, f in enumerate(deck) if f not in used), None)
            if place is None:
                deck += draw.permutation(columns).tolist()
                place = next(k for k, f in enumerate(deck) if f not in used)
            found[t, level] = deck.pop(place)
    return found


def _cut(draw: np.random.Generator, cells: int, counts: Floats | None) -> int:
    """The first cell that goes right: any but the first, or the one of a random quantile of the
    counts or the next.
    """
    if counts is None:
        return int(draw.integers(1, cells))
    part = np.cumsum(counts[:-1]) / max(float(counts[:-1].sum()), 1e-9)
    return int(np.clip(np.searchsorted(part, draw.random()) + draw.integers(2), 1, cells - 1))


def importance(trees: Trees, values: Floats, columns: int) -> Floats:
    """For each column the sum of what its questions move: how far the means of the two sides lie
    apart, in `values` [trees, leaves, scores].
    """
    found = np.zeros(columns)
    for t in range(trees.count):
        for level, column in enumerate(trees.columns[t]):
            side = (np.arange(trees.leaves) >> level) & 1
            found[column] += np.abs(
                values[t][side == 1].mean(axis=0) - values[t][side == 0].mean(axis=0)
            ).mean()
    return found
