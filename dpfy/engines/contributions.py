"""How much one unit may add: a person with many records is bounded by keeping some of them, which a
keyed hash chooses among their own records alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.values import Bound

_NONE = np.empty(0, "U32")


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
    def least(self) -> int:
        """An owner with at most so many records is below every limit."""
        return min(limit for limit in (self.each, self.groups, self.total) if limit)

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
        self,
        owners: NDArray[np.int64] | None,
        groups: NDArray[np.int64],
        names: Sequence[str] = (),
        content: Sequence[NDArray[np.int64]] = (),
        key: str = "",
        labels: Sequence[str] = (),
    ) -> NDArray[np.bool_]:
        """Which records are used. Records with a negative group are none, and those with a negative
        owner too. `names` and `labels` are the words of owners and groups, by number; `content` is
        what each record adds, in whole numbers; `key` belongs to the secret of the run.

        A keyed hash chooses. Of the records of an owner in a group those with the least hashes are
        used, at most `each`; then the groups with the least hashes, at most `groups`; then the
        records with the least hashes, at most `total`. Records that add the same are numbered, and
        the number is hashed too, so that each of them has the same chance.

        Guarantees: whether a record is kept depends on the records of its own unit and the key
        alone, not on the order of the data, and the bounds hold for every unit.
        """
        if owners is None:
            return groups >= 0
        kept = (groups >= 0) & (owners >= 0)
        rows = np.flatnonzero(kept)
        rows = rows[np.bincount(owners[rows], minlength=1)[owners[rows]] > self.least]
        of, at = owners[rows], groups[rows]
        cells = [np.asarray(part)[rows] for part in content]
        number = _rank(_NONE, [of, at, *cells])
        hashes, heads = np.empty((2, len(rows)), "U32")
        for k, row in enumerate(zip(of, at, *cells, number, strict=True)):
            owner = names[row[0]] if len(names) else row[0]
            group = labels[row[1]] if len(labels) else row[1]
            hashes[k] = digest(key, "row", owner, group, *row[2:])
            heads[k] = digest(key, "group", owner, group)
        used = np.ones(len(rows), bool)
        if self.each is not None:
            used = _rank(hashes, [of, at]) < self.each
        if self.groups is not None:
            used &= _dense_rank(heads, of) < self.groups
        left = np.flatnonzero(used)
        kept[rows] = False
        kept[rows[left[_rank(hashes[left], [of[left]]) < self.total]]] = True
        return kept


def digest(*parts: object) -> str:
    """The keyed hash of a record or a group, as every engine computes it."""
    text = "|".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return hashlib.md5(text, usedforsecurity=False).hexdigest()


def _rank(hashes: NDArray[np.str_], keys: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """How many records with the same keys come before each, in the order of their hashes."""
    order = np.lexsort([*([hashes] if len(hashes) else []), *keys])
    rank = np.empty(len(order), np.int64)
    rank[order] = _since(_starts(*(key[order] for key in keys)))
    return rank


def _dense_rank(hashes: NDArray[np.str_], owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many smaller hashes the owner of each record has, each counted once."""
    order = np.lexsort((hashes, owners))
    new_owner = _starts(owners[order])
    group = np.cumsum(_starts(owners[order], hashes[order])) - 1
    rank = np.empty(len(order), np.int64)
    rank[order] = group - np.maximum.accumulate(np.where(new_owner, group, 0))
    return rank


def _starts(*keys: NDArray[Any]) -> NDArray[np.bool_]:
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
