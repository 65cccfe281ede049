"""Lines chained by hash, and how much of them is durable.

One line is ``{"body": {...}, "hash": h, "previous": p}`` in canonical JSON, where h is the SHA-256
of p and the body; h of the last line is the head. Beside a chain lies its mark, ``NAME.head``:
length, number of lines and head of what is durable, written before the first line and after every
append. A line that a crash cut short lies beyond the mark and was never promised to anybody; bytes
missing before the mark were lost. A chain without its mark may have lost lines, and takes no more.

The ledger: what may be spent is written down, durably, before any data is read. Append-only,
hash-chained, locked.

The first line is the header (unit, adjacency, budget). A run folder holds its own ledger; a data
set may have one across runs, with a budget. How lines are chained and made durable is in `chain`,
what they may say in `book`, how one process excludes others in `lock`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dpfy.core import check, events, storage
from dpfy.core.codec import canonical
from dpfy.core.errors import BudgetExceeded, Corrupt, InvalidInput, Unsupported
from dpfy.core.guarantee import Accountant, Guarantee, html_table
from dpfy.core.ledger_rules import VERSION, LedgerRules
from dpfy.core.storage import hold, locked, sha256_of, sync_folder, write_atomically
from dpfy.core.unit import EXAMPLE, TOKEN_WINDOW, Adjacency, Unit
from dpfy.core.values import Permit

ORIGIN = "0" * 64
MOST = 256 << 20
"""No chain is longer than this, in bytes."""
UNIT = (
    "; all releases of a ledger protect the same: say whose each row is (--person and --at-most, or "
    "unit=), or take another ledger"
)
BEGINS = b'{"body":'
"""How every line begins."""


@dataclass
class HashChain:
    """The bodies of a chain's lines, and the head after each of them."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The hash of the last line, and through it of all lines."""
        return self.heads[-1] if self.heads else ORIGIN

    def add(self, body: dict[str, Any]) -> bytes:
        """Take one more body; its line."""
        line, head = _line(self.head, body)
        self.bodies.append(body)
        self.heads.append(head)
        return line


def read(path: Path) -> HashChain:
    """The chain in a file that nobody writes to; `Corrupt` where a byte was changed, cut off or
    lost.
    """
    if not path.is_file():
        raise Corrupt(path.name, "the ledger is missing")
    mark = _mark(path)  # first, for a chain only grows
    try:
        text = storage.content("ledger", path, most=MOST)
    except InvalidInput as problem:
        raise Corrupt(path.name, problem.rule) from None
    chain = parse(path.name, text)
    _within(path.name, text, chain, mark)
    return chain


def recognise(path: Path) -> None:
    """Refuse, before anybody opens it for writing, a file that holds something else and one that is
    not there any more.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if (
            path.is_symlink()
        ):  # as when a disk is missing: an empty ledger in its place would forget what was spent
            raise InvalidInput(
                "ledger",
                str(path),
                "is a link to a file that is not there; bring it back or remove the link",
            ) from None
        if (mark := _mark(path)) is not None and mark["entries"] > 0:
            raise Corrupt(path.name, _lost(0, mark)) from None
        return
    except (OSError, ValueError):
        return  # nothing that can be read: opening it for writing says why
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidInput("ledger", str(path), f"must be a file, and is {storage.kind(mode)}")
        first = os.read(handle, len(BEGINS))
    except OSError as problem:  # as memory that looks like a file does
        raise InvalidInput("ledger", str(path), storage.why(problem, "cannot be read")) from None
    finally:
        os.close(handle)
    if not BEGINS.startswith(first):
        raise Corrupt(path.name, "line 1 is not a ledger entry")


def load(path: Path, handle: int) -> HashChain:
    """The chain in a locked file. A last line that a crash cut short before it was durable is
    removed.

    Guarantees: nothing that was ever durable is dropped: where the mark does not prove that a torn
    line was not, it is `Corrupt`. So is a chain whose mark is missing: lines at its end may have
    been removed, and what they reserved would be free again (:func:`recover`).
    """
    text = _read_all(path.name, handle)
    mark = _mark(path)
    if mark is None:
        if text:
            raise Corrupt(path.name, _unmarked(path.name))
        return HashChain()
    if text and not text.endswith(b"\n"):
        text = _mended(path.name, handle, text, mark)
    chain = parse(path.name, text)
    _within(path.name, text, chain, mark)
    if mark["length"] < len(text):  # a crash came between line and mark
        os.fsync(handle)
        _write_mark(path, chain, len(text))
    return chain


def append(path: Path, handle: int, chain: HashChain, body: dict[str, Any]) -> None:
    """Write one more line to a locked file.

    Guarantees: on return line and mark are on disk; a full disk leaves the chain as it was.
    """
    line, _ = _line(chain.head, body)
    start = os.lseek(handle, 0, os.SEEK_END)
    if start + len(line) > MOST:
        raise InvalidInput("ledger", path.name, f"would grow beyond {MOST} bytes; begin a new one")
    if not chain.bodies:
        _write_mark(
            path, chain, 0
        )  # before the first line: so a chain without a mark has always lost it
    try:
        view = memoryview(line)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, start)
        raise
    chain.add(body)
    _write_mark(path, chain, start + len(line))


def recover(path: Path, handle: int, head: str) -> HashChain:
    """The whole chain in a locked file whose mark is lost, with a new mark, if its last line is the
    one whose hash is `head`.

    The caller states the head, and so that no line after it was removed. A mark that is there is
    never replaced.
    """
    chain = parse(path.name, text := _read_all(path.name, handle))
    if _mark(path) is not None:
        raise InvalidInput(
            "ledger", path.name, f"has its {mark_of(path).name}: there is nothing to recover"
        )
    if not text or head != chain.head:
        raise InvalidInput(
            "--head",
            head,
            f"is not the hash of the last line of {path.name}: lines are missing; bring back a "
            f"copy",
        )
    _write_mark(path, chain, len(text))
    return chain


def marked(path: Path) -> bool:
    """Whether the mark of the chain at `path` is there."""
    return os.path.lexists(mark_of(path))


def mark_of(path: Path) -> Path:
    """Where the mark of the chain at `path` lies."""
    return path.with_name(path.name + ".head")


def parse(name: str, text: bytes) -> HashChain:
    """Check every line and every hash."""
    if text and not text.endswith(b"\n"):
        raise Corrupt(name, "the last line is cut short")
    chain = HashChain()
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            body = storage.parsed_json(name, line)["body"]
            if not isinstance(body, dict):
                raise TypeError
            expected = chain.add(body)
        except (Corrupt, ValueError, KeyError, TypeError, RecursionError):
            raise Corrupt(name, f"line {number} is not a ledger entry") from None
        if expected != line + b"\n":
            raise Corrupt(
                name,
                f"line {number} does not match its hash: it was changed, or a line before it was "
                f"removed",
            )
    return chain


def _line(previous: str, body: dict[str, Any]) -> tuple[bytes, str]:
    head = hashlib.sha256((previous + canonical(body)).encode()).hexdigest()
    return (canonical({"body": body, "hash": head, "previous": previous}) + "\n").encode(), head


def _mark(path: Path) -> dict[str, Any] | None:
    file = mark_of(path)
    if not os.path.lexists(file):
        return None
    try:
        mark = storage.parsed_json(file.name, storage.content("ledger", file, most=1 << 12))
        if (
            type(mark["length"]) is not int
            or type(mark["entries"]) is not int
            or not isinstance(mark["head"], str)
        ):
            raise TypeError
    except InvalidInput as problem:
        raise Corrupt(file.name, problem.rule) from None
    except (Corrupt, KeyError, TypeError):
        raise Corrupt(
            file.name, "is damaged: it holds length, entries and head of the ledger beside it"
        ) from None
    return dict(mark)


def _write_mark(path: Path, chain: HashChain, length: int) -> None:
    stated = {"entries": len(chain.bodies), "head": chain.head, "length": length}
    write_atomically(mark_of(path), (canonical(stated) + "\n").encode())


def _within(name: str, text: bytes, chain: HashChain, mark: dict[str, Any] | None) -> None:
    """What the mark says is durable is there."""
    if mark is None:
        return
    entries = mark["entries"]
    if len(text) < mark["length"] or len(chain.heads) < entries:
        raise Corrupt(name, _lost(len(text), mark))
    if entries < 0 or mark["head"] != (chain.heads[entries - 1] if entries else ORIGIN):
        raise Corrupt(
            name,
            f"is not the ledger that {name}.head was written for; bring back the two files that "
            f"belong together",
        )


def _unmarked(name: str) -> str:
    return (
        f"has lost {name}.head: lines at its end may have been removed, and their budget must not "
        f"come back; bring back both files, "
        "or state its head (dpfy ledger recover)"
    )


def _lost(length: int, mark: dict[str, Any]) -> str:
    return (
        f"has {length} bytes where {mark['length']} in {mark['entries']} lines were durable: lines "
        f"that were reserved are lost; "
        "bring the file back from a copy"
    )


def _read_all(name: str, handle: int) -> bytes:
    os.lseek(handle, 0, os.SEEK_SET)
    parts, left = [], MOST + 1
    while left > 0 and (part := os.read(handle, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise Corrupt(name, f"holds more than {MOST} bytes")
    return b"".join(parts)


def _mended(name: str, handle: int, text: bytes, mark: dict[str, Any]) -> bytes:
    """Deal with a last line without its end: keep it if it is whole, drop it if the mark proves
    that it was never durable.
    """
    whole, _, tail = text.rpartition(b"\n")
    whole = whole + b"\n" if whole else b""
    try:
        parse(name, whole + tail + b"\n")
    except Corrupt:
        if len(whole) < mark["length"]:
            raise Corrupt(name, _lost(len(text), mark)) from None
        os.ftruncate(handle, len(whole))
    else:
        whole = whole + tail + b"\n"
        os.lseek(handle, 0, os.SEEK_END)
        os.write(handle, b"\n")
    os.fsync(handle)
    return whole


__all__ = ["COPIED", "VERSION", "Ledger", "LedgerBudget", "Permit", "hold", "require_place"]

COPIED = (
    "resume it in the folder where it began (renaming it is fine, copying it or restoring a backup "
    "is not), or start a new run"
)

RECOVERED = "mark recovered"
"""The kind of note that says that somebody given the head of a ledger whose mark was lost."""


class LedgerBudget(Protocol):
    """A limit on all that a ledger may ever hold, valid for requests chosen after seeing earlier
    results.
    """

    def why_not(
        self,
        spent: Sequence[events.Event],
        asked: events.Event,
        adjacency: Adjacency,
        first: events.Event | None = None,
    ) -> str | None:
        """None if `asked` still fits after `spent`; otherwise one sentence with the figures.
        `first` is the first reservation as made.
        """

    def to_json(self) -> dict[str, Any]:
        """The terms of the budget, for the ledger's header."""


@dataclass
class Ledger:
    """An append-only file of what releases cost, written before the data is read.

    Open one with `Ledger.open(path)`, which makes it, or `Ledger.read(path)`, which never changes
    it.

    Args:
        path: The file.
        chain: The lines, chained by hash.
        book: What the lines may say, checked whenever they are read.

    Guarantees: `reserve` returns only after the entry is on disk, so a crash can only over-report;
    entries are chained by hash, so a changed or removed byte is found; all requests of one file
    pass one lock, so two processes cannot spend the same budget. A line that the rules do not
    allow (a reservation given back after its release began, or ended twice) is `Corrupt`.

    Example:
        >>> from pathlib import Path
        >>> import dpfy
        >>> people = dpfy.Dataset(
        ...     {"age": [30, 41]}, [dpfy.Number("age", 0, 100)], ledger="people.jsonl",
        ...     budget=dpfy.Budget(2, 1e-6),
        ... )
        >>> answers = dpfy.query(people, "sum(age)", epsilon=0.5)
        >>> len(dpfy.Ledger.read(Path("people.jsonl")).permits())
        1
    """

    path: Path
    chain: HashChain = field(default_factory=HashChain)
    book: LedgerRules = field(default_factory=LedgerRules)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        unit: Unit = EXAMPLE,
        adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
        budget: LedgerBudget | None = None,
    ) -> Ledger:
        """Open the ledger at `path`, creating it with this unit, adjacency and budget; an existing
        one must have the same.

        How many records of a user, or of another owner of several, a release reads is its own
        affair: the unit is all of that owner's data.
        """
        recognise(path)
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        terms = {
            "unit": unit.to_json(),
            "adjacency": adjacency.value,
            "budget": budget.to_json() if budget else None,
        }
        ledger = cls(path)
        with locked(path, wait=True) as handle:
            ledger._load(handle)
            if not ledger.bodies:
                header = {
                    "type": "ledger",
                    "version": VERSION,
                    "ledger": secrets.token_hex(8),
                    **terms,
                }
                ledger._append(handle, header)
                sync_folder(path.parent)
        _same_terms(path, ledger.bodies[0], terms)
        return ledger

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Read and check a ledger without changing it: every line, every hash, every rule."""
        held = read(path)
        if not held.bodies:
            raise Corrupt(path.name, "the ledger is empty")
        return cls(path, held, LedgerRules.of(path.name, held.bodies))

    @classmethod
    def recover(cls, path: Path, head: str) -> Ledger:
        """Write the lost mark (``NAME.head``) of a whole ledger again. `head` is the hash of its
        last line, known from elsewhere.

        Guarantees: a ledger whose last line has another hash stays refused, so lines that were
        removed cannot be forgotten unless the caller states that they never were; a ledger that can
        still grow keeps a note of that statement.
        """
        if not path.is_file():
            raise InvalidInput("ledger", str(path), "is not a ledger")
        recognise(path)
        ledger = cls(path)
        with locked(path, wait=True, create=False) as handle:
            ledger.chain = recover(path, handle, head)
            ledger.book = LedgerRules.of(path.name, ledger.bodies)
            if ledger.book.finish is None:
                facts = {"head": head, "entries": len(ledger.bodies)}
                ledger._append(handle, {"type": "note", "kind": RECOVERED, "facts": facts})
        return ledger

    @property
    def recovered(self) -> list[int]:
        """After which lines the mark of this ledger was lost, and written again on somebody's
        word.
        """
        return [
            n
            for n, body in enumerate(self.bodies)
            if body["type"] == "note" and body["kind"] == RECOVERED
        ]

    @property
    def unit(self) -> Unit:
        """Whose data is protected."""
        return self.book.unit

    @property
    def adjacency(self) -> Adjacency:
        """Which change of the data is hidden."""
        return self.book.adjacency

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Every line, as it stands in the file this object last read."""
        return self.chain.bodies

    @property
    def head(self) -> str:
        """The hash of the last line, and through it of all of them: publish it, and no line can be
        exchanged unseen.
        """
        return self.chain.head

    @property
    def basis(self) -> dict[str, Any]:
        """Head and number of the lines before the end of the run: what its report is computed
        from.
        """
        before = [n for n, b in enumerate(self.bodies) if b["type"] == "finish"]
        count = before[0] if before else len(self.bodies)
        return {"head": self.chain.heads[count - 1], "entries": count}

    def extends(self, head: str) -> bool:
        """Whether these lines, or the first of them, are those whose head was published as
        `head`.
        """
        return head in self.chain.heads

    def reserve(
        self,
        name: str,
        event: events.Event,
        uses: int = 1,
        *,
        budget: LedgerBudget | None = None,
        claim: Mapping[str, Any] | None = None,
        returnable: bool = False,
        run: str | None = None,
    ) -> Permit:
        """Write down `uses` releases of `event`, with the `claim` made about them, and return the
        right to make them.

        Call before reading any data. `run` is the name of the folder of the run, for readers of the
        ledger of a data set; nothing follows from it. A `returnable` reservation can be given back by `void` as long
        as it has not started; its permit allows no release before `begin`. Every other one is spent
        from now on.

        Guarantees: durable on return; refused with BudgetExceeded, and nothing written, if the
        ledger's budget does not allow it. A ledger with a budget takes no reservation without that
        same budget.
        """
        check.integer("uses", uses)
        entry = secrets.token_hex(8)
        body = {
            "type": "reserve",
            "entry": entry,
            "name": name,
            "event": events.CODEC.encode(event),
            "uses": uses,
        }
        body |= {"claim": dict(claim or {}), "returnable": returnable, "time": int(time.time())}
        body |= {} if run is None else {"run": run}
        with locked(self.path, wait=True) as handle:
            self._load(handle)
            if (budget.to_json() if budget else None) != self.terms:
                raise InvalidInput(
                    "budget",
                    budget and budget.to_json(),
                    f"{self.path.name} was created with {self.terms}",
                )
            whole = events.Repeated(event, uses)
            if budget and (
                refusal := budget.why_not(self.spent(), whole, self.adjacency, self.first)
            ):
                raise BudgetExceeded(f"{self.path.name}: {refusal}")
            self._append(handle, body)
        return self.book.reserved[entry]

    def begin(self, permit: Permit, place: str | None = None) -> Permit:
        """Write down that releases under a returnable reservation will now be made; the permit that
        allows them. Safe to call again.

        `place` recognises the folder that makes them. Anyone who names another one is refused from
        then on.
        """
        with locked(self.path, wait=True) as handle:
            self._load(handle)
            if permit.entry not in self.book.begun:
                self._append(
                    handle,
                    {"type": "begun", "entry": permit.entry}
                    | ({} if place is None else {"place": place}),
                )
            if place is not None:
                require_place(self.book.places.get(permit.entry), place, self.path.name)
        return self.book.reserved[permit.entry]

    def settle(self, permit: Permit, *, made: int, billed: int) -> Permit:
        """Write down that `made` releases are all that there will be, and `billed` what is charged;
        the closed permit. Safe to repeat.

        Guarantees: durable on return, and final: nothing is released under the permit any more. The
        claim must have named `billed` when it was reserved, and it is never less than `made`.
        """
        with locked(self.path, wait=True) as handle:
            self._load(handle)
            if self.book.settled.get(permit.entry) != (made, billed):
                self._append(
                    handle,
                    {"type": "settle", "entry": permit.entry, "made": made, "billed": billed},
                )
        return self.book.reserved[permit.entry]

    def void(self, permit: Permit, reason: str) -> None:
        """Give back a returnable reservation that has not started: nothing was released, and its
        run's secret is already destroyed.
        """
        self._write({"type": "void", "entry": permit.entry, "reason": reason})

    def end(self, entry: str, card: str) -> None:
        """Write down, in the ledger of a data set, that the run which made this reservation ended
        with this report. Safe to repeat.

        Guarantees: a reservation has one end. A second one, with another report, is refused.
        """
        with locked(self.path, wait=True) as handle:
            self._load(handle)
            if self.book.ended.get(entry) != card:
                self._append(handle, {"type": "end", "entry": entry, "card": card})

    def finish(self, permit: Permit, *, steps: int, card: str, files: Mapping[str, str]) -> None:
        """Write the one end of the run: SHA-256 of its report and of its files. Safe to call again
        with the same.
        """
        body = {
            "type": "finish",
            "entry": permit.entry,
            "steps": steps,
            "card": card,
            "files": dict(files),
        }
        with locked(self.path, wait=True) as handle:
            self._load(handle)
            if self.book.finish != body:
                self._append(handle, body)

    def attach(self, names: Iterable[str]) -> None:
        """Write the SHA-256 of files that were added to the finished run beside this ledger, those
        of an audit for one.
        """
        self._write(
            {
                "type": "attach",
                "files": {name: sha256_of(self.path.parent / name) for name in names},
            }
        )

    def derive(self, name: str, *, of: Sequence[str], how: str, public: str) -> None:
        """Write down a file beside the finished run that was made from its files `of`, and from
        public data alone.
        """
        sha = sha256_of(self.path.parent / name)
        self._write(
            {
                "type": "derive",
                "file": name,
                "sha256": sha,
                "of": list(of),
                "how": how,
                "public": public,
            }
        )

    def note(self, kind: str, **facts: Any) -> None:
        """Append a fact for readers. Nothing is computed from notes: what changes a charge is part of
        the claim of a reservation.
        """
        self._write({"type": "note", "kind": kind, "facts": facts})

    @property
    def terms(self) -> dict[str, Any] | None:
        """The budget this ledger was created with, as JSON; None for a ledger that only records."""
        return self.book.budget

    def __str__(self) -> str:
        count = len(self.permits())
        return f"Ledger {self.path.name}: {count} release{'s' * (count != 1)} reserved"

    def _repr_html_(self) -> str:
        rows = [(p.name, type(p.event).__name__, f"{p.uses:,}") for p in self.permits()]
        return html_table(f"Ledger {self.path.name}", [("release", "event", "uses"), *rows])

    def permits(self) -> list[Permit]:
        """Every reservation so far, less those given back, as they stand in the file this object
        last read.
        """
        return self.book.permits()

    def spent(self) -> list[events.Event]:
        """Every reservation as an event with its count."""
        return [events.Repeated(p.event, p.uses) for p in self.permits()]

    @property
    def settlements(self) -> dict[str, tuple[int, int]]:
        """By the names of reservations that ended early, how many releases were made and how many
        are charged.
        """
        return {
            self.book.reserved[entry].name: settled for entry, settled in self.book.settled.items()
        }

    @property
    def first(self) -> events.Event | None:
        """The first reservation, as it was made."""
        return None if self.book.first is None else self.book.first[1]

    def event(self) -> events.Event:
        """All reservations composed: the charge."""
        return events.Composed(tuple(self.spent()))

    def guarantee(
        self, accountant: Accountant, caveats: tuple[str, ...] = (), trust: str = "central"
    ) -> Guarantee:
        """The guarantee of everything reserved in this ledger, whether or not it was used."""
        curve = accountant.curve(self.event(), self.adjacency)
        return Guarantee(curve, accountant.name, self.adjacency, self.unit, trust, caveats)

    def refresh(self) -> None:
        """Read again what other processes may have appended."""
        with locked(self.path, wait=True) as handle:
            self._load(handle)

    def _write(self, body: dict[str, Any]) -> None:
        with locked(self.path, wait=True) as handle:
            self._load(handle)
            self._append(handle, body)

    def _load(self, handle: int) -> None:
        self.chain = load(self.path, handle)
        self.book = LedgerRules.of(self.path.name, self.chain.bodies)

    def _append(self, handle: int, body: dict[str, Any]) -> None:
        """Write a line that the rules allow, judged on what the file holds now."""
        written = _as_written(body)
        self.book.add(written)
        try:
            append(self.path, handle, self.chain, written)
        except BaseException:
            self.book = LedgerRules.of(self.path.name, self.bodies)
            raise


def require_place(held: str | None, place: str | None, ledger: str) -> None:
    """Refuse releases from another folder than the one that the ledger names. None is what earlier
    versions wrote, and fits all.
    """
    if held is not None and held != place:
        raise Unsupported(
            f"going on with a run that {ledger} says was started in another folder", COPIED
        )


def _as_written(body: dict[str, Any]) -> dict[str, Any]:
    """The body as a reader will find it."""
    try:
        read: dict[str, Any] = json.loads(canonical(body))
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput(
            str(body.get("type")), body, "must be made of what JSON can hold"
        ) from None
    return read


def _same_owner(unit: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two units are the same owner of records, of which releases read different parts:
    numbers of records, or of tokens. Of an example another number of tokens is another unit.
    """
    whose = [
        {key: value for key, value in one.items() if key not in ("most_records", "tokens")}
        for one in (unit, other)
    ]
    return bool(whose[0] == whose[1] and unit["name"] not in (EXAMPLE.name, TOKEN_WINDOW))


def _same_terms(path: Path, header: dict[str, Any], terms: dict[str, Any]) -> None:
    for key, value in terms.items():
        if key == "budget" and value is None:
            continue  # opening needs no budget; reserving does
        if header[key] != value and not (key == "unit" and _same_owner(header[key], value)):
            raise InvalidInput(
                f"ledger {key}",
                value,
                f"{path.name} was created with {header[key]}{UNIT if key == 'unit' else ''}",
            )
