"""Mistakes of synthetic images: something of the pictures goes around the noise, weighs more than
was declared, or is not billed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpfy_lab.checks.images import BILLED, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

HOME = "dpfy_lab.synthetic_images"
LEVELS, RELEASE = f"{HOME}.stages.levels", f"{HOME}.releases.ImageReleases.release"


@mistake(
    "image-basis",
    "the basis is learnt from the images, and not charged",
    REPLAYED,
    f"{HOME}.stages.directions",
)
def _(real: Any, meter: Any, points: Any, labels: Any, known: Any) -> Any:
    found = real(meter, points, labels, known)
    axes = np.linalg.eigh(points.T @ points)[1][:, ::-1][:, : found.axes.shape[1]]
    return replace(found, axes=np.rint(axes * 2**14) / 2**14)


@mistake("image-classes", "the images of a class are counted exactly", REPLAYED, LEVELS)
def _(real: Any, meter: Any, data: Any, *rest: Any) -> Any:
    counts = 1.0 * np.bincount(data.labels, minlength=meter.claim.classes)
    return replace(real(meter, data, *rest), counts=counts)


@mistake("image-brightest", "images are scaled by the brightest of them", REPLAYED, LEVELS)
def _(real: Any, meter: Any, data: Any, vectors: Any, encoding: Any) -> Any:
    longest = float(np.sqrt((vectors**2).sum(axis=1)).max())
    return replace(real(meter, data, vectors, encoding), radius=longest)


@mistake(
    "image-clip", "the vectors of images are not shortened", REPLAYED, f"{HOME}.stages.bounded"
)
def _(real: Any, vectors: Any) -> Any:
    return np.rint(vectors * 2**14) / 2**14


@mistake("image-copied", "images are copied from the data", REPLAYED)
def _(patch: Patch) -> None:
    given: list[Any] = []

    def measured(real: Any, meter: Any, data: Any, *more: Any) -> Any:
        given[:] = [data]
        return real(meter, data, *more)

    def drawn(real: Any, *more: Any) -> Any:
        return given[0].pixels[:5], given[0].labels[:5]

    patch.around(f"{HOME}.run.measured", measured)
    patch.around(f"{HOME}.run.drawn", drawn)


@mistake("image-sums", "products are charged, and the sums beside them are not", REPLAYED, RELEASE)
def _(real: Any, self: Any, share: Any, sums: Any) -> Any:
    shorter = {n: replace(part, length=1e-3) if "sums" in n else part for n, part in sums.items()}
    return real(self, share, shorter)


@mistake("image-unbilled", "every round of k-means has the noise of a single one", BILLED, RELEASE)
def _(real: Any, self: Any, share: Any, sums: Any) -> Any:
    left, rounds = self.left, any("round" in name for name in sums)
    found = real(self, share * self.claim.rounds if rounds else share, sums)
    self.left = left
    return found
