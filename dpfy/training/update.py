"""What happens to the private gradient: post-processing, so none of it costs privacy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.values import Private
from dpfy.gradients.room import Pieces
from dpfy.noise.gaussian import dtype_of
from dpfy.training.averaging import Averaging


@dataclass(frozen=True)
class Update:
    """What happens to the released means: learning rates, a rule of the weights, their average.

    `schedule` is a factor of the learning rates by step; it is asked for all steps before the run begins. `project` changes the
    trained weights after each step of the optimizer by a rule of the weights alone (clamping them, say); the card names it as an
    assumption. `public_state` says that the optimizer brings a state (momentum, say) which tells nothing about the data; so does that.
    """

    average: float = 0.0
    schedule: Callable[[int], float] | None = None
    project: Callable[[nn.Module], None] | None = None
    public_state: bool = False

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


def rounded(sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor] | None:
    """Memory for the released means of `sums` in the parameters' types: one piece, where all of them are of one type.

    None where noise is made in that type: then it needs none.
    """
    likes, noise = [parameters.get(name, s) for name, s in sums.items()], dtype_of(sums)
    if all(like.dtype is noise for like in likes):
        return None
    first = likes[0]
    if all(like.dtype is first.dtype and like.device == first.device and like.is_contiguous() for like in likes):
        pieces = _pieces(tuple([like.shape for like in likes]))
        made = pieces.of(torch.empty(pieces.total, dtype=first.dtype, device=first.device))
    else:
        made = [torch.empty_like(like, requires_grad=False) for like in likes]
    return dict(zip(sums, made, strict=True))


def hand_over(released: Private[dict[str, Tensor]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Make the released means, in the parameters' types, the gradients of `parameters`; one without a mean keeps none."""
    for name, p in parameters.items():
        p.grad = released.value.get(name)


_pieces = lru_cache(maxsize=8)(Pieces)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, empty: bool) -> None:
    """Refuse, before anything is reserved, an optimizer that does not fit the model or could not take a private step.

    With `empty`, also one that holds a state already: gradients of the data may be in it.
    """
    mine = {id(p) for p in model.parameters() if p.requires_grad}
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := mine - theirs:
        raise InvalidInput("optimizer", f"{len(missing)} parameters missing", "must hold every trainable parameter of the model")
    if foreign := theirs - {id(p) for p in model.parameters()}:
        raise InvalidInput("optimizer", f"{len(foreign)} foreign parameters", "must hold parameters of this model only")
    name, closure = type(optimizer).__name__, inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(f"{name}, which evaluates the loss again inside a step,", "use an optimizer that steps once a gradient")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(f"{name}: noise makes every gradient dense, which it refuses; it", "use Adam")
    if empty and any(state for state in optimizer.state.values()):
        rule = "its state must be empty; make a new optimizer, or state by Update(public_state=True) that it tells nothing about the data"
        raise InvalidInput("optimizer", f"{name} with a state", rule)
