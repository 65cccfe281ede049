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
from dpfy.engines.aggregates import SumRequest, engine_of
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import (
    Expression,
    choose,
    code,
    counted_where,
    number,
    of,
)
from dpfy.mechanisms.grid import Grid
from dpfy.statistics.answer import Answer, NoiseLaw, ratio
from dpfy.statistics.groups import Bins
from dpfy.statistics.statistic import SumStatistic, counted
from dpfy.tables.columns import RangedColumn, WordColumn
from dpfy.tables.schema import Schema

Floats = NDArray[np.float64]


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

    def placed(self) -> Expression:
        """The bin of a number; a missing one, or one outside the edges, has none."""
        found = self.bins.code()
        return counted_where(found, found < self.cells)

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

    def placed(self) -> Expression:
        """The combination of a record."""
        return _combined(self.columns)

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

    def right(self) -> Expression:
        """Whether both say the same. A word that is not listed is never right."""
        place = {word: k for k, word in enumerate(self.truth.words)}
        said = [place.get(word, -1) for word in self.guess.cells]
        return code(self.guess.name).lookup(said).equals(code(self.truth.name))

    def rows(self, norm: str) -> tuple[Expression, list[Expression]]:
        """See `SumStatistic`."""
        if self.whole:
            return choose(self.right(), 0, 1), []
        return of(0), [choose(self.right(), 0.5, -0.5)]

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

    def rows(self, norm: str) -> tuple[Expression, list[Expression]]:
        """See `SumStatistic`. The last class counts as having happened; other words add nothing."""
        low, high = self.probability.low, self.probability.high
        given = number(self.probability.name)
        share = (given.filled(low) - low) / (high - low) * float(self.bins)
        found = share.floor().clip(0, self.bins - 1)
        distance = (share - found) * 2.0 - 1.0
        codes, classes = code(self.label.name), len(self.label.words)
        cell = (found * 2.0 + choose(codes.equals(classes - 1), 1.0, 0.0)).whole()
        counted = ~given.missing() & (codes < classes)
        return counted_where(cell, counted), [of(1.0), distance / 2.0]

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


def _combined(columns: Sequence[WordColumn]) -> Expression:
    """The place of a record among all combinations of words."""
    first, *rest = columns
    found = code(first.name)
    for column in rest:
        found = found * len(column.cells) + code(column.name)
    return found


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

    def request(
        self,
        schema: Schema,
        contribution: ContributionLimit,
        norm: str,
        grid: Grid | None,
        key: str = "",
    ) -> SumRequest:
        """See `SumStatistic`."""
        width = self.width(norm)
        group, cells, start = self.group(schema), [], 0
        for axes in self.kept:
            place = _combined([self.columns[a] for a in axes])
            cells.append(group * width + place + start)
            start += math.prod(self.shape[a] for a in axes)
        return SumRequest(group, tuple(cells), (), contribution, key)

    def total(
        self,
        table: Any,
        contribution: ContributionLimit,
        norm: str,
        grid: Grid | None,
        key: str = "",
    ) -> Bounded[Any]:
        """See `SumStatistic`."""
        engine, width = engine_of(table), self.width(norm)
        asked = self.request(engine.schema, contribution, norm, grid, key)
        counts = engine.sums(asked).dense(self.groups.count * width)
        shape = (self.groups.count, 1, width)
        total = Bounded(counts.reshape(shape), contribution.bound(self.one(norm)))
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
                    "consistent with the other margins, which makes the error smaller than reported"
                )
                yield Answer(
                    self.text, value, spread.deviation, (value - reach, value + reach), place, note
                )
