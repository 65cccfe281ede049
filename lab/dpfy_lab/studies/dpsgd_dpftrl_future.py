"""What the study of DP-SGD and DP-FTRL names as future work: Fashion-MNIST with adaptive clipping
and noise schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dpfy.gradients.clip import Clip, FlatClip, QuantileClip
from dpfy.noise.schedule import equal_phases
from dpfy.noise.strategy import Identity
from dpfy.plan.recipe import Recipe
from dpfy_lab.studies import figures
from dpfy_lab.studies.figures import Axes, Line
from dpfy_lab.studies.page import Figure, Section, Table, spread
from dpfy_lab.studies.study import Results, Stored

DATA = "fashion-mnist"
EPSILONS = (1.68, 3.0)
SEEDS = range(2)
FALLING = (1.5, 1.31, 1.145, 1.0)
"""Noise of the four quarters of a run, in proportion: by a third in all, in about equal ratios."""


@dataclass(frozen=True)
class Variant:
    """A clip rule (quantile 0: the study's fixed norm) and the proportions of the noise over equal
    phases.

    With `follow` the learning rate is divided by the clip norm, so that the norm changes which
    gradients are cut, not how far a step goes.
    """

    quantile: float = 0.0
    noise: tuple[float, ...] = (1.0,)
    follow: bool = False

    def recipe(self, base: Recipe) -> Recipe:
        """`base` with this rule, from the same first norm, and this schedule."""
        norm = base.clip.bound.l2
        clip: Clip = QuantileClip(norm, self.quantile) if self.quantile else FlatClip(norm)
        return replace(
            base,
            clip=clip,
            strategy=equal_phases(base.steps, self.noise) if len(self.noise) > 1 else Identity(),
        )


VARIANTS: dict[str, Variant] = {
    "fixed": Variant(),
    "median": Variant(0.5),
    "quantile-0.8": Variant(0.8),
    "falling": Variant(noise=FALLING),
    "rising": Variant(noise=FALLING[::-1]),
    "median-follow": Variant(0.5, follow=True),
    "quantile-0.8-follow": Variant(0.8, follow=True),
}
"""Clip norm fixed or following a quantile of the gradient norms; noise constant, falling or rising;
all at the same epsilon.
"""

WORDS = {
    "fixed": ("fixed", "constant"),
    "median": ("median", "constant"),
    "quantile-0.8": ("quantile 0.8", "constant"),
    "falling": ("fixed", "falling"),
    "rising": ("fixed", "rising"),
    "median-follow": ("median, rate follows", "constant"),
    "quantile-0.8-follow": ("quantile 0.8, rate follows", "constant"),
}
"""Clip norm and noise of each variant, in print."""


def section(results: Results) -> Section:
    """Every variant at each epsilon, and its course over the steps."""
    columns = ("epsilon asked", "epsilon charged", "clip "
                                                  "norm", "noise", "noise multipliers", "mean %", "deviation", "worst", "runs",  # noqa: E501
               "against fixed", "last clip norm")  # fmt: skip
    rows: list[list[Any]] = []
    pictures = []
    for epsilon in EPSILONS:
        base = None
        lines = []
        for name in VARIANTS:
            runs = [
                cell
                for cell in results.starting(f"fashion-{name}-{epsilon:g}-")
                if cell.settings["epsilon"] == epsilon
            ]
            if not runs:
                continue
            score = spread([run.result["test_accuracy"] for run in runs])
            base = score["mean"] if name == "fixed" else base
            billed = max(run.result["epsilon"] for run in runs)
            change = None if base is None or name == "fixed" else score["mean"] - base
            rows.append([epsilon, billed, *WORDS[name], multipliers(runs[0]), score["mean"], score["deviation"], score["worst"],  # noqa: E501
                         score["runs"], change, runs[0].result["curve"][-1].get("clip_norm")])  # fmt: skip
            curve = runs[0].result["curve"]
            lines.append(
                Line(
                    " / ".join(WORDS[name]),
                    [row["step"] for row in curve],
                    [row["test_accuracy"] for row in curve],
                )
            )
        if lines:
            picture = figures.lines(lines, Axes("step", "accuracy"))
            pictures.append(
                Figure(
                    f"fashion-{epsilon:g}",
                    f"Fashion-MNIST at epsilon {epsilon:g}: accuracy by step",
                    picture,
                )
            )
    plain = results.get("fashion-plain")
    without = (
        ""
        if plain is None
        else f" Without privacy (Adam, 15 epochs) it reaches "
        f"{100 * plain.result['test_accuracy']:.2f}%."
    )
    words = (
        "LeNet at the settings of Table II on the first 54,000 images of Fashion-MNIST, normalised "
        "by the same constants. The clip norm is "
        "fixed or follows a private quantile of the gradient norms (Andrew et al. 2021); with "
        '"rate follows" the learning rate is divided '
        "by it, without, a larger norm means larger steps, which make gradients larger still. The "
        "noise multiplier is constant or changes "
        "over four equal phases. Every variant is calibrated to the same epsilon. Nothing was "
        "tuned on Fashion-MNIST; the rows where the "
        f"rate follows were added after the others had been seen.{without}"
    )
    table = Table(
        "fashion", "Adaptive clipping and noise schedules on Fashion-MNIST", columns, rows
    )
    return Section(
        "Future work of the study: Fashion-MNIST, adaptive clipping, noise schedules",
        words,
        [table, *pictures],
    )


def multipliers(cell: Stored) -> str:
    """The noise multiplier of each phase."""
    relative = cell.settings["noise"]
    return ", ".join(f"{cell.result['noise_multiplier'] * f / min(relative):.3f}" for f in relative)
