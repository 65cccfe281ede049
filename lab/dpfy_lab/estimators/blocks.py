"""Sample and aggregate (Nissim, Raskhodnikova & Smith 2007): k-means on disjoint blocks, and the
noisy mean of what they find.

The block of a point follows from the point itself, by a public hash: a record changes the result of
one block, wherever it stands and whatever k-means does with it. Clusters of blocks are matched by
their order along the first coordinate, so that the mean says something only where clusters lie well
apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core.values import Bound
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.clusters import summary as grid
from dpfy.estimators.clusters.summary import Ball, NoisyCentres, Points, weighted_kmeans
from dpfy.estimators.fitting import FitSession

BLOCKS = "blocks"
COUNT = 200
"""Blocks."""
BITS = 12
MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd factor whose product carries every bit into the upper ones."""


def bound(clusters: int, dimensions: int) -> Bound:
    """A record changes the centres of one block, each within the unit ball, from any to any.

    One that is replaced leaves a block and enters another. Both change, perhaps the same way: what
    is released is the sum over blocks, which moves by twice as much. Half of that counts.
    """
    moved = 2 * math.sqrt(clusters) * (1 + 2.0**-50)
    return Bound(l2=moved, l1=moved * math.sqrt(clusters * dimensions))


def blocks_of(points: Points) -> NDArray[np.int64]:
    """The block of each point: a hash of its coordinates with public factors."""
    draw = np.random.Generator(np.random.PCG64(0))
    found = np.zeros(len(points), np.uint64)
    for k in range(points.shape[1]):
        factor = np.uint64(2 * int(draw.integers(1, 1 << 62)) + 1)
        steps = (
            np.ldexp(points[:, k].astype(np.float64), grid.BITS).astype(np.int64).astype(np.uint64)
        )
        found = (found ^ (steps * factor)) * MIX
    return np.asarray((found >> np.uint64(33)) % np.uint64(COUNT), np.int64)


@dataclass(frozen=True)
class BlocksStart:
    """The noisy mean of the centres of all blocks; no rounds follow."""

    share: ClassVar[float] = 1.0
    bits: ClassVar[Mapping[str, int]] = {BLOCKS: BITS}

    def needs(self, clusters: int, width: int, terms: FitTerms) -> list[ReleaseNeed]:
        """The sum of the centres of all blocks."""
        return [ReleaseNeed(BLOCKS, bound(clusters, width), share=self.share)]

    def centres(
        self, points: Points, ball: Ball, clusters: int, seed: int, fit: FitSession
    ) -> NoisyCentres:
        """Guarantees: one record changes the centres of one block."""
        block = blocks_of(points)
        total = np.zeros((clusters, points.shape[1]))
        for b in range(COUNT):
            mine = points[block == b].astype(np.float64)
            if len(mine):
                found, _, _ = weighted_kmeans(mine, np.ones(len(mine)), clusters, 0, starts=1)
                ordered = found[np.argsort(found[:, 0], kind="stable")]
                total += grid.on_grid(ordered * grid.SAFE, BITS)
        mean = fit.release(BLOCKS, total, BITS) / COUNT
        mean = mean / np.maximum(np.sqrt((mean**2).sum(axis=1, keepdims=True)), 1.0)
        return NoisyCentres(mean, np.ones(clusters), math.nan)


START = BlocksStart()
