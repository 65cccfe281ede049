"""The second look: derive the claims of a card again, compare them leaf by leaf, and ask an accountant that shares no code."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dpfy import __version__
from dpfy.core import events
from dpfy.core.errors import Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency
from dpfy.plan.claim import ENTROPY, FIXED
from dpfy.plan.recipe import Plan
from dpfy.report import accesses, assumptions, forecast, numbers
from dpfy.report import card as cards

TOLERANCE = 1e-6
APART = 1.05
TIGHT = ("tight", "pld")
PROSE = {"statement", "words", "meaning", "why", "sentences", "theorem", "assumed", "done", "released", "command", "absent", "warnings",
         "protection_words", "sampling_words"}  # fmt: skip
"""Wording may change from version to version, numbers may not."""


def same_version(card: dict[str, Any]) -> bool:
    """Whether this version of dpfy wrote the card."""
    return bool(card["provenance"]["dpfy"] == __version__)


def stated_ledger(card: dict[str, Any]) -> Ledger:
    """The ledger that a card says it was computed from, in memory; `Corrupt` where it could not be one."""
    billed = any(row["kind"] == "other runs" and "this run alone" in row["absent"] for row in card["accesses"]["not_covered"])
    note = card["accounting"]["sampling_note"]
    claim = {
        "plan": card["plan"],
        "seed": FIXED if card["provenance"]["seed"] == cards.FIXED_SEED else ENTROPY,
        "batches": {"done": note["done"], "most": note.get("most")} if "done" in note else None,
        "shared": {"ledger": "", "entry": ""} if billed else None,
    }
    terms = {"unit": {k: card["unit"][k] for k in ("name", "most_records")}, "adjacency": card["adjacency"]["name"]}
    covered = card["accesses"]["covered"]
    own = next((n for n, row in enumerate(covered) if row["name"] == assumptions.TRAINING), None)
    rows = [(row["name"], row["event"], row["uses"], claim if n == own else {}) for n, row in enumerate(covered)]
    return forecast.ledger_of(terms, rows, card["ledger"]["head"])


def derived(plan: Plan, ledger: Ledger, card: dict[str, Any]) -> dict[str, Any]:
    """All claims as they follow now from plan and ledger, given the facts that the card states."""
    return cards.claims(plan, ledger, card, tuple(card["caveats"]), forecast.TRUST)


def differences(card: dict[str, Any], claims: dict[str, Any]) -> list[str]:
    """One line for each field of the card that is not what it should be."""
    exact = same_version(card)
    lines = []
    for place, stated, due in _leaves({k: card.get(k) for k in claims}, claims, ()):
        if (exact or not PROSE & set(place)) and not _same(stated, due):
            lines.append(f"privacy.json {'.'.join(place)} says {_short(stated)}, the ledger gives {_short(due)}")
    return lines


def _leaves(stated: Any, due: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(stated, dict) and isinstance(due, dict):
        for key in sorted(stated.keys() | due.keys()):
            yield from _leaves(stated.get(key, MISSING), due.get(key, MISSING), (*place, key))
    elif isinstance(stated, (list, tuple)) and isinstance(due, (list, tuple)) and len(stated) == len(due):
        for n, (a, b) in enumerate(zip(stated, due, strict=True)):
            yield from _leaves(a, b, (*place, str(n)))
    else:
        yield place, stated, due


MISSING = "nothing"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
        return bool(a == b)
    return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-15)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def second_opinion(plan: Plan, ledger: Ledger, card: dict[str, Any]) -> tuple[str | None, str]:
    """What contradicts the card in the eyes of dp-accounting, and what it found.

    Its RDP is an upper bound that a tight accountant must not exceed; its PLD must not exceed what a looser accountant states. Where
    only RDP has an answer for a claim made by RDP, the two may differ by their orders, not by more than `APART`.
    """
    found = []
    for place, (claim, event) in _claimed(ledger, card).items():
        if "epsilon" not in claim:
            continue
        value = _value(claim["epsilon"])
        try:
            name, second = _opinion(plan, event, ledger.adjacency)
        except (Unsupported, ImportError) as reason:
            return None, f"has no answer for this run ({reason})"
        if _contradicts(plan.accountant, name, value, second):
            return f"privacy.json {place}.epsilon says {value:.6g}, {name} gives {second:.6g}: one of them is wrong", ""
        found.append(f"{place} {second:.4g} by {name} ({value:.4g} stated)")
    return None, f"dp-accounting: {', '.join(found)}"


def _claimed(ledger: Ledger, card: dict[str, Any]) -> dict[str, tuple[dict[str, Any], events.Event]]:
    """Every epsilon of the card with the event it is about."""
    return {
        "guarantee": (card["guarantee"], ledger.event()),
        "formal.training": (card["formal"]["training"], accesses.event_of_kinds(ledger, "training")),
        "formal.with_tuning": (card["formal"]["with_tuning"], accesses.event_of_kinds(ledger, "training", "tuning")),
        "accounting.without_amplification": (card["accounting"]["without_amplification"], numbers.unsampled(ledger.event())),
    }


def _opinion(plan: Plan, event: events.Event, adjacency: Adjacency) -> tuple[str, float]:
    if plan.accountant in TIGHT:
        return "rdp", _peer("rdp", event, adjacency, plan.delta)
    try:
        return "pld", _peer("pld", event, adjacency, plan.delta)
    except Unsupported:
        return "rdp", _peer("rdp", event, adjacency, plan.delta)


def _contradicts(accountant: str, name: str, stated: float, second: float) -> bool:
    if name == "pld":
        return second > stated * (1 + TOLERANCE)
    if accountant in TIGHT:
        return second < stated * (1 - TOLERANCE)
    return stated < second / APART if accountant == "rdp" else False


@lru_cache(maxsize=64)
def _peer(name: str, event: events.Event, adjacency: Adjacency, delta: float) -> float:
    from dpfy.accounting import reference

    logging.getLogger("absl").setLevel(logging.ERROR)  # orders that dp-accounting leaves out only make its answer larger
    peer = reference.PeerRdp() if name == "rdp" else reference.PeerPld()
    return peer.curve(event, adjacency).epsilon(delta)


def _value(number: float | str) -> float:
    return math.inf if number == "infinity" else float(number)
