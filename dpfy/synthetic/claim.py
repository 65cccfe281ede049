"""The claim of a synthetic table: which method, on which public domain, and what all its
measurements and choices may spend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.accounting.filters import together
from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, Claim, register
from dpfy.core.unit import Adjacency

TABLE, FACTS = "synthetic.csv", "synthesis.json"
MEASUREMENTS = "measurements.safetensors"
HALF = 0.5**0.5
DEGREES = 3
"""How far off the table is, is measured for marginals of one, two and three columns."""


@register
@dataclass(frozen=True)
class Synthesis(Claim):
    """Noisy marginals of private records, chosen adaptively, and rows made from them.

    `noise_multiplier` is that of the one Gaussian release to which all measurements together
    amount; at most `choices` marginals are chosen by the exponential mechanism, each a choice of
    range `width`; at most `measurements` are measured. `method`, `domain` and `workload` say what
    is done: another schema is another claim. Of a unit at most `most_records` of `unit` are used.
    """

    method: str
    domain: str
    workload: str
    noise_multiplier: float
    measurements: int
    choices: int = 0
    width: float = 0.0

    kind: ClassVar[str] = "synthesis"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (TABLE, FACTS, MEASUREMENTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_line("method", self.method)
        check.one_line("domain", self.domain, 2000)
        check.one_line("workload", self.workload, 2000)
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        check.integer("measurements", self.measurements)
        check.integer("choices", self.choices, least=0)
        if self.choices:
            check.positive("width", self.width)

    @property
    def name(self) -> str:
        """What the reservation is called."""
        return "synthetic table"

    @property
    def releases(self) -> int:
        """How often random bits are drawn at most."""
        return self.measurements + self.choices + DEGREES

    @property
    def event(self) -> events.Event:
        """The whole charge: one Gaussian release and the choices."""
        return together(self.noise_multiplier, self.choices, self.width)

    @property
    def length(self) -> float:
        """The L2 norm of what one unit adds to a marginal: its records in one cell. A replaced
        record moves two cells, by sqrt 2 in all.
        """
        return self.unit.most_records * (HALF if self.adjacency is Adjacency.REPLACE_ONE else 1.0)

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """Each unit adds no more than its bound; nothing public was read from the records; the sum
        of squares was kept.
        """
        return [
            Assumption(
                "contribution",
                f"one {self.unit.name} adds at most {self.unit.most_records} to the counts of a "
                f"marginal",
                "records beyond the limit of a unit were left out; a record is counted once in "
                "every marginal",
                YES,
            ),
            Assumption(
                "domain",
                "columns, ranges, bins, categories and constraints are public",
                "they were taken from the schema, never from the data",
                YES,
            ),
            Assumption(
                "adaptivity",
                "squares of 1 / noise add up to at most that of one release, and choices are "
                "counted",
                "a filter refused whatever would exceed either, before it was made",
                YES,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the report."""
        return {
            "title": "A synthetic table",
            "method": self.method,
            "domain": self.domain,
            "workload": self.workload,
            "noise": "Gaussian noise on a public grid, drawn exactly",
            "noise_multiplier": self.noise_multiplier,
            "choices": self.choices,
            "range_of_a_choice": self.width,
            "measurements_at_most": self.measurements,
            "theorem": "adaptive Gaussian releases and choices of bounded range "
            "(docs/accounting.md, Gaussian filter)",
        }
