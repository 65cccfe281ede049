"""Two runs on different data, the second one with the answers of the first one's mechanisms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dpfy.core import events
from dpfy_lab import replay
from dpfy_lab.selftest.mistake import Found

Pairs = Iterable[tuple[str, Any, Any, bool]]
"""Names, two data sets, and whether they have nothing in common (otherwise they are neighbours)."""


def faults(run: Callable[[Any], Any], pairs: Pairs, claimed: events.Event | None = None) -> Found:
    """With the same noisy values the same is published, whatever the records are; what mechanisms
    are given of neighbours is as close as declared, and neighbours pay what is claimed at most.
    """
    for name, one, other, strangers in pairs:
        raised: list[Exception] = []

        def attempt(data: Any, raised: list[Exception] = raised) -> Any:
            try:
                return run(data)
            except Exception as problem:
                raised.append(problem)
                raise

        found = replay.check(attempt, one, other, claimed=claimed)
        if len(raised) == 2:  # alike on both, and nothing was looked at
            raise raised[0]
        for fault in found:
            if not (strangers and fault.kind in ("distance", "cost")):
                return f"{name}: {fault}"
    return None
