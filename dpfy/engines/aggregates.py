"""The one interface between families and tables: sums of whole numbers over bounded contributions.

An engine answers two questions. `sums` adds up what rows add to numbered cells; `counts` counts
rows by keys that are not public. Both use at most so many rows of a person (`ContributionLimit`),
chosen by a keyed hash. What comes back is whole numbers: the same in every engine, whatever the
order of the rows, their partitions and the number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Union

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import TRUE, Expression, absent, evaluate
from dpfy.tables.columns import Number
from dpfy.tables.schema import Schema
from dpfy.tables.table import PrivateTable

MOST = 1 << 62
"""The end of the range of a sum; see `dpfy.mechanisms.grid`."""


@dataclass(frozen=True)
class SumRequest:
    """Sums over rows. A row of a group (a whole number, not below 0) adds each of `values`, or 1
    where there are none, to each of its `cells`.

    Args:
        group: What the limits of a person count as one group; -1 where the row is not counted.
        cells: Places that the row adds to.
        values: Whole numbers.
        limit: How many rows of a person are used.
        key: Chooses them; it follows from the secret of the run.
    """

    group: Expression
    cells: tuple[Expression, ...]
    values: tuple[Expression, ...] = ()
    limit: ContributionLimit = field(default_factory=ContributionLimit)
    key: str = ""


@dataclass(frozen=True)
class CountRequest:
    """Counts of rows by a group and keys that are not public; a row without a key is not counted.
    Each combination is a group for the limits of a person.
    """

    group: Expression
    keys: tuple[Expression, ...]
    limit: ContributionLimit = field(default_factory=ContributionLimit)
    key: str = ""


Request = Union[SumRequest, CountRequest]


@dataclass(frozen=True)
class KeptColumn:
    """A column of rows that are kept: whole numbers between two that are public."""

    value: Expression
    low: int
    high: int


@dataclass(frozen=True)
class KeepRequest:
    """Rows that are read many times: what they are made of is computed once, and the rows of a
    person are chosen once.

    Args:
        group: -1 where the row is not used.
        columns: Whole numbers, by name.
        content: What the choice of a person's rows looks at: whole numbers.
        limit: How many rows of a person are used.
        key: Chooses them; it follows from the secret of the run.
        once: They are read once, so that an engine need not write them down.
    """

    group: Expression
    columns: Mapping[str, KeptColumn]
    content: tuple[Expression, ...] = ()
    limit: ContributionLimit = field(default_factory=ContributionLimit)
    key: str = ""
    once: bool = False


@dataclass(frozen=True)
class CellSums:
    """The sums of the cells that rows add to: their places, and whole numbers [places, width]."""

    at: NDArray[np.int64]
    totals: NDArray[Any]

    def dense(self, cells: int) -> NDArray[np.int64]:
        """All cells [cells, width]. What leaves 62 bits counts as the end of the range."""
        found = np.zeros((cells, self.totals.shape[1]), np.int64)
        found[self.at] = np.clip(self.totals, -MOST, MOST).astype(np.int64)
        return found


class KeptRows(Protocol):
    """Rows that an engine keeps where the table is, until they are closed."""

    def sums(
        self, cells: Sequence[tuple[Expression, int]], values: Sequence[Expression] = ()
    ) -> list[NDArray[np.int64]]:
        """For each of `cells`, the sums of the values by place [places, width]; of ones, where there
        are no values. A cell is the place of a row, -1 where it is not counted, and how many places
        there are. Expressions read `kept` columns.
        """

    def close(self) -> None:
        """Forget the rows."""


class TableEngine(Protocol):
    """What computes bounded aggregates of one table.

    Guarantees: only aggregates leaves it; no cell raises an error or changes a message.
    """

    name: str
    schema: Schema
    owned: bool

    def sums(self, asked: SumRequest) -> CellSums:
        """Sums of whole numbers."""

    def counts(self, asked: CountRequest) -> dict[tuple[Any, ...], int]:
        """Counts by group and keys."""

    def keep_rows(self, asked: KeepRequest) -> KeptRows:
        """The rows that are used, kept where the table is."""

    def batch(self, asked: Sequence[Request]) -> list[Any]:
        """The answers to several requests, by as few readings of the table as can be."""

    def rows(self) -> int:
        """The number of rows, which is private unless the caller has published it."""

    def persons(self, most: int) -> TableEngine:
        """A table with one row for each person, and one column: how many rows they have, at most
        `most`.
        """


CONTRIBUTIONS = "contributions"
"""The column of a table of persons: how many rows each has."""


def per_person(most: int) -> Schema:
    """The columns of a table of persons."""
    return Schema.of([Number(CONTRIBUTIONS, 0, most)])


class MemoryEngine:
    """The reference: a table in memory, and numpy."""

    name = "memory"

    def __init__(self, table: PrivateTable) -> None:
        self.table, self.schema = table, table.schema
        self.owned = table.owners is not None

    def sums(self, asked: SumRequest) -> CellSums:
        """See `TableEngine`."""
        groups = _whole(asked.group, self.table)
        cells = [_whole(cell, self.table) for cell in asked.cells]
        values = [_whole(value, self.table) for value in asked.values]
        kept = self._kept(asked.limit, groups, [*cells, *values], asked.key)
        ones = np.ones(int(kept.sum()), np.int64)
        at = np.concatenate([cell[kept] for cell in cells])
        each = [value[kept] for value in values] or [ones]
        return _summed(at, [np.tile(value, len(cells)) for value in each])

    def counts(self, asked: CountRequest) -> dict[tuple[Any, ...], int]:
        """See `TableEngine`."""
        groups = _whole(asked.group, self.table)
        keys = [
            [None if cell != cell else cell for cell in evaluate(key, self.table).tolist()]
            for key in asked.keys
        ]
        pairs = list(zip(groups.tolist(), *keys, strict=True))
        known: dict[tuple[Any, ...], int] = {}
        codes = [
            -1 if pair[0] < 0 or None in pair else known.setdefault(pair, len(known))
            for pair in pairs
        ]
        places = np.array(codes, np.int64)
        named = list(known)
        kept = self._kept(asked.limit, places, (), asked.key, named)
        sizes = np.bincount(places[kept], minlength=len(named)).tolist()
        return {pair: size for pair, size in zip(named, sizes, strict=True) if size}

    def keep_rows(self, asked: KeepRequest) -> KeptRows:
        """See `TableEngine`."""
        groups = _whole(asked.group, self.table)
        content = [_whole(part, self.table) for part in asked.content]
        used = self._kept(asked.limit, groups, content, asked.key)
        columns = {
            name: _whole(column.value, self.table)[used] for name, column in asked.columns.items()
        }
        return MemoryRows(columns, int(used.sum()))

    def batch(self, asked: Sequence[Request]) -> list[Any]:
        """See `TableEngine`."""
        return [self.sums(a) if isinstance(a, SumRequest) else self.counts(a) for a in asked]

    def _kept(
        self,
        limit: ContributionLimit,
        groups: NDArray[np.int64],
        content: Sequence[NDArray[np.int64]],
        key: str,
        named: Sequence[tuple[Any, ...]] = (),
    ) -> NDArray[np.bool_]:
        labels = ["|".join(map(str, pair)) for pair in named]
        return limit.kept(self.table.owners, groups, self.table.owner_words, content, key, labels)

    def rows(self) -> int:
        """See `TableEngine`."""
        return self.table.size

    def persons(self, most: int) -> TableEngine:
        """See `TableEngine`."""
        assert self.table.owners is not None
        sizes = np.bincount(self.table.owners[self.table.owners >= 0])
        return MemoryEngine(PrivateTable({CONTRIBUTIONS: sizes[sizes > 0]}, per_person(most)))


class Answered:
    """A table whose answers to some requests are known: they were found by one reading.

    Args:
        engine: Answers all others.
        asked: What is known.
    """

    def __init__(self, engine: TableEngine, asked: Sequence[Request]) -> None:
        self.engine, self.name, self.schema = engine, engine.name, engine.schema
        self.owned, asked = engine.owned, list(dict.fromkeys(asked))
        self.known = dict(zip(asked, engine.batch(asked), strict=True))

    @property
    def content(self) -> bytes:
        """A hash of all known answers: whatever is released follows from them and from noise."""
        whole = hashlib.blake2b()
        for found in self.known.values():
            if isinstance(found, CellSums):
                found = {"at": found.at.tolist(), "totals": found.totals.tolist()}
            whole.update(repr(sorted(found.items(), key=repr)).encode("utf-8", "surrogatepass"))
        return whole.digest()

    def sums(self, asked: SumRequest) -> CellSums:
        """See `TableEngine`."""
        return self.known[asked] if asked in self.known else self.engine.sums(asked)

    def counts(self, asked: CountRequest) -> dict[tuple[Any, ...], int]:
        """See `TableEngine`."""
        return self.known[asked] if asked in self.known else self.engine.counts(asked)

    def batch(self, asked: Sequence[Request]) -> list[Any]:
        """See `TableEngine`."""
        return self.engine.batch(asked)

    def keep_rows(self, asked: KeepRequest) -> KeptRows:
        """See `TableEngine`."""
        return self.engine.keep_rows(asked)

    def rows(self) -> int:
        """See `TableEngine`."""
        return self.engine.rows()

    def persons(self, most: int) -> TableEngine:
        """See `TableEngine`."""
        return self.engine.persons(most)


@dataclass(frozen=True, repr=False)
class MemoryRows:
    """Rows that the reference keeps."""

    columns: dict[str, NDArray[np.int64]]
    size: int

    def kept(self, name: str) -> NDArray[np.int64]:
        """A column."""
        return self.columns[name]

    def sums(
        self, cells: Sequence[tuple[Expression, int]], values: Sequence[Expression] = ()
    ) -> list[NDArray[np.int64]]:
        """See `KeptRows`."""
        each = [_whole(value, self) for value in values] or [np.ones(self.size, np.int64)]
        found = []
        for cell, size in cells:
            at = _whole(cell, self)
            there = at >= 0
            found.append(_summed(at[there], [value[there] for value in each]).dense(size))
        return found

    def close(self) -> None:
        """See `KeptRows`."""
        self.columns.clear()


def engine_of(table: Any) -> TableEngine:
    """The engine of a table; one in memory has the reference."""
    if isinstance(table, PrivateTable):
        return MemoryEngine(table)
    if not hasattr(table, "sums"):
        raise InvalidInput("data", type(table).__name__, "must be a table")
    return table  # type: ignore[no-any-return]


def _whole(asked: Expression, table: Any) -> NDArray[np.int64]:
    return np.asarray(evaluate(asked, table)).astype(np.int64)


def _summed(at: NDArray[np.int64], values: Sequence[NDArray[np.int64]]) -> CellSums:
    """Exact sums by place, in Python's whole numbers."""
    order = np.argsort(at, kind="stable")
    places, starts = np.unique(at[order], return_index=True)
    totals = np.zeros((len(places), len(values)), object)
    for column, value in enumerate(values):
        if len(places):
            high, low = (
                np.add.reduceat(half[order], starts).astype(object)
                for half in (value >> 31, value & (1 << 31) - 1)
            )
            totals[:, column] = high * (1 << 31) + low
    return CellSums(places, totals)


def left_in(schema: Schema) -> Expression:
    """Whether the schema counts a row: no cell that it must have is missing."""
    found = TRUE
    for column in schema.columns:
        if column.drop:
            found = found & ~absent(column.name)
    return found
