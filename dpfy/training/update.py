"""What happens to the private gradient: post-processing, so none of it costs privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.values import Private
from dpfy.gradients.room import Pieces
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
        rounded = _like(targets)
        torch._foreach_copy_(rounded, means)
        means = rounded
    for p, mean in zip(targets, means, strict=True):
        p.grad = mean


def _like(targets: list[nn.Parameter]) -> list[Tensor]:
    """Memory for gradients of `targets`: one piece, where all of them are dense and of one kind."""
    first = targets[0]
    if all(p.dtype is first.dtype and p.device == first.device and p.is_contiguous() for p in targets):
        pieces = _pieces(tuple([p.shape for p in targets]))
        return pieces.of(torch.empty(pieces.total, dtype=first.dtype, device=first.device))
    return [torch.empty_like(p) for p in targets]


_pieces = lru_cache(maxsize=8)(Pieces)
