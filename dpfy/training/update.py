"""What happens to the private gradient: the optimizer's move, an average of the weights, a rule of
the weights. It is post-processing, so none of it costs privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Private
from dpfy.gradients.engine import trainable
from dpfy.gradients.per_example.joined import PackedShapes
from dpfy.noise.gaussian import dtype_of
from dpfy.training.parallel.dtensor import local


@dataclass(frozen=True)
class Update:
    """What happens to the released means: learning rates, a rule of the weights, their average.

    `schedule` is a factor of the learning rates by step; it is asked for all steps before the run
    begins. `project` changes the trained weights after each step of the optimizer by a rule of the
    weights alone (clamping them, say); the card names it as an assumption. `public_state` says that
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
    """Give `model` the averaged weights for good; nothing changes if there is no averaging."""
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
