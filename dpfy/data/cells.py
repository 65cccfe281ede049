"""Cells by column, from CSV and Parquet files: as they are written, before any schema. Importing
this imports no torch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from dpfy.core import errors
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.data.files import DataFile
from dpfy.data.header import delimiter_of

MOST_CELLS = 2**27


def read_csv(file: DataFile, least: int = 1) -> dict[str, list[str]]:
    """Columns by name from a file with a header line, which says whether commas, semicolons or
    tabs, and so many rows (0 or 1).
    """
    text = file.text()
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter_of(text), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        check_header(header, file)
        rows = []
        for number, row in enumerate(reader, start=1):
            if len(row) != len(header):
                raise Corrupt(
                    file.name, f"row {number} has {len(row)} cells, the header has {len(header)}"
                )
            rows.append(row)
    except csv.Error as error:
        raise Corrupt(file.name, f"not a comma-separated table: {error}") from None
    if not rows and least:
        raise InvalidInput("data file", file.name, "must hold at least 1 row after the header")
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return {
        name: [cell.strip() for cell in column]
        for name, column in zip(header, columns, strict=True)
    }


def read_parquet(file: DataFile, least: int = 1) -> dict[str, list[object]]:
    """Columns by name from a Parquet file with at least so many rows (0 or 1)."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise errors.missing("Parquet", "pyarrow") from None
    content = file.read()
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1":
        raise Corrupt(file.name, "not a Parquet file, or truncated")
    try:
        held = pyarrow.parquet.ParquetFile(io.BytesIO(content))
        cells = held.metadata.num_rows * held.metadata.num_columns
        if cells <= MOST_CELLS:
            table = held.read()
            names = table.column_names
    except Exception:  # a damaged file raises a dozen types
        raise Corrupt(file.name, "the Parquet file is damaged") from None
    if cells > MOST_CELLS:
        raise InvalidInput(
            "data file", file.name, f"holds {cells} cells; at most {MOST_CELLS} can be read"
        )
    check_header(names, file)
    if table.num_rows < least:
        raise InvalidInput("data file", file.name, "must hold at least 1 row")
    return dict(zip(names, map(listed, table.columns), strict=True))


def listed(column: Any) -> list[Any]:
    """The cells of an Arrow column. One that Python has no value for, as a date in the year
    287,000, is None: a missing cell.

    Guarantees: no cell raises an error, and no other cell changes with it. An error would tell that
    the record is there.
    """
    try:
        found: list[Any] = column.to_pylist()
    except Exception:
        found = [_cell(scalar) for scalar in column]
    return found


def _cell(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except Exception:  # overflow, letters that are none, whatever a type of its own does
        return None


def check_header(header: Sequence[str], file: DataFile) -> None:
    """Refuse a table without column names, or with one twice."""
    if not header:
        raise InvalidInput("data file", file.name, "must begin with a line of column names")
    for position, column in enumerate(header):
        if column in header[:position]:
            raise Corrupt(file.name, f"column {column!r} is there twice")
