"""A relaxed table: rows whose cells are probabilities, moved by gradient descent until their
marginals agree with what was measured.

Every row is a product of distributions, one for each column, and the table a mixture of its rows
(Aydore et al. 2021, RAP, with the softmax of Liu, Vietri & Wu 2021, GEM). A marginal is the mean
over rows of the products of their probabilities, so that no junction tree is needed, whatever is
measured; what is lost is the guarantee that the fit is the best there is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique
from dpfy.synthetic.estimate import FitSettings, Measurement
from dpfy.synthetic.methods import FittedModel, SynthesisMethod, SynthesisTask, adaptive
from dpfy.synthetic.rows import in_proportion

ROWS = 400
STEPS, RATE = 400, 0.1
"""Steps of Adam for a whole fit; a quick one takes a fraction of them."""
SEED = 7
"""Of the rows before the first fit: public, since it protects nothing."""


@dataclass
class ProductMixture:
    """A mixture of products: logits [rows, cells of all columns]."""

    sizes: Sequence[int]
    logits: Tensor
    total: float

    def __post_init__(self) -> None:
        self.probabilities = [
            torch.softmax(part, dim=1) for part in _parts(self.logits, self.sizes)
        ]

    def marginal(self, clique: Clique) -> Tensor:
        """See `FittedModel`."""
        return _marginal([self.probabilities[v] for v in clique])

    def rows(self, count: int, rng: np.random.Generator) -> Codes:
        """A row of the mixture for each row, as often as every other; then a cell of every column
        in its proportions.
        """
        parts = len(self.logits)
        keys = (np.arange(count) * parts // max(count, 1)).astype(np.int64)
        columns = [
            in_proportion(held.detach().cpu().numpy(), keys, rng) for held in self.probabilities
        ]
        return np.stack(columns, axis=1)[rng.permutation(count)]

    def facts(self) -> Mapping[str, Any]:
        """Its size."""
        return {"model": "relaxed table", "rows": len(self.logits)}


def _parts(logits: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = [0, *accumulate(sizes)]
    return [logits[:, a:b] for a, b in pairwise(ends)]


def _marginal(columns: Sequence[Tensor]) -> Tensor:
    """The mean over rows of the product of the columns' probabilities."""
    left = columns[0]
    for middle in columns[1:-1]:
        left = (left[:, :, None] * middle[:, None, :]).flatten(1)
    if len(columns) == 1:
        return left.mean(0)
    found = left.T @ columns[-1] / len(left)
    return found.reshape([column.shape[1] for column in columns])


@dataclass(frozen=True)
class RelaxedEstimator:
    """Adam on the logits, against squares of what a marginal is off by over its noise."""

    def fit(
        self,
        task: SynthesisTask,
        measured: Mapping[Clique, Measurement],
        total: float,
        start: FittedModel | None,
        how: FitSettings,
    ) -> FittedModel:
        """See `MarginalEstimator`."""
        sizes = task.domain.sizes
        logits = (
            start.logits.clone() if isinstance(start, ProductMixture) else _first(task, measured)
        )
        logits.requires_grad_(True)
        goals = [(c, m.values / total, (total / m.deviation) ** 2 / 2) for c, m in measured.items()]
        optimizer = torch.optim.Adam([logits], lr=RATE)
        forbidden = [(clique, ~mask) for clique, mask in task.masks]
        for _ in range(STEPS if how.sweeps > 20 else STEPS // 8):
            columns = [torch.softmax(part, dim=1) for part in _parts(logits, sizes)]
            parts = [
                weight * (_marginal([columns[v] for v in c]) - goal).square().sum()
                for c, goal, weight in goals
            ]
            parts += [
                total * _marginal([columns[v] for v in c])[never].sum() for c, never in forbidden
            ]
            optimizer.zero_grad()
            torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return ProductMixture(sizes, logits.detach(), total)

    def fits(self, task: SynthesisTask, held: Sequence[Clique], new: Clique, share: float) -> bool:
        """See `MarginalEstimator`: the largest marginal is limited, not the model."""
        return task.domain.cells(new) <= task.most_cells


def _first(task: SynthesisTask, measured: Mapping[Clique, Measurement]) -> Tensor:
    """Rows near the product of the measured single columns, told apart by a little noise."""
    parts = []
    for v, size in enumerate(task.domain.sizes):
        held = measured.get((v,))
        shares = (
            torch.full((size,), 1 / size, dtype=torch.float64)
            if held is None
            else held.values.clamp(min=0.5).cpu()
        )
        parts.append(torch.log(shares / shares.sum()))
    noise = torch.randn(
        ROWS,
        sum(task.domain.sizes),
        generator=torch.Generator().manual_seed(SEED),
        dtype=torch.float64,
    )
    return (torch.cat(parts)[None, :] + noise / math.sqrt(2)).to(task.device)


RELAXED = RelaxedEstimator()
RAP = SynthesisMethod(
    adaptive,
    RELAXED,
    "a relaxed table, fitted to adaptively chosen marginals (RAP)",
    0.1,
    0.3,
    rounds=2,
    quicken=2.0,
)
