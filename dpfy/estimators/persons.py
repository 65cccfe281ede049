"""Whose a record is: at most so many records of a person are used.

Which ones is decided by a keyed hash of the person's own records. So it depends neither on the
order of the table nor on anybody else, and nobody who lacks the secret of the run can choose it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Person
from dpfy.estimators.claim import ProofCondition
from dpfy.estimators.records import EncodedRecords
from dpfy.tables.cells import listed, word

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


def numbered(cells: Any, missing: Sequence[str] = ()) -> tuple[list[str], Codes]:
    """The names of persons, and the place of each record's among them: `NOBODY` where it has none.

    Guarantees: no cell raises an error, and none changes how another is read.
    """
    held = cells if hasattr(cells, "to_pylist") else _array(cells).tolist()
    words = [word(cell) for cell in (listed(held) if held is cells else held)]
    nobody = {"", "nan", "NaN", "NaT", "<NA>", *missing}
    place: dict[str, int] = {}
    codes = [NOBODY if w in nobody else place.setdefault(w, len(place)) for w in words]
    return list(place), np.array(codes, np.int64)


def _array(cells: Any) -> NDArray[Any]:
    held = cells.to_numpy() if hasattr(cells, "to_numpy") else np.asarray(cells)
    if held.ndim == 2 and held.shape[1] == 1:
        held = held[:, 0]
    if held.ndim != 1:
        rule = "must have one name of a person for each record"
        raise InvalidInput("users", f"shape {held.shape}", rule)
    return np.asarray(held)


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
    names, owners = numbered(cells, records.columns.missing)
    if len(owners) != records.size:
        rule = f"must be one for each of the {records.size} records of X"
        raise InvalidInput("users", f"{len(owners)} names", rule)
    if records.left_out is not None:
        owners = np.where(records.left_out, NOBODY, owners)
    order = np.argsort(owners, kind="stable")
    order = order[np.searchsorted(owners[order], 0) :]
    rows = PersonRows.of(owners[order])
    kept = np.ones(len(order), bool)
    for start, end in zip(rows.starts.tolist(), rows.ends.tolist(), strict=True):
        if end - start > at_most:
            mine = order[start:end]
            name = names[owners[mine[0]]].encode("utf-8", "surrogatepass")
            tags = [_tag(records, row, name, key) for row in mine.tolist()]
            kept[start:end] = False
            chosen = sorted(range(end - start), key=tags.__getitem__)[:at_most]
            kept[[start + k for k in chosen]] = True
    order = order[kept]
    return replace(records.rows(order), owners=owners[order])


def _tag(records: EncodedRecords, row: int, name: bytes, key: bytes) -> bytes:
    """A keyed hash of a record; equal records of a person have the same, and are the same."""
    whole = hashlib.blake2b(name, key=key, digest_size=16)
    for part in (records.given, records.codes, records.target, records.weights):
        if part is not None:
            whole.update(part[row].tobytes())
    return whole.digest()
