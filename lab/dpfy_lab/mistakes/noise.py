"""Mistakes in the noise: too little, not fresh, not everywhere, not Gaussian, not secret."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Private, mock_permit
from dpfy_lab.checks.training import (
    CORRELATED,
    EXACT_NOISE,
    LATTICE,
    NOISE_ALONE,
    PERMIT,
    RESUMED,
    SECRET,
    WHITE_BOX,
)
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

RELEASE = "dpfy.noise.stream.NoiseStream.release"
TRAINING = "dpfy.training"
Grads = dict[str, Any]


def scaled(factor: float) -> Callable[..., Any]:
    """A release whose noise is multiplied."""
    return lambda real, self, *given: real(replace(self, scale=self.scale * factor), *given)


def _placed(made: Grads, into: Any) -> Private[Grads]:
    """The values, in the tensors of `into` where they are given."""
    if into is not None:
        made = {name: into[name].copy_(value) for name, value in made.items()}
    return Private(made)


def changed(change: Callable[[Grads, Grads], Grads]) -> Callable[..., Any]:
    """A release whose noise passes through `change(noise, total)` before it is added."""

    def release(
        real: Any, self: Any, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> Any:
        plain = replace(self, divisor=1.0, in_place=False)
        released, state = real(plain, total, step, state, permit)
        noise = {name: value - total.value[name] for name, value in released.value.items()}
        other = change(noise, total.value)
        made = {n: (value + other[n]) / self.divisor for n, value in total.value.items()}
        return _placed(made, into), state

    return release


def at_step(other: Callable[[int], int]) -> Callable[..., Any]:
    """A release with the noise of another step."""
    return lambda real, self, total, step, *rest: real(self, total, other(step), *rest)


mistake("noise-half", "noise scaled by 1/2", WHITE_BOX, RELEASE)(scaled(0.5))
mistake(
    "noise-root-half",
    "noise scaled by 1/sqrt(2): a variance taken for a standard deviation",
    WHITE_BOX,
    RELEASE,
)(scaled(0.5**0.5))


@mistake("noise-forgets-clip", "the noise forgets the clip norm", WHITE_BOX, RELEASE)
def _(real: Any, self: Any, total: Any, *rest: Any) -> Any:
    return real(self, replace(total, bound=Bound(1.0)), *rest)


mistake(
    "noise-over-batch",
    "noise scaled by 1/batch: added to the mean as if it were the sum",
    WHITE_BOX,
    RELEASE,
)(scaled(1 / 256))


@mistake("noise-drawn-once", "noise drawn once and reused at every step", WHITE_BOX)
def _(patch: Patch) -> None:
    kept: Grads = {}

    def once(noise: Grads, total: Grads) -> Grads:
        kept.update({} if kept else noise)
        return kept

    patch.around(RELEASE, changed(once))


mistake("noise-same-seed", "the generator is seeded alike at every step", WHITE_BOX, RELEASE)(
    at_step(lambda step: 0)
)


@mistake("noise-shared", "the same noise for two parameters of equal size", NOISE_ALONE, RELEASE)
@changed
def _(noise: Grads, total: Grads) -> Grads:
    first = {z.numel(): z for z in reversed(noise.values())}
    return {n: first[z.numel()].reshape(z.shape) for n, z in noise.items()}


def without(left_out: Callable[[str], bool]) -> Callable[..., Any]:
    """No noise on the tensors whose names `left_out` accepts."""
    return changed(lambda noise, total: {n: z * (not left_out(n)) for n, z in noise.items()})


mistake("noise-missing-layer", "no noise on one layer", WHITE_BOX, RELEASE)(
    without(lambda name: name.startswith("2."))
)
mistake("noise-missing-bias", "no noise on the biases", WHITE_BOX, RELEASE)(
    without(lambda name: name.endswith("bias"))
)


@mistake("noise-rows-in-use", "no noise on embedding rows without tokens", NOISE_ALONE, RELEASE)
@changed
def _(noise: Grads, total: Grads) -> Grads:
    used = {n: (total[n].reshape(len(z), -1) != 0).any(1) for n, z in noise.items()}
    return {n: z * used[n].reshape(-1, *[1] * (z.dim() - 1)) for n, z in noise.items()}


@mistake("noise-skips-empty", "an empty batch is released without noise", NOISE_ALONE, RELEASE)
@changed
def _(noise: Grads, total: Grads) -> Grads:
    empty = all(bool((value == 0).all()) for value in total.values())
    return {n: z * (0 if empty else 1) for n, z in noise.items()}


@mistake(
    "noise-uniform",
    "uniform noise of the right variance charged as Gaussian",
    NOISE_ALONE,
    RELEASE,
)
@changed
def _(noise: Grads, total: Grads) -> Grads:
    scale = torch.cat([z.reshape(-1) for z in noise.values()]).std().clamp(min=1e-30)
    wide = scale * math.sqrt(12)
    return {n: (torch.special.ndtr(z / scale) - 0.5) * wide for n, z in noise.items()}


@mistake(
    "noise-off-lattice",
    "noise is added in floating point, on no lattice: some outputs are possible with a record only",
    LATTICE,
    RELEASE,
)
@changed
def _(noise: Grads, total: Grads) -> Grads:
    return {n: z + 1e-3 * z.sin() for n, z in noise.items()}


@mistake("noise-sum-beside", "noise on a lattice, added to a sum that is not", LATTICE, RELEASE)
def _(
    real: Any, self: Any, total: Any, step: int, state: Any, permit: Any, into: Any = None
) -> Any:
    empty = replace(total, value={name: value * 0 for name, value in total.value.items()})
    released, state = real(replace(self, in_place=False), empty, step, state, permit)
    made = {n: z + total.value[n] / self.divisor for n, z in released.value.items()}
    return _placed(made, into), state


def moved(move: Callable[[Any], Any]) -> Callable[..., Any]:
    """Exact noise on a sum that `move(sum in steps)` has changed, coordinate by coordinate."""

    def release(real: Any, self: Any, total: Any, step: int, *rest: Any) -> Any:
        wide = max((v.dtype for v in total.value.values()), key=lambda kind: kind.itemsize)
        cell = self._lattice(total.value, total.bound.l2, wide, step).step
        sums = {name: move(value / cell) * cell for name, value in total.value.items()}
        return real(self, replace(total, value=sums), step, *rest)

    return release


mistake(
    "exact-coarse",
    "the sum is rounded to a lattice that is too coarse for what one record adds",
    EXACT_NOISE,
    RELEASE,
)(moved(lambda x: (x / 8).round() * 8))
mistake("exact-biased-coin", "the coin that rounds the sum up is biased", EXACT_NOISE, RELEASE)(
    moved(lambda x: x.floor() + (x - x.floor()) ** 0.9)
)
mistake("exact-seed-for-two", "one seed for the draws of two steps", EXACT_NOISE, RELEASE)(
    at_step(lambda step: step - step % 2)
)


@mistake("noise-known-seed", "the noise comes from a seed that is not secret", SECRET, RELEASE)
def _(real: Any, self: Any, *given: Any) -> Any:
    return real(replace(self, randomness=Randomness.for_tests(0)), *given)


def twice_the_steps(patch: Patch) -> None:
    """The loop makes twice as many steps as its plan says."""

    def opened(real: Any, self: Any) -> None:
        real(self)
        recipe = replace(self.plan.recipe, steps=2 * self.plan.recipe.steps)
        plan = replace(self.plan, recipe=recipe)
        self.drawing = replace(self.drawing, recipe=recipe)
        self.private_step = replace(self.private_step, plan=plan)
        self.plan = plan

    patch.around(f"{TRAINING}.loop.PrivateTraining._open", opened)


@mistake("steps-under-counted", "twice as many steps are released as charged", WHITE_BOX)
def _(patch: Patch) -> None:
    def release(
        real: Any, self: Any, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> Any:
        wide = mock_permit(permit.event, 10**6, permit.name)
        return real(self, total, step, state, wide, into)

    twice_the_steps(patch)
    patch.around(RELEASE, release)


mistake("steps-beyond-permit", "the loop runs on after the last charged step", PERMIT)(
    twice_the_steps
)


@mistake("resume-redraws", "a resumed run draws other noise for the same step", RESUMED)
def _(patch: Patch) -> None:
    times = itertools.count()

    def stream_of(real: Any, *given: Any) -> Any:
        return replace(real(*given), name=f"noise {next(times)}")

    patch.around(f"{TRAINING}.step.stream_of", stream_of)


@mistake(
    "correlated-reset",
    "correlated noise whose state is reset on resuming",
    CORRELATED,
    f"{TRAINING}.integrity.state.TrainState.restored",
)
def _(real: Any, self: Any, *given: Any) -> Any:
    return replace(real(self, *given), noise=self.noise)


@mistake("tree-no-restart", "the tree's restart is forgotten", CORRELATED)
def _(patch: Patch) -> None:
    def forgotten(real: Any, self: Any, *given: Any) -> Any:
        strategy = self.strategy
        if getattr(strategy, "restart", 0):
            strategy = replace(strategy, restart=0, completion=False)
        return real(replace(self, strategy=strategy), *given)

    patch.around(RELEASE, forgotten)
    patch.around("dpfy.noise.stream.NoiseStream.init", forgotten)
