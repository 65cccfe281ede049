"""Clip rules: from per-unit gradient norms to multipliers that keep every contribution within a
known bound.

A rule is frozen data. It carries its own bound, and noise reads the bound from it: there is one
owner of the clip norm. This module imports no torch, so that a plan can be made, saved and loaded
without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound

if TYPE_CHECKING:
    from torch import Tensor

COUNT = "clip.count"
"""The name under which a bounded sum carries the count coordinate of :class:`QuantileClip`."""

LEAST_NORM = 1e-9
"""With smaller clip norms, what float32 products hide when they underflow would no longer be far
below the bound.
"""

MOST_SCALE = 2.0**100
"""No gradient is multiplied by more: the multiplier must be a float32 number."""


class Clip(Protocol):
    """A clip rule: groups of parameters, and a multiplier for each group and unit.

    A rule states its `bound` and its `scale`. The rest is the identity unless it says otherwise:
    one group, nothing in the sum beside the gradients, the same rule at every step.
    """

    coordinates: ClassVar[tuple[str, ...]] = ()
    """Names of the scalars that the sum carries beside the gradients; the bound covers them."""

    @property
    def bound(self) -> Bound:
        """The largest L2 norm of one unit's whole contribution, over all groups and coordinates
        together.
        """
        ...

    def scale(self, squared_norms: Tensor) -> Tensor:
        """[groups, batch] squared norms to [groups, batch] multipliers."""
        ...

    def groups(self, names: Sequence[str]) -> list[int]:
        """The index of the clip group of each parameter name: all parameters in group 0."""
        return [0] * len(names)

    def beside(self, scale: Tensor) -> dict[str, Tensor]:
        """The sums of the `coordinates` over units with these multipliers; units with multiplier 0
        in every group add nothing.
        """
        return {}

    def after(self, released: Mapping[str, Tensor], expected_batch: float) -> Clip:
        """The rule of the next step, from what this one released (means over `expected_batch`):
        this one.
        """
        return self


@dataclass(frozen=True)
class FlatClip(Clip):
    """Scale each unit's whole gradient down to L2 norm `norm`; shorter gradients pass unchanged.

    Guarantees: a contribution multiplied by its scale has norm at most `norm`, rounding included; a
    non-finite one gets scale 0.
    """

    norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checked_norm("clip_norm", self.norm))

    @property
    def bound(self) -> Bound:
        """`norm`: all parameters are one group."""
        return Bound(l2=self.norm)

    def scale(self, squared_norms: Tensor) -> Tensor:
        """min(1, norm / ||g||), rounded down; 0 where the norm is not finite."""
        return shrink(squared_norms, self.norm)


def checked_norm(name: str, value: object) -> float:
    """A clip norm: at least `LEAST_NORM`, or infinity."""
    norm = check.positive_or_infinite(name, value)
    if norm < LEAST_NORM:
        raise InvalidInput(name, value, f"must be at least {LEAST_NORM:g}")
    return norm


def margin_of(squared_norms: Tensor) -> float:
    """How far norms of this dtype are inflated."""
    return check.number_type("norms", squared_norms.dtype).norm_margin


def inflated_norms(squared_norms: Tensor) -> Tensor:
    """Norms from squared norms, rounded up by more than the arithmetic that made them can have
    lost.
    """
    return squared_norms.clamp(min=0).sqrt() * (1.0 + margin_of(squared_norms))


def only_finite(scales: Tensor, squared_norms: Tensor) -> Tensor:
    """`scales`, with exactly 0 where the squared norm is NaN or infinite."""
    return scales.masked_fill(~squared_norms.isfinite(), 0.0)


def shrink(squared_norms: Tensor, norm: float) -> Tensor:
    """min(1, norm / ||g||) with ||g|| rounded up; 0 for non-finite norms; exactly 1 everywhere else
    when `norm` is infinite.
    """
    if math.isinf(norm):
        return only_finite(squared_norms.new_ones(squared_norms.shape), squared_norms)
    lower = norm / (1.0 + margin_of(squared_norms))
    return squared_norms.clamp(min=0).rsqrt().mul_(lower).clamp_(max=1.0).nan_to_num_(nan=0.0)


@dataclass(frozen=True)
class PerLayerClip(Clip):
    """Clip every layer by itself, each to an equal share of the budget: `norm` / sqrt(number of
    layers).

    A layer is a module: parameters whose names differ only after the last dot belong together.
    Cheaper to track than one norm over the whole model, and worse where layers differ in gradient
    size.
    """

    norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checked_norm("clip_norm", self.norm))

    @property
    def bound(self) -> Bound:
        """`norm`: the squares of the shares add up to its square."""
        return Bound(l2=self.norm)

    def groups(self, names: Sequence[str]) -> list[int]:
        """One group for each module path."""
        order: dict[str, int] = {}
        return [order.setdefault(name.rpartition(".")[0], len(order)) for name in names]

    def scale(self, squared_norms: Tensor) -> Tensor:
        """min(1, share / ||g of the layer||), rounded down."""
        share = self.norm / math.sqrt(len(squared_norms))
        return shrink(squared_norms, share * (1.0 - 2.0**-50) if math.isfinite(share) else share)


@dataclass(frozen=True)
class GroupClip(Clip):
    """Clip groups of parameters, each to its own norm. A group is named by a prefix of parameter
    names; the longest match wins.

    `norms[i]` belongs to `prefixes[i]`. The empty prefix matches everything that no other prefix
    does.
    """

    prefixes: tuple[str, ...]
    norms: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefixes", tuple(self.prefixes))
        object.__setattr__(self, "norms", tuple(checked_norm("clip_norms", n) for n in self.norms))
        if (
            not self.prefixes
            or len(self.prefixes) != len(self.norms)
            or len(set(self.prefixes)) != len(self.prefixes)
        ):
            raise InvalidInput(
                "clip_prefixes",
                self.prefixes,
                f"must be different and as many as clip_norms ({len(self.norms)})",
            )

    @property
    def bound(self) -> Bound:
        """The root of the sum of the squared norms, rounded up."""
        return Bound(l2=math.hypot(*self.norms) * (1.0 + 2.0**-50))

    def groups(self, names: Sequence[str]) -> list[int]:
        """The group of the longest prefix of each name; a name without one is an error."""
        found = []
        for name in names:
            fitting = [i for i, prefix in enumerate(self.prefixes) if name.startswith(prefix)]
            if not fitting:
                raise InvalidInput(
                    "clip_prefixes",
                    self.prefixes,
                    f"no prefix matches parameter {name!r}; add the empty prefix",
                )
            found.append(max(fitting, key=lambda i: len(self.prefixes[i])))
        return found

    def scale(self, squared_norms: Tensor) -> Tensor:
        """min(1, norm of the group / ||g of the group||), rounded down."""
        import torch

        return torch.stack(
            [shrink(row, norm) for row, norm in zip(squared_norms, self.norms, strict=False)]
        )


@dataclass(frozen=True)
class AutomaticClip(Clip):
    """Normalise instead of clipping: every gradient is multiplied by norm / (||g|| + gamma) (Bu et
    al. 2023, "Automatic clipping").

    Guarantees: every contribution is strictly shorter than `norm`. The learning rate and `norm` act
    only through their product.
    """

    norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checked_norm("clip_norm", self.norm))
        object.__setattr__(self, "gamma", check.positive("gamma", self.gamma))
        _finite("clip_norm", self.norm)

    @property
    def bound(self) -> Bound:
        """`norm`."""
        return Bound(l2=self.norm)

    def scale(self, squared_norms: Tensor) -> Tensor:
        """norm / (||g|| + gamma)."""
        scales = self.norm / (inflated_norms(squared_norms) + self.gamma)
        return only_finite(scales.clamp(max=MOST_SCALE), squared_norms)


@dataclass(frozen=True)
class PsacClip(Clip):
    """Normalising with a weight that does not favour tiny gradients: norm / (||g|| + gamma / (||g||
    + gamma)) (Xia et al. 2023, PSAC).

    Guarantees: every contribution is strictly shorter than `norm`.
    """

    norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checked_norm("clip_norm", self.norm))
        object.__setattr__(self, "gamma", check.positive("gamma", self.gamma))
        _finite("clip_norm", self.norm)

    @property
    def bound(self) -> Bound:
        """`norm`."""
        return Bound(l2=self.norm)

    def scale(self, squared_norms: Tensor) -> Tensor:
        """norm / (||g|| + gamma / (||g|| + gamma))."""
        norms = inflated_norms(squared_norms)
        scales = self.norm / (norms + self.gamma / (norms + self.gamma))
        return only_finite(scales.clamp(max=MOST_SCALE), squared_norms)


@dataclass(frozen=True)
class QuantileClip(Clip):
    """Flat clipping whose norm follows a private quantile of the gradient norms (Andrew et al.
    2021).

    Beside its clipped gradient each unit adds one coordinate, `count_weight` * norm * (1/2 or
    -1/2), that says whether it was short enough to pass unclipped. Both are released together: the
    bound covers the coordinate, and one noise protects the whole vector. The rule of the next step
    follows from what was released.

    Guarantees: gradient and count coordinate together have norm at most `bound`.
    """

    coordinates: ClassVar[tuple[str, ...]] = (COUNT,)
    norm: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_weight: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checked_norm("clip_norm", self.norm))
        _finite("clip_norm", self.norm)
        object.__setattr__(self, "quantile", check.inside_unit("quantile", self.quantile))
        object.__setattr__(
            self, "learning_rate", check.positive("clip_learning_rate", self.learning_rate)
        )
        object.__setattr__(self, "count_weight", check.positive("count_weight", self.count_weight))

    @property
    def bound(self) -> Bound:
        """The norm of gradient and count coordinate together, rounded up."""
        return Bound(l2=math.hypot(self.norm, self.norm * self.count_weight / 2) * (1.0 + 2.0**-20))

    def scale(self, squared_norms: Tensor) -> Tensor:
        """min(1, norm / ||g||), rounded down."""
        return shrink(squared_norms, self.norm)

    def count(self, scale: Tensor) -> Tensor:
        """[batch] count coordinates, from the multipliers of the clip group: positive for units
        that pass unclipped.
        """
        short = (scale[0] >= 1.0).to(scale.dtype) - 0.5
        return short * (self.norm * self.count_weight)

    def beside(self, scale: Tensor) -> dict[str, Tensor]:
        """The sum of the count coordinates."""
        return {COUNT: self.count(scale).masked_fill(~(scale > 0).any(0), 0.0).sum()}

    def after(self, released: Mapping[str, Tensor], expected_batch: float) -> QuantileClip:
        """The norm moved towards the quantile that the released mean of the count coordinates
        tells.
        """
        return self.updated(float(released[COUNT]) * expected_batch, expected_batch)

    def updated(self, noisy_count: float, expected_batch: float) -> QuantileClip:
        """The rule for the next step, from the released sum of count coordinates: post-processing,
        hence free.
        """
        share = noisy_count / (self.norm * self.count_weight) / expected_batch + 0.5
        step = self.learning_rate * (min(max(share, 0.0), 1.0) - self.quantile)
        return replace(self, norm=max(self.norm * math.exp(-step), LEAST_NORM))


@dataclass(frozen=True)
class MicrobatchClip(Clip):
    """Clip the mean gradient of every `size` examples instead of each example's: fewer norms, and a
    worse guarantee for the noise.

    One example can turn the clipped mean of its group from one vector of length `norm` into
    another, so it changes the sum by up to twice `norm`: the bound is 2 * `norm`, against `norm`
    for flat clipping. Offered for comparison with older work. Hand the engine :meth:`losses`; the
    groups must not depend on the data.
    """

    norm: float
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checked_norm("clip_norm", self.norm))
        object.__setattr__(self, "size", check.integer("microbatch size", self.size))

    @property
    def bound(self) -> Bound:
        """2 * `norm`."""
        return Bound(l2=2 * self.norm)

    def scale(self, squared_norms: Tensor) -> Tensor:
        """min(1, norm / ||mean g||), rounded down."""
        return shrink(squared_norms, self.norm)

    def losses(self, losses: Tensor) -> Tensor:
        """Mean losses of consecutive groups of `size`: one per microbatch."""
        if len(losses) % self.size:
            raise InvalidInput(
                "losses",
                f"{len(losses)} losses",
                f"must be a multiple of the microbatch size {self.size}",
            )
        return losses.unflatten(0, (-1, self.size)).mean(1)


def _finite(name: str, value: float) -> None:
    if math.isinf(value):
        raise InvalidInput(name, value, "must be finite for this clip rule")


CLIPS: dict[str, type] = {
    "flat": FlatClip,
    "per-layer": PerLayerClip,
    "per-group": GroupClip,
    "automatic": AutomaticClip,
    "psac": PsacClip,
    "quantile": QuantileClip,
    "microbatch": MicrobatchClip,
}
"""The fixed table of names under which clip rules are saved as JSON."""
