"""Explainable boosting: a sum of one function for each column, learnt in rounds from noisy
residuals of all columns at once.

One release counts the records in the cells of every column (fine and coarse, weighted) and the
target. It says which fine cells stand by themselves, how sure a sum is, and where to begin. Then,
round by round, each record adds its residual to its group in every column: L2 norm at most one for
each column, jointly. Every round the functions move towards what the sums say after noise-aware
smoothing (`smoothing`). Taking the columns one after the other (`cyclic`), as explainable boosting
usually does (Nori et al. 2021), costs the same: as many releases more, each of one column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.values import Bound
from dpfy.estimators import records
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.engine_records import EngineRecords, Records
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, PublicFacts
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.trees import residuals
from dpfy.estimators.trees.cells import (
    BinGroups,
    FeatureBins,
    cells,
    cells_again,
    counted_cells,
    grouped,
)
from dpfy.estimators.trees.engine_bins import EngineBins
from dpfy.estimators.trees.leaves import TridiagonalPrecision, deviation, likeliest, smooth
from dpfy.estimators.trees.residuals import RESIDUAL_BITS, InitialScores, Residuals
from dpfy.estimators.trees.shapes import ShapeFunction, ShapeFunctions, score_names

Floats = NDArray[np.float64]

COUNTS, RESIDUALS = "counts", "residuals"
WEIGHT, WEIGHT_BITS = 5 / 16, 4
"""What a record adds to coarse counts, to those of words and of the target, where it adds one to
fine counts.
"""
COUNTED = 0.15
"""The share of the budget that buys the counts."""
MOMENTUM = 0.3
BACK = 1.0
"""A step went too far where sums then point back along it by more than this part of how they
pointed forward: the rate is halved.
"""
KEPT = 0.4
"""Sums of how many rounds, as a share of all, what is kept in the end rests on."""


@dataclass(kw_only=True, eq=False, repr=False)
class _Additive:
    """What classifier and regressor share.

    Parameters
    ----------
    rounds : int, default=15
        How often residuals are released.
    learning_rate : float, default=0.3
        The part of the way to what the sums of a round say that is gone.
    bins : int, default=32
        Equal bins of the transformed range of a number.
    max_bins : int, default=512
        Fine cells of that range; those that hold many records are bins of their own.
    cyclic : bool, default=False
        One column after the other in each round, not all at once. The price is the same.

    Attributes
    ----------
    intercept_ : ndarray of shape (n_scores,)
        The score of a record before any function is added.
    function_ : ndarray of shape (n_groups, n_scores)
        What each group of cells adds to the score. `explain()` shows the functions of all columns.
    deviation_ : ndarray of shape (n_groups, n_scores)
        The standard deviation of that.
    """

    rounds: int = 15
    learning_rate: float = 0.3
    bins: int = 32
    max_bins: int = 512
    cyclic: bool = False

    cell_of_missing: ClassVar[bool] = True
    in_engine: ClassVar[bool] = True

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.integer("rounds", self.rounds, most=10_000)
        check.rate("learning_rate", self.learning_rate)
        check.integer("bins", self.bins, least=2, most=1024)
        check.integer("max_bins", self.max_bins, least=self.bins, most=1 << 14)
        held, width = public.columns, residuals.width(public.target)
        columns, words = len(held.columns), len(held.categories)
        together = 1 if self.cyclic else columns
        added = Bound(l2=math.sqrt(together), l1=together * math.sqrt(width), linf=1.0)
        return [
            ReleaseNeed(
                COUNTS, counts_bound(columns - words, words + 1, public.terms), share=COUNTED
            ),
            ReleaseNeed(
                RESIDUALS, added, releases=self.rounds * columns // together, share=1 - COUNTED
            ),
        ]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return {COUNTS: count_bits(public.terms.weighted), RESIDUALS: RESIDUAL_BITS}

    def _learn(
        self, data: Records, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        loss = residuals.of(data.aim)
        held = (
            EngineBins(data, loss, self.max_bins)
            if isinstance(data, EngineRecords)
            else cells(data, self.max_bins)
        )
        groups, beginning = counted(held, loss, data, self.bins, fit)
        rounds = BoostingRounds(held, groups, loss, data, beginning)
        noise = fit.round(RESIDUALS).deviation * beginning.clip
        found = boosted(rounds, fit, noise, (self.rounds, self.learning_rate, self.cyclic))
        of_cell = np.concatenate([*groups.of_cell])
        facts = {
            "sizes": np.array(held.sizes, np.int64),
            "starts": groups.starts,
            "of_cell": of_cell,
            "counts": groups.counts,
        }
        begun = {"begin": beginning.score, "clip": np.array([beginning.clip])}
        return facts | begun | {"function": found.function, "deviation": found.deviation}

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._sizes, self._starts = model["sizes"], model["starts"]
        self._of_cell = np.split(model["of_cell"], np.cumsum(self._sizes)[:-1])
        self._counts, self._clip = model["counts"], float(model["clip"][0])
        function = model["function"].copy()
        means = [
            np.average(function[a:b], axis=0, weights=self._counts[a:b])
            for a, b in zip(self._starts, self._starts[1:], strict=False)
        ]
        for mean, a, b in zip(means, self._starts, self._starts[1:], strict=False):
            function[a:b] -= (
                mean  # each function is zero on average, and the intercept holds the rest
            )
        self.intercept_ = model["begin"] + np.sum(means, axis=0)
        self.function_, self.deviation_ = function, model["deviation"]

    def _scores(self, given: EncodedRecords) -> Floats:
        places = cells_again(given, self._sizes).places
        scores = np.tile(self.intercept_, (given.size, 1))
        for of_cell, start, place in zip(self._of_cell, self._starts, places, strict=False):
            scores += self.function_[start + of_cell[place]]
        return scores

    def explain(self) -> ShapeFunctions:
        """The function of every column, with the band in which noise and chance leave it."""
        return ShapeFunctions(
            tuple(
                ShapeFunction(
                    column,
                    self._of_cell[f],
                    self.function_[a:b],
                    self.deviation_[a:b],
                    self._counts[a:b],
                )
                for f, (column, a, b) in enumerate(
                    zip(self._columns.columns, self._starts, self._starts[1:], strict=False)  # type: ignore[attr-defined]
                )
            ),
            score_names(self._aim),  # type: ignore[attr-defined]
        )


@dataclass(kw_only=True, eq=False, repr=False)
class AdditiveBoostingClassifier(_Additive, PrivateClassifier):
    """Classes by a sum of one function for each column: as good as boosted trees on many tables, and every
    function can be looked at.

    Missing values have a cell of their own where the schema gives no fill.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import AdditiveBoostingClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> model = AdditiveBoostingClassifier(
    ...     bounds=(-1, 1), classes=("no", "yes"), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.85)
    True
    """

    def _log_joint(self, given: EncodedRecords) -> Floats:
        return residuals.ClassResiduals(len(self.classes_)).log_joint(
            self._scores(given), self._clip
        )


@dataclass(kw_only=True, eq=False, repr=False)
class AdditiveBoostingRegressor(_Additive, PrivateRegressor):
    """Numbers by a sum of one function for each column. Residuals are clipped at twice the deviation of
    the target.

    Missing values have a cell of their own where the schema gives no fill.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import AdditiveBoostingRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = X[:, 0] - X[:, 1]
    >>> model = AdditiveBoostingRegressor(
    ...     bounds=(-1, 1), target_bounds=(-2, 2), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.6)
    True
    """

    def predict(self, X: Any) -> Floats:
        """The number of each row."""
        return residuals.number(self._scores(self._given(X)), self._aim)


def counts_bound(numbers: int, others: int, terms: FitTerms) -> Bound:
    """Of what a record adds to the counts: a one to the fine cells of each number, `WEIGHT` to
    their coarse bins, to each category and the target.

    Where a record is replaced, two ones move in each histogram, and half of that counts.
    """
    l2 = math.sqrt(numbers + WEIGHT**2 * (numbers + others)) * (1 + 2.0**-50)
    return Bound(
        l2=l2 / math.sqrt(2) * (1 + 2.0**-50) if terms.replaced else l2,
        l1=numbers + WEIGHT * (numbers + others),
        linf=1.0,
    )


def count_bits(weighted: bool) -> int:
    """Fractional bits of counts."""
    return WEIGHT_BITS + (records.WEIGHT_BITS if weighted else 0)


def _histograms(held: FeatureBins | EngineBins, loss: Residuals, data: Records) -> list[Floats]:
    """How many records each cell of every column holds, or their weights; and of the target."""
    if isinstance(held, EngineBins):
        return held.histograms()
    assert isinstance(data, EncodedRecords)
    assert data.target is not None
    found = [held.counts(f, data.weights) for f in range(len(held.sizes))]
    target: Any = np.bincount(loss.places(data.target), data.weights, loss.cells)
    return [*found, target]


def counted(
    held: FeatureBins | EngineBins, loss: Residuals, data: Records, bins: int, fit: FitSession
) -> tuple[BinGroups, InitialScores]:
    """The one release of counts: groups of cells, and where to begin."""
    wanted = counted_cells(held.sizes, held.ordered, bins)
    *found_cells, target = _histograms(held, loss, data)
    totals = []
    for counts, number in zip(found_cells, held.ordered, strict=True):
        if number:
            coarse = np.bincount(
                np.arange(len(counts) - 1) * bins // (len(counts) - 1), counts[:-1], bins
            )
            totals += [counts, coarse * WEIGHT]
        else:
            totals.append(counts * WEIGHT)
    totals.append(target * WEIGHT)
    bits = count_bits(data.weights is not None)
    released = np.split(
        fit.release(COUNTS, np.concatenate(totals), bits),
        np.cumsum([len(t) for t in totals])[:-1],
    )
    weights = [1.0 if fine else WEIGHT for _, fine in wanted]
    noise = [fit.round(COUNTS).deviation / w for w in weights]
    found = [r / w for r, w in zip(released, weights, strict=False)]
    return grouped(held.sizes, held.ordered, bins, found, noise), loss.begin(released[-1] / WEIGHT)


class BoostingRounds:
    """The records as rounds of boosting meet them: the sums of their residuals under functions so
    far.
    """

    def __init__(
        self,
        held: FeatureBins | EngineBins,
        groups: BinGroups,
        loss: Residuals,
        data: Records,
        beginning: InitialScores,
    ) -> None:
        self._engine = held if isinstance(held, EngineBins) else None
        if isinstance(held, EngineBins):
            self.groups, self.loss, self.beginning = groups, loss, beginning
            return
        assert isinstance(data, EncodedRecords)
        assert data.target is not None
        self.groups, self.loss, self.beginning, self._data = groups, loss, beginning, data
        self._target = target = data.target
        self._group = [
            of.astype(np.uint16)[p] for of, p in zip(groups.of_cell, held.places, strict=True)
        ]
        self._steps = np.zeros((groups.size, loss.width), np.int32)
        self._scores = residuals.begun(beginning.score, len(target))

    def scores(self, function: Floats) -> list[residuals.Steps]:
        """Of every record, in whole steps: sums of rounded functions, without further rounding.
        Only columns that changed are added again.
        """
        steps = residuals.steps(function)
        changed = steps - self._steps
        for f, group in enumerate(self._group):
            mine = changed[self.groups.column(f)]
            for k in np.flatnonzero(mine.any(axis=0)):
                self._scores[k] += mine[:, k].copy()[group]
        self._steps = steps
        return self._scores

    def sums(self, function: Floats, columns: Sequence[int]) -> Floats:
        """Sums of residuals in the groups of these columns [groups, scores], whole steps made of
        2^-RESIDUAL_BITS.

        Guarantees: a record adds a vector of norm at most one for each column.
        """
        if self._engine is not None:
            return self._engine.residual_sums(self.groups, self.beginning, function, columns)
        found = self.loss.residuals(self._target, self.scores(function), self.beginning.clip)
        left = [self._data.weighed(r, 0) for r in found]
        sizes = np.diff(self.groups.starts)
        parts = [[np.bincount(self._group[f], r, int(sizes[f])) for r in left] for f in columns]
        return np.concatenate([np.stack(part, axis=1) for part in parts]) * 2.0**-RESIDUAL_BITS


@dataclass(frozen=True)
class FittedFunctions:
    """Functions [groups, scores], and the standard deviation of each value."""

    function: Floats
    deviation: Floats


def boosted(
    rounds: BoostingRounds, fit: FitSession, noise: float, how: tuple[int, float, bool]
) -> FittedFunctions:
    """All rounds. `noise` is the standard deviation of a sum of residuals as released, `how` the
    rounds, the rate, and whether columns take turns.

    Guarantees: depends on the records through `FitSession.release` alone.
    """
    count, rate, cyclic = how
    groups, begin = rounds.groups, rounds.beginning
    chain = TridiagonalPrecision.of(groups.links, groups.starts)
    weight, chance = groups.counts[:, None] * begin.curvature, groups.counts[:, None] * begin.spread
    level = spike = np.ones(groups.size)  # until the first sums are there
    function, speed, told = np.zeros_like(weight), np.zeros_like(weight), np.zeros_like(weight)
    mean, forward = np.zeros_like(weight), np.zeros(len(groups.of_cell))
    columns = range(len(groups.of_cell))
    turns = [[f] for f in columns] if cyclic else [list(columns)]
    for t in range(count):
        for turn in turns:
            at = np.concatenate([np.arange(groups.starts[f], groups.starts[f + 1]) for f in turn])
            left = fit.release(RESIDUALS, rounds.sums(function, turn), RESIDUAL_BITS) * begin.clip
            if (left * speed[at]).sum() < -BACK * forward[turn[0]]:  # the last step went too far
                rate, speed[:] = rate / 2, 0.0
            sums = weight * function  # what these groups would say if nothing were left to learn
            sums[at] += left
            told[at] += sums[at]
            if t % 3 == 0 and (turn is turns[-1] or not t):
                level, spike = likeliest(chain, told / (t + 1), weight, noise**2 / (t + 1) + chance)
            wanted = smooth(
                chain, sums, weight, noise**2 / max(1.0, KEPT * count) + chance, level, spike
            ).mean
            speed[at] = MOMENTUM * speed[at] + rate * (wanted - function)[at]
            function[at] += speed[at]
            forward[turn[0]] = (left * speed[at]).sum()
        if t >= count // 2:
            mean += (function - mean) / (t - count // 2 + 1)
    final = deviation(chain, weight, noise**2 / max(1.0, KEPT * count) + chance, level, spike)
    return FittedFunctions(mean, final)
