"""PrivBayes: a Bayesian network as a model. Every column is drawn from a noisy table of it and the
columns that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dpfy.accounting.filters import noise_of
from dpfy.core.errors import Unsupported
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique, Domain
from dpfy.synthetic.estimate import MEAN, FitSettings, Measurement, combined
from dpfy.synthetic.methods import FittedModel, SynthesisMethod, SynthesisTask, by_cells, singles
from dpfy.synthetic.rows import given_others

FALLBACK = 1e-6
"""The weight of a column's own shares where a table says nothing."""


@dataclass
class BayesianNetwork:
    """Columns in the order in which they are drawn, each with the marginal that it is drawn from,
    and the noisy tables.
    """

    domain: Domain
    joints: Sequence[tuple[int, Clique]]
    tables: Mapping[Clique, NDArray[np.float64]]
    total: float

    def marginal(self, clique: Clique) -> Tensor:
        """Not known without drawing rows."""
        raise Unsupported("a marginal of a Bayesian network", "draw rows and count them")

    def rows(self, count: int, rng: np.random.Generator) -> Codes:
        """So many rows."""
        rows = np.zeros((count, len(self.domain.columns)), np.int64)
        for v, clique in self.joints:
            own = self.tables[(v,)] / max(self.tables[(v,)].sum(), 1e-300)
            shape = [-1 if u == v else 1 for u in clique]
            rows[:, v] = given_others(
                self.tables[clique] + FALLBACK * own.reshape(shape), clique, v, rows, rng
            )
        return rows

    def facts(self) -> Mapping[str, Any]:
        """Its arrows."""
        names = self.domain.names
        given = {names[v]: [names[u] for u in clique if u != v] for v, clique in self.joints}
        return {"model": "network", "depends_on": given}


@dataclass(frozen=True)
class ConditionalTables:
    """Noisy tables, negative numbers counted as 0."""

    def network(
        self,
        task: SynthesisTask,
        measured: Sequence[Measurement],
        joints: Sequence[tuple[int, Clique]],
    ) -> BayesianNetwork:
        """The network of these tables."""
        tables = {
            c: np.maximum(m.values.detach().cpu().numpy(), 0.0)
            for c, m in combined(measured).items()
        }
        return BayesianNetwork(task.domain, joints, tables, task.total(measured))

    def fit(
        self,
        task: SynthesisTask,
        measured: Mapping[Clique, Measurement],
        total: float,
        start: FittedModel | None,
        how: FitSettings,
    ) -> FittedModel:
        """Independent columns: a network without arrows."""
        return self.network(
            task, list(measured.values()), [(v, (v,)) for v in range(len(task.domain.columns))]
        )

    def fits(self, task: SynthesisTask, held: Sequence[Clique], new: Clique, share: float) -> bool:
        """Tables of any marginal that is counted."""
        return True


CONDITIONALS = ConditionalTables()


def network(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Columns one after the other, each with up to two columns before it on which it depends most
    (Zhang et al. 2017).

    The score is how far the counts are from independence, the column's own shares being those that
    were released: a record adds 1 to the counts and 1 to what is expected of them, so half of the
    distance changes by at most 1.
    """
    meter, domain = task.meter, task.domain
    measured = singles(task, method)
    shares = [np.maximum(m.values.numpy(), 0.0) for m in measured]
    shares = [
        held / held.sum() if held.sum() else np.full(len(held), 1 / len(held)) for held in shares
    ]
    tables = meter.marginals.tables
    total, parts = task.total(measured), max(1, len(domain.columns) - 1)
    deviation = meter.deviation(noise_of(meter.left / parts))
    known, joints = [_largest(domain)], []
    while len(known) < len(domain.columns):
        options = [
            (v, tuple(sorted((v, *parents))))
            for v in range(len(domain.columns))
            if v not in known
            for size in (1, 2)
            for parents in combinations(sorted(known), size)
        ]
        useful = [
            (v, c)
            for v, c in options
            if c in tables and MEAN * deviation * domain.cells(c) <= total / 2
        ]
        useful = useful or [(v, (v,)) for v in range(len(domain.columns)) if v not in known]
        v, clique = useful[meter.choose([_dependence(tables, shares[v], v, c) for v, c in useful])]
        known.append(v)
        joints.append((v, clique))
    wanted = [clique for _, clique in joints if len(clique) > 1]
    if wanted:
        measured += meter.measure_all(
            list(dict.fromkeys(wanted)), meter.left, by_cells(domain, list(dict.fromkeys(wanted)))
        )
    return CONDITIONALS.network(task, measured, [(known[0], (known[0],)), *joints])


def _largest(domain: Domain) -> int:
    """The column with the most cells: none should depend on others less than it."""
    return max(range(len(domain.columns)), key=lambda v: domain.columns[v].cells)


def _dependence(tables: Any, shares: np.ndarray, v: int, clique: Clique) -> float:
    """Half the L1 distance between the counts of a marginal and what they would be if column v did
    not depend on the others.
    """
    if len(clique) == 1:
        return 0.0
    counts = tables[clique]
    axis = clique.index(v)
    shape = [-1 if a == axis else 1 for a in range(counts.ndim)]
    return (
        float(np.abs(counts - counts.sum(axis=axis, keepdims=True) * shares.reshape(shape)).sum())
        / 2
    )


PRIVBAYES = SynthesisMethod(
    network,
    CONDITIONALS,
    "a Bayesian network (PrivBayes)",
    0.3,
    0.2,
    rounds=1,
    tree=True,
    least_degree=3,
)
