"""What a solver of linear models is: what it will release, what its proof needs, and how it finds
weights from what it releases.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core.values import Bound
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.claim import ProofCondition
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.linear.design import Design, RowLayout
from dpfy.estimators.linear.losses import ScoreLoss
from dpfy.estimators.records import EncodedRecords

Floats = NDArray[np.float64]
UNIT = Bound(l2=1.0)
NORMS = "norms of rows"
NORM_SHARE = 0.01
CELLS, RATIO, MIDDLE = 24, 0.9, 0.5
"""The histogram of norms: cells that shrink by a ratio from the largest norm on; the quantile that
is taken.
"""
WAY_OUT = 'use solver="gradient", whose proof needs nothing but bounded slopes'


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
    design: Design
    target: Floats
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
    task: LinearTask, data: EncodedRecords, target: Floats, fit: FitSession, keep: bool = True
) -> LinearProblem:
    """The records as rows, whose features are shortened to the public norm or to the median, which
    is bought.
    """
    layout = task.layout
    if task.norm is not None and task.norm >= layout.largest:
        return LinearProblem(
            task, Design(layout, data, layout.largest, keep=keep), target, layout.largest
        )
    norms = layout.norms(data)
    norm = bought_norm(layout, norms, fit) if task.norm is None else task.norm
    return LinearProblem(task, Design(layout, data, norm, norms, keep), target, norm)


def bought_norm(layout: RowLayout, norms: Floats, fit: FitSession, share: float = MIDDLE) -> float:
    """The norm that this share of records has at most, rounded up to the edge of a cell; the
    largest possible one where noise hides it.
    """
    edges = layout.largest * RATIO ** np.arange(CELLS)  # from the largest down
    places = np.clip(np.searchsorted(-edges, -norms, side="left") - 1, 0, CELLS - 1)
    counts = fit.release(NORMS, np.bincount(places, minlength=CELLS))
    below = np.cumsum(counts[::-1])[::-1]  # how many have at most the norm of each edge
    reach = 2 * fit.round(NORMS).scale * math.sqrt(CELLS)
    held = np.flatnonzero(below >= share * below[0] + reach)
    return float(edges[held[-1]]) if len(held) and below[0] > 2 * reach else layout.largest
