"""Noisy gradient descent on all records: the default solver of linear models.

What is released: how the norms of the features are spread (one histogram), the sum of all rows
(which is also their number), and `rounds` gradients. A record adds at most norm 1 to each, in units
of its own largest slope and row.

All else is post-processing of what was released:

- Features are shortened to the median of their norms, and slopes are cut: a convex loss with a
  derivative of a smaller bound, whose gradient needs less noise.
- The step is preconditioned by what the sum of rows says of their second moments if columns were
  independent: categories have those of their shares, numbers those of a uniform law. The rest of
  the way is plain gradient descent with momentum, whose length decides how far directions come that
  noise could fill: for a time of `PACE` n mu / (radius clip), where mu is the whole budget.
- The first gradient tells Poisson regression the mean of its targets: the constant term goes on
  from there, with the curvature there.
- Where persons are protected, what the records of one add to a gradient is shortened to the root of
  the most records that a person has; all other sums are bounded by that many records.
- Where gradients that were released show a direction that is steeper than this picture says, the
  step is made shorter.
- The answer is the mean of the later half of the iterates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.fitting import FitSession, WholeSteps
from dpfy.estimators.linear.design import BITS, RowLayout, unit_rows
from dpfy.estimators.linear.solver import (
    UNIT,
    Floats,
    LinearProblem,
    LinearSolution,
    LinearTask,
    ScoreLoss,
    Solver,
)
from dpfy.estimators.persons import MOST_SHORTENED
from dpfy.tables.columns import Number

MOMENTS, GRADIENTS = "sum of rows", "gradients"
MOMENTS_SHARE = 0.02
ROUNDS = 50
"""Gradients of layouts with categories, whose rare words take longer than numbers alone."""
PACE, MOMENTUM, LATER = 1 / 3, 0.8, 0.5
CUT = 0.17
"""How far slopes are cut where nobody says it: chosen, as the others here, on splits that no figure
of the documentation is of.
"""
DRAWS = 32
"""Descents on noise alone that tell how far it moves weights."""
STEEP = 3.0
"""With momentum 0.8 steps are stable up to a curvature of 3.6, relative to the preconditioner."""


class GradientDescentSolver(Solver):
    """Noisy gradients of all records, round after round."""

    weighs = True

    def needs(self, task: LinearTask) -> list[ReleaseNeed]:
        rounds = task.rounds or (ROUNDS if task.layout.sizes else task.loss.gradients)
        rest, root = 1 - MOMENTS_SHARE, None
        if (most := shortens(task)) is not None:
            root = math.sqrt(most)
        return [
            ReleaseNeed(MOMENTS, UNIT, share=MOMENTS_SHARE),
            ReleaseNeed(GRADIENTS, UNIT, releases=rounds, share=rest, person=root),
        ]

    def bits(self, task: LinearTask) -> Mapping[str, int]:
        return {MOMENTS: BITS, GRADIENTS: BITS}

    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        task, design, radius = problem.task, problem.design, problem.radius
        size, mean = moments(problem, fit)
        held, outputs = fit.round(GRADIENTS), task.outputs
        steepest = cut(
            task.loss,
            task.clip,
            size * math.sqrt(held.releases) / held.scale,
            design.width * outputs,
        )
        noise = held.scale * radius * steepest / size  # of a coordinate of a mean gradient
        time = PACE / (
            noise / math.sqrt(held.releases)
        )  # as if the budget were spent on one gradient
        steps = held.releases / (1 - MOMENTUM) * (1 - LATER / 2)
        precondition = Preconditioner(
            task.layout, mean, task.loss.usual, steps / time, problem.norm
        )
        weights = np.zeros((design.width, outputs))
        weights[: task.layout.constant] = task.loss.start
        move, later, pace = np.zeros_like(weights), np.zeros_like(weights), 1.0
        before: tuple[Floats, Floats] | None = None
        first_kept = held.releases - math.ceil(held.releases * LATER)

        def slopes(scores: Any, part: slice | None) -> Any:
            target = problem.target if part is None else problem.target[part]
            return unit_rows(task.loss.slopes(scores, target) * (1 / steepest))

        for step in range(held.releases):
            total = design.gradient(weights * radius, slopes, shortens(task))
            released = fit.release(GRADIENTS, total, BITS)
            gradient = released * (radius * steepest / size) + (task.alpha or 0.0) / size * weights
            if step == 0 and task.layout.constant and outputs == 1:
                begun, usual = task.loss.level(float(gradient[0, 0]))
                if begun != task.loss.start:
                    precondition = Preconditioner(
                        task.layout, mean, usual, steps / time, problem.norm
                    )
                    weights[0] = begun
                    continue
            if before is not None:
                pace = min(
                    pace, _pace(weights - before[0], gradient - before[1], precondition, noise)
                )
            before = weights, gradient
            move = MOMENTUM * move - pace * precondition(gradient)
            weights = weights + move
            if step >= first_kept:
                later += weights
        ridge = (task.alpha or 0.0) / size
        return LinearSolution(
            later / (held.releases - first_kept),
            _spread(precondition, steps / time - ridge, noise, held.releases, outputs),
        )


def shortens(task: LinearTask) -> int | None:
    """The most records of a person, to whose root the gradient of a person is shortened; None where
    records are added up as they are.

    A person's records tell about the same, so that their gradients add up to less than their
    number allows, and noise for the root of it hides them.
    """
    most = task.terms.at_most
    return most if 1 < most <= MOST_SHORTENED and task.terms.delta > 0 else None


class Preconditioner:
    """The inverse of usual E[xx'] + ridge, as if columns were independent, in the units of the
    features: a diagonal and a few ranks.
    """

    def __init__(
        self, layout: RowLayout, mean: Floats, usual: float, ridge: float, norm: float
    ) -> None:
        first = int(layout.constant)
        at = first + layout.numbers
        spread, low = np.zeros(layout.width), [mean]
        shortened = min(1.0, norm / layout.largest) ** 2  # by how much rows were, at most
        for k, column in enumerate(layout.columns.numbers):
            m = float(np.clip(mean[first + k], -1.0, 1.0))
            spread[first + k] = max(_variance(column, m), 0.01) * shortened
        signs = [1.0]
        for size in layout.sizes:
            shares = np.clip(mean[at : at + size], 0.0, 1.0)
            spread[at : at + size] = shares
            block = np.zeros(layout.width)
            block[at : at + size] = shares / max(1.0, math.sqrt(float(shares.sum())))
            low.append(block)
            signs.append(-1.0)
            at += size
        self.diagonal, self.low, self.ranks = (
            usual * spread + ridge,
            np.stack(low, axis=1),
            usual * np.array(signs),
        )
        self.inner = np.linalg.inv(
            np.diag(1 / self.ranks) + self.low.T @ (self.low / self.diagonal[:, None])
        )

    def inverse(self, weights: Floats) -> Floats:
        """The matrix itself times weights."""
        return np.asarray(
            self.diagonal[:, None] * weights + (self.low * self.ranks) @ (self.low.T @ weights)
        )

    def __call__(self, gradient: Floats) -> Floats:
        straight = gradient / self.diagonal[:, None]
        return np.asarray(
            straight - (self.low / self.diagonal[:, None]) @ (self.inner @ (self.low.T @ straight))
        )


def _spread(
    precondition: Preconditioner, less: float, noise: float, releases: int, outputs: int
) -> Floats:
    """About the deviation that noise gives each weight: the same descent on the quadratic that the
    preconditioner, less its own ridge, stands for, with noise of the same scale and nothing else,
    many times over.
    """
    rng, first_kept = np.random.default_rng(0), releases - math.ceil(releases * LATER)
    weights = np.zeros((len(precondition.diagonal), DRAWS))
    move, later = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(releases):
        gradient = (
            precondition.inverse(weights) - less * weights + noise * rng.normal(size=weights.shape)
        )
        move = MOMENTUM * move - precondition(gradient)
        weights = weights + move
        if step >= first_kept:
            later += weights
    found = np.sqrt(np.mean((later / (releases - first_kept)) ** 2, axis=1))
    return np.repeat(found[:, None], outputs, axis=1)


def _variance(column: Number, mean: float) -> float:
    """Of a number on its scale with this mean: on [-1, 1] a third of the largest there is, on [0,
    1] (amounts, often zero) all of it.
    """
    return (1 - mean * mean) / 3 if column.scale == "symmetric" else mean * (1 - mean)


def cut(loss: ScoreLoss, clip: float | None, signal: float, coordinates: int) -> float:
    """The norm that slopes are cut to: as asked for, or the more the less noise there is. `signal`
    is n mu of all gradients together.
    """
    asked = CUT * (signal / math.sqrt(coordinates)) ** 0.25 if clip is None else clip
    return min(loss.steepest, asked)


def moments(problem: LinearProblem, fit: FitSession) -> tuple[float, Floats]:
    """How many records there are, and the mean of their features. Half of what a record adds is its
    row, half says that it is there.
    """
    design, half = problem.design, 0.5**0.5
    released = fit.release(MOMENTS, WholeSteps(design.moments(half), BITS), BITS)
    size = max(float(released[-1]) / half, 1.0)
    mean = released[:-1] / half * design.radius / size
    mean[: problem.task.layout.constant] = 1.0
    return size, mean


def _pace(moved: Floats, change: Floats, precondition: Preconditioner, noise: float) -> float:
    """How much shorter steps must be: by the curvature along the last move that gradients show
    beyond their noise.
    """
    length = float((moved * moved).sum())
    if length == 0:
        return 1.0
    along = float((moved * change).sum()) - 2 * noise * math.sqrt(2 * length)
    steep = along / float((precondition.inverse(moved) * moved).sum())
    return STEEP / steep if steep > STEEP else 1.0
