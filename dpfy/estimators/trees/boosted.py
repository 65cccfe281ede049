"""Gradient-boosted trees with random splits and Newton leaves (Maddock et al. 2022): all of the
budget goes to the leaves.

Each tree is random (`growing`). A record adds its clipped residual and its curvature to the leaf it
falls in; one release gives the sums of all leaves of a tree. A leaf's value is the mean of what its
sums leave possible, given the noise, and the next tree is fitted to what is left.
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
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import WEIGHT_BITS, EncodedRecords
from dpfy.estimators.trees import residuals
from dpfy.estimators.trees.cells import Trees, cells, cells_again, grown, importance
from dpfy.estimators.trees.leaves import LEAVES, MOST_DEPTH
from dpfy.estimators.trees.residuals import RESIDUAL_BITS, SCORE_BITS

Floats = NDArray[np.float64]

TARGET = "target"
SAID = 0.02
"""The share of the budget that buys the histogram of the target."""
CURVED, CURVED_BITS = 0.25, 2
"""What curvatures weigh beside residuals."""


@dataclass(kw_only=True, eq=False, repr=False)
class _Boosted:
    """What classifier and regressor share.

    Parameters
    ----------
    n_estimators : int, default=200
        How many trees; each is one release.
    max_depth : int, default=4
        Questions of each tree.
    learning_rate : float, default=0.25
        The part of a tree's values that is added.
    bins : int, default=32
        Equal bins of the transformed range of a number, between which it is cut.
    structure : int, default=0
        The public seed of the splits.

    Attributes
    ----------
    intercept_ : ndarray of shape (n_scores,)
        The score of a record before any tree is added.
    values_ : ndarray of shape (n_trees, n_leaves, n_scores)
        What each leaf adds.
    """

    n_estimators: int = 200
    max_depth: int = 4
    learning_rate: float = 0.25
    bins: int = 32
    structure: int = 0

    cell_of_missing: ClassVar[bool] = True

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.integer("n_estimators", self.n_estimators, most=100_000)
        check.integer("max_depth", self.max_depth, most=MOST_DEPTH)
        check.rate("learning_rate", self.learning_rate)
        check.integer("bins", self.bins, least=2, most=4096)
        check.integer("structure", self.structure, least=0)
        width = residuals.width(public.target)
        l2 = math.sqrt(1 + CURVED**2) * (1 + 2.0**-50)
        added = Bound(l2=l2, l1=(1 + CURVED) * math.sqrt(width) * (1 + 2.0**-50), linf=1.0)
        return [
            ReleaseNeed(TARGET, one_of_each(1, public.terms), share=SAID),
            ReleaseNeed(LEAVES, added, releases=self.n_estimators, share=1 - SAID),
        ]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        bits = {LEAVES: RESIDUAL_BITS + CURVED_BITS}
        return bits | ({TARGET: WEIGHT_BITS} if public.terms.weighted else {})

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        assert data.target is not None
        loss, held = residuals.of(data.aim), cells(data, self.bins)
        places, bits = loss.places(data.target), self._bits(public).get(TARGET, 0)
        counts = np.bincount(places, data.weights, loss.cells)
        begin = loss.begin(fit.release(TARGET, counts, bits))
        trees = grown(held.sizes, held.ordered, self.n_estimators, self.max_depth, self.structure)
        noise, scores = fit.round(LEAVES).deviation, residuals.begun(begin.score, data.size)
        values = np.empty((trees.count, trees.leaves, loss.width))
        for t in range(trees.count):
            leaf = trees.leaf(t, held.places)
            sums, curves = self._released(loss, (data, scores, leaf), begin.clip, trees.leaves, fit)
            values[t] = leaf_values(
                sums, curves, begin, (noise * begin.clip, noise * loss.steepest / CURVED)
            )
            steps = residuals.steps(self.learning_rate * values[t])
            values[t] = steps * 2.0**-SCORE_BITS
            for k, score in enumerate(scores):
                score += steps[:, k][leaf]
        facts: dict[str, NDArray[Any]] = {
            "columns": trees.columns,
            "right": trees.right,
            "values": values,
            "sizes": np.array(held.sizes, np.int64),
        }
        return facts | {
            "begin": begin.score,
            "clip": np.array([begin.clip]),
            "noise": np.array([noise * begin.clip]),
        }

    def _released(
        self,
        loss: residuals.Residuals,
        records: tuple[Any, Any, Any],
        clip: float,
        leaves: int,
        fit: FitSession,
    ) -> tuple[Floats, Floats]:
        """Noisy sums of residuals and of curvatures in the leaves of one tree [leaves, scores], in
        their own units.

        Guarantees: a record adds a vector of norm at most sqrt(1 + CURVED^2).
        """
        data, scores, leaf = records
        added = [
            *(data.weighed(r, 0) for r in loss.residuals(data.target, scores, clip)),
            *(CURVED * data.weighed(c, 0) for c in loss.curvatures(scores)),
        ]
        sums = np.stack([np.bincount(leaf, a, leaves) for a in added], axis=1) * 2.0**-RESIDUAL_BITS
        released = fit.release(LEAVES, sums, RESIDUAL_BITS + CURVED_BITS)
        return released[:, : loss.width] * clip, released[:, loss.width :] * (
            loss.steepest / CURVED
        )

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._trees, self._sizes = Trees(model["columns"], model["right"]), model["sizes"]
        self.intercept_, self.values_ = model["begin"], model["values"]
        self._clip, self._noise = float(model["clip"][0]), float(model["noise"][0])

    def _scores(self, given: EncodedRecords) -> Floats:
        places = cells_again(given, self._sizes).places
        scores = np.tile(self.intercept_, (given.size, 1))
        for t in range(self._trees.count):
            scores += self.values_[t][self._trees.leaf(t, places)]
        return scores

    def explain(self) -> Explanation:
        """How much the questions of each column move the score."""
        names = self._columns.feature_names  # type: ignore[attr-defined]
        sizes = importance(self._trees, self.values_, len(names))
        rows = tuple(
            (name, float(size))
            for size, name in sorted(zip(sizes, names, strict=True), reverse=True)
        )
        return Explanation(
            ("column", "sum of steps"),
            rows,
            f"sums of residuals in a leaf have noise of standard deviation {self._noise:.3g}",
        )


@dataclass(kw_only=True, eq=False, repr=False)
class GradientBoostingClassifier(_Boosted, PrivateClassifier):
    """Classes by gradient-boosted trees whose splits are random, and cost nothing (Maddock et al. 2022).

    Missing values go to a random side where the schema gives no fill.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import GradientBoostingClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> model = GradientBoostingClassifier(
    ...     bounds=(-1, 1), classes=("no", "yes"), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.8)
    True
    """

    def _log_joint(self, given: EncodedRecords) -> Floats:
        return residuals.ClassResiduals(len(self.classes_)).log_joint(
            self._scores(given), self._clip
        )


@dataclass(kw_only=True, eq=False, repr=False)
class GradientBoostingRegressor(_Boosted, PrivateRegressor):
    """Numbers by gradient-boosted trees whose splits are random, and cost nothing.

    Missing values go to a random side where the schema gives no fill.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import GradientBoostingRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = X[:, 0] - X[:, 1]
    >>> model = GradientBoostingRegressor(
    ...     bounds=(-1, 1), target_bounds=(-2, 2), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.4)
    True
    """

    def predict(self, X: Any) -> Floats:
        """The number of each row."""
        return residuals.number(self._scores(self._given(X)), self._aim)


def leaf_values(
    sums: Floats, curves: Floats, begin: residuals.InitialScores, noise: tuple[float, float]
) -> Floats:
    """The posterior mean of a leaf's value: its sum is curvature times value, with noise and
    chance; values have the variance `level`^2.
    """
    weight = np.maximum(
        0.8 * curves, 0.25 * noise[1]
    )  # part of a curvature is clipped away; noise can make it negative
    spread = weight * (begin.spread / begin.curvature)
    return np.asarray(
        begin.level**2 * weight * sums / ((begin.level * weight) ** 2 + noise[0] ** 2 + spread)
    )
