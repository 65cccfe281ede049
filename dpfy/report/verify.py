"""Verification from outside: recompute the guarantee of a finished run from its ledger, and check every hash."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy import accounting
from dpfy.core.codec import digest
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of
from dpfy.plan.recipe import Plan
from dpfy.report import card as cards

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it held, and in words why not."""

    what: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Evidence:
    """What a run folder holds, read once."""

    folder: Path
    card: dict[str, Any]
    ledger: Ledger
    plan: Plan


def verify(folder: Path) -> list[Finding]:
    """All checks on a finished run folder, each with its outcome. The run is verified if every one holds.

    Guarantees: one changed byte of ledger.jsonl, privacy.json or model.safetensors makes a check fail that names the file.
    """
    if not folder.is_dir():
        raise InvalidInput("run", str(folder), "is not a folder")
    if not (folder / cards.NAME).is_file():
        if (folder / "plan.json").is_file():
            return [Finding(cards.NAME, False, "is missing: the run is unfinished; resume it with dpfy train --resume")]
        raise InvalidInput("run", str(folder), "holds no dpfy run")
    findings: list[Finding] = []
    read = _read(folder, findings)
    if read is not None:
        for what, test in CHECKS.items():
            findings.append(_run(what, test, read))
    return findings


def _read(folder: Path, findings: list[Finding]) -> Evidence | None:
    """The card, the ledger and the plan; each is a finding of its own, so that several damaged files are all named."""
    loaders: dict[str, Callable[[], Any]] = {
        cards.NAME: lambda: load_card(folder / cards.NAME),
        "ledger.jsonl": lambda: Ledger.read(folder / "ledger.jsonl"),
    }
    loaded: dict[str, Any] = {}
    for name, load in loaders.items():
        try:
            loaded[name] = load()
            findings.append(Finding(name, True, "is whole"))
        except Corrupt as problem:
            findings.append(Finding(name, False, problem.problem))
    if len(loaded) < len(loaders):
        return None
    try:
        plan = Plan.from_json(loaded[cards.NAME]["plan"])
    except (DpfyError, KeyError, TypeError, AttributeError) as problem:
        findings.append(Finding(cards.NAME, False, f"plan cannot be read: {problem}"))
        return None
    return Evidence(folder, loaded[cards.NAME], loaded["ledger.jsonl"], plan)


def load_card(path: Path) -> dict[str, Any]:
    """The card in a file; `Corrupt` if it is not whole."""
    raw = path.read_bytes()
    try:
        card = json.loads(raw)
        content = {k: v for k, v in card.items() if k != "digest"}
        whole = card["format"] == cards.FORMAT and cards.render(card) == raw
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Corrupt(path.name, "is not a privacy card") from None
    if not whole:
        raise Corrupt(path.name, f"is not in the written form of {cards.FORMAT}: it was edited")
    if card["digest"] != digest(content):
        raise Corrupt(path.name, "does not match its digest: it was edited")
    return dict(card)


def _run(what: str, test: Callable[[Evidence], str | None], evidence: Evidence) -> Finding:
    try:
        problem = test(evidence)
    except (DpfyError, KeyError, TypeError, AttributeError, OSError) as error:
        problem = f"cannot be checked: {error}"
    return Finding(what, problem is None, problem or "holds")


def _head(e: Evidence) -> str | None:
    if (e.card["ledger"]["head"], e.card["ledger"]["entries"]) != (e.ledger.head, len(e.ledger.bodies)):
        return "ledger.jsonl is not the ledger the card was computed from: lines were removed, added or exchanged"
    return None


def _files(e: Evidence) -> str | None:
    wrong = [
        name for name, sha in e.card["files"].items() if not (e.folder / name).is_file() or sha256_of(e.folder / name) != sha
    ]
    absent = [name for name in ("plan.json", "model.safetensors") if name not in e.card["files"]]
    if wrong or absent:
        return f"{', '.join(wrong + absent)} does not have the hash that the card states: changed, exchanged or removed"
    return None


def _model(e: Evidence) -> str | None:
    finishes = [b for b in e.ledger.bodies if b["type"] == "finish"]
    if not finishes or finishes[-1]["model"] != sha256_of(e.folder / "model.safetensors"):
        return "model.safetensors is not the model the ledger says this run released"
    return None


def _plan(e: Evidence) -> str | None:
    if Plan.from_json(json.loads((e.folder / "plan.json").read_text())) != e.plan:
        return "plan.json and the card's plan differ"
    reserved = [p.event for p in e.ledger.permits() if p.name == "training"]
    if reserved != [e.plan.event]:
        return "ledger.jsonl reserves another event than the plan describes"
    if (e.ledger.unit, e.ledger.adjacency) != (e.plan.recipe.unit, e.plan.recipe.adjacency):
        return "ledger.jsonl states another unit or adjacency than the plan"
    return None


def _claims(e: Evidence) -> str | None:
    stated, recipe = e.card["guarantee"], e.plan.recipe
    derived = {
        "unit": recipe.unit.name,
        "adjacency": recipe.adjacency.value,
        "delta": e.plan.delta,
        "accountant": e.plan.accountant,
    }
    for key, value in derived.items():
        if stated[key] != value:
            return f"privacy.json guarantee.{key} says {stated[key]}, the plan says {value}"
    for key, value in (("steps", recipe.steps), ("records", recipe.records), ("noise_multiplier", e.plan.noise_multiplier)):
        if e.card["mechanism"][key] != value:
            return f"privacy.json mechanism.{key} says {e.card['mechanism'][key]}, the plan says {value}"
    return None


def _epsilon(e: Evidence) -> str | None:
    """The stated epsilon is what its accountant computes from the ledger now."""
    stated = _value(e.card["guarantee"]["epsilon"])
    computed = e.ledger.guarantee(accounting.accountant(e.plan.accountant)).epsilon(e.plan.delta)
    if not _close(stated, computed):
        return f"privacy.json guarantee.epsilon says {stated}, the ledger gives {computed} ({e.plan.accountant})"
    if e.card["statement"] != e.ledger.guarantee(accounting.accountant(e.plan.accountant), tuple(e.card["caveats"])).sentence(
        e.plan.delta
    ):
        return "privacy.json statement is not the sentence of this ledger"
    return None


def _independent(e: Evidence) -> str | None:
    """A second accountant, with other code and another theory, does not contradict the first."""
    opinion = cards.second_opinion(e.ledger, e.plan.delta, e.plan.accountant)
    if opinion["epsilon"] is None:
        return None
    stated, second = _value(e.card["guarantee"]["epsilon"]), _value(opinion["epsilon"])
    if opinion["accountant"] == "rdp" and second < stated * (1 - TOLERANCE):
        return f"the rdp accountant gives {second}, below the stated {stated}: one of them is wrong"
    if opinion["accountant"] == "pld" and second > stated * (1 + TOLERANCE):
        return f"the pld accountant gives {second}, above the stated {stated}: one of them is wrong"
    return None


def _secrets(e: Evidence) -> str | None:
    return "checkpoint/ still exists: the run's secrets were not erased" if (e.folder / "checkpoint").exists() else None


def _value(number: float | str) -> float:
    return math.inf if number == "infinity" else float(number)


def _close(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-9)


CHECKS: dict[str, Callable[[Evidence], str | None]] = {
    "ledger and card belong together": _head,
    "files have their stated hashes": _files,
    "model is the one the ledger released": _model,
    "plan matches card and ledger": _plan,
    "claims follow from the plan": _claims,
    "epsilon recomputed from the ledger": _epsilon,
    "second accountant agrees": _independent,
    "secrets are erased": _secrets,
}
