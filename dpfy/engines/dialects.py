"""How engines write what the policy for cells and bounded aggregates need: few expressions, each
with the same meaning in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WHOLE_TYPES = (
    ("UTINYINT", 0, 2**8 - 1),
    ("USMALLINT", 0, 2**16 - 1),
    ("INTEGER", -(2**31), 2**31 - 1),
)
KINDS = (
    *("text", "integer", "float", "decimal", "boolean", "date"),
    *("timestamp", "nanoseconds", "instant", "other"),
)
"""The kinds of columns. An instant is a time with a zone, and its day is that of UTC."""


class Dialect:
    """DuckDB; other engines override what they write in another way."""

    varchar = "VARCHAR"
    name = "duckdb"

    def quoted(self, name: str) -> str:
        """A column by its name."""
        return '"' + name.replace('"', '""') + '"'

    def text(self, value: str) -> str:
        """A text."""
        return "'" + value.replace("'", "''") + "'"

    def double(self, value: float) -> str:
        """A double, the very same one."""
        if math.isinf(value):
            return f"CAST('{'-' if value < 0 else ''}Infinity' AS DOUBLE)"
        return f"CAST('{float(value)!r}' AS DOUBLE)"

    def trimmed(self, text: str, spaces: str) -> str:
        """A text without these characters at its ends."""
        return f"trim({text}, {self.text(spaces)})"

    def matches(self, text: str, pattern: str) -> str:
        """Whether the whole text matches."""
        return f"regexp_full_match({text}, {self.text(pattern)})"

    def parsed_double(self, text: str) -> str:
        """A text that is a decimal number."""
        return f"TRY_CAST({text} AS DOUBLE)"

    def parsed_date(self, text: str) -> str:
        """A text as a date; NULL where it is none."""
        return f"TRY_CAST({text} AS DATE)"

    def date_of(self, cell: str, kind: str) -> str:
        """The day of a date or a time; NULL where it is infinite."""
        if kind == "timestamp":  # seconds may be beyond the range of microseconds
            cell = f"TRY_CAST({cell} AS TIMESTAMP)"
        day = cell if kind == "date" else f"CAST({cell} AS DATE)"
        if kind == "instant":
            day = f"CAST(make_timestamp(epoch_us({cell})) AS DATE)"
        if kind == "nanoseconds":  # a cast rounds them to the next day
            long, count = 86_400 * 10**9, f"epoch_ns({cell})"
            floor = f"{count} // {long} - CASE WHEN {count} % {long} < 0 THEN 1 ELSE 0 END"
            return f"DATE '1970-01-01' + CAST({floor} AS INTEGER)"
        return f"CASE WHEN isfinite({cell}) THEN {day} END"

    def days(self, date: str) -> str:
        """Days since 1970."""
        return f"({date} - DATE '1970-01-01')"

    def year(self, day: str) -> str:
        """The year of a day since 1970."""
        return f"year(DATE '1970-01-01' + CAST({day} AS INTEGER))"

    def month(self, day: str) -> str:
        """The month of a day since 1970."""
        return f"month(DATE '1970-01-01' + CAST({day} AS INTEGER))"

    def shortest(self, double: str) -> str:
        """A double in the fewest digits that tell it apart, as Python writes it."""
        return f"CAST({double} AS VARCHAR)"

    def day_word(self, cell: str) -> str:
        """A date as 2020-01-31; NULL where its year does not have four digits."""
        return f"CASE WHEN year({cell}) BETWEEN 1 AND 9999 THEN CAST({cell} AS VARCHAR) END"

    def rounded(self, double: str) -> str:
        """The nearest whole number, the even one of two, as an integer."""
        return f"CAST({double} AS BIGINT)"

    def truncated(self, double: str) -> str:
        """A double without its fraction, as an integer."""
        return f"CAST(trunc({double}) AS BIGINT)"

    def whole_type(self, low: int, high: int) -> str:
        """The smallest type of whole numbers that has both."""
        for name, least, most in WHOLE_TYPES:
            if least <= low and high <= most:
                return name
        return "BIGINT"

    def numbered(self, values: Sequence[float]) -> str:
        """A SELECT of values, v, and their places from 0, k."""
        kind = "BIGINT" if isinstance(values[0], int) else "DOUBLE"
        listed = ", ".join(f"'{value!r}'" for value in values)
        return f"SELECT unnest(range({len(values)})) AS k, CAST(unnest([{listed}]) AS {kind}) AS v"

    def total(self, integer: str) -> str:
        """An exact sum of integers."""
        return f"SUM({integer})"

    def picked(self, values: tuple[float, ...], place: str) -> str:
        """The value at a place, counted from 0."""
        written = ", ".join(
            self.double(v) if isinstance(v, float) else f"CAST({v} AS BIGINT)" for v in values
        )
        return f"([{written}])[{place} + 1]"

    def listed(self, text: str, words: tuple[str, ...]) -> str | None:
        """The place of a text in a list; NULL where it is not in it. None: there is no short way."""
        if not words:
            return None
        named = ", ".join(map(self.text, words))
        return f"enum_code(TRY_CAST({text} AS ENUM({named})))"

    def words(self, words: tuple[str, ...]) -> str:
        """A table of words and their places."""
        rows = ", ".join(f"({self.text(w)}, {k})" for k, w in enumerate(words))
        return f"(VALUES {rows}) AS {{name}}(word, place)"
