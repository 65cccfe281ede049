"""Mistakes of synthetic images: something of the pictures goes around the noise, weighs more than
was declared, or is not billed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

REPLAYED, BILLED = "synthetic images", "image bills"


def basis_of_the_data(real: Any) -> Any:
    """The axes are the principal components of the pictures themselves."""

    def directions(meter: Any, points: Any, labels: Any, known: Any) -> Any:
        found = real.directions(meter, points, labels, known)
        axes = np.linalg.eigh(points.T @ points)[1][:, ::-1][:, : found.axes.shape[1]]
        return replace(found, axes=np.rint(axes * 2**14) / 2**14)

    return replace(real, directions=directions)


def classes_counted(real: Any) -> Any:
    """How many pictures a class has is counted exactly."""

    def levels(meter: Any, data: Any, *rest: Any) -> Any:
        return replace(
            real.levels(meter, data, *rest),
            counts=1.0 * np.bincount(data.labels, minlength=meter.claim.classes),
        )

    return replace(real, levels=levels)


def brightest_of_the_data(real: Any) -> Any:
    """Vectors are scaled by the longest of them."""

    def levels(meter: Any, data: Any, vectors: Any, encoding: Any) -> Any:
        return replace(
            real.levels(meter, data, vectors, encoding),
            radius=float(np.sqrt((vectors**2).sum(axis=1)).max()),
        )

    return replace(real, levels=levels)


def not_shortened(real: Any) -> Any:
    """Vectors are rounded, but not shortened."""
    return replace(real, bounded=lambda vectors: np.rint(vectors * 2**14) / 2**14)


def pictures_copied(real: Any) -> Any:
    """Images are drawn from the pictures, in place of the model."""
    return replace(real, images=lambda data, mixture, made: (data.pixels[:5], data.labels[:5]))


def _with_meter(real: Any, method: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A meter whose `release` is `method(meter, the real one)`."""

    def meter(held: Any) -> Any:
        held.release = method(held, held.release)
        return held

    return replace(real, meter=meter)


def sums_not_billed(real: Any) -> Any:
    """Sums are released beside products with noise for the products alone."""

    def method(held: Any, release: Callable[..., Any]) -> Callable[..., Any]:
        def again(share: Any, sums: Any) -> Any:
            return release(
                share,
                {
                    name: replace(part, length=1e-3) if "sums" in name else part
                    for name, part in sums.items()
                },
            )

        return again

    return _with_meter(real, method)


def rounds_for_nothing(real: Any) -> Any:
    """Every round of k-means has the noise of a single one."""

    def method(held: Any, release: Callable[..., Any]) -> Callable[..., Any]:
        def again(share: Any, sums: Any) -> Any:
            left = held.left
            found = release(
                share * held.claim.rounds if any("round" in name for name in sums) else share, sums
            )
            held.left = left
            return found

        return again

    return _with_meter(real, method)


BUGS = (
    Bug(
        "image-basis",
        "the basis is learnt from the images, and not billed",
        REPLAYED,
        pictures=basis_of_the_data,
    ),
    Bug(
        "image-classes",
        "the images of a class are counted exactly",
        REPLAYED,
        pictures=classes_counted,
    ),
    Bug(
        "image-brightest",
        "images are scaled by the brightest of them",
        REPLAYED,
        pictures=brightest_of_the_data,
    ),
    Bug("image-clip", "the vectors of images are not shortened", REPLAYED, pictures=not_shortened),
    Bug("image-copied", "images are copied from the data", REPLAYED, pictures=pictures_copied),
    Bug(
        "image-sums",
        "products are billed, and the sums beside them are not",
        REPLAYED,
        pictures=sums_not_billed,
    ),
    Bug(
        "image-unbilled",
        "every round of k-means has the noise of a single one",
        BILLED,
        pictures=rounds_for_nothing,
    ),
)
