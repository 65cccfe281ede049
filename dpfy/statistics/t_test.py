"""The t-test of a mean: an interval and a p-value for what the records are a sample of.

Count, sum and sum of squares are released once, as those of a variance are. The rest follows from
these numbers: the deviation of S - m N for a mean m is made of the sampling of N records and of the
noise on S and N, whose law is known. Both are drawn together (a parametric bootstrap). Where
noise leaves the variance or the number of records open, the end that makes the interval longer is
used, so that the level is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from dpfy.core.errors import Unsupported
from dpfy.engines.contributions import ContributionLimit
from dpfy.statistics.answer import Answer, NoiseLaw
from dpfy.statistics.claim import BudgetShare, StatisticClaim
from dpfy.statistics.moments import Floats, MomentStatistic

DRAWS = 8192
SURE = 0.98
"""The level of the ends of variance and number of records that are used."""
SAMPLING = "the interval covers sampling and noise"
FEW = "too few records to tell: the interval is all that is possible"


@dataclass(frozen=True)
class MeanTest(MomentStatistic):
    """Whether the mean of a column is `mean`, for records drawn independently.

    Guarantees: a record adds what it adds to a variance; all else follows from released numbers.
    """

    mean: float = 0.0

    def claim(
        self, contribution: ContributionLimit, share: BudgetShare, **about: Any
    ) -> StatisticClaim:
        """See `Statistic`."""
        if contribution.total > 1:
            raise Unsupported(
                "a t-test of several rows of a person, which are not independent,",
                "use one row of each person",
            )
        return super().claim(contribution, share, **about)

    def group_answers(self, sums: Floats, spread: NoiseLaw, norm: str) -> Iterator[Answer]:
        """See `SumStatistic`."""
        rows, _ = self.maps(norm)
        count, first, second = (float(v) for v in rows @ sums[0])
        sure = replace(spread, level=SURE)
        least = count - sure.reach(rows[0])
        middle, half = self.column.middle, self.column.half
        about, low, high = {"of": "mean"}, self.column.low, self.column.high
        if least < 2:
            yield Answer(self.text, middle, half, (low, high), about, FEW)
            yield Answer(self.text, 1.0, None, None, {"of": "p-value"}, FEW)
            return
        mean = min(max(first / count, -1.0), 1.0)
        slope = rows[2] - 2 * mean * rows[1] + mean * mean * rows[0]
        total = second - 2 * mean * first + mean * mean * count  # of squares about the mean
        total = max(total, 0.0) + sure.reach(slope)
        deviation = math.sqrt(min(total * count / (count - 1), count)) * _student(least, spread)
        drawn = _errors(deviation, rows[1] - mean * rows[0], spread)
        reach = float(np.quantile(drawn, spread.level, method="higher")) / least
        error = math.hypot(deviation, spread.error(rows[1] - mean * rows[0])) / count
        ends = (max(mean - reach, -1.0), min(mean + reach, 1.0))
        yield Answer(
            self.text,
            middle + half * mean,
            half * error,
            (middle + half * ends[0], middle + half * ends[1]),
            about,
            SAMPLING,
        )
        asked = (self.mean - middle) / half
        seen = abs(first - asked * count) * least / count
        drawn = _errors(deviation, rows[1] - asked * rows[0], spread)
        chance = (1 + int((drawn >= seen).sum())) / (1 + DRAWS)
        yield Answer(self.text, chance, None, None, {"of": "p-value"}, "covers sampling and noise")


def _student(count: float, spread: NoiseLaw) -> float:
    """How much longer an interval of Student's law is than a normal one."""
    from scipy.special import ndtri, stdtrit

    tail = (1 + spread.level) / 2
    return float(stdtrit(max(count - 1, 1.0), tail) / ndtri(tail))


def _errors(deviation: float, coefficients: Floats, spread: NoiseLaw) -> Floats:
    """Sizes of errors: of sampling with this deviation, and of noise with these coefficients."""
    normal, noise = _draws(spread.family, len(coefficients))
    return np.abs(deviation * normal + noise @ (coefficients * spread.scale))


@lru_cache(maxsize=8)
def _draws(family: str, width: int) -> tuple[Floats, Floats]:
    """Public draws of a normal number, and of noise of scale 1."""
    rng = np.random.default_rng(7)
    normal = rng.normal(size=DRAWS)
    draw = rng.normal if family == "gaussian" else rng.laplace
    return normal, draw(size=(DRAWS, width))
