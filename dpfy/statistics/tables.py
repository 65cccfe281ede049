"""Counts in cells: histograms, contingency tables with consistent margins, and how right a model is
on private records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.values import Bound, Bounded
from dpfy.mechanisms.grid import Grid
from dpfy.statistics.answer import Answer, NoiseLaw, ratio
from dpfy.statistics.groups import Bins
from dpfy.statistics.statistic import SumStatistic, counted
from dpfy.statistics.units import ContributionLimit
from dpfy.tables.columns import RangedColumn, WordColumn
from dpfy.tables.table import PrivateTable

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class CellCounts(SumStatistic):
    """A count for each cell; a record lies in one of them."""

    @property
    def whole(self) -> bool:
        """Ones."""
        return True

    def one(self, norm: str) -> Bound:
        """A record counts once."""
        return Bound(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class BinCounts(CellCounts):
    """How many numbers lie between public edges; the last bin holds its upper edge."""

    bins: Bins

    @property
    def cells(self) -> int:
        """Bins."""
        return len(self.bins.labels)

    def placed(self, table: PrivateTable) -> Codes:
        """The bin of each number; a missing one, or one outside the edges, has none."""
        found = self.bins.codes(table)
        return np.where(found < self.cells, found, -1)

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        for label, total in zip(self.bins.labels, sums[:, 0], strict=True):
            yield counted(self.text, [total], spread, {self.bins.name: label})


@dataclass(frozen=True)
class Contingency(CellCounts):
    """How many records have each combination of words; with the totals of every margin, which agree
    with the table.
    """

    columns: tuple[WordColumn, ...]
    margins: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Categories of each column."""
        return tuple(len(column.cells) for column in self.columns)

    @property
    def cells(self) -> int:
        """Combinations."""
        return math.prod(self.shape)

    def placed(self, table: PrivateTable) -> Codes:
        """The combination of each record."""
        found = np.zeros(table.size, np.int64)
        for column in self.columns:
            found = found * len(column.cells) + table.codes(column.name)
        return found

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        cube = np.asarray(sums[:, 0]).reshape(self.shape)
        axes = range(len(self.columns))
        orders = (
            range(len(self.columns), 0, -1)
            if self.margins and len(self.columns) > 1
            else [len(self.columns)]
        )
        for order in orders:
            for kept in combinations(axes, order):
                moved = np.moveaxis(cube, kept, range(order))
                for cell in np.ndindex(*(self.shape[a] for a in kept)):
                    place = {
                        self.columns[a].name: self.columns[a].cells[i]
                        for a, i in zip(kept, cell, strict=True)
                    }
                    yield counted(self.text, moved[cell].ravel().tolist(), spread, place)


@dataclass(frozen=True)
class Accuracy(CellCounts):
    """The share of records on which two columns agree: of a model's guesses that are right."""

    truth: WordColumn
    guess: WordColumn

    @property
    def whole(self) -> bool:
        """Ones; where the number of records is public a half, up or down, so that replacing a
        record moves the sum by one.
        """
        return self.records is None

    @property
    def cells(self) -> int:
        """Right and wrong; one sum where the number of records is public."""
        return 1 if self.records is not None else 2

    def one(self, norm: str) -> Bound:
        """See `whole`."""
        return Bound.scalar(1.0 if self.whole else 0.5)

    def right(self, table: PrivateTable) -> NDArray[np.bool_]:
        """Where both say the same. A word that is not listed is never right."""
        truth, guess = np.array([*self.truth.words, ""]), np.array([*self.guess.words, ""])
        said, due = guess[table.codes(self.guess.name)], truth[table.codes(self.truth.name)]
        return np.asarray((said == due) & (table.codes(self.truth.name) < len(self.truth.words)))

    def rows(self, table: PrivateTable, norm: str) -> tuple[Codes, Floats]:
        """See `SumStatistic`."""
        right = self.right(table)
        if self.whole:
            return np.where(right, 0, 1), np.ones((table.size, 1))
        return np.zeros(table.size, np.int64), np.where(right, 0.5, -0.5)[:, None]

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        if self.records is None:
            value, error, interval = ratio([1.0, 0.0], [1.0, 1.0], sums[:, 0], spread, (0.0, 1.0))
        else:
            value, reach = (
                0.5 + float(sums[0, 0]) / self.records,
                spread.reach([1.0]) / self.records,
            )
            error, interval = (
                spread.deviation / self.records,
                (_share(value - reach), _share(value + reach)),
            )
        yield Answer(self.text, _share(value), error, interval)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


@dataclass(frozen=True)
class Calibration(SumStatistic):
    """Predicted probabilities against what happened, in bins of the probability: reliability, and
    the expected calibration error.
    """

    probability: RangedColumn
    label: WordColumn
    bins: int

    @property
    def cells(self) -> int:
        """Bins times outcomes."""
        return 2 * self.bins

    def width(self, norm: str) -> int:
        """The count, and how far the probability lies from the middle of its bin, in halves of
        it.
        """
        return 2

    def one(self, norm: str) -> Bound:
        """A record counts once, and lies within its bin; the distance is weighted by one half."""
        return Bound(math.sqrt(1.25), 1.5, 1.0)

    def _bin(self, table: PrivateTable) -> tuple[Codes, Floats]:
        low, high = self.probability.low, self.probability.high
        share = (table.numbers(self.probability.name) - low) / (high - low)
        known = np.nan_to_num(share)
        found = np.clip(np.floor(known * self.bins), 0, self.bins - 1)
        return np.where(np.isnan(share), -1, found).astype(np.int64), 2 * (
            known * self.bins - found
        ) - 1

    def rows(self, table: PrivateTable, norm: str) -> tuple[Codes, Floats]:
        """See `SumStatistic`. The last class counts as having happened; other words add nothing."""
        bins, distance = self._bin(table)
        codes = table.codes(self.label.name)
        happened = codes == len(self.label.words) - 1
        cells = np.where((bins >= 0) & (codes < len(self.label.words)), 2 * bins + happened, -1)
        return cells, np.stack([np.ones(len(cells)), distance / 2], axis=1)

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        width = (self.probability.high - self.probability.low) / self.bins
        numbers = np.asarray(sums).reshape(
            self.bins, 4
        )  # count and distance, of what did not happen and of what did
        off, total = 0.0, 0.0
        for k, found in enumerate(numbers):
            low = self.probability.low + k * width
            place = {self.probability.name: f"[{low:g}, {low + width:g}]"}
            happened = ratio([0, 0, 1, 0], [1, 0, 1, 0], found, spread, (0.0, 1.0))
            said = ratio([0, width, 0, width], [1, 0, 1, 0], found, spread, (-width / 2, width / 2))
            count = max(found[0] + found[2], 0.0)
            off, total = off + count * abs(happened[0] - said[0] - low - width / 2), total + count
            yield Answer(
                self.text,
                *happened,
                place,
                f"mean prediction {low + width / 2 + said[0]:.4g}, records {count:.4g}",
            )
        yield Answer(
            self.text,
            off / total if total else None,
            place={"of": "expected calibration error"},
            note="biased upward",
        )


def consistent(
    margins: Mapping[tuple[int, ...], tuple[Floats, float]], shape: Sequence[int]
) -> dict[tuple[int, ...], Floats]:
    """Noisy margins of one table, made to agree: the least-squares fit of a table, exactly, without
    making the table.

    `margins` maps the axes of a margin to its noisy counts and the standard deviation of their
    noise. A margin is a sum of orthogonal effects, one for each subset of its axes. Each effect is
    estimated by every margin that has its axes, with noise of equal variance in all its
    coordinates, so that averaging with weights of inverse variance is least squares.
    """
    effects: dict[tuple[int, ...], tuple[Floats, float]] = {}
    for axes, (table, deviation) in margins.items():
        for order in range(len(axes) + 1):
            for kept in combinations(axes, order):
                variance = deviation**2 * math.prod(shape[a] for a in axes if a not in kept)
                found, weight = effects.get(kept, (np.zeros([shape[a] for a in kept]), 0.0))
                effects[kept] = found + _effect(table, axes, kept) / variance, weight + 1 / variance
    agreed = {}
    for axes in margins:
        total = np.zeros([shape[a] for a in axes])
        for kept, (found, weight) in effects.items():
            if set(kept) <= set(axes):
                spread = math.prod(shape[a] for a in axes if a not in kept)
                view = [shape[a] if a in kept else 1 for a in axes]
                total = total + (found / weight).reshape(view) / spread
        agreed[axes] = total
    return agreed


def _effect(table: Floats, axes: tuple[int, ...], kept: tuple[int, ...]) -> Floats:
    """The part of a margin that varies along every axis of `kept` and is summed over the others."""
    found = np.asarray(table, np.float64).sum(
        axis=tuple(k for k, a in enumerate(axes) if a not in kept)
    )
    for axis in range(len(kept)):
        found = found - found.mean(axis=axis, keepdims=True)
    return np.asarray(found)


@dataclass(frozen=True)
class Margins(SumStatistic):
    """Every margin of so many columns at once, made consistent with each other."""

    columns: tuple[WordColumn, ...]
    order: int

    @property
    def whole(self) -> bool:
        """Ones."""
        return True

    @property
    def kept(self) -> list[tuple[int, ...]]:
        """The axes of each margin."""
        return list(combinations(range(len(self.columns)), self.order))

    @property
    def shape(self) -> tuple[int, ...]:
        """Categories of each column."""
        return tuple(len(column.cells) for column in self.columns)

    def width(self, norm: str) -> int:
        """All cells of all margins."""
        return sum(math.prod(self.shape[a] for a in axes) for axes in self.kept)

    def one(self, norm: str) -> Bound:
        """A record counts once in each margin."""
        return Bound(math.sqrt(len(self.kept)) * (1 + 2.0**-50), float(len(self.kept)), 1.0)

    def total(
        self, table: PrivateTable, contribution: ContributionLimit, norm: str, grid: Grid | None
    ) -> Bounded[Any]:
        """See `SumStatistic`."""
        groups, kept = self.used(table, contribution, np.ones(table.size, bool))
        parts = []
        for axes in self.kept:
            at, size = groups, math.prod(self.shape[a] for a in axes)
            for a in axes:
                at = at * self.shape[a] + table.codes(self.columns[a].name)
            parts.append(
                np.bincount(at[kept], minlength=self.groups.count * size).reshape(
                    self.groups.count, 1, size
                )
            )
        total = Bounded(
            np.concatenate(parts, axis=2).astype(np.int64), contribution.bound(self.one(norm))
        )
        return total if grid is None else grid.lay(total)

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        noisy, start = {}, 0
        for axes in self.kept:
            sizes = [self.shape[a] for a in axes]
            noisy[axes] = np.asarray(sums[0, start : start + math.prod(sizes)]).reshape(sizes), 1.0
            start += math.prod(sizes)
        for axes, table in consistent(noisy, self.shape).items():
            reach = spread.reach([1.0])
            for cell in np.ndindex(*table.shape):
                place = {
                    self.columns[a].name: self.columns[a].cells[i]
                    for a, i in zip(axes, cell, strict=True)
                }
                value = float(table[cell])
                note = (
                    "consistent with the other margins, which makes the error smaller than stated"
                )
                yield Answer(
                    self.text, value, spread.deviation, (value - reach, value + reach), place, note
                )
