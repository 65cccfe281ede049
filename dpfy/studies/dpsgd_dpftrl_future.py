"""What the study of DP-SGD and DP-FTRL names as future work: Fashion-MNIST with adaptive clipping and noise schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpfy.gradients.clip import Clip, FlatClip, QuantileClip
from dpfy.noise.schedule import equal_phases
from dpfy.noise.strategy import Identity
from dpfy.plan.recipe import Recipe

DATA = "fashion-mnist"
EPSILONS = (1.68, 3.0)
SEEDS = range(2)
FALLING = (1.5, 1.31, 1.145, 1.0)
"""Noise of the four quarters of a run, in proportion: by a third in all, in about equal ratios."""


@dataclass(frozen=True)
class Variant:
    """A clip rule (quantile 0: the study's fixed norm) and the proportions of the noise over equal phases. Fixed before any run."""

    quantile: float = 0.0
    noise: tuple[float, ...] = (1.0,)

    def recipe(self, base: Recipe) -> Recipe:
        """`base` with this rule, from the same first norm, and this schedule."""
        norm = base.clip.bound.l2
        clip: Clip = QuantileClip(norm, self.quantile) if self.quantile else FlatClip(norm)
        return replace(base, clip=clip, strategy=equal_phases(base.steps, self.noise) if len(self.noise) > 1 else Identity())


VARIANTS: dict[str, Variant] = {
    "fixed": Variant(),
    "median": Variant(0.5),
    "quantile-0.8": Variant(0.8),
    "falling": Variant(noise=FALLING),
    "rising": Variant(noise=FALLING[::-1]),
    "quantile-0.8-falling": Variant(0.8, FALLING),
}
"""Clip norm fixed or following a quantile of the gradient norms; noise constant, falling or rising; all at the same epsilon."""
