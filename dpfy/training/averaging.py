"""Exponential moving average of the weights: post-processing of private iterates, so it is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.gradients.engine import trainable
from dpfy.training.parallel.dtensor import local


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
