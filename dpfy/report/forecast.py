"""The report before the run: what accounting will be asked for when a run ends is asked before
anything of it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfy.core import events
from dpfy.core.claim import Reserved
from dpfy.core.ledger import ORIGIN, HashChain, Ledger
from dpfy.core.ledger_rules import VERSION, LedgerRules
from dpfy.report import card

NOBODY = "0" * 16
Row = tuple[str, Any, int, dict[str, Any]]
"""A reservation: name, event as JSON, uses, claim."""


def ledger_of(
    terms: dict[str, Any],
    rows: Iterable[Row],
    head: str = ORIGIN,
    settled: Mapping[str, tuple[int, int]] | None = None,
) -> Ledger:
    """A ledger in memory with these terms (unit and adjacency) and reservations; `Corrupt` where no
    ledger could hold them.

    `settled` are those that ended early, by name: how many releases were made, and how many are
    charged.
    """
    bodies: list[dict[str, Any]] = [
        {"type": "ledger", "version": VERSION, "ledger": NOBODY, "budget": None} | terms
    ]
    for number, (name, event, uses, claim) in enumerate(rows):
        body = {
            "type": "reserve",
            "entry": f"{number:016x}",
            "name": name,
            "event": event,
            "uses": uses,
            "claim": claim,
        }
        bodies.append(body | {"returnable": False, "time": 0})
        if name in (settled or {}):
            made, billed = (settled or {})[name]
            bodies.append(
                {"type": "settle", "entry": f"{number:016x}", "made": made, "billed": billed}
            )
    return Ledger(
        Path(card.NAME), HashChain(bodies, [head] * len(bodies)), LedgerRules.of(card.NAME, bodies)
    )


def require(reserved: Sequence[Reserved]) -> None:
    """Refuse a run whose report could not be computed.

    Guarantees: every figure that a report derives from the ledger is computed here, by the same
    functions from the same events, so that no limit of accounting is met for the first time when
    releases were made; where a run may end early, at each of its points. `figures` keeps the
    figures: they are computed once.
    """
    rows: list[Row] = [
        (r.claim.name, events.CODEC.encode(r.claim.event), 1, r.to_json()) for r in reserved
    ]
    unit, adjacency = reserved[0].claim.unit, reserved[0].claim.adjacency
    ends: list[dict[str, tuple[int, int]]] = [
        {},
        *({r.claim.name: (made, made)} for r in reserved for made in r.claim.stops),
    ]
    for settled in ends:
        card.claims(
            ledger_of(
                {"unit": unit.to_json(), "adjacency": adjacency.value}, rows, settled=settled
            ),
            {"sections": {}},
        )
