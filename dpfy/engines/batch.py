"""Several sums by one reading of a table.

All rows are added up at once, whoever they belong to: one SELECT with an aggregate for each number
that is asked for. Few persons have more rows than are used. Their rows are kept in a temporary
table, and what the sums have too much is subtracted: all of these rows, less those that are chosen.
Whole numbers make both the same, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfy.engines.aggregates import CellSums, SumRequest
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import LEAVES, TRUE, Expression, bounds, of
from dpfy.tables.schema import Schema

if TYPE_CHECKING:
    from dpfy.engines.sql import Selected, SqlEngine

MOST_COMBINED = 1 << 16
"""So many combinations of cells are added up together; more are grouped one after the other."""
STRICT = ("+", "-", "*", "/", "clip", "whole", "floor")
"""Operations that are missing where a part is."""
Totals = dict[int, list[int]]


@dataclass(frozen=True)
class SummedRows:
    """A request as a SELECT computes it: which rows count, their cells, and what they add."""

    terms: tuple[Expression, ...]
    cells: tuple[Expression, ...]
    values: tuple[Expression, ...]

    @classmethod
    def of(cls, asked: SumRequest, schema: Schema) -> SummedRows:
        """Conditions apart from the places, which are then simpler."""
        known: dict[Expression, Expression] = {}
        terms = _counted(asked.group, schema, known)
        parts = [
            tuple(_replaced(each, known) for each in listed)
            for listed in (asked.cells, asked.values)
        ]
        return cls(tuple(dict.fromkeys(terms)), *parts)


def _counted(
    place: Expression, schema: Schema, known: dict[Expression, Expression]
) -> list[Expression]:
    """The conditions under which a place is not negative; `known` tells what it is there."""
    terms, inner = [], place
    while inner.op == "choose" and of(-1) in inner.parts[1:]:
        condition, yes, no = inner.parts
        inner = yes if no == of(-1) else no
        for term in _terms(condition if no == of(-1) else ~condition):
            if term.op == ">=" and term.parts[1] == of(0):
                terms += _counted(term.parts[0], schema, known)
            else:
                terms.append(term)
    least = bounds(inner, schema)
    if least is None or least[0] < 0:
        terms.append(inner >= 0)
    if inner != place:
        known[place] = inner
    return terms


def _terms(condition: Expression) -> list[Expression]:
    if condition.op == "and":
        return [term for part in condition.parts for term in _terms(part)]
    return [] if condition == TRUE else [condition]


def _replaced(asked: Expression, known: dict[Expression, Expression]) -> Expression:
    while asked in known:
        asked = known[asked]
    if asked.op in LEAVES or asked.op == "value":
        return asked
    parts = tuple(_replaced(p, known) if isinstance(p, Expression) else p for p in asked.parts)
    return Expression(asked.op, parts)


def counts_once(limit: ContributionLimit) -> bool:
    """Whether equal rows of a person are one, and only the limit of groups is left."""
    return limit.each == 1 and limit.groups is not None and limit.total >= limit.groups


def _of_persons(engine: SqlEngine, asked: SumRequest) -> bool:
    """Whether different persons are counted, and not their rows."""
    content = {*asked.cells, *asked.values}
    return engine.owner is not None and counts_once(asked.limit) and content <= {asked.group}


def batched(engine: SqlEngine, asked: Sequence[SumRequest]) -> list[CellSums]:
    """The sums of several requests."""
    parts = [SummedRows.of(request, engine.schema) for request in asked]
    persons = [_of_persons(engine, request) for request in asked]
    rows = [part for part, one in zip(parts, persons, strict=True) if not one]
    together = iter(_read(engine, rows) if rows else [])
    found = [
        _persons(engine, part) if one else next(together)
        for part, one in zip(parts, persons, strict=True)
    ]
    if engine.owner is not None and asked:
        for totals, more in zip(found, _corrections(engine, asked), strict=True):
            for place, numbers in more.items():
                held = totals.get(place, [0] * len(numbers))
                totals[place] = [a + b for a, b in zip(held, numbers, strict=True)]
    return [
        _cell_sums(totals, max(1, len(part.values)))
        for totals, part in zip(found, parts, strict=True)
    ]


def _cell_sums(totals: Totals, width: int) -> CellSums:
    """Sums by place, in the order of places; a first number says how many rows there are."""
    held = sorted((place, numbers) for place, numbers in totals.items() if numbers[0])
    at = np.array([place for place, _ in held], np.int64)
    numbers = [each[1:] if len(each) > width else each for _, each in held]
    return CellSums(at, np.array(numbers, object).reshape(len(held), width))


class _Aggregates:
    """The columns of a SELECT: each aggregate once."""

    def __init__(self, held: Selected, schema: Schema, common: Sequence[Expression]) -> None:
        self.held, self.schema, self.common = held, schema, set(common)
        self.columns: dict[str, int] = {}

    def _column(self, sql: str) -> int:
        return self.columns.setdefault(sql, len(self.columns))

    def count(self, part: SummedRows) -> int:
        """How many rows count."""
        terms = [term for term in part.terms if term not in self.common]
        if len(terms) == 1 and (leaf := _there(terms[0])) is not None:
            return self._column(f"COUNT({self.held.column(leaf)})")
        return self._column("COUNT(*)" + self._filter(terms))

    def total(self, part: SummedRows, value: Expression) -> tuple[int, int, int | None]:
        """A sum as a, b and a column: a times the count, and b times the column."""
        if value.op == "value" and isinstance(value.parts[0], int):
            return int(value.parts[0]), 0, None
        if value.op == "-" and value.parts[0].op == "value":
            first = value.parts[0].parts[0]
            if isinstance(first, int) and value.parts[1].op == "whole":
                return first, -1, self._sum(part, value.parts[1])
        return 0, 1, self._sum(part, value)

    def _sum(self, part: SummedRows, value: Expression) -> int:
        terms = [term for term in part.terms if term not in self.common]
        terms = [t for t in terms if (leaf := _there(t)) is None or not _strict(value, leaf)]
        sql = self.held.dialect.total(self.held.column(value))
        return self._column(sql + self._filter(terms))

    def _filter(self, terms: Sequence[Expression]) -> str:
        named = " AND ".join(self.held.column(term) for term in terms)
        return f" FILTER (WHERE {named})" if terms else ""


def _there(term: Expression) -> Expression | None:
    """The number that a condition wants not to be missing."""
    if term.op != "not" or term.parts[0].op != "missing":
        return None
    found = term.parts[0].parts[0]
    return found if found.op == "number" else None


def _strict(value: Expression, leaf: Expression) -> bool:
    """Whether a value is missing where a number is."""
    if value == leaf:
        return True
    inner = [part for part in value.parts if isinstance(part, Expression)]
    return value.op in STRICT and any(_strict(part, leaf) for part in inner)


def _read(engine: SqlEngine, parts: Sequence[SummedRows]) -> list[Totals]:
    """All rows added up, whoever they belong to, by one reading; see `_cell_sums`."""
    held = engine.selected(owned=False)
    common = [t for t in parts[0].terms if all(t in part.terms for part in parts)]
    made = _Aggregates(held, engine.schema, common)
    keys = list(dict.fromkeys(cell for part in parts for cell in part.cells))
    names = [held.column(key) for key in keys]
    counts = [made.count(part) for part in parts]
    totals = [[made.total(part, value) for value in part.values] for part in parts]
    where = [held.column(term) for term in common]
    columns = [f"{sql} AS t{k}" for k, sql in enumerate(made.columns)]
    sizes = [bounds(key, engine.schema) for key in keys]
    combined = math.prod(math.inf if s is None else s[1] - s[0] + 1 for s in sizes)
    named = ", ".join(f"k{k}" for k in range(len(keys)))
    grouped = named
    if len(keys) > 1 and combined > MOST_COMBINED:
        grouped = f"GROUPING SETS ({', '.join(f'(k{k})' for k in range(len(keys)))})"
    given = [f"{name} AS k{k}" for k, name in enumerate(names)]
    rows = f"SELECT *, {', '.join(given)} FROM ({held.sql()}) AS steps"
    rows += f" WHERE {' AND '.join(where)}" if where else ""
    sql = f"SELECT {named}, {', '.join(columns)} FROM ({rows}) AS counted GROUP BY {grouped}"
    fetched = engine.fetch(sql)
    return [
        _collected(fetched, keys, part, count, total)
        for part, count, total in zip(parts, counts, totals, strict=True)
    ]


def _persons(engine: SqlEngine, part: SummedRows) -> Totals:
    """How many persons each group has."""
    held = engine.selected()
    group = held.column(part.cells[0])
    where = [f"{held.owner_name} IS NOT NULL", *map(held.column, part.terms)]
    rows = f"SELECT {group}, {held.owner_name} FROM ({held.sql()}) AS steps"
    return {
        int(place): [int(count)]
        for place, count in engine.fetch(_different(f"{rows} WHERE {' AND '.join(where)}", group))
    }


def _different(rows: str, group: str) -> str:
    distinct = f"SELECT DISTINCT * FROM ({rows}) AS counted"
    return f"SELECT {group}, COUNT(*) FROM ({distinct}) AS persons GROUP BY {group}"


def _collected(
    rows: Sequence[Sequence[Any]],
    keys: Sequence[Expression],
    part: SummedRows,
    count: int,
    totals: Sequence[tuple[int, int, int | None]],
) -> Totals:
    found: Totals = {}
    start = len(keys)
    for cell in part.cells:
        key = keys.index(cell)
        for row in rows:
            number = row[start + count]
            if row[key] is None or not number:
                continue
            numbers = [int(number)]
            for a, b, column in totals:
                each = 0 if column is None else int(row[start + column] or 0)
                numbers.append(a * int(number) + b * each)
            held = found.setdefault(int(row[key]), [0] * len(numbers))
            for k, each in enumerate(numbers):
                held[k] += each
    return found


def _corrections(engine: SqlEngine, asked: Sequence[SumRequest]) -> list[Totals]:
    """What must be added because not all rows of persons are used."""
    least = [
        int(request.limit.groups or 1) if _of_persons(engine, request) else request.limit.least
        for request in asked
    ]
    busy = engine.owners_over(min(least))
    held = engine.selected()
    columns = [_named(held, request) for request in asked]
    needed = ", ".join(dict.fromkeys(name for each in columns for part in each for name in part))
    owner = held.owner_name
    one = f"{owner} IS NULL" + (f" OR {owner} IN (SELECT {owner} FROM {busy})" if busy else "")
    rows = f"SELECT {needed}, {owner} FROM ({held.sql()}) AS steps WHERE {one}"
    table = engine.new_table(rows)
    found = [dict[int, list[int]]() for _ in asked]
    if engine.fetch(f"SELECT COUNT(*) FROM {table}")[0][0]:
        for totals, request, each in zip(found, asked, columns, strict=True):
            (group,), cells, values = each
            there = f"SELECT * FROM {table} WHERE {group} >= 0"
            used = engine.used(there, [group], [*cells, *values], request.limit, request.key)
            less = _by_cell(engine, there, cells, values)
            if _of_persons(engine, request):
                less = (
                    f"SELECT {group}, {owner} FROM ({there}) AS counted WHERE {owner} IS NOT NULL"
                )
                less = _different(less, group)
            for sign, sql in ((-1, less), (1, _by_cell(engine, used, cells, values))):
                for place, *numbers in engine.fetch(sql):
                    before = totals.setdefault(int(place), [0] * len(numbers))
                    totals[int(place)] = [
                        a + sign * int(b) for a, b in zip(before, numbers, strict=True)
                    ]
    engine.forget(table)
    return found


def _named(held: Selected, asked: SumRequest) -> tuple[list[str], list[str], list[str]]:
    group, cells, values = [asked.group], asked.cells, asked.values
    return (
        [held.column(part) for part in group],
        [held.column(part) for part in cells],
        [held.column(part) for part in values],
    )


def _by_cell(engine: SqlEngine, rows: str, cells: Sequence[str], values: Sequence[str]) -> str:
    """Counts and sums by cell of rows that are few."""
    totals = [f"{engine.dialect.total(value)} AS t{k}" for k, value in enumerate(values)]
    kept = ", ".join(["COUNT(*) AS n", *totals])
    parts = [f"SELECT {cell} AS place, {kept} FROM used GROUP BY {cell}" for cell in cells]
    return f"WITH used AS ({rows}) {' UNION ALL '.join(parts)}"
