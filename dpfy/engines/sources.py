"""Which engine reads a source: DuckDB what it can read where it is, the reference everything else.

Files: CSV (read by the one reader of CSV files), Parquet as a file, a folder or a pattern such as
"visits/*.parquet", and "warehouse.duckdb::visits", a table or a view of a DuckDB database.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import owner_columns
from dpfy.engines.aggregates import MemoryEngine, TableEngine
from dpfy.engines.cell_policy import readable
from dpfy.tables.columns import OpenColumn
from dpfy.tables.schema import Schema
from dpfy.tables.table import PrivateTable

DATABASES = (".duckdb", ".ddb", ".db")
PARQUET = (".parquet", ".pq")


def opened(
    data: Any, schema: Any, owner: str | None = None, at_most: int | None = None
) -> TableEngine:
    """The engine of a source. `owner` may name several columns, where a row belongs to several
    persons, of whom each has at most `at_most` rows; only the reference chooses them.

    Raises:
        InvalidInput: It is no source, or the schema names a column that it does not have.
        Unsupported: Rows of a source that is not read into memory have several owners.
    """
    held = Schema.of(schema)
    shared = owner is not None and len(owner_columns("owner", owner)) > 1
    engine = None if held.strict or shared else _in_engine(data, held, owner)
    if engine is not None:
        return engine  # type: ignore[no-any-return]
    if column_names(data) is not None:
        what = "a strict schema" if held.strict else "a type of a column"
        what = "rows of several persons" if shared and not held.strict else what
        raise Unsupported(f"{what} in a source that is read where it is", "give a file or a table")
    return MemoryEngine(PrivateTable(data, held, owner, at_most))


def column_names(data: Any) -> list[str] | None:
    """The names of the columns of a source that only DuckDB reads; None for another one."""
    if isinstance(data, str | Path):
        given = str(data)
        if "::" not in given and parquet_files(given) in (None, [Path(given)]):
            return None
    found = _in_engine(data, Schema.of([OpenColumn("")]), None, check=False)
    return None if found is None else found.names


def parquet_files(given: str) -> list[Path] | None:
    """The files of a path that may be a folder or a pattern; None where it is no such thing.

    Raises:
        InvalidInput: It is a folder or a pattern without a Parquet file.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix.lower() in PARQUET and p.is_file()]
    elif any(mark in given for mark in "*?[") and not path.exists():
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
        if any(p.suffix.lower() not in PARQUET for p in found):
            raise InvalidInput("data", given, "must name Parquet files alone (.parquet)")
    elif path.suffix.lower() in PARQUET and path.is_file():
        with path.open("rb") as file:  # one that is packed by gzip is read in memory
            return [path] if file.read(4) == b"PAR1" else None
    else:
        return None
    if not found:
        raise InvalidInput("data", given, "names no Parquet file")
    return sorted(found)


def _in_engine(data: Any, schema: Schema, owner: str | None, check: bool = True) -> Any:
    """DuckDB, if it can read the source by the schema; with `check` false whatever its columns."""
    from dpfy.engines import duckdb_engine as engines

    if isinstance(data, str | Path):
        path, mark, table = str(data).partition("::")
        if mark and path.lower().endswith(DATABASES):
            return engines.of_database(Path(path).expanduser(), table, schema, owner)
        files = parquet_files(str(data))
        if files is None:
            return None
        if len(files) > 1 or not check:
            return engines.of_parquet(files, schema, owner, str(data))
        return _readable(engines.of_parquet(files, schema, owner, str(data)))
    kind = f"{type(data).__module__}.{type(data).__name__}"
    if kind.endswith("DuckDBPyRelation"):
        return engines.RelationEngine(data, schema, owner)
    if kind.startswith("pyspark.sql.") and kind.endswith(".DataFrame"):
        from dpfy.engines.spark_engine import SparkEngine

        engine = SparkEngine(data, schema, owner)
        return _readable(engine) if check else engine
    if kind == "polars.lazyframe.frame.LazyFrame":
        named = {c.name for c in schema.columns}
        data = data.select([n for n in data.collect_schema().names() if n in named or not check])
        data = data.collect() if check else data.limit(0).collect()
        return _readable(_of_arrow(data.to_arrow(), schema, owner, check))
    if kind == "polars.dataframe.frame.DataFrame" and check:
        return _readable(_of_arrow(data.to_arrow(), schema, owner, check))
    return (
        _readable(_of_arrow(data, schema, owner, check))
        if kind == "pyarrow.lib.Table" and check
        else None
    )


def _of_arrow(table: Any, schema: Schema, owner: str | None, check: bool) -> Any:
    """DuckDB over an Arrow table; None where texts are damaged, two names are hard to tell apart, or
    a type has cells that DuckDB does not read.
    """
    from dpfy.engines import duckdb_engine

    named = {c.name for c in schema.columns}
    names = [n for n in table.column_names if n in named or not check]
    if len({n.lower() for n in table.column_names}) < len(table.column_names):
        return None
    try:
        table = table.select(names)
        table.validate(full=True)
    except Exception:  # whatever Arrow finds in a cell
        return None
    if check:
        if not all(map(duckdb_engine.known_to_duckdb, table.schema.types)):
            return None
        for place, name in enumerate(names):
            table = table.set_column(place, name, duckdb_engine.reachable(table.column(place)))
    return duckdb_engine.of_arrow(table, schema, owner, "the table")


def _readable(engine: Any) -> Any:
    """The engine, if it reads all columns that the schema describes; else None: the reference reads
    types that it has no words for.
    """
    if engine is None:
        return None
    kinds = engine.kinds
    fit = all(c.name in kinds and readable(c, kinds[c.name]) for c in engine.schema.columns)
    return engine if fit else None
