"""Quantiles by the exponential mechanism on a public grid of values, with the mass of ties counted.

A value v is the quantile q of n numbers if (numbers below v) <= q n <= (numbers at or below v). The
loss of v is how many ranks it is off; for q = a/b it is a whole number of 1/b ranks, and one record
changes it by at most max(a, b - a) of them. Whole numbers with many ties are so found exactly:
every other value is off by whole groups of records.

Several quantiles are found by halving: the middle one first, then those on either side among the
numbers on that side. A record is on one side, so each of the ceil(log2(m + 1)) levels costs as much
as one quantile (Kaplan, Schnapp & Stemmer 2022). Numbers that tie with the value at which they are
parted are spread evenly over a finer grid first, so that the parts have the sizes that the next
level counts on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound, Bounded
from dpfy.engines.aggregates import Request
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import Expression, number
from dpfy.statistics.answer import Answer, percent, within
from dpfy.statistics.claim import BudgetShare, LevelledExponential, StatisticClaim
from dpfy.statistics.statistic import Spend, Statistic
from dpfy.tables.columns import RangedColumn
from dpfy.tables.schema import Schema

Codes = NDArray[np.int64]
MOST_VALUES = 1 << 20
FINE, FINEST = 1 << 17, 256
"""Places of the finer grid in all, and for each value."""


@dataclass(frozen=True)
class RankTarget:
    """What is looked for among n numbers: the value at which `share` n + `rank` of them are passed,
    counted from below.
    """

    share: Fraction
    rank: int = 0

    @property
    def change(self) -> int:
        """By how many parts of a rank one record can change the loss of a value."""
        a, b = self.share.numerator, self.share.denominator
        return max(a, b - a)

    def losses(self, counts: Codes) -> Codes:
        """How far each value is off, in parts of a rank."""
        a, b = self.share.numerator, self.share.denominator
        upto = np.cumsum(counts)
        due = a * (int(upto[-1]) if len(upto) else 0) + b * self.rank
        return np.maximum(np.maximum(b * (upto - counts) - due, due - b * upto), 0)


@dataclass(frozen=True)
class Quantiles(Statistic):
    """Quantiles of a column, all at once. `end` is low or high for the least or the largest value,
    found a few ranks inside.
    """

    column: RangedColumn
    shares: tuple[Fraction, ...]
    step: float
    end: str = ""

    @property
    def values(self) -> int:
        """How many values the grid has."""
        return math.floor((self.column.high - self.column.low) / self.step + 1e-9) + 1

    @property
    def fine(self) -> int:
        """Places of the finer grid for each value: one where nothing is parted."""
        return max(1, min(FINEST, FINE // self.values)) if len(self.shares) > 1 else 1

    @property
    def levels(self) -> int:
        """How often one record is looked at."""
        return len(self.shares).bit_length()

    @property
    def draws(self) -> int:
        """How many choices are made."""
        return self.groups.count * len(self.shares)

    def claim(
        self, contribution: ContributionLimit, share: BudgetShare, **about: Any
    ) -> StatisticClaim:
        """See `Statistic`."""
        epsilon, records = share.of_choice(self.levels), float(contribution.total)
        return self._claim(
            "exponential", epsilon, records, levels=self.levels, draws=self.draws, **about
        )

    def placed(self) -> Expression:
        """The place of a number on the grid."""
        low = self.column.low
        found = (number(self.column.name).filled(low) - low) / self.step
        return found.clip(0, self.values - 1).whole()

    def asked(
        self, schema: Schema, claim: StatisticClaim, contribution: ContributionLimit, key: str
    ) -> Request:
        """See `Statistic`."""
        counted = ~number(self.column.name).missing()
        return self.by_place(
            schema, (claim, contribution, key), self.placed(), self.values, counted
        )

    def spread(self, counts: Codes) -> Codes:
        """Counts on the grid as counts on the finer one: those of a value as evenly as can be.

        Guarantees: one record more changes one of the counts, by one.
        """
        fine = self.fine
        stride = next(k for k in range(max(1, round(0.618 * fine)), fine + 1) if gcd(k, fine) == 1)
        rank = np.empty(fine, np.int64)
        rank[np.arange(fine) * stride % fine] = np.arange(fine)
        return np.asarray(counts[:, None] // fine + (rank < counts[:, None] % fine)).ravel()

    def release(self, table: Any, spend: Spend) -> list[Answer]:
        """See `Statistic`. How many choices are made, and among how many values, does not depend on
        the data.
        """
        tool = spend.claim.tool
        assert isinstance(tool, LevelledExponential)
        chosen = _Chosen(self, tool, spend)
        found = []
        parts = self.histograms(table, spend, self.values)
        for mine, place in zip(parts, self.groups.places(), strict=True):
            for share, value in zip(self.shares, chosen.of(self.spread(mine)), strict=True):
                found.append(self._answer(share, value, place, chosen))
        return found

    def _answer(
        self, share: Fraction, place: int, group: dict[str, str], chosen: _Chosen
    ) -> Answer:
        value = min(self.column.low + (place // self.fine) * self.step, self.column.high)
        shown: float | int = (
            int(value) if float(value).is_integer() and abs(value) < 1e15 else value
        )
        where = within(group, {} if self.end else {"quantile": f"{float(share):g}"})
        off = math.ceil(chosen.reach)
        note = (
            f"its rank is off by at most {off} records in {percent(chosen.spend.level)} of releases"
        )
        if self.end:
            note = f"looked for {chosen.inside} records inside; {note}"
        return Answer(self.text, shown, place=where, note=note)


@dataclass
class _Chosen:
    """The choices of one release, in their order: each spends one step of the permit."""

    asked: Quantiles
    tool: LevelledExponential
    spend: Spend
    step: int = 0

    @property
    def records(self) -> int:
        """Of one unit, at most."""
        return self.spend.contribution.total

    @property
    def grain(self) -> float:
        """By how many ranks the probability of a value falls by a factor of e."""
        return 2 * self.records * self.tool.moves / self.tool.epsilon

    @property
    def inside(self) -> int:
        """How many ranks inside the least and the largest value are looked for: so many that noise
        alone hardly passes them.
        """
        return math.ceil(self.grain * math.log(20 * self.asked.values)) if self.asked.end else 0

    @property
    def reach(self) -> float:
        """How many ranks an answer is off at most, in `level` of releases."""
        levels, size = self.asked.levels, self.asked.values * self.asked.fine
        return levels * self.grain * math.log(size * levels / (1 - self.spend.level))

    def of(self, counts: Codes) -> list[int]:
        """The place of each share among these counts."""
        if self.asked.end:
            ends = counts if self.asked.end == "low" else counts[::-1]
            found = self._choose(ends, RankTarget(Fraction(0), self.inside))
            return [found if self.asked.end == "low" else len(counts) - 1 - found]
        return list(self._halved(counts, list(self.asked.shares), Fraction(0), Fraction(1), 0))

    def _halved(
        self, counts: Codes, shares: list[Fraction], low: Fraction, high: Fraction, start: int
    ) -> Iterator[int]:
        """The places of shares between `low` and `high`, whose numbers are all that is counted
        here.
        """
        if not shares:
            return
        middle = len(shares) // 2
        share = (shares[middle] - low) / (high - low)
        found = self._choose(counts, RankTarget(share))
        yield from self._halved(
            counts[: found + 1] * _below(found), shares[:middle], low, shares[middle], start
        )
        yield start + found
        yield from self._halved(
            counts[found:], shares[middle + 1 :], shares[middle], high, start + found
        )

    def _choose(self, counts: Codes, target: RankTarget) -> int:
        """One exponential mechanism, by losses of which one unit changes each by at most its
        records times `target.change`.
        """
        scores = Bounded(-target.losses(counts), Bound(linf=float(target.change * self.records)))
        self.step += 1
        return self.tool.release(
            scores, self.spend.permit, self.spend.randomness, self.step - 1
        ).value


def _below(found: int) -> Codes:
    """Ones before a place and zero at it: numbers at the place belong to the part above."""
    ones = np.ones(found + 1, np.int64)
    ones[found] = 0
    return ones


def share_of(value: float) -> Fraction:
    """A share as it is written in decimals."""
    if not 0 < check.real("query quantile", value) < 1:
        raise InvalidInput(
            "query quantile",
            value,
            "must lie strictly between 0 and 1; for the ends ask min or max",
        )
    found = Fraction(repr(float(value)))
    if found.denominator > 10**6:
        raise InvalidInput("query quantile", value, "must have at most 6 decimals")
    return found


def grid_of(column: RangedColumn, step: float | None) -> float:
    """The public grid: what is asked for; whole numbers where both ends are whole and the range is
    long; a thousandth of the range else.
    """
    length = column.high - column.low
    if step is None:
        whole = float(column.low).is_integer() and float(column.high).is_integer() and length >= 10
        step = 1.0 if whole and length < MOST_VALUES else length / 1000
    check.positive("query step", step)
    if length / step >= MOST_VALUES:
        raise InvalidInput(
            "query step", step, f"must leave at most {MOST_VALUES} values in the range"
        )
    if length / step < 1:
        raise InvalidInput(
            "query step", step, f"must be at most the length of the range, {length:g}"
        )
    return step
