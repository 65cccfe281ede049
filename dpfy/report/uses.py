"""Which uses of the data a guarantee covers: every reservation of the ledger, and the uses that are
not there, each with a reason.

What a reservation was for is said by its claim, and by the first word of its name where it has
none.

How the figures on held-out records came to be in the report: declared public, charged, withheld, or
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfy.core import check, events
from dpfy.core.claim import PURPOSES, purpose_of
from dpfy.core.codec import number
from dpfy.core.errors import Corrupt
from dpfy.core.ledger import Ledger, Permit
from dpfy.plan.claim import counted_once
from dpfy.report import figures
from dpfy.report.words import absent, event_words, is_absent

OTHER = "other"
FIRST = ("training", "tuning", "statistics", "vocabulary", "audit", "evaluation")
"""The purposes that every report names, covered or not; others are named where they are covered."""


def kind_of(permit: Permit) -> str:
    """What a reservation was for."""
    return purpose_of(permit.name, permit.claim)


def of_kinds(ledger: Ledger, *kinds: str) -> list[Permit]:
    """The reservations of these kinds."""
    return [p for p in ledger.permits() if kind_of(p) in kinds]


def event_of_kinds(ledger: Ledger, *kinds: str) -> events.Event:
    """The reservations of these kinds composed, as the ledger composes them."""
    return events.Composed(
        tuple(events.Repeated(p.event, p.uses) for p in of_kinds(ledger, *kinds))
    )


def table(
    ledger: Ledger, bill: figures.Bill, *, shared: bool, trains: bool = False
) -> dict[str, Any]:
    """The uses covered, one row a reservation with its own epsilon, and those not covered, with the
    reason.

    `trains`: a reservation for something else, a search for settings, covers training too.
    """
    permits = ledger.permits()
    seen = {kind_of(p) for p in permits} | ({"training"} if trains else set())
    missing = [_missing(kind) for kind in FIRST if kind not in seen]
    return {
        "covered": [_row(p, bill) for p in permits],
        "not_covered": [*missing, _elsewhere(shared)],
    }


def _row(permit: Permit, bill: figures.Bill) -> dict[str, Any]:
    event = events.Repeated(permit.event, permit.uses)
    return {
        "kind": kind_of(permit),
        "name": permit.name,
        "uses": permit.uses,
        "event": events.CODEC.encode(permit.event),
        "words": event_words(event),
        "epsilon": number(figures.epsilon(bill.of(events.Composed((event,))))),
    }


def _missing(kind: str) -> dict[str, Any]:
    reason = (
        f"nothing is reserved for {PURPOSES[kind]}; if the private data was used so outside of "
        f"this ledger, that is not covered"
    )
    return {"kind": kind, "words": PURPOSES[kind]} | absent(reason)


def _elsewhere(billed: bool) -> dict[str, Any]:
    reason = (
        "they are charged, with this run, in the data set's own ledger; this report is about this run "
        "alone"
        if billed
        else "no ledger across runs was given: if the same data was used in other runs, this report "
        "does not cover them"
    )
    return {"kind": "other runs", "words": "other runs on the same data"} | absent(reason)


KIND = "evaluation"
WORDS = {
    "public": "measured on test data declared public, by the user or as part of a public data set: "
    "exact, not covered by the guarantee",
    "billed": "measured on private held-out records and released with noise; charged in the ledger, "
    "and covered by the guarantee",
    "withheld": "withheld: the held-out records were not declared public, and no release of "
    "figures on them was charged",
    "none": "no test data was given to the run",
}


def words(test: str) -> str:
    """What a reader must know about figures of this kind."""
    return WORDS[check.one_of("evaluation.test", test, WORDS)]


def row(test: str, facts: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    """The card's word on its evaluation.

    Guarantees: figures stand on a report only if their data was declared public or if the ledger
    holds the charge for them.
    """
    told = [
        name for name in ("utility", "confusion") if name in facts and not is_absent(facts[name])
    ]
    if told and test not in ("public", "billed"):
        raise Corrupt("privacy.json", f"states {told[0]} though the evaluation is {test}")
    if test != "billed":
        return {"test": test, "words": words(test)}
    bills = [p.event for p in of_kinds(ledger, KIND) if isinstance(p.event, events.Gaussian)]
    if not bills:
        raise Corrupt("privacy.json", "states a charged evaluation that the ledger does not hold")
    said = f"{words(test)}.{counted_once(ledger.unit)}".removesuffix(".")
    return {"test": test, "words": said, "noise_multiplier": bills[0].noise_multiplier}
