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
from functools import reduce
from typing import Any, Union

import numpy as np

from dpfy.engines.aggregates import left_in
from dpfy.engines.expressions import (
    TRUE,
    Expression,
    absent,
    choose,
    code,
    counted_where,
    number,
    of,
    part,
    text,
    word_place,
)
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
from dpfy.tables.schema import Schema

MOST_FOUND = 1000
"""Words of a column that groups are made of, where the words are found by a release."""
MOST_WORD = 200
"""Characters of a word that are distinguished."""


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

    def code(self) -> Expression:
        """The place of a record in `cells`."""
        values, last = number(self.name), len(self.edges) - 1
        found = choose(values.equals(self.edges[-1]), last, values.place(self.edges))
        return choose(found.among((0, last + 1)), last, found - 1)


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

    def code(self) -> Expression:
        """The place of a record in `cells`."""
        found = part(self.column.name, self.part)
        if self.part != "year":
            return found
        return choose(found.missing(), len(self.labels), found - int(self.labels[0])).whole()


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

    def code(self) -> Expression:
        """The place of a record in `cells`."""
        return word_place(text(self.name, MOST_WORD), self.words or ())


Where = tuple[Union[tuple[Column, Condition], "AnyWhere"], ...]


@dataclass(frozen=True)
class CaseGroups:
    """Groups by conditions: the first that holds gives a record its group.

    Guarantees: the group of a record depends on its own cells and the public conditions alone.
    """

    name: str
    branches: tuple[tuple[Where, str], ...]
    other: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The groups."""
        labels = tuple(label for _, label in self.branches)
        return labels if self.other in labels else (*labels, self.other)

    @property
    def most(self) -> int:
        """How many groups there are at most."""
        return len(self.cells)

    @property
    def columns(self) -> list[Column]:
        """The columns that the conditions read."""
        return [column for where, _ in self.branches for column in _columns(where)]

    def code(self) -> Expression:
        """The place of a record in `cells`."""
        found = of(self.cells.index(self.other))
        for place, (where, _) in reversed([*enumerate(self.branches)]):
            found = choose(_all(where), place, found)
        return found


GroupKey = Union[WordColumn, Bins, DatePart, FoundWords, CaseGroups]


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
        keys: list[Column] = []
        for key in self.by:
            if isinstance(key, CaseGroups):
                keys += key.columns
            else:
                keys.append(key if isinstance(key, WordColumn) else key.column)
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

    def code(self, schema: Schema | None) -> Expression:
        """The group of a record; -1 where a condition leaves it out, or the schema, where there is
        one.
        """
        found = of(0)
        for key in self.by:
            mine = code(key.name) if isinstance(key, WordColumn) else key.code()
            found = mine if found == of(0) else found * len(key.cells) + mine
        counted = _all(self.where) & (TRUE if schema is None else left_in(schema))
        return counted_where(found, counted)


@dataclass(frozen=True)
class AnyWhere:
    """Records for which all conditions of at least one of `choices` hold."""

    choices: tuple[tuple[tuple[Column, Condition] | AnyWhere, ...], ...]


def _columns(where: Where) -> list[Column]:
    found: list[Column] = []
    for term in where:
        if isinstance(term, AnyWhere):
            found += [column for choice in term.choices for column in _columns(choice)]
        else:
            found.append(term[0])
    return found


def _all(where: Where) -> Expression:
    """Whether a record meets all conditions. Each is judged by its own cells alone."""
    found = TRUE
    for term in where:
        if isinstance(term, AnyWhere):
            first, *rest = (_all(choice) for choice in term.choices)
            found = found & reduce(lambda one, other: one | other, rest, first)
        else:
            found = found & _holds(*term)
    return found


def _holds(column: Column, condition: Condition) -> Expression:
    """Whether a record meets a condition. A missing number meets none but "not equal"."""
    given = condition.value
    if condition.comparison == "is":
        gone = absent(column.name)
        return gone if given == "missing" else ~gone
    if isinstance(column, WordColumn):
        values = code(column.name)
        wanted: list[Any] = [column.words.index(str(v)) for v in listed(given)]
    else:
        assert isinstance(column, RangedColumn)
        values = number(column.name)
        wanted = [column.value(str(v)) for v in listed(given)]
    if condition.comparison == "in":
        return values.among(wanted)
    one = wanted[0]
    return {
        "=": values.equals(one),
        "!=": ~values.equals(one),
        "<": values < one,
        "<=": values <= one,
        ">": values > one,
        ">=": values >= one,
    }[condition.comparison]


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
