"""Bounded aggregates as SQL: the cells of a row by the policy, what the row adds, which rows of a
person are used, and the sums.

Every step is a SELECT over the one before. Nothing that is computed of a row reads another row but
the numbering of the rows of one person.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.engines.aggregates import (
    CONTRIBUTIONS,
    MOST,
    CellSums,
    CountRequest,
    KeepRequest,
    KeptRows,
    MemoryEngine,
    Request,
    SumRequest,
    TableEngine,
    per_person,
)
from dpfy.engines.batch import batched, counts_once
from dpfy.engines.cell_policy import CellPolicy
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.dialects import Dialect
from dpfy.engines.expressions import LEAVES, Expression, within
from dpfy.tables.schema import Schema
from dpfy.tables.table import PrivateTable

OWNER = "dpfy_owner"
FEW = 16
"""Lists of so many values are written out where they are looked up; longer ones are joined."""
LONG = 4096
"""Lists of so many values are kept as long as the rows: they are the same again and again."""
STEPS = ("choose", "clip", "place", "whole", "toward zero", "lookup", "word place", "missing")
"""Operations that may name a part more than once: what they are made of is a column of a step."""


class Selected:
    """A SELECT over a table that computes expressions of its rows, step by step."""

    def __init__(self, policy: CellPolicy, table: str, owner: str | None) -> None:
        self.policy, self.dialect, self.table, self.owner = policy, policy.dialect, table, owner
        self.owner_name = OWNER
        self.steps: list[list[str]] = []
        self.lists: Callable[[tuple[float, ...]], str] | None = None
        """Keeps a list of values as a table, and says its name."""
        self.joins: dict[int, list[str]] = {}
        self.known: dict[Expression, tuple[str, int]] = {}

    def column(self, asked: Expression) -> str:
        """The name of an expression among the columns of the last step."""
        sql, step = self._sql(asked)
        return self._bound(asked, sql, step)[0]

    def sql(self) -> str:
        """The SELECT, with all columns that were asked for."""
        policy, words = self.policy, self.policy.lists
        first = [f"{sql} AS {name}" for sql, name in policy.parsed.items()]
        if self.owner is not None:
            first.append(f"{policy.owner(self.owner)} AS {OWNER}")
        joined = "".join(
            f" LEFT JOIN {self.dialect.words(listed).format(name=name)} ON {name}.word = {word}"
            for name, (word, listed) in words.items()
        )
        held = [f"{sql} AS {name}" for name, sql in policy.settled.values()]
        held += [OWNER] * (self.owner is not None)
        found = f"SELECT {', '.join(first or ['1 AS p'])} FROM {self.table}"
        found = f"SELECT {', '.join(held or ['p'])} FROM ({found}) AS cells{joined}"
        for k, step in enumerate(self.steps):
            joins = "".join(self.joins.get(k, ()))
            found = f"SELECT step{k}.*, {', '.join(step)} FROM ({found}) AS step{k}{joins}"
        return found

    def _bound(self, asked: Expression, sql: str, step: int) -> tuple[str, int]:
        """An expression as a column of the step after `step`."""
        if asked.op in LEAVES:
            return sql, 0
        if asked not in self.known:
            while len(self.steps) <= step:
                self.steps.append([])
            self.known[asked] = f"e{len(self.known)}", step + 1
            self.steps[step].append(f"{sql} AS {self.known[asked][0]}")
        return self.known[asked]

    def _sql(self, asked: Expression) -> tuple[str, int]:
        """SQL of an expression, and the first step whose columns it may use."""
        if asked in self.known:
            return self.known[asked]
        if asked.op == "clip" and within(asked, self.policy.schema):
            return self._sql(asked.parts[0])
        if asked.op in LEAVES:
            return self.policy.leaf(asked), 0
        if asked.op == "value":
            return self._value(asked.parts[0]), 0
        parts, step = [], 0
        for given in asked.parts:
            if not isinstance(given, Expression):
                parts.append(given)
                continue
            sql, at = self._sql(given)
            if asked.op in STEPS and given.op not in ("value", *LEAVES):
                sql, at = self._bound(given, sql, at)
            parts.append(sql)
            step = max(step, at)
        if asked.op == "lookup" and self.lists is not None and len(parts[1]) > FEW:
            name = f"v{sum(map(len, self.joins.values()))}"
            joined = f" JOIN {self.lists(parts[1])} AS {name} ON {parts[0]} = {name}.k"
            self.joins.setdefault(step, []).append(joined)
            return self._bound(asked, f"{name}.v", step)
        return self._written(asked.op, parts), step

    def _value(self, value: Any) -> str:
        if isinstance(value, bool):
            return "TRUE" if value else "FALSE"
        return f"CAST({value} AS BIGINT)" if isinstance(value, int) else self.dialect.double(value)

    def _written(self, op: str, parts: Sequence[Any]) -> str:
        d, x = self.dialect, parts[0]
        if op in ("+", "-", "*", "/"):
            return f"({x} {op} {parts[1]})"
        if op in ("<", "<=", ">", ">=", "="):
            return f"COALESCE({x} {op} {parts[1]}, FALSE)"
        if op in ("and", "or"):
            return f"({x} {op.upper()} {parts[1]})"
        if op == "not":
            return f"(NOT {x})"
        if op == "in":
            return f"COALESCE({x} IN ({', '.join(map(self._value, parts[1]))}), FALSE)"
        if op == "missing":
            return f"({x} IS NULL)"
        if op == "floor":
            return f"CAST(floor({x}) AS DOUBLE)"
        if op == "whole":
            return d.rounded(x)
        if op == "toward zero":
            return d.truncated(x)
        if op == "root":
            return f"sqrt({x})"
        if op == "clip":
            low, high = d.double(parts[1]), d.double(parts[2])
            return f"CASE WHEN {x} < {low} THEN {low} WHEN {x} > {high} THEN {high} ELSE {x} END"
        if op == "choose":
            return f"CASE WHEN {x} THEN {parts[1]} ELSE {parts[2]} END"
        if op == "place":
            inside = self._place(x, parts[1], 0, len(parts[1]))
            return f"CAST(CASE WHEN {x} IS NULL THEN 0 ELSE {inside} END AS BIGINT)"
        if op == "lookup":
            return d.picked(parts[1], x)
        words = parts[1]
        cases = " ".join(f"WHEN {d.text(word)} THEN {k}" for k, word in enumerate(words))
        found = f"CASE {x} {cases} ELSE {len(words)} END" if words else "0"
        return f"CAST({found} AS BIGINT)"

    def _place(self, x: str, edges: Sequence[float], start: int, end: int) -> str:
        """How many edges are at most x, by halving."""
        if start == end:
            return str(start)
        middle = (start + end) // 2
        low, high = self._place(x, edges, start, middle), self._place(x, edges, middle + 1, end)
        return f"CASE WHEN {x} < {self.dialect.double(edges[middle])} THEN {low} ELSE {high} END"


class SqlEngine(ABC):
    """An engine that is asked in SQL.

    Args:
        schema: The public schema.
        kinds: The kind of each column, by name.
        owner: The column that says whose a row is.
        table: The name of the table in SQL.
        dialect: How SQL is written.
    """

    name = "sql"

    def __init__(
        self,
        schema: Schema,
        kinds: Mapping[str, str],
        owner: str | None,
        table: str,
        dialect: Dialect,
    ) -> None:
        self.schema, self.kinds, self.owner = schema, dict(kinds), owner
        self.table, self.dialect = table, dialect
        self.owned = owner is not None
        self._busy: dict[int, str | None] = {}
        self._tables = 0

    @abstractmethod
    def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a SELECT. What goes wrong is an error without a cell."""

    def fetch_whole(self, sql: str) -> list[NDArray[np.int64]]:
        """The columns of a SELECT of whole numbers."""
        rows = np.array(self.fetch(sql), np.int64)
        return list(rows.T) if len(rows) else [rows.reshape(-1)] * 2

    @abstractmethod
    def keep(self, name: str, sql: str) -> None:
        """Keep the rows of a SELECT as a temporary table."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Drop a temporary table."""

    def new_table(self, sql: str) -> str:
        """Keep the rows of a SELECT; the name of their table."""
        self._tables += 1
        self.keep(name := f"dpfy_kept_{self._tables}", sql)
        return name

    def selected(self, owned: bool = True) -> Selected:
        """A SELECT of the rows, with their owners or without."""
        policy = CellPolicy(self.schema, self.kinds, self.dialect)
        return Selected(policy, self.table, self.owner if owned else None)

    def rows(self) -> int:
        """See `TableEngine`."""
        return int(self.fetch(f"SELECT COUNT(*) FROM {self.table}")[0][0])

    def sums(self, asked: SumRequest) -> CellSums:
        """See `TableEngine`."""
        found: CellSums = self.batch([asked])[0]
        return found

    def batch(self, asked: Sequence[Request]) -> list[Any]:
        """See `TableEngine`."""
        sums = [one for one in asked if isinstance(one, SumRequest)]
        found: dict[Request, Any] = dict(zip(sums, batched(self, sums), strict=True))
        return [found[one] if isinstance(one, SumRequest) else self.counts(one) for one in asked]

    def counts(self, asked: CountRequest) -> dict[tuple[Any, ...], int]:
        """See `TableEngine`."""
        held = self.selected()
        columns = [held.column(part) for part in (asked.group, *asked.keys)]
        there = " AND ".join(f"{key} IS NOT NULL" for key in columns[1:])
        rows = f"SELECT * FROM ({held.sql()}) AS steps WHERE {columns[0]} >= 0 AND {there}"
        used = self.used(rows, columns, [], asked.limit, asked.key)
        named = ", ".join(columns)
        sql = f"SELECT {named}, COUNT(*) FROM ({used}) AS used GROUP BY {named}"
        return {tuple(row[:-1]): int(row[-1]) for row in self.fetch(sql)}

    def keep_rows(self, asked: KeepRequest) -> KeptRows:
        """See `TableEngine`."""
        held, d = self.selected(), self.dialect
        group = held.column(asked.group)
        named = {name: held.column(column.value) for name, column in asked.columns.items()}
        content = [held.column(part) for part in asked.content]
        rows = f"SELECT * FROM ({held.sql()}) AS steps WHERE {group} >= 0"
        used = self.used(rows, [group], content, asked.limit, asked.key, [*named.values()])
        narrow = ", ".join(
            f"CAST({named[name]} AS {d.whole_type(column.low, column.high)}) AS {d.quoted(name)}"
            for name, column in asked.columns.items()
        )
        sql = f"SELECT {narrow} FROM ({used}) AS used"
        return SqlRows(self, f"({sql}) AS kept" if asked.once else self.new_table(sql))

    def used(
        self,
        rows: str,
        groups: Sequence[str],
        content: Sequence[str],
        limit: ContributionLimit,
        key: str,
        carried: Sequence[str] = (),
    ) -> str:
        """The rows that are used; see `ContributionLimit.kept`. The choice does not look at columns
        that are carried.
        """
        columns = ", ".join(dict.fromkeys([*groups, *content, *carried]))
        if self.owner is None:
            return f"SELECT {columns} FROM ({rows}) AS counted"
        once = counts_once(limit) and {*content, *carried} <= set(groups)
        busy = self.owners_over(int(limit.groups or 1) if once else limit.least)
        rows = (
            f"SELECT {'DISTINCT ' * once}{columns}, {OWNER} FROM ({rows}) AS counted "
            f"WHERE {OWNER} IS NOT NULL"
        )
        if busy is None:
            return f"SELECT {columns} FROM ({rows}) AS counted"
        d = self.dialect
        same = ", ".join([OWNER, *dict.fromkeys([*groups, *content])])
        owner = f"CAST({OWNER} AS {d.varchar})"
        row = self._digest(key, "row", [owner, *groups, *content, "(dpfy_number - 1)"])
        head = self._digest(key, "group", [owner, *groups])
        numbered = (
            f"SELECT *, ROW_NUMBER() OVER (PARTITION BY {same} ORDER BY {OWNER}) AS dpfy_number "
            f"FROM ({rows}) AS counted WHERE {OWNER} IN (SELECT {OWNER} FROM {busy})"
        )
        chosen = f"SELECT *, {row} AS dpfy_row, {head} AS dpfy_group FROM ({numbered}) AS numbered"
        group = ", ".join([OWNER, *groups])
        ranks = (
            (
                "dpfy_each",
                limit.each,
                f"ROW_NUMBER() OVER (PARTITION BY {group} ORDER BY dpfy_row)",
            ),
            (
                "dpfy_groups",
                limit.groups,
                f"DENSE_RANK() OVER (PARTITION BY {OWNER} ORDER BY dpfy_group)",
            ),
        )
        if ranked := [rank for rank in ranks if rank[1] is not None]:
            named = ", ".join(f"{sql} AS {name}" for name, _, sql in ranked)
            within = " AND ".join(f"{name} <= {most}" for name, most, _ in ranked)
            chosen = f"SELECT *, {named} FROM ({chosen}) AS chosen"
            chosen = f"SELECT * FROM ({chosen}) AS ranked WHERE {within}"
        last = f"ROW_NUMBER() OVER (PARTITION BY {OWNER} ORDER BY dpfy_row) AS dpfy_last"
        chosen = f"SELECT *, {last} FROM ({chosen}) AS within_groups"
        few = (
            f"SELECT {columns} FROM ({rows}) AS counted "
            f"WHERE {OWNER} NOT IN (SELECT {OWNER} FROM {busy})"
        )
        most = f"SELECT {columns} FROM ({chosen}) AS last WHERE dpfy_last <= {limit.total}"
        return f"{few} UNION ALL {most}"

    def _digest(self, key: str, what: str, parts: Iterable[str]) -> str:
        return f"md5(concat_ws('|', {self.dialect.text(key)}, '{what}', {', '.join(parts)}))"

    def owners_over(self, least: int) -> str | None:
        """A table of the owners with more than so many rows, and how many; None where there are
        none.
        """
        if least not in self._busy:
            below = max((known for known in self._busy if known < least), default=None)
            if below is None:
                held = f"SELECT {OWNER}, COUNT(*) AS n FROM ({self._owners()}) AS owners"
                held = f"{held} WHERE {self._crowded(least)} GROUP BY {OWNER}"
                held = f"SELECT * FROM ({held}) AS counted WHERE n > {least}"
            elif (name := self._busy[below]) is not None:
                held = f"SELECT * FROM {name} WHERE n > {least}"
            else:
                self._busy[least] = None
                return None
            name = self.new_table(held)
            any_there = self.fetch(f"SELECT COUNT(*) FROM {name}")[0][0]
            self._busy[least] = name if any_there else None
        return self._busy[least]

    def _crowded(self, least: int) -> str:
        """A condition that every owner with more than so many rows meets."""
        return f"{OWNER} IS NOT NULL"

    def _owners(self) -> str:
        policy = CellPolicy(self.schema, self.kinds, self.dialect)
        return f"SELECT {policy.owner(str(self.owner))} AS {OWNER} FROM {self.table}"

    def persons(self, most: int) -> TableEngine:
        """See `TableEngine`. How many persons have each number of rows comes back."""
        sizes = f"SELECT COUNT(*) AS n FROM ({self._owners()}) AS owners WHERE {OWNER} IS NOT NULL"
        sizes = f"{sizes} GROUP BY {OWNER}"
        held = f"SELECT CASE WHEN n > {most} THEN {most} ELSE n END AS n FROM ({sizes}) AS sizes"
        found = self.fetch(f"SELECT n, COUNT(*) FROM ({held}) AS held GROUP BY n ORDER BY n")
        cells = np.repeat([row[0] for row in found], [row[1] for row in found])
        return MemoryEngine(PrivateTable({CONTRIBUTIONS: cells}, per_person(most)))


class SqlRows:
    """Rows in a temporary table of an engine."""

    def __init__(self, engine: SqlEngine, table: str) -> None:
        self._engine, self._table = engine, table
        self._lists: dict[tuple[float, ...], str] = {}

    def sums(
        self, cells: Sequence[tuple[Expression, int]], values: Sequence[Expression] = ()
    ) -> list[NDArray[np.int64]]:
        """See `KeptRows`: one reading for all cells."""
        engine, lists = self._engine, dict[tuple[float, ...], str]()

        def kept_list(listed: tuple[float, ...]) -> str:
            held = self._lists if len(listed) >= LONG else lists
            if listed not in held:
                held[listed] = engine.new_table(engine.dialect.numbered(listed))
            return held[listed]

        policy = CellPolicy(engine.schema, {}, engine.dialect)
        held = Selected(policy, self._table, None)
        held.lists = kept_list
        at = [held.column(cell) for cell, _ in cells]
        totals = [f"SUM({held.column(value)})" for value in values] or ["COUNT(*)"]
        whole = [
            f"CAST(LEAST(GREATEST({total}, {-MOST}), {MOST}) AS BIGINT) AS t{k}"
            for k, total in enumerate(totals)
        ]
        places = list(dict.fromkeys(at))
        sizes = dict(zip(at, (size for _, size in cells), strict=True))
        starts = dict(zip(places, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        named = ", ".join(
            f"CASE WHEN {place} >= 0 THEN {place} + {starts[place]} END" for place in places
        )
        sql = (
            f"SELECT COALESCE({named}, -1) AS place, {', '.join(whole)} "
            f"FROM ({held.sql()}) AS steps "
            f"GROUP BY GROUPING SETS ({', '.join(f'({place})' for place in places)})"
        )
        found = engine.fetch_whole(sql)
        for name in lists.values():
            engine.forget(name)
        dense = np.zeros((sum(sizes.values()), len(totals)), np.int64)
        there = found[0] >= 0
        for k, column in enumerate(found[1:]):
            dense[found[0][there], k] = column[there]
        return [dense[starts[place] : starts[place] + sizes[place]] for place in at]

    def close(self) -> None:
        """See `KeptRows`."""
        for name in [*self._lists.values(), self._table]:
            if name.isidentifier():
                self._engine.forget(name)


def _cell_sums(rows: Iterable[Sequence[Any]], width: int) -> CellSums:
    """Sums by place, in the order of places."""
    found = sorted(tuple(map(int, row)) for row in rows)
    at = np.array([row[0] for row in found], np.int64)
    sums = np.array([row[1:] for row in found], object)
    return CellSums(at, sums.reshape(len(found), width))
