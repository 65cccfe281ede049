"""Mistakes of k-means and mixtures: seeds, balls and blocks that follow from the records, sums that
are billed for less than they hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpfy.audit.bench import Bug
from dpfy.audit.bugs.trees import shorter
from dpfy.audit.learners import NEIGHBOURS, NOISE

CLUSTERS = "dpfy.estimators.clusters"
RELEASE = "dpfy.estimators.fitting.FitSession.release"
LLOYD, CORESET, SYNOPSIS, AGGREGATE, MIXTURE, FULL = (
    "k-means, lloyd",
    "k-means, coreset",
    "k-means, synopsis",
    "k-means, aggregate",
    "mixture",
    "mixture, full",
)


def seeds_of_the_data(real: Any) -> Any:
    """Records are the first centres, as a plain k-means would have it: those at the ends of the
    first coordinate.
    """

    def from_seeds(points: Any, seeds: Any, *more: Any) -> Any:
        ends = points[[points[:, 0].argmin(), points[:, 0].argmax()]].astype(np.float64)
        return real(points, np.resize(ends, seeds.shape), *more)

    return from_seeds


def ball_of_the_data(real: Any) -> Any:
    """The ball is as large as the farthest record asks for."""

    def points(self: Any, data: Any) -> Any:
        found = real(self, data)
        return found / np.sqrt((found.astype(np.float64) ** 2).sum(axis=1)).max().astype(np.float32)

    return points


def no_empty_cells(real: Any) -> Any:
    """Cells without a record stay empty."""

    def release(self: Any, name: str, total: Any, bits: int = 0) -> Any:
        found = real(self, name, total, bits)
        return np.where(total == 0, 0.0, found) if name == "cells" else found

    return release


def true_inertia(real: Any) -> Any:
    """The sum of squared distances is that of the records."""

    def learn(self: Any, data: Any, public: Any, fit: Any) -> Any:
        found = dict(real(self, data, public, fit))
        rows = data.scaled()
        found["inertia"] = np.array(
            [float(((rows[:, None] - found["centres"]) ** 2).sum(axis=2).min(axis=1).sum())]
        )
        return found

    return learn


def whole_points(real: Any) -> Any:
    """Every component takes every point for its own."""
    return lambda points, mixture: np.ones((len(points), len(mixture.weights)))


def both_halves_twice(real: Any) -> Any:
    """Products off the diagonal are counted for both of their places, twice."""

    def products(points: Any, shares: Any) -> Any:
        found = real(points, shares)
        return found + found.T

    return products


BUGS = (
    Bug(
        "seeds-of-the-data",
        "k-means begins at records",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.lloyd.from_seeds": seeds_of_the_data},
        case=LLOYD,
    ),
    Bug(
        "counts-not-billed",
        "counts and squares are released beside sums with noise for sums alone",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.lloyd.Bound": shorter(lambda l2: 1.0)},
        case=LLOYD,
    ),
    Bug(
        "levels-not-composed",
        "every level of the tree has the noise of a single release",
        NOISE,
        learner={
            "dpfy.estimators.fitting.Gaussian": lambda real: (
                lambda multiplier: real(multiplier / 5**0.5)
            )
        },
        case=CORESET,
    ),
    Bug(
        "ball-of-the-data",
        "points are scaled by the farthest record",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.points.Ball.points": ball_of_the_data},
        case=CORESET,
    ),
    Bug(
        "inertia-exact",
        "the sum of squared distances is told without noise",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.kmeans.KMeans._learn": true_inertia},
        case=CORESET,
    ),
    Bug(
        "empty-cells-of-the-grid-exact",
        "cells without a record have no noise",
        NOISE,
        learner={RELEASE: no_empty_cells},
        case=SYNOPSIS,
    ),
    Bug(
        "mean-of-blocks-billed",
        "noise for the mean of all blocks is added to their sum",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.aggregate.Bound": shorter(lambda l2: l2 / 200)},
        case=AGGREGATE,
    ),
    Bug(
        "shares-above-one",
        "every component counts a point in full",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.mixture.shares": whole_points},
        case=MIXTURE,
    ),
    Bug(
        "squares-not-billed",
        "shares and squares are released beside sums with noise for sums alone",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.mixture.Bound": shorter(lambda l2: 0.9)},
        case=MIXTURE,
    ),
    Bug(
        "products-counted-twice",
        "products of a full covariance are added to both halves of a matrix that holds both "
        "already",
        NEIGHBOURS,
        learner={f"{CLUSTERS}.covariances.products": both_halves_twice},
        case=FULL,
    ),
)
