"""What a data set has spent: every reservation of its ledger with its own epsilon, the total so
far, and what is left of the budget.

Nothing here changes a ledger. Where no accountant bounds a release, the reason stands instead of
the figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from dpfy import accounting
from dpfy.accounting.filters import GaussianFilter, RenyiFilter
from dpfy.core import check, events
from dpfy.core.codec import number
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger, Permit
from dpfy.core.unit import Adjacency
from dpfy.report.uses import kind_of
from dpfy.report.words import absent, event_words

Filter = RenyiFilter | GaussianFilter
ROUTES = (accounting.DEFAULT, "rdp", "monte-carlo")
"""Accountants, asked in this order for a release that the ones before have no bound for."""
WORK = 250
"""Of a long ledger the total is computed after some reservations only, and always after the last:
each takes time for all before it.
"""
OWN = 300
"""So many reservations, the last ones, are shown with an epsilon of their own."""
LATER = "not computed: the ledger is long, and only later ones are"
GIVEN, BUDGET, CLAIMS = "--delta", "the budget", "the reservations"


@dataclass(frozen=True)
class SpendingFigure:
    """An epsilon and who computed it; or the reason why there is none."""

    epsilon: float | None
    accountant: str = ""
    why: str = ""

    def to_json(self) -> Any:
        """The number, or the given absence."""
        return absent(self.why) if self.epsilon is None else number(self.epsilon)


@dataclass(frozen=True)
class Entry:
    """One reservation. `total` is the epsilon of all reservations up to this one, where it was
    computed.
    """

    permit: Permit
    when: str
    run: str
    state: str
    own: SpendingFigure
    total: SpendingFigure | None
    adaptive: SpendingFigure | None

    @property
    def purpose(self) -> str:
        """What it was for: as its claim says, or by the first word of its name."""
        stated = self.permit.claim.get("purpose")
        return (
            stated
            if isinstance(stated, str) and stated.isprintable() and 0 < len(stated) <= 80
            else kind_of(self.permit)
        )

    @property
    def what(self) -> str:
        """The release in words."""
        return event_words(self.permit.event)

    def to_json(self) -> dict[str, Any]:
        """One row."""
        return {
            "when": self.when,
            "run": self.run or absent("not written down"),
            "purpose": self.purpose,
            "name": self.permit.name,
            "what": self.what,
            "uses": self.permit.uses,
            "state": self.state,
            "epsilon": self.own.to_json(),
            "accountant": self.own.accountant or absent(self.own.why),
            "total": absent("given back, or between two reservations with a total")
            if self.total is None
            else self.total.to_json(),
        }


@dataclass(frozen=True)
class Allowance:
    """A budget, and what the filter that keeps it counts as spent."""

    budget: Filter | None
    spent: SpendingFigure

    @property
    def left(self) -> float | None:
        """What later runs may still spend; None without a budget, or where nobody knows."""
        if self.budget is None or self.spent.epsilon is None:
            return None
        return max(0.0, self.budget.epsilon - self.spent.epsilon)

    def to_json(self) -> dict[str, Any]:
        """Terms, spent and left."""
        if self.budget is None:
            return absent(NO_BUDGET)
        left = self.left
        return self.budget.to_json() | {
            "spent": self.spent.to_json(),
            "left": absent(self.spent.why) if left is None else left,
        }


NO_BUDGET = "the ledger was made without a budget: it records, and refuses nothing"


@dataclass(frozen=True)
class Spending:
    """All reservations of a ledger at one delta."""

    ledger: Ledger
    delta: float
    delta_of: str
    entries: tuple[Entry, ...]
    total: SpendingFigure
    purposes: dict[str, SpendingFigure]
    allowance: Allowance

    def to_json(self) -> dict[str, Any]:
        """The whole answer of `dpfy ledger show --json`."""
        return {
            "ledger": self.ledger.path.name,
            "head": self.ledger.head,
            "unit": {"name": self.ledger.unit.name, "most_records": self.ledger.unit.most_records},
            "adjacency": self.ledger.adjacency.value,
            "delta": self.delta,
            "delta_of": self.delta_of,
            "entries": [entry.to_json() for entry in self.entries],
            "epsilon": self.total.to_json(),
            "accountant": self.total.accountant or absent(self.total.why),
            "purposes": {purpose: figure.to_json() for purpose, figure in self.purposes.items()},
            "budget": self.allowance.to_json(),
        }


def of(ledger: Ledger, delta: float | None = None) -> Spending:
    """What `ledger` holds, at `delta` (that of its budget, or the least that its reservations
    state, where it is not given).
    """
    budget = budget_of(ledger)
    chosen, source = _delta(ledger, budget, delta)
    void, adjacency = ledger.book.void, ledger.adjacency
    permits = list(ledger.book.reserved.values())
    marks = _marks([p for p in permits if p.entry not in void])
    times = {body["entry"]: body["time"] for body in ledger.bodies if body["type"] == "reserve"}
    entries: list[Entry] = []
    so_far: list[events.Event] = []
    alone = lru_cache(maxsize=None)(lambda event: _epsilon([event], adjacency, chosen))
    for number_left, permit in zip(range(len(permits), 0, -1), permits, strict=True):
        if permit.entry not in void:
            so_far.append(_event(permit))
        at = permit.entry in marks
        entries.append(
            Entry(
                permit,
                _when(times[permit.entry]),
                ledger.book.runs.get(permit.entry, ""),
                _state(ledger, permit),
                alone(_event(permit)) if number_left <= OWN else SpendingFigure(None, why=LATER),
                _epsilon(so_far, adjacency, chosen) if at else None,
                _counted(budget, so_far, ledger) if at and budget is not None else None,
            )
        )
    total = next(
        (e.total for e in reversed(entries) if e.total is not None),
        SpendingFigure(0.0, accounting.DEFAULT),
    )
    purposes = _purposes([e for e in entries if e.permit.entry not in void], adjacency, chosen)
    return Spending(ledger, chosen, source, tuple(entries), total, purposes, allowance(ledger))


def allowance(ledger: Ledger) -> Allowance:
    """The budget of `ledger` and how much of it is spent."""
    budget = budget_of(ledger)
    spent = (
        SpendingFigure(None, why=NO_BUDGET)
        if budget is None
        else _counted(budget, ledger.spent(), ledger)
    )
    return Allowance(budget, spent)


def budget_of(ledger: Ledger) -> Filter | None:
    """The budget with which a ledger was made."""
    try:
        return None if ledger.terms is None else accounting.filters.from_json(ledger.terms)
    except (InvalidInput, KeyError, TypeError) as problem:
        raise Corrupt(ledger.path.name, f"holds a budget that cannot be read ({problem})") from None


def _delta(ledger: Ledger, budget: Filter | None, given: float | None) -> tuple[float, str]:
    if given is not None:
        return 0.0 if given == 0 else check.delta("--delta", given), GIVEN
    if budget is not None:
        return budget.delta, BUDGET
    stated = [d for permit in ledger.permits() if (d := _stated(permit.claim)) is not None]
    if not stated:
        raise InvalidInput(
            "--delta",
            None,
            f"must be given: neither a budget nor a reservation of {ledger.path.name} states one",
        )
    return min([d for d in stated if d > 0], default=0.0), CLAIMS


def _stated(claim: dict[str, Any]) -> float | None:
    """The delta that a claim states, by itself or in its plan, in the form of either version; 0 is
    that of a pure guarantee.
    """
    inner = claim.get("claim")
    for outer in (claim, inner if isinstance(inner, dict) else {}):
        plan = outer.get("plan")
        for holder in (outer, plan if isinstance(plan, dict) else {}):
            found = holder.get("delta")
            if (
                isinstance(found, float | int)
                and not isinstance(found, bool)
                and (found == 0 or check.DELTA <= found < 1)
            ):
                return float(found)
    return None


def _event(permit: Permit) -> events.Event:
    return events.Repeated(permit.event, permit.uses)


def _marks(counted: list[Permit]) -> set[str]:
    """The reservations after which the total is computed: all of them, or as many as there is time
    for.
    """
    last, step = len(counted) - 1, max(1, math.ceil(len(counted) ** 2 / 2 / WORK))
    return {counted[k].entry for k in range(last, -1, -step)}


def _epsilon(spent: Iterable[events.Event], adjacency: Adjacency, delta: float) -> SpendingFigure:
    """The epsilon of all of `spent` together, by the first accountant that bounds it."""
    whole, reasons = events.Composed(tuple(spent)), []
    for name in ROUTES if delta > 0 else accounting.PURE:
        try:
            return SpendingFigure(
                accounting.epsilon(whole, delta, adjacency=adjacency, accountant=name), name
            )
        except (DpfyError, ArithmeticError) as problem:
            reasons.append(f"{name}: {problem}")
    return SpendingFigure(None, why="; ".join(reasons))


def _counted(budget: Filter, spent: list[events.Event], ledger: Ledger) -> SpendingFigure:
    """What the filter of a budget counts."""
    try:
        return SpendingFigure(
            budget.spent_epsilon(spent, ledger.adjacency, ledger.first), f"{budget.kind} filter"
        )
    except (DpfyError, ArithmeticError) as problem:
        return SpendingFigure(None, why=f"the budget's filter: {problem}")


def _purposes(
    entries: list[Entry], adjacency: Adjacency, delta: float
) -> dict[str, SpendingFigure]:
    """The epsilon of all reservations of each purpose."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.purpose, []).append(entry)
    return {
        purpose: rows[0].own
        if len(rows) == 1
        else _epsilon([_event(row.permit) for row in rows], adjacency, delta)
        for purpose, rows in found.items()
    }


def _state(ledger: Ledger, permit: Permit) -> str:
    book = ledger.book
    if permit.entry in book.void:
        return "given back"
    if permit.entry in book.settled:
        return "ended early"
    if permit.entry in book.ended or book.finish is not None:
        return "finished"
    return "open" if permit.entry in book.returnable - book.begun else "begun"


def _when(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "unknown"
