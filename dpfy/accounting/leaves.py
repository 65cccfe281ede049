"""The leaves of an event, within the limits of floating point: every accountant reads events through here."""

from __future__ import annotations

from dpfy.accounting.limits import MOST_COUNT
from dpfy.accounting.rows import row_of
from dpfy.core.errors import InvalidInput
from dpfy.core.events import Event, flatten, inside

__all__ = ["LEAST_DELTA", "MOST_COUNT", "delta_within", "leaves"]

LEAST_DELTA = 1e-200
"""Deltas below this are refused: their parts underflow."""


def leaves(event: Event) -> list[tuple[Event, int]]:
    """`event` as (leaf, count). Guarantees: every count, noise and size can be computed with; others raise `InvalidInput`."""
    found = flatten(event)
    for leaf, count in found:
        if count > MOST_COUNT:
            raise InvalidInput("steps", count, f"must be at most {MOST_COUNT:.0e} in all")
        row_of(leaf).within(leaf)
        for part in inside(leaf):
            leaves(part)
    return found


def delta_within(delta: float) -> float:
    """`delta`, refused where its parts would underflow."""
    if delta < LEAST_DELTA:
        raise InvalidInput("delta", delta, f"must be at least {LEAST_DELTA:g}")
    return delta
