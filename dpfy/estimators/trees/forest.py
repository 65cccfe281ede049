"""Random forests whose splits are random: noise in the leaves only, all trees in one release.

A record adds what it knows (its class, or its number) to one leaf of every tree: L2 norm
sqrt(trees), jointly. Each tree's leaves are smoothed by what is known about the noise
(`smoothing`), trees that tell more weigh more, and one more number, released too, says how far the
mean of all trees is to be stretched, since means of many weak trees lie too close together. Numbers
are cut at random quantiles of noisy counts, which take a share of the budget; without one
(`quantiles=False`) they are cut anywhere in their range.
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
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, PublicFacts, softened
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession, fixed
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.target import ClassTarget
from dpfy.estimators.trees import leaves, residuals
from dpfy.estimators.trees.cells import FeatureBins, Trees, cells, cells_again, grown, importance
from dpfy.estimators.trees.leaves import BITS, LEAVES, MOST_DEPTH, SMALL, TridiagonalPrecision

Floats = NDArray[np.float64]

CELLS, STRETCH = "cells", "stretch"
COUNTED, STRETCHED = 0.05, 0.03
"""Shares of the budget for the counts of cells and for the stretch."""


@dataclass(kw_only=True, eq=False, repr=False)
class _Forest:
    """What classifier and regressor share.

    Parameters
    ----------
    n_estimators : int, default=100
        How many trees. More of them share the noise of the same release.
    max_depth : int, default=5
        Questions of each tree.
    bins : int, default=32
        Equal bins of the transformed range of a number, between which it is cut.
    quantiles : bool, default=True
        Cut numbers at random quantiles of noisy counts; otherwise anywhere in their range, at no cost.
    structure : int, default=0
        The public seed of the splits.

    Attributes
    ----------
    mean_ : ndarray of shape (n_outputs,)
        The share of each class, or the mean of the target on the scale [-1, 1].
    values_ : ndarray of shape (n_trees, n_leaves, n_outputs)
        What each leaf adds to it.
    """

    n_estimators: int = 100
    max_depth: int = 5
    bins: int = 32
    quantiles: bool = True
    structure: int = 0

    cell_of_missing: ClassVar[bool] = True

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.integer("n_estimators", self.n_estimators, most=10_000)
        check.integer("max_depth", self.max_depth, most=MOST_DEPTH)
        check.integer("bins", self.bins, least=2, most=4096)
        check.integer("structure", self.structure, least=0)
        numbers = len(public.columns.columns) - len(public.columns.categories)
        counted = (
            [ReleaseNeed(CELLS, one_of_each(numbers, public.terms), share=COUNTED)]
            if self.quantiles and numbers
            else []
        )
        stretch = Bound(l2=math.sqrt(2) * (1 + 2.0**-50), l1=2.0, linf=1.0)
        return [
            *counted,
            ReleaseNeed(
                LEAVES,
                leaves.bound(self.n_estimators, public.target, public.terms),
                share=1 - COUNTED - STRETCHED,
            ),
            ReleaseNeed(STRETCH, stretch, share=STRETCHED),
        ]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return {LEAVES: BITS, STRETCH: BITS}

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        held, told = cells(data, self.bins), leaves.known(data)
        trees = grown(
            held.sizes,
            held.ordered,
            self.n_estimators,
            self.max_depth,
            self.structure,
            self._counted(held, fit),
        )
        leaf = [trees.leaf(t, held.places) for t in range(trees.count)]
        added = [data.weighed(k, BITS) for k in told]
        sums = np.stack(
            [np.stack([np.bincount(z, k, trees.leaves) for k in added], axis=1) for z in leaf]
        )
        values, mean = settled(
            fit.release(LEAVES, sums, BITS),
            fit.round(LEAVES).deviation,
            isinstance(data.aim, ClassTarget),
        )
        facts: dict[str, NDArray[Any]] = {
            "columns": trees.columns,
            "right": trees.right,
            "sizes": np.array(held.sizes, np.int64),
            "mean": mean,
        }
        deviation = np.stack(told[-len(mean) :], axis=1) - mean
        stretch = self._stretched(leaf, values, deviation, data, fit)
        return facts | {"values": values * stretch}

    def _counted(self, held: FeatureBins, fit: FitSession) -> list[Floats] | None:
        """Noisy counts of the cells of numbers, in the places of all columns; what noise alone may
        be is taken off.
        """
        if not self.quantiles or not any(held.ordered):
            return None
        numbers = [f for f, number in enumerate(held.ordered) if number]
        released = fit.release(CELLS, np.stack([held.counts(f) for f in numbers]))
        counts = np.maximum(released - fit.round(CELLS).deviation, 0.0)
        found = {f: counts[k] for k, f in enumerate(numbers)}
        return [found.get(f, np.zeros(size)) for f, size in enumerate(held.sizes)]

    def _stretched(
        self,
        leaf: Sequence[Any],
        values: Floats,
        deviation: Floats,
        data: EncodedRecords,
        fit: FitSession,
    ) -> float:
        """The factor by which the forest fits best: from the products of its own deviation with
        that of the record, and with itself.

        Guarantees: a record adds two numbers of at most one.
        """
        moved = np.zeros_like(deviation)
        for t, z in enumerate(leaf):
            moved += values[t][z]
        unit = 0.5 / max(
            float(np.sqrt((values**2).sum(axis=2).mean(axis=1)).sum()), 1e-9
        )  # then most are shorter than one
        moved *= unit
        moved /= np.maximum(np.sqrt((moved**2).sum(axis=1, keepdims=True)), 1.0)
        products = fixed(
            np.stack([(moved * deviation).sum(axis=1) / 2, (moved**2).sum(axis=1)], axis=1), BITS
        )
        added = data.weighed(np.clip(products, -1, 1), BITS)
        released = fit.release(STRETCH, added.sum(axis=0), BITS)
        return (
            2
            * unit
            * max(float(released[0]), 0.0)
            / max(float(released[1]), fit.round(STRETCH).deviation)
        )

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._trees, self._sizes = Trees(model["columns"], model["right"]), model["sizes"]
        self.mean_, self.values_ = model["mean"], model["values"]

    def _means(self, given: EncodedRecords) -> Floats:
        places = cells_again(given, self._sizes).places
        found = np.tile(self.mean_, (given.size, 1))
        for t in range(self._trees.count):
            found += self.values_[t][self._trees.leaf(t, places)]
        return found

    def explain(self) -> Explanation:
        """How much the questions of each column move the answer."""
        names = self._columns.feature_names  # type: ignore[attr-defined]
        sizes = importance(self._trees, self.values_, len(names))
        rows = tuple(
            (name, float(size))
            for size, name in sorted(zip(sizes, names, strict=True), reverse=True)
        )
        return Explanation(("column", "sum of steps"), rows)


@dataclass(kw_only=True, eq=False, repr=False)
class RandomForestClassifier(_Forest, PrivateClassifier):
    """Classes by a forest of random trees: one release for all its leaves.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import RandomForestClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> model = RandomForestClassifier(
    ...     bounds=(-1, 1), classes=("no", "yes"), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.8)
    True
    """

    def _log_joint(self, given: EncodedRecords) -> Floats:
        return np.asarray(np.log(softened(np.maximum(self._means(given), SMALL))))


@dataclass(kw_only=True, eq=False, repr=False)
class RandomForestRegressor(_Forest, PrivateRegressor):
    """Numbers by a forest of random trees: one release for all its leaves.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import RandomForestRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = X[:, 0] - X[:, 1]
    >>> model = RandomForestRegressor(
    ...     bounds=(-1, 1), target_bounds=(-2, 2), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.4)
    True
    """

    def predict(self, X: Any) -> Floats:
        """The number of each row."""
        return residuals.number(self._means(self._given(X)), self._aim)


def settled(sums: Floats, noise: float, classes: bool) -> tuple[Floats, Floats]:
    """What a leaf adds to the mean [trees, leaves, outputs], weighed by how much its tree tells;
    and the mean [outputs].
    """
    trees, size, width = sums.shape
    chain = TridiagonalPrecision.of(np.full(trees * size, np.inf), np.arange(trees + 1) * size)
    values, mean, counts = leaves.expected(sums.reshape(-1, width), noise, classes, chain)
    values, counts = values.reshape(trees, size, -1), counts.reshape(trees, size)
    tells = np.sqrt((counts[:, :, None] * values**2).sum(axis=(1, 2)) / counts.sum(axis=1))
    return values * (tells / max(float(tells.sum()), 1e-9))[:, None, None], mean
