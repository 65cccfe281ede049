"""The ledger: what may be spent is written down, durably, before any data is read. Append-only, hash-chained, locked.

One line is ``{"body": {...}, "hash": h, "previous": p}`` in canonical JSON, where h is the SHA-256 of p and the body. The first body
is the header (unit, adjacency, budget). A run folder holds its own ledger; a data set may have one across runs, with a budget.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dpfy.core import check, events
from dpfy.core.codec import canonical
from dpfy.core.errors import BudgetExceeded, Busy, Corrupt, InvalidInput
from dpfy.core.guarantee import Accountant, Guarantee
from dpfy.core.storage import sync_folder
from dpfy.core.unit import EXAMPLE, Adjacency, Unit

VERSION = 1
ORIGIN = "0" * 64


class Budget(Protocol):
    """A limit on all that a ledger may ever hold, valid for requests chosen after seeing earlier results."""

    def why_not(self, spent: Sequence[events.Event], asked: events.Event, adjacency: Adjacency) -> str | None:
        """None if `asked` still fits after `spent`; otherwise one sentence with the figures."""

    def to_json(self) -> dict[str, Any]:
        """The terms of the budget, for the ledger's header."""


@dataclass(frozen=True)
class Permit:
    """The right to make `uses` releases of `event`, already written in the ledger as `entry`."""

    name: str
    event: events.Event
    uses: int
    entry: str

    def check(self, step: int) -> None:
        """Refuse a release beyond what was reserved."""
        if not 0 <= step < self.uses:
            raise InvalidInput("step", step, f"the permit {self.name!r} covers {self.uses} releases, steps 0 to {self.uses - 1}")


@dataclass
class Ledger:
    """An append-only file of reservations.

    Guarantees: `reserve` returns only after the entry is on disk, so a crash can only over-report; entries are chained by hash, so a
    changed or removed byte is found; all of one file's requests pass one lock, so two processes cannot spend the same budget.
    """

    path: Path
    unit: Unit
    adjacency: Adjacency
    bodies: list[dict[str, Any]] = field(default_factory=list)
    head: str = ORIGIN

    @classmethod
    def open(
        cls, path: Path, *, unit: Unit = EXAMPLE, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE, budget: Budget | None = None
    ) -> Ledger:
        """Open the ledger at `path`, creating it with this unit, adjacency and budget; an existing one must have the same."""
        path.parent.mkdir(parents=True, exist_ok=True)
        terms = {"unit": {"name": unit.name, "most_records": unit.most_records}, "adjacency": adjacency.value}
        terms["budget"] = budget.to_json() if budget else None  # type: ignore[assignment]
        with _locked(path, wait=True) as handle:
            ledger = cls(path, unit, adjacency)
            ledger._load(handle, repair=True)
            if not ledger.bodies:
                header = {"type": "ledger", "version": VERSION, "ledger": secrets.token_hex(8), **terms}
                ledger._append(handle, header)
                sync_folder(path.parent)
        _same_terms(path, ledger.bodies[0], terms)
        return ledger

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Read and check a ledger without changing it: every line, every hash."""
        if not path.is_file():
            raise Corrupt(path.name, "the ledger is missing")
        text = path.read_bytes()
        bodies, head = _parse(path.name, text)
        if not bodies:
            raise Corrupt(path.name, "the ledger is empty")
        header = bodies[0]
        unit = Unit(**header["unit"])
        return cls(path, unit, Adjacency.parse(header["adjacency"]), bodies, head)

    def reserve(self, name: str, event: events.Event, uses: int = 1, *, budget: Budget | None = None) -> Permit:
        """Write down `uses` releases of `event` and return the right to make them. Call before reading any data.

        Guarantees: durable on return; refused with BudgetExceeded, and nothing written, if the ledger's budget does not allow it.
        A ledger with a budget takes no reservation without that same budget.
        """
        check.integer("uses", uses)
        with _locked(self.path, wait=True) as handle:
            self._load(handle, repair=True)
            if (budget.to_json() if budget else None) != self.terms:
                raise InvalidInput("budget", budget and budget.to_json(), f"{self.path.name} was created with {self.terms}")
            if budget and (refusal := budget.why_not(self.spent(), events.Repeated(event, uses), self.adjacency)):
                raise BudgetExceeded(f"{self.path.name}: {refusal}")
            entry = secrets.token_hex(8)
            body = {"type": "reserve", "entry": entry, "name": name, "event": events.CODEC.encode(event), "uses": uses}
            self._append(handle, body | {"time": int(time.time())})
        return Permit(name, event, uses, entry)

    def void(self, permit: Permit, reason: str) -> None:
        """Give back a reservation under which nothing was released, and never can be: its run's secret is already destroyed."""
        if permit.entry not in {p.entry for p in self.permits()}:
            raise InvalidInput("permit", permit.entry, f"is not an open reservation of {self.path.name}")
        with _locked(self.path, wait=True) as handle:
            self._load(handle, repair=True)
            self._append(handle, {"type": "void", "entry": permit.entry, "reason": reason})

    def note(self, kind: str, **facts: Any) -> None:
        """Append a fact that spends nothing (a run's end, a resumption)."""
        if kind in ("ledger", "reserve", "void"):
            raise InvalidInput("note", kind, "headers, reservations and their return are not notes")
        with _locked(self.path, wait=True) as handle:
            self._load(handle, repair=True)
            self._append(handle, {"type": kind, **facts})

    @property
    def terms(self) -> dict[str, Any] | None:
        """The budget this ledger was created with, as JSON; None for a ledger that only records."""
        budget: dict[str, Any] | None = self.bodies[0]["budget"]
        return budget

    def permits(self) -> list[Permit]:
        """Every reservation so far, as it stands in the file this object last read."""
        void = {b["entry"] for b in self.bodies if b["type"] == "void"}
        rows = [b for b in self.bodies if b["type"] == "reserve" and b["entry"] not in void]
        return [Permit(b["name"], events.CODEC.decode(b["event"]), b["uses"], b["entry"]) for b in rows]

    def spent(self) -> list[events.Event]:
        """Every reservation as an event with its count."""
        return [events.Repeated(p.event, p.uses) for p in self.permits()]

    def event(self) -> events.Event:
        """All reservations composed: the bill."""
        return events.Composed(tuple(self.spent()))

    def guarantee(self, accountant: Accountant, caveats: tuple[str, ...] = ()) -> Guarantee:
        """The guarantee of everything reserved in this ledger, whether or not it was used."""
        curve = accountant.curve(self.event(), self.adjacency)
        return Guarantee(curve, accountant.name, self.adjacency, self.unit, caveats=caveats)

    def refresh(self) -> None:
        """Read again what other processes may have appended."""
        with _locked(self.path, wait=True) as handle:
            self._load(handle, repair=False)

    def _load(self, handle: int, *, repair: bool) -> None:
        text = _read_all(handle)
        if repair:
            text = _mend_tail(handle, text)
        self.bodies, self.head = _parse(self.path.name, text)

    def _append(self, handle: int, body: dict[str, Any]) -> None:
        line, head = _line(self.head, body)
        start = os.lseek(handle, 0, os.SEEK_END)
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, start)  # a full disk leaves the ledger as it was
            raise
        self.bodies.append(body)
        self.head = head


@contextmanager
def hold(path: Path, what: str) -> Iterator[None]:
    """Hold `path` for this process alone, or raise `Busy`: two processes must not train in one run folder."""
    with _locked(path, wait=False, what=what):
        yield


@contextmanager
def _locked(path: Path, *, wait: bool, what: str = "") -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Busy(f"{what}: another process is using it; wait for it to end or choose another folder") from None
        yield handle
    finally:
        os.close(handle)


def _read_all(handle: int) -> bytes:
    os.lseek(handle, 0, os.SEEK_SET)
    parts = []
    while part := os.read(handle, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _mend_tail(handle: int, text: bytes) -> bytes:
    """Deal with a last line that a crash cut short: it was never durable, so nothing was released under it."""
    if not text or text.endswith(b"\n"):
        return text
    whole, _, tail = text.rpartition(b"\n")
    whole = whole + b"\n" if whole else b""
    try:
        _parse("ledger", whole + tail + b"\n")
    except Corrupt:
        os.ftruncate(handle, len(whole))
    else:
        whole = whole + tail + b"\n"
        os.lseek(handle, 0, os.SEEK_END)
        os.write(handle, b"\n")
    os.fsync(handle)
    return whole


def _line(previous: str, body: dict[str, Any]) -> tuple[bytes, str]:
    head = hashlib.sha256((previous + canonical(body)).encode()).hexdigest()
    return (canonical({"body": body, "hash": head, "previous": previous}) + "\n").encode(), head


def _parse(name: str, text: bytes) -> tuple[list[dict[str, Any]], str]:
    if text and not text.endswith(b"\n"):
        raise Corrupt(name, "the last line is cut short")
    bodies: list[dict[str, Any]] = []
    head = ORIGIN
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            body = json.loads(line)["body"]
            expected, new_head = _line(head, body)
        except (ValueError, KeyError, TypeError):
            raise Corrupt(name, f"line {number} is not a ledger entry") from None
        if expected != line:
            raise Corrupt(name, f"line {number} does not match its hash: it was changed, or a line before it was removed")
        bodies.append(body)
        head = new_head
    if bodies and (bodies[0].get("type") != "ledger" or bodies[0].get("version") != VERSION):
        raise Corrupt(name, f"the first line is not the header of a version {VERSION} ledger")
    return bodies, head


def _same_terms(path: Path, header: dict[str, Any], terms: dict[str, Any]) -> None:
    for key, value in terms.items():
        if key == "budget" and value is None:
            continue  # opening needs no budget; reserving does
        if header[key] != value:
            raise InvalidInput(f"ledger {key}", value, f"{path.name} was created with {header[key]}")
