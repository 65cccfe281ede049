"""Clip rules: from per-unit gradient norms to multipliers that keep every contribution within a known bound.

A rule is frozen data. It carries its own bound, and noise reads the bound from it: there is one owner of the clip norm.
This module imports no torch, so that a plan can be made, saved and loaded without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound

if TYPE_CHECKING:
    from torch import Tensor

LEAST_NORM = 1e-12
"""Smaller clip norms would sit where squared float32 norms underflow."""

MARGIN = {"torch.float64": 2.0**-40, "torch.float32": 2.0**-16}
"""How far a computed norm is inflated before it is compared with the bound, by the dtype it was accumulated in."""


class Clip(Protocol):
    """A clip rule: groups of parameters, and a multiplier for each group and unit."""

    @property
    def bound(self) -> Bound:
        """The largest L2 norm of one unit's whole contribution, over all groups together."""
        ...

    def groups(self, names: Sequence[str]) -> list[int]:
        """The index of the clip group of each parameter name."""
        ...

    def scale(self, squared_norms: Tensor) -> Tensor:
        """[groups, batch] squared norms to [groups, batch] multipliers."""
        ...


@dataclass(frozen=True)
class FlatClip:
    """Scale each unit's whole gradient down to L2 norm `norm`; shorter gradients pass unchanged.

    Guarantees: a contribution multiplied by its scale has norm at most `norm`, rounding included; a non-finite one gets scale 0.
    """

    norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checked_norm("clip_norm", self.norm))

    @property
    def bound(self) -> Bound:
        """`norm`: all parameters are one group."""
        return Bound(l2=self.norm)

    def groups(self, names: Sequence[str]) -> list[int]:
        """All parameters in group 0."""
        return [0] * len(names)

    def scale(self, squared_norms: Tensor) -> Tensor:
        """min(1, norm / ||g||), rounded down; 0 where the norm is not finite."""
        return shrink(squared_norms, self.norm)


def checked_norm(name: str, value: object) -> float:
    """A clip norm: at least `LEAST_NORM`, or infinity."""
    norm = check.positive_or_infinite(name, value)
    if norm < LEAST_NORM:
        raise InvalidInput(name, value, f"must be at least {LEAST_NORM:g}")
    return norm


def inflated_norms(squared_norms: Tensor) -> Tensor:
    """Norms from squared norms, rounded up by more than the arithmetic that made them can have lost."""
    return squared_norms.clamp(min=0).sqrt() * (1.0 + MARGIN.get(str(squared_norms.dtype), 2.0**-7))


def only_finite(scales: Tensor, squared_norms: Tensor) -> Tensor:
    """`scales`, with exactly 0 where the squared norm is NaN or infinite."""
    return scales.masked_fill(~squared_norms.isfinite(), 0.0)


def shrink(squared_norms: Tensor, norm: float) -> Tensor:
    """min(1, norm / ||g||) with ||g|| rounded up; 0 for non-finite norms; exactly 1 everywhere else when `norm` is infinite."""
    if math.isinf(norm):
        return only_finite(squared_norms.new_ones(squared_norms.shape), squared_norms)
    return only_finite((norm / inflated_norms(squared_norms)).clamp(max=1.0), squared_norms)


CLIPS: dict[str, type] = {"flat": FlatClip}
"""The fixed table of names under which clip rules are saved as JSON."""
