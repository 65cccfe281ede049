"""Rounds of Lloyd's algorithm with noise: every point adds a one, its difference to the nearest centre and the square of that to
the sums of its cluster.

Differences are taken about the current centre and shortened to a radius that shrinks with the spread of the cluster, so that
noise is as large as a cluster and not as the ball. Counts, sums and squares are one release with one joint bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpfy.core import check
from dpfy.core.values import Bound
from dpfy.estimators.budget import Need
from dpfy.estimators.clusters.points import STEPS, Floats, Points, blocks, nearest, on_grid, shortened
from dpfy.estimators.clusters.start import Centres
from dpfy.estimators.clusters.summary import SMALLEST, sums_by
from dpfy.estimators.fitting import Fit

COUNT, SQUARE = 0.5, 0.5
"""What a count and a squared distance weigh beside a difference."""
BITS = STEPS + 1
WIDE = 2.5
"""The radius over the deviation of a cluster."""
MEASURE = "distances"
BUDGETS = {"equal": 1.0, "halving": 0.25}
"""What each round has of the budget of the one before it: half of epsilon is a quarter of a share, as shares count."""


def round_name(t: int) -> str:
    """Of a round, from 0."""
    return f"centres {t + 1}"


def needs(dimensions: int, rounds: int, budget: str, share: float) -> list[Need]:
    """One release for each round."""
    check.integer("rounds", rounds, most=1000)
    check.one_of("budget", budget, BUDGETS)
    bound = Bound(l2=math.sqrt(1 + COUNT**2 + SQUARE**2) * (1 + 2.0**-50), l1=COUNT + math.sqrt(dimensions) + SQUARE, linf=1.0)
    parts = [max(BUDGETS[budget] ** t, 1e-6) for t in range(rounds)]
    return [Need(round_name(t), bound, share=share * part / sum(parts)) for t, part in enumerate(parts)]


def lloyd(points: Points, start: Centres, names: Sequence[str], fit: Fit) -> Centres:
    """Rounds from a start, whose inertia is a first guess.

    Guarantees: a point adds to one cluster a vector of norm at most sqrt(1 + COUNT^2 + SQUARE^2). Depends on the points through
    `Fit.release` alone.
    """
    centres, counts, mean, width = on_grid(start.centres), start.counts, start.inertia, start.centres.shape[1]
    squared = np.full(len(centres), mean)
    for name in names:
        radii = np.clip(WIDE * np.sqrt(squared), SMALLEST, 1.0)
        released, noise = fit.release(name, totals(points, centres, radii), BITS), fit.round(name).deviation
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
        centres = on_grid(centres + radii[:, None] * shift)
        mean = float(left.sum() / counts.sum())
        squared = (left / counts + mean) / 2
    return Centres(centres, counts, mean)


def measure_need(share: float) -> Need:
    """One release of counts and squared distances about centres that are fixed."""
    return Need(
        MEASURE,
        Bound(l2=math.sqrt(COUNT**2 + SQUARE**2) * (1 + 2.0**-50), l1=COUNT + SQUARE, linf=max(COUNT, SQUARE)),
        share=share,
    )


def measured(points: Points, start: Centres, fit: Fit) -> Centres:
    """The start with noisy counts and inertia in place of what it had.

    Differences are shortened to `WIDE` deviations where the start knows one, else to the radius of the ball.

    Guarantees: a point adds (COUNT, SQUARE |difference / radius|^2) to one cluster.
    """
    centres = on_grid(start.centres)
    radius = 1.0 if math.isnan(start.inertia) else min(max(WIDE * math.sqrt(start.inertia), SMALLEST), 1.0)
    found = totals(points, centres, np.full(len(centres), radius))[:, [0, -1]]
    released, noise = fit.release(MEASURE, found, BITS), fit.round(MEASURE).deviation
    counts = np.maximum(released[:, 0] / COUNT, noise / COUNT)
    squares = max(float(released[:, 1].sum()) / SQUARE, 0.0) * radius**2
    return Centres(start.centres, counts, squares / float(counts.sum()))


def totals(points: Points, centres: Floats, radii: Floats) -> Floats:
    """Counts, sums of differences over the radius, and sums of their squares, of each cluster."""
    found = np.zeros((len(centres), centres.shape[1] + 2))
    for part in blocks(len(points)):
        rows = points[part].astype(np.float64)
        label, squares = nearest(rows, centres)
        moved = shortened(rows - centres[label], squares, radii[label])
        square = on_grid(SQUARE * np.einsum("ij,ij->i", moved, moved), BITS)
        added = np.concatenate([np.full((len(label), 1), COUNT), moved, square[:, None]], axis=1)
        found += sums_by(label, added, len(centres))
    return found


def separated(clusters: int, half_widths: Floats, seed: int) -> Floats:
    """Random points of a box about the middle, within the ball, at least so far apart as a few tries allow (Su et al. 2016); public."""
    draw = np.random.Generator(np.random.PCG64(seed))
    apart, found = 2 * float(np.linalg.norm(half_widths)), list[Floats]()
    while len(found) < clusters:
        for _ in range(100):
            point = (2 * draw.random(len(half_widths)) - 1) * half_widths
            point /= max(float(np.linalg.norm(point)), 1.0)
            if all(np.linalg.norm(point - other) >= apart for other in found):
                found.append(point)
                break
        else:
            apart *= 0.9
    return np.stack(found)
