"""Mixtures of Gaussians by noisy rounds of expectation and maximisation.

Every round a point is shared out among the components. To each it adds, times its share, a one, its
difference to the mean and the squares of its coordinates; differences are shortened to a radius
about the mean, as in k-means. Shares add up to at most one, so that the bound is that of one
component. Full covariances have products of coordinates instead of squares (`covariances`).

Shares must follow from the point alone, to the last bit: precisions stand on a grid of 2^-6, and
slopes on one of 2^-20, so that the exponents of all components are sums of products without
rounding, in whatever order a matrix product takes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import DensityMixin

from dpfy.core import check
from dpfy.core.values import Bound
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.clusters import covariances, summary
from dpfy.estimators.clusters.summary import (
    SAFE,
    Ball,
    Floats,
    NoisyCentres,
    Points,
    centres_of,
    levels,
    on_grid,
    shortened,
    summed,
)
from dpfy.estimators.columns import refuse_categories
from dpfy.estimators.estimator import PrivateEstimator, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import EncodedRecords

MOMENTS = "moments"
COUNT, SQUARE = 0.5, 0.5
"""What a share and a squared coordinate weigh beside a difference."""
BITS, FULL_BITS, SHARES = 20, 27, 12
"""Fractional bits of what a point adds, with squares and with products, and of its shares."""
PRECISIONS, SLOPES = 6, 20
NARROWEST = 2.0**-16
"""The smallest variance of a coordinate, in the unit ball."""
WIDE = 3.0
"""The radius about a mean over the deviation of its component."""
STARTED = 0.5
"""The share of the budget that the start has."""
COVARIANCES = ("diag", "spherical", "full")


@dataclass(frozen=True)
class MixtureParameters:
    """Weights, means [components, coordinates] and variances of the same shape, in the unit ball.
    Released, or public.

    Full covariances are matrices instead of variances [components, coordinates, coordinates].
    """

    weights: Floats
    means: Floats
    variances: Floats

    @property
    def full(self) -> bool:
        """Whether components have full covariances."""
        return self.variances.ndim == 3

    @property
    def spreads(self) -> Floats:
        """The mean squared distance to the mean of each component."""
        return self.variances.trace(axis1=1, axis2=2) if self.full else self.variances.sum(axis=1)

    def exponents(self) -> tuple[Floats, Floats, Floats]:
        """What the logarithm of a component's density is made of, up to a constant: c + slopes x -
        precisions x^2.
        """
        precisions = (
            np.maximum(np.rint(0.5 / self.variances * 2.0**PRECISIONS), 1.0) * 2.0**-PRECISIONS
        )
        slopes = np.rint(2 * precisions * self.means * 2.0**SLOPES) * 2.0**-SLOPES
        log_weights = np.log(np.maximum(self.weights, 1e-300))
        return (
            log_weights
            + 0.5 * np.log(2 * precisions).sum(axis=1)
            - (slopes**2 / (4 * precisions)).sum(axis=1),
            slopes,
            precisions,
        )

    def logarithms(self, points: Floats) -> Floats:
        """Of weight times density, without the constant, for each point and component."""
        if self.full:
            return covariances.logarithms(
                points, *covariances.exponents(self.weights, self.means, self.variances)
            )
        constants, slopes, precisions = self.exponents()
        return np.asarray(constants + (points @ slopes.T - points**2 @ precisions.T))


def shares(points: Floats, mixture: MixtureParameters) -> Floats:
    """The share of each component in each point, on a grid.

    Guarantees: shares of a point follow from it alone, and add up to at most one.
    """
    exponents = mixture.logarithms(points)
    exponents -= exponents.max(axis=1, keepdims=True)
    parts = np.exp(exponents)
    whole = np.zeros(len(points))
    for k in range(
        parts.shape[1]
    ):  # one after the other: sums along an axis need not keep the order
        whole += parts[:, k]
    return on_grid(parts * (SAFE / whole)[:, None], SHARES)


def totals(points: Points, mixture: MixtureParameters, radii: Floats) -> Floats:
    """Sums over all points [components, 1 + coordinates + squares of them, or products].

    Guarantees: a point adds a vector of norm at most sqrt(1 + COUNT^2 + SQUARE^2), in whole steps
    of 2^-BITS (or 2^-FULL_BITS).
    """
    count, width = mixture.means.shape
    means, shape = (
        on_grid(mixture.means),
        (count, 1 + width + (width * width if mixture.full else width)),
    )

    def added(part: slice) -> Floats:
        rows, found = points[part].astype(np.float64), np.zeros(shape)
        share = shares(rows, mixture)
        for k in range(count):
            has = share[:, k] > 0
            mine, own = rows[has] - means[k], share[has, k]
            moved = shortened(mine, np.einsum("ij,ij->i", mine, mine), np.full(len(mine), radii[k]))
            found[k, 0] += COUNT * own.sum()
            found[k, 1 : 1 + width] += on_grid(own[:, None] * moved, BITS).sum(axis=0)
            if mixture.full:
                found[k, 1 + width :] += SQUARE * covariances.products(moved, own).ravel()
            else:
                found[k, 1 + width :] += on_grid((SQUARE * own)[:, None] * moved**2, BITS).sum(
                    axis=0
                )
        return found

    return summed(len(points), np.zeros(shape), added)


def bound(dimensions: int, full: bool = False) -> Bound:
    """Of what a point adds to a round."""
    l2 = math.sqrt(1 + COUNT**2 + SQUARE**2) * (1 + 2.0**-50)
    squares = covariances.largest_l1(dimensions) if full else 1.0
    return Bound(
        l2=l2, l1=COUNT + math.sqrt(dimensions) * (1 + 2.0**-50) + SQUARE * squares, linf=1.0
    )


def rounds(
    points: Points, start: NoisyCentres, count: int, kind: str, fit: FitSession
) -> tuple[MixtureParameters, Floats]:
    """A mixture from a start, and the noisy number of points of each component. `kind` is that of
    the covariances.

    Guarantees: depends on the points through `FitSession.release` alone.
    """
    width = start.centres.shape[1]
    every = np.full(start.centres.shape, max(start.inertia / width, NARROWEST))
    if kind == "full":
        every = np.maximum(every, covariances.NARROWEST)[:, :, None] * np.eye(width)
    mixture, counts = (
        MixtureParameters(start.counts / start.counts.sum(), start.centres, every),
        start.counts,
    )
    noise = fit.round(MOMENTS).deviation
    for _ in range(count):
        radii = np.clip(WIDE * np.sqrt(mixture.spreads), summary.SMALLEST, 2.0)
        released = fit.release(
            MOMENTS, totals(points, mixture, radii), FULL_BITS if kind == "full" else BITS
        )
        counts = np.maximum(released[:, 0] / COUNT, noise / COUNT)
        sums, squares = released[:, 1 : 1 + width], released[:, 1 + width :] / SQUARE
        told = np.maximum(
            1 - width * noise**2 / np.maximum((sums**2).sum(axis=1), 1e-300), 0.0
        )  # of a sum: what is no noise
        shift = (told / counts)[:, None] * sums
        shift /= np.maximum(np.sqrt((shift**2).sum(axis=1, keepdims=True)), 1.0)
        if kind == "full":
            variances = covariances.settled(
                squares.reshape(-1, width, width), shift, counts, noise / SQUARE, radii
            )
        else:
            variances = (
                _variances(squares, shift, counts, noise / SQUARE, kind == "spherical")
                * radii[:, None] ** 2
            )
            variances = np.maximum(variances, NARROWEST)
        means = mixture.means + radii[:, None] * shift
        means /= np.maximum(np.sqrt((means**2).sum(axis=1, keepdims=True)), 1.0)
        mixture = MixtureParameters(counts / counts.sum(), means, variances)
    return mixture, counts


def _variances(
    squares: Floats, shift: Floats, counts: Floats, noise: float, spherical: bool
) -> Floats:
    """Of each coordinate about the mean, from noisy sums of squares, where `noise` is the deviation
    of one.
    """
    found = squares / counts[:, None] - shift**2
    level = np.maximum(found.mean(axis=1, keepdims=True), 0.02 / shift.shape[1])
    off = noise / counts[:, None] / level  # the error of a variance, over the mean one
    trusted = 0.0 if spherical else 1 / (1 + off**2)
    return np.asarray(np.maximum(level + trusted * (found - level), 0.05 * level))


@dataclass(kw_only=True, eq=False, repr=False)
class GaussianMixture(DensityMixin, PrivateEstimator):
    """A mixture of Gaussians of numbers on their scales ([-1, 1], or [0, 1] where a range begins at zero).

    Parameters
    ----------
    n_components : int, default=4
        How many Gaussians.
    covariance_type : {"diag", "spherical", "full"}, default="diag"
        "diag": a variance for each coordinate. "spherical": one for all of a component. "full": a
        matrix, for at most 64 columns, which takes more records.
    rounds : int, default=4
        Noisy rounds of expectation and maximisation, after a start as `KMeans` has it, for half of the
        budget.
    norm : float, default=None
        A public bound on the distance of scaled rows from the middle of their ranges. None for all that
        the ranges allow.
    structure : int, default=0
        The public seed of all that is drawn without regard to the records.
    n_jobs : int, default=None
        Threads that sums are made on, -1 for one on each core. Nothing that is released depends on it.

    Attributes
    ----------
    weights_ : ndarray of shape (n_components,)
        The share of each component.
    means_ : ndarray of shape (n_components, n_features)
        Means in the units of the columns.
    covariances_ : ndarray
        Variances on the scales, or matrices.
    counts_ : ndarray of shape (n_components,)
        Noisy numbers of records.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import GaussianMixture
    >>> rng = np.random.default_rng(0)
    >>> X = np.concatenate([rng.normal(m, 0.05, (1000, 2)) for m in (-0.5, 0.5)])
    >>> model = GaussianMixture(n_components=2, bounds=(-1, 1), random_state=0).fit(X)
    >>> np.sort(model.means_[:, 0]).round(1).tolist()
    [-0.5, 0.5]
    """

    n_components: int = 4
    covariance_type: str = "diag"
    rounds: int = 4
    norm: float | None = None
    structure: int = 0
    n_jobs: int | None = None

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.integer("n_components", self.n_components, most=1024)
        check.one_of("covariance_type", self.covariance_type, COVARIANCES)
        check.integer("rounds", self.rounds, most=1000)
        check.integer("structure", self.structure, least=0)
        if self.norm is not None:
            check.positive("norm", self.norm)
        refuse_categories(public.columns, "a mixture of Gaussians")
        width, full = len(public.columns.columns), self.covariance_type == "full"
        if full:
            covariances.refuse_wide(width)
        start = ReleaseNeed(
            summary.TREE,
            summary.tree_bound(width),
            releases=levels(self.n_components),
            share=STARTED,
        )
        return [
            start,
            ReleaseNeed(MOMENTS, bound(width, full), releases=self.rounds, share=1 - STARTED),
        ]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return {
            summary.TREE: summary.TREE_BITS,
            MOMENTS: FULL_BITS if self.covariance_type == "full" else BITS,
        }

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        ball = Ball.of(data.columns, self.norm)
        points = ball.points(data)
        start = centres_of(
            summary.tree(points, levels(self.n_components), fit), self.n_components, self.structure
        )
        found, counts = rounds(points, start, self.rounds, self.covariance_type, fit)
        parts = {"weights": found.weights, "means": found.means, "variances": found.variances}
        return parts | {"counts": counts, "radius": np.array([ball.radius])}

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._ball = Ball(self._columns, float(model["radius"][0]))
        self._mixture = MixtureParameters(model["weights"], model["means"], model["variances"])
        self.weights_, self.counts_ = model["weights"], model["counts"]
        self.means_ = self._ball.raw(self._mixture.means)
        self.covariances_ = self._mixture.variances * self._ball.radius**2

    def _logarithms(self, X: Any) -> Floats:
        """Of weight times density on the scales, for each row and component."""
        rows = self._given(X).scaled()
        ball = self._ball
        far = self._mixture.logarithms((rows - ball.middle) / ball.radius)
        return np.asarray(
            far - rows.shape[1] * (0.5 * math.log(2 * math.pi) + math.log(ball.radius))
        )

    def score_samples(self, X: Any) -> Floats:
        """The logarithm of the density of each row, on the scales."""
        return np.asarray(np.logaddexp.reduce(self._logarithms(X), axis=1))

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of `score_samples`; for public rows: it is not noisy."""
        return float(self.score_samples(X).mean())

    def predict_proba(self, X: Any) -> Floats:
        """The share of each component in each row."""
        found = self._logarithms(X)
        return np.asarray(np.exp(found - np.logaddexp.reduce(found, axis=1)[:, None]))

    def predict(self, X: Any) -> NDArray[np.int64]:
        """The likeliest component of each row."""
        return self._logarithms(X).argmax(axis=1)

    def fit_predict(self, X: Any, y: Any = None, *, users: Any = None) -> NDArray[np.int64]:
        """Fit, and give the likeliest component of each of the caller's own rows. These labels are
        as private as the rows.
        """
        return np.asarray(self.fit(X, y, users=users).predict(X))

    def explain(self) -> Explanation:
        """The components: their weights and means."""
        rows = tuple(
            (f"{k}", float(self.weights_[k]), *self.means_[k].tolist())
            for k in np.argsort(-self.weights_)
        )
        return Explanation(
            ("component", "weight", *self._columns.feature_names),
            rows,
            "weights and means are noisy",
        )
