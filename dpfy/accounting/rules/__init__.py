"""One row per kind of event: its dominating pair, Rényi divergences, rules for groups and samples,
its words, its peer's name.

To add an event: a frozen dataclass and a name in `dpfy.core.events`, and a row in one of the
families here. The accountants, the report and the contract tests read only the table.
"""

from __future__ import annotations

from dpfy.accounting.rules import composed, local, noise, objective, sampled, shares, stated, votes
from dpfy.accounting.rules.composed import require_removal
from dpfy.accounting.rules.rule import (
    TABLE,
    DominatingPair,
    EventRule,
    amplified,
    group_size_of,
    grouped,
    halve_noise,
    releases,
    require_sampling,
    rule_of,
    unsampled,
    words,
)

__all__ = [
    "TABLE",
    "DominatingPair",
    "EventRule",
    "amplified",
    "group_size_of",
    "grouped",
    "halve_noise",
    "releases",
    "require_removal",
    "require_sampling",
    "rule_of",
    "unsampled",
    "words",
]

FAMILIES = (stated, noise, shares, votes, objective, sampled, local, composed)
TABLE.update({row.kind: row for family in FAMILIES for row in family.ROWS})
