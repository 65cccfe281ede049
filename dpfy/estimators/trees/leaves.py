"""What records add to the leaves of a tree, and what noisy sums of it let one expect there.

Noise-aware smoothing of a function on groups of cells: what a noisy sum says, given how smooth
such functions are.

Within a column the function is a sum of two parts, both unknown: one that moves slowly from cell to
cell (a chain: covariance level^2 exp(-distance / REACH)), and one that is independent in each cell
(spike^2). Observed are sums z = h f + noise of known variance v. Chains have tridiagonal inverse
covariances, so that posterior mean, variance and likelihood of all columns together take one pass
over the groups. Words of a category are a chain without links. Level and spike of each column are
those under which its sums are likeliest. All of it works on released numbers: it costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpttrf, dpttrs

from dpfy.core.values import Bound
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import FitTerms
from dpfy.estimators.fitting import fixed
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.target import ClassTarget, Target

Floats = NDArray[np.float64]

REACH = 0.3
"""Share of the range of a number over which its function forgets its value."""
LEVELS = (0.03, 0.1, 0.3, 1.0, 3.0)
SPIKES = (0.02, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class TridiagonalPrecision:
    """The inverse covariance of the slow part at level one: its diagonal and the entries beside it;
    `columns` are the starts of the columns.
    """

    diagonal: Floats
    beside: Floats
    shrink: Floats
    columns: NDArray[np.int64]

    @classmethod
    def of(cls, links: Floats, starts: NDArray[np.int64]) -> TridiagonalPrecision:
        """From distances to the group before; infinite where there is none."""
        near = np.exp(-links / REACH)
        gain = 1 / (1 - near**2)
        diagonal = gain.copy()
        diagonal[:-1] += (near**2 * gain)[1:]
        return cls(diagonal, -(near * gain)[1:], np.log(gain), starts[:-1])


@dataclass(frozen=True)
class SmoothedPosterior:
    """The posterior of a function: its mean [groups, scores], and for each column the logarithm of
    the likelihood of the sums.
    """

    mean: Floats
    likelihood: Floats


def smooth(
    chain: TridiagonalPrecision,
    sums: Floats,
    weight: Floats,
    variance: Floats,
    level: Floats,
    spike: Floats,
) -> SmoothedPosterior:
    """Given sums = weight * function + noise [groups, scores], with `level` and `spike` for each
    group.
    """
    apart = (spike**2)[
        :, None
    ] * weight**2 + variance  # variance of what the slow part does not explain
    told, exact = weight * sums / apart, weight**2 / apart
    mean, likelihood = np.empty_like(sums), np.zeros(len(sums))
    for k in range(sums.shape[1]):
        pivots, factors, _ = dpttrf(
            chain.diagonal / level**2 + exact[:, k], chain.beside / level[1:] ** 2
        )
        mean[:, k], _ = dpttrs(pivots, factors, told[:, k])
        own = np.log(apart[:, k]) + np.log(pivots) + 2 * np.log(level) - chain.shrink
        likelihood -= 0.5 * (own + sums[:, k] ** 2 / apart[:, k] - told[:, k] * mean[:, k])
    spikes = (spike**2)[:, None] * weight / apart * (sums - weight * mean)
    return SmoothedPosterior(mean + spikes, np.add.reduceat(likelihood, chain.columns))


def likeliest(
    chain: TridiagonalPrecision, sums: Floats, weight: Floats, variance: Floats
) -> tuple[Floats, Floats]:
    """Level and spike of each group: for each column those under which its sums are likeliest."""
    size, found = len(sums), []
    pairs = [(level, spike) for level in LEVELS for spike in SPIKES]
    for level, spike in pairs:
        found.append(
            smooth(
                chain, sums, weight, variance, np.full(size, level), np.full(size, spike)
            ).likelihood
        )
    best = np.array(pairs)[np.argmax(np.array(found), axis=0)]
    each = np.repeat(best, np.diff(np.append(chain.columns, size)), axis=0)
    return each[:, 0], each[:, 1]


def deviation(
    chain: TridiagonalPrecision, weight: Floats, variance: Floats, level: Floats, spike: Floats
) -> Floats:
    """The standard deviation of the posterior in each group [groups, scores]."""
    apart = (spike**2)[:, None] * weight**2 + variance
    exact, found = weight**2 / apart, np.empty_like(weight)
    for k in range(weight.shape[1]):
        found[:, k] = _inverse_diagonal(
            chain.diagonal / level**2 + exact[:, k], chain.beside / level[1:] ** 2
        )
    kept = (variance / apart) ** 2  # of the slow part's variance: what the spike does not take up
    return np.sqrt(kept * found + (spike**2)[:, None] * variance / apart)


def _inverse_diagonal(diagonal: Floats, beside: Floats) -> Floats:
    """The diagonal of the inverse of a positive tridiagonal matrix: from pivots of both
    directions.
    """
    down, _, _ = dpttrf(diagonal, beside)
    up, _, _ = dpttrf(diagonal[::-1].copy(), beside[::-1].copy())
    return np.asarray(1 / (down + up[::-1] - diagonal))


LEAVES = "leaves"
BITS = 12
MOST_DEPTH = 12
SMALL = 2.0**-10
"""No class is less likely."""
SPREAD = 0.1
"""The variance of a number from -1 to 1, as it is taken to be."""


def bound(trees: int, target: Target | None, terms: FitTerms) -> Bound:
    """A record adds its class as a one, or a one and its number from -1 to 1, to a leaf of each
    tree.
    """
    if isinstance(target, ClassTarget):
        return one_of_each(trees, terms)
    return Bound(l2=math.sqrt(2 * trees) * (1 + 2.0**-50), l1=2.0 * trees, linf=1.0)


def known(data: EncodedRecords) -> list[Floats]:
    """What each record adds to its leaf, but for its weight: a one for its class; or a one, and its
    number in shares of its range, from -1 to 1.
    """
    if isinstance(data.aim, ClassTarget):
        return [(data.labels == k).astype(np.float64) for k in range(data.classes)]
    aim, values = data.numeric
    return [
        np.ones(data.size),
        fixed(np.clip(2 * (values - aim.low) / (aim.high - aim.low) - 1, -1, 1), BITS),
    ]


def expected(
    sums: Floats, noise: float, classes: bool, chain: TridiagonalPrecision
) -> tuple[Floats, Floats, Floats]:
    """From noisy sums [leaves, what is known]: how far each leaf is from the mean [leaves,
    outputs], that mean, and how many records there are.

    Outputs are the shares of classes, or the number.
    """
    counts = np.maximum(sums.sum(axis=1) if classes else sums[:, 0], 0.5)
    outputs = sums if classes else sums[:, 1:]
    mean = np.clip(outputs.sum(axis=0) / counts.sum(), 0 if classes else -1, 1)
    weight = np.repeat(counts[:, None], outputs.shape[1], axis=1)
    left = outputs - weight * mean
    noisy = noise**2 * (
        (1 - mean) ** 2 + (outputs.shape[1] - 1) * mean**2 if classes else 1 + mean**2
    )
    variance = noisy + weight * (mean * (1 - mean) if classes else SPREAD)
    return (
        smooth(chain, left, weight, variance, *likeliest(chain, left, weight, variance)).mean,
        mean,
        counts,
    )
