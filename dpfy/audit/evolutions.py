"""Checks of private evolution, by record and replay: nothing but noisy votes tells two sets of
records apart.
"""

from __future__ import annotations

from collections.abc import Callable

from dpfy.audit import replay
from dpfy.audit.bench import Bench, Bug


def evolutions(bench: Bench, bug: Bug) -> str | None:
    """With the same noisy votes the same samples are published, whatever the records; counts are as
    close as declared.
    """
    for name, run, one, other, strangers in bench.evolutions(bug):
        for fault in replay.check(run, one, other):
            if not (strangers and fault.kind == "distance"):
                return f"{name}: {fault}"
    return None


def evolution_bills(bench: Bench, bug: Bug) -> str | None:
    """All rounds together are within the claim."""
    spent, claimed = bench.evolution_squares(bug)
    return None if spent <= claimed else f"votes take {spent / claimed:.2f} times what is claimed"


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "evolutions": evolutions,
    "evolution bills": evolution_bills,
}
