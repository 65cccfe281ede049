"""Private summaries of points: weighted points that stand for all, from which a start of clusters
is made at no further cost.

Tree. Level by level every node, a part of the space, counts its points and sums their places and
squared places about its centre, in a ball whose radius shrinks with the spread that the level above
has shown. A node is then cut through its mean, across the coordinate in which it is widest. The
last level is the summary. It needs no grid, so that it works in many dimensions.

Grid (synopsis: Su et al. 2016). One histogram over equal cells of the cube; good in two or three
dimensions.

k-means of such a summary is post-processing, and gives centres to begin with.

Records as points of the unit ball, on a grid: what clusters are made of.

Numbers stand on their scales; the middle of their ranges is the middle of the ball. Coordinates are
cut to 14 fractional bits, towards zero, which takes no point out of the ball. Centres stand on the
same grid. So squared distances are sums without rounding: which centre is nearest depends on
only the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bound
from dpfy.estimators.bounding import one_of_each
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.columns import FeatureColumns
from dpfy.estimators.fitting import FitSession
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.threads import each

Floats = NDArray[np.float64]
Points = NDArray[np.float32]
"""Whole steps of 2^-14 between -1 and 1, which single precision holds without rounding."""

BITS = 14
STEPS = 12
"""Fractional bits of what a point adds to a sum."""
BLOCK = 1 << 15
"""Points that are worked on at a time."""
SAFE = 1 - 2.0**-30
"""Below one by far more than the rounding of a norm."""


def on_grid(values: Floats, bits: int = BITS) -> Floats:
    """Numbers cut to whole steps of 2^-bits, towards zero."""
    return np.asarray(np.trunc(values * 2.0**bits) * 2.0**-bits)


def blocks(size: int) -> Iterator[slice]:
    """All places, in blocks: at least one, which may be empty."""
    for start in range(0, max(size, 1), BLOCK):
        yield slice(start, min(size, start + BLOCK))


def summed(size: int, like: NDArray[Any], work: Callable[[slice], NDArray[Any]]) -> NDArray[Any]:
    """What `work` makes of every block, added up in `like`."""
    for found in each(work, blocks(size)):
        like += found
    return like


@dataclass(frozen=True)
class Ball:
    """Where points live, in public terms: the middle of the scaled ranges, and the largest distance
    from it that is kept.
    """

    columns: FeatureColumns
    radius: float

    @classmethod
    def of(cls, columns: FeatureColumns, norm: float | None) -> Ball:
        """Around all that the ranges allow, or around the points within `norm` of their middle."""
        whole = math.sqrt(sum(0.25 if c.scale == "unit" else 1.0 for c in columns.numbers))
        return cls(columns, whole if norm is None else min(norm, whole))

    @property
    def middle(self) -> Floats:
        """Of the scaled ranges."""
        return np.array([0.5 if c.scale == "unit" else 0.0 for c in self.columns.numbers])

    @property
    def half_widths(self) -> Floats:
        """Of the box of all ranges, in units of the radius."""
        return np.minimum(
            np.array([0.5 if c.scale == "unit" else 1.0 for c in self.columns.numbers])
            / self.radius,
            1.0,
        )

    def points(self, data: EncodedRecords) -> Points:
        """Every record as a point; one outside the ball is moved to its edge.

        Guarantees: every coordinate is a whole step, and no point has a norm above one.
        """
        found = np.empty((data.size, len(self.columns.numbers)), np.float32)

        def place(part: slice) -> None:
            rows = (data.scaled(part) - self.middle) / self.radius
            norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
            rows *= (SAFE / np.maximum(norms, SAFE))[:, None]
            found[part] = on_grid(rows)

        for _ in each(place, blocks(data.size)):
            pass
        return found

    def raw(self, points: Floats) -> Floats:
        """Points in the units of the columns."""
        scaled = points * self.radius + self.middle
        return np.stack(
            [_raw(scaled[:, k], column) for k, column in enumerate(self.columns.numbers)], axis=1
        )


def _raw(scaled: Floats, column: Any) -> Floats:
    """A number from its scale back to its own units."""
    share = np.clip(scaled if column.scale == "unit" else (scaled + 1) / 2, 0, 1)
    low, high = (column.transformed(end) for end in column.range)
    value = low + share * (high - low)
    return np.asarray(np.expm1(value) if column.transform == "log1p" else value)


def nearest(points: Floats, centres: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The nearest centre of each point, the first of equals, and the square of its distance. Both
    stand on the grid.
    """
    squares = np.einsum("ij,ij->i", centres, centres) - 2 * points @ centres.T
    best = squares.argmin(axis=1)
    own = np.einsum("ij,ij->i", points, points)
    return best, np.maximum(own + np.take_along_axis(squares, best[:, None], axis=1)[:, 0], 0.0)


def shortened(rows: Floats, squares: Floats, radius: Floats) -> Floats:
    """Differences over the radius of their ball, those outside moved to its edge, on a grid of 12
    bits.

    `squares` are the squared norms of the rows.

    Guarantees: no norm above one.
    """
    norms = np.sqrt(squares)
    factor = SAFE / np.maximum(norms, radius)
    return on_grid(rows * factor[:, None], STEPS)


TREE, CELLS, RECORDS = "summary", "cells", "records"
COUNTED = 0.02
"""The share of the budget that counts the records, where the size of a grid depends on it."""
SQUARE = 0.5
"""What squared coordinates weigh beside a count and coordinates."""
TREE_BOUND = Bound(l2=1.5 * (1 + 2.0**-50))
"""Of (1, v, v^2 / 2) for v in the unit ball: the sum of fourth powers is at most one."""
TREE_BITS = STEPS + 1
WIDE = 3.0
"""The radius of a ball over the deviation that it was seen to hold."""
SMALLEST = 2.0**-8
"""No ball is smaller."""
MOST_CELLS = 1 << 20
DEEPER = 4
"""Levels of the tree beyond those that would give each cluster a node."""
STARTS, MOST_ROUNDS = 12, 60
"""Starts of which the best is kept, and rounds of each."""
WORK = 4_000_000
"""Distances of a round over all starts, above which there are fewer of them."""


@dataclass(frozen=True)
class NoisyCentres:
    """Centres, how many points each has, and the mean squared distance of all to their centres; all
    of them noisy.
    """

    centres: Floats
    counts: Floats
    inertia: float


@dataclass(frozen=True)
class Summary:
    """Weighted points; `spread` is the mean squared distance of what each stands for."""

    points: Floats
    weights: Floats
    spread: Floats

    @property
    def within(self) -> float:
        """The mean spread."""
        return float(np.average(self.spread, weights=np.maximum(self.weights, 1e-9)))


def tree_bound(dimensions: int) -> Bound:
    """What a point adds to a level, with the L1 norm that Laplace noise needs."""
    return Bound(l2=TREE_BOUND.l2, l1=1 + math.sqrt(dimensions) + SQUARE, linf=1.0)


def tree(points: Points, levels: int, fit: FitSession) -> Summary:
    """The summary of so many releases.

    Guarantees: a point adds to one node of each level, a vector of norm at most 1.5. Depends on the
    points through `FitSession.release` alone.
    """
    width = points.shape[1]
    node = np.zeros(len(points), np.int64)
    centres, radii = np.zeros((1, width)), np.ones(1)
    noise = fit.round(TREE).deviation
    for level in range(levels):
        released = fit.release(TREE, _totals(points, node, centres, radii), TREE_BITS)
        counts = np.maximum(released[:, 0], noise)
        mean = released[:, 1 : 1 + width] / counts[:, None]
        mean /= np.maximum(np.sqrt((mean**2).sum(axis=1, keepdims=True)), 1.0)
        variance = released[:, 1 + width :] / SQUARE / counts[:, None] - mean**2
        spread = np.maximum(variance.sum(axis=1), 0.02)
        centres, deviation = on_grid(centres + mean * radii[:, None]), radii * np.sqrt(spread)
        if level < levels - 1:
            node = _cut(points, node, centres, variance.argmax(axis=1))
            centres = np.repeat(centres, 2, axis=0)
            radii = np.repeat(np.clip(WIDE * deviation, SMALLEST, radii), 2)
    weights = np.where(released[:, 0] > noise, released[:, 0], 0.0)
    return Summary(centres, weights, deviation**2)


def _totals(points: Points, node: NDArray[np.int64], centres: Floats, radii: Floats) -> Floats:
    """Counts, sums and sums of squares of the points of each node, about its centre and over its
    radius.
    """

    def added(part: slice) -> Floats:
        rows, at = points[part].astype(np.float64), node[part]
        rows -= centres[at]
        moved = shortened(rows, np.einsum("ij,ij->i", rows, rows), radii[at])
        vectors = np.concatenate(
            [np.ones((len(at), 1)), moved, on_grid(SQUARE * moved**2, TREE_BITS)], axis=1
        )
        return sums_by(at, vectors, len(centres))

    return summed(len(points), np.zeros((len(centres), 1 + 2 * points.shape[1])), added)


def _cut(
    points: Points, node: NDArray[np.int64], centres: Floats, axis: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The children that points go to: right of the mean of their node in its widest coordinate, or
    not.
    """

    def right(part: slice) -> NDArray[np.bool_]:
        at = node[part]
        coordinate = np.take_along_axis(points[part], axis[at][:, None], axis=1)[:, 0]
        return np.asarray(coordinate > centres[at, axis[at]])

    return 2 * node + np.concatenate([*each(right, blocks(len(node)))])


def sums_by(label: NDArray[np.int64], rows: Floats, labels: int) -> Floats:
    """The sum of the rows of each label."""
    return np.stack([np.bincount(label, rows[:, k], labels) for k in range(rows.shape[1])], axis=1)


def cells_of(dimensions: int, records: float, epsilon: float) -> int:
    """Cells on each side of the grid: (records epsilon / 10)^(2 d / (2 + d)) in all (Su et al.
    2016).
    """
    whole = max(records * epsilon / 10, 1.0) ** (2 * dimensions / (2 + dimensions))
    side = max(2, int(whole ** (1 / dimensions) + 1e-9))
    while side > 2 and side**dimensions > MOST_CELLS:
        side -= 1
    return side


def refuse_wide(dimensions: int) -> None:
    """Refuse a grid over too many dimensions."""
    if 2**dimensions > MOST_CELLS:
        raise Unsupported(
            f"a grid over {dimensions} dimensions, which has at least 2^{dimensions} cells;",
            'use method="coreset"',
        )


def lowered(counts: Floats, whole: float) -> Floats:
    """Noisy counts, none below zero, that add up to `whole`: all are lowered by one number, and
    what falls below zero is zero.

    Noise in empty cells goes that way, which nothing else would tell from records.
    """
    order = np.sort(counts)[::-1]
    levels = (np.cumsum(order) - whole) / np.arange(1, len(order) + 1)
    kept = np.flatnonzero(order > levels)
    return np.asarray(np.maximum(counts - (levels[kept[-1]] if len(kept) else order[0]), 0.0))


def grid(points: Points, records: float, side: int, radius: Floats, fit: FitSession) -> Summary:
    """A histogram over equal cells of the box with these half widths, as weighted points in their
    middles; `records` is their number.
    """
    width = points.shape[1]

    def counted(part: slice) -> NDArray[np.int64]:
        place = np.clip(np.floor((points[part] / radius + 1) / 2 * side), 0, side - 1).astype(
            np.int64
        )
        return np.bincount(place @ (side ** np.arange(width)), minlength=side**width)

    counts = summed(len(points), np.zeros(side**width, np.int64), counted)
    weights = lowered(fit.release(CELLS, counts), max(records, 1.0))
    place = np.arange(len(counts))[:, None] // side ** np.arange(width) % side
    middles = ((place + 0.5) / side * 2 - 1) * radius
    spread = float((radius**2).sum()) / 3 / side**2
    return Summary(on_grid(middles, BITS), weights, np.full(len(counts), spread))


def levels(clusters: int) -> int:
    """How many levels the tree for so many clusters has."""
    return math.ceil(math.log2(clusters)) + DEEPER


def centres_of(held: Summary, clusters: int, seed: int) -> NoisyCentres:
    """k-means of a summary, which is released already."""
    centres, label, squares = weighted_kmeans(held.points, held.weights, clusters, seed)
    counts = np.maximum(np.bincount(label, held.weights, clusters), 1.0)
    between = float(np.average(squares, weights=np.maximum(held.weights, 1e-9)))
    return NoisyCentres(centres, counts, between + held.within)


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
        centres = _begun(points, weights, clusters, draw)
        cost = np.inf
        for _ in range(MOST_ROUNDS):
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


def _begun(points: Floats, weights: Floats, clusters: int, draw: np.random.Generator) -> Floats:
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


@dataclass(frozen=True)
class TreeStart:
    """The last level of the tree, with this share of the budget."""

    share: float
    bits: ClassVar[Mapping[str, int]] = {TREE: TREE_BITS}

    def needs(self, clusters: int, width: int, terms: FitTerms) -> list[ReleaseNeed]:
        """The levels of the tree."""
        return [ReleaseNeed(TREE, tree_bound(width), releases=levels(clusters), share=self.share)]

    def centres(
        self, points: Points, ball: Ball, clusters: int, seed: int, fit: FitSession
    ) -> NoisyCentres:
        """k-means of the last level."""
        return centres_of(tree(points, levels(clusters), fit), clusters, seed)


@dataclass(frozen=True)
class GridStart:
    """The grid, with this share of the budget, a part of which counts the records."""

    share: float
    bits: ClassVar[Mapping[str, int]] = {}

    def needs(self, clusters: int, width: int, terms: FitTerms) -> list[ReleaseNeed]:
        """The number of records, on which the size of cells depends, and the counts of cells."""
        refuse_wide(width)
        one = one_of_each(1, terms)
        rest = self.share - COUNTED
        return [ReleaseNeed(RECORDS, one, share=COUNTED), ReleaseNeed(CELLS, one, share=rest)]

    def centres(
        self, points: Points, ball: Ball, clusters: int, seed: int, fit: FitSession
    ) -> NoisyCentres:
        """k-means of the middles of the cells."""
        records = float(fit.release(RECORDS, np.array([len(points)]))[0])
        like = math.sqrt(2) / fit.round(CELLS).deviation  # epsilon of Laplace noise as wide
        side = cells_of(points.shape[1], records, like)
        return centres_of(grid(points, records, side, ball.half_widths, fit), clusters, seed)
