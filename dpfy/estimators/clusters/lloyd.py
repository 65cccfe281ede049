"""Rounds of Lloyd's algorithm with noise: every point adds a one, its difference to the nearest
centre and the square of that to the sums of its cluster.

Differences are taken about the current centre and shortened to a radius that shrinks with the
spread of the cluster, so that noise is as large as a cluster and not as the ball. Counts, sums and
squares are one release with one joint bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpfy.core import check
from dpfy.core.values import Bound
from dpfy.estimators.budget import ReleaseNeed
from dpfy.estimators.clusters.points import (
    STEPS,
    Floats,
    Points,
    nearest,
    on_grid,
    shortened,
    summed,
)
from dpfy.estimators.clusters.summary import (
    SMALLEST,
    NoisyCentres,
    Summary,
    centres_of,
    sums_by,
)
from dpfy.estimators.fitting import FitSession

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
    """The start with noisy counts and inertia in place of what it had.

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
