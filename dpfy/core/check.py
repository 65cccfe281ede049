"""One-line validation. Each check returns the value it accepted, or raises :class:`InvalidInput`
with name, value and rule.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real

from dpfy.core.errors import InvalidInput

MOST = 2**63 - 1
"""The largest whole number that arrays can count with."""
NOISE = (1e-4, 1e12)
RATE = 1e-15
STEPS = 2**40
RECORDS = 2**53
DELTA = 1e-300
EPSILON = (1e-9, 1e9)
"""What a plan may ask for. Beyond these numbers nothing is trained by anybody, and rounding says
nothing any more.
"""
SIDES, VALUES = 8, 2**27
"""The most sides, and the most values, of one record."""


def real(name: str, value: object) -> float:
    """A finite real number (no bool, no NaN)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not _finite(value):
        raise InvalidInput(name, value, "must be a finite number")
    return float(value)


def _finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def positive(name: str, value: object) -> float:
    """A finite number greater than zero."""
    if real(name, value) <= 0:
        raise InvalidInput(name, value, "must be greater than 0")
    return float(value)  # type: ignore[arg-type]


def nonnegative(name: str, value: object) -> float:
    """A finite number at least zero."""
    if real(name, value) < 0:
        raise InvalidInput(name, value, "must be at least 0")
    return float(value)  # type: ignore[arg-type]


def positive_or_infinite(name: str, value: object) -> float:
    """A number greater than zero; infinity is allowed."""
    return math.inf if value == math.inf else positive(name, value)


def inside_unit(name: str, value: object) -> float:
    """A number strictly between 0 and 1."""
    if not 0 < real(name, value) < 1:
        raise InvalidInput(name, value, "must lie strictly between 0 and 1")
    return float(value)  # type: ignore[arg-type]


def below_one(name: str, value: object) -> float:
    """At least 0 and below 1: a delta, of a pure guarantee too."""
    if not 0 <= (number := real(name, value)) < 1:
        raise InvalidInput(name, value, "must be at least 0 and below 1")
    return number


def rate(name: str, value: object) -> float:
    """A number in (0, 1]."""
    if not 0 < real(name, value) <= 1:
        raise InvalidInput(name, value, "must lie in (0, 1]")
    return float(value)  # type: ignore[arg-type]


def fraction(name: str, value: object) -> float:
    """A number in [0, 1]."""
    if not 0 <= real(name, value) <= 1:
        raise InvalidInput(name, value, "must lie in [0, 1]")
    return float(value)  # type: ignore[arg-type]


def integer(name: str, value: object, least: int = 1, most: int = MOST) -> int:
    """A whole number from `least` to `most`. Floats are refused even when whole."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InvalidInput(name, value, f"must be a whole number of at least {least}")
    if int(value) > most:
        raise InvalidInput(name, value, f"must be at most {most}")
    return int(value)


def shape(name: str, value: Sequence[object]) -> tuple[int, ...]:
    """The shape of one record: 1 to 8 whole numbers of at least 1, with a product of at most
    2^27.
    """
    if not 1 <= len(value) <= SIDES:
        raise InvalidInput(
            name, value, f"must be the shape of one record: 1 to {SIDES} whole numbers"
        )
    sides = tuple(integer(name, side, most=VALUES) for side in value)
    if math.prod(sides) > VALUES:
        raise InvalidInput(name, value, f"a record must have at most {VALUES} values")
    return sides


def noise_multiplier(name: str, value: object) -> float:
    """A noise multiplier of a plan: 0, or a number that noise can really have."""
    if nonnegative(name, value) and not NOISE[0] <= float(value) <= NOISE[1]:  # type: ignore[arg-type]
        raise InvalidInput(name, value, f"must be 0 or lie between {NOISE[0]:g} and {NOISE[1]:g}")
    return float(value)  # type: ignore[arg-type]


def sampling_rate(name: str, value: object) -> float:
    """A sampling rate of a plan: 0, or a number in [1e-15, 1]."""
    if fraction(name, value) and float(value) < RATE:  # type: ignore[arg-type]
        raise InvalidInput(name, value, f"must be 0 or at least {RATE:g}")
    return float(value)  # type: ignore[arg-type]


def delta(name: str, value: object) -> float:
    """The delta of a guarantee."""
    if inside_unit(name, value) < DELTA:
        raise InvalidInput(name, value, f"must be at least {DELTA:g}")
    return float(value)  # type: ignore[arg-type]


def epsilon(name: str, value: object) -> float:
    """An epsilon that is asked for."""
    if not EPSILON[0] <= positive(name, value) <= EPSILON[1]:
        raise InvalidInput(name, value, f"must lie between {EPSILON[0]:g} and {EPSILON[1]:g}")
    return float(value)  # type: ignore[arg-type]


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """A string out of a closed list; the message names the nearest spelling."""
    choices = list(allowed)
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise InvalidInput(name, value, f"must be one of {', '.join(choices)}{hint}")


def known_keys(name: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Refuse a misspelt or unknown key, naming the nearest known one."""
    for key in given:
        if key not in allowed:
            one_of(f"{name}.{key}" if name else key, key, sorted(allowed))


def one_line(name: str, value: object, most: int = 200) -> str:
    """Text of 1 to `most` characters that can be printed in one line."""
    if (
        not isinstance(value, str)
        or not value.strip()
        or not value.isprintable()
        or len(value) > most
    ):
        raise InvalidInput(name, value, f"must be one line of 1 to {most} printable characters")
    return value
