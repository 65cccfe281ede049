"""Rows of reports that are made private one by one, and of which nobody can tell whose they are."""

from __future__ import annotations

import math

from dpfy.accounting import numeric_limits, shuffling
from dpfy.accounting.rules.noise import SILENT
from dpfy.accounting.rules.rule import DominatingPair, EventRule
from dpfy.accounting.rules.stated import amplified_pure, black_box
from dpfy.accounting.tight.losses import Atoms
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency

LEAST_EPSILON = 1e-8
"""Below, and beyond what `shuffling` can count with, no amplification is claimed."""
MOST_COUNTED = 10**10
"""More reports or slots than this are charged as this many, which costs more."""
MOST_ATTAINED = 10**8
"""For more of them nothing is said of what is attained."""


def _counted(epsilon0: float) -> bool:
    return LEAST_EPSILON <= epsilon0 <= shuffling.MOST_EPSILON


def _within(event: ev.Shuffled | ev.RandomCheckIns, size: str) -> None:
    numeric_limits.cost("epsilon0", event.epsilon0)
    numeric_limits.count(size, getattr(event, size))


def _rho(epsilon: float) -> float:
    """The least rho of pure epsilon: see `stated`."""
    return epsilon * math.tanh(epsilon / 2)


def _shuffled_pair(event: ev.Shuffled, adjacency: Adjacency) -> DominatingPair:
    """By the profile of `shuffling`; attained by binary randomised response where all others answer
    alike.
    """
    _present(event, adjacency)
    if not _counted(event.epsilon0):
        return black_box(event.epsilon0, 0.0)
    both = shuffling.shuffled(event.epsilon0, min(event.records, MOST_COUNTED), event.answers)
    return DominatingPair(
        both, both, _attained(event.epsilon0, event.records, 1.0, event.answers or 2)
    )


def _attained(epsilon0: float, slots: int, rate: float, answers: int = 2) -> tuple[Atoms, Atoms]:
    return (
        shuffling.attained(epsilon0, slots, rate, answers)
        if slots <= MOST_ATTAINED
        else (SILENT, SILENT)
    )


def _present(event: ev.Shuffled, adjacency: Adjacency) -> None:
    if adjacency is Adjacency.ADD_OR_REMOVE_ONE:
        way_out = (
            "the number of reports shows who is absent; use --adjacency replace-one, or zero-out "
            "where an absent unit reports too"
        )
        raise Unsupported(f"Shuffled under {adjacency.value}", way_out)


def _shuffled_pure(event: ev.Shuffled, adjacency: Adjacency) -> float:
    """Without a delta nothing is gained: all others may happen to be no clones."""
    _present(event, adjacency)
    return event.epsilon0


def _shuffled_plain(event: ev.Shuffled) -> Event:
    if event.epsilon0 == 0:
        return ev.Nothing()
    return ev.EpsilonDelta(event.epsilon0) if event.records == 1 and event.answers <= 2 else event


def _check_ins_pair(event: ev.RandomCheckIns, adjacency: Adjacency) -> DominatingPair:
    """By the profiles of `shuffling`; a unit that is zeroed out is one that is replaced."""
    if not _counted(event.epsilon0):
        return black_box(_check_ins_pure(event, adjacency), 0.0)
    replaced, slots = adjacency is not Adjacency.ADD_OR_REMOVE_ONE, min(event.slots, MOST_COUNTED)
    removed, added = shuffling.checked_in(event.epsilon0, slots, event.rate, replaced)
    return DominatingPair(
        removed, added, _attained(event.epsilon0, event.slots, event.rate), touched=event.rate
    )


def _check_ins_pure(event: ev.RandomCheckIns, adjacency: Adjacency) -> float:
    return amplified_pure(event.epsilon0, event.rate)


ROWS = (
    EventRule(
        ev.Shuffled,
        lambda e: (
            f"{e.records:,} reports, each {e.epsilon0:g}-differentially private by itself"
            + (f" (one of {e.answers:,} answers, by randomised response)" if e.answers else "")
            + ", in an order that tells nothing"
        ),
        _shuffled_pair,
        pure=_shuffled_pure,
        rho=lambda e, adjacency: _rho(_shuffled_pure(e, adjacency)),
        plain=_shuffled_plain,
        unsampled=lambda e, most: ev.EpsilonDelta(e.epsilon0),
        within=lambda e: _within(e, "records"),
        replace_only=True,
        can_be_sampled=False,
    ),
    EventRule(
        ev.RandomCheckIns,
        lambda e: (
            f"reports from {e.slots:,} slots, each {e.epsilon0:g}-differentially private by "
            f"itself; a unit checks into one slot at random, "
            f"with probability {e.rate:g}"
        ),
        _check_ins_pair,
        pure=_check_ins_pure,
        rho=lambda e, adjacency: _rho(_check_ins_pure(e, adjacency)),
        plain=lambda e: e if e.epsilon0 and e.rate else ev.Nothing(),
        unsampled=lambda e, most: ev.EpsilonDelta(e.epsilon0),
        within=lambda e: _within(e, "slots"),
        can_be_sampled=False,
    ),
)
