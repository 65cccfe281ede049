"""Verification from outside: derive every claim of a report again from the ledger, ask a second
accountant, and check every hash.

What holds is that the files of a run agree with each other and with the ledger's chain. Who wrote
them is another question, which a published head of the ledger or a signature answers: see `levels`,
and docs/card.md for what each level proves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dpfy.core import ledger as chain
from dpfy.core import storage
from dpfy.core.claim import Claim, Reserved, differences
from dpfy.core.codec import digest
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of
from dpfy.report import card as cards
from dpfy.report import (
    html_page,
    levels,
    markdown,
    outside,
    prose,
    recompute,
    schema,
    signature,
    words,
)
from dpfy.report.levels import COMPLETION, NOTHING, Level
from dpfy.report.signature import Signed
from dpfy.report.words import is_absent

LEDGER = "ledger.jsonl"
PAGES = (html_page.NAME, markdown.NAME)
MODEL = "model.safetensors"
OUTSIDE, MARK = "files that nothing names", "end of the ledger"


OK, FAILED, NOT_CHECKED, NONE = "ok", "FAILED", "not checked", "none"


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it held, and in words why not.

    `found` is "ok" where something was checked, "not checked" where it cannot be, and "none" where
    there is nothing to check.
    """

    what: str
    holds: bool
    detail: str
    found: str = OK

    @property
    def status(self) -> str:
        """ok, FAILED, not checked or none."""
        return self.found if self.holds else FAILED


@dataclass(frozen=True)
class Verification:
    """All findings on a run, a report or a ledger, and the level they reach: who could still have
    forged it.
    """

    findings: list[Finding]
    level: Level

    @property
    def holds(self) -> bool:
        """Whether every check held."""
        return all(finding.holds for finding in self.findings)


@dataclass(frozen=True)
class RunEvidence:
    """A report with the ledger to hold it against; `folder` is None for a report by itself. `level` is
    what fixes the lines of the ledger.
    """

    folder: Path | None
    card: dict[str, Any]
    ledger: Ledger
    level: Level = NOTHING

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Every field that the ledger gives, as this version states it."""
        return recompute.derived(self.ledger, self.card)

    @cached_property
    def known(self) -> prose.Known:
        """The figures that the ledger gives."""
        return recompute.known(self.derived)

    @property
    def view(self) -> dict[str, Any]:
        """The report in the layout of the present format."""
        return words.raised(self.card)

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
            raise InvalidInput("run", None, "a report by itself has no files")
        return self.folder / name

    def differ(self, hashes: dict[str, str]) -> list[str]:
        """Which of these files are gone, or are not what their hash says."""
        return [
            name
            for name, sha in hashes.items()
            if not self.file(name).is_file() or sha256_of(self.file(name)) != sha
        ]


Outcome = tuple[bool, str] | tuple[bool, str, str]
Check = Callable[[RunEvidence], Outcome]


def verify(
    run: Path | str,
    *,
    keys: Sequence[Path | str] = (),
    head: str | None = None,
    ledger: Path | str | None = None,
) -> list[Finding]:
    """Check a finished run: recompute its guarantee, and compare every file with report and ledger.

    The run is verified if every finding holds. Its level of evidence says what that is worth
    (docs/card.md).

    Args:
        run: The run folder, a ledger, or a privacy report alone.
        keys: Public keys: the run must be signed by one of them.
        head: The hash of the last line of the ledger, if you know it from elsewhere.
        ledger: The ledger of the data set, to check what it says of this run.

    Returns:
        The findings: each has `what`, `holds` and `detail`.

    Raises:
        InvalidInput: There is nothing to check at `run`.

    Guarantees: nothing is changed, and nothing in the folder is run or imported.

    Example:
        >>> import dpfy
        >>> answers = dpfy.query(
        ...     {"age": [30, 41]}, "sum(age)", epsilon=1.0, delta=0, run="runs/ages",
        ...     schema=[dpfy.Number("age", 0, 100)],
        ... )
        >>> all(finding.holds for finding in dpfy.verify("runs/ages"))
        True
    """
    return judge(run, keys=keys, head=head, ledger=ledger).findings


def judge(
    run: Path | str,
    *,
    keys: Sequence[Path | str] = (),
    head: str | None = None,
    ledger: Path | str | None = None,
    require: str | None = None,
) -> Verification:
    """All checks on a finished run folder, on a report file or on a ledger by itself, each with its
    outcome, and the level reached.

    `keys` are public keys: each must have signed the run, or the published head. `head` is a head
    of the ledger that was published while the run lasted or at its end (64 hexadecimal digits, or
    the file that ``dpfy sign --head`` wrote): the ledger must extend it. `ledger` is that of the
    data set: the run must be charged there too. `require` is a level (start, completion, signature):
    a lower one is a check that fails, and so is a file in the folder that the level does not cover.

    Guarantees: one changed byte of any file of the run makes a check fail that names the file; a
    number of the report that the ledger does not give makes a check fail that names the field, and so
    does a sentence that states one. Damage of any kind is a check that fails, not an exception.
    What cannot be checked is a finding that says so, and names it.
    """
    verdict = _judged(run, keys, head, ledger)
    if require is None:
        return verdict
    reached = verdict.level.reaches(require)
    wanted = Finding(
        "level required", reached, f"{levels.named(require).words}; reached: {verdict.level.words}"
    )
    open_files = next(
        (f for f in verdict.findings if f.what == OUTSIDE and f.found == NOT_CHECKED), None
    )
    more = (
        [] if open_files is None else [Finding("every file is covered", False, open_files.detail)]
    )
    return Verification([*verdict.findings, wanted, *more], verdict.level)


def _judged(
    run: Path | str, keys: Sequence[Path | str], head: str | None, ledger: Path | str | None
) -> Verification:
    run, ledger = Path(run), None if ledger is None else Path(ledger)
    published = signature.published(head) if head is not None else None
    signers = {Path(file).name: signature.public(Path(file)) for file in keys}
    if run.is_file() and run.suffix == ".jsonl":
        return _verify_ledger(run, signers, published)
    if run.is_file():
        if keys or head or ledger:
            rule = "a report by itself has no signature and no ledger: give the run folder"
            raise InvalidInput(
                "--key" if keys else "--head" if head else "--ledger", str(run), rule
            )
        return Verification(_verify_card(run), NOTHING)
    if not run.is_dir():
        raise InvalidInput("run", str(run), "is not a folder, nor a report")
    if not (run / cards.NAME).is_file():
        if (run / LEDGER).is_file() or (run / "plan.json").is_file():
            unfinished = "is missing: the run is unfinished; resume it with dpfy train --resume"
            return Verification([Finding(cards.NAME, False, unfinished)], NOTHING)
        raise InvalidInput("run", str(run), "holds no dpfy run")
    findings: list[Finding] = []
    read = _read(run, findings)
    if read is None:
        return Verification(findings, NOTHING)
    witnesses, signed = _witnesses(read.ledger, lambda: signature.of_run(run), signers, published)
    read = replace(
        read,
        level=levels.of_run(read.ledger, published, by_key=signed)
        if all(w.holds for w in witnesses)
        else NOTHING,
    )
    findings += [_run(what, test, read) for what, test in CHECKS.items()]
    if ledger is not None:
        findings.append(
            _guarded("charged in the ledger of the data set", lambda: _billed(read, ledger))
        )
    return Verification(findings + witnesses, read.level)


def _verify_ledger(file: Path, signers: dict[str, str], published: Signed | None) -> Verification:
    """A ledger by itself: every line, every rule, and that it extends what was published."""
    try:
        ledger = Ledger.read(file)
    except Corrupt as problem:
        return Verification([Finding(file.name, False, problem.problem)], NOTHING)
    findings = [
        Finding(file.name, True, f"is whole; its head is {ledger.head}"),
        _guarded(MARK, lambda: _mark(file, ledger)),
        *_witnesses(ledger, lambda: None, signers, published)[0],
    ]
    level = levels.of_ledger(ledger, published) if all(f.holds for f in findings) else NOTHING
    return Verification(findings, level)


def _mark(file: Path, ledger: Ledger) -> Outcome:
    """The file that says where the ledger ends is there, and always was."""
    name = f"{file.name}.head"
    if not chain.marked(file):
        return (
            True,
            f"{name} is missing: lines at the end of the ledger may have been removed",
            NOT_CHECKED,
        )
    if lines := ledger.recovered:
        said = ", ".join(str(n) for n in lines)
        return (
            True,
            f"{name} was lost and written again on somebody's word, after line {said}",
            NOT_CHECKED,
        )
    return True, f"{name} says where the ledger ends"


def _witnesses(
    ledger: Ledger,
    signed: Callable[[], Signed | None],
    signers: dict[str, str],
    published: Signed | None,
) -> tuple[list[Finding], bool]:
    """What others have signed or published about the run, and whether one of the keys given signed
    the run itself.
    """
    found = []
    if published is not None:
        wrong = (
            None
            if ledger.extends(published.head)
            else "the ledger does not extend the published head: lines were exchanged"
        )
        found.append(Finding("ledger extends the published head", *_outcome(wrong)))
    held: list[Signed | None] = []

    def judged() -> Outcome:
        held.append(signed())
        holds, detail = signature.judged(held[0], published, signers)
        nobody = held[0] is None and (published is None or not published.signatures)
        return (
            (holds, detail)
            if signers or not holds
            else (holds, detail, NONE if nobody else NOT_CHECKED)
        )

    found.append(_guarded("signed by the keys given" if signers else signature.CHECK, judged))
    mine = held[0].signatures if held and held[0] is not None else {}
    return found, found[-1].holds and any(key in mine for key in signers.values())


def _verify_card(file: Path) -> list[Finding]:
    """What can be checked without the run: form, digest, and that every number follows from the
    plan and accesses it states.
    """
    try:
        card = load_card(file)
        read = RunEvidence(None, card, recompute.stated_ledger(card))
    except Corrupt as problem:
        return [Finding(file.name, False, problem.problem)]
    findings = [Finding(file.name, True, "is whole")]
    findings += [_run(what, test, read) for what, test in CARD_CHECKS.items()]
    left = (
        "ledger, model, configuration, metrics and erased secrets: verify the run folder for these"
    )
    return [*findings, Finding("not checked from a report alone", True, left, NOT_CHECKED)]


def _read(folder: Path, findings: list[Finding]) -> RunEvidence | None:
    """The report and the ledger; each is a finding of its own, so that several damaged files are all
    named.
    """
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
    return (
        RunEvidence(folder, loaded[cards.NAME], loaded[LEDGER])
        if len(loaded) == len(loaders)
        else None
    )


def load_card(path: Path) -> dict[str, Any]:
    """The report in a file; `Corrupt` if it is not whole."""
    raw = storage.content("card", path)
    try:
        card = storage.parsed_json(path.name, raw)
        content = {k: v for k, v in card.items() if k != "digest"}
        whole = card["format"] in schema.FORMATS and cards.render(card) == raw
        fits = card["digest"] == digest(content)
        found = schema.problem(card)
    except (Corrupt, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Corrupt(path.name, "is not a privacy report") from None
    if not whole:
        raise Corrupt(path.name, f"is not in the written form of {cards.FORMAT}: it was edited")
    if not fits:
        raise Corrupt(path.name, "does not match its digest: it was edited")
    if found:
        raise Corrupt(path.name, f"does not follow the schema: {found}")
    return dict(card)


def _run(what: str, test: Check, evidence: RunEvidence) -> Finding:
    return _guarded(what, lambda: test(evidence))


def _guarded(what: str, test: Callable[[], Outcome]) -> Finding:
    """The outcome of a check. Files are hostile: whatever goes wrong in reading them is a check
    that failed.
    """
    try:
        return Finding(what, *test())
    except DpfyError as error:
        return Finding(what, False, str(error))
    except Exception as error:
        return Finding(what, False, f"cannot be checked: {type(error).__name__}: {error}")


def _outcome(problem: str | None, good: str = "holds") -> tuple[bool, str]:
    return problem is None, problem or good


def _head(e: RunEvidence) -> tuple[bool, str]:
    """The report is the one with which the ledger says the run ended, and it was computed from the
    lines before that.
    """
    if e.card["ledger"] != e.ledger.basis:
        return (
            False,
            f"{LEDGER} is not the ledger the report was computed from: lines were removed, added or "
            f"exchanged",
        )
    if hashlib.sha256(cards.render(e.card)).hexdigest() != e.finish["card"]:
        return False, f"{cards.NAME} is not the report with which {LEDGER} says the run ended"
    name = next(iter(e.reserved))
    if e.finish["entry"] != next(p.entry for p in e.ledger.permits() if p.name == name):
        return False, f"{LEDGER} says that something else ended than the {name} it reserves"
    done = e.view["sections"][0].get("steps_done", e.finish["steps"])
    wrong = (
        f"{cards.NAME} steps_done is not the number of steps after which {LEDGER} says the run "
        f"ended"
    )
    made, _ = e.ledger.settlements.get(name, (done, done))
    return _outcome(None if e.finish["steps"] == done == made else wrong)


def _files(e: RunEvidence) -> tuple[bool, str]:
    """Every file of the run is the one that the end of the run names; the report names the same;
    nothing was put in their place.
    """
    due = {name: sha for name, sha in e.finish["files"].items() if name not in PAGES}
    names = e.differ(due) + [
        n
        for r in e.reserved.values()
        for n in (*r.claim.files(), *_models(r.claim))
        if n not in due
    ]
    names += [
        name
        for name in sorted(due.keys() | e.card["files"].keys())
        if due.get(name) != e.card["files"].get(name)
    ]
    own = [name for name in cards.covered(e.ledger) if name not in cards.AUDIT_FILES]
    names += [name for name in own if name not in due and e.file(name).exists()]
    names += [name for name in due if name not in cards.covered(e.ledger)]  # no claim announced it
    wrong = (
        f"{', '.join(dict.fromkeys(names))} does not have the hash that report and ledger state: "
        f"changed, exchanged, added or removed"
    )
    return _outcome(wrong if names else None)


def _models(claim: Claim) -> list[str]:
    """The model, which a run that trains one must have."""
    return [name for name in claim.artefacts if name == MODEL]


def _model(e: RunEvidence) -> Outcome:
    if not any(_models(reserved.claim) for reserved in e.reserved.values()):
        return True, "this run releases no model", NONE
    if e.finish["files"].get(MODEL) != sha256_of(e.file(MODEL)):
        return False, f"{MODEL} is not the model the ledger says this run released"
    if e.level.index < COMPLETION.index:
        return (
            True,
            f"{MODEL} fits the last line of {LEDGER}, which nobody outside has witnessed",
            NOT_CHECKED,
        )
    return True, f"{MODEL} is the one of {e.level.words}"


def _claim(e: RunEvidence) -> tuple[bool, str]:
    """The report, and what the claims wrote down, state what was reserved, field by field."""
    source = LEDGER if e.folder is not None else "privacy.json accesses"
    parts = {part["name"]: part for part in e.view["sections"]}
    if list(parts) != list(e.reserved) or len(parts) != len(e.view["sections"]):
        return (
            False,
            f"privacy.json sections are not those that {source} reserves: {', '.join(e.reserved)}",
        )
    for name, reserved in e.reserved.items():
        if wrong := _misstated(e, name, reserved, parts[name], source):
            return False, wrong
    fixed = any(reserved.fixed_seed for reserved in e.reserved.values())
    if (e.card["provenance"]["seed"] == cards.FIXED_SEED) != fixed:
        return False, f"privacy.json provenance.seed is not the kind of seed that {source} states"
    gone = [
        line
        for reserved in e.reserved.values()
        for line in reserved.caveats
        if line not in e.card["caveats"]
    ]
    return _outcome(f"privacy.json caveats: misses {gone[0]!r}" if gone else None)


def _misstated(
    e: RunEvidence, name: str, reserved: Reserved, part: dict[str, Any], source: str
) -> str | None:
    """What one section, or a file of its claim, states otherwise than the reservation."""
    claim, permit = reserved.claim, next(p for p in e.ledger.permits() if p.name == name)
    stated = {f"privacy.json {name}": (part["claim"], claim.to_json())}
    if e.folder is not None:
        for file, due in claim.files().items():
            content = storage.content(file, e.file(file), name=file)
            stated[file] = (storage.parsed_json(file, content), storage.parsed_json(file, due))
    for what, (said, due_part) in stated.items():
        if found := differences(said, due_part):
            return f"{what} is not the claim that {source} reserves: {'; '.join(found[:3])}"
    if permit.event != reserved.due(e.ledger.settlements.get(name)):
        return f"{source} reserves another event than its own {claim.kind} describes"
    if (e.ledger.unit, e.ledger.adjacency) != (claim.unit, claim.adjacency):
        return (
            f"{source} states another unit or adjacency than the claim (guarantee.unit, "
            f"guarantee.adjacency)"
        )
    return None


def _billed(e: RunEvidence, file: Path) -> Outcome:
    """The data set's ledger holds the reservations that the run's own ledger names, with the same
    claims; they have started, and the run that ended under them is this one.
    """
    entries, without_end = [], []
    people = Ledger.read(file)
    for reserved in e.reserved.values():
        if reserved.shared is None:
            return (
                False,
                f"{LEDGER} names no entry in a ledger of the data set: the run was not charged "
                f"there",
            )
        identity, entry = reserved.shared
        permit = next((p for p in people.permits() if p.entry == entry), None)
        if people.book.identity != identity or permit is None or entry not in people.book.begun:
            return (
                False,
                f"{file.name} does not hold the entry that {LEDGER} names, started and not given "
                f"back",
            )
        if Reserved.from_json(permit.claim) != replace(reserved, shared=None):
            found = differences(permit.claim, replace(reserved, shared=None).to_json())
            return False, f"{file.name} was charged for something else: {found[0]}"
        settled = people.book.settled.get(entry)
        if settled != e.ledger.settlements.get(reserved.claim.name):
            return (
                False,
                f"{file.name} and {LEDGER} do not say that the run ended after the same steps",
            )
        if (permit.event, permit.uses) != (reserved.due(settled), 1):
            return False, f"{file.name} was charged for something else: another event"
        ended = people.book.ended.get(entry)
        if ended is not None and ended != e.finish["card"]:
            return (
                False,
                f"{file.name} says that the run of entry {entry} ended with another report than "
                f"{cards.NAME}",
            )
        entries.append(entry)
        without_end += [entry] if ended is None else []
    if without_end:
        return (
            True,
            f"{file.name}, entry {', '.join(entries)}; it does not say that the run ended",
            NOT_CHECKED,
        )
    return True, f"{file.name}, entry {', '.join(entries)}"


def _claims(e: RunEvidence) -> Outcome:
    """Every derived field of the report is what its accountant derives now from the ledger."""
    derived = {
        key: value for key, value in e.derived.items() if e.folder is not None or key != "ledger"
    }
    found = recompute.differences(e.card, derived)
    return _outcome(_some(found) if found else None)


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")


def _wording(e: RunEvidence) -> Outcome:
    """Sentences of another version of dpfy: their numbers were compared, their words cannot be."""
    version = e.card["provenance"]["dpfy"]
    if recompute.same_version(e.card):
        return True, "every sentence is the one that this version writes"
    changed = recompute.reworded(e.card, e.derived)
    if not changed:
        return (
            True,
            f"made by version {version}; every sentence is the one that this version writes too",
        )
    said = (
        f"wording not compared (made by version {version}): {_some(changed)}; from the ledger this "
        f"version writes: "
    )
    return True, said + e.derived["statement"], NOT_CHECKED


def _told(e: RunEvidence) -> Outcome:
    """What only the run knew is the publisher's word, and must not state a privacy figure that the
    ledger does not give.
    """
    facts = recompute.told(e.card, e.derived)
    wrong = recompute.invented(facts | recompute.reserved_words(e.derived), e.known)
    if wrong:
        return False, f"{cards.NAME}: {_some(wrong)}"
    told = [key for key, value in facts.items() if not is_absent(value)]
    files = [
        name
        for name in ("metrics.jsonl", cards.CONFIG)
        if e.folder is not None and e.file(name).is_file()
    ]
    return True, f"given by the run alone: {', '.join([*sorted(told), *files])}", NOT_CHECKED


def _curve_of_run(e: RunEvidence) -> Outcome:
    """The epsilons that metrics.jsonl states for the steps of training are those of the plan."""
    rows = html_page.extras(e.file(""))["metrics"]
    stated = [(row.get("step"), row["epsilon"]) for row in rows if "epsilon" in row]
    plans = [
        plan
        for reserved in e.reserved.values()
        if (plan := getattr(reserved.claim, "plan", None)) is not None
    ]
    if not stated:
        return True, "metrics.jsonl states no epsilon", NONE
    if len(plans) != 1:
        return (
            False,
            "metrics.jsonl states epsilons, and the ledger reserves no training that they could be "
            "about",
        )
    for step, said in stated:
        if not recompute.same_number(said, plans[0].epsilon_after(step)):
            return (
                False,
                f"metrics.jsonl says epsilon {said} after step {step}, the plan gives "
                f"{plans[0].epsilon_after(step):.6g}",
            )
    return True, f"{len(stated)} epsilons in metrics.jsonl are those of the plan"


def _independent(e: RunEvidence) -> Outcome:
    """A second accountant, with other code and another theory, does not contradict the first."""
    problem, seen = recompute.second_opinion(e.ledger, e.view)
    return (
        (False, problem)
        if problem
        else (True, seen, OK if seen.startswith("dp-accounting") else NOT_CHECKED)
    )


def _reports(e: RunEvidence) -> Outcome:
    """Each page is, byte for byte, the one that this version of dpfy writes from report and audit. A
    page of another version is held to its numbers, and to the hash that the end of the run
    states.
    """
    missing = [name for name in PAGES if not e.file(name).is_file()]
    extra = html_page.extras(e.file(""))
    written = {
        html_page.NAME: [html_page.render(e.card, part) for part in _since(extra)],
        markdown.NAME: [markdown.render(e.card, part["audit"]) for part in _since(extra)],
    }
    ours = recompute.same_version(e.card) and not words.is_first(e.card)
    foreign, audited = [], []
    for name in PAGES:
        if name in missing:
            continue
        content, (full, bare) = storage.content(name, e.file(name)), written[name]
        if content in (full.encode(), bare.encode()):
            audited += [name] if content != bare.encode() else []
            continue
        if ours or hashlib.sha256(content).hexdigest() != e.finish["files"].get(name, ""):
            return (
                False,
                f"{name} is not the page of this report: it was edited (dpfy report writes it again)",
            )
        if wrong := outside.strange_numbers(name, content, e.card, e.known, full):
            return (
                False,
                f"{name} is not the page of this report: it states {wrong} (dpfy report writes it "
                f"again)",
            )
        foreign.append(name)
    if foreign:
        version = e.card["provenance"]["dpfy"]
        return (
            True,
            f"wording of {', '.join(foreign)} not compared (made by version {version}; dpfy report "
            f"writes it again)",
            NOT_CHECKED,
        )
    if audited:
        return (
            True,
            f"{', '.join(audited)}: as this version writes it; figures of audit.json in it are the "
            f"publisher's",
            NOT_CHECKED,
        )
    if len(missing) == len(PAGES):
        return True, f"{', '.join(missing)} are not there; dpfy report writes them", NONE
    return True, f"{', '.join(missing)} is not there; dpfy report writes it" if missing else "holds"


def _since(extra: dict[str, Any]) -> list[dict[str, Any]]:
    """The page may have been written before or after an audit was made."""
    return [extra, extra | {"audit": None}]


def _derived(e: RunEvidence) -> Outcome:
    """Every file that was made from the released ones is the one that the ledger names. What went
    into it, its author alone knows.
    """
    held = e.ledger.book.derived
    wrong = e.differ({name: str(body["sha256"]) for name, body in held.items()})
    if wrong:
        return (
            False,
            f"{', '.join(wrong)} is not what the ledger says was derived from this run: changed, "
            f"exchanged or removed",
        )
    words = {name: {"how": body["how"], "public": body["public"]} for name, body in held.items()}
    if invented := recompute.invented(words, e.known):
        return False, f"{LEDGER}: {_some(invented)}"
    if not held:
        return True, "nothing was derived", NONE
    rows = ", ".join(f"{name} from {', '.join(body['of'])}" for name, body in held.items())
    return (
        True,
        f"derived by the user's statement: {rows}; whether private data went in cannot be seen",
        NOT_CHECKED,
    )


def _audit(e: RunEvidence) -> Outcome:
    """The audit in the folder is the one that was attached to the ledger, fits its own figures, and
    does not contradict the claim.
    """
    known = e.ledger.book.attached | {
        name: sha for name, sha in e.finish["files"].items() if name in cards.AUDIT_FILES
    }
    stray = [name for name in cards.AUDIT_FILES if name not in known and e.file(name).exists()]
    stray += [name for name in known if name not in cards.AUDIT_FILES]
    if names := e.differ(known) + stray:
        return (
            False,
            f"{', '.join(names)} is not what the ledger says was attached to this run: changed, "
            f"exchanged, added or removed",
        )
    if not known:
        return True, "no audit is attached", NONE
    audit = html_page.extras(e.file(""))["audit"]
    if audit is not None and (
        wrong := html_page.contradiction(e.card, audit) or outside.audit_problem(audit)
    ):
        return False, wrong
    figure = "" if audit is None else f"audit.json: epsilon is at least {audit['epsilon_lower']}; "
    return (
        True,
        f"{figure}{', '.join(sorted(known))}: attached by the publisher, figures not measured "
        f"again",
        NOT_CHECKED,
    )


def _outside(e: RunEvidence) -> Outcome:
    """No file lies in the folder that neither claim nor ledger names, but for texts and pictures,
    which are named here.
    """
    book = e.ledger.book
    named = {
        *e.finish["files"],
        *book.attached,
        *book.derived,
        LEDGER,
        f"{LEDGER}.head",
        cards.NAME,
        signature.NAME,
        *PAGES,
    }
    refused, open_ = outside.unnamed(e.file(""), named)
    if refused:
        return (
            False,
            f"{', '.join(refused)}: named by no claim and not in the ledger; remove it, or add it "
            f"(dpfy report derive)",
        )
    if open_:
        return True, f"not covered by anything above: {', '.join(open_)}", NOT_CHECKED
    return True, "every file in the folder is named by the ledger"


def _secrets(e: RunEvidence) -> tuple[bool, str]:
    return _outcome(
        "checkpoint/ still exists: the run's secrets were not erased"
        if e.file("checkpoint").exists()
        else None
    )


CARD_CHECKS: dict[str, Check] = {
    "plan matches the accesses given": _claim,
    "every number follows from plan and accesses": _claims,
    "wording": _wording,
    "facts of the run": _told,
    "second accountant agrees": _independent,
}

CHECKS: dict[str, Check] = {
    "ledger and report belong together": _head,
    "files have the hashes in the report": _files,
    "model is the one the ledger released": _model,
    "report and plan state what the ledger reserves": _claim,
    "every number recomputed from the ledger": _claims,
    "wording": _wording,
    "facts of the run": _told,
    "epsilon of every step": _curve_of_run,
    "second accountant agrees": _independent,
    "pages say what the report says": _reports,
    "audit is the one attached and does not contradict": _audit,
    "derived files are those the ledger names": _derived,
    OUTSIDE: _outside,
    MARK: lambda e: _mark(e.file(LEDGER), e.ledger),
    "secrets are erased": _secrets,
}
