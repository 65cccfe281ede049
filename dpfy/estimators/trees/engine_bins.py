"""Cells and residuals of records that stay in their engine: the sums of boosting as expressions over
the cells of a row. What a record adds is what `residuals` makes of it in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from dpfy.engines.expressions import Expression, choose, code, kept, of
from dpfy.estimators.engine_records import EngineRecords
from dpfy.estimators.trees import residuals
from dpfy.estimators.trees.cells import BinGroups
from dpfy.estimators.trees.residuals import (
    FAR,
    ONE,
    RESIDUAL_BITS,
    SCORE_BITS,
    ClassResiduals,
    InitialScores,
    NumberResiduals,
    Residuals,
)
from dpfy.tables.columns import Category, Number

Floats = NDArray[np.float64]
TARGET, CELL = kept("target"), kept("cell")


class EngineBins:
    """The cells of every column, kept in the engine with the target; see `FeatureBins`."""

    def __init__(self, data: EngineRecords, loss: Residuals, fine: int) -> None:
        self.loss = loss
        features = [c for c in data.columns.columns if isinstance(c, Number | Category)]
        self.ordered = tuple(isinstance(c, Number) for c in features)
        self.sizes = tuple(
            fine + 1 if isinstance(c, Number) else len(c.categories) + 1 for c in features
        )
        columns = {
            f"c{f}": (
                data.cell(c, fine) if isinstance(c, Number) else code(c.name),
                0,
                self.sizes[f] - 1,
            )
            for f, c in enumerate(features)
        }
        if isinstance(loss, NumberResiduals):
            shares = (data.value - loss.low) / (loss.high - loss.low)
            unit = (shares * 2.0 - 1.0).clip(-1.0, 1.0) * 2.0**RESIDUAL_BITS
            cell = (shares * float(loss.cells)).floor().clip(0.0, loss.cells - 1.0)
            columns |= {"target": (unit.whole(), -ONE, ONE), "cell": (cell.whole(), 0, 255)}
        else:
            columns |= {"target": (data.label, 0, loss.cells - 1)}
        self._rows = data.keep(columns)

    def histograms(self) -> list[Floats]:
        """How many records each cell of every column holds, and of the target, the last one."""
        target = CELL if isinstance(self.loss, NumberResiduals) else TARGET
        cells = [*enumerate(self.sizes)]
        asked = [(kept(f"c{f}"), size) for f, size in cells] + [(target, self.loss.cells)]
        return [found[:, 0].astype(np.float64) for found in self._rows.sums(asked)]

    def residual_sums(
        self, groups: BinGroups, beginning: InitialScores, function: Floats, columns: Sequence[int]
    ) -> Floats:
        """See `BoostingRounds.sums`."""
        steps = residuals.steps(function)
        scores = []
        for k, first in enumerate(residuals.steps(beginning.score).tolist()):
            score = of(int(first))
            for f, of_cell in enumerate(groups.of_cell):
                values = steps[groups.column(f), k][of_cell]
                if values.any():
                    score = score + kept(f"c{f}").lookup(tuple(values.tolist()))
            scores.append(score)
        added = _residuals(self.loss, scores, beginning.clip)
        found = self._rows.sums([(kept(f"c{f}"), self.sizes[f]) for f in columns], added)
        parts = []
        for f, sums in zip(columns, found, strict=True):
            start, end = groups.starts[f], groups.starts[f + 1]
            whole = np.zeros((int(end - start), sums.shape[1]), np.int64)
            np.add.at(whole, groups.of_cell[f], sums)
            parts.append(whole)
        return np.asarray(np.concatenate(parts) * 2.0**-RESIDUAL_BITS, np.float64)


def _residuals(loss: Residuals, scores: Sequence[Expression], clip: float) -> list[Expression]:
    """See `Residuals.residuals`."""
    if isinstance(loss, NumberResiduals):
        above = TARGET - scores[0] * (1 << (RESIDUAL_BITS - SCORE_BITS))
        return [(above / clip).clip(-float(ONE), float(ONE)).whole()]
    assert isinstance(loss, ClassResiduals)
    if loss.classes == 2:
        table = residuals._logistic_table(clip).astype(np.int64)
        place = TARGET * (2 * FAR + 1) + (_within(scores[0], -FAR, FAR) + FAR)
        return [place.lookup(tuple(table.ravel().tolist()))]
    top = reduce(lambda one, other: choose(one >= other, one, other), scores)
    powers = tuple(residuals._exponentials().tolist())
    parts = [_within(top - score, 0, 2 * FAR).lookup(powers) for score in scores]
    whole = reduce(lambda one, other: one + other, parts, of(0.0))
    each = [choose(TARGET.equals(k), 1.0, 0.0) - part / whole for k, part in enumerate(parts)]
    norm = reduce(lambda one, other: one + other * other, each, of(0.0)).root()
    shorten = of(float(ONE)) / choose(norm > clip, norm, clip) * (1 - 2.0**-40)
    return [(one * shorten).toward_zero() for one in each]


def _within(number: Expression, low: int, high: int) -> Expression:
    """A whole number moved into a range."""
    return choose(number < low, low, choose(number > high, high, number))
