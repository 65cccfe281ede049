"""Train and test from one file, by a permutation that is fixed and public; and parts of records by
secret coins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from dataclasses import dataclass, fields, replace
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.count import held_out
from dpfy.data.lazy import RecordSource
from dpfy.data.owners import KeptRecords, Owned, UserSource
from dpfy.data.records import Records, as_records
from dpfy.data.users import UserRecords, by_user


def permutation(count: int) -> Tensor:
    """The order of 0 .. count - 1 by the BLAKE2b hash of each index.

    Guarantees: the same on every machine and for every version of every library; it reads no
    record.
    """
    digest = [
        hashlib.blake2b(f"dpfy split {index}".encode(), digest_size=16).digest()
        for index in range(count)
    ]
    return torch.tensor(sorted(range(count), key=digest.__getitem__), dtype=torch.int64)


def split(
    records: Records, held_out: int, kept: NDArray[np.bool_] | None = None
) -> tuple[Records, Records]:
    """(train, test): the first `held_out` records of the permutation are the test; each part keeps
    the order of the file. Those that are not `kept` are then left out, which moves no other one.
    """
    count = len(records)
    if not 0 < held_out < count:
        raise InvalidInput(
            "data.test_fraction",
            f"{held_out} of {count} records",
            "both parts must hold at least 1 record",
        )
    order = permutation(count)
    test, train = (
        some(Records(records.take(places)), None if kept is None else kept[places.numpy()])
        for places in (order[:held_out].sort().values, order[held_out:].sort().values)
    )
    return train, test


@dataclass(frozen=True, repr=False)
class SplitRecords(Records):
    """Records that coins of their own have kept. `expected` is the public number that plans are
    made for; the real one is secret.

    `part` names what they were kept for: a run that must train on one part refuses records of
    another.
    """

    expected: int = 0
    part: str = ""


@dataclass(frozen=True, repr=False)
class SplitUsers(SplitRecords, UserRecords):
    """Users that coins of their own have kept, each with all of their records."""


@dataclass(frozen=True, eq=False, repr=False)
class SplitSource(UserSource):
    """Users that coins of their own have kept, whose records are chosen at every step."""

    expected: int = 0
    part: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class SplitOwned(Owned):
    """Users that coins of their own have kept, with the owners of their records."""

    expected: int = 0
    part: str = ""

    def grouped(self, base: RecordSource) -> SplitSource | KeptRecords:
        """See `Owned.grouped`."""
        found = super().grouped(base)
        if isinstance(found, KeptRecords):
            return replace(found, expected=self.expected)
        own = {field.name: getattr(found, field.name) for field in fields(UserSource)}
        return SplitSource(**own, expected=self.expected, part=self.part)


def stated(records: Sized) -> int:
    """How many records a plan must have been made for: those that are there, or were expected of
    coins.
    """
    if isinstance(records, SplitRecords | SplitSource):
        return records.expected
    return (records.expected if isinstance(records, KeptRecords) else 0) or len(records)


def part_of(records: object) -> str | None:
    """What records were kept for by coins of their own; None for all others."""
    return records.part if isinstance(records, SplitRecords | SplitSource) else None


def units(records: Records | Owned) -> int:
    """How many rows, or users, toss a coin."""
    if not isinstance(records, Owned):
        return len(records)
    return len(records.users_of(len(as_records(records.fields)))[0])


def first_of(owned: Owned) -> UserRecords:
    """One row for each user, of the first records of theirs: the same ones whenever it is asked."""
    whole = as_records(owned.fields)
    which = owned.users_of(len(whole))[1]
    rows = np.flatnonzero(which >= 0)
    found = by_user(Records(_at(whole, rows), whole.structure), which[rows], owned.most)
    assert isinstance(found, UserRecords)
    return found


def kept_users(owned: Owned, coins: NDArray[np.bool_], expected: int, part: str = "") -> SplitOwned:
    """The users whose coin shows heads, each with all of their records; `expected` of them on
    average.

    Guarantees: which users are kept follows from the coins alone, and a user's records stay
    together.
    """
    if owned.single:
        raise Unsupported(
            "a part of the users where their records are drawn one by one", "draw whole users"
        )
    whole = as_records(owned.fields)
    which = owned.users_of(len(whole))[1]
    rows = np.flatnonzero(coins[which] & (which >= 0))
    _require_some(rows)
    taken = owned.at(Records(_at(whole, rows), whole.structure), rows)
    return SplitOwned(taken.records, taken.users, taken.most, expected=expected, part=part)


@overload
def uncounted(train: Owned, expected: int) -> SplitOwned: ...
@overload
def uncounted(train: Records, expected: int) -> SplitRecords: ...
def uncounted(train: Records | Owned, expected: int) -> SplitRecords | SplitOwned:
    """All records or users, for a plan that was made for so many: how many there are is told to
    nobody.
    """
    if isinstance(train, Owned):
        return SplitOwned(train.records, train.users, train.most, train.single, expected=expected)
    return kept(train, np.ones(len(train), bool), expected)


def kept(records: Records, coins: NDArray[np.bool_], expected: int, part: str = "") -> SplitRecords:
    """The rows whose coin shows heads, in their order; `expected` of them on average. Records
    grouped by user are kept user by user.
    """
    if type(records) not in (Records, SplitRecords, UserRecords, SplitUsers) or len(coins) != len(
        records
    ):
        raise Unsupported(
            "a part of records that are read when they are drawn",
            "group records in memory with dpfy.by_user, or take all of them",
        )
    rows = np.flatnonzero(coins)
    _require_some(rows)
    kind = SplitUsers if isinstance(records, UserRecords) else SplitRecords
    whole = len(rows) == len(records)
    taken = records.tensors if whole else _at(records, rows)
    return kind(taken, records.structure, expected, part)


def _at(records: Records, rows: NDArray[np.int64]) -> tuple[Tensor, ...]:
    chosen = torch.from_numpy(rows)
    return tuple(tensor.index_select(0, chosen.to(tensor.device)) for tensor in records.tensors)


def _require_some(rows: NDArray[np.int64]) -> None:
    if not len(rows):
        raise InvalidInput(
            "records", "none was drawn", "too few for a sample: take a larger part of them"
        )


def some(records: Records, kept: NDArray[np.bool_] | None) -> Records:
    """The rows that are kept. How many rows there were is public, how many are kept is not."""
    if kept is None or kept.all():
        return records
    rows = records.take(torch.from_numpy(np.flatnonzero(kept)))
    return SplitRecords(rows, records.structure, len(records))


def split_fraction(
    records: Records, fraction: float, kept: NDArray[np.bool_] | None = None
) -> tuple[Records, Records]:
    """(train, test) with round(fraction * n) records held out, at least one on each side."""
    count = len(records)
    if count < 2:
        raise InvalidInput(
            "records", count, "at least 2 are needed to hold a part out; give a test file instead"
        )
    return split(records, held_out(count, fraction), kept)
