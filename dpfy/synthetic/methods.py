"""The methods: how marginals are selected, how the budget is split, and which estimator makes a
distribution of them.

| method | selection | split | estimator |
|---|---|---|---|
| aim | the worst approximated marginal, again and again, with less noise when it drowns what is gained | adaptive | graphical model |
| mst | a forest of the strongest pairs, chosen at once | thirds | graphical model |

A method sees the counts through the meter alone, so none can spend more than its claim. What it
decides from public facts and from what was released costs nothing. dpfy-lab adds others.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpfy.accounting.filters import noise_of, squares
from dpfy.runs.run import Progress, quiet
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique, Domain
from dpfy.synthetic.estimate import (
    MEAN,
    WHOLE,
    FitSettings,
    GraphicalModel,
    Measurement,
    combined,
    fitted,
    total_of,
)
from dpfy.synthetic.graph import model_cells
from dpfy.synthetic.releases import MarginalReleases
from dpfy.synthetic.rows import drawn

WEIGHT = 2 / 3
"""Of marginals that are measured together: squares in proportion to cells to this power make their
L1 errors together least.
"""
QUICK = FitSettings(sweeps=20, tolerance=1e-3)
"""How models are fitted between two choices."""

"""What is being done, and which share of the budget is spent."""


class FittedModel(Protocol):
    """A distribution that was fitted to measurements."""

    total: float

    def marginal(self, clique: Clique) -> Tensor:
        """Its probabilities."""

    def rows(self, count: int, rng: np.random.Generator) -> Codes:
        """So many rows of it."""

    def facts(self) -> Mapping[str, Any]:
        """What there is to say about it, as JSON."""


class MarginalEstimator(Protocol):
    """From measurements to a model."""

    def fit(
        self,
        task: SynthesisTask,
        measured: Mapping[Clique, Measurement],
        total: float,
        start: FittedModel | None,
        how: FitSettings,
    ) -> FittedModel:
        """The model of these measurements; `start` is that of some of them."""

    def fits(self, task: SynthesisTask, held: Sequence[Clique], new: Clique, share: float) -> bool:
        """Whether a model of one marginal more is small enough, when this share of the budget is
        spent.
        """


@dataclass
class SynthesisTask:
    """One synthesis. `weights` are the marginals that may be measured, with how much each matters;
    `most_cells` limits the model.

    `records` is the number of records where it is public; `public` are log potentials of a public
    table to start from.
    """

    domain: Domain
    weights: Mapping[Clique, float]
    meter: MarginalReleases
    most_cells: int
    records: int | None = None
    device: str = "cpu"
    progress: Progress = quiet
    public: Sequence[tuple[Clique, Tensor]] = ()

    @cached_property
    def masks(self) -> list[tuple[Clique, Tensor]]:
        """What can be, by the constraints."""
        allowed = [
            (rule.clique, np.ascontiguousarray(rule.allowed(self.domain.columns)))
            for rule in self.domain.constraints
        ]
        return [(clique, torch.from_numpy(mask).to(self.device)) for clique, mask in allowed]

    @cached_property
    def fixed(self) -> list[tuple[Clique, Tensor]]:
        """Potentials that every model has: those of the constraints, and of a public table."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        rules = [(clique, torch.where(mask, zero, zero - math.inf)) for clique, mask in self.masks]
        return [*rules, *((clique, logs.to(self.device)) for clique, logs in self.public)]

    def total(self, measurements: Iterable[Measurement]) -> float:
        """The number of records: public, or from what was measured."""
        return float(self.records) if self.records is not None else total_of(measurements)

    def fit(
        self,
        estimator: MarginalEstimator,
        measurements: Sequence[Measurement],
        start: FittedModel | None = None,
        how: FitSettings = WHOLE,
    ) -> FittedModel:
        """The model of all measurements so far."""
        moved = [Measurement(m.clique, m.values.to(self.device), m.deviation) for m in measurements]
        return estimator.fit(self, combined(moved), self.total(moved), start, how)

    @property
    def ones(self) -> list[Clique]:
        """Every column by itself."""
        return [(number,) for number in range(len(self.domain.columns))]

    def distance(self, clique: Clique, model: FittedModel) -> float:
        """How far the counts of a marginal are from the model's, in L1: sensitive, for the meter's
        choices alone.

        Guarantees: a record more or less changes it by at most 1.
        """
        expected = model.marginal(clique).detach().cpu().numpy() * model.total
        return float(np.abs(self.meter.marginals.tables[clique] - expected).sum())


class FittedGraphicalModel(GraphicalModel):
    """A fitted distribution from which rows can be drawn."""

    def rows(self, count: int, rng: np.random.Generator) -> Codes:
        """So many rows."""
        return drawn(self.beliefs, count, rng)

    def facts(self) -> Mapping[str, Any]:
        """Its tables."""
        return {"model": "graphical", "tables": len(self.beliefs.tree.cliques), "cells": self.cells}


@dataclass(frozen=True)
class GraphicalEstimator:
    """Distributions of largest entropy on a junction tree. The limit on its cells grows with what
    is spent of the budget, so that early choices do not take all of it.
    """

    def fit(
        self,
        task: SynthesisTask,
        measured: Mapping[Clique, Measurement],
        total: float,
        start: FittedModel | None,
        how: FitSettings,
    ) -> FittedModel:
        """See `MarginalEstimator`."""
        warm = start.potentials if isinstance(start, GraphicalModel) else None
        found = fitted(task.domain.sizes, measured, total, fixed=task.fixed, start=warm, how=how)
        return FittedGraphicalModel(found.beliefs, found.potentials, found.total, found.sweeps)

    def fits(self, task: SynthesisTask, held: Sequence[Clique], new: Clique, share: float) -> bool:
        """See `MarginalEstimator`."""
        rules = [clique for clique, _ in task.fixed]
        if any(set(new) <= set(old) for old in held):
            return True
        return (
            model_cells(task.domain.sizes, [*held, *rules, new])
            <= max(share, 0.0) * task.most_cells
        )


GRAPHICAL = GraphicalEstimator()


@dataclass(frozen=True)
class SynthesisMethod:
    """One row of the table. `rounds` is the number of choices, for each column; one is never chosen
    for the last column of a `tree`.

    `selection` is the share of the budget, in zCDP, that choices have; `first` the share of the sum
    of squares for single columns. Where noise begins to drown what is gained, it is made `quicken`
    times less; `aware` methods weigh marginals by the workload and take their noise into account.
    `least_degree` is the size of marginals that must be counted.
    """

    rule: Callable[[SynthesisTask, SynthesisMethod], FittedModel]
    estimator: MarginalEstimator
    words: str
    selection: float
    first: float
    rounds: int
    tree: bool = False
    quicken: float = 1.0
    aware: bool = True
    least_degree: int = 1

    def choices(self, columns: int) -> int:
        """How many marginals are chosen at most: from the number of columns alone."""
        return max(0, self.rounds * columns - self.tree)

    def measurements(self, columns: int) -> int:
        """How many marginals are measured at most: single columns, and what is chosen."""
        return columns + self.choices(columns)


def by_cells(domain: Domain, cliques: Sequence[Clique]) -> list[float]:
    return [float(domain.cells(clique)) ** WEIGHT for clique in cliques]


def singles(task: SynthesisTask, method: SynthesisMethod) -> list[Measurement]:
    """Every column by itself, with the first part of the terms."""
    share = task.meter.whole * Fraction(method.first)
    return task.meter.measure_all(task.ones, share, by_cells(task.domain, task.ones))


def adaptive(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Choose the marginal that the model approximates worst, measure it, fit, and again until
    nothing is left.

    A marginal whose noise would be larger than what it could tell is no candidate; nor is one that
    makes the model too large. Where a measurement moves the model by no more than its noise, the
    noise is too large: from then on it is `quicken` times less.
    """
    meter = task.meter
    measured = singles(task, method)
    model = task.fit(method.estimator, measured, None, QUICK)
    cost = meter.left / max(1, meter.choices)
    last = False
    while not last:
        last = meter.left < 2 * cost or meter.choices <= 1
        noise = noise_of(meter.left if last else cost)
        clique = _worst(
            task,
            method,
            model,
            measured,
            meter.deviation(noise),
            float((meter.whole - meter.left + squares(noise)) / meter.whole),
        )
        before = model.marginal(clique) * model.total
        measured.append(meter.measure(clique, noise))
        model = task.fit(method.estimator, measured, model, QUICK)
        moved = float((model.marginal(clique) * model.total - before).abs().sum())
        if moved <= MEAN * meter.deviation(noise) * task.domain.cells(clique):
            cost = min(cost * Fraction(method.quicken**2), meter.left) if meter.left else cost
        task.progress(task.domain.words(clique), float(1 - meter.left / meter.whole))
    return task.fit(method.estimator, measured, model)


def _worst(
    task: SynthesisTask,
    method: SynthesisMethod,
    model: FittedModel,
    measured: Sequence[Measurement],
    deviation: float,
    share: float,
) -> Clique:
    """The marginal to be measured next, with noise of this deviation: chosen by how far it is from
    the model, less its noise.
    """
    held = list(dict.fromkeys(m.clique for m in measured))
    noise = {
        c: MEAN * deviation * task.domain.cells(c) if method.aware else 0.0 for c in task.weights
    }
    candidates = [
        c
        for c in task.weights
        if noise[c] <= model.total and method.estimator.fits(task, held, c, share)
    ]
    candidates = candidates or task.ones
    weights = {c: task.weights[c] if method.aware else 1.0 for c in candidates}
    top = max(weights.values())
    scores = [weights[c] / top * (task.distance(c, model) - noise[c]) for c in candidates]
    return candidates[task.meter.choose(scores)]


def forest(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Pairs that depend most on each other, none of which close a circle; all are chosen before one
    of them is measured.
    """
    meter, domain = task.meter, task.domain
    measured = singles(task, method)
    model = task.fit(method.estimator, measured, None, QUICK)
    columns = range(len(domain.columns))
    deviation = meter.deviation(noise_of(meter.left / max(1, len(columns) - 1)))
    noise = {pair: MEAN * deviation * domain.cells(pair) for pair in combinations(columns, 2)}
    scores = {
        pair: task.distance(pair, model) - noise[pair]
        for pair in noise
        if noise[pair] <= model.total
    }
    group, edges = list(columns), []
    for _ in range(len(columns) - 1):
        open_pairs = [pair for pair in scores if group[pair[0]] != group[pair[1]]]
        if not open_pairs:
            break
        a, b = open_pairs[meter.choose([scores[pair] for pair in open_pairs])]
        edges.append((a, b))
        group = [group[a] if held == group[b] else held for held in group]
    if edges:
        measured += meter.measure_all(edges, meter.left, by_cells(domain, edges))
    return task.fit(method.estimator, measured, model)


METHODS = {
    "aim": SynthesisMethod(
        adaptive,
        GRAPHICAL,
        "adaptive and iterative, with a graphical model (AIM)",
        0.1,
        0.3,
        rounds=2,
        quicken=2.0,
    ),
    "mst": SynthesisMethod(
        forest,
        GRAPHICAL,
        "a forest of pairs, with a graphical model (MST)",
        0.2,
        0.35,
        rounds=1,
        tree=True,
        least_degree=2,
    ),
}
