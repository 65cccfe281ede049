"""The claim of private statistics for batch normalisation, released layer by layer. Importing this
imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, GaussianClaim, register


@register
@dataclass(frozen=True)
class Normalisation(GaussianClaim):
    """Mean and mean square of the channels that enter each of `layers` batch normalisations, with
    noise: one Gaussian release a layer.

    A record's means and mean squares of the C channels of a layer, 2 C numbers, are cut to length
    `bound` sqrt(2 C).
    """

    layers: int
    bound: float = 1.0

    kind: ClassVar[str] = "normalisation"
    purpose: ClassVar[str] = "statistics"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("layers", self.layers, most=10_000)
        check.positive("bound", self.bound)

    @property
    def event(self) -> events.Event:
        """One release for each layer; what enters a layer depends on those before it."""
        return events.Repeated(events.Gaussian(self.noise_multiplier), self.layers)

    @property
    def releases(self) -> int:
        """One for each layer."""
        return self.layers

    def assumptions(self, facts: object) -> list[Assumption]:
        """Every record is cut, and is alone when it goes through the model."""
        done = (
            "every record went through the model alone, and its means and mean squares were cut to "
            "the bound"
        )
        return [
            Assumption(
                "normalisation",
                "one record adds at most the bound to the sums of a layer",
                done,
                YES,
            )
        ]

    def describe(self) -> dict[str, Any]:
        """What was released."""
        return {
            "title": "Statistics of batch normalisation",
            "words": "Mean and mean square of every channel before each batch normalisation, with "
            "noise, in the order of the layers; "
            "training starts with them and leaves them as they are.",
            "noise_multiplier": self.noise_multiplier,
            "layers": self.layers,
            "bound": self.bound,
        }
