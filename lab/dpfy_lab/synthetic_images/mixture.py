"""From released moments to pictures: a mixture of Gaussians for every class. All of it is
post-processing, and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dpfy.synthetic.evolution import Array, Whole
from dpfy_lab.synthetic_images.encoding import WHITE, Bytes, Encoding
from dpfy_lab.synthetic_images.stages import (
    FEW,
    SHADES,
    ClusterCentres,
    ClusterMoments,
    Directions,
    ImageLevels,
    eigen,
    unpacked,
)

DRAWN = 1 << 10
"""Pictures that are drawn at a time."""


@dataclass(frozen=True)
class ClusterMixture:
    """Clusters of all classes, one class after the other: weights (classes, clusters), means in the
    space of vectors, and roots of covariances along `axes`.
    """

    weights: Array
    means: Array
    axes: Array
    roots: Array
    levels: ImageLevels

    @property
    def clusters(self) -> int:
        """Of each class."""
        return int(self.weights.shape[1])

    def draw(self, labels: Whole, rng: np.random.Generator) -> Array:
        """One vector for each label."""
        shares = self.weights / self.weights.sum(axis=1, keepdims=True)
        ends = shares.cumsum(axis=1)
        ends[:, -1] = 1.0
        cells = labels * self.clusters + (rng.random(len(labels))[:, None] >= ends[labels]).sum(
            axis=1
        )
        drawn = torch.from_numpy(rng.standard_normal((len(labels), self.axes.shape[1], 1)))
        away = (torch.from_numpy(self.roots[cells]) @ drawn)[:, :, 0] @ torch.from_numpy(
            self.axes
        ).T
        return (self.means[cells] + away.numpy()) * self.levels.radius


def fitted(
    known: ImageLevels, seen: Directions, held: ClusterCentres, found: ClusterMoments
) -> ClusterMixture:
    """The mixture with these moments, each cluster's covariance drawn towards that of its class by
    as much as noise is in it.
    """
    classes, clusters, axes = held.places.shape
    counts = np.maximum(found.counts.values, FEW * found.counts.deviation)
    means = found.sums.values / counts[:, None]
    products = unpacked(found.products.values)
    groups = products.reshape(classes, clusters, axes, axes).sum(axis=1)
    shared = groups / counts.reshape(classes, clusters).sum(axis=1)[:, None, None]
    own = drawn_together(
        products / counts[:, None, None],
        shared.repeat(clusters, axis=0),
        counts,
        found.products.deviation,
    )
    spread = own - means[:, :, None] * means[:, None, :]
    values, vectors = eigen(spread)
    roots = vectors * np.sqrt(with_trace(values))[:, None, :]
    places = held.places.reshape(-1, axes) + means * held.reach
    centres = seen.means.repeat(clusters, axis=0) + (places * seen.reach) @ seen.axes.T
    weights = np.maximum(found.counts.values, 0.0).reshape(classes, clusters)
    weights = np.where(weights.sum(axis=1, keepdims=True) > 0, weights, 1.0)
    return ClusterMixture(weights, centres, seen.axes, roots * (held.reach * seen.reach), known)


def drawn_together(own: Array, shared: Array, counts: Array, noise: float) -> Array:
    """Each matrix moved to what it shares with others, by the part of their distance that noise and
    chance explain (Ledoit & Wolf 2004).
    """
    size = own.shape[-1]
    by_noise = (noise / counts) ** 2 * (size * (size + 1) / 2)
    by_chance = (
        np.trace(shared, axis1=1, axis2=2) ** 2 + np.square(shared).sum(axis=(1, 2))
    ) / counts
    apart = np.square(own - shared).sum(axis=(1, 2))
    pull = np.clip((by_noise + by_chance) / np.maximum(apart, 1e-300), 0.0, 1.0)[:, None, None]
    return (1 - pull) * own + pull * shared


def with_trace(values: Array) -> Array:
    """The nearest eigenvalues that are not negative and have the same sum (a projection onto a
    simplex; Duchi et al. 2008).

    Noise spreads eigenvalues to both sides. Cutting off the negative ones alone would leave
    pictures with too much of everything.
    """
    total = np.maximum(values.sum(axis=1), 0.0)
    excess = (values.cumsum(axis=1) - total[:, None]) / np.arange(1, values.shape[1] + 1)
    last = np.maximum((values > excess).sum(axis=1), 1) - 1
    found: Array = np.maximum(values - np.take_along_axis(excess, last[:, None], 1), 0.0)
    return found


def pictures(
    mixture: ClusterMixture, encoding: Encoding, labels: Whole, rng: np.random.Generator
) -> Bytes:
    """One picture for each label, its pixels as dark and bright as those of the data are."""
    found = np.empty((len(labels), encoding.height, encoding.width), np.uint8)
    ink = None
    for start in range(0, len(labels), DRAWN):
        held = encoding.pictures(mixture.draw(labels[start : start + DRAWN], rng))
        ink = float(held.mean()) if ink is None else ink
        found[start : start + DRAWN] = shaded(held, mixture.levels.shades, ink)
    return found


def shaded(held: Array, shades: Array, ink: float) -> Bytes:
    """Pixels of each picture in their order, with the values that pixels have in the data; more
    bright ones where there is more ink.
    """
    count, pixels = len(held), held[0].size if len(held) else 1
    flat = held.reshape(count, pixels)
    bright = 1 - shades[0]
    share = np.clip(bright * np.clip(flat.mean(axis=1) / max(ink, 1e-6), 0.3, 3.0), 1e-6, 1.0)
    order = flat.argsort(axis=1)
    rank = np.empty_like(flat)
    np.put_along_axis(
        rank, order, np.broadcast_to((np.arange(pixels) + 0.5) / pixels, flat.shape), 1
    )
    above = (
        1 - (1 - rank) / share[:, None]
    )  # 1 is the brightest pixel of the picture, below 0 it is as the darkest shade
    ends = np.concatenate([[0.0], shades[1:].cumsum() / max(shades[1:].sum(), 1e-12)])
    step = (WHITE + 1) / SHADES
    values = np.interp(np.clip(above, 0, 1), ends, step * np.arange(1, SHADES + 1))
    return (
        np.where(above > 0, np.rint(np.minimum(values, WHITE)), 0)
        .astype(np.uint8)
        .reshape(held.shape)
    )
