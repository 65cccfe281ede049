"""Which records are counted, and the group of each: columns of words, bins of numbers, parts of
dates, and words that an earlier release of the same query found; and conditions.

A record lies in exactly one group, which its own cells decide, with what is public or was released
before. So adding a record changes one group alone, and a statistic costs the same with groups as
without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.statistics.language import AnyOf, Condition
from dpfy.tables.columns import (
    MONTHS,
    OTHER,
    WEEKDAYS,
    Column,
    Date,
    RangedColumn,
    WordColumn,
)
from dpfy.tables.table import PrivateTable

MOST_FOUND = 1000
"""Words of a column that groups are made of, where the words are found by a release."""
MOST_WORD = 200
"""Characters of a word that are told apart."""

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """Numbers between public edges; the last bin holds its upper edge. A number outside all bins,
    or a missing one, is in the group of all others.

    Guarantees: the bin of a record depends on its own cell and the public edges alone.
    """

    column: RangedColumn
    edges: tuple[float, ...]

    @property
    def name(self) -> str:
        """The column."""
        return self.column.name

    @property
    def labels(self) -> tuple[str, ...]:
        """The bins in words."""
        ends = ")" * (len(self.edges) - 2) + "]"
        shown = [self._shown(edge) for edge in self.edges]
        pairs = zip(shown[:-1], shown[1:], ends, strict=True)
        return tuple(f"[{low}, {high}{end}" for low, high, end in pairs)

    def _shown(self, edge: float) -> str:
        """An edge in words: of dates the first day that is not before it."""
        if isinstance(self.column, Date):
            return str(np.datetime64(self.column.start + math.ceil(edge), "D"))
        return f"{edge:g}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The groups: the bins, and all others."""
        return (*self.labels, OTHER)

    @property
    def most(self) -> int:
        """How many groups there are at most."""
        return len(self.edges)

    def codes(self, table: PrivateTable) -> Codes:
        """The place of each record in `cells`."""
        values, last = table.numbers(self.name), len(self.edges) - 1
        found = np.searchsorted(np.array(self.edges), values, side="right") - 1
        found = np.where(values == self.edges[-1], last - 1, found)
        inside = (found >= 0) & (found < last) & ~np.isnan(values)
        return np.where(inside, found, last)


@dataclass(frozen=True)
class DatePart:
    """The year, the month or the weekday of a date in a public range. A missing date is in the
    group of all others.

    Guarantees: the part of a record depends on its own cell and the public range alone.
    """

    column: Date
    part: str

    @property
    def name(self) -> str:
        """The part and the column."""
        return f"{self.part}({self.column.name})"

    @property
    def labels(self) -> tuple[str, ...]:
        """The parts in words."""
        if self.part == "year":
            first, last = (int(str(day)[:4]) for day in (self.column.first, self.column.last))
            return tuple(str(year) for year in range(first, last + 1))
        return MONTHS if self.part == "month" else WEEKDAYS

    @property
    def cells(self) -> tuple[str, ...]:
        """The groups: the parts, and all others."""
        return (*self.labels, OTHER)

    @property
    def most(self) -> int:
        """How many groups there are at most."""
        return len(self.cells)

    def codes(self, table: PrivateTable) -> Codes:
        """The place of each record in `cells`."""
        found = self.column.part(self.part, table.numbers(self.column.name))
        if self.part == "year":
            found = np.where(np.isnan(found), len(self.labels), found - int(self.labels[0]))
        return np.asarray(found).astype(np.int64)


@dataclass(frozen=True)
class FoundWords:
    """Words of a column about which nothing is public, that a release found before: `words`, or
    None as long as it was not made. All other records are one group.

    Guarantees: the group of a record depends on its own cell and on released words alone.
    """

    column: Column
    words: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The column."""
        return self.column.name

    @property
    def cells(self) -> tuple[str, ...]:
        """The groups: the words, and all others."""
        return (*(self.words or ()), OTHER)

    @property
    def most(self) -> int:
        """How many groups there are at most."""
        return MOST_FOUND + 1

    def codes(self, table: PrivateTable) -> Codes:
        """The place of each record in `cells`."""
        place = {word: position for position, word in enumerate(self.words or ())}
        other = len(place)
        texts = table.texts(self.name)
        found = [other if t is None else place.get(t[:MOST_WORD], other) for t in texts]
        return np.array(found, np.int64).reshape(-1)


GroupKey = WordColumn | Bins | DatePart | FoundWords


@dataclass(frozen=True)
class GroupBy:
    """Which records are counted, and the group of each: the cells of the keys of a group-by, in
    their order.
    """

    by: tuple[GroupKey, ...] = ()
    where: tuple[tuple[Column, Condition] | AnyWhere, ...] = ()

    @property
    def count(self) -> int:
        """The number of groups."""
        return math.prod(len(key.cells) for key in self.by)

    @property
    def most(self) -> int:
        """The number of groups at most, also where some are still to be found."""
        return math.prod(
            len(key.cells) if isinstance(key, WordColumn) else key.most for key in self.by
        )

    @property
    def open(self) -> bool:
        """Whether groups are still to be found."""
        return any(isinstance(key, FoundWords) and key.words is None for key in self.by)

    @property
    def columns(self) -> list[Column]:
        """The columns that are read."""
        keys = [key if isinstance(key, WordColumn) else key.column for key in self.by]
        return [*keys, *_columns(self.where)]

    def knowing(self, words: Mapping[str, tuple[str, ...]]) -> GroupBy:
        """With the words, by column, that a release found."""
        return replace(
            self,
            by=tuple(
                replace(key, words=words[key.name][:MOST_FOUND])
                if isinstance(key, FoundWords) and key.name in words
                else key
                for key in self.by
            ),
        )

    def places(self) -> Iterator[dict[str, str]]:
        """Each group in words."""
        cells = [(key.name, key.cells) for key in self.by]
        for cell in np.ndindex(*(len(words) for _, words in cells)):
            yield {name: words[i] for (name, words), i in zip(cells, cell, strict=True)}

    def codes(self, table: PrivateTable, every_row: bool = False) -> Codes:
        """The group of each record; -1 where a condition or the schema
        leaves it out."""
        found = np.zeros(table.size, np.int64)
        for key in self.by:
            mine = table.codes(key.name) if isinstance(key, WordColumn) else key.codes(table)
            found = found * len(key.cells) + mine
        left_out = None if every_row else table.left_out()
        counted = _all(self.where, table)
        return np.where(counted if left_out is None else counted & ~left_out, found, -1)


@dataclass(frozen=True)
class AnyWhere:
    """Records for which all conditions of at least one of `choices` hold."""

    choices: tuple[tuple[tuple[Column, Condition] | AnyWhere, ...], ...]


Where = tuple[tuple[Column, Condition] | AnyWhere, ...]


def _columns(where: Where) -> list[Column]:
    found: list[Column] = []
    for part in where:
        if isinstance(part, AnyWhere):
            found += [column for choice in part.choices for column in _columns(choice)]
        else:
            found.append(part[0])
    return found


def _all(where: Where, table: PrivateTable) -> NDArray[np.bool_]:
    """Which records meet all conditions. Each is judged by its own cells alone."""
    found = np.ones(table.size, np.bool_)
    for part in where:
        if isinstance(part, AnyWhere):
            found &= np.logical_or.reduce([_all(choice, table) for choice in part.choices])
        else:
            found &= _holds(*part, table)
    return found


def _holds(column: Column, condition: Condition, table: PrivateTable) -> NDArray[np.bool_]:
    """Which records meet a condition. A missing number meets none but "not equal"."""
    given = condition.value
    if isinstance(column, WordColumn):
        values: Any = table.codes(column.name)
        wanted: Any = [column.words.index(str(v)) for v in listed(given)]
    else:
        assert isinstance(column, RangedColumn)
        values, wanted = table.numbers(column.name), [column.value(str(v)) for v in listed(given)]
    if condition.comparison == "in":
        return np.asarray(np.isin(values, wanted))
    one = wanted[0]
    with np.errstate(invalid="ignore"):
        found = {
            "=": values == one,
            "!=": values != one,
            "<": values < one,
            "<=": values <= one,
            ">": values > one,
            ">=": values >= one,
        }[condition.comparison]
    return np.asarray(found)


def listed(value: str | float | tuple[str | float, ...]) -> tuple[str | float, ...]:
    """The value of a condition, or its values."""
    return value if isinstance(value, tuple) else (value,)


def conditions(where: tuple[Condition | AnyOf, ...]) -> Iterator[Condition]:
    """Every condition of a query."""
    for term in where:
        if isinstance(term, AnyOf):
            for choice in term.choices:
                yield from conditions(choice)
        else:
            yield term
