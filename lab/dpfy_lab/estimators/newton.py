"""Newton's method with a noised Hessian (Ganesh et al. 2023): few rounds, each with a gradient and
a second derivative.

A record adds its row times its slope to the gradient, and f'' x x' to the Hessian, in units of
their largest values: norm 1 each. Rows are shortened by the root of f'' and cut to their grid
before they are multiplied, so that sums stay exact. For a softmax the Hessian is bounded by half
the second moments of rows, which do not depend on the weights and are released once.

Eigenvalues that noise alone could have made are raised to its level, and steps are damped to where
the quadratic picture holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dpfy.core.values import Bound
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.fitting import FitSession, WholeSteps
from dpfy.estimators.linear.descent import GRADIENTS, MOMENTS, MOMENTS_SHARE, cut, moments
from dpfy.estimators.linear.design import (
    BITS,
    GRAM,
    SAFE,
    Design,
    on_grid,
    unit_rows,
    without_rounding,
)
from dpfy.estimators.linear.solver import (
    UNIT,
    Floats,
    LinearProblem,
    LinearSolution,
    LinearTask,
    Solver,
)
from dpfy_lab.estimators.minima import times

HESSIANS = "second derivatives"
ROUNDS, SHARE = 8, 0.3
LEVEL = 1.0
"""Eigenvalues below so many times the largest one of pure noise are raised to it."""


class NewtonSolver(Solver):
    """Gradients and second derivatives, each with its noise."""

    def needs(self, task: LinearTask) -> list[ReleaseNeed]:
        rounds = ROUNDS if task.rounds is None else task.rounds
        matrix = (
            Bound(l2=2**-0.5 * (1 + 2.0**-50)) if task.terms.replaced else UNIT
        )  # of two matrices x x' with an angle of at most 90 degrees
        rest = 1 - MOMENTS_SHARE
        return [
            ReleaseNeed(MOMENTS, UNIT, share=MOMENTS_SHARE),
            ReleaseNeed(
                HESSIANS, matrix, releases=1 if task.outputs > 1 else rounds, share=rest * SHARE
            ),
            ReleaseNeed(GRADIENTS, UNIT, releases=rounds, share=rest * (1 - SHARE)),
        ]

    def bits(self, task: LinearTask) -> Mapping[str, int]:
        return {MOMENTS: BITS, GRADIENTS: BITS, HESSIANS: GRAM}

    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        task, design = problem.task, problem.design
        size, _ = moments(problem, fit)
        held, outputs = fit.round(GRADIENTS), problem.target.shape[1]
        signal = size * math.sqrt(held.releases) / held.scale
        steepest = cut(task.loss, task.clip, signal, design.width * outputs)
        ridge = (task.alpha or 0.0) / problem.radius**2
        weights, later = (
            np.zeros((design.width, outputs)),
            np.zeros((design.width, outputs)),
        )  # for rows in the unit ball
        hessian = np.zeros((design.width, design.width))
        prior = (
            held.scale * steepest / math.sqrt(held.releases) / problem.radius
        )  # a weight of one feature is about one
        for step in range(held.releases):
            scores = design.scores(without_rounding(weights))
            if outputs == 1 or step == 0:
                hessian = self._hessian(problem, scores, fit)
            slopes = unit_rows(task.loss.slopes(scores, problem.target) / steepest)
            gradient = (
                fit.release(GRADIENTS, design.total(slopes), BITS) * steepest
                + (ridge + prior) * weights
            )
            move = np.linalg.solve(hessian + (ridge + prior) * np.eye(design.width), gradient)
            weights = weights - move * min(
                1.0, 2 * problem.radius / max(float(np.linalg.norm(move)), 1e-300)
            )
            if step >= held.releases // 2:
                later += weights
        inverse = np.linalg.inv(hessian + (ridge + prior) * np.eye(design.width))
        kept = held.releases - held.releases // 2
        spread = held.scale * steepest * np.sqrt((inverse**2).sum(axis=1) / kept) / problem.radius
        return LinearSolution(
            later / kept / problem.radius, np.repeat(spread[:, None], outputs, axis=1)
        )

    def _hessian(self, problem: LinearProblem, scores: Floats, fit: FitSession) -> Floats:
        """The noised second derivative, its eigenvalues raised to the level of noise."""
        loss = problem.task.loss
        factor = loss.curvature
        if problem.target.shape[1] == 1:
            bends = np.clip(loss.bends(scores, problem.target) / factor, 0.0, 1.0)
            released = fit.release(
                HESSIANS, WholeSteps(scaled(problem.design, np.sqrt(bends)).gram(), GRAM), GRAM
            )
        else:
            released = fit.release(HESSIANS, WholeSteps(problem.design.gram(), GRAM), GRAM)
        matrix = (released + released.T) / 2 * factor
        level = LEVEL * fit.round(HESSIANS).scale * factor * math.sqrt(2 * problem.design.width)
        values, vectors = np.linalg.eigh(matrix)
        return np.asarray((vectors * np.maximum(values, level)) @ vectors.T)


def scaled(design: Design, factors: Floats) -> Design:
    """The rows times factors between 0 and 1, cut to their grid again."""
    found = object.__new__(Design)
    found.radius, found.size, found.width = design.radius, design.size, design.width
    found._whole = None
    found._made = lambda place: on_grid(times(design.part(place), factors[place]), SAFE)
    return found


NEWTON = NewtonSolver()
