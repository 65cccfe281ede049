"""What is asked about the pictures, stage by stage. Each stage sees the pictures, the meter, and
what the stages before it released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch

from dpfy.synthetic.evolution import FINE, Array, Whole, bounded, fine, nearest
from dpfy_lab.synthetic_images.encoding import WHITE, Bytes, Encoding
from dpfy_lab.synthetic_images.releases import BoundedSums, ImageReleases, NoisySums

LEVELS, MOMENTS, ROUNDS, CLUSTERS = (
    Fraction(3, 100),
    Fraction(17, 100),
    Fraction(30, 100),
    Fraction(50, 100),
)
"""Shares of the budget; all rounds of k-means together have one."""
SHADES = 32
"""Ranges of brightness that pictures, and pixels, are counted in."""
USUAL = 0.9
"""The share of pictures that keep their length."""
ROOM = 1.3
"""Vectors less the mean of their class keep this many times their root mean square length."""
FEW = 3.0
"""Counts below this many standard deviations of their noise are taken for that."""
COUNTS, FIRST, SECOND = 0.25, 0.5, 1.0
"""Weights of counts, sums and products: the products need the most, and powers of two round
nothing.
"""
APART = 0.7
"""How far the first centres are from the mean of their class, in standard deviations."""
MOST_PRODUCTS = 1 << 24


@dataclass(frozen=True)
class Pictures:
    """The private data: (n, height, width) grey pixels, and labels from 0 on."""

    pixels: Bytes = field(repr=False)
    labels: Whole = field(repr=False)


@dataclass(frozen=True)
class ImageLevels:
    """How long vectors are, how many pictures a class has, and which share of the pixels has which
    shade. Released.
    """

    radius: float
    counts: Array
    shades: Array


@dataclass(frozen=True)
class Directions:
    """The mean of every class, the directions in which pictures of a class differ, and how far they
    do. Released.
    """

    means: Array
    axes: Array
    variances: Array
    reach: float


@dataclass(frozen=True)
class ClusterCentres:
    """Centres of the clusters of every class, (classes, clusters, axes), in units of the reach.
    Released.
    """

    places: Array
    reach: float


@dataclass(frozen=True)
class ClusterMoments:
    """Of every cluster: how many pictures, their sum and their products, in units of the centres'
    reach. Released.
    """

    counts: NoisySums
    sums: NoisySums
    products: NoisySums


def longest(size: int) -> float:
    """The largest norm of a bounded vector of so many numbers: one, and half a step of rounding in
    each of them.
    """
    return (1 + math.sqrt(size) / (2 * FINE)) * (1 + 2.0**-40)


def packed(products: Array) -> Array:
    """The upper triangle of symmetric matrices, off the diagonal times sqrt 2: a vector with the
    norm of the matrix.
    """
    size = products.shape[-1]
    rows, columns = np.triu_indices(size)
    held: Array = products[..., rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2))
    return held


def unpacked(values: Array) -> Array:
    """The symmetric matrices that were packed."""
    size = (math.isqrt(8 * values.shape[-1] + 1) - 1) // 2
    rows, columns = np.triu_indices(size)
    found = np.zeros((*values.shape[:-1], size, size))
    found[..., rows, columns] = found[..., columns, rows] = values * np.where(
        rows == columns, 1.0, math.sqrt(0.5)
    )
    return found


def eigen(matrices: Array) -> tuple[Array, Array]:
    """Eigenvalues, from the largest on, and eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(matrices))
    return values.flip(-1).numpy(), vectors.flip(-1).numpy()


def levels(meter: ImageReleases, data: Pictures, vectors: Array, encoding: Encoding) -> ImageLevels:
    """Counts of pictures by brightness, of pictures by class, and shares of pixels by shade: a
    picture adds three vectors of length one.
    """
    lengths = np.sqrt(np.square(vectors).sum(axis=1) / encoding.pixels)
    bright = np.bincount(
        np.minimum(lengths * SHADES, SHADES - 1).astype(np.int64), minlength=SHADES
    )
    counts = np.bincount(data.labels, minlength=meter.claim.classes)
    step = (WHITE + 1) // SHADES
    shades = np.bincount((data.pixels // step).ravel(), minlength=SHADES) / encoding.pixels
    by_length, by_class, by_shade = meter.release(
        LEVELS,
        {
            "brightness": BoundedSums(bright.astype(np.float64), 1.0),
            "classes": BoundedSums(counts.astype(np.float64), 1.0),
            "shades": BoundedSums(shades, 1.0),
        },
    )
    seen = np.maximum(by_length.values, 0).cumsum()
    bin_ = int(np.searchsorted(seen, USUAL * seen[-1]))
    kept = np.maximum(by_shade.values, 0)
    radius = (min(bin_, SHADES - 1) + 1) / SHADES * math.sqrt(encoding.pixels)
    found = np.maximum(by_class.values, 0)
    return ImageLevels(
        radius, found, kept / kept.sum() if kept.sum() > 0 else np.full(SHADES, 1 / SHADES)
    )


def directions(
    meter: ImageReleases, points: Array, labels: Whole, known: ImageLevels
) -> Directions:
    """Sums by class and products of all bounded vectors; then the axes along which pictures of a
    class vary more than the noise does.
    """
    classes, size = meter.claim.classes, points.shape[1]
    _, sums = _summed(points, labels, classes)
    length = longest(size)
    first, second = meter.release(
        MOMENTS,
        {
            "class sums": BoundedSums(sums, length, FIRST),
            "products": BoundedSums(packed(points.T @ points), length**2, SECOND),
        },
    )
    counts = np.maximum(known.counts, FEW * meter.released["classes"].deviation)
    total = counts.sum()
    means = bounded(first.values / counts[:, None])
    within = unpacked(second.values) / total - means.T @ (means * (counts / total)[:, None])
    values, vectors = eigen(within)
    count = axes_above_noise(values, second.deviation / total)
    kept = np.maximum(values[:count], 0)
    reach = ROOM * math.sqrt(max(min(float(kept.sum()), float(np.trace(within))), 1 / FINE))
    return Directions(means, fine(vectors[:, :count]), kept, reach)


def axes_above_noise(values: Array, deviation: float) -> int:
    """How many eigenvalues are above half of the largest that noise alone has (Wigner's edge); at
    least one, at most `MOST_AXES`.
    """
    edge = math.sqrt(2 * len(values)) * deviation
    return int(np.clip((values > edge / 2).sum(), 1, MOST_AXES))


MOST_AXES = 80


def clusters_for(total: float, classes: int, axes: int, noise: float) -> int:
    """How many clusters a class is worth: more where there are more pictures and less noise."""
    worth = round(0.2 * math.sqrt(max(total, 1.0) / classes / noise))
    return max(1, min(worth, 64, MOST_PRODUCTS // (classes * axes * axes)))


def _summed(points: Array, cells: Whole, count: int) -> tuple[Array, Array]:
    """Counts and sums of the points of each cell."""
    sums = np.stack([part.sum(axis=0) for part in _apart(points, cells, count)])
    return np.bincount(cells, minlength=count).astype(np.float64), sums


def _apart(points: Array, cells: Whole, count: int) -> list[Array]:
    """The points of each cell."""
    ends = np.bincount(cells, minlength=count).cumsum()[:-1]
    return np.split(points[np.argsort(cells, kind="stable")], ends)


def centres(
    meter: ImageReleases, points: Array, labels: Whole, seen: Directions, count: int
) -> ClusterCentres:
    """k-means in every class by rounds of noisy counts and sums (Su et al. 2016), from public
    random places.
    """
    classes, axes = meter.claim.classes, points.shape[1]
    spread = np.sqrt(seen.variances) / seen.reach
    start = np.random.default_rng(0).standard_normal((classes, count, axes)) * (APART * spread)
    places = bounded(start.reshape(-1, axes))
    for number in range(meter.claim.rounds):
        cells = labels * count + nearest(points, labels, places.reshape(classes, count, axes))
        numbers, sums = _summed(points, cells, classes * count)
        met, moved = meter.release(
            ROUNDS / meter.claim.rounds,
            {
                f"round {number} counts": BoundedSums(numbers, 1.0, FIRST),
                f"round {number} sums": BoundedSums(sums, longest(axes), SECOND),
            },
        )
        places = bounded(moved.values / np.maximum(met.values, FEW * met.deviation)[:, None])
    between = float(
        (np.maximum(met.values, 0) @ np.square(places).sum(axis=1))
        / max(np.maximum(met.values, 0).sum(), 1.0)
    )
    reach = ROOM * math.sqrt(max(1 / ROOM**2 - between, 0.1 / ROOM**2))
    return ClusterCentres(places.reshape(classes, count, axes), reach)


def moments(
    meter: ImageReleases, points: Array, labels: Whole, known: ClusterCentres
) -> ClusterMoments:
    """Counts, sums and products of what is left of the points of each cluster when its centre is
    taken off.
    """
    classes, count, axes = known.places.shape
    cells = labels * count + nearest(points, labels, known.places)
    rest = bounded((points - known.places.reshape(-1, axes)[cells]) / known.reach)
    numbers, sums = _summed(rest, cells, classes * count)
    products = np.stack([part.T @ part for part in _apart(rest, cells, classes * count)])
    length = longest(axes)
    return ClusterMoments(
        *meter.release(
            CLUSTERS,
            {
                "cluster counts": BoundedSums(numbers, 1.0, COUNTS),
                "cluster sums": BoundedSums(sums, length, FIRST),
                "cluster products": BoundedSums(packed(products), length**2, SECOND),
            },
        )
    )
