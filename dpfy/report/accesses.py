"""Which uses of the data a guarantee covers: every reservation of the ledger, and the uses that are not there, each with a reason.

The first word of a reservation's name says what it was for: training, tuning, statistics, vocabulary, audit or evaluation.
"""

from __future__ import annotations

import re
from typing import Any

from dpfy.core import events
from dpfy.core.codec import number
from dpfy.core.ledger import Ledger, Permit
from dpfy.report import numbers
from dpfy.report.words import absent, event_words

KINDS = {
    "training": "training the released model",
    "tuning": "choosing hyperparameters, architectures or stopping times",
    "statistics": "statistics, ranges and normalisation computed from the data",
    "vocabulary": "vocabularies, label sets and categories read from the data",
    "audit": "audits that look at the data",
    "evaluation": "measuring the released model on private held-out records",
}
OTHER = "other"


def kind_of(name: str) -> str:
    """What a reservation called `name` was for."""
    word = re.split(r"[^a-z]", name.lower(), maxsplit=1)[0]
    return word if word in KINDS else OTHER


def of_kinds(ledger: Ledger, *kinds: str) -> list[Permit]:
    """The reservations of these kinds."""
    return [p for p in ledger.permits() if kind_of(p.name) in kinds]


def event_of_kinds(ledger: Ledger, *kinds: str) -> events.Event:
    """The reservations of these kinds composed, as the ledger composes them."""
    return events.Composed(tuple(events.Repeated(p.event, p.uses) for p in of_kinds(ledger, *kinds)))


def table(ledger: Ledger, bill: numbers.Bill, *, shared: bool) -> dict[str, Any]:
    """The uses covered, one row a reservation with its own epsilon, and those not covered, with the reason."""
    permits = ledger.permits()
    seen = {kind_of(p.name) for p in permits}
    missing = [_missing(kind) for kind in KINDS if kind not in seen]
    return {"covered": [_row(p, bill) for p in permits], "not_covered": [*missing, _elsewhere(shared)]}


def _row(permit: Permit, bill: numbers.Bill) -> dict[str, Any]:
    event = events.Repeated(permit.event, permit.uses)
    return {
        "kind": kind_of(permit.name),
        "name": permit.name,
        "uses": permit.uses,
        "event": events.CODEC.encode(permit.event),
        "words": event_words(event),
        "epsilon": number(numbers.epsilon(bill.of(events.Composed((event,))))),
    }


def _missing(kind: str) -> dict[str, Any]:
    reason = f"nothing is reserved for {KINDS[kind]}; if the private data was used so outside of this ledger, that is not covered"
    return {"kind": kind, "words": KINDS[kind]} | absent(reason)


def _elsewhere(billed: bool) -> dict[str, Any]:
    reason = (
        "they are billed, with this run, in the data set's own ledger; this card is about this run alone"
        if billed
        else "no ledger across runs was given: if the same data was used in other runs, this card does not cover them"
    )
    return {"kind": "other runs", "words": "other runs on the same data"} | absent(reason)
