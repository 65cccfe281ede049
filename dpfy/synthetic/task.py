"""What a method works on: the public side of a synthesis (domain, workload, limits), and the meter,
its only way to the counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique, Domain
from dpfy.synthetic.estimate import WHOLE, FitSettings, Measurement, combined, total_of
from dpfy.synthetic.releases import MarginalReleases

Progress = Callable[[str, float], None]
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


def nothing_to_show(what: str, share: float) -> None:
    """No progress is shown."""


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
    progress: Progress = nothing_to_show
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


def workload_weights(
    workload: Mapping[Clique, float], candidates: Iterable[Clique]
) -> dict[Clique, float]:
    """How much a marginal matters for a workload: the sum over its marginals of their weight times
    the columns they share.

    McKenna, Mullins, Sheldon & Miklau 2022.
    """
    sets = [(frozenset(clique), weight) for clique, weight in workload.items()]
    return {c: sum(weight * len(held.intersection(c)) for held, weight in sets) for c in candidates}
