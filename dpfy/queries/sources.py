"""Where records come from: CSV and Parquet files, pandas and Arrow tables, NumPy arrays; and the
public columns that describe them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.core.errors import InvalidInput
from dpfy.data import schema as schemas
from dpfy.data.cells import listed, read_csv, read_parquet
from dpfy.data.files import DataFile
from dpfy.statistics.columns import CategoryColumn, Column, NumberColumn, OpenColumn


@dataclass(frozen=True)
class TableColumns:
    """The public description of a table: its columns by name, and how a missing cell is written."""

    columns: Mapping[str, Column]
    missing: tuple[str, ...] = ("",)

    @classmethod
    def given(cls, schema: TableColumns | Mapping[str, Column] | str | Path) -> TableColumns:
        """A description as it is, columns by name, or a schema: a packaged one, or a TOML file."""
        if isinstance(schema, TableColumns):
            return schema
        if isinstance(schema, Mapping):
            return cls(dict(schema))
        text, name = schemas.written(str(schema))
        return cls.parse(text, name)

    @classmethod
    def parse(cls, text: str, name: str) -> TableColumns:
        """From the TOML of a schema. A label is a column of words; an ignored column is one about
        which nothing is public.
        """
        built, ignored, missing = schemas.parse_columns(text, name)
        held: dict[str, Column] = {column.name: _column(column) for column in built}
        return cls(held | {column: OpenColumn(column) for column in sorted(ignored)}, missing)


def _column(column: schemas.Number | schemas.Category | schemas.Label) -> Column:
    if isinstance(column, schemas.Number):
        return NumberColumn(column.name, *column.range, column.fill)
    if isinstance(column, schemas.Label):
        return CategoryColumn(column.name, column.classes)
    return CategoryColumn(column.name, column.categories, column.fill)


def cells_of(data: Any, columns: TableColumns) -> Mapping[str, Any]:
    """Cells by column from whatever holds them. Only their form is looked at."""
    if isinstance(data, str | Path):
        file = DataFile.given(str(data))
        parquet = str(data).lower().endswith((".parquet", ".pq"))
        return read_parquet(file, least=0) if parquet else read_csv(file, least=0)
    if isinstance(data, Mapping):
        return {str(name): _flat(str(name), held) for name, held in data.items()}
    if hasattr(data, "column_names") and hasattr(data, "column"):  # Arrow
        return {
            name: listed(data.column(name)) for name in data.column_names if name in columns.columns
        }
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # pandas
        return {str(name): data[name].to_numpy() for name in data.columns}
    if isinstance(data, np.ndarray) and data.dtype.names:
        return {name: data[name] for name in data.dtype.names}
    if isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == len(columns.columns):
        return {name: data[:, k] for k, name in enumerate(columns.columns)}
    rule = (
        "must be a CSV or Parquet file, a pandas or Arrow table, arrays by column, or an array "
        "with one column for each of the schema"
    )
    raise InvalidInput("data", type(data).__name__, rule)


def _flat(name: str, held: Any) -> Any:
    """One cell for each record."""
    found = held.to_numpy() if hasattr(held, "to_numpy") else held
    if (
        not hasattr(found, "__len__")
        or isinstance(found, str | bytes)
        or (isinstance(found, np.ndarray) and found.ndim != 1)
    ):
        raise InvalidInput(
            f"data {name}",
            type(held).__name__,
            "must be a list or an array with one cell for each record",
        )
    return found
