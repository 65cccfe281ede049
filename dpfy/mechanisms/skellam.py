"""Exact Skellam noise, many at a time: the difference of two Poisson numbers, each by inversion of
a certified table.

Sums of independent Skellam numbers are Skellam, and their variances add up: that is why shares of
noise are made of them.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.exact import Enclosure, exp_enclosure, rational
from dpfy.mechanisms.integers import FIRST, Integers, LawSteps

MOST_MEAN = 2048
"""Of a Poisson number that is drawn at once; a larger one is a sum of several."""
RARE = 200
"""The table ends where less than 2^-200 is left, which counts as its end."""


def skellam(count: int, variance: Fraction | int, bits: Bits) -> Integers:
    """`count` independent integers, each the difference of two Poisson numbers of mean variance /
    2.

    Guarantees: this law, given fair bits, up to a total variation of 2^-200 for each of the Poisson
    numbers.
    """
    mean = rational("variance", variance, Fraction(1, 1 << 40)) / 2
    if mean > 1 << 24:
        raise InvalidInput(
            "variance",
            variance,
            "must be at most 2^25: larger shares are drawn as discrete Gaussians",
        )
    parts = math.ceil(mean / MOST_MEAN)
    table = _table(mean / parts)
    size = check.integer("count", count, 0)
    out: Integers = table.search(bits.words(size), bits) - table.search(bits.words(size), bits)
    for _ in range(parts - 1):
        out += table.search(bits.words(size), bits) - table.search(bits.words(size), bits)
    return out


@lru_cache(maxsize=8)
def _table(mean: Fraction) -> LawSteps:
    return LawSteps(_sums(mean, FIRST), lambda k: lambda precision: _sums(mean, precision)[k])


@lru_cache(maxsize=2)
def _sums(mean: Fraction, precision: int) -> tuple[Enclosure, ...]:
    """P(at most k) of a Poisson number, for k from 0 on, each enclosed at a precision.

    Guarantees: exp(-mean) is enclosed, each weight is the one before it times mean / k, one copy
    rounded down and one up. What is left beyond the last one is below 2^-200: beyond k = 2 mean
    each weight is at most half of the one before it.
    """
    work = precision + math.ceil(3 * mean) + 2 * RARE
    low, high = exp_enclosure(mean, work)
    total_low, total_high, found, k = low, high, [], 0
    least = 1 << (work - RARE - 1)
    while k <= 2 * mean or high >= least:
        found.append(
            (
                total_low >> (work - precision),
                min(-(-total_high >> (work - precision)), 1 << precision),
            )
        )
        k += 1
        low = low * mean.numerator // (mean.denominator * k)
        high = -(-high * mean.numerator // (mean.denominator * k))
        total_low, total_high = total_low + low, total_high + high
    return tuple(found)
