"""Mistakes in bounding contributions: the mean, the microbatch, the layer, the wrong norm, the
wrong owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dpfy.core.values import Bound
from dpfy_lab.checks.gradients import CANCELLING, NOT_A_NUMBER, TIED
from dpfy_lab.checks.training import NOISE_AND_DATA, SENSITIVITY, WHITE_BOX
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

CLIPPED_SUM = "dpfy.gradients.engine.clipped_sum"
PER_EXAMPLE = "dpfy.gradients.per_example"
MICROBATCH = 4
Rows = dict[str, Any]
"""Parameter name to per-example gradients, [examples, *parameter]."""


def norms(rows: Rows, keep: Callable[[str], bool] = lambda name: True) -> Any:
    """Norm of each example over the tensors that `keep` accepts."""
    squares: Any = sum(g.flatten(1).square().sum(1) for n, g in rows.items() if keep(n))
    return squares.sqrt()


def weighted(rows: Rows, factor: Any) -> Rows:
    """Sum of the examples, each times its factor."""
    return {n: (g * factor.view(-1, *[1] * (g.dim() - 1))).sum(0) for n, g in rows.items()}


def shrink(size: Any, norm: float) -> Any:
    """min(1, norm / size)."""
    return (norm / size.clamp(min=1e-30)).clamp(max=1.0)


def clipped(rule: Callable[[Rows, float], Rows]) -> Callable[..., Any]:
    """The sum of right per-example gradients, clipped by another rule."""

    def clipped_sum(real: Any, per_unit: Any, names: Any, clip: Any, mask: Any) -> Rows:
        grads = per_unit if mask is None else [g[mask] for g in per_unit]
        return rule(dict(zip(names, grads, strict=True)), clip.bound.l2)

    return clipped_sum


@mistake("clip-mean", "the mean is clipped instead of each example", WHITE_BOX, CLIPPED_SUM)
@clipped
def _(rows: Rows, norm: float) -> Rows:
    count = len(next(iter(rows.values())))
    average = {n: g.mean(0, keepdim=True) for n, g in rows.items()}
    return {n: g * count for n, g in weighted(average, shrink(norms(average), norm)).items()}


@mistake("clip-microbatch", "clipping after summing a microbatch", SENSITIVITY, CLIPPED_SUM)
@clipped
def _(rows: Rows, norm: float) -> Rows:
    sums = {n: torch.stack([part.sum(0) for part in g.split(MICROBATCH)]) for n, g in rows.items()}
    return weighted(sums, shrink(norms(sums), norm))


@mistake(
    "clip-layers",
    "every layer clipped to the flat norm, charged as flat",
    SENSITIVITY,
    CLIPPED_SUM,
)
@clipped
def _(rows: Rows, norm: float) -> Rows:
    return {n: weighted({n: g}, shrink(norms({n: g}), norm))[n] for n, g in rows.items()}


@mistake("clip-no-bias", "the norm forgets the bias", WHITE_BOX, CLIPPED_SUM)
@clipped
def _(rows: Rows, norm: float) -> Rows:
    return weighted(rows, shrink(norms(rows, lambda name: not name.endswith("bias")), norm))


@mistake(
    "clip-tied",
    "the norm takes two uses of a weight for two weights",
    TIED,
    f"{PER_EXAMPLE}.shared.Shared.measured",
)
def _(real: Any, self: Any) -> Any:
    return torch.cat([part.measured()[0] for part in self.parts]), self


@mistake(
    "clip-cancels",
    "the norm is blind to what float32 squares lose",
    CANCELLING,
    f"{PER_EXAMPLE}.rounding.NormEstimate.upper",
)
def _(real: Any, self: Any) -> Any:
    return self.squares.clamp(min=0)[None]


@mistake("clip-late", "accumulation that clips after accumulating", SENSITIVITY)
def _(patch: Patch) -> None:
    def late(real: Any, self: Any, total: Any, *more: Any) -> Any:
        rows = {n: g[None] for n, g in total.value.items()}
        sums = weighted(rows, shrink(norms(rows), total.bound.l2))
        return real(self, replace(total, value=sums), *more)

    patch.around(CLIPPED_SUM, clipped(lambda rows, norm: weighted(rows, norms(rows) * 0 + 1)))
    patch.around("dpfy.noise.stream.NoiseStream.release", late)


@mistake(
    "clip-two-owners",
    "clipped to twice the norm that scales the noise",
    WHITE_BOX,
    CLIPPED_SUM,
)
@clipped
def _(rows: Rows, norm: float) -> Rows:
    return weighted(rows, shrink(norms(rows), 2 * norm))


@mistake(
    "clip-rounded-first",
    "gradients are rounded to a lattice before they are clipped",
    SENSITIVITY,
    CLIPPED_SUM,
)
@clipped
def _(rows: Rows, norm: float) -> Rows:
    step = norm / 32
    rounded = {n: (g / step).abs().ceil() * g.sign() * step for n, g in rows.items()}
    return weighted(rounded, shrink(norms(rows), norm))


@mistake("clip-nan", "a NaN example passes unclipped", NOT_A_NUMBER)
def _(patch: Patch) -> None:
    @clipped
    def longer_ones(rows: Rows, norm: float) -> Rows:
        # `if norm > clip: scale` is false for NaN.
        size = norms(rows)
        return weighted(rows, torch.where(size > norm, norm / size, torch.ones_like(size)))

    def as_they_are(real: Any, single: Any, losses: Any, rows: Any, params: Any, grads: Any) -> Any:
        return grads

    patch.around(CLIPPED_SUM, longer_ones)
    patch.around("dpfy.gradients.engines.loop.alone_where_needed", as_they_are)


@mistake("clip-adaptive", "an adaptive clip norm computed without noise", NOISE_AND_DATA)
def _(patch: Patch) -> None:
    median: list[float] = []

    @clipped
    def to_the_median(rows: Rows, norm: float) -> Rows:
        size = norms(rows)
        median[:] = [max(float(size.median()) if len(size) else norm, 1e-9)]
        return weighted(rows, shrink(size, median[0]))

    def bounded_sum(real: Any, self: Any, *given: Any) -> Any:
        total = real(self, *given)
        return replace(total, bound=Bound(median[0])) if median else total

    patch.around(CLIPPED_SUM, to_the_median)
    patch.around("dpfy.gradients.engines.loop.BatchedEngine.bounded_sum", bounded_sum)
