"""The claims of rows that networks make: the rows themselves, which cost nothing beside a training,
and the votes of teachers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, Claim, GaussianClaim, register
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import EXAMPLE, Adjacency
from dpfy.synthetic.claim import FACTS, TABLE

PUBLIC_DOMAIN = Assumption(
    "domain",
    "columns, ranges, bins and categories are public",
    "they were taken from the schema, never from the data",
    YES,
)


@register
@dataclass(frozen=True)
class GeneratedRows(Claim):
    """Rows of a generator that saw nothing but the noisy steps of a training in the same folder:
    they cost nothing beside it.
    """

    domain: str
    rows: int

    kind: ClassVar[str] = "generated-rows"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (TABLE, FACTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("domain", self.domain, 2000)
        check.integer("rows", self.rows)

    @property
    def name(self) -> str:
        """What the reservation is called."""
        return "synthetic table"

    @property
    def event(self) -> events.Event:
        """Nothing beside the training."""
        return events.Nothing()

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """The generator never met a record."""
        done = (
            "it was given the weights that the discriminator has after its noisy steps, and random "
            "numbers"
        )
        return [
            Assumption("generator", "it is computed from what the training released", done, YES),
            PUBLIC_DOMAIN,
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the card."""
        return {
            "title": "A synthetic table",
            "words": "A discriminator was trained to tell records from generated rows; a generator "
            "learnt from its weights alone.",
            "domain": self.domain,
            "rows": self.rows,
        }


@register
@dataclass(frozen=True)
class DiscriminatorVotes(GaussianClaim):
    """Noisy votes of `teachers`, each of which knows a part of the records of its own, on
    `questions` generated rows in every round.

    `noise_multiplier` is that of the one Gaussian release to which the votes of all rounds amount.
    """

    domain: str
    teachers: int
    rounds: int
    questions: int
    rows: int

    kind: ClassVar[str] = "teacher-votes"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (TABLE, FACTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("domain", self.domain, 2000)
        check.integer("teachers", self.teachers, least=2, most=1 << 14)
        check.integer("rounds", self.rounds, most=10_000)
        check.integer("questions", self.questions, most=10_000)
        check.integer("rows", self.rows)
        if self.adjacency is not Adjacency.ADD_OR_REMOVE_ONE or self.unit != EXAMPLE:
            raise InvalidInput(
                "adjacency", str(self.adjacency), "must be that one record is added or removed"
            )

    @property
    def name(self) -> str:
        """What the reservation is called."""
        return "synthetic table"

    @property
    def releases(self) -> int:
        """One for each round."""
        return self.rounds

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """A record is known to one teacher, which adds at most one vote to each count."""
        return [
            Assumption(
                "votes",
                "one record changes each count of a round by at most 1",
                "each record was given to one teacher, by a coin of its own; a teacher learnt from "
                "its own part and from generated rows",
                YES,
            ),
            Assumption(
                "arithmetic",
                "counts and noise are exact",
                "votes are whole numbers, noise is drawn on a grid",
                YES,
            ),
            PUBLIC_DOMAIN,
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the card."""
        return {
            "title": "A synthetic table",
            "words": "Teachers, each of which knows a part of the records, voted on which "
            "generated rows look real; the counts were "
            "released with noise. A student learnt from the answers, and the generator from the "
            "student.",
            "domain": self.domain,
            "rows": self.rows,
            "teachers": self.teachers,
            "rounds": self.rounds,
            "questions_of_a_round": self.questions,
            "noise_multiplier": self.noise_multiplier,
        }
