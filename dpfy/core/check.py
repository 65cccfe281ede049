"""One-line validation. Each check returns the value it accepted, or raises :class:`InvalidInput`
with name, value and rule.

The number types and kinds of devices whose rounding is bounded here, with what the bounds need.
All others are refused: a margin that is guessed proves nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real

from dpfy.core.errors import InvalidInput, Unsupported

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


def interval(name: str, value: object) -> tuple[float, float]:
    """A pair (low, high) with low < high."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInput(name, value, "must be two numbers: [low, high]")
    low, high = real(f"{name}[0]", value[0]), real(f"{name}[1]", value[1])
    if not low < high or not math.isfinite(high - low):
        raise InvalidInput(name, value, "low must be less than high")
    return low, high


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


@dataclass(frozen=True)
class NumberType:
    """What is known of the arithmetic in a number type."""

    unit: float
    """The relative error of one rounding: half the distance from 1 to the next number."""
    least: float
    """The smallest normal number: what one underflow can hide."""
    sums: str
    """The type in which its numbers are added."""
    gradient_margin: float
    """How far norms are inflated for what rounding does, relatively, to a gradient that is scaled
    and summed in this type.

    In float32: the norm of a product of two rows is too short by at most gamma(896 + 4) = 5.4e-5,
    relatively; rounding the multiplier, scaling by it and the product itself lengthen by 4 u =
    2.4e-7. Together less than 2^-14 = 6.1e-5. Clip rules add `norm_margin` for their own
    arithmetic. What may cancel is not here but in the norms: see
    ``dpfy.gradients.per_example.rounding``.
    """
    norm_margin: float
    """How far a norm that a clip rule was given in this type is inflated before it is compared with
    the bound. Engines hand over float64 upper bounds, with the rounding of narrower types already
    in them.
    """
    agreement: float
    """How far two right ways to compute a gradient in this type may be apart, relatively."""


DTYPES = {
    "float64": NumberType(2.0**-53, 2.0**-1022, "float64", 0.0, 2.0**-40, 1e-6),
    "float32": NumberType(2.0**-24, 2.0**-126, "float32", 2.0**-14, 2.0**-16, 1e-3),
    "bfloat16": NumberType(2.0**-8, 2.0**-126, "float32", 2.0**-6, 2.0**-7, 2.0**-4),
    "float16": NumberType(2.0**-11, 2.0**-14, "float32", 2.0**-8, 2.0**-7, 2.0**-6),
}
"""By the names of torch's types in which gradients and sums may come."""
DEVICES = ("cpu", "cuda")
"""By the kinds of torch devices that compute."""


@cache
def number_type(what: str, kind: object) -> NumberType:
    """The row of a type; `what` is in it.

    Raises:
        Unsupported: Rounding in this type is not bounded here.
    """
    found = DTYPES.get(name := str(kind).removeprefix("torch."))
    if found is None:
        raise Unsupported(f"{what} in {name}", f"supported types: {', '.join(DTYPES)}")
    return found


@cache
def device_kind(what: str, kind: str) -> None:
    """Check a kind of device; `what` is on it.

    Raises:
        Unsupported: The arithmetic of this kind is not known here.
    """
    if kind not in DEVICES:
        raise Unsupported(
            f"{what} on a device of kind {kind!r}", f"supported devices: {', '.join(DEVICES)}"
        )
