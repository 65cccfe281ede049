"""The figures of a card, from events: curves, other forms of the guarantee, what an attacker can
reach. Each is computed once a process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from dpfy import accounting
from dpfy.accounting.dominating_pairs import composition
from dpfy.accounting.gaussian import log_delta
from dpfy.accounting.rows import amplified, unsampled
from dpfy.core import events
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.guarantee import Curve
from dpfy.core.ledger import Budget, Ledger
from dpfy.core.tradeoff import Points
from dpfy.core.unit import Adjacency

GRID = tuple(k / 10 for k in range(13))
"""Epsilons at which the curve is written down, in units of the stated epsilon."""

FEW = (0.0, 0.5, 1.0)
SLOW = ("monte-carlo", "advanced", "basic")
"""Accountants that take seconds for each point get few of them: fewer points make the attacker look
stronger, never weaker.
"""

__all__ = ["amplified", "unsampled"]


@dataclass(frozen=True)
class Bill:
    """An event, and how it is to be read: under which adjacency, by which accountant, at which
    delta.
    """

    event: events.Event
    adjacency: Adjacency
    accountant: str
    delta: float

    def of(self, event: events.Event) -> Bill:
        """The same question about another event."""
        return replace(self, event=event)


@lru_cache(maxsize=64)
def curve(event: events.Event, adjacency: Adjacency, accountant: str) -> Curve:
    """The privacy curve; accountants are stateless, so the answer is kept."""
    return accounting.curve(event, adjacency=adjacency, accountant=accountant)


@lru_cache(maxsize=256)
def epsilon(bill: Bill) -> float:
    """Upper bound on epsilon."""
    return curve(bill.event, bill.adjacency, bill.accountant).epsilon(bill.delta)


@lru_cache(maxsize=256)
def epsilon_lower(bill: Bill) -> float | None:
    """Lower bound on the exact epsilon, where the accountant has one."""
    return curve(bill.event, bill.adjacency, bill.accountant).epsilon_lower(bill.delta)


@lru_cache(maxsize=64)
def points(bill: Bill) -> Points:
    """The curve as (epsilon, delta) pairs, each of which holds: from epsilon 0 to a little beyond
    the stated one.
    """
    top = epsilon(bill)
    if math.isinf(top):
        return ()
    shape = curve(bill.event, bill.adjacency, bill.accountant)
    grid = FEW if bill.accountant in SLOW else GRID
    held = {top: bill.delta} | {top * k: shape.delta(top * k) for k in grid if k != 1}
    return tuple(sorted(held.items()))


def unamplified(bill: Bill) -> tuple[float | None, str]:
    """Epsilon without amplification by sampling, or why there is none. An accountant of sampled
    releases may know no others.
    """
    problem = ""
    for name in dict.fromkeys((bill.accountant, accounting.DEFAULT)):
        try:
            return epsilon(replace(bill, event=unsampled(bill.event), accountant=name)), ""
        except DpfyError as reason:
            problem = str(reason)
    return None, problem


def budget_of(ledger: Ledger) -> Budget | None:
    """The budget with which a ledger was created."""
    try:
        return None if ledger.terms is None else accounting.filters.from_json(ledger.terms)
    except (InvalidInput, KeyError, TypeError) as problem:
        raise Corrupt(ledger.path.name, f"holds a budget that cannot be read ({problem})") from None


def gaussian_ratio(event: events.Event, adjacency: Adjacency) -> float | None:
    """mu of the Gaussian mechanism that dominates `event` at every epsilon; None where there is
    none.

    Sampling cannot help here: far in the tail a sampled Gaussian is as revealing as the Gaussian
    itself, so neither rho-zCDP nor mu-GDP at all epsilons can be smaller than without sampling.
    """
    try:
        parts = composition(unsampled(event), adjacency)
    except Unsupported:
        return None
    if parts.public or parts.releases:
        return None
    return math.sqrt(parts.gaussian) * (1 + 1e-12)


@lru_cache(maxsize=64)
def gaussian_equal(target: float, delta: float) -> float:
    """mu of the Gaussian mechanism that has exactly this epsilon at this delta, rounded up: for
    comparison.
    """
    low, high, goal = 0.0, 1.0, math.log(delta)
    while log_delta(high, target) < goal:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if log_delta(middle, target) < goal else (low, middle)
    return high
