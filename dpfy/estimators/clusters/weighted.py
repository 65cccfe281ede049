"""k-means of weighted points that are public already: what is made of a private summary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STARTS, MOST = 12, 60
"""Starts of which the best is kept, and rounds of each."""
WORK = 4_000_000
"""Distances of a round over all starts, above which there are fewer of them."""


def weighted_kmeans(
    points: Floats, weights: Floats, clusters: int, seed: int, starts: int = STARTS
) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Centres with a small weighted sum of squared distances, the cluster of each point, and its
    squared distance.

    Greedy k-means++ (Arthur & Vassilvitskii 2007) and Lloyd's rounds, the best of several starts.

    Guarantees: depends on the arguments alone. There are `clusters` centres, also where there are
    fewer points.
    """
    every = points
    draw = np.random.Generator(np.random.PCG64(seed))
    kept = weights > 0
    points, weights = (
        (points[kept], weights[kept]) if kept.any() else (points, np.ones(len(points)))
    )
    best: tuple[float, Floats] | None = None
    starts = max(1, min(starts, WORK // (len(points) * clusters)))
    for _ in range(starts if len(points) > clusters else 1):
        centres = _start(points, weights, clusters, draw)
        cost = np.inf
        for _ in range(MOST):
            label, squares = _assigned(points, centres)
            now = float(weights @ squares)
            if now >= cost * (1 - 1e-6):
                break
            cost = now
            sums = np.stack(
                [np.bincount(label, weights * column, clusters) for column in points.T], axis=1
            )
            mass = np.bincount(label, weights, clusters)
            centres = np.where(mass[:, None] > 0, sums / np.maximum(mass, 1e-300)[:, None], centres)
        if best is None or cost < best[0]:
            best = (cost, centres)
    assert best is not None
    return best[1], *_assigned(every, best[1])


def _assigned(points: Floats, centres: Floats) -> tuple[NDArray[np.int64], Floats]:
    squares = (points**2).sum(axis=1)[:, None] - 2 * points @ centres.T + (centres**2).sum(axis=1)
    label = squares.argmin(axis=1)
    return label, np.maximum(np.take_along_axis(squares, label[:, None], axis=1)[:, 0], 0.0)


def _start(points: Floats, weights: Floats, clusters: int, draw: np.random.Generator) -> Floats:
    """Each centre is the best of a few points drawn by weight and squared distance to those before
    it.
    """
    tries = 2 + int(np.log2(clusters))
    centres = points[[int(draw.choice(len(points), p=weights / weights.sum()))]]
    squares = ((points - centres[0]) ** 2).sum(axis=1)
    while len(centres) < clusters:
        mass = weights * squares
        whole = float(mass.sum())
        chosen = draw.choice(
            len(points), size=tries, p=mass / whole if whole > 0 else weights / weights.sum()
        )
        nearer = np.stack(
            [np.minimum(squares, ((points - points[c]) ** 2).sum(axis=1)) for c in chosen]
        )
        best = int((nearer @ weights).argmin())
        centres, squares = np.concatenate([centres, points[[chosen[best]]]]), nearer[best]
    return centres
