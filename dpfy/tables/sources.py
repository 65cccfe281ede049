"""Where the cells of a table come from: CSV, Parquet and JSON Lines files, pandas, Arrow and Polars
tables, arrays. Only the form of the data is looked at here, never a cell.

Guarantees: no cell raises an error. A row with fewer cells than the header has missing ones, the
cells beyond the header are not read, and bytes that are no text are characters that no list holds.
What is no table at all (a damaged file, quotes that never end) is a one-line error without a row.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpfy.core import errors, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import GZIP_MAGIC, DataFile
from dpfy.tables.cells import listed

MOST_CELLS = 2**27
MOST_HEADER = 1 << 20
"""Bytes of the longest header that is read."""
DELIMITERS = (",", ";", "\t")
JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson")
PLAIN = (str, int, float, bool, type(None))
"""Types of values of JSON that are cells."""
ROWS = 1 << 15
"""Rows of one chunk."""
Chunk = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Header:
    """The columns of a table in order, with the kind that the file itself states for each (None: it
    states none).
    """

    names: tuple[str, ...]
    kinds: tuple[str | None, ...]


class TableFile:
    """A CSV or Parquet file as cells by column.

    Guarantees: only the header is read before a column is asked for.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = DataFile.given(str(path))
        self.header = read_header(self._file)
        self.names = self.header.names

    def __repr__(self) -> str:
        return f"TableFile({self._file.name!r})"

    def column(self, name: str) -> Any:
        """A column as it is written."""
        if name not in self.names:
            rule = f"is not a column of {self._file.name}: {', '.join(self.names)[:200]}"
            raise InvalidInput("data column", name, rule)
        return self._cells[name]

    @cached_property
    def _cells(self) -> dict[str, Any]:
        return read_table(self._file, least=0)


def is_parquet(file: DataFile) -> bool:
    """Whether the name of a file says that it is Parquet."""
    return str(file.path).lower().endswith((".parquet", ".pq"))


def is_json_lines(file: DataFile) -> bool:
    """Whether the name of a file says that it is JSON Lines."""
    return str(file.path).lower().endswith(JSON_LINES)


def read_json_lines(file: DataFile) -> dict[str, Sequence[Any]]:
    """All columns by name: those of the first line.

    Guarantees: no cell raises an error. A key that a line lacks, and a value that is a list or an
    object, is a missing cell; keys that the first line does not have are not read. A line that is
    no object means that the file is damaged: an error that does not say which.
    """
    found: dict[str, list[Any]] = {}
    for line in file.text().split("\n"):
        if not line.strip():
            continue
        row = _object(line, file)
        if not found:
            found = {key: [] for key in row}
        for key, cells in found.items():
            value = row.get(key)
            cells.append(value if isinstance(value, PLAIN) else None)
    if not found:
        raise InvalidInput("data file", file.name, "must hold a line with an object that has keys")
    return dict(found)


def _object(line: str, file: DataFile) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise Corrupt(file.name, "not JSON Lines: every line must be one object")
    return row


def delimiter_of(text: str) -> str:
    """What separates the columns of the first line of `text`: a comma, or where there is none
    outside of quotes a semicolon or a tab.
    """
    bare = "".join(text[:MOST_HEADER].split('"')[::2]).lstrip("\r\n")
    line = next(iter(bare.splitlines()), "")
    return next((mark for mark in DELIMITERS if mark in line), ",")


def read_header(file: DataFile, parquet: bool | None = None) -> Header:
    """The header of a table.

    Guarantees: of a CSV file nothing after its first line is read; of a Parquet file the schema
    alone, no value and no statistic; of JSON Lines the names come from the first line.
    """
    if is_parquet(file) if parquet is None else parquet:
        return _parquet_header(file)
    if is_json_lines(file):
        keys = tuple(read_json_lines(file))
        return Header(keys, (None,) * len(keys))
    with storage.opened("data file", file.path, file.name) as raw, _damage(file):
        names = _names(_first_line(_unpacked(raw), file), file)
    return Header(tuple(names), (None,) * len(names))


def _first_line(source: Any, file: DataFile) -> str:
    """The text up to the first end of a line outside of quotes."""
    held = b""
    while len(held) <= MOST_HEADER:
        line = source.readline(MOST_HEADER + 2 - len(held))
        held += line
        if not line or (held.endswith(b"\n") and held.count(b'"') % 2 == 0):
            try:
                return held.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise Corrupt(file.name, f"not UTF-8 text (byte {error.start})") from None
    rule = f"has no line of column names within {MOST_HEADER} bytes"
    raise InvalidInput("data file", file.name, rule)


def _names(first: str, file: DataFile) -> list[str]:
    reader = csv.reader(io.StringIO(first, newline=""), delimiter=delimiter_of(first), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise Corrupt(file.name, f"its first line is not one of column names: {error}") from None
    if not any(names):
        raise InvalidInput("data file", file.name, "must begin with a line of column names")
    return names


def _unpacked(raw: BinaryIO) -> Any:
    """The bytes of a file, through gzip where it is packed."""
    return gzip.GzipFile(fileobj=raw) if _packed(raw) else raw


@contextmanager
def _damage(file: DataFile) -> Iterator[None]:
    """What is no table, in one line."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Corrupt(
            file.name, "gzip data is truncated or damaged; fetch the file again"
        ) from None
    except csv.Error as error:
        raise Corrupt(file.name, f"not a comma-separated table: {error}") from None


def chunks(file: DataFile, rows: int = ROWS, parquet: bool | None = None) -> Iterator[Chunk]:
    """The cells of a table, by column, so many rows at a time; at least one chunk, which has no
    rows where the table has none.

    Guarantees: holds one chunk at a time. A column that is there twice and damaged files are
    one-line errors, raised when they are met.
    """
    if is_parquet(file) if parquet is None else parquet:
        yield from _parquet(file, rows)
        return
    if is_json_lines(file):
        yield read_json_lines(file)
        return
    with storage.opened("data file", file.path, file.name) as raw, _damage(file):
        yield from _parted(_unpacked(raw), file, rows)


def read_table(file: DataFile, least: int = 1, parquet: bool | None = None) -> dict[str, Any]:
    """All columns by name, of a file with at least so many rows (0 or 1)."""
    if is_parquet(file) if parquet is None else parquet:
        _refuse_giant(file)
        parts = list(_parquet(file, ROWS))
    elif is_json_lines(file):
        parts = [read_json_lines(file)]
    else:
        with _damage(file):
            parts = list(_parted(io.BytesIO(file.read()), file, ROWS))
    table = {name: list(chain.from_iterable(p[name] for p in parts)) for name in parts[0]}
    if least and not any(map(len, table.values())):
        raise InvalidInput("data file", file.name, "must hold at least 1 row after the header")
    return table


def _parted(source: Any, file: DataFile, rows: int) -> Iterator[Chunk]:
    first = _first_line(source, file)
    names = _names(first, file)
    check_header(names, file)
    csv.field_size_limit(storage.MOST_DATA)
    text = io.TextIOWrapper(source, encoding="utf-8", errors="replace", newline="")
    reader = csv.reader(text, delimiter=delimiter_of(first), strict=True)
    width, held, empty = len(names), [], True
    for row in reader:
        held.append(row if len(row) == width else (row + [""] * width)[:width])
        if len(held) == rows:
            yield _columns(names, held)
            held, empty = [], False
    if held or empty:
        yield _columns(names, held)


def _columns(names: Iterable[str], rows: list[list[str]]) -> Chunk:
    columns: Iterable[Sequence[str]] = zip(*rows, strict=True) if rows else ((),) * len([*names])
    return dict(zip(names, columns, strict=True))


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise errors.missing("Parquet", "pyarrow") from None
    return pyarrow.parquet


@contextmanager
def _opened_parquet(file: DataFile) -> Iterator[Any]:
    library = _arrow()
    with storage.opened("data file", file.path, file.name) as raw:
        try:
            held = library.ParquetFile(io.BytesIO(file.read()) if _packed(raw) else raw)
        except (InvalidInput, Corrupt):
            raise
        except Exception:  # a damaged file raises a dozen types
            raise Corrupt(file.name, "not a Parquet file, or damaged") from None
        yield held


def _packed(raw: BinaryIO) -> bool:
    magic = raw.read(2)
    raw.seek(0)
    return magic == GZIP_MAGIC


def _refuse_giant(file: DataFile) -> None:
    with _opened_parquet(file) as held:
        cells = held.metadata.num_rows * held.metadata.num_columns
    if cells > MOST_CELLS:
        rule = f"holds {cells} cells; at most {MOST_CELLS} can be read"
        raise InvalidInput("data file", file.name, rule)


def _parquet(file: DataFile, rows: int) -> Iterator[Chunk]:
    with _opened_parquet(file) as held:
        names = list(held.schema_arrow.names)
        check_header(names, file)
        empty = True
        try:
            for batch in held.iter_batches(batch_size=rows):
                yield dict(zip(names, map(listed, batch.columns), strict=True))
                empty = False
        except (GeneratorExit, InvalidInput, Corrupt):
            raise
        except Exception:
            raise Corrupt(file.name, "the Parquet file is damaged") from None
        if empty:
            yield {name: [] for name in names}


def _parquet_header(file: DataFile) -> Header:
    with _opened_parquet(file) as held:
        schema = held.schema_arrow
    from pyarrow import types

    def kind(found: object) -> str:
        if types.is_integer(found) or types.is_floating(found) or types.is_decimal(found):
            return "number"
        words = (types.is_string, types.is_large_string, types.is_dictionary, types.is_boolean)
        return "category" if any(is_one(found) for is_one in words) else "ignore"

    return Header(tuple(schema.names), tuple(kind(field.type) for field in schema))


def check_header(names: Sequence[str], file: DataFile) -> None:
    """Refuse a table without column names, or with one twice."""
    if not names:
        raise InvalidInput("data file", file.name, "must begin with a line of column names")
    for position, name in enumerate(names):
        if name in names[:position]:
            raise Corrupt(file.name, f"column {name!r} is there twice")


def cells_of(data: Any, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Cells by column from whatever holds them. An array without names has those of `names`, in
    order.

    Raises:
        InvalidInput: It is no table; only its form is looked at.
    """
    if isinstance(data, str | Path):
        return read_table(DataFile.given(str(data)), least=0)
    if isinstance(data, Mapping):
        pairs = [(str(name), _flat(str(name), held)) for name, held in data.items()]
    elif hasattr(data, "column_names") and hasattr(data, "column"):  # Arrow
        pairs = [(str(name), data.column(k)) for k, name in enumerate(data.column_names)]
    elif hasattr(data, "iloc"):  # pandas
        pairs = [(str(name), data.iloc[:, k]) for k, name in enumerate(data.columns)]
    elif hasattr(data, "get_columns"):  # Polars
        pairs = [(str(held.name), held) for held in data.get_columns()]
    elif isinstance(data, TableFile):
        pairs = [(name, data.column(name)) for name in data.names]
    elif isinstance(data, np.ndarray) and data.dtype.names:
        pairs = [(name, data[name]) for name in data.dtype.names]
    elif isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == len(names):
        pairs = [(name, data[:, k]) for k, name in enumerate(names)]
    else:
        rule = (
            "must be a CSV or Parquet file, a pandas, Arrow or Polars table, arrays by column, or "
            "an array with one column for each of the schema"
        )
        raise InvalidInput("data", type(data).__name__, rule)
    found = dict(pairs)
    if len(found) < len(pairs):
        rule = "must have different names"
        raise InvalidInput("data columns", [name for name, _ in pairs], rule)
    if len({len(held) for held in found.values()}) > 1:
        rule = "all must have the same number of cells"
        raise InvalidInput("data", "columns of different lengths", rule)
    return found


def _flat(name: str, held: Any) -> Any:
    """One cell for each record."""
    if (
        not hasattr(held, "__len__")
        or isinstance(held, str | bytes)
        or len(getattr(held, "shape", (0,))) != 1
    ):
        rule = "must be a list or an array with one cell for each record"
        raise InvalidInput(f"data {name}", type(held).__name__, rule)
    return held
