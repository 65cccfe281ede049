"""The number types and devices whose rounding is bounded here. All others are refused: a margin
that is guessed proves nothing.
"""

from __future__ import annotations

from dpfy.core.errors import Unsupported

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Names of torch's types in which gradients and sums may come."""
DEVICES = ("cpu", "cuda")
"""Kinds of torch devices that compute."""


def check_dtype(what: str, dtype: object) -> None:
    """Refuse a type whose rounding is not bounded here."""
    if (name := str(dtype).removeprefix("torch.")) not in DTYPES:
        raise Unsupported(f"{what} in {name}", f"supported types: {', '.join(DTYPES)}")


def check_device(what: str, kind: str) -> None:
    """Refuse a device whose arithmetic is not known here."""
    if kind not in DEVICES:
        raise Unsupported(
            f"{what} on a device of kind {kind!r}", f"supported devices: {', '.join(DEVICES)}"
        )
