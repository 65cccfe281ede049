"""One private step: from the bounded sum of a logical batch to the next state. Bind, noise, divide,
move. And what happens to the private gradient: learning rates, a rule of the weights, an average of
them. That is post-processing, so none of it costs privacy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bounded, Private
from dpfy.gradients.engine import Grads, trainable
from dpfy.gradients.per_example.joined import PackedShapes
from dpfy.noise.gaussian import dtype_of
from dpfy.noise.stream import NoiseStream
from dpfy.plan.recipe import CODEC, EXACT, Plan
from dpfy.training.integrity import guard
from dpfy.training.parallel.dtensor import local

if TYPE_CHECKING:
    from dpfy.training.integrity.guard import Guard
    from dpfy.training.integrity.journal import Journal
    from dpfy.training.integrity.run_state import RunStatus
    from dpfy.training.integrity.settings import Settings
    from dpfy.training.integrity.state import TrainState
    from dpfy.training.parallel.data_parallel import SingleDevice
    from dpfy.training.parallel.read_only_run import ReadOnlyRun
    from dpfy.training.run import TrainingRun

RENEWED = 10.0
"""Seconds after which a step says again that the run's folder is in use."""


def stream_of(plan: Plan, folder: TrainingRun | ReadOnlyRun) -> NoiseStream:
    """The noise that the run was charged for: the plan's strategy, scale and sampling, under the
    run's secret and event.
    """
    recipe = plan.recipe
    return NoiseStream(
        recipe.strategy,
        plan.scale,
        folder.randomness,
        divisor=recipe.expected_batch,
        in_place=True,
        event=folder.reserved.claim.event,
        exact=recipe.noise == EXACT,
    )


@dataclass(frozen=True)
class PrivateStep:
    """Takes a state and a bounded sum to the next state.

    Guarantees: noise is made once the step's sum is bound in the journal, for a model that nobody
    else has changed, and only with the permit of a run that is charged permanently; of several ranks
    none makes any before all stand at the same step. From then on the run counts as stopped, until
    its owner has the next state: no error, wherever it comes from, lets the step be made again
    here.
    """

    plan: Plan
    folder: TrainingRun | ReadOnlyRun
    model: nn.Module
    stream: NoiseStream
    rates: Rates
    settings: Settings
    rule: Update
    guard: Guard
    journal: Journal
    status: RunStatus
    parallel: SingleDevice

    def __call__(self, now: TrainState, total: Bounded[Grads]) -> TrainState:
        """Make the step that `now` stands before. The mean is over the expected batch, never the
        realised one.
        """
        self.status.require_live()
        recipe, parameters = self.plan.recipe, self.guard.trainable
        with self.status.stop_on_error():
            self.guard.check()
            if now.schedules.all:
                now.schedules.check()
            self.settings.check(now.step)
            rates = self.rates.at(now.step, now.optimizer)
            total = self._joined(now, total, rates)
        self.status.reason = f"step {now.step} failed after its noise was made"
        alone, permit = self.parallel.alone, self.status.permit
        assert permit is not None
        if alone:
            into = rounded(total.value, parameters)
        else:
            into = self.parallel.grad_buffers(total.value, parameters)
        released, noise = self.stream.release(total, now.step, now.noise, permit, into)
        if not alone:
            released = self.parallel.gather_grads(released, parameters)
        clip = now.clip.after(released.value, recipe.expected_batch)
        hand_over(released, parameters)
        for p in self.guard.frozen:
            p.grad = None
        self.settings.move(now.step)
        now.optimizer.zero_grad(set_to_none=True)
        if now.schedules.all:
            now.schedules.advance(now.step)
            self.settings.advanced(now.step)
        if self.rule.project is not None:
            with torch.no_grad():
                self.rule.project(self.model)
        if now.average:
            self.rule.averaging.update(now.average, parameters, now.step)
        self.guard.accept(
            noise, look=guard.looks(now.step + 1, recipe.steps, self.folder.randomness)
        )
        return now.after(
            noise, clip, rates if now.schedules.all and now.schedules.waiting else None
        )

    def _joined(self, now: TrainState, total: Bounded[Grads], rates: list[float]) -> Bounded[Grads]:
        """Of the sum over all ranks what this one releases, once all ranks stand at this step and
        the sum is bound and charged.
        """
        parallel, step = self.parallel, now.step
        part = self.folder.randomness.key("part", step, 1)[0]
        if parallel.alone:
            self._bind(step, guard.checksum(total.value.values(), part), rates)
            return total
        if parallel.world.count > 1:
            facts = {"learning rate": rates, "clip rule": CODEC.encode(now.clip)}
            look = guard.looks(step, self.plan.recipe.steps, self.folder.randomness)
            parallel.agree(step, facts, self.guard.trainable, look)
        sums = parallel.reduce(total.value)
        tally = parallel.tally(sums, part)
        parallel.world.rank0_first(
            f"the sum of step {step}", lambda: self._bind(step, tally, rates)
        )
        return replace(total, value=sums)

    def _bind(self, step: int, tally: Tensor, rates: list[float]) -> None:
        """Bind the sum, and have the run's releases charged before the first."""
        self.journal.bind(step, tally, rates)
        status, now = self.status, time.monotonic()
        if status.permit is None or now >= status.renew_at:
            self.folder.note_begun()
            status.permit, status.renew_at = self.folder.permit, now + RENEWED


@dataclass(frozen=True)
class Update:
    """What happens to the released means: learning rates, a rule of the weights, their average.

    `schedule` is a factor of the learning rates by step; it is asked for all steps before the run
    begins. `project` changes the trained weights after each step of the optimizer by a rule of the
    weights alone (clamping them, say); the report names it as an assumption. `public_state` says that
    the optimizer brings a state (momentum, say) which tells nothing about the data; so does that.
    `public_weights` says the same of initial weights and buffers: they are not searched for
    records, and the report says so.
    """

    average: float = 0.0
    schedule: Callable[[int], float] | None = None
    project: Callable[[nn.Module], None] | None = None
    public_state: bool = False
    public_weights: bool = False

    def __post_init__(self) -> None:
        check.fraction("average", self.average)

    def factors(self, steps: int) -> list[float] | None:
        """The schedule's factor of each step; None without a schedule."""
        if self.schedule is None:
            return None
        return [check.real(f"schedule({step})", self.schedule(step)) for step in range(steps)]

    @cached_property
    def averaging(self) -> Averaging:
        """The averaging rule."""
        return Averaging(self.average)


@dataclass(frozen=True)
class Rates:
    """The learning rates of a run: `base`, those its optimizer began with, times the schedule's
    factor of each step if there is one.
    """

    base: list[float]
    factors: list[float] | None

    def at(self, step: int, optimizer: torch.optim.Optimizer) -> list[float]:
        """The learning rates of `step`, set by the schedule or by the caller, one for each group of
        parameters.
        """
        if self.factors is not None:
            for group, base in zip(optimizer.param_groups, self.base, strict=True):
                group["lr"] = base * self.factors[step]
        rates = rates_of(optimizer)
        if not all(map(math.isfinite, rates)):
            raise InvalidInput("learning rate", rates, "must be a finite number")
        return rates


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group of parameters, as it stands."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def rounded(
    sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor] | None:
    """Memory for the released means of `sums` in the parameters' types: one piece, where all of
    them are of one type.

    None where noise is made in that type: then it needs none.
    """
    likes, noise = [parameters.get(name, s) for name, s in sums.items()], dtype_of(sums)
    if all(like.dtype is noise for like in likes):
        return None
    first = likes[0]
    if all(
        like.dtype is first.dtype and like.device == first.device and like.is_contiguous()
        for like in likes
    ):
        pieces = _pieces(tuple([like.shape for like in likes]))
        made = pieces.of(torch.empty(pieces.total, dtype=first.dtype, device=first.device))
    else:
        made = [torch.empty_like(like, requires_grad=False) for like in likes]
    return dict(zip(sums, made, strict=True))


def hand_over(released: Private[dict[str, Tensor]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Make the released means, in the parameters' types, the gradients of `parameters`; one without
    a mean keeps none.
    """
    for name, p in parameters.items():
        p.grad = released.value.get(name)


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No gradient that was not released may reach the optimizer."""
    for p in (
        *model.parameters(),
        *(p for group in optimizer.param_groups for p in group["params"]),
    ):
        p.grad = None


_pieces = lru_cache(maxsize=8)(PackedShapes)


@dataclass(frozen=True)
class Averaging:
    """Average with `decay`; early on the decay is capped at (1 + t) / (10 + t) so that the start is
    forgotten. 0 keeps the last weights.
    """

    decay: float = 0.0

    def __post_init__(self) -> None:
        check.fraction("average", self.decay)

    def init(self, model: nn.Module) -> dict[str, Tensor]:
        """The average before the first step: a copy of the trainable weights, or nothing if the
        decay is 0.
        """
        return (
            {name: local(p).detach().clone() for name, p in trainable(model).items()}
            if self.decay
            else {}
        )

    @torch.no_grad()
    def update(
        self, average: Mapping[str, Tensor], weights: Mapping[str, Tensor], step: int
    ) -> None:
        """Move `average` towards the weights after `step` (counted from 0), in place."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, value in average.items():
            value.lerp_(local(weights[name]).detach(), 1 - decay)


@contextmanager
def swapped(
    weights: Mapping[str, Tensor], average: Mapping[str, Tensor], done: Callable[[], None]
) -> Iterator[None]:
    """Inside the block the model whose weights these are holds the averaged ones; afterwards its
    own again, and `done` is told.
    """
    own = {name: local(weights[name]).detach().clone() for name in average}
    _copy(average, weights)
    try:
        yield
    finally:
        _copy(own, weights)
        done()


def adopt(average: Mapping[str, Tensor], model: nn.Module) -> None:
    """Give `model` the averaged weights permanently; nothing changes if there is no averaging."""
    _copy(average, dict(model.named_parameters()))


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        local(weights[name]).copy_(value)


class Ftrl(Optimizer):
    """theta = theta_0 - v / lambda with s the sum of all gradients, v = s without momentum, v =
    momentum * v + s with it.

    With a constant rate this is SGD (1 / lambda its learning rate, the same momentum) in exact
    arithmetic: the change of v obeys the heavy-ball recurrence. It differs where the rate changes:
    a new lambda here rescales the whole path, not the next step. All of it is post-processing of
    private gradients and costs no privacy.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0, momentum: float = 0.0) -> None:
        if not 0 <= check.real("momentum", momentum) < 1:
            raise InvalidInput("momentum", momentum, "must lie in [0, 1)")
        super().__init__(params, {"lr": check.positive("lr", lr), "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Add the gradient to the sum and put the model where the sum says."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["start"] = p.detach().clone()
                    state["sum"] = torch.zeros_like(p)
                    if group["momentum"]:
                        state["velocity"] = torch.zeros_like(p)
                state["sum"].add_(p.grad)
                move = state["sum"]
                if group["momentum"]:
                    move = state["velocity"].mul_(group["momentum"]).add_(state["sum"])
                p.copy_(torch.add(state["start"], move, alpha=-group["lr"]))
