"""The figures of a report, from events: curves, other forms of the guarantee, what an attacker can
reach. Each is computed once a process.

What a guarantee means: the tier it belongs to, and what an attacker can do with everything that
was released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpfy import accounting
from dpfy.accounting.filters import SET_ASIDE, RenyiFilter
from dpfy.accounting.gaussian import log_delta
from dpfy.accounting.interpretation import TIERS
from dpfy.accounting.interpretation import tier as tier_of
from dpfy.accounting.rules import amplified, unsampled
from dpfy.accounting.tight.dominating_pairs import composition
from dpfy.core import events
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.guarantee import Curve, Points, Tradeoff
from dpfy.core.ledger import Ledger, LedgerBudget
from dpfy.core.unit import Adjacency, Unit
from dpfy.report.words import percent_up, up

GRID = tuple(k / 10 for k in range(13))
"""Epsilons at which the curve is written down, in units of the given epsilon."""

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
    the given one.
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


def budget_of(ledger: Ledger) -> LedgerBudget | None:
    """The budget with which a ledger was created."""
    try:
        return None if ledger.terms is None else accounting.filters.from_json(ledger.terms)
    except (InvalidInput, KeyError, TypeError) as problem:
        raise Corrupt(ledger.path.name, f"holds a budget that cannot be read ({problem})") from None


def new_budget(
    path: Path | None, epsilon: float, delta: float, approximation: float | None = None
) -> RenyiFilter:
    """The budget with which the ledger at `path` is made. Where no `approximation` is given, a
    fifth of delta is set aside for releases that may fail with a small probability; of a ledger
    that is there already, what it was made with.
    """
    if approximation is None and path is not None and path.is_file():
        held = budget_of(Ledger.read(path))
        if isinstance(held, RenyiFilter) and (held.epsilon, held.delta) == (epsilon, delta):
            return held
    if approximation is None:
        approximation = float(f"{delta / SET_ASIDE:.4g}")
    return RenyiFilter(epsilon, delta, approximation)


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


FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)


def tier(epsilon: float, unit: Unit, adjacency: Adjacency) -> dict[str, Any]:
    """The tier of Ponomareva et al. 2023, section 5.2.1, and why. Tier 4 is ours: no finite
    epsilon.
    """
    number = tier_of(epsilon)
    if number == 4:
        return {
            "tier": 4,
            "name": TIERS[4],
            "why": "Epsilon is infinite: nothing hides what one unit contributed.",
        }
    rule = {1: "is at most 1", 2: "is above 1 and at most 10", 3: "is above 10"}[number]
    why = f"Epsilon {up(epsilon)} {rule}."
    if number == 3:
        why += (
            " By itself it is not enough evidence of anonymity: audit the model, or remove "
            "sensitive records first."
        )
    if not unit.whole:
        why += (
            f" The tiers are meant for all data of one person; here only one {unit.protects} is "
            f"protected."
        )
    elif unit.name == "example":
        why += (
            " The tiers are meant for one person: they apply here if no person has more than one "
            "record."
        )
    if adjacency is Adjacency.REPLACE_ONE:
        why += (
            " The tiers are meant for adding or removing a unit; replacing one is the stricter "
            "reading, so the tier holds."
        )
    return {"tier": number, "name": TIERS[number], "why": why}


def attacker(pairs: Points, unit: Unit) -> dict[str, Any]:
    """The strongest membership attack that the curve allows, in two sentences and in numbers."""
    whose = f"one {unit.name}"
    if not pairs:
        return {
            "sentences": [
                f"Nothing limits what an attacker can learn about {whose} of the training data "
                f"from what was released.",
                "Treat the released model as if it were the training data.",
            ],
            "guess_accuracy": 1.0,
            "at": [
                {"false_positive_rate": f, "true_positive_rate": 1.0} for f in FALSE_POSITIVE_RATES
            ],
        }
    accuracy = 0.5 + pairs[0][1] / 2
    rates = Tradeoff(pairs).hit_rates(FALSE_POSITIVE_RATES)
    return {
        "sentences": [
            f"Take someone who has seen everything that was released, who knows all of the "
            f"training data but one thing: whether "
            f"{whose} was in it. Tossing a coin, they would be right in 50% of cases; whatever "
            f"they do, they are right in at most "
            f"{percent_up(accuracy)} of cases.",
            f"If they want to be wrong about no more than 1 in 100 of those who were not in the "
            f"data, they recognise at most "
            f"{percent_up(rates[1])} of those who were; without seeing anything it would be 1%.",
        ],
        "guess_accuracy": accuracy,
        "at": [
            {"false_positive_rate": f, "true_positive_rate": t}
            for f, t in zip(FALSE_POSITIVE_RATES, rates, strict=True)
        ],
    }
