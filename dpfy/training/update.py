"""What happens to the private gradient: post-processing, so none of it costs privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.values import Private
from dpfy.training.averaging import Averaging


@dataclass(frozen=True)
class Update:
    """Averaging of the weights and a learning-rate schedule (a factor by step, a pure function, so that a resumed run repeats it)."""

    average: float = 0.0
    schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        check.fraction("average", self.average)

    @property
    def averaging(self) -> Averaging:
        """The averaging rule."""
        return Averaging(self.average)


def hand_over(released: Private[dict[str, Tensor]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Make the released means the gradients of `parameters`, in the parameters' types."""
    targets, means = [parameters[name] for name in released.value], list(released.value.values())
    if any(p.dtype != mean.dtype for p, mean in zip(targets, means, strict=True)):
        rounded = [torch.empty_like(p) for p in targets]
        torch._foreach_copy_(rounded, means)
        means = rounded
    for p, mean in zip(targets, means, strict=True):
        p.grad = mean
