"""Real numbers that are known as closely as a comparison needs: certified enclosures, and uniform
numbers bit by bit.

Whether a uniform number U is below p is asked with more bits of U, and a closer p, until the answer
is certain. So it is true with probability p exactly, for any real p that can be enclosed. Integers
alone are used: no rounding is ever trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from dpfy.mechanisms.bits import Bits

Enclosure = tuple[int, int]
"""(low, high) at a precision b: the number lies between low / 2^b and high / 2^b."""

Enclosed = Callable[[int], Enclosure]
"""From a precision to an enclosure."""

MARGIN = 32
"""Bits by which a number is known more closely than the uniform number that it is compared with."""


class Uniform:
    """A uniform real number in [0, 1) whose first `length` bits are `value`; the next ones are
    drawn when a comparison needs them.
    """

    def __init__(self, bits: Bits, value: int = 0, length: int = 0) -> None:
        self.bits, self.value, self.length = bits, value, length

    def below(self, number: Enclosed) -> bool:
        """Whether it is below a number. Guarantees: for a fresh one, true with the probability that
        is the number, exactly.
        """
        while True:
            if self.length:
                low, high = number(self.length + MARGIN)
                if (self.value + 1) << MARGIN <= low:
                    return True
                if self.value << MARGIN >= high:
                    return False
            grain = self.bits.grain
            self.value, self.length = (
                self.value << grain | self.bits.take(grain),
                self.length + grain,
            )


def constant(number: Fraction) -> Enclosed:
    """A fraction in [0, 1]."""
    return lambda precision: (
        (number.numerator << precision) // number.denominator,
        -((-number.numerator << precision) // number.denominator),
    )


def exp(gamma: Fraction) -> Enclosed:
    """exp(-gamma) for gamma >= 0."""
    return lambda precision: exp_enclosure(gamma, precision)


def less(number: Enclosed) -> Enclosed:
    """One less a number."""

    def enclosed(precision: int) -> Enclosure:
        low, high = number(precision)
        return (1 << precision) - high, (1 << precision) - low

    return enclosed


def exp_enclosure(gamma: Fraction, precision: int) -> Enclosure:
    """exp(-gamma) enclosed at a precision, within a few units of the last bit.

    gamma is halved until it is below 1/256; the series alternates there, so that what is not summed
    is below the last term; the result is squared as often. Rounding: gamma is rounded down (its
    exponential moves by less than a unit), each term too, by less than two units.
    """
    if not gamma:
        return 1 << precision, 1 << precision
    halvings = (256 * gamma.numerator // gamma.denominator).bit_length()
    work = precision + halvings + 16
    x = (gamma.numerator << work - halvings) // gamma.denominator
    total = term = 1 << work
    count = 0
    while term:
        count += 1
        term = (term * x >> work) // count
        total += -term if count & 1 else term
    low, high = total - 2 * count - 2, total + 2 * count + 2
    for _ in range(halvings):
        low, high = low * low >> work, (high * high >> work) + 1
    return low >> (work - precision), min(-(-high >> (work - precision)), 1 << precision)
