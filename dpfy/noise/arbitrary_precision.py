"""Real Gaussian numbers, to as many digits as a decision needs: what exact noise falls back on
where floating point cannot tell.

Two words of a cipher, and further digits behind each of them, are two uniform real numbers, and
these are a pair of independent Gaussian ones by the formula of Box & Muller (1958). Everything here
is slow and obvious; it is asked for one value in a hundred million.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_FLOOR, Context, Decimal, localcontext
from functools import cache

DIGITS = 24
"""Bytes behind a word: with 8 of the word, 256 bits of each uniform number."""
PRECISION = 100
"""Decimal digits of the arithmetic: some twenty more than the numbers have."""
CONTEXT = Context(prec=PRECISION)


def pair(first: int, second: int, behind: bytes, bits: int = 64) -> tuple[Decimal, Decimal]:
    """The pair of Gaussian numbers of two signed words of so many `bits`, and of the digits that
    follow each of them.

    With k the word and 0 <= V < 1 its further digits, (k + V) / 2^(bits - 1) is uniform between -1
    and 1; u is the size of the first, and the angle is pi times the second. The pair is sqrt(-2 log
    u) times cosine and sine of the angle.
    """
    with localcontext(CONTEXT):
        x, a = (
            Decimal((word << 8 * DIGITS) + int.from_bytes(part, "little"))
            / (1 << 8 * DIGITS + bits - 1)
            for word, part in ((first, behind[:DIGITS]), (second, behind[DIGITS:]))
        )
        return polar(abs(x) or Decimal(1) / (1 << 8 * DIGITS + bits), a)


def polar(u: Decimal, part: Decimal) -> tuple[Decimal, Decimal]:
    """sqrt(-2 log u) times cosine and sine of `part` of half a circle, which lies between -1 and
    1.
    """
    with localcontext(CONTEXT):
        radius, (sine, cosine) = (-2 * u.ln()).sqrt(), _turn(part)
        return radius * cosine, radius * sine


def floor(parts: Iterable[float], noise: Iterable[tuple[Decimal, Decimal]]) -> int:
    """The largest whole number up to the sum of `parts` and of weights times noise, without any
    rounding that could tell.
    """
    with localcontext(CONTEXT):
        total = sum((Decimal(p) for p in parts), Decimal(0)) + sum(
            (w * z for w, z in noise), Decimal(0)
        )
        return int(total.to_integral_value(ROUND_FLOOR))


def _turn(part: Decimal) -> tuple[Decimal, Decimal]:
    """Sine and cosine of `part` of half a circle."""
    quarter = int((part * 2).to_integral_value())
    x = (part - Decimal(quarter) / 2) * pi()
    sine, cosine, term = Decimal(0), Decimal(0), Decimal(1)
    for n in range(1, 80):
        if n % 2:
            cosine += term if n % 4 == 1 else -term
        else:
            sine += term if n % 4 == 2 else -term
        term = term * x / n
    for _ in range(quarter % 4):
        sine, cosine = cosine, -sine
    return sine, cosine


@cache
def pi() -> Decimal:
    """By Machin's formula, in whole numbers."""
    one = 10 ** (PRECISION + 10)

    def inverse_tangent(n: int) -> int:
        total, power, k = 0, one // n, 1
        while power:
            total += power // k if k % 4 == 1 else -(power // k)
            power, k = power // (n * n), k + 2
        return total

    with localcontext(CONTEXT):
        return Decimal(4 * (4 * inverse_tangent(5) - inverse_tangent(239))) / one
