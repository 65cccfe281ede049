"""What the lines of a ledger may say, and in which order. The reader and the writer of a ledger
hold to this one set of rules.

- `ledger`: the header: unit, adjacency, budget.
- `reserve`: the right to release `uses` times `event`, with the whole `claim` that is made about
  it. In the ledger of a data set `run` is how the folder of the run was called.
- `begun`: releases under a returnable reservation may have been made, so it can no longer be given
  back. `place` recognises the folder that makes them; an earlier version did not write it.
- `settle`: no more than `made` releases are made under a reservation that may end early, and
  `billed` of them are charged from now on.
- `void`: a returnable reservation is given back; only before it has started.
- `end`: in the ledger of a data set: the run that made a reservation ended, with this report. There
  is no second end.
- `finish`: the run ended: hashes of its report and of every file. Only attachments may follow.
- `attach`: hashes of files that were added to a finished run (an audit).
- `derive`: a file made from the released ones and from public data alone: its hash, what it was
  made of, how, and which public data.
- `note`: anything else; nothing is ever computed from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dpfy.core import check, events
from dpfy.core.claim import stop_after
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.unit import EXAMPLE, Adjacency, Unit
from dpfy.core.values import Permit, _changed, _permit

VERSION = 2
FIELDS = {
    "ledger": {"version", "ledger", "unit", "adjacency", "budget"},
    "reserve": {"entry", "name", "event", "uses", "claim", "returnable", "time"},
    "begun": {"entry"},
    "settle": {"entry", "made", "billed"},
    "void": {"entry", "reason"},
    "end": {"entry", "card"},
    "finish": {"entry", "steps", "card", "files"},
    "attach": {"files"},
    "derive": {"file", "sha256", "of", "how", "public"},
    "note": {"kind", "facts"},
}
OPTIONAL = {"begun": {"place"}, "reserve": {"run"}}
ENTRY, PLACE = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}")
SHA256, FILE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_NAME, MOST_USES = 200, 1 << 53
NOT_BEGUN = "its beginning must be written in the ledger before the first release"
RESERVED = (
    "ledger.jsonl",
    "ledger.jsonl.head",
    "privacy.json",
    "report.html",
    "report.md",
    "signature.json",
)
ENDED = "the ledger says that its run ended: nothing more may be released"
FINISHED = "the ledger says that this run is finished: nothing more may be released, only published"


@dataclass
class LedgerRules:
    """What follows from the lines of a ledger, read in their order.

    `places` holds, for reservations that have started, which folder makes their releases; `ended` the
    report of runs that have ended; `runs` how the folders of runs were called when they reserved, for
    readers, where it was written down. `settled` holds, for reservations that ended early, how many
    releases were made and how many are charged. `first` is the first reservation, with its event as
    it was reserved: a budget may be divided by it, and never by what became of it.
    """

    unit: Unit = EXAMPLE
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    budget: dict[str, Any] | None = None
    identity: str = ""
    reserved: dict[str, Permit] = field(default_factory=dict)
    returnable: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    void: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    settled: dict[str, tuple[int, int]] = field(default_factory=dict)
    first: tuple[str, events.Event] | None = None
    finish: dict[str, Any] | None = None
    attached: dict[str, str] = field(default_factory=dict)
    derived: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, bodies: list[dict[str, Any]]) -> LedgerRules:
        """The book of these lines; `Corrupt` where one of them breaks a rule, anyone who wrote it."""
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
            rule = (
                f"must be {VERSION}: another version of dpfy wrote this ledger; use that one, or "
                f"begin a new ledger"
            )
            raise InvalidInput("ledger version", body.get("version"), rule)
        check.one_of("type", kind, FIELDS)
        if (given := set(body) - {"type"}) - OPTIONAL.get(str(kind), set()) != FIELDS[str(kind)]:
            raise InvalidInput(
                f"fields of {kind}",
                sorted(given),
                f"must be {', '.join(sorted(FIELDS[str(kind)]))}",
            )
        if (kind == "ledger") != (not self.identity):
            raise InvalidInput(
                "type", kind, "must be that of the header on the first line, and there only"
            )
        if self.finish is not None and kind not in ("attach", "derive"):
            raise InvalidInput("type", kind, "only attachments may follow the end of a run")
        getattr(self, f"_{kind}")(body)

    def permits(self) -> list[Permit]:
        """Every reservation that was not given back, in order."""
        return [permit for entry, permit in self.reserved.items() if entry not in self.void]

    def _ledger(self, body: dict[str, Any]) -> None:
        unit, budget = body["unit"], body["budget"]
        if not isinstance(unit, dict) or not {"name", "most_records"} <= set(unit) <= {
            "name",
            "most_records",
            "protects",
            "tokens",
        }:
            raise InvalidInput(
                "unit",
                unit,
                "must have a name and most_records, and may say what it protects and its tokens",
            )
        if budget is not None and not isinstance(budget, dict):
            raise InvalidInput("budget", budget, "must be an object or nothing")
        identity = _matching("ledger", body["ledger"], ENTRY)
        self.unit, self.adjacency = Unit(**unit), Adjacency.parse(body["adjacency"])
        self.identity, self.budget = identity, budget

    def _reserve(self, body: dict[str, Any]) -> None:
        entry = _matching("entry", body["entry"], ENTRY)
        if entry in self.reserved:
            raise InvalidInput("entry", entry, "was reserved before")
        name, uses = _text("name", body["name"]), check.integer("uses", body["uses"])
        if uses > MOST_USES:
            raise InvalidInput("uses", uses, f"must be at most {MOST_USES}")
        if not isinstance(body["claim"], dict) or not isinstance(body["returnable"], bool):
            raise InvalidInput(
                "claim", body["claim"], "must be an object, and returnable true or false"
            )
        check.integer("time", body["time"], least=0)
        run = None if "run" not in body else _text("run", body["run"])
        closed = NOT_BEGUN if body["returnable"] else ""
        self.reserved[entry] = _permit(
            name, _event(body["event"]), uses, entry, body["claim"], self.adjacency, closed
        )
        if run is not None:
            self.runs[entry] = run
        if body["returnable"]:
            self.returnable.add(entry)
        if self.first is None:
            self.first = entry, events.Repeated(self.reserved[entry].event, uses)

    def _begun(self, body: dict[str, Any]) -> None:
        entry = self._returnable(body)
        if "place" in body:
            self.places[entry] = _matching("place", body["place"], PLACE)
        self.begun.add(entry)
        self.reserved[entry] = _changed(self.reserved[entry])

    def _void(self, body: dict[str, Any]) -> None:
        entry = self._returnable(body)
        _text("reason", body["reason"])
        self.void.add(entry)
        if self.first is not None and self.first[0] == entry and not self.permits():
            self.first = None  # nothing was admitted beside it, so nothing depends on it

    def _settle(self, body: dict[str, Any]) -> None:
        entry = self._open(body)
        if entry in self.settled:
            raise InvalidInput("entry", entry, "was settled before")
        made, billed = (
            check.integer("made", body["made"], least=0),
            check.integer("billed", body["billed"]),
        )
        stops = _stops(self.reserved[entry].claim)
        if billed != stop_after(stops, made):
            raise InvalidInput(
                "billed",
                billed,
                f"must be the next of {sorted(stops)} after the {made} releases made",
            )
        held = self.reserved[entry]
        if held.uses != 1:
            raise InvalidInput("uses", held.uses, "must be 1 for a reservation that may end early")
        self.settled[entry] = made, billed
        ended = f"the ledger says that it ended after {made} releases: nothing more may be released"
        self.reserved[entry] = _permit(
            held.name, _event(stops[billed]), 1, entry, held.claim, held.adjacency, ended
        )

    def _returnable(self, body: dict[str, Any]) -> str:
        entry = _matching("entry", body["entry"], ENTRY)
        if entry not in self.reserved or entry in self.void:
            raise InvalidInput("entry", entry, "is not an open reservation")
        if entry not in self.returnable:
            raise InvalidInput(
                "entry",
                entry,
                "was reserved permanently: releases may have been made under it, and it stays charged",
            )
        if entry in self.begun:
            raise InvalidInput(
                "entry",
                entry,
                "has started: releases may have been made under it, and it stays charged",
            )
        return entry

    def _open(self, body: dict[str, Any]) -> str:
        entry = _matching("entry", body["entry"], ENTRY)
        if (
            entry not in self.reserved
            or entry in self.void
            or (entry in self.returnable and entry not in self.begun)
        ):
            raise InvalidInput("entry", entry, "is not a reservation that has started")
        return entry

    def _end(self, body: dict[str, Any]) -> None:
        entry, card = self._open(body), _matching("card", body["card"], SHA256)
        if entry in self.ended:
            raise InvalidInput("entry", entry, "ended before: a run is completed once")
        self.ended[entry] = card
        self.reserved[entry] = _changed(self.reserved[entry], ENDED)

    def _finish(self, body: dict[str, Any]) -> None:
        self._open(body)
        check.integer("steps", body["steps"], least=0)
        _matching("card", body["card"], SHA256)
        _hashes(body["files"])
        self.finish = body
        self.reserved = {e: _changed(p, FINISHED) for e, p in self.reserved.items()}

    def _attach(self, body: dict[str, Any]) -> None:
        if self.finish is None:
            raise InvalidInput("type", "attach", "files are attached to a finished run only")
        files = _hashes(body["files"])
        if same := set(files) & set(self.finish["files"]):
            raise InvalidInput(
                "files", sorted(same), "belong to the run itself and cannot be exchanged"
            )
        self.attached |= files

    def _derive(self, body: dict[str, Any]) -> None:
        if self.finish is None:
            raise InvalidInput(
                "type", "derive", "only what a finished run released can be processed further"
            )
        name, known = (
            _matching("file", body["file"], FILE),
            self.finish["files"] | self.attached | self.derived,
        )
        _matching("sha256", body["sha256"], SHA256)
        if name in known or name in RESERVED:
            raise InvalidInput("file", name, "is the name of a file of the run; choose another")
        if (
            not isinstance(body["of"], list)
            or not body["of"]
            or any(source not in known for source in body["of"])
        ):
            raise InvalidInput(
                "of", body["of"], f"must name files of the run: {', '.join(sorted(known))}"
            )
        _text("how", body["how"])
        _text("public", body["public"])
        self.derived[name] = body

    def _note(self, body: dict[str, Any]) -> None:
        _text("kind", body["kind"])
        if not isinstance(body["facts"], dict):
            raise InvalidInput("facts", body["facts"], "must be an object")


def _stops(claim: dict[str, Any]) -> dict[int, Any]:
    """After how many releases a reservation may end, and what it costs then, as its claim says."""
    try:
        return {check.integer("stops", made): event for made, event in claim.get("stops", [])}
    except (TypeError, ValueError):
        raise InvalidInput(
            "stops", claim.get("stops"), "must be pairs of a number of releases and an event"
        ) from None


def _event(data: Any) -> events.Event:
    try:
        return events.decode(data)
    except DpfyError as problem:
        raise InvalidInput("event", data, f"must be an event ({problem})") from None


def _text(name: str, value: object) -> str:
    return check.one_line(name, value, MOST_NAME)


def _matching(name: str, value: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise InvalidInput(name, value, f"must match {pattern.pattern}")
    return value


def _hashes(files: object) -> dict[str, str]:
    if not isinstance(files, dict):
        raise InvalidInput("files", files, "must be an object of names and hashes")
    return {
        _matching("files", name, FILE): _matching(f"files.{name}", value, SHA256)
        for name, value in files.items()
    }
