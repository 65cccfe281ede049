"""Many settings at once: the arithmetic of full-batch private training of a linear head, for
choosing settings on public splits.

This is not a private run: nothing is reserved, billed or released. It clips, adds and moves exactly
as training does, with noise from torch's own generator, for all settings in one matrix product, so
that a sweep costs little more than one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LENGTH = 10.0
"""Rows of length one are stretched to this, so that little of the clip norm goes to the bias, whose
input is 1.
"""

MOMENTUM = 0.9


@dataclass(frozen=True)
class Setting:
    """What is chosen for a linear head on rows of length one, stretched by `LENGTH`.

    `clip` and `rate` are for rows of length one and gradients divided by the clip norm: `clip_norm`
    and `learning_rate` give what the training loop takes. `decay` is the share by which the
    learning rate falls, linearly, until the end.
    """

    steps: int
    clip: float
    rate: float
    decay: float
    average: float

    @property
    def clip_norm(self) -> float:
        """For stretched rows."""
        return LENGTH * self.clip

    @property
    def learning_rate(self) -> float:
        """For stretched rows and gradients that are not divided by the clip norm."""
        return self.rate / (LENGTH**2 * self.clip)

    def schedule(self, step: int) -> float:
        """The factor of the learning rate at `step`."""
        return 1 - self.decay * step / self.steps


@torch.no_grad()
def sweep(
    train: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    settings: Sequence[Setting],
    mus: Sequence[float],
    seed: int,
) -> list[float]:
    """Accuracy on `held_out` of every setting with total privacy `mu` (Gaussian DP) beside it. All
    have the same number of steps.
    """
    steps, classes = settings[0].steps, 10
    torch.manual_seed(seed)
    x, y = _with_bias(train[0]), train[1]
    device, count = x.device, len(settings)
    lengths = x.norm(dim=1).unsqueeze(1)
    hot = functional.one_hot(y, classes).to(x.dtype).unsqueeze(1)

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=x.dtype).repeat_interleave(classes)

    clips = torch.tensor([s.clip for s in settings], device=device, dtype=x.dtype)
    noise, keep = (
        column([math.sqrt(steps) / mu for mu in mus]),
        column([s.average for s in settings]),
    )
    weights = torch.zeros(x.shape[1], classes * count, device=device, dtype=x.dtype)
    speed, average = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(steps):
        errors = torch.softmax((x @ weights).view(len(x), count, classes), 2).sub_(hot)
        scale = torch.minimum(1 / (errors.norm(dim=2) * lengths).clamp(min=1e-9), 1 / clips)
        total = x.t() @ errors.mul_(scale.unsqueeze(2)).view(len(x), -1)
        total.addcmul_(torch.randn_like(total), noise.expand_as(total))
        speed.mul_(MOMENTUM).add_(total, alpha=1 / len(x))
        weights.sub_(speed * column([s.rate * s.schedule(step) for s in settings]))
        average.lerp_(weights, 1 - keep.clamp(max=(1 + step) / (10 + step)))
    guesses = (_with_bias(held_out[0]) @ average).view(-1, count, classes).argmax(2)
    return [float(v) for v in (guesses == held_out[1].unsqueeze(1)).double().mean(0)]


def rows(
    settings: Sequence[Setting], epsilons: Sequence[float], accuracies: Sequence[float]
) -> list[dict[str, Any]]:
    """A sweep as JSON."""
    return [
        asdict(s) | {"epsilon": e, "accuracy": a}
        for s, e, a in zip(settings, epsilons, accuracies, strict=True)
    ]


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_full((len(x), 1), 1 / LENGTH)], 1)
