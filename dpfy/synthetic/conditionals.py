"""A Bayesian network as a model: every column is drawn from a noisy table of it and the columns
that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.errors import Unsupported
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique, Domain
from dpfy.synthetic.estimate import FitSettings, Measurement, combined
from dpfy.synthetic.rows import given_others
from dpfy.synthetic.task import FittedModel, SynthesisTask

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
