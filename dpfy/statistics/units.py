"""How much one unit may add: a person with many records is bounded by keeping some of them, chosen
among their own records alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.values import Bound


@dataclass(frozen=True)
class ContributionLimit:
    """At most `records` records of a unit are used, in at most `groups` groups of a group-by, at
    most `each` of them in one group.
    """

    records: int = 1
    groups: int | None = None
    each: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("records", self.records),
            ("groups", self.groups),
            ("each", self.each),
        ):
            if value is not None:
                check.integer(f"contribution.{name}", value, most=1 << 30)

    @property
    def total(self) -> int:
        """The most records of a unit that are used."""
        groups, each = self.groups or self.records, self.each or self.records
        return min(self.records, groups * each)

    @property
    def length(self) -> float:
        """The largest L2 norm of the numbers of records that a unit has in each group."""
        groups, each = self.groups or self.records, min(self.each or self.records, self.total)
        full = min(groups, self.total // each)
        rest = self.total - full * each if full < groups else 0
        return math.sqrt(full * each**2 + rest**2) * (1 + 2.0**-50 if full + bool(rest) > 1 else 1)

    def bound(self, one: Bound) -> Bound:
        """What a unit adds at most, where each of its records adds at most `one` in its group."""
        return Bound(
            one.l2 * self.length,
            one.l1 * self.total,
            one.linf * min(self.each or self.records, self.total),
        )

    def kept(
        self, owners: NDArray[np.int64] | None, groups: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which records are used: the first of their unit, in the order of the data. Records with a
        negative group are none.

        Guarantees: whether a record is kept depends on the records of its own unit alone, and the
        bounds hold for every unit.
        """
        use = groups >= 0
        if owners is None:
            return use
        rows = np.flatnonzero(use)
        for most, keys in (
            (self.each, (owners, groups)),
            (self.groups, None),
            (self.total, (owners,)),
        ):
            if most is None:
                continue
            if keys is None:
                rows = rows[_rank_of_group(owners[rows], groups[rows]) < most]
            else:
                rows = rows[_rank(*(key[rows] for key in keys)) < most]
        mask = np.zeros(len(groups), bool)
        mask[rows] = True
        return mask


def _rank(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many earlier records have the same keys."""
    order = np.lexsort(keys)
    rank = np.empty(len(order), np.int64)
    rank[order] = _since(_starts(*(key[order] for key in keys)))
    return rank


def _rank_of_group(owners: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many other groups of the same owner appeared before the record's."""
    order = np.lexsort((np.arange(len(owners)), groups, owners))
    first = _starts(owners[order], groups[order])
    heads = order[first]  # the earliest record of each pair of owner and group
    position = np.cumsum(first) - 1
    by_owner = np.lexsort((heads, owners[heads]))
    rank = np.empty(len(heads), np.int64)
    rank[by_owner] = _since(_starts(owners[heads][by_owner]))
    found = np.empty(len(owners), np.int64)
    found[order] = rank[position]
    return found


def _starts(*keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where a new value begins in sorted keys."""
    first = np.ones(len(keys[0]), bool)
    if len(first):
        first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return first


def _since(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How far each place is from the last start."""
    places = np.arange(len(starts))
    return np.asarray(places - np.maximum.accumulate(np.where(starts, places, 0)))


def coded(owners: Any) -> NDArray[np.int64]:
    """Names of units as numbers."""
    return np.unique(np.asarray(owners, dtype=str), return_inverse=True)[1].astype(np.int64)
