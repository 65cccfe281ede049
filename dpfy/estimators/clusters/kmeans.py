"""k-means on private points: a start from a private summary, then noisy rounds about the centres;
and the methods that it is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin

from dpfy.core import check, plugins
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.clusters import lloyd
from dpfy.estimators.clusters.points import Ball, Floats, Points
from dpfy.estimators.clusters.summary import GridStart, NoisyCentres, TreeStart
from dpfy.estimators.columns import refuse_categories
from dpfy.estimators.estimator import PrivateEstimator, PublicFacts
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import EncodedRecords

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
            return [*found, *lloyd.needs(width, self.rounds, self.budget, 1 - begun)]
        return [*found, lloyd.measure_need(MEASURED)]

    @property
    def _start(self) -> ClusterStart | None:
        """Where rounds begin; None for public seeds."""
        found: ClusterStart | None = plugins.choose(
            plugins.CLUSTER_STARTS, "method", self.method, STARTS, LAB
        )
        return found

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        rounds = {
            lloyd.round_name(t): lloyd.BITS
            for t in range(check.integer("rounds", self.rounds, most=1000))
        }
        return (
            rounds
            | {lloyd.MEASURE: lloyd.BITS}
            | ({} if self._start is None else dict(self._start.bits))
        )

    def _learn(
        self, data: EncodedRecords, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        ball = Ball.of(data.columns, self.norm)
        points = ball.points(data)
        rounds = [lloyd.round_name(t) for t in range(self.rounds)]
        start = self._start
        if start is None:
            many = max(self.n_clusters, min(self.seeds * self.n_clusters, lloyd.MOST_SEEDS))
            seeds = lloyd.separated(many, ball.half_widths, self.structure)
            found = lloyd.from_seeds(points, seeds, self.n_clusters, rounds, self.structure, fit)
        else:
            found = start.centres(points, ball, self.n_clusters, self.structure, fit)
            if start.share < 1:
                found = lloyd.lloyd(points, found, rounds, fit)
            else:
                found = lloyd.measured(points, found, fit)
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
        heads = ("cluster", "records", *self._columns.names)
        order = np.argsort(-self.counts_)
        rows = tuple(
            (f"{k}", float(self.counts_[k]), *self.cluster_centers_[k].tolist()) for k in order
        )
        return Explanation(heads, rows, "numbers of records and places of centres are noisy")
