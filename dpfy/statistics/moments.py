"""Counts, sums, means and variances of numbers in a public range.

Numbers are moved to t in [-1, 1] by the middle and the half length of their range. How many records
were summed is not public, so it is released together with the sums, under one charge:

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
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.values import Bound
from dpfy.engines.aggregates import Request
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import Expression, choose, number, of, unfit
from dpfy.mechanisms.grid import Grid
from dpfy.statistics.answer import Answer, NoiseLaw, ratio
from dpfy.statistics.claim import BudgetShare, StatisticClaim
from dpfy.statistics.statistic import Spend, SumStatistic, counted, grid_steps
from dpfy.tables.columns import Column, RangedColumn
from dpfy.tables.schema import Schema

Floats = NDArray[np.float64]
LINEAR = "the interval is by linear approximation"
PIN, CURVE = 0.5, 1.5
"""What a record adds to the count, beside t, for Gaussian noise: less noise on the sum, more on the
count. And the weight of t^2 - 1/2.
"""


def centred(column: RangedColumn) -> Expression:
    """A column in [-1, 1]; missing where a number is missing."""
    return ((number(column.name) - column.middle) / column.half).clip(-1.0, 1.0)


def present(*columns: RangedColumn) -> Expression:
    """The cell of a record, -1 where one of the numbers is missing."""
    first, *rest = (number(column.name).missing() for column in columns)
    return choose(reduce(lambda one, other: one | other, rest, first), -1, 0)


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

    def asked(
        self, schema: Schema, claim: StatisticClaim, contribution: ContributionLimit, key: str
    ) -> Request:
        """See `Statistic`."""
        return super().asked(schema, claim, self.once(contribution), key)

    def release(self, table: Any, spend: Spend) -> list[Answer]:
        """See `Statistic`."""
        return super().release(table, replace(spend, contribution=self.once(spend.contribution)))


@dataclass(frozen=True)
class UnfitStatistic(CountStatistic):
    """How many cells of a column are not what the schema says: missing, no number, no date, out of
    range or not listed. Rows that the schema leaves out are counted too.

    Guarantees: a count like any other: a record adds at most 1, by its own cell alone.
    """

    column: Column

    def placed(self) -> Expression:
        """See `SumStatistic`."""
        return choose(unfit(self.column.name), 0, -1)

    def group(self, schema: Schema) -> Expression:
        """See `Statistic`."""
        return self.groups.code(None)


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

    def rows(self, norm: str) -> tuple[Expression, list[Expression]]:
        """See `SumStatistic`."""
        return present(self.column), [number(self.column.name) - self.shift]

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

    def rows(self, norm: str) -> tuple[Expression, list[Expression]]:
        """See `SumStatistic`. Where the number of records is public, a missing number counts as the
        middle of the range.
        """
        t = centred(self.column)
        if self.records is not None:
            return of(0), self._powers(t.filled(0.0))
        cell = present(self.column)
        if norm == "l1":
            up, down = (of(1.0) + t) / 2.0, (of(1.0) - t) / 2.0
            if self.degree == 1:
                return cell, [down, up]
            return cell, [down * down, of(2.0) * up * down, up * up]
        return cell, [*self._powers(t), of(PIN)]

    def steps(self, norm: str, grid: Grid) -> list[Expression]:
        """See `SumStatistic`. The two numbers of a record are 1 together; on a grid too, so that one
        sum and the count give both.
        """
        if norm == "l2" or self.degree == 2 or self.records is not None or grid.exponent > 0:
            return super().steps(norm, grid)
        up = grid_steps(self.rows(norm)[1][1], grid, self.one(norm))
        return [of(2**-grid.exponent) - up, up]

    def _powers(self, t: Expression) -> list[Expression]:
        return [t] if self.degree == 1 else [t, of(CURVE) * (t * t - 0.5)]

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
