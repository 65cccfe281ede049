"""Solvers whose proof is about the minimum of a strongly convex objective: objective and output
perturbation.

What is minimised is sum_i f(x_i u) + lambda/2 |u|^2 + b u over rows x_i in the unit ball; the
slopes of f are at most L, its curvature at most beta. The minimum is found to a certificate: the
gradient, with all that rounding can have added to it, has at most norm `tolerance`, so that what
was found is within tolerance / lambda of the minimum. What differs from the minimum is hidden by
noise of its own, which is billed (approximate minima: Iyengar et al. 2019). Where the certificate
is not reached nothing is released.

Objective perturbation: b is Gaussian, drawn on a grid of 2^-40 of its deviation s. Put b + U in its
place, U uniform in a cell: its density is that of a Gaussian within a factor of e^(+-eta), eta = 20
d 2^-40 where all coordinates are below 40 s, and the minimum moves by at most sqrt(d) 2^-41 s /
lambda. So a loss of 2 eta is added to that of the event, and the move to the tolerance.

Output perturbation: one record moves the minimum by at most L / lambda (Chaudhuri & Monteleoni
2008). lambda follows from the number of records, as far as that may be known, so what is released
is lambda u / L, which a record moves by at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import EXAMPLE
from dpfy.core.values import Bound
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.claim import ProofCondition
from dpfy.estimators.fitting import TERM, FitSession, fixed
from dpfy.estimators.linear.design import Design
from dpfy.estimators.linear.solver import (
    WAY_OUT,
    Floats,
    LinearProblem,
    LinearSolution,
    LinearTask,
    ScoreLoss,
    SoftmaxLoss,
    Solver,
)
from dpfy.estimators.records import parts

TERM_ROUND, MINIMUM, COUNT = "linear term", "minimum", "number of records"
COUNT_SHARE = 0.01
PULL = 0.8
"""lambda over the deviation of the linear term: noise moves weights that the data does not hold by
about one over it.
"""
FAR = 40
"""Deviations beyond which a normal number does not lie: the chance is below 1e-340."""
PART = 4096
"""Records whose gradients are added up before the sums are: fewer roundings."""
MOST_OF = 0.98
"""The part of epsilon that the change of the determinant may take: log(1 + curvature / lambda)."""
UNIT_ROUND = 2.0**-53
MOST_STEPS, LEAST_STEP = 200, 1e-10
OUT, KEEP = 20, 1 - 2.0**-8
"""Fractional bits of a released minimum, and what is left of its bound for what rounding to them
adds: sqrt(d) 2^-20.
"""


@dataclass(frozen=True)
class CutObjective:
    """sum_i f(x_i u), with slopes cut to `steepest`, + ridge/2 |u|^2 + term u."""

    design: Design
    loss: ScoreLoss
    target: Floats
    steepest: float
    ridge: float
    term: Floats

    def gradient(self, weights: Floats) -> Floats:
        """Of the objective, added up in parts."""
        scores = self.design.scores(weights[:, None])
        slopes = np.clip(self.loss.slopes(scores, self.target), -self.steepest, self.steepest)
        total = np.zeros(len(weights))
        for place in parts(self.design.size, PART):
            total += np.asarray(self.design.part(place).T @ slopes[place, 0])
        return total + self.ridge * weights + self.term

    def hessian(self, weights: Floats) -> Floats:
        """Its second derivative."""
        scores = self.design.scores(weights[:, None])
        inside = np.abs(self.loss.slopes(scores, self.target)[:, 0]) < self.steepest
        bends = np.where(inside, self.loss.bends(scores, self.target), 0.0)
        return weighted(self.design, bends) + self.ridge * np.eye(len(weights))

    def lost(self, weights: Floats) -> float:
        """How much rounding can have taken from the norm of a gradient."""
        size, width = self.design.size, len(weights)
        length = float(np.linalg.norm(weights))
        slopes = (
            size * (self.loss.curvature * (width + 4) * length + 8 * self.steepest) * UNIT_ROUND
        )
        sums = math.sqrt(width) * (PART + size / PART + 8) * size * self.steepest * UNIT_ROUND
        return (
            slopes
            + sums
            + 8 * UNIT_ROUND * (self.ridge * length + float(np.linalg.norm(self.term)))
        )


def minimise(objective: CutObjective, tolerance: float) -> Floats:
    """The minimum, to a gradient of at most `tolerance`, rounding included; refused where that is
    not reached.

    Newton steps, halved until the gradient is shorter, which along such a step it becomes.
    """
    weights = np.zeros(len(objective.term))
    gradient = objective.gradient(weights)
    for _ in range(MOST_STEPS):
        length = float(np.linalg.norm(gradient))
        if length + objective.lost(weights) <= tolerance:
            return weights
        move, step = np.linalg.solve(objective.hessian(weights), gradient), 1.0
        while step > LEAST_STEP:
            tried = objective.gradient(weights - step * move)
            if np.linalg.norm(tried) < length:
                break
            step /= 2
        else:
            break
        weights, gradient = weights - step * move, tried
    rule = (
        f"must be reached for the proof to hold; a gradient of "
        f"{float(np.linalg.norm(gradient)):.3g} is left: raise alpha"
    )
    raise InvalidInput("minimum", f"tolerance {tolerance:g}", rule)


class MinimumSolver(Solver):
    """What the proofs have in common."""

    name = ""
    tolerance = 1e-5

    def refuse(self, task: LinearTask) -> None:
        refuse_outputs(task, self.name)
        refuse_persons(task, self.name)
        if task.alpha == 0:
            raise InvalidInput(
                "alpha",
                task.alpha,
                f"must be above 0 for solver={self.name!r}: its proof needs strong convexity",
            )

    def conditions(self, task: LinearTask) -> Sequence[ProofCondition]:
        steep, curved = f"{task.steepest:g}", f"{task.loss.curvature:g}"
        return [
            ProofCondition(
                "convexity",
                "the objective is strongly convex",
                "the losses are convex, and a quadratic in all weights was added",
            ),
            ProofCondition(
                "slopes",
                f"slopes are at most {steep}, curvatures at most {curved}",
                "rows have norm 1, and slopes were cut",
            ),
            ProofCondition(
                "optimum",
                f"what is released is within {self.tolerance:g} / lambda of the minimum, beside "
                f"its noise",
                "the norm of the gradient, with its rounding, was computed, and a larger one "
                "refused",
            ),
        ]

    def bits(self, task: LinearTask) -> Mapping[str, int]:
        return {MINIMUM: OUT}


class ObjectivePerturbationSolver(MinimumSolver):
    """A random linear term in the objective, and a little noise on what was found."""

    buys_norm = False  # lambda is fixed before, for rows whose norm is known

    def __init__(self, name: str, tolerance: float, share: float) -> None:
        self.name, self.tolerance, self.share = name, tolerance, share

    def ridge(self, task: LinearTask, noise_multiplier: float) -> float:
        """lambda, for rows in the unit ball: public."""
        if task.alpha is not None:
            return (
                task.alpha
                / task.layout.radius(task.layout.largest if task.norm is None else task.norm) ** 2
            )
        return PULL * noise_multiplier * task.steepest

    def refuse(self, task: LinearTask) -> None:
        super().refuse(task)
        radius = task.layout.radius(task.layout.largest if task.norm is None else task.norm)
        least = (
            task.loss.curvature * radius**2 / math.expm1(min(MOST_OF * task.terms.epsilon, 700.0))
        )
        if task.alpha is not None and task.alpha < least:
            rule = (
                f"must be at least {least:.4g} for solver={self.name!r} at epsilon "
                f"{task.terms.epsilon:g}, which a weaker one exceeds"
            )
            raise InvalidInput("alpha", task.alpha, rule)

    def needs(self, task: LinearTask) -> list[ReleaseNeed]:
        def event(noise_multiplier: float) -> events.Event:
            ridge = self.ridge(task, noise_multiplier)
            off = math.expm1(2 * FAR / 2 * task.layout.width * 2.0**-TERM)
            curvature = (1 + task.loss.curvature / ridge) * (1 + off) - 1
            return events.ObjectivePerturbation(noise_multiplier, curvature, task.loss.one_sided)

        return [
            ReleaseNeed(TERM_ROUND, Bound(l2=task.steepest), share=1 - self.share, make=event),
            ReleaseNeed(MINIMUM, Bound(l2=1.0), share=self.share),
        ]

    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        task, design = problem.task, problem.design
        held = fit.round(TERM_ROUND).event
        assert isinstance(held, events.ObjectivePerturbation)
        ridge, deviation = (
            self.ridge(task, held.noise_multiplier),
            held.noise_multiplier * task.steepest,
        )
        term = deviation * fit.draw(
            TERM_ROUND, design.width, lambda: (*content(design), problem.target.tobytes())
        )
        found = minimise(
            CutObjective(design, task.loss, problem.target, task.steepest, ridge, term),
            self.tolerance,
        )
        moved = 2 * (self.tolerance + math.sqrt(design.width) * deviation * 2.0**-TERM)
        released = hidden(found, moved / ridge, fit)
        return LinearSolution(
            released[:, None] / problem.radius, deviation / ridge / problem.radius
        )


def hidden(found: Floats, moved: float, fit: FitSession) -> Floats:
    """What was found, with noise for what one record moves it by."""
    return fit.release(MINIMUM, fixed(found / moved * KEEP, OUT), OUT) * (moved / KEEP)


class OutputPerturbationSolver(MinimumSolver):
    """Noise on the minimum."""

    name = "output"

    def needs(self, task: LinearTask) -> list[ReleaseNeed]:
        return [*count_needs(task.terms), ReleaseNeed(MINIMUM, Bound(l2=1.0))]

    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        task, design = problem.task, problem.design
        size, noise = count_of(problem, fit), fit.round(MINIMUM).scale
        ridge = (2 * size * task.loss.usual * (noise * task.steepest / problem.radius) ** 2) ** (
            1 / 3
        )
        if task.alpha is not None:
            ridge = task.alpha / problem.radius**2
        still = np.zeros(design.width)
        found = minimise(
            CutObjective(design, task.loss, problem.target, task.steepest, ridge, still),
            self.tolerance,
        )
        most = (task.steepest + 2 * self.tolerance) / ridge
        return LinearSolution(
            hidden(found, most, fit)[:, None] / problem.radius, noise * most / problem.radius
        )


OBJECTIVE = ObjectivePerturbationSolver("objective", tolerance=1e-5, share=0.002)
APPROXIMATE = ObjectivePerturbationSolver("approximate-minima", tolerance=0.05, share=0.05)
OUTPUT = OutputPerturbationSolver()


def count_needs(terms: FitTerms) -> list[ReleaseNeed]:
    """What buys the number of records, where it is not public."""
    return (
        []
        if terms.records is not None or terms.replaced
        else [ReleaseNeed(COUNT, Bound.scalar(1.0), share=COUNT_SHARE)]
    )


def count_of(problem: LinearProblem, fit: FitSession) -> float:
    """The number of records, as far as it may be known."""
    terms = problem.task.terms
    if terms.replaced:
        return float(problem.design.size)  # neighbours have as many
    if terms.records is not None:
        return float(terms.records)
    return max(1.0, float(fit.release(COUNT, np.array([problem.design.size]))[0]))


def refuse_outputs(task: LinearTask, solver: str) -> None:
    """Refuse several outputs, where a proof is for one linear score."""
    if isinstance(task.loss, SoftmaxLoss):
        raise Unsupported(
            f'solver="{solver}" for {task.outputs} classes: its proof is for losses of one linear '
            f"score, and",
            WAY_OUT,
        )


def refuse_persons(task: LinearTask, solver: str) -> None:
    """Refuse persons as the unit of privacy, where a proof is about one record."""
    if task.terms.unit != EXAMPLE:
        raise Unsupported(
            f'solver="{solver}" where a person is protected: its proof is about one record, and',
            WAY_OUT,
        )


def content(design: Design) -> Iterator[bytes]:
    """All rows, for a fingerprint."""
    for place in parts(design.size):
        rows = design.part(place)
        yield from (
            (rows.data.tobytes(), rows.indices.tobytes())
            if scipy.sparse.issparse(rows)
            else (rows.tobytes(),)
        )


def weighted(design: Design, factors: Floats) -> Floats:
    """The sum over records of factor times row times row; rounded as double precision does."""
    total = np.zeros((design.width, design.width))
    for place in parts(design.size):
        rows = design.part(place)
        found = rows.T @ times(rows, factors[place])
        total += found.toarray() if scipy.sparse.issparse(found) else found
    return total


def times(rows: Any, factors: Floats) -> Any:
    """Each row times its factor: a copy."""
    return (
        rows.multiply(factors[:, None]).tocsr()
        if scipy.sparse.issparse(rows)
        else rows * factors[:, None]
    )
