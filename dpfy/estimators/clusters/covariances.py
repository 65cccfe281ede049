"""Full covariances of mixtures: what a point adds to them, what is made of noisy sums, and
exponents without rounding.

A point v with share s adds the matrix s v v', whose norm is s |v|^2, both halves of it: each
product off the diagonal is released twice, and the mean of the two has half of the variance of the
noise. s v is cut to a grid before it meets v, so that a matrix product adds up all points without
rounding.

Precisions stand on a grid of 2^-10 and points on one of 2^-14. With at most 64 columns and
variances of at least 2^-12 no sum of some of their products has more than 53 bits.
"""

from __future__ import annotations

import math

import numpy as np

from dpfy.core.errors import Unsupported
from dpfy.estimators.clusters.summary import Floats, on_grid

MOST = 64
"""Columns of a full covariance."""
NARROWEST = 2.0**-12
"""The smallest variance in any direction, in the unit ball."""
PRECISIONS, SLOPES, SHARED = 10, 20, 14
"""Fractional bits of precisions, of slopes, and of a share times a point."""


def refuse_wide(columns: int) -> None:
    """Refuse a matrix over too many columns."""
    if columns > MOST:
        raise Unsupported(
            f'covariance_type="full" for {columns} columns, of at most {MOST};',
            'use covariance_type="diag"',
        )


def products(points: Floats, shares: Floats) -> Floats:
    """The sum of share times v v' over points in the unit ball.

    Guarantees: without rounding, for points on the grid of 2^-12 and up to 2^26 of them; a point
    adds a matrix of Frobenius norm at most its share.
    """
    return np.asarray(on_grid(shares[:, None] * points, SHARED).T @ points)


def settled(sums: Floats, shift: Floats, counts: Floats, noise: float, radii: Floats) -> Floats:
    """Covariances about the means from noisy sums of products [components, columns, columns], where
    `noise` is the deviation of one and `radii` are the units of the points.

    Products off the diagonal are trusted as far as they are larger than noise would be, and so are
    differences on it. No direction is narrower than `NARROWEST`, or than noise lets us see (a
    twentieth to a two-hundredth of the mean variance), and none has more than 1. Guarantees:
    depends on the arguments alone.
    """
    width = sums.shape[1]
    found = (sums + sums.transpose(0, 2, 1)) / 2 / counts[:, None, None] - shift[
        :, :, None
    ] * shift[:, None, :]
    own = np.diagonal(found, axis1=1, axis2=2)
    level = np.maximum(own.mean(axis=1, keepdims=True), 0.02 / width)
    off = noise / counts[:, None]
    own = np.maximum(level + (own - level) / (1 + (off / level) ** 2), 0.05 * level)
    across = found * (1 - np.eye(width))
    energy = np.maximum((across**2).sum(axis=(1, 2)), 1e-300)
    told = np.maximum(1 - width * (width - 1) * off[:, 0] ** 2 / 2 / energy, 0.0)
    values, vectors = np.linalg.eigh(across * told[:, None, None] + own[:, :, None] * np.eye(width))
    floor = np.clip(2 * math.sqrt(width) * off, 0.005 * level, 0.05 * level)
    values = np.clip(np.maximum(values, floor) * radii[:, None] ** 2, NARROWEST, 1.0)
    return np.asarray((vectors * values[:, None, :]) @ vectors.transpose(0, 2, 1))


def exponents(weights: Floats, means: Floats, covariances: Floats) -> tuple[Floats, Floats, Floats]:
    """What the logarithm of a component's density is made of, up to a constant: c + slopes x - x'
    precisions x.
    """
    values, vectors = np.linalg.eigh(covariances)
    half = (vectors * (0.5 / np.clip(values, NARROWEST, 1.0))[:, None, :]) @ vectors.transpose(
        0, 2, 1
    )
    precisions = (
        np.rint((half + half.transpose(0, 2, 1)) * 2.0 ** (PRECISIONS - 1)) * 2.0**-PRECISIONS
    )
    slopes = np.rint(2 * np.einsum("kij,kj->ki", precisions, means) * 2.0**SLOPES) * 2.0**-SLOPES
    bent = (
        np.einsum("ki,ki->k", slopes, np.linalg.solve(precisions, slopes[:, :, None])[:, :, 0]) / 4
    )
    wide = np.linalg.slogdet(2 * precisions)[1]
    return np.log(np.maximum(weights, 1e-300)) + 0.5 * wide - bent, slopes, precisions


def logarithms(points: Floats, constants: Floats, slopes: Floats, precisions: Floats) -> Floats:
    """Of weight times density, without the constant, for each point and component.

    Guarantees: for points on their grid, what is subtracted and added up follows from the point
    alone, to the last bit.
    """
    bent = np.stack([((points @ one) * points).sum(axis=1) for one in precisions], axis=1)
    return np.asarray(constants + (points @ slopes.T - bent))


def largest_l1(columns: int) -> float:
    """The largest sum of absolute values of v v' for v in the unit ball: (|v|_1)^2."""
    return columns * (1 + math.ldexp(1, -50))
