"""k-means on private points: a start from a private summary, then noisy rounds about the centres;
and the methods that it is compared with.

Rounds of Lloyd's algorithm with noise: every point adds a one, its difference to the nearest
centre and the square of that to the sums of its cluster.

Differences are taken about the current centre and shortened to a radius that shrinks with the
spread of the cluster, so that noise is as large as a cluster and not as the ball. Counts, sums and
squares are one release with one joint bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin

from dpfy.core import check, plugins
from dpfy.core.values import Bound
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.clusters.summary import (
    SMALLEST,
    STEPS,
    Ball,
    Floats,
    GridStart,
    NoisyCentres,
    Points,
    Summary,
    TreeStart,
    centres_of,
    nearest,
    on_grid,
    shortened,
    summed,
    sums_by,
)
from dpfy.estimators.columns import refuse_categories
from dpfy.estimators.estimator import PrivateEstimator, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import EncodedRecords

COUNT, SQUARE = 0.5, 0.5
"""What a count and a squared distance weigh beside a difference."""
BITS = STEPS + 1
WIDE = 2.5
"""The radius over the deviation of a cluster."""
WEAK = 2.0
"""By how many deviations of their noise counts of seeds are lowered before seeds are merged."""
MOST_SEEDS, TRIES = 256, 100
"""Seeds in all, unless there are more clusters; and tries for each place that is far from those
before.
"""
MEASURE = "distances"
BUDGETS = {"equal": 1.0, "halving": 0.25}
"""What each round has of the budget of the one before it: half of epsilon is a quarter of a share,
as shares count.
"""


def round_name(t: int) -> str:
    """Of a round, from 0."""
    return f"centres {t + 1}"


def needs(dimensions: int, rounds: int, budget: str, share: float) -> list[ReleaseNeed]:
    """One release for each round."""
    check.integer("rounds", rounds, most=1000)
    check.one_of("budget", budget, BUDGETS)
    bound = Bound(
        l2=math.sqrt(1 + COUNT**2 + SQUARE**2) * (1 + 2.0**-50),
        l1=COUNT + math.sqrt(dimensions) + SQUARE,
        linf=1.0,
    )
    parts = [max(BUDGETS[budget] ** t, 1e-6) for t in range(rounds)]
    return [
        ReleaseNeed(round_name(t), bound, share=share * part / sum(parts))
        for t, part in enumerate(parts)
    ]


def lloyd(
    points: Points, start: NoisyCentres, names: Sequence[str], fit: FitSession
) -> NoisyCentres:
    """Rounds from a start, whose inertia is a first guess.

    Guarantees: a point adds to one cluster a vector of norm at most sqrt(1 + COUNT^2 + SQUARE^2).
    Depends on the points through `FitSession.release` alone.
    """
    centres, counts, mean = on_grid(start.centres), start.counts, start.inertia
    squared = np.full(len(centres), mean)
    for name in names:
        centres, released, left = _round(points, centres, squared, name, fit)
        counts = np.maximum(released, fit.round(name).deviation / COUNT)
        mean = float(left.sum() / counts.sum())
        squared = (left / counts + mean) / 2
    return NoisyCentres(centres, counts, mean)


def from_seeds(
    points: Points, seeds: Floats, clusters: int, names: Sequence[str], seed: int, fit: FitSession
) -> NoisyCentres:
    """Rounds from public seeds, of which there may be more than clusters: after each of the first
    rounds their centres, with the counts that were released, are merged to a quarter by k-means,
    and at last to as many as there are clusters. That costs nothing, and where seeds lie badly,
    some of many lie well. Counts are lowered by `WEAK` deviations of their noise: most seeds may
    have no point.

    Guarantees: those of `lloyd`.
    """
    found, many = NoisyCentres(seeds, np.ones(len(seeds)), 1.0), len(seeds)
    for t, name in enumerate(names):
        if many == clusters:
            return lloyd(points, found, names[t:], fit)
        moved, counts, left = _round(
            points, on_grid(found.centres), np.full(many, found.inertia), name, fit
        )
        noise = fit.round(name).deviation / COUNT
        held = Summary(
            moved, np.maximum(counts - WEAK * noise, 0.0), left / np.maximum(counts, noise)
        )
        many = max(clusters, many // 4) if t < len(names) - 1 else clusters
        found = centres_of(held, many, seed)
    return found


def _round(
    points: Points, centres: Floats, squared: Floats, name: str, fit: FitSession
) -> tuple[Floats, Floats, Floats]:
    """One release about centres with these mean squared distances: the centres that follow from it,
    noisy counts, and sums of squared distances about the new centres.
    """
    width, radii = centres.shape[1], np.clip(WIDE * np.sqrt(squared), SMALLEST, 1.0)
    released, noise = (
        fit.release(name, totals(points, centres, radii), BITS),
        fit.round(name).deviation,
    )
    counts = np.maximum(released[:, 0] / COUNT, noise / COUNT)
    sums, squares = released[:, 1 : 1 + width], np.maximum(released[:, -1] / SQUARE, 0.0)
    told = np.maximum(
        1 - width * noise**2 / np.maximum((sums**2).sum(axis=1), 1e-300), 0.0
    )  # the part of a sum that is no noise
    shift = (told / counts)[:, None] * sums
    shift /= np.maximum(np.sqrt((shift**2).sum(axis=1, keepdims=True)), 1.0)
    left = (
        np.maximum(squares - counts * (shift**2).sum(axis=1), 0.02 * counts) * radii**2
    )  # about the centres as they are now
    return on_grid(centres + radii[:, None] * shift), released[:, 0] / COUNT, left


def measure_need(share: float) -> ReleaseNeed:
    """One release of counts and squared distances about centres that are fixed."""
    return ReleaseNeed(
        MEASURE,
        Bound(
            l2=math.sqrt(COUNT**2 + SQUARE**2) * (1 + 2.0**-50),
            l1=COUNT + SQUARE,
            linf=max(COUNT, SQUARE),
        ),
        share=share,
    )


def measured(points: Points, start: NoisyCentres, fit: FitSession) -> NoisyCentres:
    """The start with noisy counts and inertia instead of what it had.

    Differences are shortened to `WIDE` deviations where the start knows one, else to the radius of
    the ball.

    Guarantees: a point adds (COUNT, SQUARE |difference / radius|^2) to one cluster.
    """
    centres = on_grid(start.centres)
    radius = (
        1.0
        if math.isnan(start.inertia)
        else min(max(WIDE * math.sqrt(start.inertia), SMALLEST), 1.0)
    )
    found = totals(points, centres, np.full(len(centres), radius))[:, [0, -1]]
    released, noise = fit.release(MEASURE, found, BITS), fit.round(MEASURE).deviation
    counts = np.maximum(released[:, 0] / COUNT, noise / COUNT)
    squares = max(float(released[:, 1].sum()) / SQUARE, 0.0) * radius**2
    return NoisyCentres(start.centres, counts, squares / float(counts.sum()))


def totals(points: Points, centres: Floats, radii: Floats) -> Floats:
    """Counts, sums of differences over the radius, and sums of their squares, of each cluster."""

    def added(part: slice) -> Floats:
        rows = points[part].astype(np.float64)
        label, squares = nearest(rows, centres)
        moved = shortened(rows - centres[label], squares, radii[label])
        square = on_grid(SQUARE * np.einsum("ij,ij->i", moved, moved), BITS)
        vectors = np.concatenate([np.full((len(label), 1), COUNT), moved, square[:, None]], axis=1)
        return sums_by(label, vectors, len(centres))

    return summed(len(points), np.zeros((len(centres), centres.shape[1] + 2)), added)


def separated(seeds: int, half_widths: Floats, structure: int) -> Floats:
    """Random points of a box about the middle, within the ball: at least a from its sides and 2a
    from each other, for an a about as large as tries allow (Su et al. 2016). Public.
    """
    draw = np.random.Generator(np.random.PCG64(structure))
    away = float(half_widths.min())
    while True:
        found = np.empty((0, len(half_widths)))
        while len(found) < seeds:
            tries = (2 * draw.random((TRIES, len(half_widths))) - 1) * np.maximum(
                half_widths - away, 0.0
            )
            tries /= np.maximum(np.sqrt((tries**2).sum(axis=1, keepdims=True)), 1.0)
            nearest_one = ((tries[:, None] - found) ** 2).sum(axis=2).min(axis=1, initial=math.inf)
            if nearest_one.max() < (2 * away) ** 2:
                break
            found = np.concatenate([found, tries[[int((nearest_one >= (2 * away) ** 2).argmax())]]])
        if len(found) == seeds:
            return found
        away *= 0.9


MEASURED = 0.1
"""The share of the budget that measures clusters where there are no rounds, beside that of the
start.
"""


class ClusterStart(Protocol):
    """Where rounds begin. Its share of the budget is 1 where no rounds follow."""

    @property
    def share(self) -> float:
        """The share of the budget that it has; rounds have the rest."""

    @property
    def bits(self) -> Mapping[str, int]:
        """Fractional bits of its sums."""

    def needs(self, clusters: int, width: int, terms: FitTerms) -> list[ReleaseNeed]:
        """What it releases, from public facts alone; together they have its share."""

    def centres(
        self, points: Points, ball: Ball, clusters: int, seed: int, fit: FitSession
    ) -> NoisyCentres:
        """Centres, how many points each has, and a guess of the mean squared distance to them.

        Guarantees: depends on the points through releases of `needs` alone.
        """


SEEDS = "lloyd"
STARTS: dict[str, ClusterStart | None] = {
    "coreset": TreeStart(0.5),
    SEEDS: None,  # rounds begin at public seeds
    "synopsis": GridStart(1.0),
    "hybrid": GridStart(0.5),
}
"""The methods of dpfy by their names."""
LAB = ("aggregate",)
"""Those of the distribution dpfy-lab."""


@dataclass(kw_only=True, eq=False, repr=False)
class KMeans(ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin, PrivateEstimator):
    """k-means of numbers on their scales ([-1, 1], or [0, 1] where a range begins at zero).

    Labels of the records are not kept: `predict` gives them to who has the records.

    Parameters
    ----------
    n_clusters : int, default=8
        How many centres.
    method : {"coreset", "lloyd", "synopsis", "hybrid"}, default="coreset"
        "coreset": a tree of noisy counts and sums as a start, then rounds. "lloyd": rounds from
        well-separated public seeds. "synopsis": one noisy histogram over a grid, for two or three
        dimensions. "hybrid": that as a start, then rounds. Others are of plug-ins.
    seeds : int, default=16
        Of "lloyd": public seeds for each cluster, at most 256 in all. More than one are merged in the
        first rounds, by the counts that these release, until there is one for each cluster; 1 is the
        method as it was published.
    rounds : int, default=3
        Noisy rounds of Lloyd's algorithm.
    budget : {"equal", "halving"}, default="equal"
        The same for all rounds, or half the epsilon of the round before.
    norm : float, default=None
        A public bound on the distance of scaled rows from the middle of their ranges, to which others
        are moved. None for all that the ranges allow.
    structure : int, default=0
        The public seed of all that is drawn without regard to the records.
    n_jobs : int, default=None
        Threads that sums are made on, -1 for one on each core. Nothing that is released depends on it.

    Attributes
    ----------
    cluster_centers_ : ndarray of shape (n_clusters, n_features)
        The centres, in the units of the columns.
    counts_ : ndarray of shape (n_clusters,)
        Noisy numbers of records.
    inertia_ : float
        A noisy sum of squared distances on the scales, of points moved into the balls of the last
        round.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import KMeans
    >>> rng = np.random.default_rng(0)
    >>> X = np.concatenate([rng.normal(m, 0.05, (1000, 2)) for m in (-0.5, 0.5)])
    >>> model = KMeans(n_clusters=2, bounds=(-1, 1), random_state=0).fit(X)
    >>> np.sort(model.cluster_centers_[:, 0]).round(1).tolist()
    [-0.5, 0.5]
    """

    n_clusters: int = 8
    method: str = "coreset"
    seeds: int = 16
    rounds: int = 3
    budget: str = "equal"
    norm: float | None = None
    structure: int = 0
    n_jobs: int | None = None

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        check.integer("n_clusters", self.n_clusters, most=4096)
        start = self._start
        check.integer("seeds", self.seeds, most=4096)
        check.integer("structure", self.structure, least=0)
        if self.norm is not None:
            check.positive("norm", self.norm)
        refuse_categories(public.columns, "k-means")
        width = len(public.columns.columns)
        begun, found = 0.0, list[ReleaseNeed]()
        if start is not None:
            begun, found = start.share, start.needs(self.n_clusters, width, public.terms)
        if begun < 1:
            return [*found, *needs(width, self.rounds, self.budget, 1 - begun)]
        return [*found, measure_need(MEASURED)]

    @property
    def _start(self) -> ClusterStart | None:
        """Where rounds begin; None for public seeds."""
        found: ClusterStart | None = plugins.choose(
            plugins.CLUSTER_STARTS, "method", self.method, STARTS, LAB
        )
        return found

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        rounds = {
            round_name(t): BITS for t in range(check.integer("rounds", self.rounds, most=1000))
        }
        return rounds | {MEASURE: BITS} | ({} if self._start is None else dict(self._start.bits))

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        ball = Ball.of(data.columns, self.norm)
        points = ball.points(data)
        rounds = [round_name(t) for t in range(self.rounds)]
        start = self._start
        if start is None:
            many = max(self.n_clusters, min(self.seeds * self.n_clusters, MOST_SEEDS))
            seeds = separated(many, ball.half_widths, self.structure)
            found = from_seeds(points, seeds, self.n_clusters, rounds, self.structure, fit)
        else:
            found = start.centres(points, ball, self.n_clusters, self.structure, fit)
            if start.share < 1:
                found = lloyd(points, found, rounds, fit)
            else:
                found = measured(points, found, fit)
        scale = {
            "radius": np.array([ball.radius]),
            "inertia": np.array([found.inertia * ball.radius**2 * found.counts.sum()]),
        }
        return {"centres": found.centres, "counts": found.counts} | scale

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._ball = Ball(self._columns, float(model["radius"][0]))
        self._centres, self.counts_ = model["centres"], model["counts"]
        self.cluster_centers_ = self._ball.raw(self._centres)
        self.inertia_ = float(model["inertia"][0])
        self._n_features_out = len(self._centres)

    def predict(self, X: Any) -> NDArray[np.int64]:
        """The nearest centre of each row."""
        return self._distances(X).argmin(axis=1)

    def fit_predict(self, X: Any, y: Any = None, *, users: Any = None) -> NDArray[np.int64]:
        """Fit, and give the nearest centre of each of the caller's own rows. These labels are as
        private as the rows: they are not kept.
        """
        return np.asarray(self.fit(X, y, users=users).predict(X))

    def transform(self, X: Any) -> Floats:
        """The distance of each row to every centre, on the scales."""
        return self._distances(X)

    def score(self, X: Any, y: Any = None) -> float:
        """Minus the sum of squared distances on the scales; for public rows: it is not noisy."""
        return -float((self._distances(X).min(axis=1) ** 2).sum())

    def _distances(self, X: Any) -> Floats:
        rows = (self._given(X).scaled() - self._ball.middle) / self._ball.radius
        squares = (
            (rows**2).sum(axis=1)[:, None]
            - 2 * rows @ self._centres.T
            + (self._centres**2).sum(axis=1)
        )
        return np.asarray(np.sqrt(np.maximum(squares, 0.0)) * self._ball.radius)

    def explain(self) -> Explanation:
        """The centres: how many records each has, and where it is."""
        heads = ("cluster", "records", *self._columns.feature_names)
        order = np.argsort(-self.counts_)
        rows = tuple(
            (f"{k}", float(self.counts_[k]), *self.cluster_centers_[k].tolist()) for k in order
        )
        return Explanation(heads, rows, "numbers of records and places of centres are noisy")
