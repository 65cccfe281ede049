"""The graphical model as an estimator: fitted marginals on a junction tree of limited size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique
from dpfy.synthetic.estimate import FitSettings, GraphicalModel, Measurement, fitted
from dpfy.synthetic.graph import model_cells
from dpfy.synthetic.rows import drawn
from dpfy.synthetic.task import FittedModel, SynthesisTask


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
        """See `Estimator`."""
        warm = start.potentials if isinstance(start, GraphicalModel) else None
        found = fitted(task.domain.sizes, measured, total, fixed=task.fixed, start=warm, how=how)
        return FittedGraphicalModel(found.beliefs, found.potentials, found.total, found.sweeps)

    def fits(self, task: SynthesisTask, held: Sequence[Clique], new: Clique, share: float) -> bool:
        """See `Estimator`."""
        rules = [clique for clique, _ in task.fixed]
        if any(set(new) <= set(old) for old in held):
            return True
        return (
            model_cells(task.domain.sizes, [*held, *rules, new])
            <= max(share, 0.0) * task.most_cells
        )


GRAPHICAL = GraphicalEstimator()
