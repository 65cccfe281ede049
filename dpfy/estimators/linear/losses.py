"""Losses of linear models: their derivatives in the scores, and how steep and how curved they
are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ScoreLoss(ABC):
    """A convex loss f(score, target), of one score or of one for each class.

    `steepest` is the largest norm of its derivative in the scores, by which slopes are cut where it
    has none; `curvature` that of its second derivative. `usual` is a second derivative that records
    have on average, for preconditioning. `one_sided`: the sign of the derivative depends on the
    target alone.
    """

    steepest: ClassVar[float]
    curvature: ClassVar[float]
    usual: ClassVar[float]
    start: ClassVar[float] = 0.0
    """A constant score to begin with."""
    one_sided: ClassVar[bool] = False
    gradients: ClassVar[int] = 30
    """How many noisy gradients are released where nobody says it and all columns are numbers."""

    def level(self, slope: float) -> tuple[float, float]:
        """A better constant score, and the second derivative there, from the mean slope at `start`;
        as they were where none is known.
        """
        return self.start, self.usual

    @abstractmethod
    def slopes(self, scores: Floats, target: Floats) -> Floats:
        """The derivative in the scores [records, outputs]; `target` has the same shape."""

    @abstractmethod
    def bends(self, scores: Floats, target: Floats) -> Floats:
        """The second derivative of each record, of a loss of one score."""


@dataclass(frozen=True)
class LogisticLoss(ScoreLoss):
    """log(1 + exp(-score)) for target 1, log(1 + exp(score)) for target 0."""

    steepest: ClassVar[float] = 1.0
    curvature: ClassVar[float] = 0.25
    usual: ClassVar[float] = 0.15
    one_sided: ClassVar[bool] = True

    def slopes(self, scores: Floats, target: Floats) -> Floats:
        return np.asarray(expit(scores) - target)

    def bends(self, scores: Floats, target: Floats) -> Floats:
        found = expit(scores)
        return np.asarray(found * (1 - found))[:, 0]


@dataclass(frozen=True)
class SoftmaxLoss(ScoreLoss):
    """Minus the log of the probability of the class that the target marks."""

    steepest: ClassVar[float] = math.sqrt(2)
    curvature: ClassVar[float] = 0.5
    usual: ClassVar[float] = 0.1

    def slopes(self, scores: Floats, target: Floats) -> Floats:
        found = np.exp(scores - scores.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        found -= target
        return np.asarray(found)

    def bends(self, scores: Floats, target: Floats) -> Floats:
        raise NotImplementedError("the second derivative of a softmax is a matrix")


@dataclass(frozen=True)
class HuberLoss(ScoreLoss):
    """Half of the squared difference; its slopes are cut to 1, which makes it Huber's."""

    steepest: ClassVar[float] = 1.0
    curvature: ClassVar[float] = 1.0
    usual: ClassVar[float] = 1.0

    def slopes(self, scores: Floats, target: Floats) -> Floats:
        return np.asarray(scores - target)

    def bends(self, scores: Floats, target: Floats) -> Floats:
        return np.ones(len(scores))


@dataclass(frozen=True)
class HuberHingeLoss(ScoreLoss):
    """The hinge max(0, 1 - m) of the margin m = score for target 1, -score for target 0, rounded
    off within 1/2 of its corner.
    """

    steepest: ClassVar[float] = 1.0
    curvature: ClassVar[float] = 1.0
    usual: ClassVar[float] = 0.4
    one_sided: ClassVar[bool] = True
    WIDTH: ClassVar[float] = 0.5

    def slopes(self, scores: Floats, target: Floats) -> Floats:
        sign = 2 * target - 1
        return np.asarray(
            -sign * np.clip((1 + self.WIDTH - sign * scores) / (2 * self.WIDTH), 0.0, 1.0)
        )

    def bends(self, scores: Floats, target: Floats) -> Floats:
        margin = (2 * target - 1) * scores
        return np.asarray(np.abs(1 - margin) < self.WIDTH).astype(np.float64)[:, 0] / (
            2 * self.WIDTH
        )


@dataclass(frozen=True)
class PoissonLoss(ScoreLoss):
    """exp(score) - target score for targets in [0, 1], shares of their largest value; above score 0
    it goes on as a straight line.
    """

    steepest: ClassVar[float] = 1.0
    curvature: ClassVar[float] = 1.0
    usual: ClassVar[float] = 0.15
    start: ClassVar[float] = -2.0
    gradients: ClassVar[int] = 24

    def level(self, slope: float) -> tuple[float, float]:
        mean = min(
            max(math.exp(self.start) - slope, 0.01), 0.9
        )  # of the targets: a constant score is best where exp(score) is that
        return math.log(mean), max(mean, self.usual)

    def slopes(self, scores: Floats, target: Floats) -> Floats:
        return np.asarray(np.exp(np.minimum(scores, 0.0)) - target)

    def bends(self, scores: Floats, target: Floats) -> Floats:
        return np.where(scores < 0, np.exp(np.minimum(scores, 0.0)), 0.0)[:, 0]
