"""Covariances of several columns in one release.

A record adds the matrix z z' of z = (1, t_1 ... t_d), where t_i in [-1, 1] is its number in the
i-th column. For Gaussian noise the entries off the diagonal are weighted by sqrt 2, so that the
entries on and above the diagonal have the L2 norm of the whole matrix, |z|^2 <= d + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from dpfy.core.values import Bound
from dpfy.engines.expressions import Expression, of
from dpfy.statistics.answer import Answer, NoiseLaw
from dpfy.statistics.moments import LINEAR, Floats, centred, present
from dpfy.statistics.statistic import SumStatistic
from dpfy.tables.columns import RangedColumn

FEW = "too few records to tell: the interval is all that is possible"


@dataclass(frozen=True)
class Covariance(SumStatistic):
    """Covariances of several columns, from the records in which all of them are there."""

    columns: tuple[RangedColumn, ...]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The entries on and above the diagonal of z z', where z_0 is 1."""
        return list(combinations_with_replacement(range(len(self.columns) + 1), 2))

    def weights(self, norm: str) -> Floats:
        """Off-diagonals count twice in the norm of a matrix."""
        return np.array([math.sqrt(2) if norm == "l2" and i != j else 1.0 for i, j in self.pairs])

    def one(self, norm: str) -> Bound:
        """|z|^2, or one for each entry."""
        return Bound(
            (len(self.columns) + 1) * (1 + 2.0**-48),
            self.weights(norm).sum() * (1 + 2.0**-48),
            self.weights(norm).max(),
        )

    def width(self, norm: str) -> int:
        """See `SumStatistic`."""
        return len(self.pairs)

    def rows(self, norm: str) -> tuple[Expression, list[Expression]]:
        """See `SumStatistic`."""
        z = [of(1.0), *map(centred, self.columns)]
        entries = zip(self.pairs, self.weights(norm).tolist(), strict=True)
        return present(*self.columns), [z[i] * z[j] * weight for (i, j), weight in entries]

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        weights = self.weights(norm)
        moments = sums[0] / weights
        for i, j in self.pairs:
            if i == 0:
                continue
            a, b = self.columns[i - 1], self.columns[j - 1]
            value, error, (low, high), note = self._pair(i, j, moments, weights, spread)
            scale = a.half * b.half
            ends = (low * scale, high * scale)
            yield Answer(
                self.text, value * scale, error * scale, ends, {"of": f"{a.name}, {b.name}"}, note
            )

    def _pair(
        self, i: int, j: int, moments: Floats, weights: Floats, spread: NoiseLaw
    ) -> tuple[float, float, tuple[float, float], str]:
        """E t_i t_j - E t_i E t_j with its error and interval."""
        low, high = (0.0, 1.0) if i == j else (-1.0, 1.0)
        count = moments[0]
        if count <= spread.reach([1.0]):
            return (low + high) / 2, (high - low) / 2, (low, high), FEW
        place = {pair: k for k, pair in enumerate(self.pairs)}
        first, second, both = (moments[place[pair]] / count for pair in ((0, i), (0, j), (i, j)))
        slope = np.zeros(len(self.pairs))
        for pair, change in (
            ((i, j), 1.0),
            ((0, i), -second),
            ((0, j), -first),
            ((0, 0), 2 * first * second - both),
        ):
            slope[place[pair]] += change / (weights[place[pair]] * count)
        value = min(max(both - first * second, low), high)
        reach = spread.reach(slope)
        return (
            value,
            spread.error(slope),
            (max(value - reach, low), min(value + reach, high)),
            LINEAR,
        )
