"""Train and test from one file, by a permutation that is fixed and public; and parts of records by
secret coins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.count import held_out
from dpfy.data.records import Records
from dpfy.data.users import UserRecords


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


def stated(records: Sized) -> int:
    """How many records a plan must have been made for: those that are there, or were expected of
    coins.
    """
    return records.expected if isinstance(records, SplitRecords) else len(records)


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
    rows = torch.from_numpy(np.flatnonzero(coins))
    if not len(rows):
        raise InvalidInput(
            "records", "none was drawn", "too few for a sample: take a larger part of them"
        )
    kind = SplitUsers if isinstance(records, UserRecords) else SplitRecords
    return kind(
        tuple(tensor.index_select(0, rows.to(tensor.device)) for tensor in records.tensors),
        records.structure,
        expected,
        part,
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
