"""Values that carry their privacy state: bounded before noise, private after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.unit import EXAMPLE, Unit

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """The largest L2, L1 and L-infinity norm of what one unit adds. Infinity means unbounded: no
    noise that needs it can protect it.

    What follows from the norms that are given is filled in: no L2 norm is above the L1 norm, or
    above the root of the product of the L1 and the L-infinity norm, and no L-infinity norm is above
    the L2 norm.
    """

    l2: float = math.inf
    l1: float = math.inf
    linf: float = math.inf

    def __post_init__(self) -> None:
        norms = (self.l2, self.l1, self.linf)
        try:
            self.__dict__.update(_norms(*norms))
        except TypeError:  # what cannot be looked up is no number, and is refused by name
            self.__dict__.update(_norms.__wrapped__(*norms))

    @classmethod
    def scalar(cls, most: float) -> Bound:
        """Of one number, whose norms are all the same."""
        return cls(most, most, most)

    def finite(self, norm: str, what: str) -> float:
        """The norm called `norm`, which `what` cannot do without."""
        if math.isinf(value := float(getattr(self, norm))):
            way_out = (
                f"bound what one unit adds: clip to Bound({norm}=...), or use a mechanism for a "
                f"norm that is bounded"
            )
            raise Unsupported(f"{what} on a value without a bound on its {norm} norm", way_out)
        return value


@lru_cache(maxsize=256, typed=True)
def _norms(l2: float, l1: float, linf: float) -> dict[str, float]:
    """The norms, checked, and what follows from them. A step of training makes bounds of the same
    norms as the one before it.
    """
    l2, l1, linf = (
        check.positive_or_infinite(f"bound.{n}", v)
        for n, v in (("l2", l2), ("l1", l1), ("linf", linf))
    )
    l2 = min(l2, l1, math.sqrt(l1) * math.sqrt(linf) * (1 + 2.0**-50))
    return {"l2": l2, "l1": l1, "linf": min(linf, l2)}


@dataclass(frozen=True)
class Bounded(Generic[T]):
    """A sum over units that is still sensitive: each unit adds at most `bound` to `value`.

    Guarantees: whoever constructs it has clipped. Only :class:`dpfy.noise.stream.NoiseStream` and
    the mechanisms of
    :mod:`dpfy.mechanisms` turn it into a :class:`Private`.
    """

    value: T
    bound: Bound
    unit: Unit = EXAMPLE


@dataclass(frozen=True)
class Private(Generic[T]):
    """A released value: noise is in it, its bill is in the ledger, and any post-processing is
    free.
    """

    value: T
