"""The policy for cells as SQL: what `dpfy.tables` says about a cell, for engines that read their
own columns. tests/engines compares the two cell by cell.

A cell is read in two steps, as in `dpfy.tables.columns`: parsed (NULL where it is missing), then
moved into what is public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.engines.dialects import Dialect
from dpfy.engines.expressions import Expression
from dpfy.tables.columns import Column, Date, Label, RangedColumn, WordColumn
from dpfy.tables.schema import Schema

SPACES = (
    "".join(
        chr(c)
        for c in (
            *range(9, 14),
            *range(28, 33),
            133,
            160,
            5760,
            *range(8192, 8203),
            8232,
            8233,
            8239,
        )
    )
    + chr(8287)
    + chr(12288)
)
"""What `str.strip` removes."""
DECIMAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
INFINITE = "[+-]?inf(inity)?"
FEW_WORDS = 12
"""Lists of so many words are written as CASE; longer ones are joined."""
MOST_EXACT = 2.0**63
"""Whole floats below this are written as whole numbers."""


@dataclass
class CellPolicy:
    """The columns of a table of an engine by the public schema.

    Args:
        schema: What is public.
        kinds: The kind of each column of the table, see `dpfy.engines.dialects.KINDS`.
        dialect: How the engine writes SQL.
    """

    schema: Schema
    kinds: Mapping[str, str]
    dialect: Dialect
    parsed: dict[str, str] = field(default_factory=dict)
    """Columns of the first step: SQL over the table -> name."""
    lists: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Lists of words that are joined: name -> the parsed word, and the list."""
    settled: dict[Expression, tuple[str, str]] = field(default_factory=dict)
    """Leaves: name, and SQL over the first step."""

    def leaf(self, asked: Expression) -> str:
        """The name of a leaf among the columns of the second step."""
        if asked not in self.settled:
            self.settled[asked] = f"n{len(self.settled)}", self._settled(asked)
        return self.settled[asked][0]

    def owner(self, name: str) -> str:
        """SQL for whose a row is; NULL where it names nobody. Other owners have other values."""
        if self._kind(name) == "integer":
            return self.dialect.quoted(name)
        return f"NULLIF({self._word(name)}, '')"

    def _kind(self, name: str) -> str:
        if name not in self.kinds:
            raise InvalidInput("column", name, "is in the schema but not in the data")
        return self.kinds[name]

    def _first(self, sql: str) -> str:
        """A column of the first step."""
        return self.parsed.setdefault(sql, f"p{len(self.parsed)}")

    def _settled(self, asked: Expression) -> str:
        op, name = asked.op, asked.parts[0]
        if op == "kept":
            return self._first(f"CAST({self.dialect.quoted(name)} AS BIGINT)")
        column, part = self._source(name)
        if op in ("number", "code") and part is not None:
            return self._part(column, part)
        if op == "part":
            return self._part(column, asked.parts[1])
        if op == "number":
            return self._number(column)
        if op == "code":
            return self._code(column)
        if op == "raw":
            return self._first(self._parsed_number(name))
        if op == "text":
            word = self._first(self._word(name))
            return f"CASE WHEN {self._is_missing(word)} THEN NULL ELSE substr({word}, 1, {asked.parts[1]}) END"
        return self._absent(column) if op == "absent" else self._unfit(column)

    def _source(self, name: str) -> tuple[Column, str | None]:
        for column in self.schema.columns:
            if isinstance(column, Date) and name.removeprefix(f"{column.name}_") in column.parts:
                return column, name.removeprefix(f"{column.name}_")
        return self.schema.named[name], None

    def _ranged(self, column: Column) -> str:
        """A number or a date as it was parsed."""
        assert isinstance(column, RangedColumn)
        if isinstance(column, Date):
            return self._first(self._parsed_days(column))
        return self._first(self._parsed_number(column.name))

    def _number(self, column: Column) -> str:
        assert isinstance(column, RangedColumn)
        d = self.dialect
        low, high = d.double(column.low), d.double(column.high)
        if not isinstance(column, Date) and self._kind(column.name) == "float":
            # one that is there and in its range is met first; NaN is above every number
            cell = f"CAST({d.quoted(column.name)} AS DOUBLE)"
            value = self._first(
                f"CASE WHEN {cell} BETWEEN {low} AND {high} THEN {cell} "
                f"WHEN {cell} < {low} THEN {low} WHEN NOT isnan({cell}) THEN {high} END"
            )
        else:
            found = self._ranged(column)
            value = f"CASE WHEN {found} < {low} THEN {low} WHEN {found} > {high} THEN {high} ELSE {found} END"
        return value if column.filled is None else f"COALESCE({value}, {d.double(column.filled)})"

    def _listed(self, column: WordColumn) -> tuple[str, str]:
        """The parsed word, and its place in the list (NULL where it is not listed)."""
        word = self._first(self._word(column.name))
        if len(column.words) <= FEW_WORDS:
            cases = " ".join(
                f"WHEN {self.dialect.text(w)} THEN {k}" for k, w in enumerate(column.words)
            )
            return word, f"CASE {word} {cases} END"
        name = next((n for n, held in self.lists.items() if held == (word, column.words)), None)
        if name is None:
            name = f"l{len(self.lists)}"
            self.lists[name] = word, column.words
        return word, f"{name}.place"

    def _code(self, column: Column) -> str:
        assert isinstance(column, WordColumn)
        other = len(column.words)
        filled = other if column.fill not in column.words else column.words.index(str(column.fill))
        rest = filled if isinstance(column, Label) else other
        if self._kind(column.name) == "text" and column.words:
            # a cell that is written as a listed word is met first
            cell, word = self.dialect.quoted(column.name), self._word(column.name)
            at_once, place = (self.dialect.listed(t, column.words) for t in (cell, word))
            if at_once is not None:
                missing = f"CASE WHEN {self._is_missing(word)} THEN {filled} ELSE {rest} END"
                return self._first(f"CAST(COALESCE({at_once}, {place}, {missing}) AS BIGINT)")
        word, place = self._listed(column)
        missing = f"CASE WHEN {self._is_missing(word)} THEN {filled} ELSE {rest} END"
        return f"CAST(COALESCE({place}, {missing}) AS BIGINT)"

    def _part(self, column: Column, part: str) -> str:
        assert isinstance(column, Date)
        value, d = self._number(column), self.dialect
        day = f"(CAST({value} AS BIGINT) + {column.start})"
        if part == "year":
            return f"CASE WHEN ({value}) IS NULL THEN NULL ELSE CAST({d.year(day)} AS DOUBLE) END"
        if part == "weekday":
            return f"CASE WHEN ({value}) IS NULL THEN 7 ELSE CAST((({day} + 3) % 7 + 7) % 7 AS BIGINT) END"
        return f"CASE WHEN ({value}) IS NULL THEN 12 ELSE CAST({d.month(day)} - 1 AS BIGINT) END"

    def _absent(self, column: Column) -> str:
        if isinstance(column, RangedColumn):
            return f"({self._ranged(column)} IS NULL)"
        if isinstance(column, WordColumn):
            word, place = self._listed(column)
            return f"({place} IS NULL AND {self._is_missing(word)})"
        return self._is_missing(self._first(self._word(column.name)))

    def _unfit(self, column: Column) -> str:
        if isinstance(column, RangedColumn):
            found, d = self._ranged(column), self.dialect
            return f"COALESCE({found} < {d.double(column.low)} OR {found} > {d.double(column.high)}, TRUE)"
        if isinstance(column, WordColumn):
            return f"({self._listed(column)[1]} IS NULL)"
        return self._absent(column)

    def _is_missing(self, word: str) -> str:
        named = [self.dialect.text(w) for w in dict.fromkeys(("", *self.schema.missing))]
        return f"COALESCE({word} IN ({', '.join(named)}), TRUE)"

    def _missing_written(self, word: str) -> str:
        """Whether a text is one of those that mean a missing cell."""
        named = [self.dialect.text(w) for w in self.schema.missing]
        return f"{word} IN ({', '.join(named)})" if named else "FALSE"

    def _parsed_number(self, name: str) -> str:
        kind, d, cell = self._kind(name), self.dialect, self.dialect.quoted(name)
        if kind == "integer":
            return f"CAST({cell} AS DOUBLE)"
        if kind == "float":
            return f"CASE WHEN isnan({cell}) THEN NULL ELSE CAST({cell} AS DOUBLE) END"
        if kind == "decimal":
            return f"CAST(CAST({cell} AS {d.varchar}) AS DOUBLE)"
        if kind == "boolean":
            return f"CASE WHEN {cell} THEN {d.double(1.0)} WHEN NOT {cell} THEN {d.double(0.0)} END"
        if kind != "text":
            return "CAST(NULL AS DOUBLE)"
        word = d.trimmed(cell, SPACES)
        return (
            f"CASE WHEN {self._missing_written(word)} THEN NULL "
            f"WHEN {d.matches(word, DECIMAL)} THEN {d.parsed_double(word)} "
            f"WHEN {d.matches(f'lower({word})', INFINITE)} THEN "
            f"CASE WHEN {word} LIKE '-%' THEN {d.double(-float('inf'))} ELSE {d.double(float('inf'))} END END"
        )

    def _parsed_days(self, column: Date) -> str:
        kind, d, cell = self._kind(column.name), self.dialect, self.dialect.quoted(column.name)
        if kind in ("date", "timestamp", "nanoseconds", "instant"):
            days = d.days(d.date_of(cell, kind))
        elif kind == "text":
            word = d.trimmed(cell, SPACES)
            begins = d.matches(word, "[0-9]{4}-[0-9]{2}-[0-9]{2}(.|\\n)*")
            days = (
                f"CASE WHEN {self._missing_written(word)} OR {word} LIKE '0000%' THEN NULL "
                f"WHEN {begins} THEN {d.days(d.parsed_date(f'substr({word}, 1, 10)'))} END"
            )
        else:
            return "CAST(NULL AS DOUBLE)"
        return f"(CAST({days} AS DOUBLE) - {d.double(float(column.start))})"

    def _word(self, name: str) -> str:
        """A cell as a word; '' or NULL where it has none."""
        kind, d, cell = self._kind(name), self.dialect, self.dialect.quoted(name)
        if kind == "text":
            return d.trimmed(cell, SPACES)
        if kind == "float":
            value = f"CAST({cell} AS DOUBLE)"
            whole = f"floor({value}) = {value} AND abs({value}) < {d.double(MOST_EXACT)}"
            return (
                f"CASE WHEN isnan({value}) THEN '' WHEN {whole} THEN "
                f"CAST(CAST({value} AS BIGINT) AS {d.varchar}) ELSE {d.shortest(value)} END"
            )
        if kind == "boolean":
            return f"CASE WHEN {cell} THEN 'True' WHEN NOT {cell} THEN 'False' END"
        if kind == "date":
            return d.day_word(cell)
        if kind in ("integer", "decimal"):
            return f"CAST({cell} AS {d.varchar})"
        raise Unsupported(
            f"words of the column {name}, whose type is {kind}",
            "describe it as a date, or cast it to text in a view",
        )


def readable(column: Column, kind: str) -> bool:
    """Whether an engine reads a column of this kind as the schema says."""
    if isinstance(column, WordColumn):
        return kind in ("text", "integer", "float", "decimal", "boolean", "date")
    return True
