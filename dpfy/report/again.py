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
from dpfy.plan.recipe import Plan
from dpfy.report import assumptions, numbers
from dpfy.report import card as cards

TOLERANCE = 1e-6
TRUST = "central"
PROSE = {"statement", "words", "meaning", "why", "sentences", "theorem", "assumed", "done", "released", "command", "absent", "warnings",
         "protection_words", "sampling_words"}  # fmt: skip
"""Wording may change from version to version, numbers may not."""


def same_version(card: dict[str, Any]) -> bool:
    """Whether this version of dpfy wrote the card."""
    return bool(card["provenance"]["dpfy"] == __version__)


def derived(plan: Plan, ledger: Ledger, card: dict[str, Any]) -> dict[str, Any]:
    """All claims as they follow now from plan and ledger, given the facts that the card states."""
    return cards.claims(plan, ledger, card, tuple(card["caveats"]), TRUST)


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
    """What contradicts the card in the eyes of dp-accounting, and what it found: RDP, or PLD where the card itself used RDP.

    RDP gives larger epsilons than PLD; a stated epsilon above RDP's, or below a PLD's where it was computed by RDP, is an alarm.
    """
    name = "pld" if plan.accountant == "rdp" else "rdp"
    stated = {
        "guarantee": (card["guarantee"], assumptions.sound_event(ledger)),
        "formal.training": (card["formal"]["training"], assumptions.sound_part(ledger, "training")),
        "formal.with_tuning": (card["formal"]["with_tuning"], assumptions.sound_part(ledger, "training", "tuning")),
        "accounting.without_amplification": (card["accounting"]["without_amplification"], _known(ledger)),
    }
    seen = []
    for place, (claim, event) in stated.items():
        if "epsilon" not in claim:
            continue
        value = _value(claim["epsilon"])
        try:
            second = _peer(name, event, ledger.adjacency, plan.delta)
        except (Unsupported, ImportError) as reason:
            return None, f"has no answer for this run ({reason})"
        high, low = (second, value) if name == "rdp" else (value, second)
        if high < low * (1 - TOLERANCE):
            return f"privacy.json {place}.epsilon says {value:.6g}, {name} gives {second:.6g}: one of them is wrong", ""
        seen.append(f"{place} {second:.4g} ({value:.4g} stated)")
    return None, f"dp-accounting's {name}: {', '.join(seen)}"


def _known(ledger: Ledger) -> events.Event:
    return assumptions.sound_event(ledger) if assumptions.foreign_sampling(ledger) else numbers.unsampled(ledger.event())


@lru_cache(maxsize=64)
def _peer(name: str, event: events.Event, adjacency: Adjacency, delta: float) -> float:
    from dpfy.accounting import reference

    logging.getLogger("absl").setLevel(logging.ERROR)  # orders that dp-accounting leaves out only make its answer larger
    peer = reference.PeerRdp() if name == "rdp" else reference.PeerPld()
    return peer.curve(event, adjacency).epsilon(delta)


def _value(number: float | str) -> float:
    return math.inf if number == "infinity" else float(number)
