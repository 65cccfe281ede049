"""The number types and kinds of devices whose rounding is bounded here, with what the bounds need.
All others are refused: a margin that is guessed proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core.errors import Unsupported


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


@dataclass(frozen=True)
class DeviceKind:
    """What is known of the arithmetic on a kind of device."""

    probe_units: int
    """In units of its arithmetic, how far a row of a gradient may be from its expected multiple,
    where the place of the batch is measured.

    Weights are powers of two, so what one example alone made is multiplied exactly, but for sums
    that a GPU adds in any order; what has a small part of another example is not. Where products of
    float32 may run in TF32, a sum that differs in its last bit is rounded to a number 2^-10 away by
    the next product.
    """


DTYPES = {
    "float64": NumberType(2.0**-53, 2.0**-1022, "float64", 0.0, 2.0**-40, 1e-6),
    "float32": NumberType(2.0**-24, 2.0**-126, "float32", 2.0**-14, 2.0**-16, 1e-3),
    "bfloat16": NumberType(2.0**-8, 2.0**-126, "float32", 2.0**-6, 2.0**-7, 2.0**-4),
    "float16": NumberType(2.0**-11, 2.0**-14, "float32", 2.0**-8, 2.0**-7, 2.0**-6),
}
"""By the names of torch's types in which gradients and sums may come."""
DEVICES = {"cpu": DeviceKind(2**6), "cuda": DeviceKind(2**12)}
"""By the kinds of torch devices that compute."""


def number_type(what: str, dtype: object) -> NumberType:
    """The row of a type; `what` is in it.

    Raises:
        Unsupported: Rounding in this type is not bounded here.
    """
    found = DTYPES.get(name := str(dtype).removeprefix("torch."))
    if found is None:
        raise Unsupported(f"{what} in {name}", f"supported types: {', '.join(DTYPES)}")
    return found


def device_kind(what: str, kind: str) -> DeviceKind:
    """The row of a kind of device; `what` is on it.

    Raises:
        Unsupported: The arithmetic of this kind is not known here.
    """
    if (found := DEVICES.get(kind)) is None:
        raise Unsupported(
            f"{what} on a device of kind {kind!r}", f"supported devices: {', '.join(DEVICES)}"
        )
    return found


def check_dtype(what: str, dtype: object) -> None:
    """Refuse a type whose rounding is not bounded here."""
    number_type(what, dtype)


def check_device(what: str, kind: str) -> None:
    """Refuse a device whose arithmetic is not known here."""
    device_kind(what, kind)
