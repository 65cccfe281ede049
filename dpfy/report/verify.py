"""Verification from outside: derive every claim of a card again from the ledger, ask a second accountant, and check every hash.

What holds is that the files of a run agree with each other and with the ledger's chain. Who wrote them is another question: see
`signature`, and docs/card.md for what each level proves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfy.core import reading
from dpfy.core.claim import Claim, Reserved, differences
from dpfy.core.codec import digest
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of
from dpfy.report import card as cards
from dpfy.report import first, html, markdown, recompute, schema, signature
from dpfy.report.signature import Signed

LEDGER = "ledger.jsonl"
PAGES = (html.NAME, markdown.NAME)
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it held, and in words why not."""

    what: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Evidence:
    """A card with the ledger to hold it against; `folder` is None for a card by itself."""

    folder: Path | None
    card: dict[str, Any]
    ledger: Ledger

    @property
    def view(self) -> dict[str, Any]:
        """The card in the layout of the present format."""
        return first.raised(self.card)

    @property
    def reserved(self) -> dict[str, Reserved]:
        """What was reserved in the ledger before any data was read, by name."""
        return dict(cards.reservations(self.ledger))

    @property
    def finish(self) -> dict[str, Any]:
        """The end of the run, as the ledger states it."""
        if self.ledger.book.finish is None:
            raise Corrupt(LEDGER, "does not say that the run ended")
        return self.ledger.book.finish

    def file(self, name: str) -> Path:
        """A file of the run folder."""
        if self.folder is None:
            raise InvalidInput("run", None, "a card by itself has no files")
        return self.folder / name

    def differ(self, hashes: dict[str, str]) -> list[str]:
        """Which of these files are gone, or are not what their hash says."""
        return [name for name, sha in hashes.items() if not self.file(name).is_file() or sha256_of(self.file(name)) != sha]


Check = Callable[[Evidence], tuple[bool, str]]


def verify(
    run: Path | str, *, keys: Sequence[Path | str] = (), head: str | None = None, ledger: Path | str | None = None
) -> list[Finding]:
    """All checks on a finished run folder, on a card file or on a ledger by itself, each with its outcome. Verified if every one holds.

    `keys` are public keys: each must have signed the run, or the published head. `head` is a head of the ledger that was published
    while the run lasted (64 hexadecimal digits, or the file that ``dpfy sign --head`` wrote): the ledger must extend it. `ledger` is
    that of the data set: the run must be billed there too.

    Guarantees: one changed byte of any file of the run makes a check fail that names the file; a number of the card that the ledger
    does not give makes a check fail that names the field. Damage of any kind is a check that fails, not an exception.
    """
    run, ledger = Path(run), None if ledger is None else Path(ledger)
    published = signature.published(head) if head is not None else None
    signers = {Path(file).name: signature.public(Path(file)) for file in keys}
    if run.is_file() and run.suffix == ".jsonl":
        return _verify_ledger(run, signers, published)
    if run.is_file():
        if keys or head or ledger:
            rule = "a card by itself has no signature and no ledger: give the run folder"
            raise InvalidInput("--key" if keys else "--head" if head else "--ledger", str(run), rule)
        return _verify_card(run)
    if not run.is_dir():
        raise InvalidInput("run", str(run), "is not a folder, nor a card")
    if not (run / cards.NAME).is_file():
        if (run / LEDGER).is_file() or (run / "plan.json").is_file():
            return [Finding(cards.NAME, False, "is missing: the run is unfinished; resume it with dpfy train --resume")]
        raise InvalidInput("run", str(run), "holds no dpfy run")
    findings: list[Finding] = []
    read = _read(run, findings)
    if read is not None:
        findings += [_run(what, test, read) for what, test in CHECKS.items()]
        if ledger is not None:
            findings.append(_guarded("billed in the ledger of the data set", lambda: _billed(read, ledger)))
        findings += _witnesses(read.ledger, lambda: signature.of_run(run), signers, published)
    return findings


def _verify_ledger(file: Path, signers: dict[str, str], published: Signed | None) -> list[Finding]:
    """A ledger by itself: every line, every rule, and that it extends what was published."""
    try:
        ledger = Ledger.read(file)
    except Corrupt as problem:
        return [Finding(file.name, False, problem.problem)]
    return [
        Finding(file.name, True, f"is whole; its head is {ledger.head}"),
        *_witnesses(ledger, lambda: None, signers, published),
    ]


def _witnesses(
    ledger: Ledger, signed: Callable[[], Signed | None], signers: dict[str, str], published: Signed | None
) -> list[Finding]:
    """What others have signed or published about the run."""
    found = []
    if published is not None:
        wrong = None if ledger.extends(published.head) else "the ledger does not extend the published head: lines were exchanged"
        found.append(Finding("ledger extends the published head", *_outcome(wrong)))
    what = "signed by the keys given" if signers else signature.CHECK
    return [*found, _guarded(what, lambda: signature.judged(signed(), published, signers))]


def _verify_card(file: Path) -> list[Finding]:
    """What can be checked without the run: form, digest, and that every number follows from the plan and accesses it states."""
    try:
        card = load_card(file)
        read = Evidence(None, card, recompute.stated_ledger(card))
    except Corrupt as problem:
        return [Finding(file.name, False, problem.problem)]
    findings = [Finding(file.name, True, "is whole")]
    findings += [_run(what, test, read) for what, test in CARD_CHECKS.items()]
    left = "ledger, model, configuration, metrics and erased secrets: verify the run folder for these"
    return [*findings, Finding("not checked from a card alone", True, left)]


def _read(folder: Path, findings: list[Finding]) -> Evidence | None:
    """The card and the ledger; each is a finding of its own, so that several damaged files are all named."""
    loaders: dict[str, Callable[[], Any]] = {
        cards.NAME: lambda: load_card(folder / cards.NAME),
        LEDGER: lambda: Ledger.read(folder / LEDGER),
    }
    loaded: dict[str, Any] = {}
    for name, load in loaders.items():
        try:
            loaded[name] = load()
            findings.append(Finding(name, True, "is whole"))
        except Corrupt as problem:
            findings.append(Finding(name, False, problem.problem))
    return Evidence(folder, loaded[cards.NAME], loaded[LEDGER]) if len(loaded) == len(loaders) else None


def load_card(path: Path) -> dict[str, Any]:
    """The card in a file; `Corrupt` if it is not whole."""
    raw = reading.content("card", path)
    try:
        card = reading.parsed_json(path.name, raw)
        content = {k: v for k, v in card.items() if k != "digest"}
        whole = card["format"] in schema.FORMATS and cards.render(card) == raw
        fits = card["digest"] == digest(content)
        found = schema.problem(card)
    except (Corrupt, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Corrupt(path.name, "is not a privacy card") from None
    if not whole:
        raise Corrupt(path.name, f"is not in the written form of {cards.FORMAT}: it was edited")
    if not fits:
        raise Corrupt(path.name, "does not match its digest: it was edited")
    if found:
        raise Corrupt(path.name, f"does not follow the schema: {found}")
    return dict(card)


def _run(what: str, test: Check, evidence: Evidence) -> Finding:
    return _guarded(what, lambda: test(evidence))


def _guarded(what: str, test: Callable[[], tuple[bool, str]]) -> Finding:
    """The outcome of a check. Files are hostile: whatever goes wrong in reading them is a check that failed."""
    try:
        holds, detail = test()
    except DpfyError as error:
        holds, detail = False, str(error)
    except Exception as error:
        holds, detail = False, f"cannot be checked: {type(error).__name__}: {error}"
    return Finding(what, holds, detail)


def _outcome(problem: str | None, good: str = "holds") -> tuple[bool, str]:
    return problem is None, problem or good


def _head(e: Evidence) -> tuple[bool, str]:
    """The card is the one with which the ledger says the run ended, and it was computed from the lines before that."""
    if e.card["ledger"] != e.ledger.basis:
        return False, f"{LEDGER} is not the ledger the card was computed from: lines were removed, added or exchanged"
    if hashlib.sha256(cards.render(e.card)).hexdigest() != e.finish["card"]:
        return False, f"{cards.NAME} is not the card with which {LEDGER} says the run ended"
    name = next(iter(e.reserved))
    if e.finish["entry"] != next(p.entry for p in e.ledger.permits() if p.name == name):
        return False, f"{LEDGER} says that something else ended than the {name} it reserves"
    done = e.view["sections"][0].get("steps_done", e.finish["steps"])
    wrong = f"{cards.NAME} steps_done is not the number of steps after which {LEDGER} says the run ended"
    made, _ = e.ledger.settlements.get(name, (done, done))
    return _outcome(None if e.finish["steps"] == done == made else wrong)


def _files(e: Evidence) -> tuple[bool, str]:
    """Every file of the run is the one that the end of the run names; the card names the same; nothing was put in their place."""
    due = {name: sha for name, sha in e.finish["files"].items() if name not in PAGES}
    names = e.differ(due) + [n for r in e.reserved.values() for n in (*r.claim.files(), *_models(r.claim)) if n not in due]
    names += [name for name in sorted(due.keys() | e.card["files"].keys()) if due.get(name) != e.card["files"].get(name)]
    own = [name for name in cards.covered(e.ledger) if name not in cards.AUDIT_FILES]
    names += [name for name in own if name not in due and e.file(name).exists()]
    wrong = f"{', '.join(dict.fromkeys(names))} does not have the hash that card and ledger state: changed, exchanged, added or removed"
    return _outcome(wrong if names else None)


def _models(claim: Claim) -> list[str]:
    """The model, which a run that trains one must have."""
    return [name for name in claim.artefacts if name == MODEL]


def _model(e: Evidence) -> tuple[bool, str]:
    if not any(_models(reserved.claim) for reserved in e.reserved.values()):
        return True, "this run releases no model"
    same = e.finish["files"].get(MODEL) == sha256_of(e.file(MODEL))
    return _outcome(None if same else f"{MODEL} is not the model the ledger says this run released")


def _claim(e: Evidence) -> tuple[bool, str]:
    """The card, and what the claims wrote down, state what was reserved, field by field."""
    source = LEDGER if e.folder is not None else "privacy.json accesses"
    parts = {part["name"]: part for part in e.view["sections"]}
    if list(parts) != list(e.reserved) or len(parts) != len(e.view["sections"]):
        return False, f"privacy.json sections are not those that {source} reserves: {', '.join(e.reserved)}"
    for name, reserved in e.reserved.items():
        if wrong := _misstated(e, name, reserved, parts[name], source):
            return False, wrong
    fixed = any(reserved.fixed_seed for reserved in e.reserved.values())
    if (e.card["provenance"]["seed"] == cards.FIXED_SEED) != fixed:
        return False, f"privacy.json provenance.seed is not the kind of seed that {source} states"
    gone = [line for reserved in e.reserved.values() for line in reserved.caveats if line not in e.card["caveats"]]
    return _outcome(f"privacy.json caveats: misses {gone[0]!r}" if gone else None)


def _misstated(e: Evidence, name: str, reserved: Reserved, part: dict[str, Any], source: str) -> str | None:
    """What one section, or a file of its claim, states otherwise than the reservation."""
    claim, permit = reserved.claim, next(p for p in e.ledger.permits() if p.name == name)
    stated = {f"privacy.json {name}": (part["claim"], claim.to_json())}
    if e.folder is not None:
        for file, due in claim.files().items():
            content = reading.content(file, e.file(file), name=file)
            stated[file] = (reading.parsed_json(file, content), reading.parsed_json(file, due))
    for what, (said, due_part) in stated.items():
        if found := differences(said, due_part):
            return f"{what} is not the claim that {source} reserves: {'; '.join(found[:3])}"
    if permit.event != reserved.due(e.ledger.settlements.get(name)):
        return f"{source} reserves another event than its own {claim.kind} describes"
    if (e.ledger.unit, e.ledger.adjacency) != (claim.unit, claim.adjacency):
        return f"{source} states another unit or adjacency than the claim (guarantee.unit, guarantee.adjacency)"
    return None


def _billed(e: Evidence, file: Path) -> tuple[bool, str]:
    """The data set's ledger holds the reservations that the run's own ledger names, with the same claims, and they have begun."""
    entries = []
    people = Ledger.read(file)
    for reserved in e.reserved.values():
        if reserved.shared is None:
            return False, f"{LEDGER} names no entry in a ledger of the data set: the run was not billed there"
        identity, entry = reserved.shared
        permit = next((p for p in people.permits() if p.entry == entry), None)
        if people.book.identity != identity or permit is None or entry not in people.book.begun:
            return False, f"{file.name} does not hold the entry that {LEDGER} names, begun and not given back"
        if Reserved.from_json(permit.claim) != replace(reserved, shared=None):
            found = differences(permit.claim, replace(reserved, shared=None).to_json())
            return False, f"{file.name} was billed for something else: {found[0]}"
        settled = people.book.settled.get(entry)
        if settled != e.ledger.settlements.get(reserved.claim.name):
            return False, f"{file.name} and {LEDGER} do not say that the run ended after the same steps"
        if (permit.event, permit.uses) != (reserved.due(settled), 1):
            return False, f"{file.name} was billed for something else: another event"
        entries.append(entry)
    return True, f"{file.name}, entry {', '.join(entries)}"


def _claims(e: Evidence) -> tuple[bool, str]:
    """Every derived field of the card is what its accountant derives now from the ledger."""
    derived = recompute.derived(e.ledger, e.card)
    if e.folder is None:
        derived.pop("ledger")
    found = recompute.differences(e.card, derived)
    return _outcome("; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "") if found else None)


def _independent(e: Evidence) -> tuple[bool, str]:
    """A second accountant, with other code and another theory, does not contradict the first."""
    problem, seen = recompute.second_opinion(e.ledger, e.view)
    return _outcome(problem, seen)


def _reports(e: Evidence) -> tuple[bool, str]:
    """Each page is, byte for byte, the one that this version of dpfy writes from card and audit; or, for a run of another version,
    the one that the run wrote."""
    missing = [name for name in PAGES if not e.file(name).is_file()]
    there = [name for name in PAGES if name not in missing]
    ours = recompute.same_version(e.card) and not first.is_first(e.card)
    changed = there if ours else e.differ({name: e.finish["files"].get(name, "") for name in there})
    if changed:
        extra = html.extras(e.file(""))
        written = {
            html.NAME: {html.render(e.card, part).encode() for part in _since(extra)},
            markdown.NAME: {markdown.render(e.card, part["audit"]).encode() for part in _since(extra)},
        }
        changed = [name for name in changed if reading.content(name, e.file(name)) not in written[name]]
    if changed:
        return False, f"{', '.join(changed)} is not the page of this card: it was edited (dpfy report writes it again)"
    return True, f"{', '.join(missing)} is not there; dpfy report writes it" if missing else "holds"


def _since(extra: dict[str, Any]) -> list[dict[str, Any]]:
    """The page may have been written before or after an audit was made."""
    return [extra, extra | {"audit": None}]


def _derived(e: Evidence) -> tuple[bool, str]:
    """Every file that was made from the released ones is the one that the ledger names."""
    held = e.ledger.book.derived
    wrong = e.differ({name: str(body["sha256"]) for name, body in held.items()})
    if wrong:
        return False, f"{', '.join(wrong)} is not what the ledger says was derived from this run: changed, exchanged or removed"
    return True, ", ".join(f"{name} from {', '.join(body['of'])}" for name, body in held.items()) or "nothing was derived"


def _audit(e: Evidence) -> tuple[bool, str]:
    """The audit in the folder is the one that was attached to the ledger, and it does not contradict the claim."""
    known = e.ledger.book.attached | {name: sha for name, sha in e.finish["files"].items() if name in cards.AUDIT_FILES}
    stray = [name for name in cards.AUDIT_FILES if name not in known and e.file(name).exists()]
    if names := e.differ(known) + stray:
        return (
            False,
            f"{', '.join(names)} is not what the ledger says was attached to this run: changed, exchanged, added or removed",
        )
    audit = html.extras(e.file(""))["audit"]
    if audit is None:
        return True, "there is no audit.json"
    return _outcome(html.contradiction(e.card, audit), f"audit.json: epsilon is at least {audit['epsilon_lower']}")


def _secrets(e: Evidence) -> tuple[bool, str]:
    return _outcome("checkpoint/ still exists: the run's secrets were not erased" if e.file("checkpoint").exists() else None)


CARD_CHECKS: dict[str, Check] = {
    "plan matches the accesses stated": _claim,
    "every number follows from plan and accesses": _claims,
    "second accountant agrees": _independent,
}

CHECKS: dict[str, Check] = {
    "ledger and card belong together": _head,
    "files have their stated hashes": _files,
    "model is the one the ledger released": _model,
    "card and plan state what the ledger reserves": _claim,
    "every number recomputed from the ledger": _claims,
    "second accountant agrees": _independent,
    "pages say what the card says": _reports,
    "audit is the one attached and does not contradict": _audit,
    "derived files are those the ledger names": _derived,
    "secrets are erased": _secrets,
}
