"""Spark: a DataFrame is read where it is, and only sums of whole numbers come back. Needs the extra
`dpfy[spark]`.

Every SELECT is a function of the rows alone. A task that Spark repeats, or an executor that is lost
in the middle, changes nothing: Spark counts each row of a finished stage once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from dpfy.core.errors import Corrupt, Unsupported
from dpfy.engines.dialects import Dialect
from dpfy.engines.sql import SqlEngine
from dpfy.tables.schema import Schema

KIND: Mapping[str, str] = {
    "string": "text",
    "tinyint": "integer",
    "smallint": "integer",
    "int": "integer",
    "bigint": "integer",
    "float": "float",
    "double": "float",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "instant",
    "timestamp_ntz": "timestamp",
}
SETTINGS = {
    "spark.sql.ansi.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parser.escapedStringLiterals": "false",
}


class SparkDialect(Dialect):
    """What Spark writes in another way than DuckDB."""

    varchar = "STRING"
    name = "spark"

    def quoted(self, name: str) -> str:
        """See `Dialect`."""
        return "`" + name.replace("`", "``") + "`"

    def text(self, value: str) -> str:
        """See `Dialect`."""
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"

    def trimmed(self, text: str, spaces: str) -> str:
        """See `Dialect`."""
        return f"trim(BOTH {self.text(spaces)} FROM {text})"

    def matches(self, text: str, pattern: str) -> str:
        """See `Dialect`."""
        whole = self.text(f"\\A(?:{pattern})\\z")
        return f"({text} RLIKE {whole})"

    def date_of(self, cell: str, kind: str) -> str:
        """See `Dialect`."""
        return f"CAST({cell} AS DATE)"

    def days(self, date: str) -> str:
        """See `Dialect`."""
        return f"unix_date({date})"

    def year(self, day: str) -> str:
        """See `Dialect`."""
        return f"year(date_from_unix_date(CAST({day} AS INT)))"

    def month(self, day: str) -> str:
        """See `Dialect`."""
        return f"month(date_from_unix_date(CAST({day} AS INT)))"

    def day_word(self, cell: str) -> str:
        """See `Dialect`."""
        return f"CASE WHEN year({cell}) BETWEEN 1 AND 9999 THEN CAST({cell} AS STRING) END"

    def shortest(self, double: str) -> str:
        """See `Dialect`."""
        raise Unsupported("words of a column of floats in Spark", "cast it to text in Spark")

    def rounded(self, double: str) -> str:
        """See `Dialect`."""
        return f"CAST(rint({double}) AS BIGINT)"

    def total(self, integer: str) -> str:
        """See `Dialect`."""
        return f"SUM(CAST({integer} AS DECIMAL(38, 0)))"

    def picked(self, values: tuple[float, ...], place: str) -> str:
        """See `Dialect`."""
        written = ", ".join(
            self.double(v) if isinstance(v, float) else f"CAST({v} AS BIGINT)" for v in values
        )
        return f"element_at(array({written}), CAST({place} + 1 AS INT))"

    def listed(self, text: str, words: tuple[str, ...]) -> str | None:
        """See `Dialect`."""
        return None

    def whole_type(self, low: int, high: int) -> str:
        """See `Dialect`."""
        return "INT" if low >= -(2**31) and high < 2**31 else "BIGINT"

    def numbered(self, values: Sequence[float]) -> str:
        """See `Dialect`."""
        listed = [
            self.double(v) if isinstance(v, float) else f"CAST({v} AS BIGINT)" for v in values
        ]
        return f"SELECT posexplode(array({', '.join(listed)})) AS (k, v)"


class SparkEngine(SqlEngine):
    """A DataFrame of Spark.

    Args:
        frame: The DataFrame. A session of its own reads it, with the settings that dpfy needs.
        schema: The public schema.
        owner: The column that says whose a row is.
    """

    name = "spark"

    def __init__(self, frame: Any, schema: Any, owner: str | None) -> None:
        view = f"dpfy_{uuid4().hex}"
        kinds = {}
        for name, written in frame.dtypes:
            kind = "decimal" if written.startswith("decimal") else KIND.get(written, "other")
            kinds[name] = kind
        self.names, self.prefix = list(kinds), view
        frame.createGlobalTempView(view)
        self.session = frame.sparkSession.newSession()
        for setting, value in SETTINGS.items():
            self.session.conf.set(setting, value)
        table = f"global_temp.{view} AS source"
        super().__init__(Schema.of(schema), kinds, owner, table, SparkDialect())

    def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        """See `SqlEngine`. No word of Spark's messages is passed on: they quote cells."""
        try:
            return [tuple(row) for row in self.session.sql(sql).collect()]
        except Exception as problem:
            kind = type(problem).__name__
            raise Corrupt("the table", f"Spark could not answer ({kind})") from None

    def keep(self, name: str, sql: str) -> None:
        """See `SqlEngine`: a view whose rows Spark keeps, and makes again where they are lost."""
        try:
            held = self.session.sql(sql).persist()
            held.createOrReplaceTempView(name)
        except Exception as problem:
            kind = type(problem).__name__
            raise Corrupt("the table", f"Spark could not answer ({kind})") from None

    def forget(self, name: str) -> None:
        """See `SqlEngine`."""
        self.session.table(name).unpersist()
        self.session.catalog.dropTempView(name)
