"""Tails of integer noise, from certified enclosures: what is added to delta is never below the
truth.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from dpfy.mechanisms.exact import exp_enclosure

DIGITS = 80
"""Bits to which a tail is known."""
FAR = 800
"""Exponents beyond this are not told apart: exp(-800) is below every float."""


@lru_cache(maxsize=256)
def laplace_tail(parameter: Fraction, least: int) -> Fraction:
    """P(x >= least), rounded up, for P(x) proportional to exp(-parameter |x|).

    exp(-parameter m) / (1 + exp(-parameter)) for m = least >= 1; below that, one less the tail on
    the other side.
    """
    if least < 1:
        return 1 - _tail(parameter, 1 - least, up=False)
    return _tail(parameter, least, up=True)


def _tail(parameter: Fraction, m: int, up: bool) -> Fraction:
    if parameter * m > FAR:
        return (
            Fraction(exp_enclosure(Fraction(FAR), 2 * FAR)[1], 1 << 2 * FAR) if up else Fraction(0)
        )
    precision = DIGITS + math.ceil(2 * parameter * m)
    power, base = exp_enclosure(parameter * m, precision), exp_enclosure(parameter, precision)
    one = 1 << precision
    return Fraction(power[1], one + base[0]) if up else Fraction(power[0], one + base[1])


@lru_cache(maxsize=256)
def laplace_threshold(parameter: Fraction, tail: Fraction) -> int:
    """The least whole number t with P(x >= t) <= tail."""
    low, high = -1, 1
    while laplace_tail(parameter, high) > tail:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if laplace_tail(parameter, middle) > tail else (low, middle)
    return high


def gaussian_tail(ratio: float) -> float:
    """P(x >= m), rounded up, for a discrete Gaussian of parameter sigma >= 4 and ratio = (m - 1) /
    sigma.

    The sum over x >= m is at most the integral from m - 1, since the summands fall from 0 on; for m
    < 1 the bound is trivial.
    """
    return (
        1.0
        if ratio < 0
        else min(
            1.0, max(5e-324, math.erfc(ratio * (1 - 2.0**-45) / math.sqrt(2)) / 2 * (1 + 2.0**-40))
        )
    )


def as_float(value: Fraction) -> float:
    """A float at least as large."""
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)
