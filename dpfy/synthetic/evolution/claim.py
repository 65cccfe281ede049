"""The claim of an evolution: how many rounds of votes, over how many samples, and what all of them
may spend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import STATED, YES, Assumption, Claim, register
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import EXAMPLE, Adjacency

SAMPLES, FACTS = "samples.npz", "evolution.json"


@register
@dataclass(frozen=True)
class Evolution(Claim):
    """Noisy votes of private records for samples of a public generator, in `rounds` rounds, over
    `size` samples of each of `classes`.

    `noise_multiplier` is that of the one Gaussian release to which all rounds together amount.
    """

    classes: int
    size: int
    rounds: int
    noise_multiplier: float

    kind: ClassVar[str] = "evolution"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (SAMPLES, FACTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("classes", self.classes, most=1000)
        check.integer("size", self.size, least=2, most=1 << 14)
        check.integer("rounds", self.rounds, most=100)
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        if self.adjacency is not Adjacency.ADD_OR_REMOVE_ONE or self.unit != EXAMPLE:
            raise InvalidInput(
                "adjacency", str(self.adjacency), "must be that one record is added or removed"
            )

    @property
    def releases(self) -> int:
        """One for each round."""
        return self.rounds

    @property
    def event(self) -> events.Event:
        """The whole bill: one Gaussian release."""
        return events.Gaussian(self.noise_multiplier)

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """A record votes once a round; the generator has not seen the records."""
        return [
            Assumption(
                "votes",
                "one record adds one vote to every round",
                "it voted for the nearest sample of its class",
                YES,
            ),
            Assumption(
                "generator",
                "generator and embedding are public, and look at each sample by itself",
                "the caller says so; of the embedding it was tried on public samples",
                STATED,
            ),
            Assumption(
                "arithmetic",
                "counts and noise are exact",
                "votes are whole numbers, noise is drawn on a grid",
                YES,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """What is made, from what."""
        return {
            "title": "Private evolution",
            "words": "A public generator made samples. Private records voted for those nearest to "
            "them; the counts were released with "
            "noise, and the generator varied the samples that had votes.",
            "classes": self.classes,
            "samples_of_a_class": self.size,
            "rounds": self.rounds,
            "noise_multiplier": self.noise_multiplier,
        }
