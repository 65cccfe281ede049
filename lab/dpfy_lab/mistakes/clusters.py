"""Mistakes of k-means and mixtures: seeds, balls and blocks that follow from the records, sums that
are billed for less than they hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpfy_lab.checks.estimators import NEIGHBOURS, NOISE
from dpfy_lab.mistakes.linear import GAUSSIAN, HOME, RELEASE, quieter
from dpfy_lab.mistakes.trees import shorter
from dpfy_lab.selftest.mistake import mistake

CLUSTERS = f"{HOME}.clusters"
LLOYD, CORESET, SYNOPSIS, AGGREGATE, MIXTURE, FULL = (
    "k-means, lloyd",
    "k-means, coreset",
    "k-means, synopsis",
    "k-means, aggregate",
    "mixture",
    "mixture, full",
)


@mistake(
    "seeds-of-the-data",
    "k-means begins at records",
    NEIGHBOURS.of(LLOYD),
    f"{CLUSTERS}.kmeans.from_seeds",
)
def _(real: Any, points: Any, seeds: Any, *more: Any) -> Any:
    ends = points[[points[:, 0].argmin(), points[:, 0].argmax()]].astype(np.float64)
    return real(points, np.resize(ends, seeds.shape), *more)


mistake(
    "counts-not-billed",
    "counts and squares are released beside sums with noise for sums alone",
    NEIGHBOURS.of(LLOYD),
    f"{CLUSTERS}.kmeans.Bound",
)(shorter(lambda l2: 1.0))

mistake(
    "levels-not-composed",
    "every level of the tree has the noise of a single release",
    NOISE.of(CORESET),
    GAUSSIAN,
)(quieter(5**-0.5))


@mistake(
    "ball-of-the-data",
    "points are scaled by the farthest record",
    NEIGHBOURS.of(CORESET),
    f"{CLUSTERS}.summary.Ball.points",
)
def _(real: Any, self: Any, data: Any) -> Any:
    found = real(self, data)
    return found / np.sqrt((found.astype(np.float64) ** 2).sum(axis=1)).max().astype(np.float32)


@mistake(
    "inertia-exact",
    "the sum of squared distances is told without noise",
    NEIGHBOURS.of(CORESET),
    f"{CLUSTERS}.kmeans.KMeans._learn",
)
def _(real: Any, self: Any, data: Any, public: Any, fit: Any) -> Any:
    found = dict(real(self, data, public, fit))
    apart = ((data.scaled()[:, None] - found["centres"]) ** 2).sum(axis=2)
    found["inertia"] = np.array([float(apart.min(axis=1).sum())])
    return found


@mistake(
    "empty-cells-of-the-grid-exact",
    "cells without a record have no noise",
    NOISE.of(SYNOPSIS),
    RELEASE,
)
def _(real: Any, self: Any, name: str, total: Any, bits: int = 0) -> Any:
    found = real(self, name, total, bits)
    return np.where(total == 0, 0.0, found) if name == "cells" else found


mistake(
    "mean-of-blocks-billed",
    "noise for the mean of all blocks is added to their sum",
    NEIGHBOURS.of(AGGREGATE),
    "dpfy_lab.estimators.blocks.Bound",
)(shorter(lambda l2: l2 / 200))


@mistake(
    "shares-above-one",
    "every component counts a point in full",
    NEIGHBOURS.of(MIXTURE),
    f"{CLUSTERS}.mixture.shares",
)
def _(real: Any, points: Any, mixture: Any) -> Any:
    return np.ones((len(points), len(mixture.weights)))


mistake(
    "squares-not-billed",
    "shares and squares are released beside sums with noise for sums alone",
    NEIGHBOURS.of(MIXTURE),
    f"{CLUSTERS}.mixture.Bound",
)(shorter(lambda l2: 0.9))


@mistake(
    "products-counted-twice",
    "products of a full covariance are added to both halves of a matrix that holds both already",
    NEIGHBOURS.of(FULL),
    f"{CLUSTERS}.covariances.products",
)
def _(real: Any, points: Any, shares: Any) -> Any:
    found = real(points, shares)
    return found + found.T
