"""The claim of synthetic images: pictures of which size and classes, in which basis, and what all
statistics together may spend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, Claim, register
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import EXAMPLE, Adjacency

IMAGES, SHEET, FACTS = "images.npz", "sheet.png", "images.json"
MEASUREMENTS = "measurements.safetensors"
MOST_CLASSES, MOST_ROUNDS = 1000, 20


@register
@dataclass(frozen=True)
class ImageSynthesis(Claim):
    """Noisy statistics of private pictures, and pictures drawn from a model of them.

    `noise_multiplier` is that of the one Gaussian release to which all statistics together amount:
    of brightness and pixels, of moments, of `rounds` rounds of k-means, and of the clusters. A
    picture of `height` x `width` pixels is used by its lowest `frequencies` x `frequencies`
    cosines, and has one of `classes` labels.
    """

    height: int
    width: int
    classes: int
    frequencies: int
    rounds: int
    noise_multiplier: float

    kind: ClassVar[str] = "image-synthesis"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (IMAGES, SHEET, FACTS, MEASUREMENTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("height", "width", "frequencies"):
            check.integer(name, getattr(self, name))
        check.integer("classes", self.classes, most=MOST_CLASSES)
        check.integer("rounds", self.rounds, most=MOST_ROUNDS)
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        if self.adjacency is not Adjacency.ADD_OR_REMOVE_ONE or self.unit != EXAMPLE:
            raise InvalidInput(
                "adjacency", str(self.adjacency), "must be that one picture is added or removed"
            )

    @property
    def name(self) -> str:
        """What the reservation is called."""
        return "synthetic images"

    @property
    def releases(self) -> int:
        """Levels, moments, the rounds of k-means, clusters."""
        return 3 + self.rounds

    @property
    def event(self) -> events.Event:
        """The whole bill: one Gaussian release."""
        return events.Gaussian(self.noise_multiplier)

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """A picture adds no more than its bound; nothing public was read from the pictures; the sum
        of squares was kept.
        """
        return [
            Assumption(
                "contribution",
                "one picture adds at most the bound to every sum",
                "every vector was shortened to a length of one and rounded, and is in one cluster "
                "of one class",
                YES,
            ),
            Assumption(
                "basis",
                "size, classes and cosines are public; directions, lengths and clusters follow "
                "from what was released",
                "they were given before the pictures were read, or computed from noisy sums alone",
                YES,
            ),
            Assumption(
                "adaptivity",
                "squares of 1 / noise add up to at most that of one release",
                "a filter refused whatever would exceed it, before it was made",
                YES,
            ),
            Assumption(
                "arithmetic",
                "sums and noise are exact",
                "sums are of whole numbers, noise is drawn on a grid",
                YES,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """What is made, from what."""
        return {
            "title": "Synthetic images",
            "words": "Moments of the pictures were measured with noise, class by class and cluster "
            "by cluster; the pictures were drawn "
            "from Gaussians with these moments. No picture of the data is among them, nor a part "
            "of one.",
            "picture": f"{self.height} x {self.width} pixels",
            "classes": self.classes,
            "basis": f"cosines of the {self.frequencies} lowest frequencies along each side",
            "rounds_of_k_means": self.rounds,
            "noise_multiplier": self.noise_multiplier,
        }
