"""The claim of one private statistic: what is asked, how it is protected, and what it may spend.
Importing this imports no torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, Claim, register
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.choice import Exponential, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteLaplaceMechanism
from dpfy.mechanisms.histogram import StabilityHistogram

FILE = "answers.json"
MOST_NAME, MOST_DOMAIN = 120, 1000
MECHANISMS = {
    "discrete-laplace": "two-sided geometric noise, drawn exactly",
    "laplace": "Laplace noise on a public grid, drawn exactly",
    "gaussian": "Gaussian noise on a public grid, drawn exactly",
    "exponential": "the exponential mechanism over public values, drawn exactly",
    "exponential-monotone": "the exponential mechanism over public words by their counts, drawn "
    "exactly",
    "permute-and-flip": "permute-and-flip over public values, drawn exactly",
    "stability": "two-sided geometric noise on counts of keys that are not public, and a "
    "threshold; drawn exactly",
}


@dataclass(frozen=True)
class LevelledExponential(Exponential):
    """Several exponential mechanisms, of which one unit meets `levels`: their losses add up over
    the choices of a level.
    """

    levels: int = 1

    @property
    def event(self) -> events.Event:
        """All levels."""
        return super().event if self.levels == 1 else events.Repeated(super().event, self.levels)


Mechanism = (
    DiscreteLaplaceMechanism
    | LaplaceMechanism
    | GaussianMechanism
    | LevelledExponential
    | PermuteAndFlip
    | StabilityHistogram
)


@dataclass(frozen=True)
class BudgetShare:
    """What one statistic may spend, by one rule for all: equal parts in zCDP, of size^2 / 2.

    That is Laplace noise of epsilon `size`, Gaussian noise of 1 / `size` times the bound, and for
    each of L levels of choices an epsilon of 2 `size` / sqrt L. Where only epsilons are added up
    (`pure`), `size` is the epsilon of each, and choices divide it by their levels. `family` is
    laplace or gaussian; `delta` what a threshold may spend.
    """

    size: float
    family: str = "laplace"
    pure: bool = False
    delta: float = 0.0

    def of_choice(self, levels: int) -> float:
        """The epsilon of a choice, where a unit meets so many."""
        return self.size / levels if self.pure else 2 * self.size / math.sqrt(levels)


@register
@dataclass(frozen=True)
class StatisticClaim(Claim):
    """One statistic over private records.

    `question` is the query as it was asked, `domain` all that is public about the columns it is
    asked of: another schema is another claim. `mechanism` is one of `MECHANISMS` and `parameter`
    its own: noise over what one unit adds (`bound`) for Laplace and Gaussian noise, the rate of
    geometric noise on whole numbers that a unit moves by at most `bound`, and the epsilon of one
    choice, of which a unit meets `levels`. `draws` says how often random bits are drawn. Keys that
    are not public: a unit has at most `keys`, and counts of at least `threshold` are released.
    """

    question: str
    domain: str
    mechanism: str
    parameter: float
    bound: float
    levels: int = 1
    draws: int = 1
    keys: int = 1
    threshold: int = 0

    kind: ClassVar[str] = "query"
    purpose: ClassVar[str] = "statistics"
    artefacts: ClassVar[tuple[str, ...]] = (FILE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("question", self.question, 4000)
        check.one_line("domain", self.domain, MOST_DOMAIN + 40)
        check.one_of("mechanism", self.mechanism, MECHANISMS)
        check.positive("parameter", self.parameter)
        check.positive("bound", self.bound)
        check.integer("levels", self.levels)
        check.integer("draws", self.draws)
        check.integer("keys", self.keys)
        check.integer("threshold", self.threshold, least=0)
        _ = self.tool

    @property
    def name(self) -> str:
        """The question; a long one is cut, and distinguished by its hash."""
        if len(self.question) <= MOST_NAME:
            return f"query {self.question}"
        return (
            f"query {self.question[:MOST_NAME]}... "
            f"{hashlib.sha256(self.question.encode()).hexdigest()[:16]}"
        )

    @property
    def releases(self) -> int:
        """How often random bits are drawn."""
        return self.draws

    @property
    def tool(self) -> Mechanism:
        """The mechanism that makes the release."""
        if self.mechanism == "discrete-laplace":
            return DiscreteLaplaceMechanism(self.parameter, int(self.bound))
        if self.mechanism == "exponential":
            return LevelledExponential(self.parameter, levels=self.levels, adjacency=self.adjacency)
        if self.mechanism == "exponential-monotone":
            return LevelledExponential(self.parameter, monotone=True, adjacency=self.adjacency)
        if self.mechanism == "permute-and-flip":
            return PermuteAndFlip(self.parameter, monotone=True, adjacency=self.adjacency)
        if self.mechanism == "stability":
            most = int(self.bound)
            return StabilityHistogram(
                DiscreteLaplaceMechanism(self.parameter, self.keys * most),
                self.threshold,
                self.keys,
                most,
            )
        return (GaussianMechanism if self.mechanism == "gaussian" else LaplaceMechanism)(
            self.parameter
        )

    @property
    def event(self) -> events.Event:
        """The whole charge."""
        return self.tool.event

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """Each unit adds no more than its bound; nothing public was read from the records."""
        return [
            Assumption(
                "contribution",
                f"one {self.unit.name} adds at most the bound, {self.bound:.6g}",
                "values were moved into their public range, and records beyond the limit of a unit "
                "left out",
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
        """The section of the report."""
        return {
            "title": f"Private statistic {self.name.removeprefix('query ')}",
            "question": self.question,
            "domain": self.domain,
            "noise": MECHANISMS[self.mechanism],
            "parameter": self.parameter,
            "bound": self.bound,
        } | ({"threshold": self.threshold} if self.mechanism == "stability" else {})
