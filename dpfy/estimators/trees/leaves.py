"""What records add to the leaves of a tree, and what noisy sums of it let one expect there."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dpfy.core.values import Bound
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import FitTerms
from dpfy.estimators.fitting import fixed
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.target import ClassTarget, Target
from dpfy.estimators.trees.smoothing import TridiagonalPrecision, likeliest, smooth

Floats = NDArray[np.float64]

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
