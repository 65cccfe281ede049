"""Checks of synthetic tables, by record and replay: nothing but noisy values tells two tables of
records apart.
"""

from __future__ import annotations

from collections.abc import Callable

from dpfy.audit import replay
from dpfy.audit.bench import Bench, Bug


def synthetic_tables(bench: Bench, bug: Bug) -> str | None:
    """With the same noisy values the same is published, whatever the records are; what mechanisms
    are given is as close as declared.
    """
    for name, run, one, other, strangers in bench.syntheses(bug):
        for fault in replay.check(run, one, other):
            if not (strangers and fault.kind == "distance"):
                return f"{name}: {fault}"
    return None


def synthetic_bills(bench: Bench, bug: Bug) -> str | None:
    """All measurements together are within the claim."""
    spent, claimed = bench.synthetic_squares(bug)
    return (
        None
        if spent <= claimed
        else f"measurements take {spent / claimed:.2f} times what is claimed"
    )


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "synthetic tables": synthetic_tables,
    "synthetic bills": synthetic_bills,
}
