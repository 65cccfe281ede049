"""DuckDB, the default engine: Parquet files, Arrow and Polars tables, and tables of DuckDB itself
are read where they are.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.engines.aggregates import TableEngine
from dpfy.engines.dialects import Dialect
from dpfy.engines.sql import OWNER, SqlEngine
from dpfy.tables.cells import listed
from dpfy.tables.schema import Schema

SOURCE = "dpfy_source"
INTEGERS = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?")
MICROSECONDS = {"s": 10**6, "ms": 10**3, "us": 1}
MEMORY = "2500MB"
"""What DuckDB may use before it writes parts, encrypted, to its temporary folder. A relation of the
caller's own connection has the limit of that connection.
"""


def kind_of(written: str) -> str:
    """The kind of a type of DuckDB."""
    if INTEGERS.fullmatch(written):
        return "integer"
    if written in ("DOUBLE", "FLOAT"):
        return "float"
    if written.startswith("DECIMAL"):
        return "decimal"
    if written == "TIMESTAMP WITH TIME ZONE":
        return "instant"
    if written in ("TIMESTAMP_NS", "TIMESTAMPTZ_NS"):
        return "nanoseconds"
    if written in ("TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS"):
        return "timestamp"
    return {"VARCHAR": "text", "BOOLEAN": "boolean", "DATE": "date"}.get(written, "other")


MANY_ROWS = 1 << 20
"""From so many rows on, owners are counted by a hash before they are grouped."""
MOST_COUNTED = 100
"""Limits up to this are compared with counts in a byte."""


class DuckdbEngine(SqlEngine):
    """A table that DuckDB reads.

    Args:
        connection: Where the table is.
        source: A table expression, "read_parquet([...])" say.
        schema: The public schema.
        owner: The column that says whose a row is.
        what: What messages call the source.
        files: The files of the source, which must not change.
    """

    name = "duckdb"

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        source: str,
        schema: Any,
        owner: str | None,
        what: str,
        files: Sequence[Path] = (),
    ) -> None:
        self.connection, self.what, self.files = connection, what, list(files)
        described = self._guarded(f"DESCRIBE SELECT * FROM {source}")
        if connection is not None and source != SOURCE:
            self._guarded(f"CREATE OR REPLACE TEMP VIEW {SOURCE} AS SELECT * FROM {source}")
            source = SOURCE
        self._repaired = False
        kinds = {name: kind_of(written) for name, written, *_ in described}
        enums = {name for name, written, *_ in described if written.startswith("ENUM")}
        self.names = list(kinds)
        kinds |= dict.fromkeys(enums, "text")
        held = Schema.of(schema)
        cast = ", ".join(
            f"CAST({Dialect().quoted(n)} AS VARCHAR) AS {Dialect().quoted(n)}" for n in enums
        )
        table = f"(SELECT * REPLACE ({cast}) FROM {source})" if enums else source
        super().__init__(held, kinds, owner, f"{table} AS source", Dialect())
        self._before = self._identity()

    def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        """See `SqlEngine`. Files that changed since the table was opened are an error."""
        found = self._guarded(sql)
        self._check_unchanged()
        return found  # type: ignore[no-any-return]

    def fetch_whole(self, sql: str) -> list[NDArray[np.int64]]:
        """See `SqlEngine`."""
        found = self._guarded(sql, "fetchnumpy")
        return [np.asarray(column, np.int64) for column in found.values()]

    def keep(self, name: str, sql: str) -> None:
        """See `SqlEngine`."""
        self._guarded(f"CREATE OR REPLACE TEMP TABLE {name} AS {sql}")
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if self._identity() != self._before:
            raise Corrupt(self.what, "changed while it was read; run the query again")

    def forget(self, name: str) -> None:
        """See `SqlEngine`."""
        self._guarded(f"DROP TABLE IF EXISTS {name}")

    def _crowded(self, least: int) -> str:
        """See `SqlEngine`: owners are counted by a hash in a few bits first, at a byte each, which is
        several times as fast as to group by them. An owner with more rows than `least` is among
        those whose hash has more.
        """
        plain, rows = super()._crowded(least), self.rows()
        if rows < MANY_ROWS or least > MOST_COUNTED:
            return plain
        mask = (1 << min(rows.bit_length(), 26)) - 1
        bucket = f"CAST(hash({OWNER}) & {mask} AS INTEGER)"
        counts, seen, one = np.zeros(mask + 1, np.uint8), 0, np.uint8(1)
        sql = f"SELECT {bucket} AS b FROM ({self._owners()}) AS owners WHERE {plain}"
        try:
            for batch in self._batches(sql):
                found = batch.column(0).to_numpy()
                np.add.at(counts, found, one)
                seen += len(found)
                if int(counts.sum(dtype=np.int64)) != seen:  # one went beyond a byte
                    return plain
                np.minimum(counts, np.uint8(128), out=counts)
                seen = int(counts.sum(dtype=np.int64))
        except (duckdb.Error, OSError, ValueError):  # said when the owners are grouped
            return plain
        crowded = np.flatnonzero(counts > least).astype(np.int32)
        if 2 * len(crowded) > mask:
            return plain
        import pyarrow

        self.connection.register("dpfy_crowded", pyarrow.table({"b": crowded}))
        name = self.new_table("SELECT b FROM dpfy_crowded")
        self.connection.unregister("dpfy_crowded")
        return f"{plain} AND {bucket} IN (SELECT b FROM {name})"

    def _batches(self, sql: str) -> Iterator[Any]:
        """The rows of a SELECT as Arrow batches."""
        yield from self.connection.sql(sql).to_arrow_reader(1 << 22)

    def _identity(self) -> list[tuple[int, int]]:
        try:
            return [(stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, self.files)]
        except OSError:
            raise Corrupt(self.what, "one of its files is gone; put it back") from None

    def _guarded(self, sql: str, how: str = "fetchall") -> Any:
        """What DuckDB answers. No word of its messages is passed on: they quote cells."""
        try:
            return getattr(self.connection.execute(sql), how)()
        except duckdb.OutOfMemoryException:
            way = "ask fewer statistics at once, or give DuckDB more room"
            raise Unsupported(
                f"{self.what}: the query needs more memory than there is", way
            ) from None
        except duckdb.InvalidInputException as problem:
            if "string encoding" in str(problem) and self.files and not self._repaired:
                self._repair()
                return self._guarded(sql, how)
            raise Corrupt(self.what, "cannot be read: a file is missing or damaged") from None
        except (duckdb.ConversionException, duckdb.OutOfRangeException) as problem:
            if self.files and not self._repaired:  # a time that microseconds do not reach
                self._repair()
                return self._guarded(sql, how)
            raise Corrupt(
                self.what, f"DuckDB could not answer ({type(problem).__name__})"
            ) from None
        except (duckdb.IOException, duckdb.HTTPException):
            raise Corrupt(self.what, "cannot be read: a file is missing or damaged") from None
        except duckdb.CatalogException:
            raise InvalidInput("data", self.what, "names no table that DuckDB finds") from None
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except duckdb.Error as problem:
            kind = type(problem).__name__
            raise Corrupt(self.what, f"DuckDB could not answer ({kind})") from None

    def _repair(self) -> None:
        """Copy the files into a table of the engine without the cells that DuckDB does not read:
        texts that are none are missing, and times beyond its range are moved into it.
        """
        import pyarrow.parquet

        self._repaired, staged = True, "dpfy_staged"
        for path in self.files:
            at = str(path).replace("'", "''")
            place = f"read_parquet(['{at}'], hive_partitioning = true)"
            file = pyarrow.parquet.ParquetFile(path)
            names = [row[0] for row in self._guarded(f"DESCRIBE SELECT * FROM {place}")]
            parts = [self.dialect.quoted(n) for n in names if n not in file.schema_arrow.names]
            for batch in file.iter_batches():
                columns = {n: _valid(c) for n, c in zip(batch.schema.names, batch.columns)}
                self.connection.register("dpfy_batch", pyarrow.table(columns))
                sql = "SELECT * FROM dpfy_batch"
                if parts:
                    one = f"SELECT {', '.join(parts)} FROM {place} LIMIT 1"
                    sql = f"SELECT batch.*, part.* FROM dpfy_batch AS batch, ({one}) AS part"
                there = self._guarded(
                    f"SELECT 1 FROM duckdb_tables() WHERE table_name = '{staged}'"
                )
                if there:
                    self._guarded(f"INSERT INTO {staged} BY NAME {sql}")
                else:
                    self._guarded(f"CREATE TEMP TABLE {staged} AS {sql}")
        self._guarded(f"CREATE OR REPLACE TEMP VIEW {SOURCE} AS SELECT * FROM {staged}")


def _valid(column: Any) -> Any:
    """An Arrow column without texts that are not UTF-8, and with times that DuckDB can read."""
    try:
        column.validate(full=True)
    except Exception:
        import pyarrow

        return pyarrow.array(listed(column), column.type)
    return reachable(column)


def reachable(column: Any) -> Any:
    """An Arrow column of dates or times as DuckDB reads it without an error: days, micro- or
    nanoseconds. Those that DuckDB has no value for are moved to the nearest that it has.
    """
    import pyarrow as pa

    kind = column.type
    each, most, wide, due = 1, 1 << 62, pa.int64(), kind
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        most, due = (1 << 63) - 2, pa.timestamp("ns")  # with a zone too: its day is that of UTC
    elif pa.types.is_timestamp(kind):
        each, due = MICROSECONDS[kind.unit], pa.timestamp("us", kind.tz)
    elif pa.types.is_date(kind):
        most, wide, due = 1 << 30, pa.int32(), pa.date32()
    else:
        return column
    held = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    missing = held.is_null().to_numpy(zero_copy_only=False)
    raw = held.view(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    whole = raw.fill_null(0).to_numpy(zero_copy_only=False)
    if not pa.types.is_date32(kind):
        missing |= whole == np.iinfo(np.int64).min  # numpy's word for no time
    if pa.types.is_date64(kind):
        whole = whole // 86_400_000
    moved = np.clip(whole, -(most // each), most // each) * each
    return pa.array(moved, wide, mask=missing).view(due)


def known_to_duckdb(kind: Any) -> bool:
    """Whether DuckDB reads every cell of this Arrow type, after `reachable`."""
    from pyarrow import types as of

    if of.is_dictionary(kind):
        kind = kind.value_type
        return bool(of.is_string(kind) or of.is_large_string(kind))
    if of.is_decimal128(kind):
        return bool(kind.scale >= 0)
    plain = (of.is_integer, of.is_boolean, of.is_float32, of.is_float64, of.is_string)
    more = (of.is_large_string, of.is_string_view, of.is_timestamp, of.is_date, of.is_null)
    return any(test(kind) for test in (*plain, *more))


def connected() -> duckdb.DuckDBPyConnection:
    """A database in memory that fetches nothing from elsewhere and keeps nothing."""
    folder = tempfile.mkdtemp(prefix="dpfy-duckdb-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found = duckdb.connect(":memory:")
    for name, value in (
        ("temp_directory", f"'{folder}'"),
        ("temp_file_encryption", "true"),
        (
            "force_mbedtls_unsafe",
            "true",
        ),  # else it refuses to write; the folder is this user's alone
        ("memory_limit", f"'{MEMORY}'"),
        ("autoinstall_known_extensions", "false"),
        ("enable_progress_bar", "false"),
        ("preserve_insertion_order", "false"),
    ):
        found.execute(f"SET {name} = {value}")
    return found


def of_parquet(files: Sequence[Path], schema: Any, owner: str | None, what: str) -> TableEngine:
    """Parquet files with the same columns; folders named column=value are columns too."""
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in files)
    source = f"read_parquet([{listed}], hive_partitioning = true, union_by_name = true)"
    return DuckdbEngine(connected(), source, schema, owner, what, files)


def of_arrow(table: Any, schema: Any, owner: str | None, what: str) -> TableEngine:
    """An Arrow table."""
    connection = connected()
    connection.register(SOURCE, table)
    return DuckdbEngine(connection, SOURCE, schema, owner, what)


def of_database(path: Path, table: str, schema: Any, owner: str | None) -> TableEngine:
    """A table or a view of a database file, which is only read."""
    what = f"{path.name}::{table}"
    try:
        connection = duckdb.connect(str(path), read_only=True)
    except duckdb.Error:
        raise Corrupt(path.name, "cannot be opened as a DuckDB database") from None
    named = ".".join(Dialect().quoted(part) for part in table.split("."))
    return DuckdbEngine(connection, named, schema, owner, what, [path])


class RelationEngine(DuckdbEngine):
    """A relation of the caller's own connection."""

    def __init__(self, relation: Any, schema: Any, owner: str | None) -> None:
        self.relation = relation
        super().__init__(None, SOURCE, schema, owner, "the relation")  # type: ignore[arg-type]

    def _guarded(self, sql: str, how: str = "fetchall") -> Any:
        self.connection = self  # type: ignore[assignment]
        return super()._guarded(sql, how)

    def _crowded(self, least: int) -> str:
        return SqlEngine._crowded(self, least)

    def execute(self, sql: str) -> Any:
        """What the caller's connection answers."""
        found = self.relation.query(SOURCE, sql)
        return found if found is not None else self

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Of a statement without an answer."""
        return []
