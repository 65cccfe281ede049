"""The numbers that can be computed with: others overflow or underflow when they are squared or
divided by.
"""

from __future__ import annotations

import math
from fractions import Fraction

from dpfy.core import check
from dpfy.core.errors import InvalidInput

MOST_COUNT = 10**15
"""Releases of one kind, records and the like."""
LEAST_NOISE, MOST_NOISE = check.NOISE
"""Noise per sensitivity: less means an epsilon of tens of millions, more one that no number here
can tell from zero.
"""


def noise(field: str, value: float) -> None:
    """Refuse a noise, per sensitivity, that is out of reach."""
    if not LEAST_NOISE <= value <= MOST_NOISE:
        raise InvalidInput(field, value, f"must lie between {LEAST_NOISE:g} and {MOST_NOISE:g}")


def count(field: str, value: int) -> None:
    """Refuse a size that is out of reach."""
    if value > MOST_COUNT:
        raise InvalidInput(field, value, f"must be at most {MOST_COUNT:.0e}")


def cost(kind: str, *values: float) -> None:
    """Refuse an epsilon, a rho or a divergence that is out of reach."""
    for value in values:
        if value > MOST_NOISE:
            raise InvalidInput(kind, value, f"must be at most {MOST_NOISE:g}")


def rounded_up(exact: Fraction) -> float:
    """The least float that is not below an exact number."""
    value = float(exact)
    return value if Fraction(value) >= exact else math.nextafter(value, math.inf)
