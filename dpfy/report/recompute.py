"""The second look: derive the claims of a report again, compare them leaf by leaf, and ask an
accountant that shares no code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dpfy import __version__
from dpfy.accounting.stopping import unwrapped
from dpfy.core import errors, events
from dpfy.core.claim import FIXED, Reserved, kind_of
from dpfy.core.errors import Corrupt, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency
from dpfy.report import card as cards
from dpfy.report import figures, forecast, prose, uses, words
from dpfy.report.words import up

TOLERANCE = 1e-6
APART = 1.05
TIGHT = ("tight", "pld")
PROSE = {"statement", "words", "meaning", "why", "sentences", "theorem", "assumed", "done", "released", "command", "absent", "warnings",  # noqa: E501
         "protection_words", "sampling_words", "trusted"}  # fmt: skip
"""Wording may change from version to version, numbers may not: of another version, the numbers in
these are compared.
"""

FIGURES = {"statement", "guarantee", "accesses", "formal", "tier", "attacker", "delta", "warnings"}
"""Parts whose sentences must state every number that ours state. Others may say less: a later
version describes more of what was done.
"""


def same_version(card: dict[str, Any]) -> bool:
    """Whether this version of dpfy wrote the report."""
    return bool(card["provenance"]["dpfy"] == __version__)


def stated_ledger(card: dict[str, Any]) -> Ledger:
    """The ledger that a report says it was computed from, in memory; `Corrupt` where it could not be
    one.
    """
    card = words.raised(card)
    billed = any(
        row["kind"] == "other runs" and "this run alone" in row["absent"]
        for row in card["accesses"]["not_covered"]
    )
    seed = words.seed_of(card["provenance"]["seed"] == cards.FIXED_SEED)
    parts = {part["name"]: part for part in card["sections"]}
    unit = {key: card["unit"][key] for key in ("name", "most_records")}
    unit |= (
        {"protects": card["unit"]["protection"]}
        if card["unit"].get("protection", "record") != "record"
        else {}
    )
    unit |= (
        {"tokens": card["unit"]["tokens"]} if isinstance(card["unit"].get("tokens"), int) else {}
    )
    settled = {
        part["name"]: (end["made"], end["billed"])
        for part in card["sections"]
        if (end := part.get("ended", {})).get("settled")
    }
    rows = [
        (row["name"], row["event"], row["uses"], _claim(parts.pop(row["name"], None), seed, billed))
        for row in card["accesses"]["covered"]
    ]
    rows = [(n, _whole(e, claim) if n in settled else e, uses, claim) for n, e, uses, claim in rows]
    return forecast.ledger_of(
        {"unit": unit, "adjacency": card["adjacency"]["name"]},
        rows,
        card["ledger"]["head"],
        settled,
    )


def _whole(event: Any, claim: dict[str, Any]) -> Any:
    """What was reserved for a release that ended early, as its claim says."""
    return events.CODEC.encode(Reserved.from_json(claim).claim.event) if claim else event


def _claim(part: dict[str, Any] | None, seed: str, billed: bool) -> dict[str, Any]:
    """What the reservation of a section must have said."""
    if part is None:
        return {}
    try:
        made = kind_of(part["kind"]).from_json(part["claim"])
    except errors.UNREADABLE as problem:
        raise Corrupt(
            cards.NAME, f"holds a claim that cannot be read ({type(problem).__name__}: {problem})"
        ) from None
    return Reserved(
        made, seed == FIXED, (forecast.NOBODY, forecast.NOBODY) if billed else None
    ).to_json()


def derived(ledger: Ledger, card: dict[str, Any]) -> dict[str, Any]:
    """All claims as they follow now from the ledger, given the facts that the report states."""
    stated = words.raised(card)
    due = cards.claims(
        ledger, stated | {"sections": {part["name"]: part for part in stated["sections"]}}
    )
    if not words.is_first(card):
        return due
    shared: dict[str, Any] = _only(
        {key: value for key, value in due.items() if key != "format"}, stated
    )
    return shared


def _only(due: Any, like: Any) -> Any:
    """What is due, without what the first format does not state."""
    if isinstance(due, dict) and isinstance(like, dict):
        return {key: _only(value, like[key]) for key, value in due.items() if key in like}
    if isinstance(due, list) and isinstance(like, list) and len(due) == len(like):
        return [_only(a, b) for a, b in zip(due, like, strict=True)]
    return due


def differences(card: dict[str, Any], claims: dict[str, Any]) -> list[str]:
    """One line for each field of the report that is not what it should be; for sentences of another
    version, whose numbers are not.
    """
    exact, stated = same_version(card), words.raised(card)
    lines = []
    for place, said, due in _compared(stated, claims):
        at = f"privacy.json {'.'.join(place)}"
        if exact or not PROSE & set(place):
            if not _same(said, due):
                lines.append(f"{at} says {_short(said)}, the ledger gives {_short(due)}")
        elif wrong := _misworded(said, due, whole=place[0] in FIGURES):
            lines.append(f"{at} says {wrong}")
    return lines


def reworded(card: dict[str, Any], claims: dict[str, Any]) -> list[str]:
    """The places of sentences that this version words otherwise, and that state the same
    numbers.
    """
    found = _compared(words.raised(card), claims)
    return [
        ".".join(place) for place, said, due in found if PROSE & set(place) and not _same(said, due)
    ]


def _compared(
    stated: dict[str, Any], claims: dict[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    return _leaves({key: stated.get(key) for key in claims}, _facing(claims, stated), ())


def _misworded(said: Any, due: Any, *, whole: bool) -> str | None:
    """What is wrong with a sentence of another version: a number in it, or that a sentence is not
    there.
    """
    if (
        isinstance(said, str)
        and isinstance(due, str)
        and due is not MISSING
        and said is not MISSING
    ):
        return prose.contradiction(said, due, whole=whole)
    lists = isinstance(said, (list, tuple)) and isinstance(due, (list, tuple))
    if lists and len(said) >= len(due):
        return prose.contradiction(" ".join(map(str, said)), " ".join(map(str, due)), whole=whole)
    return None if _same(said, due) else f"{_short(said)}, the ledger gives {_short(due)}"


def told(card: dict[str, Any], claims: dict[str, Any]) -> dict[str, Any]:
    """What the report states and the ledger does not give: facts that only the run knew."""
    stated = words.raised(card)
    alone: dict[str, Any] = {
        key: value
        for key, value in stated.items()
        if key not in claims and key not in ("digest", "files")
    }
    for part, due in zip(stated["sections"], claims["sections"], strict=False):
        alone |= {f"{part['name']} {key}": value for key, value in part.items() if key not in due}
    return alone


def reserved_words(claims: dict[str, Any]) -> dict[str, Any]:
    """Texts that anyone who reserved has chosen: names of reservations, and what claims say in
    words.
    """
    claimed = {part["name"]: part["claim"] for part in claims["sections"]}
    texts = {
        f"{name} claim": [value for _, value in prose.facts(claim) if isinstance(value, str)]
        for name, claim in claimed.items()
    }
    return texts | {"accesses": [row["name"] for row in claims["accesses"]["covered"]]}


def known(claims: dict[str, Any]) -> prose.Known:
    """The figures that the ledger gives. Points of the curve are no epsilon of the run."""
    formal = {key: value for key, value in claims["formal"].items() if key != "curve"}
    return prose.Known.of(claims | {"formal": formal})


def invented(facts: dict[str, Any], figures: prose.Known) -> list[str]:
    """One line for each of these facts that states an epsilon or a delta which the ledger does not
    give.
    """
    found = [(place, prose.claim_in(place, value, figures)) for place, value in prose.facts(facts)]
    return [
        f"{place} states {wrong}, which the ledger does not give" for place, wrong in found if wrong
    ]


def _facing(claims: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """The claims with the facts that each section tells beside them: what is not derived is not
    compared.
    """
    parts = stated["sections"]
    if len(parts) != len(claims["sections"]):
        return claims
    return claims | {
        "sections": [told | due for told, due in zip(parts, claims["sections"], strict=True)]
    }


def _leaves(
    stated: Any, due: Any, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(stated, dict) and isinstance(due, dict):
        for key in sorted(stated.keys() | due.keys()):
            yield from _leaves(stated.get(key, MISSING), due.get(key, MISSING), (*place, key))
    elif (
        isinstance(stated, (list, tuple))
        and isinstance(due, (list, tuple))
        and len(stated) == len(due)
    ):
        for n, (a, b) in enumerate(zip(stated, due, strict=True)):
            yield from _leaves(a, b, (*place, str(n)))
    else:
        yield place, stated, due


MISSING = "nothing"


def _same(a: Any, b: Any) -> bool:
    if (
        isinstance(a, bool)
        or isinstance(b, bool)
        or not (isinstance(a, (int, float)) and isinstance(b, (int, float)))
    ):
        return bool(a == b)
    return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-15)


def same_number(said: Any, due: float) -> bool:
    """Whether a number that is given is the one that is due."""
    if said == "infinity":
        return math.isinf(due)
    return isinstance(said, (int, float)) and _same(said, due)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def second_opinion(ledger: Ledger, card: dict[str, Any]) -> tuple[str | None, str]:
    """What contradicts the report in the eyes of dp-accounting, and what it found.

    Its RDP is an upper bound that a tight accountant must not exceed; its PLD must not exceed what
    a looser accountant states. Where only RDP has an answer for a claim made by RDP, the two may
    differ by their orders, not by more than `APART`.
    """
    found, accountant, delta = [], card["guarantee"]["accountant"], card["guarantee"]["delta"]
    if delta == 0:
        return None, "has no answer for a pure guarantee"
    for place, (claim, event) in _claimed(ledger, card).items():
        if "epsilon" not in claim:
            continue
        value = _value(claim["epsilon"])
        try:
            name, second = _opinion(accountant, delta, event, ledger.adjacency)
        except (Unsupported, ImportError) as reason:
            return None, f"has no answer for this run ({reason})"
        if _contradicts(accountant, name, value, second):
            return (
                f"privacy.json {place}.epsilon says {value:.6g}, {name} gives {second:.6g}: one of "
                f"them is wrong",
                "",
            )
        found.append(f"{place}: {_beside(second, value)} (by {name})")
    return None, f"dp-accounting: {', '.join(found)}"


def _beside(second: float, stated: float) -> str:
    """A second bound in words, beside the one that is given."""
    if math.isinf(second) and math.isinf(stated):
        return "no finite bound either"
    if up(second) == up(stated):
        return f"{up(second)}, as reported"
    kind = "looser" if second > stated else "tighter"
    return f"{kind} bound {up(second)}, consistent with {up(stated)}"


def _claimed(
    ledger: Ledger, card: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], events.Event]]:
    """Every epsilon of the report with the event it is about."""
    return {
        "guarantee": (card["guarantee"], ledger.event()),
        "formal.training": (card["formal"]["training"], _training(ledger, card)),
        "formal.with_tuning": (
            card["formal"]["with_tuning"],
            uses.event_of_kinds(ledger, "training", "tuning"),
        ),
        "accounting.without_amplification": (
            card["accounting"]["without_amplification"],
            figures.unsampled(ledger.event()),
        ),
    }


def _training(ledger: Ledger, card: dict[str, Any]) -> events.Event:
    """Training alone."""
    told = {part["name"]: part for part in card.get("sections", ())}
    return cards.trained(ledger, told) or events.Nothing()


def _opinion(
    accountant: str, delta: float, event: events.Event, adjacency: Adjacency
) -> tuple[str, float]:
    if accountant in TIGHT:
        return "rdp", _peer("rdp", _known(event), adjacency, delta)
    try:
        return "pld", _peer("pld", event, adjacency, delta)
    except Unsupported:
        return "rdp", _peer("rdp", event, adjacency, delta)


def _known(event: events.Event) -> events.Event:
    """The event with choices as what dp-accounting knows of them: losses in an interval of length e
    are e^2 / 8-zCDP, which is no less.
    """
    leaves = [
        (events.Zcdp(e.epsilon**2 / 8) if isinstance(e, events.BoundedRange) else e, n)
        for e, n in events.flatten(event)
    ]
    chosen = any(isinstance(leaf, events.BoundedRange) for leaf, _ in events.flatten(event))
    return (
        events.Composed(tuple(events.Repeated(leaf, count) for leaf, count in leaves))
        if chosen
        else event
    )


def _contradicts(accountant: str, name: str, stated: float, second: float) -> bool:
    if name == "pld":
        return second > stated * (1 + TOLERANCE)
    if accountant in TIGHT:
        return second < stated * (1 - TOLERANCE)
    return stated < second / APART if accountant == "rdp" else False


@lru_cache(maxsize=64)
def _peer(name: str, event: events.Event, adjacency: Adjacency, delta: float) -> float:
    from dpfy.accounting.dp_accounting_adapter import PeerPld, PeerRdp

    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # orders that dp-accounting leaves out only make its answer larger
    peer = PeerRdp() if name == "rdp" else PeerPld()
    inner, share = unwrapped(event)
    return peer.curve(inner, adjacency).epsilon(delta * share)


def _value(number: float | str) -> float:
    return math.inf if number == "infinity" else float(number)
