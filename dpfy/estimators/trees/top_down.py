"""One tree grown from the top with a budget that decays from level to level (DP-TopDown: Wang, Dick
& Balcan 2020).

At every level each node chooses its split by the exponential mechanism among all cuts of all
columns; nodes share no record, so that the choices of a level are one choice for the charge. The
score of a split is the sum over its two sides of (sum of what records add)^2 / records: for
classes, Gini's index up to what no split changes. Adding a record changes it by more than -1 and at
most 1. For numbers from -1 to 1 it is by more than -3 and at most 1, so the number of records of
the node is added to all its scores, which changes no choice and leaves at most 2. Leaves are
counted once, with the rest of the budget. With weights from 0 to 1 in all sums a record changes a
score by at most its weight times that: along the weight a score changes at the rate 2 x r - r^2, x
being what the record adds and r the mean of what others and it add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.values import Bound
from dpfy.estimators.budget import CHOICE, ReleaseNeed
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, PublicFacts, softened
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.target import ClassTarget
from dpfy.estimators.trees import leaves, residuals
from dpfy.estimators.trees.cells import FeatureBins, Places, cells, cells_again
from dpfy.estimators.trees.leaves import BITS, LEAVES, MOST_DEPTH, SMALL, TridiagonalPrecision

Floats = NDArray[np.float64]

SCORE_BITS = 8
ROUNDED = 2.0**-SCORE_BITS
"""What rounding two scores can add to the difference between them."""
SIBLINGS = 0.05
"""The distance between two leaves of one parent, as a share of a range; it doubles with every level
above.
"""


@dataclass(frozen=True)
class Splits:
    """A full tree: node k, counted from the root level by level, asks `columns[k]`, and cell c goes
    right where `right[k, c]`.
    """

    columns: NDArray[np.int64]
    right: NDArray[np.uint8]

    def leaf(self, places: Sequence[Places]) -> NDArray[np.int64]:
        """The leaf of each record, from left to right."""
        at = np.zeros(len(places[0]), np.int64)
        held = np.stack([*places], axis=1)
        for level in range(int(np.log2(len(self.columns) + 1))):
            node = at + (1 << level) - 1
            cell = np.take_along_axis(held, self.columns[node][:, None], axis=1)[:, 0]
            at = 2 * at + self.right[node, cell]
        return at


@dataclass(kw_only=True, eq=False, repr=False)
class _TopDown:
    """What classifier and regressor share.

    Parameters
    ----------
    max_depth : int, default=6
        Levels of questions.
    bins : int, default=32
        Equal bins of the transformed range of a number, between which it is cut.
    decay : float, default=0.7
        The budget of a level over that of the level above it.
    leaf_share : float, default=0.3
        The share of the budget that counts the leaves.

    Attributes
    ----------
    values_ : ndarray of shape (n_leaves, n_outputs)
        The shares of the classes in each leaf, or the mean of the target on the scale [-1, 1].
    """

    max_depth: int = 6
    bins: int = 32
    decay: float = 0.7
    leaf_share: float = 0.3

    cell_of_missing: ClassVar[bool] = True

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.integer("max_depth", self.max_depth, most=MOST_DEPTH)
        check.integer("bins", self.bins, least=2, most=1024)
        check.rate("decay", self.decay)
        check.inside_unit("leaf_share", self.leaf_share)
        score = Bound(linf=(1.0 if isinstance(public.target, ClassTarget) else 2.0) + ROUNDED)
        parts = np.array([self.decay**level for level in range(self.max_depth)])
        parts *= (1 - self.leaf_share) / parts.sum()
        levels = [
            ReleaseNeed(_level(k), score, share=float(part), how=CHOICE)
            for k, part in enumerate(parts)
        ]
        return [
            *levels,
            ReleaseNeed(
                LEAVES, leaves.bound(1, public.target, public.terms), share=self.leaf_share
            ),
        ]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return {LEAVES: BITS}

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        held, told = cells(data, self.bins), leaves.known(data)
        told = [data.weighed(k, BITS) for k in told]
        added = told if isinstance(data.aim, ClassTarget) else told[1:]
        candidates = [
            (f, cut)
            for f, size in enumerate(held.sizes)
            for cut in range(_cuts(size, held.ordered[f]))
        ]
        columns = np.zeros((1 << self.max_depth) - 1, np.int64)
        right = np.zeros((len(columns), max(held.sizes)), np.uint8)
        at = np.zeros(data.size, np.int64)
        for level in range(self.max_depth):
            found = scores(held, at, 1 << level, added, data.weights)
            chosen = fit.choose_each(_level(level), found, SCORE_BITS)
            for node, best in enumerate(chosen, (1 << level) - 1):
                columns[node], cut = candidates[best]
                right[node] = _goes_right(held, int(columns[node]), cut, right.shape[1])
            at = Splits(columns[: (2 << level) - 1], right[: (2 << level) - 1]).leaf(held.places)
        sums = np.stack([np.bincount(at, k, 1 << self.max_depth) for k in told], axis=1)
        released, noise = fit.release(LEAVES, sums, BITS), fit.round(LEAVES).deviation
        values, mean, _ = leaves.expected(
            released, noise, isinstance(data.aim, ClassTarget), _kinship(len(sums))
        )
        return {
            "columns": columns,
            "right": right,
            "sizes": np.array(held.sizes, np.int64),
            "values": mean + values,
        }

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._splits, self._sizes = Splits(model["columns"], model["right"]), model["sizes"]
        self.values_ = model["values"]

    def _means(self, given: EncodedRecords) -> Floats:
        return np.asarray(self.values_[self._splits.leaf(cells_again(given, self._sizes).places)])

    def explain(self) -> Explanation:
        """The columns that the nodes ask for, those near the root first."""
        names = self._columns.feature_names  # type: ignore[attr-defined]
        weight = 0.5 ** np.floor(np.log2(np.arange(len(self._splits.columns)) + 1))
        sizes = np.bincount(self._splits.columns, weight, len(names))
        rows = tuple(
            (name, float(size))
            for size, name in sorted(zip(sizes, names, strict=True), reverse=True)
        )
        return Explanation(
            ("column", "levels"),
            rows,
            "how many levels of the tree a column fills; a node counts by its share of its level",
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DecisionTreeClassifier(_TopDown, PrivateClassifier):
    """Classes by one tree, whose splits are chosen from the top with a budget that decays (Wang, Dick &
    Balcan 2020).

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import DecisionTreeClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> model = DecisionTreeClassifier(
    ...     bounds=(-1, 1), classes=("no", "yes"), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.6)
    True
    """

    def _log_joint(self, given: EncodedRecords) -> Floats:
        return np.asarray(np.log(softened(np.maximum(self._means(given), SMALL))))


@dataclass(kw_only=True, eq=False, repr=False)
class DecisionTreeRegressor(_TopDown, PrivateRegressor):
    """Numbers by one tree, whose splits are chosen from the top with a budget that decays.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import DecisionTreeRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = X[:, 0] - X[:, 1]
    >>> model = DecisionTreeRegressor(
    ...     bounds=(-1, 1), target_bounds=(-2, 2), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.1)
    True
    """

    def predict(self, X: Any) -> Floats:
        """The number of each row."""
        return residuals.number(self._means(self._given(X)), self._aim)


def scores(
    held: FeatureBins,
    at: NDArray[np.int64],
    nodes: int,
    added: Sequence[Floats],
    weights: Floats | None = None,
) -> Floats:
    """The score of every candidate in every node [nodes, candidates], in whole steps of
    2^-SCORE_BITS.
    """
    found = []
    for f, (places, size) in enumerate(zip(held.places, held.sizes, strict=True)):
        where = at * size + places
        parts = [
            np.bincount(where, weights, nodes * size),
            *(np.bincount(where, a, nodes * size) for a in added),
        ]
        sums = np.stack(parts, axis=-1).reshape(nodes, size, -1)
        whole = sums.sum(axis=1, keepdims=True)
        left = np.cumsum(sums, axis=1)[:, : _cuts(size, True)] if held.ordered[f] else sums
        same = (
            0.0 if len(added) > 1 else whole[..., 0]
        )  # of numbers: for all candidates of a node alike
        found.append(_fit(left) + _fit(whole - left) + same)
    return np.asarray(np.rint(np.concatenate(found, axis=1) * 2.0**SCORE_BITS) * 2.0**-SCORE_BITS)


def _fit(sums: Floats) -> Floats:
    """The sum of squares over the number of records, 0 where there are none; the number comes
    first.
    """
    squares, many = (sums[..., 1:] ** 2).sum(axis=-1), sums[..., 0]
    return np.divide(squares, many, out=np.zeros_like(squares, np.float64), where=many > 0)


def _cuts(size: int, ordered: bool) -> int:
    """How many candidates a column has: cuts between the cells of a number, or one word against all
    others.
    """
    return size - 2 if ordered else size


def _goes_right(held: FeatureBins, column: int, cut: int, width: int) -> NDArray[np.uint8]:
    """The cells of a column that go right: all above the cut and missing values; or all but one
    word.
    """
    cell = np.arange(width)
    return (cell > cut if held.ordered[column] else cell != cut).astype(np.uint8)


def _level(level: int) -> str:
    return f"level {level + 1}"


def _kinship(leaves: int) -> TridiagonalPrecision:
    """Leaves from left to right: leaf k and the one before it have their ancestor as many levels up
    as k has zeros at its end.
    """
    place = np.arange(1, leaves)
    return TridiagonalPrecision.of(
        np.concatenate([[np.inf], SIBLINGS * (place & -place)]), np.array([0, leaves])
    )
