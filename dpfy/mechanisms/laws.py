"""Laws on the integers from 0 on with weights exp(-rate k) or exp(-rate k^2), and their thresholds:
certified, as closely as asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate

from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.exact import bernoulli_exp, geometric
from dpfy.mechanisms.reals import Enclosure, exp_enclosure

RARE = 30
"""The table of a law ends at weights below exp(-30): less than 2^-40 is left, and drawn by
itself.
"""

FIRST = 192
"""The precision at which thresholds are computed first."""


@dataclass(frozen=True)
class Law:
    """P(k) proportional to exp(-rate k), or exp(-rate k^2) if `square`; doubled for k >= 1 if
    `folded` (k is then a magnitude).
    """

    rate: Fraction
    square: bool
    folded: bool

    @cached_property
    def size(self) -> int:
        """How many thresholds the table has: `size` or more is its tail."""
        return (
            math.isqrt(math.ceil(RARE / self.rate)) if self.square else math.ceil(RARE / self.rate)
        ) + 1

    def exponent(self, k: int | Fraction) -> Fraction:
        """Minus the logarithm of the weight of k."""
        return self.rate * (k * k if self.square else k)

    def threshold(self, k: int, precision: int) -> Enclosure:
        """P(at most k), for k below `size`, enclosed at a precision."""
        work = FIRST
        while work < precision + 64:
            work *= 2
        low, high = thresholds(self, work)[k]
        return low >> (work - precision), -(-high >> (work - precision))

    def tail(self, bits: Bits) -> int:
        """A draw of the law given that it is at least `size`: memoryless, or by rejection from a
        geometric number beyond that.
        """
        if not self.square:
            return self.size + geometric(self.rate, bits)
        while not bernoulli_exp(
            self.exponent(beyond := geometric(2 * self.size * self.rate, bits)), bits
        ):
            pass
        return self.size + beyond


@lru_cache(maxsize=1)  # one table, for the comparisons of a tie: it is large, and ties are rare
def thresholds(law: Law, work: int) -> list[Enclosure]:
    """P(at most k) for k below `law.size`, each enclosed by integers over 2^work.

    Guarantees: the weights, their sums and the sum of all are enclosed, and so are the quotients.
    """
    lows, highs = zip(*weights(law, work), strict=True)
    rest_low, rest_high = _rest(law, work, len(lows))
    sums_low, sums_high = (
        _sums((*lows, rest_low), law.folded),
        _sums((*highs, rest_high), law.folded),
    )
    one = 1 << work
    least, most = (
        (one << work) // sums_high[-1],
        -((-one << work) // sums_low[-1]),
    )  # one over the sum of all
    pairs = zip(sums_low[: law.size], sums_high[: law.size], strict=True)
    return [(low * least >> work, min((high * most >> work) + 1, one)) for low, high in pairs]


def _sums(parts: Iterable[int], folded: bool) -> list[int]:
    return list(
        accumulate(parts, lambda total, part: total + part + part if folded else total + part)
    )


def weights(law: Law, work: int) -> Iterator[Enclosure]:
    """exp(-rate k), or exp(-rate k^2), for k up to `law.size`, for squares further until they are
    below 2^(32 - work).

    Guarantees: enclosed by a recurrence, one copy of it rounded down and one up.
    """
    ratio_low, ratio_high = exp_enclosure(law.rate, work)
    bend_low, bend_high = exp_enclosure(2 * law.rate, work)
    low = high = 1 << work
    left = law.size
    while left >= 0 or (law.square and high >= 1 << 32):
        yield low, high
        low, high = low * ratio_low >> work, (high * ratio_high >> work) + 1
        if law.square:
            ratio_low, ratio_high = (
                ratio_low * bend_low >> work,
                (ratio_high * bend_high >> work) + 1,
            )
        left -= 1


def _rest(law: Law, work: int, first: int) -> Enclosure:
    """The sum of the weights from `first` on: at most a geometric series, a weight over one less
    the next ratio. Without squares, that.
    """
    low, high = exp_enclosure(law.exponent(first), work)
    ratio_low, ratio_high = exp_enclosure(law.exponent(first + 1) - law.exponent(first), work)
    one = 1 << work
    return 0 if law.square else (low << work) // (one - ratio_low), (high << work) // (
        one - ratio_high
    ) + 1
