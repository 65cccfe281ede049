"""The cells of every column, and how a noisy count of them joins fine cells to groups.

A number has equal fine cells over its transformed public range, and one more for a missing value. A
category has a cell for each word of its list, and one for all that is not listed or missing. Fine
cells of numbers are joined to equal coarse bins, except those whose noisy count stands out, which
stay by themselves: many records at one value are worth a value of their own.

Random trees: every level asks one question of all records, which column and which of its cells
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

from dpfy.estimators.records import EncodedRecords
from dpfy.tables.columns import Category

Floats = NDArray[np.float64]
Places = NDArray[np.uint16]

STANDS_OUT = 3.0
"""A fine cell is a group of its own from so many standard deviations of its noise on."""


@dataclass(frozen=True)
class FeatureBins:
    """`places[f]` is the cell of each record in column f, `sizes[f]` how many cells it has,
    `ordered[f]` whether it is a number.
    """

    places: tuple[Places, ...]
    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    def counts(self, column: int, weights: Floats | None = None) -> Floats:
        """How many records each cell of a column holds, or the sum of their weights."""
        found = np.bincount(self.places[column], weights, self.sizes[column])
        return found.astype(np.float64)


def cells(data: EncodedRecords, fine: int) -> FeatureBins:
    """The cell of every record in every column.

    Guarantees: cells lie below the sizes, which are public, whatever the records hold.
    """
    places, sizes, ordered = [], [], []
    number = category = 0
    for column in data.columns.columns:
        if isinstance(column, Category):
            places.append(data.codes[:, category].astype(np.uint16))
            sizes.append(len(column.categories) + 1)
            category += 1
        else:
            places.append(_of_number(data.units(number), fine))
            sizes.append(fine + 1)
            number += 1
        ordered.append(not isinstance(column, Category))
    return FeatureBins(tuple(places), tuple(sizes), tuple(ordered))


def cells_again(given: EncodedRecords, sizes: NDArray[np.int64]) -> FeatureBins:
    """The cells of other rows, by the sizes of a fit."""
    numbers = [
        int(size) - 1
        for size, column in zip(sizes, given.columns.columns, strict=True)
        if not isinstance(column, Category)
    ]
    return cells(given, numbers[0] if numbers else 1)


def _of_number(units: Floats, fine: int) -> Places:
    """Equal cells of the range; the last one for a missing value."""
    missing = np.isnan(units)
    units *= fine
    np.floor(units, out=units)
    np.clip(units, 0, fine - 1, out=units)
    units[missing] = fine
    return units.astype(np.uint16)


@dataclass(frozen=True)
class BinGroups:
    """Groups of cells, column after column: cell c of column f is in group `starts[f] +
    of_cell[f][c]`.

    `links[g]` is how far group g is from the one before it in its column, as a share of the range;
    infinite for the first of a column, for words and for missing values. `counts` are noisy numbers
    of records, at least one.
    """

    of_cell: tuple[NDArray[np.int32], ...]
    starts: NDArray[np.int64]
    links: Floats
    counts: Floats

    @property
    def size(self) -> int:
        """How many there are."""
        return int(self.starts[-1])

    def column(self, f: int) -> slice:
        """The groups of a column."""
        return slice(int(self.starts[f]), int(self.starts[f + 1]))


def counted_cells(
    sizes: Sequence[int], ordered: Sequence[bool], bins: int
) -> list[tuple[int, bool]]:
    """The histograms that are counted, in order: (cells, fine) of each; numbers have a fine one and
    one of their coarse bins.
    """
    found = []
    for size, number in zip(sizes, ordered, strict=True):
        found += [(size, True), (bins, False)] if number else [(size, False)]
    return found


def grouped(
    sizes: Sequence[int],
    ordered: Sequence[bool],
    bins: int,
    counts: Sequence[Floats],
    noise: Sequence[float],
) -> BinGroups:
    """Groups from noisy histograms (`counted_cells`), each with noise of its standard deviation."""
    of_cell, starts, links, sums, at = [], [0], [], [], 0
    for size, number in zip(sizes, ordered, strict=True):
        if number:
            group, held = _joined(counts[at][:-1], counts[at + 1], noise[at])
            middle = np.bincount(group, np.arange(size - 1) + 0.5) / np.bincount(group) / (size - 1)
            links += [np.inf, *np.diff(middle).tolist(), np.inf]
            group, held = np.append(group, group[-1] + 1), np.append(held, counts[at][-1])
            at += 2
        else:
            group, held = np.arange(size), counts[at]
            links += [np.inf] * size
            at += 1
        of_cell.append(group.astype(np.int32))
        sums.append(np.maximum(held, 1.0))
        starts.append(starts[-1] + len(held))
    return BinGroups(
        tuple(of_cell), np.array(starts, np.int64), np.array(links), np.concatenate(sums)
    )


def _joined(fine: Floats, coarse: Floats, noise: float) -> tuple[NDArray[np.int64], Floats]:
    """The group of each fine cell, and the count of each group: of cells that stand out their own,
    of others what is left of their bin.
    """
    alone = fine > STANDS_OUT * noise
    bin_of = np.arange(len(fine)) * len(coarse) // len(fine)
    first = np.ones(len(fine), bool)
    first[1:] = alone[1:] | alone[:-1] | (bin_of[1:] != bin_of[:-1])
    group: NDArray[np.int64] = np.cumsum(first) - 1
    left = np.maximum(coarse - np.bincount(bin_of, fine * alone, len(coarse)), 1.0)
    each = left / np.maximum(np.bincount(bin_of, ~alone, len(coarse)), 1.0)
    return group, np.bincount(group, np.where(alone, fine, each[bin_of])).astype(np.float64)


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
