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
from dpfy.noise.gaussian import dtype_of
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
    """Make the released means, in the parameters' types, the gradients of `parameters`."""
    for name, mean in released.value.items():
        parameters[name].grad = mean


_pieces = lru_cache(maxsize=8)(Pieces)
