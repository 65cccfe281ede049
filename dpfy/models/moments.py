"""The claim of private moments: what a release of first and second moments of features promises. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, Promise, register


@register
@dataclass(frozen=True)
class Moments(Promise):
    """One Gaussian release of sums to which each record adds a vector of bounded length, for centring and whitening features."""

    noise_multiplier: float

    kind: ClassVar[str] = "moments"
    purpose: ClassVar[str] = "statistics"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.noise_multiplier("noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier))

    @property
    def event(self) -> events.Event:
        """One Gaussian release."""
        return events.Gaussian(self.noise_multiplier)

    def assumptions(self, facts: object) -> list[Assumption]:
        """Every record has length one."""
        return [Assumption("moments", "one record adds at most the bound", "every record was divided by its own length", YES)]

    def describe(self) -> dict[str, Any]:
        """What was released."""
        return {
            "title": "Moments of the features",
            "words": "Sums of the features and of their products, with noise; features are centred and whitened with them.",
            "noise_multiplier": self.noise_multiplier,
        }
