"""The card before the run: what accounting will be asked for when a run ends is asked before anything of it is written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpfy.core import events
from dpfy.core.book import VERSION, Book
from dpfy.core.chain import ORIGIN, Chain
from dpfy.core.ledger import Ledger
from dpfy.plan.claim import Claim
from dpfy.report import assumptions, card, evaluations
from dpfy.report.words import absent

NOBODY = "0" * 16
TRUST = "central"
Row = tuple[str, Any, int, dict[str, Any]]
"""A reservation: name, event as JSON, uses, claim."""


def ledger_of(terms: dict[str, Any], rows: Iterable[Row], head: str = ORIGIN) -> Ledger:
    """A ledger in memory with these terms (unit and adjacency) and reservations; `Corrupt` where no ledger could hold them."""
    bodies: list[dict[str, Any]] = [{"type": "ledger", "version": VERSION, "ledger": NOBODY, "budget": None} | terms]
    for number, (name, event, uses, claim) in enumerate(rows):
        body = {"type": "reserve", "entry": f"{number:016x}", "name": name, "event": event, "uses": uses, "claim": claim}
        bodies.append(body | {"returnable": False, "time": 0})
    return Ledger(Path(card.NAME), Chain(bodies, [head] * len(bodies)), Book.of(card.NAME, bodies))


def require(claim: Claim, evaluation: events.Event | None = None) -> None:
    """Refuse a run whose card could not be computed.

    Guarantees: every figure that a card derives from plan and ledger is computed here, by the same functions from the same events, so
    that no limit of accounting is met for the first time when steps were made. `numbers` keeps the figures: they are computed once.
    """
    plan = claim.plan
    rows: list[Row] = [(assumptions.TRAINING, events.CODEC.encode(claim.event), 1, claim.to_json())]
    if evaluation is not None:
        rows.append((evaluations.KIND, events.CODEC.encode(evaluation), 1, {}))
    nothing = absent("the run has not begun")
    facts = {"steps_done": plan.recipe.steps, "evaluation": {"test": "none"}, "utility": nothing, "confusion": nothing}
    unit = {"name": plan.recipe.unit.name, "most_records": plan.recipe.unit.most_records}
    ledger = ledger_of({"unit": unit, "adjacency": plan.recipe.adjacency.value}, rows)
    card.claims(plan, ledger, facts, claim.caveats, TRUST)
