"""Verification from outside: derive every claim of a card again from the ledger, ask a second accountant, and check every hash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.core.codec import digest
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of
from dpfy.plan.recipe import Plan
from dpfy.report import again, html, markdown, schema
from dpfy.report import card as cards


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it held, and in words why not."""

    what: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Evidence:
    """A card with the ledger and the plan to hold it against; `folder` is None for a card by itself."""

    folder: Path | None
    card: dict[str, Any]
    ledger: Ledger
    plan: Plan

    def file(self, name: str) -> Path:
        """A file of the run folder."""
        if self.folder is None:
            raise InvalidInput("run", None, "a card by itself has no files")
        return self.folder / name


Check = Callable[[Evidence], tuple[bool, str]]


def verify(run: Path) -> list[Finding]:
    """All checks on a finished run folder, or on a card file by itself, each with its outcome. Verified if every one holds.

    Guarantees: one changed byte of ledger.jsonl, privacy.json or model.safetensors makes a check fail that names the file; a number
    of the card that the ledger does not give makes a check fail that names the field.
    """
    if run.is_file():
        return _verify_card(run)
    if not run.is_dir():
        raise InvalidInput("run", str(run), "is not a folder, nor a card")
    if not (run / cards.NAME).is_file():
        if (run / "plan.json").is_file():
            return [Finding(cards.NAME, False, "is missing: the run is unfinished; resume it with dpfy train --resume")]
        raise InvalidInput("run", str(run), "holds no dpfy run")
    findings: list[Finding] = []
    read = _read(run, findings)
    if read is not None:
        findings += [_run(what, test, read) for what, test in CHECKS.items()]
    return findings


def _verify_card(file: Path) -> list[Finding]:
    """What can be checked without the run: form, digest, and that every number follows from the plan and accesses it states."""
    try:
        card = load_card(file)
        plan = Plan.from_json(card["plan"])
        ledger = again.stated_ledger(card)
    except Corrupt as problem:
        return [Finding(file.name, False, problem.problem)]
    except (DpfyError, KeyError, TypeError, AttributeError) as problem:
        return [Finding(file.name, False, f"plan cannot be read: {problem}")]
    read = Evidence(None, card, ledger, plan)
    findings = [Finding(file.name, True, "is whole")]
    findings += [_run(what, test, read) for what, test in CARD_CHECKS.items()]
    left = "ledger, model, configuration, metrics and erased secrets: verify the run folder for these"
    return [*findings, Finding("not checked from a card alone", True, left)]


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
    try:
        raw = path.read_bytes()
        card = json.loads(raw)
        content = {k: v for k, v in card.items() if k != "digest"}
        whole = card["format"] == cards.FORMAT and cards.render(card) == raw
        stated = card["digest"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Corrupt(path.name, "is not a privacy card") from None
    except OSError as problem:
        raise InvalidInput("card", str(path), f"cannot be read ({problem.strerror})") from None
    if not whole:
        raise Corrupt(path.name, f"is not in the written form of {cards.FORMAT}: it was edited")
    if stated != digest(content):
        raise Corrupt(path.name, "does not match its digest: it was edited")
    if found := schema.problem(card):
        raise Corrupt(path.name, f"does not follow the schema: {found}")
    return dict(card)


def _run(what: str, test: Check, evidence: Evidence) -> Finding:
    try:
        holds, detail = test(evidence)
    except (DpfyError, KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        holds, detail = False, f"cannot be checked: {error}"
    return Finding(what, holds, detail)


def _outcome(problem: str | None, good: str = "holds") -> tuple[bool, str]:
    return problem is None, problem or good


def _head(e: Evidence) -> tuple[bool, str]:
    stated, found = e.card["ledger"], {"head": e.ledger.head, "entries": len(e.ledger.bodies)}
    wrong = "ledger.jsonl is not the ledger the card was computed from: lines were removed, added or exchanged"
    return _outcome(None if stated == found else wrong)


def _files(e: Evidence) -> tuple[bool, str]:
    stated = e.card["files"]
    wrong = [name for name, sha in stated.items() if not e.file(name).is_file() or sha256_of(e.file(name)) != sha]
    absent = [name for name in ("plan.json", "model.safetensors") if name not in stated]
    names = ", ".join(wrong + absent)
    return _outcome(f"{names} does not have the hash that the card states: changed, exchanged or removed" if names else None)


def _model(e: Evidence) -> tuple[bool, str]:
    finishes = [b for b in e.ledger.bodies if b["type"] == "finish"]
    same = bool(finishes) and finishes[-1]["model"] == sha256_of(e.file("model.safetensors"))
    return _outcome(None if same else "model.safetensors is not the model the ledger says this run released")


def _plan(e: Evidence) -> tuple[bool, str]:
    if e.folder is not None and Plan.from_json(json.loads(e.file("plan.json").read_text())) != e.plan:
        return False, "plan.json and the card's plan differ"
    source = "ledger.jsonl" if e.folder is not None else "privacy.json accesses"
    reserved = [p.event for p in e.ledger.permits() if p.name == "training"]
    if reserved != [e.plan.event]:
        return False, f"{source} reserves another event than the plan describes"
    if (e.ledger.unit, e.ledger.adjacency) != (e.plan.recipe.unit, e.plan.recipe.adjacency):
        return False, f"{source} states another unit or adjacency than the plan (guarantee.unit, guarantee.adjacency)"
    return True, "holds"


def _claims(e: Evidence) -> tuple[bool, str]:
    """Every derived field of the card is what its accountant derives now from the ledger."""
    derived = again.derived(e.plan, e.ledger, e.card)
    if e.folder is None:
        derived.pop("ledger")
    found = again.differences(e.card, derived)
    return _outcome("; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "") if found else None)


def _independent(e: Evidence) -> tuple[bool, str]:
    """A second accountant, with other code and another theory, does not contradict the first."""
    problem, seen = again.second_opinion(e.plan, e.ledger, e.card)
    return _outcome(problem, seen)


def _reports(e: Evidence) -> tuple[bool, str]:
    """The pages say what the card says."""
    if not again.same_version(e.card):
        return True, f"written by dpfy {e.card['provenance']['dpfy']}, whose pages this version does not write; not compared"
    extra = html.extras(e.file(""))
    pages = {
        html.NAME: {html.render(e.card, extra), html.render(e.card, extra | {"audit": None})},
        markdown.NAME: {markdown.render(e.card, extra["audit"]), markdown.render(e.card)},
    }
    missing = [name for name in pages if not e.file(name).is_file()]
    edited = [name for name in pages if name not in missing and e.file(name).read_text() not in pages[name]]
    if edited:
        return False, f"{', '.join(edited)} is not the page of this card: it was edited (dpfy report writes it again)"
    return True, f"{', '.join(missing)} is not there; dpfy report writes it" if missing else "holds"


def _audit(e: Evidence) -> tuple[bool, str]:
    """An audit in the folder does not contradict the claim."""
    audit = html.extras(e.file(""))["audit"]
    if audit is None:
        return True, "there is no audit.json"
    return _outcome(html.contradiction(e.card, audit), f"audit.json: epsilon is at least {audit['epsilon_lower']}")


def _secrets(e: Evidence) -> tuple[bool, str]:
    return _outcome("checkpoint/ still exists: the run's secrets were not erased" if e.file("checkpoint").exists() else None)


CARD_CHECKS: dict[str, Check] = {
    "plan matches the accesses stated": _plan,
    "every number follows from plan and accesses": _claims,
    "second accountant agrees": _independent,
}

CHECKS: dict[str, Check] = {
    "ledger and card belong together": _head,
    "files have their stated hashes": _files,
    "model is the one the ledger released": _model,
    "plan matches card and ledger": _plan,
    "every number recomputed from the ledger": _claims,
    "second accountant agrees": _independent,
    "pages say what the card says": _reports,
    "no audit contradicts the claim": _audit,
    "secrets are erased": _secrets,
}
