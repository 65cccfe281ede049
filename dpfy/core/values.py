"""Values that carry their privacy state: bounded before noise, private after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from dpfy.core import check
from dpfy.core.unit import EXAMPLE, Unit

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """The largest L2 norm that one unit can contribute to a sum. Infinity means unbounded: no noise can protect it."""

    l2: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "l2", check.positive_or_infinite("bound.l2", self.l2))


@dataclass(frozen=True)
class Bounded(Generic[T]):
    """A sum over units that is still sensitive: each unit adds at most `bound` to `value`.

    Guarantees: whoever constructs it has clipped. Only :class:`dpfy.noise.stream.NoiseStream` turns it into a :class:`Private`.
    """

    value: T
    bound: Bound
    unit: Unit = EXAMPLE


@dataclass(frozen=True)
class Private(Generic[T]):
    """A released value: noise is in it, its bill is in the ledger, and any post-processing is free."""

    value: T
