"""One-line validation. Each check returns the value it accepted, or raises :class:`InvalidInput` with name, value and rule."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from numbers import Integral, Real

from dpfy.core.errors import InvalidInput


def real(name: str, value: object) -> float:
    """A finite real number (no bool, no NaN)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidInput(name, value, "must be a finite number")
    return float(value)


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


def integer(name: str, value: object, least: int = 1) -> int:
    """A whole number at least `least`. Floats are refused even when whole."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InvalidInput(name, value, f"must be a whole number of at least {least}")
    return int(value)


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
