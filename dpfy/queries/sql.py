"""SQL as a query: a SELECT becomes the plan that the short form becomes, and what is done to released
values alone (HAVING, ORDER BY, LIMIT).

Nothing here reads private data. A statement without a bounded meaning is refused with the reason.
A public table that is joined is replaced by what it says about the listed words of its key.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.statistics.answer import Answer
from dpfy.statistics.language import (
    MOST_TEXT,
    AnyOf,
    CaseKey,
    Condition,
    Query,
    StatisticCall,
)
from dpfy.tables.cells import word
from dpfy.tables.columns import Column, Date, OpenColumn, RangedColumn, WordColumn
from dpfy.tables.sources import cells_of

BEGINS = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
MOMENTS: dict[type[exp.Expression], str] = {
    exp.Sum: "sum",
    exp.Avg: "mean",
    exp.Variance: "variance",
    exp.VariancePop: "variance",
    exp.Stddev: "stddev",
    exp.StddevPop: "stddev",
    exp.StddevSamp: "stddev",
    exp.Median: "median",
    exp.Mode: "mode",
}
COMPARED: dict[type[exp.Expression], str] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
OPPOSITE = {"=": "!=", "!=": "=", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
PARTS: dict[type[exp.Expression], str] = {
    exp.Year: "year",
    exp.Month: "month",
    exp.DayOfWeekIso: "weekday",
}
REFUSED: dict[str, str] = {
    "with": "WITH is not supported: write one SELECT over the table",
    "distinct": "DISTINCT would release which rows there are: GROUP BY the column and ask COUNT(*)",
    "windows": "windows release a value of every row: ask aggregates with GROUP BY",
    "qualify": "QUALIFY is about single rows: use HAVING on released values",
    "laterals": "LATERAL joins have no bound on what one person adds",
    "sample": "a sample makes the answer worse and no more private: leave TABLESAMPLE out",
    "locks": "FOR UPDATE has no meaning: nothing is written",
    "into": "INTO has no meaning: nothing is written",
}
Terms = tuple["Condition | AnyOf", ...]


@dataclass(frozen=True)
class SqlQuery:
    """A SELECT: the query that it asks, and what is done to the released answers.

    Args:
        query: The query in the short form.
        having: Which groups are shown, by their answers.
        order: What groups are sorted by: an answer (by its statistic) or a column of the groups,
            and whether the largest is first.
        most, first: LIMIT and OFFSET, in groups.
    """

    query: Query
    having: Callable[[Mapping[str, Any]], bool] | None = None
    order: tuple[tuple[str, bool], ...] = ()
    most: int | None = None
    first: int = 0

    def shown(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers of the groups that are shown, in their order: post-processing."""
        if self.having is None and not self.order and self.most is None and not self.first:
            return list(answers)
        keys = [_label_of(key) for key in self.query.by]
        groups: dict[tuple[str, ...], list[Answer]] = {}
        for answer in answers:
            groups.setdefault(tuple(answer.place.get(k, "") for k in keys), []).append(answer)
        calls = dict(zip(self.query.texts, map(str, self.query.asks), strict=True))
        rows = []
        for group, mine in groups.items():
            values: dict[str, Any] = {calls.get(a.statistic, a.statistic): a.value for a in mine}
            rows.append((values | dict(zip(keys, group, strict=True)), mine))
        if self.having is not None:
            rows = [row for row in rows if self.having(row[0])]
        for name, largest in reversed(self.order):
            rows.sort(key=lambda row: _sortable(row[0].get(name)), reverse=largest)
        end = None if self.most is None else self.first + self.most
        return [answer for _, mine in rows[self.first : end] for answer in mine]


def is_sql(text: object) -> bool:
    """Whether a query is written in SQL."""
    return isinstance(text, str) and BEGINS.match(text) is not None


def parse(
    text: str, columns: Mapping[str, Column], person: str | None, public: Mapping[str, Any]
) -> SqlQuery:
    """The query of a SELECT over columns of a public schema.

    Args:
        text: The statement.
        columns: The public columns by name.
        person: The column that says whose a row is.
        public: Public tables that may be joined, by name.

    Raises:
        InvalidInput: It is no SQL, or names what is not there.
        Unsupported: It has no bounded meaning, or none that is built.
    """
    if len(text) > 2 * MOST_TEXT:
        raise InvalidInput(
            "query", text[:40] + "...", f"must have at most {2 * MOST_TEXT} characters"
        )
    try:
        found = sqlglot.parse(text, dialect="duckdb")
    except SqlglotError as problem:
        where = getattr(problem, "errors", None) or [{}]
        at = f"line {where[0].get('line', 1)}, column {where[0].get('col', 1)}"
        raise InvalidInput("query", text[:40], f"is not SQL that can be read ({at})") from None
    if len(found) != 1 or not isinstance(found[0], exp.Select):
        kind = "several statements" if len(found) != 1 else type(found[0]).__name__.upper()
        raise Unsupported(f"the query is {kind}", "write one SELECT")
    return _Reader(found[0], columns, person, public).query()


class _Reader:
    def __init__(
        self,
        select: exp.Select,
        columns: Mapping[str, Column],
        person: str | None,
        public: Mapping[str, Any],
    ) -> None:
        self.select, self.columns, self.person = select, columns, person
        self.lower = {name.lower(): name for name in columns}
        self.tables: dict[str, dict[str, Any]] = {}
        """Joined public tables: column -> the value of each word of the key."""
        self.keys: dict[str, str] = {}
        self.aliases: dict[str, exp.Expression] = {}
        self.public = {name.lower(): table for name, table in public.items()}
        self.where: Terms = ()

    def query(self) -> SqlQuery:
        self._refuse_clauses()
        self._from()
        asks: list[StatisticCall] = []
        chosen: list[exp.Expression] = []
        for item in self.select.expressions:
            inner = item.this if isinstance(item, exp.Alias) else item
            if isinstance(item, exp.Alias):
                self.aliases[item.alias.lower()] = inner
            chosen.append(inner)
        group = self.select.args.get("group")
        if group is not None and (
            group.args.get("all")
            or (
                len(group.args) > 1
                and any(group.args.get(k) for k in ("cube", "rollup", "grouping_sets"))
            )
        ):
            raise Unsupported(
                "GROUP BY ALL, CUBE and ROLLUP", "name the columns, or ask table(a, b)"
            )
        named = [self._positioned(key, chosen) for key in (group.expressions if group else [])]
        by = tuple(self._key(key) for key in named)
        for inner in chosen:
            if any(inner == key for key in named):
                continue
            asks.append(self._ask(inner))
        if not asks:
            raise Unsupported("a SELECT without an aggregate", "ask COUNT(*), AVG(column), ...")
        if len(set(asks)) < len(asks):
            raise InvalidInput("query", str(self.select)[:80], "must not ask one aggregate twice")
        where = self.select.args.get("where")
        terms = self.where + (self._terms(where.this, False) if where is not None else ())
        query = Query(tuple(asks), by, terms)
        if len(" ".join(query.texts)) > 8 * MOST_TEXT:
            raise InvalidInput("query", str(self.select)[:40], "is too long")
        return SqlQuery(query, *self._after(query, named, by))

    def _refuse_clauses(self) -> None:
        for name, value in self.select.args.items():
            name = name.rstrip("_")
            if value and name in REFUSED:
                raise Unsupported(f"{name.upper()} in a private query", REFUSED[name])
        for node in self.select.walk():
            if isinstance(node, exp.Subquery | exp.Exists) or (
                isinstance(node, exp.Select) and node is not self.select
            ):
                raise Unsupported("a query within a query", "write one SELECT over the table")
            if isinstance(node, exp.Window):
                raise Unsupported("a window function", REFUSED["windows"])
            if isinstance(node, exp.Placeholder | exp.Parameter):
                raise Unsupported("a parameter", "write the value")

    def _from(self) -> None:
        source = self.select.args.get("from") or self.select.args.get("from_")
        if source is None or not isinstance(source.this, exp.Table):
            raise Unsupported("a SELECT without one table", "write FROM and the name of the table")
        if not isinstance(source.this.this, exp.Identifier):
            raise Unsupported("a function as a table", "give the data, and name it in FROM")
        for table in self.select.find_all(exp.Table):
            if table.args.get("sample") or table.args.get("pivots"):
                raise Unsupported("a sample or a pivot of a table", REFUSED["sample"])
        self.table = (source.this.alias or source.this.name).lower()
        for join in self.select.args.get("joins") or []:
            self._join(join)

    def _join(self, join: exp.Join) -> None:
        """A public table whose key is a column of listed words, each at most once."""
        kind, side = (join.args.get(k) or "" for k in ("kind", "side"))
        name = join.this.name.lower() if isinstance(join.this, exp.Table) else ""
        if name not in self.public:
            raise Unsupported(
                f"a JOIN with {name or 'something that is no table'}, which is no public table",
                "give a public table as public={'name': table}; two private tables: one table",
            )
        if (
            join.args.get("method")
            or kind.upper() not in ("", "INNER")
            or side.upper() not in ("", "LEFT")
        ):
            raise Unsupported("a JOIN of another kind", "write JOIN or LEFT JOIN")
        alias = (join.this.alias or name).lower()
        using, on = join.args.get("using"), join.args.get("on")
        if using and len(using) == 1:
            mine = theirs = using[0].name
        elif isinstance(on, exp.EQ) and all(
            isinstance(part, exp.Column) for part in (on.this, on.expression)
        ):
            parts = [on.this, on.expression]
            parts.sort(key=lambda part: part.table.lower() == alias)
            mine, theirs = (part.name for part in parts)
        else:
            raise Unsupported("a JOIN on anything but one pair of equal columns", "write USING (a)")
        key = self._named(mine)
        column = self.columns[key]
        if not isinstance(column, WordColumn):
            raise Unsupported(
                f"a JOIN on {key}, whose values the schema does not list", "list them"
            )
        cells = {str(n).lower(): list(c) for n, c in cells_of(self.public[name]).items()}
        if theirs.lower() not in cells:
            raise InvalidInput("query join", theirs, f"is not a column of {name}")
        words = [word(cell) for cell in cells[theirs.lower()]]
        if len(set(words)) < len(words):
            rule = f"must name each {theirs} once, or one row would count several times"
            raise InvalidInput("query join", name, rule)
        place = {text: k for k, text in enumerate(words)}
        there = [text for text in column.words if text in place]
        for other, held in cells.items():
            self.tables[f"{alias}.{other}"] = {text: held[place[text]] for text in there}
            self.keys[f"{alias}.{other}"] = key
        if side.upper() != "LEFT":
            self.where += (self._words(key, there),)

    def _words(self, key: str, there: Sequence[str]) -> Condition:
        if not there:
            raise InvalidInput("query", key, "no listed word of it meets the condition")
        return Condition(key, "in", tuple(there))

    def _named(self, name: str) -> str:
        """A column of the schema; letters count alike where that is unambiguous."""
        found = name if name in self.columns else self.lower.get(name.lower())
        if found is None:
            rule = f"must be a column of the schema: {', '.join(self.columns)}"[:300]
            raise InvalidInput("query", name, rule)
        return found

    def _joined(self, node: exp.Expression) -> str | None:
        """The public column that a node names."""
        if not isinstance(node, exp.Column):
            return None
        if node.table:
            name = f"{node.table}.{node.name}".lower()
            if name in self.tables:
                return name
            if node.table.lower() != self.table:
                raise InvalidInput(
                    "query", node.table, "is not the name of a table in FROM or JOIN"
                )
            return None
        found = [n for n in self.tables if n.split(".", 1)[1] == node.name.lower()]
        if found and node.name.lower() not in self.lower:
            return found[0]
        return None

    def _column(self, node: Any, what: str) -> str:
        if isinstance(node, exp.Paren):
            node = node.this
        if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star):
            raise Unsupported(
                f"{what} of {_shown(node)}",
                "name a column: what a row adds must have a range in the schema",
            )
        if self._joined(node) is not None:
            raise Unsupported(
                f"{what} of a column of a public table", "group by it, or filter by it"
            )
        return self._named(node.name)

    def _ask(self, node: exp.Expression) -> StatisticCall:
        """An aggregate."""
        if isinstance(node, exp.Anonymous) and node.name.lower() == "weight":
            if len(node.expressions) != 2:
                raise InvalidInput("query", "weight", "is written WEIGHT(AVG(age), 3)")
            asked, value = self._ask(node.expressions[0]), self._number(node.expressions[1])
            options = tuple(sorted((*asked.options, ("weight", value))))
            return replace(asked, options=options)
        if isinstance(node, exp.Filter):
            asked = self._ask(node.this)
            terms = self._terms(node.expression.this, False)
            return replace(asked, where=asked.where + terms)
        if isinstance(node, exp.Count):
            return self._count(node)
        if isinstance(node, exp.Min | exp.Max):
            name, share = ("MIN", 0.01) if isinstance(node, exp.Min) else ("MAX", 0.99)
            raise Unsupported(
                f"{name}, which one row decides",
                f"ask QUANTILE_CONT(column, {share}), which many rows decide",
            )
        for kind, function in MOMENTS.items():
            if type(node) is kind:
                if isinstance(node.this, exp.Distinct):
                    raise Unsupported(f"{function} of distinct values", "leave DISTINCT out")
                return StatisticCall(function, (self._column(node.this, function),))
        if isinstance(node, exp.WithinGroup):
            inner, order = node.this, node.expression
            ordered = order.expressions[0] if isinstance(order, exp.Order) else None
            if isinstance(inner, exp.PercentileCont | exp.PercentileDisc) and ordered is not None:
                share = self._number(inner.this)
                share = 1 - share if ordered.args.get("desc") else share
                return StatisticCall("quantile", (self._column(ordered.this, "quantile"), share))
        if isinstance(
            node, exp.Quantile | exp.ApproxQuantile | exp.PercentileCont | exp.PercentileDisc
        ):
            given = node.args.get("quantile") or node.args.get("expression")
            shares = given.expressions if isinstance(given, exp.Array | exp.Tuple) else [given]
            numbers = tuple(self._number(s) for s in shares)
            return StatisticCall("quantile", (self._column(node.this, "quantile"), *numbers))
        if isinstance(node, exp.CovarPop | exp.CovarSamp):
            both = (node.this, node.expression)
            return StatisticCall("covariance", tuple(self._column(c, "covariance") for c in both))
        if isinstance(node, exp.Star | exp.Column):
            raise Unsupported(
                f"{_shown(node)}, a value of single rows", "ask aggregates, or GROUP BY it"
            )
        if node.find(exp.AggFunc) is not None and not isinstance(node, exp.AggFunc):
            raise Unsupported(
                f"arithmetic with aggregates ({_shown(node)})",
                "ask each of them, and compute with the answers",
            )
        raise Unsupported(
            f"{_shown(node)}",
            "ask COUNT, SUM, AVG, VARIANCE, STDDEV, MEDIAN, QUANTILE_CONT, COVAR_POP or MODE",
        )

    def _count(self, node: exp.Count) -> StatisticCall:
        inner = node.this
        if node.expressions:
            raise Unsupported("COUNT of several columns", "ask COUNT(*)")
        if inner is None or isinstance(inner, exp.Star | exp.Literal):
            return StatisticCall("count", ())
        if isinstance(inner, exp.Distinct):
            if len(inner.expressions) != 1:
                raise Unsupported("COUNT(DISTINCT several columns)", "count persons: one column")
            name = self._column(inner.expressions[0], "COUNT(DISTINCT)")
            if self.person is None or name != self.person:
                raise Unsupported(
                    f"COUNT(DISTINCT {name}), whose values are no persons",
                    "count the person column (--person); for other columns GROUP BY them",
                )
            return StatisticCall("distinct", (name,))
        if isinstance(inner, exp.Column):
            return StatisticCall("count", (), where=self._written(inner, "present"))
        raise Unsupported(f"COUNT({_shown(inner)})", "ask COUNT(*), or COUNT of a column")

    def _written(self, node: exp.Expression, value: str) -> Terms:
        """That a cell is missing or present."""
        if (joined := self._joined(node)) is not None:
            held = self.tables[joined]
            there = [k for k, cell in held.items() if (word(cell) == "") == (value == "missing")]
            return (self._words(self.keys[joined], there),)
        return (Condition(self._column(node, "IS NULL"), "is", value),)

    def _positioned(self, key: exp.Expression, chosen: Sequence[exp.Expression]) -> exp.Expression:
        """GROUP BY 1, or by an alias."""
        if isinstance(key, exp.Literal) and not key.is_string:
            place = int(key.this) if str(key.this).isdigit() else 0
            if not 1 <= place <= len(chosen):
                raise InvalidInput("query group by", key.this, "is no place in SELECT")
            return chosen[place - 1]
        bare = key.name.lower() if isinstance(key, exp.Column) and not key.table else None
        if bare in self.aliases and bare not in self.lower:
            return self.aliases[bare]
        return key

    def _key(self, node: exp.Expression) -> str | StatisticCall | CaseKey:
        """What groups are made of."""
        if (joined := self._joined(node)) is not None:
            held = self.tables[joined]
            values = dict.fromkeys(word(value) for value in held.values())
            branches = tuple(
                ((self._words(self.keys[joined], [k for k in held if word(held[k]) == v]),), v)
                for v in values
                if v
            )
            return CaseKey(joined.split(".", 1)[1], branches)
        if isinstance(node, exp.Case):
            return self._case(node)
        if part := self._part(node):
            return StatisticCall(part[0], (part[1],))
        if not isinstance(node, exp.Column):
            raise Unsupported(
                f"GROUP BY {_shown(node)}",
                "group by a column, YEAR or MONTH of a date, or CASE WHEN with public limits",
            )
        name = self._named(node.name)
        column = self.columns[name]
        if isinstance(column, OpenColumn):
            if name == self.person:
                raise Unsupported("GROUP BY the person", "ask about groups of persons")
            return StatisticCall("top", (name,))
        if isinstance(column, RangedColumn):
            raise Unsupported(
                f"GROUP BY {name}, a column of numbers",
                "write CASE WHEN with public limits, or YEAR or MONTH of a date",
            )
        return name

    def _case(self, node: exp.Case) -> CaseKey:
        if node.this is not None:
            raise Unsupported("CASE column WHEN value", "write CASE WHEN column = value")
        branches = []
        for branch in node.args["ifs"]:
            label = self._label(branch.args["true"])
            branches.append((self._terms(branch.this, False), label))
        other = node.args.get("default")
        name = next((a for a, inner in self.aliases.items() if inner == node), "case")
        if len({label for _, label in branches}) < len(branches):
            raise Unsupported("CASE with one label twice", "join the conditions with OR")
        return CaseKey(name, tuple(branches), None if other is None else self._label(other))

    def _label(self, node: exp.Expression) -> str:
        if not isinstance(node, exp.Literal):
            raise Unsupported(f"CASE with {_shown(node)} as a label", "write a text or a number")
        return str(node.this)

    def _part(self, node: Any) -> tuple[str, str] | None:
        """The part of a date that a node names, and the column."""
        name, inner = None, None
        if isinstance(node, exp.Extract):
            unit = node.this.name.lower()
            name, inner = {"isodow": "weekday"}.get(unit, unit), node.expression
        elif type(node) in PARTS:
            name, inner = PARTS[type(node)], node.this
        if name is None:
            return None
        while isinstance(inner, exp.Cast | exp.TsOrDsToDate | exp.Paren):
            inner = inner.this
        if name not in ("year", "month", "weekday") or not isinstance(inner, exp.Column):
            raise Unsupported(f"{_shown(node)}", "ask YEAR, MONTH or ISODOW of a column of dates")
        column = self._named(inner.name)
        if not isinstance(self.columns[column], Date):
            raise InvalidInput("query", column, "must be a column of dates (kind = date)")
        return name, column

    def _terms(self, node: Any, negated: bool) -> Terms:
        """Conditions that must all hold, negated where `negated`."""
        if isinstance(node, exp.Paren):
            return self._terms(node.this, negated)
        if isinstance(node, exp.Not):
            return self._terms(node.this, not negated)
        if isinstance(node, exp.And | exp.Or):
            both = [self._terms(part, negated) for part in (node.left, node.right)]
            if isinstance(node, exp.And) != negated:
                return both[0] + both[1]
            return (AnyOf(tuple(both)),)
        if isinstance(node, exp.Between):
            low, high = node.args["low"], node.args["high"]
            pair = exp.and_(
                exp.GTE(this=node.this, expression=low), exp.LTE(this=node.this, expression=high)
            )
            return self._terms(pair, negated)
        if isinstance(node, exp.In):
            if not node.expressions:
                raise Unsupported("IN with anything but a list", "write the values")
            values = [self._value(v) for v in node.expressions]
            return self._listed(node.this, values, negated)
        for kind, mark in COMPARED.items():
            if type(node) is kind:
                left, right = node.this, node.expression
                if self._is_value(left) and not self._is_value(right):
                    left, right, mark = right, left, MIRRORED.get(mark, mark)
                if not self._is_value(right):
                    raise Unsupported(f"{_shown(node)}", "compare a column with a value")
                return self._compared(left, OPPOSITE[mark] if negated else mark, self._value(right))
        if isinstance(node, exp.Is):
            if not isinstance(node.expression, exp.Null):
                raise Unsupported(f"{_shown(node)}", "write IS NULL or IS NOT NULL")
            return self._written(node.this, "present" if negated else "missing")
        if isinstance(node, exp.Like | exp.ILike | exp.RegexpLike):
            raise Unsupported("patterns of text", "list the words that match: IN ('a', 'b')")
        raise Unsupported(f"the condition {_shown(node)}", "compare columns with values")

    def _listed(self, node: Any, values: Sequence[str | float], negated: bool) -> Terms:
        if negated:
            return tuple(t for value in values for t in self._compared(node, "!=", value))
        if self._joined(node) is None and self._part(node) is None:
            name = self._column(node, "IN")
            return (Condition(name, "in", tuple(values)),)
        either = tuple(self._compared(node, "=", value) for value in values)
        return either[0] if len(either) == 1 else (AnyOf(either),)

    def _compared(self, node: Any, mark: str, value: str | float) -> Terms:
        if isinstance(node, exp.Paren):
            node = node.this
        if (joined := self._joined(node)) is not None:
            held = self.tables[joined]
            there = [k for k, cell in held.items() if _meets(cell, mark, value)]
            return (self._words(self.keys[joined], there),)
        if part := self._part(node):
            return self._part_compared(*part, mark, value)
        name = self._column(node, "a condition")
        if mark == "!=" and isinstance(self.columns[name], RangedColumn):
            # a missing number is not unequal to anything in SQL
            return (AnyOf(((Condition(name, "<", value),), (Condition(name, ">", value),))),)
        return (Condition(name, mark, value),)

    def _part_compared(self, part: str, name: str, mark: str, value: str | float) -> Terms:
        if not isinstance(value, float) or not value.is_integer():
            raise InvalidInput("query", value, f"must be a whole number: {part} of {name}")
        if part != "year":
            column = self.columns.get(f"{name}_{part}")
            if column is None or part == "weekday" or mark not in ("=", "!="):
                way = f'give the date parts = ["{part}"] in the schema, and compare with = or IN'
                raise Unsupported(f"a condition on {part} of {name}", way)
            return (Condition(f"{name}_{part}", mark, str(int(value))),)
        year = int(value)
        if not 1 <= year < 9999:
            raise InvalidInput("query", year, "must be a year from 1 to 9998")
        first, after = f"{year:04}-01-01", f"{year + 1:04}-01-01"
        since, before = Condition(name, ">=", first), Condition(name, "<", first)
        later, until = Condition(name, ">=", after), Condition(name, "<", after)
        held: dict[str, Terms] = {
            "=": (since, until),
            "!=": (AnyOf(((before,), (later,))),),
            "<": (before,),
            "<=": (until,),
            ">": (later,),
            ">=": (since,),
        }
        return held[mark]

    def _is_value(self, node: Any) -> bool:
        node = node.this if isinstance(node, exp.Neg | exp.Paren | exp.Cast) else node
        return isinstance(node, exp.Literal)

    def _value(self, node: Any) -> str | float:
        if isinstance(node, exp.Cast | exp.Paren):
            return self._value(node.this)
        if isinstance(node, exp.Neg):
            found = self._value(node.this)
            if isinstance(found, float):
                return -found
        if isinstance(node, exp.Literal):
            return str(node.this) if node.is_string else float(node.this)
        raise Unsupported(f"{_shown(node)} as a value", "write a number or a text")

    def _number(self, node: Any) -> float:
        found = self._value(node) if node is not None else None
        if not isinstance(found, float):
            raise InvalidInput("query", str(found), "must be a number")
        return found

    def _after(
        self, query: Query, named: Sequence[exp.Expression], by: Sequence[Any]
    ) -> tuple[Any, ...]:
        """HAVING, ORDER BY, LIMIT and OFFSET."""
        keys = {key: _label_of(made) for key, made in zip(named, by, strict=True)}

        def name_of(node: Any) -> str:
            node = node.this if isinstance(node, exp.Paren) else node
            if isinstance(node, exp.Column) and node.name.lower() in self.aliases:
                node = self.aliases[node.name.lower()]
            if isinstance(node, exp.Literal) and not node.is_string:
                node = self._positioned(node, [_inner(i) for i in self.select.expressions])
            if node in keys:
                return keys[node]
            call = str(self._ask(node))
            if call not in map(str, query.asks):
                raise Unsupported(f"{_shown(node)}, which is not released", "put it into SELECT")
            if len(next(a for a in query.asks if str(a) == call).arguments) > 2:
                raise Unsupported(f"{_shown(node)}, which has several answers", "ask one quantile")
            return call

        if (having := self.select.args.get("having")) is not None and not by:
            raise Unsupported("HAVING without GROUP BY", "look at the answer")
        kept = None if having is None else self._having(having.this, name_of)
        ordered = self.select.args.get("order")
        order = tuple(
            (name_of(item.this), bool(item.args.get("desc")))
            for item in (ordered.expressions if ordered is not None else [])
        )
        counts = []
        for clause in ("limit", "offset"):
            held = self.select.args.get(clause)
            value = None if held is None else self._number(held.expression)
            if value is not None and not (value.is_integer() and value >= 0):
                raise InvalidInput(f"query {clause}", value, "must be a whole number")
            counts.append(None if value is None else int(value))
        return kept, order, counts[0], counts[1] or 0

    def _having(
        self, node: Any, name_of: Callable[[Any], str]
    ) -> Callable[[Mapping[str, Any]], bool]:
        """A condition on released values."""
        if isinstance(node, exp.Paren):
            return self._having(node.this, name_of)
        if isinstance(node, exp.Not):
            inner = self._having(node.this, name_of)
            return lambda row: not inner(row)
        if isinstance(node, exp.And | exp.Or):
            left, right = (self._having(part, name_of) for part in (node.left, node.right))
            if isinstance(node, exp.And):
                return lambda row: left(row) and right(row)
            return lambda row: left(row) or right(row)
        if isinstance(node, exp.Between):
            low, high = (self._number(node.args[end]) for end in ("low", "high"))
            name = name_of(node.this)
            return lambda row: (
                _meets(row.get(name), ">=", low) and _meets(row.get(name), "<=", high)
            )
        mark = COMPARED.get(type(node))
        if mark is None:
            raise Unsupported(f"HAVING {_shown(node)}", "compare a released value with a number")
        left_node, right_node = node.this, node.expression
        if self._is_value(left_node):
            left_node, right_node, mark = right_node, left_node, MIRRORED.get(mark, mark)
        name, value = name_of(left_node), self._value(right_node)
        return lambda row: _meets(row.get(name), str(mark), value)


def _inner(node: exp.Expression) -> Any:
    return node.this if isinstance(node, exp.Alias) else node


def _label_of(key: Any) -> str:
    """What the place of an answer calls a key."""
    if isinstance(key, str):
        return key
    if isinstance(key, CaseKey):
        return key.name
    return str(key.arguments[0]) if key.function == "top" else f"{key.function}({key.arguments[0]})"


def _meets(cell: Any, mark: str, value: str | float) -> bool:
    """Whether a public or released value meets a condition; a missing one meets none."""
    try:
        if cell is None or cell != cell:
            return False
        if isinstance(value, float):
            return TESTS[mark](float(cell), value)
        return word(cell) != "" and TESTS[mark](word(cell), value)
    except (TypeError, ValueError):
        return False


def _sortable(value: Any) -> tuple[int, Any]:
    """Numbers before words, by size; nothing last."""
    if value is None:
        return 2, ""
    if isinstance(value, int | float):
        return 0, value
    return (0, float(value)) if str(value).lstrip("-").isdigit() else (1, str(value))


def _shown(node: Any) -> str:
    text = (
        " ".join(node.sql(dialect="duckdb").split()) if isinstance(node, exp.Expression) else "it"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
