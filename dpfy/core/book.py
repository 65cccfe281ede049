"""What the lines of a ledger may say, and in which order. The reader and the writer of a ledger hold to this one set of rules.

ledger   the header: unit, adjacency, budget
reserve  the right to release `uses` times `event`, with the whole `claim` that is made about it
begun    releases under a returnable reservation may have been made: it can no longer be given back
void     a returnable reservation is given back; only before it has begun
finish   the run ended: hashes of its card and of every file; nothing but attachments may follow, and no second one
attach   hashes of files that were added to a finished run (an audit)
note     anything else; nothing is ever computed from it
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dpfy.core import check, events
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.unit import EXAMPLE, Adjacency, Unit

VERSION = 2
FIELDS = {
    "ledger": {"version", "ledger", "unit", "adjacency", "budget"},
    "reserve": {"entry", "name", "event", "uses", "claim", "returnable", "time"},
    "begun": {"entry"},
    "void": {"entry", "reason"},
    "finish": {"entry", "steps", "card", "files"},
    "attach": {"files"},
    "note": {"kind", "facts"},
}
ENTRY, SHA256, FILE = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_NAME, MOST_USES = 200, 1 << 53
NOT_BEGUN = "its beginning must be written in the ledger before the first release"
FINISHED = "the ledger says that this run is finished: nothing more may be released, only published"


@dataclass(frozen=True)
class Permit:
    """The right to make `uses` releases of `event`, already written in the ledger as `entry`, with the `claim` made there.

    `closed` says why no release may be made (yet, or any more); it is empty where releases are allowed.
    """

    name: str
    event: events.Event
    uses: int
    entry: str
    claim: dict[str, Any] = field(default_factory=dict, compare=False)
    closed: str = ""

    def check(self, step: int) -> None:
        """Refuse a release beyond what was reserved, or outside of its time."""
        if self.closed:
            raise InvalidInput("permit", self.name, self.closed)
        if not 0 <= step < self.uses:
            raise InvalidInput("step", step, f"the permit {self.name!r} covers {self.uses} releases, steps 0 to {self.uses - 1}")


@dataclass
class Book:
    """What follows from the lines of a ledger, read in their order."""

    unit: Unit = EXAMPLE
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    budget: dict[str, Any] | None = None
    identity: str = ""
    reserved: dict[str, Permit] = field(default_factory=dict)
    returnable: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    void: set[str] = field(default_factory=set)
    finish: dict[str, Any] | None = None
    attached: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, bodies: list[dict[str, Any]]) -> Book:
        """The book of these lines; `Corrupt` where one of them breaks a rule, whoever wrote it."""
        book = cls()
        for number, body in enumerate(bodies, start=1):
            try:
                book.add(body)
            except InvalidInput as problem:
                raise Corrupt(name, f"line {number}: {problem}") from None
        return book

    def add(self, body: dict[str, Any]) -> None:
        """Take one more line, or raise :class:`InvalidInput`, having changed nothing."""
        kind = body.get("type")
        if kind == "ledger" and body.get("version") != VERSION:
            rule = f"must be {VERSION}: another version of dpfy wrote this ledger; use that one, or begin a new ledger"
            raise InvalidInput("ledger version", body.get("version"), rule)
        check.one_of("type", kind, FIELDS)
        if (given := set(body) - {"type"}) != FIELDS[str(kind)]:
            raise InvalidInput(f"fields of {kind}", sorted(given), f"must be {', '.join(sorted(FIELDS[str(kind)]))}")
        if (kind == "ledger") != (not self.identity):
            raise InvalidInput("type", kind, "must be that of the header on the first line, and there only")
        if self.finish is not None and kind != "attach":
            raise InvalidInput("type", kind, "nothing but attachments may follow the end of a run")
        getattr(self, f"_{kind}")(body)

    def permits(self) -> list[Permit]:
        """Every reservation that was not given back, in order."""
        return [permit for entry, permit in self.reserved.items() if entry not in self.void]

    def _ledger(self, body: dict[str, Any]) -> None:
        unit, budget = body["unit"], body["budget"]
        if not isinstance(unit, dict) or set(unit) != {"name", "most_records"}:
            raise InvalidInput("unit", unit, "must have a name and most_records")
        if budget is not None and not isinstance(budget, dict):
            raise InvalidInput("budget", budget, "must be an object or nothing")
        identity = _matching("ledger", body["ledger"], ENTRY)
        self.unit, self.adjacency = Unit(unit["name"], unit["most_records"]), Adjacency.parse(body["adjacency"])
        self.identity, self.budget = identity, budget

    def _reserve(self, body: dict[str, Any]) -> None:
        entry = _matching("entry", body["entry"], ENTRY)
        if entry in self.reserved:
            raise InvalidInput("entry", entry, "was reserved before")
        name, uses = _text("name", body["name"]), check.integer("uses", body["uses"])
        if uses > MOST_USES:
            raise InvalidInput("uses", uses, f"must be at most {MOST_USES}")
        if not isinstance(body["claim"], dict) or not isinstance(body["returnable"], bool):
            raise InvalidInput("claim", body["claim"], "must be an object, and returnable true or false")
        check.integer("time", body["time"], least=0)
        closed = NOT_BEGUN if body["returnable"] else ""
        self.reserved[entry] = Permit(name, _event(body["event"]), uses, entry, body["claim"], closed)
        if body["returnable"]:
            self.returnable.add(entry)

    def _begun(self, body: dict[str, Any]) -> None:
        entry = self._returnable(body)
        self.begun.add(entry)
        held = self.reserved[entry]
        self.reserved[entry] = Permit(held.name, held.event, held.uses, entry, held.claim)

    def _void(self, body: dict[str, Any]) -> None:
        entry = self._returnable(body)
        _text("reason", body["reason"])
        self.void.add(entry)

    def _returnable(self, body: dict[str, Any]) -> str:
        entry = _matching("entry", body["entry"], ENTRY)
        if entry not in self.reserved or entry in self.void:
            raise InvalidInput("entry", entry, "is not an open reservation")
        if entry not in self.returnable:
            raise InvalidInput("entry", entry, "was reserved for good: releases may have been made under it, and it stays billed")
        if entry in self.begun:
            raise InvalidInput("entry", entry, "has begun: releases may have been made under it, and it stays billed")
        return entry

    def _finish(self, body: dict[str, Any]) -> None:
        entry = _matching("entry", body["entry"], ENTRY)
        if entry not in self.reserved or entry in self.void or (entry in self.returnable and entry not in self.begun):
            raise InvalidInput("entry", entry, "is not a reservation that has begun")
        check.integer("steps", body["steps"], least=0)
        _matching("card", body["card"], SHA256)
        _hashes(body["files"])
        self.finish = body
        self.reserved = {
            e: Permit(p.name, p.event, p.uses, e, p.claim, FINISHED if e == entry else p.closed) for e, p in self.reserved.items()
        }

    def _attach(self, body: dict[str, Any]) -> None:
        if self.finish is None:
            raise InvalidInput("type", "attach", "files are attached to a finished run only")
        files = _hashes(body["files"])
        if same := set(files) & set(self.finish["files"]):
            raise InvalidInput("files", sorted(same), "belong to the run itself and cannot be exchanged")
        self.attached |= files

    def _note(self, body: dict[str, Any]) -> None:
        _text("kind", body["kind"])
        if not isinstance(body["facts"], dict):
            raise InvalidInput("facts", body["facts"], "must be an object")


def _event(data: Any) -> events.Event:
    try:
        return events.decode(data)
    except DpfyError as problem:
        raise InvalidInput("event", data, f"must be an event ({problem})") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > MOST_NAME:
        raise InvalidInput(name, value, f"must be one line of 1 to {MOST_NAME} printable characters")
    return value


def _matching(name: str, value: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise InvalidInput(name, value, f"must match {pattern.pattern}")
    return value


def _hashes(files: object) -> dict[str, str]:
    if not isinstance(files, dict):
        raise InvalidInput("files", files, "must be an object of names and hashes")
    return {_matching("files", name, FILE): _matching(f"files.{name}", value, SHA256) for name, value in files.items()}
