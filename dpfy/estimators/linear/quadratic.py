"""Solvers that release a quadratic function of the weights once, and minimise it: sufficient
statistics, and the functional mechanism.

A record adds the matrix z z' of z = (x, t), row and target, less its last corner: x x' and x t
twice, of norm at most sqrt(3) for a row in the unit ball and a target in [-1, 1]. All of it is one
release with one bill. Entries that stand on both sides of the diagonal are released twice and
averaged, which is the same as weighting them by sqrt 2. Replacing a record moves it by at most
sqrt(8): the inner product of two such matrices is (x x')^2 + 2 (x x') t t' >= -(t t')^2 >= -1.

With noise of deviation s in an entry the smallest eigenvalue is off by up to s sqrt(2 d). The ridge
is what is missing to that (adaptive sufficient statistics: Wang 2018, where the smallest eigenvalue
was a release of its own; here it is read off the noisy matrix).

For a logistic loss the functional mechanism (Zhang et al. 2012) takes its second-order expansion at
0, log 2 + (1/2 - y) z + z^2 / 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bound
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.claim import ProofCondition
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.linear.design import GRAM
from dpfy.estimators.linear.losses import HuberLoss, LogisticLoss
from dpfy.estimators.linear.solver import (
    WAY_OUT,
    Floats,
    LinearProblem,
    LinearSolution,
    LinearTask,
    Solver,
)

STATISTICS = "second moments"
ADD, REPLACE = math.sqrt(3) * (1 + 2.0**-50), math.sqrt(2) * (1 + 2.0**-50)


class SecondMomentSolver(Solver):
    """One release of second moments."""

    keeps_rows = False
    weighs = True

    def refuse(self, task: LinearTask) -> None:
        if not isinstance(task.loss, HuberLoss):
            raise Unsupported(
                f'solver="statistics" for {type(task.loss).__name__}, which is no function of '
                f"second moments,",
                WAY_OUT,
            )

    def needs(self, task: LinearTask) -> list[ReleaseNeed]:
        width = task.layout.width  # the L1 norm of x x' is the square of that of x
        bound = Bound(
            l2=REPLACE if task.terms.replaced else ADD,
            l1=width + 2 * math.sqrt(width) + 1e-9,
            linf=1.0,
        )
        return [ReleaseNeed(STATISTICS, bound)]

    def bits(self, task: LinearTask) -> Mapping[str, int]:
        return {STATISTICS: GRAM}

    def parts(self, problem: LinearProblem) -> tuple[float, float, Floats]:
        """The loss as a z^2 / 2 - b t z + c: a, b, and the numbers t in [-1, 1]."""
        return 1.0, 1.0, problem.target

    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        design, width = problem.design, problem.design.width
        bend, slope, target = self.parts(problem)
        moments = design.gram(np.clip(target, -1.0, 1.0))
        released = fit.release(
            STATISTICS, np.concatenate([moments, moments[:, width:]], axis=1), GRAM
        )
        matrix, vector = released[:, :width], slope * released[:, width:].mean(axis=1)
        matrix = (matrix + matrix.T) / 2 * bend
        noise = fit.round(STATISTICS).scale
        alpha = problem.task.alpha
        ridge = (0.0 if alpha is None else alpha / problem.radius**2) + missing(
            matrix, noise * bend
        )
        inverse = np.linalg.inv(matrix + ridge * np.eye(width))
        weights = inverse @ vector
        each = noise * np.sqrt(
            (slope**2 + bend**2 * (weights @ weights + weights**2)) / 2
        )  # of the gradient at these weights
        spread = np.sqrt(inverse**2 @ each**2)
        return LinearSolution(weights[:, None] / problem.radius, spread[:, None] / problem.radius)


def missing(matrix: Floats, noise: float) -> float:
    """How much must be added to the diagonal for noise of this deviation not to decide the
    answer.
    """
    reach = noise * math.sqrt(2 * len(matrix))
    least = float(np.linalg.eigvalsh(matrix)[0])
    return max(reach - max(least, 0.0), 2.0**-10 * reach) + max(-least, 0.0)


class FunctionalSolver(SecondMomentSolver):
    """The same for a loss that is expanded to second order."""

    def refuse(self, task: LinearTask) -> None:
        if not isinstance(task.loss, HuberLoss | LogisticLoss):
            raise Unsupported(
                f'solver="functional" for {type(task.loss).__name__}, which has no expansion here,',
                WAY_OUT,
            )

    def parts(self, problem: LinearProblem) -> tuple[float, float, Floats]:
        if isinstance(problem.task.loss, LogisticLoss):
            return 0.25, 0.5, 2 * problem.target - 1
        return super().parts(problem)

    def conditions(self, task: LinearTask) -> Sequence[ProofCondition]:
        if isinstance(task.loss, HuberLoss):
            return ()
        return [
            ProofCondition(
                "loss",
                "what is released is a polynomial of the weights",
                "the loss was expanded to second order at 0",
            )
        ]
