"""Where rounds begin: centres, how many points each has, and how far points lie from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpfy.estimators.clusters.points import Floats, Points
from dpfy.estimators.clusters.summary import Summary, tree
from dpfy.estimators.clusters.weighted import weighted_kmeans
from dpfy.estimators.fitting import FitSession

DEEPER = 4
"""Levels of the tree beyond those that would give each cluster a node."""


@dataclass(frozen=True)
class NoisyCentres:
    """Centres, how many points each has, and the mean squared distance of all to their centres; all
    of them noisy.
    """

    centres: Floats
    counts: Floats
    inertia: float


def levels(clusters: int) -> int:
    """How many levels the tree for so many clusters has."""
    return math.ceil(math.log2(clusters)) + DEEPER


def coreset(points: Points, clusters: int, seed: int, fit: FitSession) -> NoisyCentres:
    """From a tree of noisy counts and sums. Guarantees: those of `summary.tree`."""
    return of(tree(points, levels(clusters), fit), clusters, seed)


def of(held: Summary, clusters: int, seed: int) -> NoisyCentres:
    """k-means of a summary, which is released already."""
    centres, label, squares = weighted_kmeans(held.points, held.weights, clusters, seed)
    counts = np.maximum(np.bincount(label, held.weights, clusters), 1.0)
    between = float(np.average(squares, weights=np.maximum(held.weights, 1e-9)))
    return NoisyCentres(centres, counts, between + held.within)
