"""Soft trees (Hazimeh et al. 2020) by noisy gradients of all records: splits and leaves are learnt
together.

- One release has the sum of rows and of rows times residuals. It gives the direction in which every
  tree begins as a soft staircase, each with a public perturbation of its own, and the
  preconditioner of what follows.
- Every round releases one sum: the gradients of all records in the weights of all splits and the
  values of all leaves, each record's shortened to one norm. That norm is known in closed form,
  since a split's gradient is a number times the row.
- Steps have momentum, and are as long as for linear models (`linear.descent`) with the same noise.
  The answer is the mean of the last rounds.

What a record adds is made of its own row by correctly rounded operations and cut to a grid, towards
zero; sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.linear.descent import Preconditioner
from dpfy.estimators.linear.design import BITS, FACTOR, Design, RowLayout
from dpfy.estimators.records import WEIGHT_BITS, EncodedRecords, parts
from dpfy.estimators.trees import residuals
from dpfy.estimators.trees.residuals import RESIDUAL_BITS, InitialScores, Residuals
from dpfy_lab.estimators.forward_pass import Ensemble, ForwardPass

Floats = NDArray[np.float64]

TARGET, MOMENTS, GRADIENTS = "target", "moments", "gradients"
UNIT = Bound(l2=1.0)
SAID, BEGUN = 0.02, 0.05
"""Shares of the budget: the histogram of the target, and the sums that trees begin with."""
THIRD = math.floor(2.0**FACTOR / math.sqrt(3)) * 2.0**-FACTOR
"""What each of the three parts of those sums weighs, so that together they have at most norm
one.
"""
FOR_ONE, FOR_EACH = 4, 2
"""Trees for one score, and for each of several, where nobody says how many."""
CUT = 1.0
"""The norm that gradients are shortened to, over that of a record in the middle of all roots with
the largest residual.
"""
PACE, MOMENTUM, LATER = 0.2, 0.8, 0.3
LEAF = 0.7
"""How fast leaves learn. These were chosen on splits of Adult that no figure of the documentation
is of.
"""
REACH, HEIGHT = 4.0, 2.0
"""How far scores reach that the first staircases tell apart, and how high these are, in units of
`InitialScores.level`.
"""
RIDGE = 3.0
"""What is added to the curvature of the first step, over the noise of a slope."""
TURNED, MOVED = 0.3, 0.1
"""The public perturbation of splits: of their weights, all together, and of where they cut."""
SAFE = 1 - 2.0**-20
"""Below one by far more than what a few operations in single precision round."""
MOST_LEAVES = 1 << 16
FARTHEST = 64.0
"""No value of a leaf is larger."""


@dataclass
class _Weights:
    """Of splits [width, splits], and the values of leaves [trees, leaves, scores]."""

    splits: Floats
    leaves: Floats


@dataclass(kw_only=True, eq=False, repr=False)
class _Soft:
    """What classifier and regressor share.

    Parameters
    ----------
    n_estimators : int, default=None
        How many trees, whose leaves add up. None for four, or two for each of more than two classes.
    max_depth : int, default=2
        Of each tree.
    rounds : int, default=24
        Noisy gradients of all records.
    structure : int, default=0
        The public seed of the perturbation that tells trees apart at the beginning.

    Attributes
    ----------
    leaves_ : ndarray of shape (n_trees, n_leaves, n_scores)
        What each leaf adds to the score.
    intercept_ : ndarray of shape (n_scores,)
        The score of a record before any tree is added.
    """

    n_estimators: int | None = None
    max_depth: int = 2
    rounds: int = 24
    structure: int = 0

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        if self.n_estimators is not None:
            check.integer("n_estimators", self.n_estimators, most=10_000)
        check.integer("max_depth", self.max_depth, most=12)
        if (self.n_estimators or FOR_ONE) << self.max_depth > MOST_LEAVES:
            rule = f"must have at most {MOST_LEAVES} leaves in all with max_depth {self.max_depth}"
            raise InvalidInput("n_estimators", self.n_estimators, rule)
        check.integer("rounds", self.rounds, most=100_000)
        check.integer("structure", self.structure, least=0)
        return [
            ReleaseNeed(TARGET, one_of_each(1, public.terms), share=SAID),
            ReleaseNeed(MOMENTS, UNIT, share=BEGUN),
            ReleaseNeed(GRADIENTS, UNIT, releases=self.rounds, share=1 - SAID - BEGUN),
        ]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        counted = {TARGET: WEIGHT_BITS} if public.terms.weighted else {}
        return {MOMENTS: BITS, GRADIENTS: BITS} | counted

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        assert data.target is not None
        loss, layout = residuals.of(data.aim), RowLayout(data.columns)
        counts = np.bincount(loss.places(data.target), data.weights, loss.cells)
        begin = loss.begin(fit.release(TARGET, counts, self._bits(public).get(TARGET, 0)))
        shape = Ensemble(
            self.n_estimators or max(FOR_ONE, FOR_EACH * loss.width), self.max_depth, loss.width
        )
        design = Design(layout, data, layout.largest)
        problem = _Problem(loss, begin, shape, layout, design, design.squares(), data.target)
        size, mean, slopes = problem.moments(fit)
        weights = problem.begun(size, mean, slopes, fit.round(MOMENTS).scale, self.structure)
        found = problem.descended(weights, size, mean, fit)
        return {
            "splits": found.splits,
            "leaves": found.leaves,
            "begin": begin.score,
            "clip": np.array([begin.clip]),
        }

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._splits, self.leaves_, self.intercept_ = (
            model["splits"],
            model["leaves"],
            model["begin"],
        )
        self._clip = float(model["clip"][0])

    def _scores(self, given: EncodedRecords) -> Floats:
        trees, leaves, outputs = self.leaves_.shape
        shape, layout = Ensemble(trees, leaves.bit_length() - 1, outputs), RowLayout(given.columns)
        scores = np.empty((given.size, outputs))
        for part in parts(given.size):
            splits = np.asarray(layout.rows(given.part(part), layout.largest) @ self._splits)
            scores[part] = ForwardPass(shape, np.ascontiguousarray(splits.T), self.leaves_).scores.T
        return scores + self.intercept_

    def explain(self) -> Explanation:
        """How much the splits of all trees look at each feature: the norm of its weights, largest
        first.
        """
        names = RowLayout(self._columns).names  # type: ignore[attr-defined]
        norms = np.sqrt((self._splits[1:] ** 2).sum(axis=1))
        rows = sorted(zip(names, norms.tolist(), strict=True), key=lambda row: -row[1])
        return Explanation(
            ("feature", "norm of its weights"),
            tuple(rows),
            "weights are noisy, and began with a public perturbation",
        )


@dataclass(kw_only=True, eq=False, repr=False)
class SoftTreeClassifier(_Soft, PrivateClassifier):
    """Classes by soft trees (Hazimeh et al. 2020): every split sends a record to both sides, and all of
    them are learnt together.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy_lab.estimators.soft_trees import SoftTreeClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> model = SoftTreeClassifier(
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
class SoftTreeRegressor(_Soft, PrivateRegressor):
    """Numbers by soft trees: every split sends a record to both sides, and all of them are learnt
    together.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy_lab.estimators.soft_trees import SoftTreeRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = X[:, 0] - X[:, 1]
    >>> model = SoftTreeRegressor(
    ...     bounds=(-1, 1), target_bounds=(-2, 2), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.5)
    True
    """

    def predict(self, X: Any) -> Floats:
        """The number of each row, within the public range of the target."""
        return residuals.number(self._scores(self._given(X)), self._aim)


@dataclass(frozen=True, repr=False)
class _Problem:
    """Private rows and targets, and what is public or released about them already."""

    loss: Residuals
    begin: InitialScores
    shape: Ensemble
    layout: RowLayout
    design: Design
    squares: Floats
    target: NDArray[Any]

    @property
    def height(self) -> float:
        """Of the staircase of a tree at the beginning, from its middle."""
        return HEIGHT * self.begin.level * self.shape.outputs / self.shape.trees

    @property
    def stairs(self) -> Floats:
        """The values of the leaves of a tree at the beginning, from -1 to 1."""
        return np.linspace(-1.0, 1.0, 2**self.shape.depth)

    @property
    def steepness(self) -> float:
        """The norm of the derivatives of one score in the roots of its trees, in their middle, at
        the beginning.
        """
        right, left = np.split(self.stairs, 2)[::-1]
        return (
            1.5
            * self.height
            * float(right.mean() - left.mean())
            * math.sqrt(self.shape.trees / self.shape.outputs)
        )

    def moments(self, fit: FitSession) -> tuple[float, Floats, Floats]:
        """How many records there are, the mean of their rows, and that of rows times residuals
        [width, scores] at the beginning.

        Guarantees: a record adds a vector of norm at most one.
        """
        design, scores = self.design, residuals.begun(self.begin.score, self.design.size)
        found = self.loss.residuals(self.target, scores, self.begin.clip)
        factors = np.stack(
            [np.full(design.size, 1.0), *(r * 2.0**-RESIDUAL_BITS for r in found)], axis=1
        )
        total = np.append(design.total(THIRD * factors).ravel(), design.mass(THIRD))
        released = fit.release(MOMENTS, total, BITS) / THIRD
        size = max(float(released[-1]), 1.0)
        means = released[:-1].reshape(design.width, -1) * (design.radius / size)
        means[0, 0] = 1.0
        return size, means[:, 0], means[:, 1:] * self.begin.clip

    def begun(self, size: float, mean: Floats, slopes: Floats, scale: float, seed: int) -> _Weights:
        """Trees that are soft staircases along the direction that first slopes show, each with a
        perturbation of its own.
        """
        shape, width = self.shape, self.layout.width
        noise = scale / THIRD * self.begin.clip * self.design.radius / size
        curves = [float(c) for c in self.begin.curvature]
        ways = [
            Preconditioner(self.layout, mean, c, RIDGE * noise, self.layout.largest)(
                slopes[:, [k]]
            )[:, 0]
            for k, c in enumerate(curves)
        ]
        draw = np.random.Generator(np.random.PCG64(seed))
        splits = draw.normal(size=(width, shape.splits)) * (TURNED / math.sqrt(width))
        splits[0] = draw.normal(size=shape.splits) * MOVED
        at = 0
        for level in range(shape.depth):
            middles = (np.arange(2**level) + 0.5) / 2**level - 0.5
            for tree in range(shape.trees):
                place = slice(at, at := at + 2**level)
                splits[:, place] += (ways[tree % shape.outputs] / (2 * REACH * self.begin.level))[
                    :, None
                ]
                splits[0, place] -= middles
        leaves = np.zeros(shape.values)
        for tree in range(shape.trees):
            leaves[tree, :, tree % shape.outputs] = self.height * self.stairs
        return _Weights(splits, leaves)

    def descended(self, weights: _Weights, size: float, mean: Floats, fit: FitSession) -> _Weights:
        """Where noisy gradients lead: the mean of the last rounds."""
        held, begin, steep = fit.round(GRADIENTS), self.begin, self.steepness
        norm = CUT * begin.clip * self.design.radius * steep
        noise = (
            held.scale * norm / size / steep
        )  # of a coordinate of a mean gradient, for one score
        time = PACE / (noise / math.sqrt(held.releases))
        steps = held.releases / (1 - MOMENTUM) * (1 - LATER / 2)
        usual, ridge = float(begin.curvature.mean()), steps / time
        precondition = Preconditioner(self.layout, mean, usual, ridge, self.layout.largest)
        move, later = (
            _Weights(np.zeros_like(weights.splits), np.zeros_like(weights.leaves)),
            weights,
        )
        first = held.releases - max(1, math.ceil(held.releases * LATER))
        cut = weights.splits.size
        for step in range(held.releases):
            released = fit.release(GRADIENTS, self.gradient(weights, norm), BITS) * (norm / size)
            splits, leaves = (
                released[:cut].reshape(weights.splits.shape),
                released[cut:].reshape(weights.leaves.shape),
            )
            move.splits = MOMENTUM * move.splits + precondition(splits) / steep**2
            move.leaves = MOMENTUM * move.leaves + LEAF / (usual + ridge) * leaves
            weights = _Weights(
                weights.splits + move.splits,
                np.clip(weights.leaves + move.leaves, -FARTHEST, FARTHEST),
            )
            many = max(1, step - first + 1)  # of which `later` is the mean
            later = _Weights(
                later.splits + (weights.splits - later.splits) / many,
                later.leaves + (weights.leaves - later.leaves) / many,
            )
        return later

    def gradient(self, weights: _Weights, norm: float) -> Floats:
        """The sum over records of their gradients over `norm`, each shortened to norm one: of
        splits, then of leaves.

        Guarantees: what a record adds has at most norm one, and depends on nothing but the record,
        the weights and the norm.
        """
        leaves = np.zeros((self.shape.trees * 2**self.shape.depth, self.shape.outputs))
        factors = self._factors(weights, norm, leaves)
        splits = self.design.gradient(weights.splits * self.design.radius, factors)
        return np.concatenate([splits.ravel(), leaves.ravel()])

    def _factors(
        self, weights: _Weights, norm: float, leaves: Floats
    ) -> Callable[[Floats, slice], Floats]:
        """What rows of a part of the records are multiplied by in the sum; what they add to the
        values of leaves goes to `leaves`.
        """
        values, first = weights.leaves.astype(np.float32), residuals.steps(self.begin.score)
        per_split, per_leaf = (
            np.float32(self.begin.clip * self.design.radius / norm),
            np.float32(self.begin.clip / norm),
        )

        def found(scores: Floats, part: slice) -> Floats:
            factors = np.empty_like(scores)
            for some in parts(len(scores)):
                factors[some] = own(
                    scores[some], slice(part.start + some.start, part.start + some.stop)
                )
            return factors

        def own(scores: Floats, part: slice) -> NDArray[np.float32]:
            passed = ForwardPass(self.shape, np.ascontiguousarray(scores.T, np.float32), values)
            steps = [
                begin + residuals.steps(score)
                for begin, score in zip(first, passed.scores, strict=True)
            ]
            held = self.loss.residuals(self.target[part], steps, self.begin.clip)
            left = [(r * 2.0**-RESIDUAL_BITS).astype(np.float32) for r in held]
            splits, shares = passed.derivatives(left) * per_split, passed.leaves * per_leaf
            squares = _squares(splits) * self.squares[part] + _squares(left) * _squares(shares)
            short = (SAFE / np.maximum(np.sqrt(squares), 1.0)).astype(np.float32)
            for k, residual in enumerate(left):
                weighed = residual * short
                if (weights := self.design.weights) is not None:
                    weighed = weighed * weights[part].astype(np.float32)
                leaves[:, k] += _cut(shares * weighed).sum(axis=1, dtype=np.float64)
            return _cut(splits * short).T

        return found


def _squares(rows: Any) -> Floats:
    """The sum of squares over rows, one after the other, so that it is rounded alike for every
    record, wherever it stands.
    """
    total = np.zeros(rows[0].shape)
    for row in rows:
        total += np.square(row, dtype=np.float64)
    return total


def _cut(factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Factors on their grid, towards zero, in place."""
    factors *= np.float32(2.0**FACTOR)
    np.trunc(factors, out=factors)
    factors *= np.float32(2.0**-FACTOR)
    return factors
