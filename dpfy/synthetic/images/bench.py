"""A synthesis of images as the self-test of the audit sees it: its steps one by one, each of which
a mistake may replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfy.core.ledger_rules import rehearsal
from dpfy.core.randomness import Randomness
from dpfy.synthetic.images import stages
from dpfy.synthetic.images.mixture import fitted
from dpfy.synthetic.images.releases import ImageReleases
from dpfy.synthetic.images.run import ImageOptions, ImagePlan, ImageTerms, drawn, plan
from dpfy.synthetic.images.source import ImageSchema
from dpfy.synthetic.images.stages import Array, Pictures

SCHEMA, TERMS, OPTIONS = (
    ImageSchema(6, 6, 2),
    ImageTerms(50.0, 1e-4),
    ImageOptions(clusters=2, frequencies=4, rounds=2),
)
SEED = 23


@dataclass(frozen=True)
class PictureSteps:
    """The steps of a synthesis of images; a mistake replaces one of them, or what the meter
    does.
    """

    meter: Callable[[ImageReleases], ImageReleases] = lambda meter: meter
    levels: Callable[..., stages.ImageLevels] = stages.levels
    bounded: Callable[[Array], Array] = stages.bounded
    directions: Callable[..., stages.Directions] = stages.directions
    centres: Callable[..., stages.ClusterCentres] = stages.centres
    moments: Callable[..., stages.ClusterMoments] = stages.moments
    images: Callable[..., Any] = lambda data, mixture, made: drawn(
        mixture, made, np.random.default_rng(0)
    )

    def synthesized(self, data: Pictures) -> tuple[ImageReleases, Any]:
        """The meter afterwards, and all that is published."""
        made: ImagePlan = plan(SCHEMA, TERMS, OPTIONS)
        claim = made.claim
        permit = rehearsal(claim.event, claim.releases, claim.name, claim.adjacency)
        meter = self.meter(ImageReleases(claim, permit, Randomness.for_tests(SEED)))
        vectors = made.encoding.vectors(data.pixels)
        known = self.levels(meter, data, vectors, made.encoding)
        points = self.bounded(vectors / known.radius)
        seen = self.directions(meter, points, data.labels, known)
        inner = self.bounded(((points - seen.means[data.labels]) @ seen.axes) / seen.reach)
        held = self.centres(meter, inner, data.labels, seen, OPTIONS.clusters)
        mixture = fitted(known, seen, held, self.moments(meter, inner, data.labels, held))
        return meter, (
            self.images(data, mixture, made),
            [noisy.values for noisy in meter.released.values()],
        )


def _made(count: int, seed: int, most: int) -> Pictures:
    rng = np.random.default_rng(seed)
    return Pictures(rng.integers(0, most, (count, 6, 6)).astype(np.uint8), np.arange(count) % 2)


def _with(data: Pictures, picture: int, label: int) -> Pictures:
    one = np.full((1, 6, 6), picture, np.uint8)
    return Pictures(np.concatenate([data.pixels, one]), np.append(data.labels, label))


def neighbours() -> Iterator[tuple[str, Pictures, Pictures, bool]]:
    """Two data sets each: with one picture more, all white or all black; and two that have nothing
    in common (True).
    """
    some = _made(30, 0, 120)
    yield "one white picture", some, _with(some, 255, 0), False
    yield "one black picture", some, _with(some, 0, 1), False
    yield "other pictures", some, _made(17, 1, 255), True


def runs(
    change: Callable[[Any], Any],
) -> Iterator[tuple[str, Callable[[Pictures], Any], Pictures, Pictures, bool]]:
    """For the audit: a synthesis with the steps that `change` makes of the real ones, and two data
    sets to run it on.
    """
    steps: PictureSteps = change(PictureSteps())
    for name, one, other, strangers in neighbours():
        yield name, lambda data: steps.synthesized(data)[1], one, other, strangers


def spent(change: Callable[[Any], Any]) -> tuple[float, float]:
    """What all releases took of the sum of squares, by the noise that they had, and what the claim
    allows.
    """
    meter, _ = change(PictureSteps()).synthesized(_made(30, 0, 120))
    return float(sum(meter.squares)), float(meter.whole)
