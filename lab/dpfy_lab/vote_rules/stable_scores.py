"""Scores that hardly depend on any one unit: regularised softmax regression, trained to a measured
distance from its minimum.

Dwork & Feldman 2018 make predictions private by stability: if no unit moves the prediction by much,
little noise hides it. Here the scores of a question x (of length at most 1) are W x, W the minimum
of

    sum over records of  softmax loss(W x_i, y_i)  +  lambda / 2 |W|^2

The loss of one record has gradients of length at most sqrt(2) (a probability less a one-hot vector,
times x_i of length at most 1), and the objective is lambda-strongly convex, so that adding or
removing a record moves W by at most sqrt(2) / lambda. A W whose gradient has length g is at most g
/ lambda from the minimum; every W that is used has g <= TOLERANCE, on both data sets. So scores
move by at most (sqrt(2) + 2 TOLERANCE) / lambda, in length. On a sample drawn anew for every
question less is told.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.values import Bound, Bounded
from dpfy.mechanisms.exact import Bits, coins
from dpfy.prediction.rules import Ask

TOLERANCE = 1e-3
"""The largest length of the gradient at which scores are taken."""
Matrix = NDArray[np.float64]


def within(rows: NDArray[np.float32]) -> Matrix:
    """Rows of length at most 1, rounding included."""
    wide = rows.astype(np.float64)
    return np.asarray(
        wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True) * (1 + 1e-12), 1.0)
    )


def objective(weights: Matrix, x: Matrix, targets: Matrix, strength: float) -> tuple[float, Matrix]:
    """Value and gradient."""
    scores = x @ weights.T
    scores -= scores.max(axis=1, keepdims=True)
    chances = np.exp(scores)
    totals = chances.sum(axis=1, keepdims=True)
    value = float(
        (np.log(totals[:, 0]) - (scores * targets).sum(axis=1)).sum()
        + strength / 2 * (weights**2).sum()
    )
    return value, np.asarray((chances / totals - targets).T @ x + strength * weights)


def fitted(x: Matrix, targets: Matrix, strength: float) -> Matrix:
    """A matrix whose gradient is no longer than the tolerance.

    Where a quick search ends short of that, plain gradient descent goes on. It converges for all
    data, so nothing fails because of some.
    """
    shape = targets.shape[1], x.shape[1]

    def flat(w: Matrix) -> tuple[float, Matrix]:
        value, gradient = objective(w.reshape(shape), x, targets, strength)
        return value, gradient.ravel()

    options = {"maxiter": 500, "gtol": TOLERANCE / (2 * math.sqrt(math.prod(shape))), "ftol": 0.0}
    found = np.asarray(
        minimize(flat, np.zeros(math.prod(shape)), jac=True, method="L-BFGS-B", options=options).x
    )
    if not np.isfinite(found).all():
        found = np.zeros(math.prod(shape))
    rate = 1 / (strength + len(x) / 2)  # the loss of a record bends by at most 1/2
    while np.linalg.norm(gradient := flat(found)[1]) > TOLERANCE:
        found = found - rate * gradient
    return found.reshape(shape)


@dataclass(frozen=True, eq=False, repr=False)
class StableScores:
    """Scores of softmax regression of strength lambda on private records, on a sample at `rate`
    drawn anew for every question.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    classes: int
    strength: float
    rate: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        check.integer("classes", self.classes, least=2)
        check.positive("strength", self.strength)
        check.sampling_rate("rate", check.positive("rate", self.rate))

    @property
    def features(self) -> int:
        """How many numbers a question has."""
        return int(self.x.shape[1])

    @property
    def moved(self) -> Bound:
        """What one unit moves all scores by, together."""
        return Bound(l2=(math.sqrt(2) + 2 * TOLERANCE) / self.strength * (1 + 1e-9))

    @cached_property
    def _rows(self) -> tuple[Matrix, Matrix]:
        return within(self.x), np.eye(self.classes)[self.y]

    @cached_property
    def _whole(self) -> Matrix:
        return fitted(*self._rows, self.strength)

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """See `predictor.Voters`."""

        def of(row: Matrix) -> Ask:
            return lambda bits: Bounded(self._learnt(bits) @ row, self.moved)

        return [of(row) for row in within(questions)]

    def _learnt(self, bits: Bits | None) -> Matrix:
        if self.rate == 1:
            return self._whole
        if bits is None:
            raise Unsupported("scores of a sample without its random bits", 'use the rule "scores"')
        x, targets = self._rows
        present = coins(len(x), Fraction(self.rate), bits)
        return fitted(x[present], targets[present], self.strength)

    def fingerprint(self) -> bytes:
        """See `predictor.Voters`."""
        whole = hashlib.blake2b(
            f"{self.x.shape} {self.classes} {self.strength} {self.rate}".encode()
        )
        for part in (self.x, self.y):
            whole.update(part.tobytes())
        return whole.digest()
