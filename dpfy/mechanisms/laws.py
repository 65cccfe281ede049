"""Laws on the integers from 0 on with weights exp(-rate k) or exp(-rate k^2), and their thresholds: certified, as closely as asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.exact import bernoulli_exp, geometric
from dpfy.mechanisms.reals import Enclosure, exp_enclosure

RARE = 30
"""The table of a law ends at weights below exp(-30): less than 2^-40 is left, and drawn by itself."""

FIRST = 192
"""The precision at which thresholds are computed first."""


@dataclass(frozen=True)
class Law:
    """P(k) proportional to exp(-rate k), or exp(-rate k^2) if `square`; doubled for k >= 1 if `folded` (k is then a magnitude)."""

    rate: Fraction
    square: bool
    folded: bool

    @cached_property
    def size(self) -> int:
        """How many thresholds the table has: `size` or more is its tail."""
        return (math.isqrt(math.ceil(RARE / self.rate)) if self.square else math.ceil(RARE / self.rate)) + 1

    def threshold(self, k: int, precision: int) -> Enclosure:
        """P(at most k), for k below `size`, enclosed at a precision."""
        work = FIRST
        while True:
            low, high = thresholds(self, work)[k]
            if work > precision and (high - low < 1 << (work - precision) or work > 4 * precision):
                return low >> (work - precision), -(-high >> (work - precision))
            work *= 2

    def tail(self, bits: Bits) -> int:
        """A draw of the law given that it is at least `size`: memoryless, or by rejection from a geometric number beyond that."""
        if not self.square:
            return self.size + geometric(self.rate, bits)
        while not bernoulli_exp(self.rate * (beyond := geometric(2 * self.size * self.rate, bits)) ** 2, bits):
            pass
        return self.size + beyond


@lru_cache(maxsize=64)
def thresholds(law: Law, work: int) -> list[Enclosure]:
    """P(at most k) for k below `law.size`, each enclosed by integers over 2^work."""
    sums, (least, most) = _sums(law, work)
    one = 1 << work
    return [((low << work) // most, min(-((-high << work) // least), one)) for low, high in sums]


def _sums(law: Law, work: int) -> tuple[list[Enclosure], Enclosure]:
    """The sums of the weights up to k, for k below `law.size`, and of all of them.

    Guarantees: the weights are enclosed by a recurrence, one copy of it rounded down and one up. What is not summed is at most a geometric
    series: the next weight over one less the next ratio; for exp(-rate k) it is that.
    """
    one, double = 1 << work, 1 if law.folded else 0
    ratio_low, ratio_high = exp_enclosure(law.rate, work)
    bend_low, bend_high = exp_enclosure(2 * law.rate, work) if law.square else (one, one)
    low = high = sum_low = sum_high = one
    sums = [(one, one)]
    while len(sums) < law.size or (law.square and high >= 1 << 32):
        low, high = low * ratio_low >> work, (high * ratio_high >> work) + 1
        ratio_low, ratio_high = ratio_low * bend_low >> work, (ratio_high * bend_high >> work) + 1
        sum_low, sum_high = sum_low + (low << double), sum_high + (high << double)
        if len(sums) < law.size:
            sums.append((sum_low, sum_high))
    low, high = low * ratio_low >> work, (high * ratio_high >> work) + 1
    ratio_low, ratio_high = ratio_low * bend_low >> work, (ratio_high * bend_high >> work) + 1
    rest_low = 0 if law.square else (low << work) // (one - ratio_low)
    rest_high = (high << work) // (one - ratio_high) + 1
    return sums, (sum_low + (rest_low << double), sum_high + (rest_high << double))
