"""A person's own side: a ledger of what their reports have cost, and the permanent answers of
protocols that keep one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.accounting import accountant
from dpfy.core import check, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.guarantee import Guarantee
from dpfy.core.ledger import Ledger, LedgerBudget
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, locked, write_atomically
from dpfy.core.unit import Adjacency
from dpfy.local.claim import PERSON
from dpfy.local.frequencies import Rappor
from dpfy.local.protocol import DeviceReport, Protocol, Rows
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.mechanism import source

LEDGER, MEMORY = "ledger.jsonl", "permanent.json"


@dataclass(frozen=True)
class Device:
    """Reports of one person, charged in a ledger that stays with them, in `folder`. `budget` is what
    all of them may cost.

    Guarantees: a report is reserved, durably, before the value is randomised. A permanent answer is
    kept before anything is made of it, and used for all reports of its collection: it is the answer
    of the value that was reported first, since an answer for each new value would show when the
    value changes. Where it is lost, the next report is charged as a new one.
    """

    folder: Path
    budget: LedgerBudget | None = None
    _ledger: Ledger = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        held = Ledger.open(
            self.folder / LEDGER, unit=PERSON, adjacency=Adjacency.REPLACE_ONE, budget=self.budget
        )
        object.__setattr__(self, "_ledger", held)

    def report(self, protocol: Protocol, value: Any, collection: str = "report") -> DeviceReport:
        """The report of `value` for a collection. One that is asked for again costs again, but for
        those with a permanent answer.
        """
        check.one_line("collection", collection, 100)
        given = protocol.given([value])  # before anything is billed
        if isinstance(protocol, Rappor):
            row = self._permanent(protocol, given, collection)
            return DeviceReport(
                protocol,
                protocol.instantaneous(row[None], Bits(Randomness.from_os(), collection, 0))[0],
            )
        permit = self._ledger.reserve(collection, protocol.event, budget=self.budget)
        return DeviceReport(
            protocol, protocol.draw(given, source(protocol.event, permit, None, 0))[0]
        )

    def _permanent(self, protocol: Rappor, given: Rows, collection: str) -> Rows:
        """The kept row of a collection; made and kept first where there is none."""
        file = self.folder / MEMORY
        with locked(self.folder / "device.lock", wait=True):
            held = storage.parsed_json(MEMORY, file.read_bytes()) if file.is_file() else {}
            if collection not in held:
                permit = self._ledger.reserve(collection, protocol.event, budget=self.budget)
                row = protocol.permanent(given, source(protocol.event, permit, None, 0))[0]
                held |= {
                    collection: {
                        "epsilon": protocol.epsilon,
                        "row": "".join("01"[bit] for bit in row.astype(int)),
                    }
                }
                write_atomically(file, json.dumps(held).encode(), mode=PRIVATE_MODE)
        return _row(protocol, held[collection])

    def guarantee(self) -> Guarantee:
        """What all reports of this device have cost together, for replacing every value by any
        other.
        """
        return self._ledger.guarantee(accountant("basic"), trust="local")


def _row(protocol: Rappor, held: Any) -> Rows:
    try:
        epsilon, row = (
            held["epsilon"],
            np.array([{"0": False, "1": True}[bit] for bit in held["row"]]),
        )
    except (KeyError, TypeError):
        raise Corrupt(MEMORY, "does not hold permanent answers") from None
    if (epsilon, len(row)) != (protocol.epsilon, protocol.buckets):
        raise InvalidInput(
            "protocol",
            protocol,
            "is not the one whose permanent answer is kept: name another collection",
        )
    return row
