"""What happens to the private gradient: post-processing, so none of it costs privacy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Private
from dpfy.gradients.per_example.buffers import PackedShapes
from dpfy.noise.gaussian import dtype_of
from dpfy.training.averaging import Averaging


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

    @property
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
