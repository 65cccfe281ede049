"""The claim of one private statistic: what is asked and how it is protected. Importing this imports nothing heavy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, Claim, register

FILE = "answers.json"
MOST_NAME = 120
MECHANISMS = {
    "discrete-laplace": "two-sided geometric noise, drawn exactly",
    "laplace": "Laplace noise on a public grid, drawn exactly",
    "gaussian": "Gaussian noise on a public grid, drawn exactly",
    "exponential": "the exponential mechanism over public values, drawn exactly",
}


@register
@dataclass(frozen=True)
class StatisticClaim(Claim):
    """One statistic over private records.

    `mechanism` is one of `MECHANISMS` and `parameter` its own: noise over what one unit adds (`bound`) for Laplace and Gaussian noise, the
    rate of geometric noise on whole numbers that a unit moves by at most `bound`, and the epsilon of one choice, of which a unit
    meets `levels`. `draws` says how often random bits are drawn.
    """

    question: str
    mechanism: str
    parameter: float
    bound: float
    levels: int = 1
    draws: int = 1

    kind: ClassVar[str] = "query"
    purpose: ClassVar[str] = "statistics"
    artefacts: ClassVar[tuple[str, ...]] = (FILE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("question", self.question, 4000)
        check.one_of("mechanism", self.mechanism, MECHANISMS)
        check.positive("parameter", self.parameter)
        check.positive("bound", self.bound)
        check.integer("levels", self.levels)
        check.integer("draws", self.draws)

    @property
    def name(self) -> str:
        """The question; a long one is cut, and told apart by its hash."""
        if len(self.question) <= MOST_NAME:
            return f"query {self.question}"
        return f"query {self.question[:MOST_NAME]}... {hashlib.sha256(self.question.encode()).hexdigest()[:16]}"

    @property
    def releases(self) -> int:
        """How often random bits are drawn."""
        return self.draws

    @property
    def event(self) -> events.Event:
        """The whole bill."""
        if self.mechanism == "discrete-laplace":
            return events.DiscreteLaplace(self.parameter, int(self.bound))
        if self.mechanism == "exponential":
            level = events.BoundedRange(self.parameter)
            return level if self.levels == 1 else events.Repeated(level, self.levels)
        return (events.Gaussian if self.mechanism == "gaussian" else events.Laplace)(self.parameter)

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """Each unit adds no more than its bound; nothing public was read from the records."""
        return [
            Assumption(
                "contribution",
                f"one {self.unit.name} adds at most the bound, {self.bound:.6g}",
                "values were moved into their public range, and records beyond the limit of a unit left out",
                YES,
            ),
            Assumption(
                "domain",
                "ranges, categories and edges are public",
                "they were taken from the schema and the query, never from the data",
                YES,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the card."""
        return {
            "title": "A private statistic",
            "question": self.question,
            "noise": MECHANISMS[self.mechanism],
            "parameter": self.parameter,
            "bound": self.bound,
        }
