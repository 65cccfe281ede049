"""Bolt-on private SGD (Wu et al. 2016): plain gradient descent on batches in a public order, and
noise at the end.

A step u -> u - eta (mean slope + gamma u) on the mean loss of a batch, with eta (beta + gamma) <=
1, brings two points closer by a factor of 1 - eta gamma at least. Data sets that differ in one
record have the same batches but one in each pass, whose step parts them by at most 2 L eta / batch
more. After all passes of m steps they are apart by at most 2 L eta / batch times the sum of (1 -
eta gamma)^(j m) over passes: the record is worst placed in the last batch. Projecting onto a ball
brings nothing apart and keeps numbers small, so that rounding is bounded too.

Which records stand in a batch depends on their number, which is known where a record is replaced:
for no other adjacency is there a proof.
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
from dpfy.estimators.linear.solver import (
    LinearProblem,
    LinearSolution,
    LinearTask,
    Solver,
)
from dpfy_lab.estimators.minima import MINIMUM, OUT, hidden, refuse_outputs, refuse_persons

PASSES, BATCH = 10, 64
PULL, STEP = 0.1, 1.0
"""Factors of the rules for regularisation and step."""
BALL = 10.0
"""The radius of the ball, in units of the largest row: no weight of a feature is larger."""


class BoltOnSolver(Solver):
    """Stochastic gradient descent, with noise on its last point."""

    name = "bolt-on"

    def refuse(self, task: LinearTask) -> None:
        refuse_outputs(task, self.name)
        refuse_persons(task, self.name)
        if not task.terms.replaced:
            raise Unsupported(
                f'solver="bolt-on" under {task.terms.adjacency.value}: batches depend on the '
                f"number of records;",
                'use adjacency="replace-one", or another solver',
            )

    def needs(self, task: LinearTask) -> list[ReleaseNeed]:
        return [ReleaseNeed(MINIMUM, Bound(l2=1.0))]

    def bits(self, task: LinearTask) -> Mapping[str, int]:
        return {MINIMUM: OUT}

    def conditions(self, task: LinearTask) -> Sequence[ProofCondition]:
        return [
            ProofCondition(
                "step",
                "the step is at most 1 / (curvature + regularisation)",
                f"with curvatures of at most {task.loss.curvature:g}",
            ),
            ProofCondition(
                "order",
                "batches do not depend on what records hold",
                "a public permutation of their places",
            ),
        ]

    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        task, design = problem.task, problem.design
        size, passes = design.size, PASSES if task.rounds is None else task.rounds
        steps, noise = math.ceil(size / BATCH), fit.round(MINIMUM).scale
        pull, step = plan(task, problem.radius, size, steps, passes, noise)
        order = np.random.default_rng(0).permutation(size)
        rows, target, ball = (
            design.part(slice(None))[order],
            problem.target[order],
            BALL * problem.radius,
        )
        weights = np.zeros((design.width, 1))
        for _ in range(passes):
            for start in range(0, size, BATCH):
                part = rows[start : start + BATCH]
                slopes = np.clip(
                    task.loss.slopes(np.asarray(part @ weights), target[start : start + BATCH]),
                    -task.steepest,
                    task.steepest,
                )
                weights = weights - step * (np.asarray(part.T @ slopes) / BATCH + pull * weights)
                weights *= min(1.0, ball / max(float(np.linalg.norm(weights)), 1e-300))
        half = apart(task.steepest, step, pull, steps, passes, ball) / 2
        return LinearSolution(
            hidden(weights[:, 0], half, fit)[:, None] / problem.radius,
            noise * half / problem.radius,
        )


def apart(steepest: float, step: float, pull: float, steps: int, passes: int, ball: float) -> float:
    """How far two data sets that differ in a record can end, with all that rounding can have
    added.
    """
    kept = (1 - step * pull) ** steps
    reach = 2 * steepest * step / BATCH * sum(kept**j for j in range(passes))
    return reach * (1 + 1e-9) + 2 * passes * steps * 2.0**-42 * (ball + step * steepest)


def plan(
    task: LinearTask, radius: float, size: int, steps: int, passes: int, noise: float
) -> tuple[float, float]:
    """Regularisation and step: public, since the number of records is."""
    pull = (
        task.alpha / size / radius**2
        if task.alpha is not None
        else PULL * (noise / size) ** (2 / 3)
    )
    return pull, min(1 / (task.loss.curvature + pull), STEP / math.sqrt(noise))


BOLT_ON = BoltOnSolver()
