"""The leaves of an event, within the limits of floating point: every accountant reads events
through here.
"""

from __future__ import annotations

from dpfy.accounting.numeric_limits import MOST_COUNT
from dpfy.accounting.rules import rule_of
from dpfy.core.errors import InvalidInput
from dpfy.core.events import Composed, Event, Parallel, Repeated, flatten, inside

__all__ = ["LEAST_DELTA", "MOST_COUNT", "delta_within", "leaves", "plain_leaves"]

LEAST_DELTA = 1e-200
"""Deltas below this are refused: their parts underflow."""


def leaves(event: Event) -> list[tuple[Event, int]]:
    """`event` as (leaf, count), parts of the same names added up.

    Guarantees: every count, noise and size can be computed with; others raise `InvalidInput`.
    """
    found = _added_up(flatten(event))
    for leaf, count in found:
        if count > MOST_COUNT:
            raise InvalidInput("steps", count, f"must be at most {MOST_COUNT:.0e} in all")
        rule_of(leaf).within(leaf)
        for part in inside(leaf):
            leaves(part)
    return found


def plain_leaves(event: Event) -> list[tuple[Event, int]]:
    """`leaves` without their trivial cases: a sample at rate 1 is what is sampled."""
    return [(rule_of(leaf).plain(leaf), count) for leaf, count in leaves(event)]


def _added_up(found: list[tuple[Event, int]]) -> list[tuple[Event, int]]:
    """Releases over the same disjoint parts, part by part: a unit lies in the same part every
    time.
    """
    same: dict[frozenset[str], dict[str, list[Event]]] = {}
    rest: list[tuple[Event, int]] = []
    for leaf, count in found:
        if not isinstance(leaf, Parallel):
            rest.append((leaf, count))
            continue
        parts = same.setdefault(frozenset(name for name, _ in leaf.parts), {})
        for name, part in leaf.parts:
            parts.setdefault(name, []).append(Repeated(part, count))
    return rest + [
        (Parallel(tuple((name, Composed(tuple(all_of))) for name, all_of in sorted(p.items()))), 1)
        for p in same.values()
    ]


def delta_within(delta: float) -> float:
    """`delta`, refused where its parts would underflow."""
    if delta < LEAST_DELTA:
        raise InvalidInput("delta", delta, f"must be at least {LEAST_DELTA:g}")
    return delta
