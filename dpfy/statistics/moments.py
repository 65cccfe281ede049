"""Counts, sums, means and variances of numbers in a public range.

Numbers are moved to t in [-1, 1] by the middle and the half length of their range. How many records
were summed is not public, so it is released together with the sums, under one bill:

L1 (Laplace noise): the Bernstein polynomials of u = (1 + t)/2 of the degree needed are nonnegative
and sum to 1, so a record adds a vector of L1 norm 1 exactly, and their sums give the count and all
moments up to that degree. Splitting epsilon between a sum and a count would cost more.

L2 (Gaussian noise): t and t^2 - 1/2, centred, beside a constant of 1/2: the count costs little of
the joint L2 norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.values import Bound
from dpfy.statistics.answer import Answer, NoiseLaw, ratio
from dpfy.statistics.claim import BudgetShare, StatisticClaim
from dpfy.statistics.statistic import Spend, SumStatistic, counted
from dpfy.statistics.units import ContributionLimit
from dpfy.tables.columns import Column, RangedColumn
from dpfy.tables.table import PrivateTable

Floats = NDArray[np.float64]
LINEAR = "the interval is by linear approximation"
PIN, CURVE = 0.5, 1.5
"""What a record adds to the count, beside t, for Gaussian noise: less noise on the sum, more on the
count. And the weight of t^2 - 1/2.
"""


def centred(column: RangedColumn, table: PrivateTable) -> Floats:
    """A column in [-1, 1]; NaN where a number is missing."""
    return np.clip((table.numbers(column.name) - column.middle) / column.half, -1.0, 1.0)


def present(values: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The cell of each record, -1 where a number is missing, and the numbers with zeros for
    those.
    """
    missing: NDArray[np.bool_] = np.asarray(np.isnan(values).any(axis=1))
    return np.where(missing, -1, 0), np.where(missing[:, None], 0.0, values)


@dataclass(frozen=True)
class CountStatistic(SumStatistic):
    """How many records there are."""

    @property
    def whole(self) -> bool:
        """Ones."""
        return True

    def one(self, norm: str) -> Bound:
        """A record counts once."""
        return Bound.scalar(1.0)

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        yield counted(self.text, [sums[0, 0]], spread, {})


@dataclass(frozen=True)
class DistinctStatistic(CountStatistic):
    """How many different persons the records belong to.

    Guarantees: of a person's records in a group only the first counts, so a person adds at most 1
    to a group, and to at most as many groups as the limits of the query allow, k. The released
    counts move by at most 1 in each coordinate, by k in L1 and by sqrt k in L2; without groups by 1.
    """

    column: Column

    def once(self, contribution: ContributionLimit) -> ContributionLimit:
        """One record of a person in each group."""
        if not self.groups.by:
            return ContributionLimit(1)
        groups = min(contribution.groups or contribution.records, contribution.records)
        return ContributionLimit(groups, groups, 1)

    def claim(
        self, contribution: ContributionLimit, share: BudgetShare, **about: Any
    ) -> StatisticClaim:
        """See `Statistic`."""
        return super().claim(self.once(contribution), share, **about)

    def release(self, table: PrivateTable, spend: Spend) -> list[Answer]:
        """See `Statistic`."""
        return super().release(table, replace(spend, contribution=self.once(spend.contribution)))


@dataclass(frozen=True)
class UnfitStatistic(CountStatistic):
    """How many cells of a column are not what the schema says: missing, no number, no date, out of
    range or not listed. Rows that the schema leaves out are counted too.

    Guarantees: a count like any other: a record adds at most 1, by its own cell alone.
    """

    column: Column

    def placed(self, table: PrivateTable) -> NDArray[np.int64]:
        """See `SumStatistic`."""
        return np.where(table.unfit(self.column.name), 0, -1)

    def used(
        self, table: PrivateTable, contribution: ContributionLimit, counted: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See `Statistic`."""
        groups = np.where(counted, self.groups.codes(table, every_row=True), -1)
        return groups, contribution.kept(table.owners, groups)


@dataclass(frozen=True)
class TotalStatistic(SumStatistic):
    """The sum of a column. Where the number of records is public, of the deviations from the middle
    of the range.
    """

    column: RangedColumn

    @property
    def shift(self) -> float:
        """What is subtracted from each number."""
        return self.column.middle if self.records is not None else 0.0

    def one(self, norm: str) -> Bound:
        """The number that is farthest from zero."""
        return Bound.scalar(
            max(abs(self.column.low - self.shift), abs(self.column.high - self.shift))
        )

    def rows(self, table: PrivateTable, norm: str) -> tuple[NDArray[np.int64], Floats]:
        """See `SumStatistic`."""
        return present(table.numbers(self.column.name)[:, None] - self.shift)

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        value, reach = float(sums[0, 0]) + self.shift * (self.records or 0), spread.reach([1.0])
        yield Answer(self.text, value, spread.deviation, (value - reach, value + reach))


@dataclass(frozen=True)
class MomentStatistic(SumStatistic):
    """Mean, and variance or standard deviation (`degree` 2), of a column."""

    column: RangedColumn
    degree: int
    root: bool = False

    def one(self, norm: str) -> Bound:
        """L1: a vector of sum 1. L2: t, t^2 - 1/2 and the pin; without the pin where the number of
        records is public.
        """
        pin = 0.0 if self.records is not None else PIN
        if self.records is None and norm == "l1":
            return Bound(1.0, 1.0, 1.0)
        if self.degree == 1:
            return Bound(math.hypot(1, pin), 1 + pin, 1.0)
        return Bound(math.sqrt(1 + CURVE**2 / 4 + pin * pin), 1 + CURVE / 2 + pin, 1.0)

    def width(self, norm: str) -> int:
        """See `SumStatistic`."""
        return self.degree + (self.records is None)

    def rows(self, table: PrivateTable, norm: str) -> tuple[NDArray[np.int64], Floats]:
        """See `SumStatistic`. Where the number of records is public, a missing number counts as the middle
        of the range.
        """
        t = centred(self.column, table)[:, None]
        if self.records is not None:
            return np.zeros(len(t), np.int64), self._powers(np.nan_to_num(t))
        cells, t = present(t)
        if norm == "l1":
            up, down = (1 + t) / 2, (1 - t) / 2
            parts = (down, up) if self.degree == 1 else (down * down, 2 * up * down, up * up)
            return cells, np.concatenate(parts, axis=1)
        return cells, np.concatenate([self._powers(t), np.full_like(t, PIN)], axis=1)

    def _powers(self, t: Floats) -> Floats:
        return t if self.degree == 1 else np.concatenate([t, CURVE * (t * t - 0.5)], axis=1)

    def maps(self, norm: str) -> tuple[Floats, float]:
        """Rows that take the released numbers to the count, the sum of t and the sum of t^2; and a
        count that is public.
        """
        if self.records is None and norm == "l1":
            # t is u - v, and t^2 is u^2 - 2uv + v^2
            two, three = ((1, 1), (-1, 1)), ((1, 1, 1), (-1, 0, 1), (1, -1, 1))
            return np.array(two if self.degree == 1 else three, np.float64), 0.0
        width = self.width(norm)
        unit = np.eye(width)
        count = np.zeros(width) if self.records is not None else unit[-1] / PIN
        rows = (
            [count, unit[0]] if self.degree == 1 else [count, unit[0], unit[1] / CURVE + count / 2]
        )
        return np.array(rows), float(self.records or 0)

    def leading(self, norm: str) -> list[float]:
        """The sum of t, or of t^2."""
        return [float(v) for v in self.maps(norm)[0][-1]]

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        rows, known = self.maps(norm)
        if self.degree == 1:
            value, error, (low, high) = ratio(rows[1], rows[0], sums[0], spread, (-1.0, 1.0), known)
            middle, half = self.column.middle, self.column.half
            yield Answer(
                self.text,
                middle + half * value,
                half * error,
                (middle + half * low, middle + half * high),
            )
        else:
            yield self._variance(rows, known, sums[0], spread)

    def _variance(self, rows: Floats, known: float, sums: Floats, spread: NoiseLaw) -> Answer:
        """E t^2 - (E t)^2, with an interval by its slope."""
        count, first, second = rows @ sums + np.array([known, 0.0, known / 2 if known else 0.0])
        if count <= spread.reach(rows[0]):
            shown = self._shown(0.5, 0.5, (0.0, 1.0))
            return Answer(
                self.text,
                *shown,
                note="too few records to tell: the interval is all that is possible",
            )
        m = min(max(first / count, -1.0), 1.0)
        value = min(max(second / count - m * m, 0.0), 1.0)
        slope = (rows[2] - 2 * m * rows[1] + (2 * m * m - second / count) * rows[0]) / count
        reach, error = spread.reach(slope), spread.error(slope)
        return Answer(
            self.text,
            *self._shown(value, error, (max(value - reach, 0.0), min(value + reach, 1.0))),
            note=LINEAR,
        )

    def _shown(
        self, value: float, error: float, ends: tuple[float, float]
    ) -> tuple[float, float, tuple[float, float]]:
        """In the units of the data."""
        half = self.column.half
        if not self.root:
            return value * half**2, error * half**2, (ends[0] * half**2, ends[1] * half**2)
        root = math.sqrt(value)
        spread = error / (2 * root) if error < 2 * root else math.sqrt(error)
        return root * half, spread * half, (math.sqrt(ends[0]) * half, math.sqrt(ends[1]) * half)
