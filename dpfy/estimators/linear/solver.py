"""What a solver of linear models is: what it will release, what its proof needs, and how it finds
weights from what it releases.

Losses of linear models: their derivatives in the scores, and how steep and how curved they
are.

Solvers that release a quadratic function of the weights once, and minimise it: sufficient
statistics, and the functional mechanism.

A record adds the matrix z z' of z = (x, t), row and target, less its last corner: x x' and x t
twice, of norm at most sqrt(3) for a row in the unit ball and a target in [-1, 1]. All of it is one
release with one charge. Entries that stand on both sides of the diagonal are released twice and
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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bound
from dpfy.engines.expressions import kept
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.claim import ProofCondition
from dpfy.estimators.engine_records import EngineRecords, Records
from dpfy.estimators.fitting import FitSession, WholeSteps
from dpfy.estimators.linear import engine_design
from dpfy.estimators.linear.design import GRAM, Design, RowLayout
from dpfy.estimators.linear.engine_design import EngineDesign

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
        return scores - target

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
        sign = target * 2.0 - 1.0
        inside = (sign * scores * -1.0 + (1 + self.WIDTH)) / (2 * self.WIDTH)
        return sign * -1.0 * inside.clip(0.0, 1.0)

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


UNIT = Bound(l2=1.0)
NORMS = "norms of rows"
NORM_SHARE = 0.01
CELLS, RATIO, MIDDLE = 24, 0.9, 0.5
"""The histogram of norms: cells that shrink by a ratio from the largest norm on; the quantile that
is taken.
"""
WAY_OUT = 'use solver="gradient", whose proof needs only bounded slopes'


@dataclass(frozen=True)
class LinearTask:
    """What is solved, as far as it is public: a loss, the layout of rows, and the settings of the
    model.
    """

    loss: ScoreLoss
    layout: RowLayout
    terms: FitTerms
    outputs: int
    alpha: float | None = None
    norm: float | None = None
    clip: float | None = None
    rounds: int | None = None

    @property
    def steepest(self) -> float:
        """The slope that the loss is cut to, where the solver fixes it before."""
        return self.loss.steepest if self.clip is None else min(self.clip, self.loss.steepest)


@dataclass(frozen=True)
class LinearProblem:
    """A task with its private records: rows in the unit ball, times `design.radius`, and targets
    [records, outputs].
    """

    task: LinearTask
    design: Any
    target: Any
    norm: float

    @property
    def radius(self) -> float:
        """What rows of the unit ball are multiplied by to be rows of features."""
        return self.design.radius


@dataclass(frozen=True)
class LinearSolution:
    """Weights [width, outputs] for rows of features; `noise` is about the deviation that noise
    gives each weight, or at most that of all.

    It follows from what was released and from the scale of the noise.
    """

    weights: Floats
    noise: Floats | float


class Solver(ABC):
    """A way to the weights.

    Guarantees: `needs`, `bits` and `conditions` depend on the task alone; `solve` depends on the
    records through releases alone.
    """

    buys_norm: ClassVar[bool] = True
    """Whether rows are shortened to a norm that is bought, where none is public."""

    weighs: ClassVar[bool] = False
    """Whether what a record adds is multiplied by its weight."""

    keeps_rows: ClassVar[bool] = True
    """Whether rows are read more than once, and so kept."""

    def refuse(self, task: LinearTask) -> None:
        """Refuse (`Unsupported`) a task for which the solver has no proof."""
        return

    @abstractmethod
    def needs(self, task: LinearTask) -> list[ReleaseNeed]:
        """What will be released, beside the norm of rows."""

    def bits(self, task: LinearTask) -> Mapping[str, int]:
        """Fractional bits of the sums of rounds."""
        return {}

    def conditions(self, task: LinearTask) -> Sequence[ProofCondition]:
        """What the proof needs beside bounded contributions."""
        return ()

    @abstractmethod
    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        """The weights."""


def norm_needs(norm: float | None, terms: FitTerms) -> list[ReleaseNeed]:
    """What buys the norm of features, where it is not public."""
    return [] if norm is not None else [ReleaseNeed(NORMS, one_of_each(1, terms), share=NORM_SHARE)]


def problem_of(
    task: LinearTask, data: Records, target: Any, fit: FitSession, keep: bool = True
) -> LinearProblem:
    """The records as rows, whose features are shortened to the public norm or to the median, which
    is bought.
    """
    layout = task.layout
    if isinstance(data, EngineRecords):
        return _problem_in_engine(task, data, target, fit, keep)
    if task.norm is not None and task.norm >= layout.largest:
        return LinearProblem(
            task, Design(layout, data, layout.largest, keep=keep), target, layout.largest
        )
    norms = layout.norms(data)
    norm = bought_norm(layout, norms, fit) if task.norm is None else task.norm
    return LinearProblem(task, Design(layout, data, norm, norms, keep), target, norm)


def _problem_in_engine(
    task: LinearTask, data: EngineRecords, target: Any, fit: FitSession, keep: bool
) -> LinearProblem:
    layout = task.layout
    norm = bought_norm(layout, data, fit) if task.norm is None else task.norm
    norm = min(norm, layout.largest)
    design = EngineDesign(layout, data, target, norm, keep)
    return LinearProblem(task, design, kept("target") * 2.0**-30, norm)


def norm_counts(norms: Floats, edges: Floats) -> NDArray[np.int64]:
    """How many norms lie in each cell between edges that fall."""
    places = np.clip(np.searchsorted(-edges, -norms, side="left") - 1, 0, len(edges) - 1)
    return np.bincount(places, minlength=len(edges))


def bought_norm(
    layout: RowLayout, norms: Floats | EngineRecords, fit: FitSession, share: float = MIDDLE
) -> float:
    """The norm that this share of records has at most, rounded up to the edge of a cell; the
    largest possible one where noise hides it.
    """
    edges: Any = layout.largest * RATIO ** np.arange(CELLS)  # from the largest down
    found = (
        engine_design.norm_counts(layout, norms, edges)
        if isinstance(norms, EngineRecords)
        else norm_counts(norms, edges)
    )
    counts = fit.release(NORMS, found)
    below = np.cumsum(counts[::-1])[::-1]  # how many have at most the norm of each edge
    reach = 2 * fit.round(NORMS).scale * math.sqrt(CELLS)
    held = np.flatnonzero(below >= share * below[0] + reach)
    return float(edges[held[-1]]) if len(held) and below[0] > 2 * reach else layout.largest


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

    def parts(self, problem: LinearProblem) -> tuple[float, float, Any]:
        """The loss as a z^2 / 2 - b t z + c: a, b, and the numbers t in [-1, 1]."""
        return 1.0, 1.0, problem.target

    def solve(self, problem: LinearProblem, fit: FitSession) -> LinearSolution:
        design, width = problem.design, problem.design.width
        bend, slope, target = self.parts(problem)
        moments = design.gram(target)
        twice = WholeSteps(np.concatenate([moments, moments[:, width:]], axis=1), GRAM)
        released = fit.release(STATISTICS, twice, GRAM)
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

    def parts(self, problem: LinearProblem) -> tuple[float, float, Any]:
        if isinstance(problem.task.loss, LogisticLoss):
            return 0.25, 0.5, problem.target * 2.0 - 1.0
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
