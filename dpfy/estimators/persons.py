"""Whose a record is: at most so many records of a person are used.

Which ones is decided by a keyed hash of the person's own records. So it depends neither on the
order of the table nor on anybody else, and nobody who lacks the secret of the run can choose it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Person
from dpfy.engines.contributions import ContributionLimit
from dpfy.estimators.claim import ProofCondition
from dpfy.estimators.records import EncodedRecords
from dpfy.tables.table import owners_of

Codes = NDArray[np.int64]
NOBODY = -1
MOST_SHORTENED = 4096
"""Up to so many records a person's total is shortened to the root of their number."""


@dataclass(frozen=True)
class PersonRows:
    """Where the records of each person lie: person p has those from `starts[p]` to the next."""

    starts: Codes
    size: int

    @classmethod
    def of(cls, owners: Codes) -> PersonRows:
        """Of records whose owners are sorted."""
        first = np.ones(len(owners), bool)
        first[1:] = owners[1:] != owners[:-1]
        return cls(np.flatnonzero(first), len(owners))

    @property
    def ends(self) -> Codes:
        """Where the records of the next person begin."""
        return np.append(self.starts, self.size)[1:]

    def parts(self, length: int) -> list[slice]:
        """All records in parts of about this length, none of which divides a person."""
        ends = self.ends
        found, begin = [], 0
        while begin < self.size:
            at = int(np.searchsorted(ends, begin + length))
            end = int(ends[min(at, len(ends) - 1)])
            found.append(slice(begin, end))
            begin = end
        return found or [slice(0, 0)]

    def within(self, part: slice) -> Codes:
        """The starts of the persons of a part, counted from its beginning."""
        low, high = np.searchsorted(self.starts, [part.start, part.stop])
        return np.asarray(self.starts[low:high] - part.start)


def condition(person: Person) -> ProofCondition:
    """What the guarantee of a person needs."""
    return ProofCondition(
        "persons",
        f"at most {person.at_most} records of a person are used, whatever others have",
        f"they were chosen by a keyed hash of the person's own records; column "
        f"{_printable(person.column)}; records of nobody were left out",
    )


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:80]


def bounded(records: EncodedRecords, cells: Any, at_most: int, key: bytes) -> EncodedRecords:
    """The records that are used, those of a person one after the other.

    Args:
        records: All records.
        cells: The name of each record's person.
        at_most: How many records of a person are used.
        key: The secret of the choice.

    Guarantees: of each person there are at most `at_most` records. Which ones depends on that
    person's records and the key alone, not on their order.
    """
    owners, names = owners_of(cells_of(cells))
    if len(owners) != records.size:
        rule = f"must be one for each of the {records.size} records of X"
        raise InvalidInput("users", f"{len(owners)} names", rule)
    if records.left_out is not None:
        owners = np.where(records.left_out, NOBODY, owners)
    kept = ContributionLimit(at_most).kept(
        owners, np.zeros(records.size, np.int64), names, records.content(), key.hex()
    )
    order = np.argsort(owners, kind="stable")
    order = order[kept[order]]
    return replace(records.rows(order), owners=owners[order])


def cells_of(cells: Any) -> Any:
    """One name of a person for each record."""
    if hasattr(cells, "to_pylist"):
        return cells
    held = cells.to_numpy() if hasattr(cells, "to_numpy") else np.asarray(cells)
    if held.ndim == 2 and held.shape[1] == 1:
        held = held[:, 0]
    if held.ndim != 1:
        rule = "must have one name of a person for each record"
        raise InvalidInput("users", f"shape {held.shape}", rule)
    return held
