"""A table read once, some rows at a time: cells by column from CSV and Parquet files that need not
fit in memory. Imports no torch.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from dpfy.core import errors, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.data.cells import check_header, listed
from dpfy.data.files import GZIP_MAGIC, DataFile
from dpfy.data.header import MOST_HEADER, delimiter_of

ROWS = 1 << 15
"""Rows of one chunk."""

Chunk = dict[str, Sequence[Any]]


def is_parquet(file: DataFile) -> bool:
    """Whether the name of a file says that it is Parquet."""
    return str(file.path).lower().endswith((".parquet", ".pq"))


def chunks(file: DataFile, rows: int = ROWS) -> Iterator[Chunk]:
    """The cells of a table, by column, so many rows at a time; at least one chunk, which has no
    rows where the table has none.

    Guarantees: holds one chunk at a time. A row of another length than the header, text that is not
    UTF-8, a column that is there twice and damaged files are one-line errors, raised when they are
    met.
    """
    return _parquet(file, rows) if is_parquet(file) else _csv(file, rows)


def _csv(file: DataFile, rows: int) -> Iterator[Chunk]:
    with storage.opened("data file", file.path, file.name) as raw:
        text = io.TextIOWrapper(_unpacked(raw), encoding="utf-8-sig", newline="")
        try:
            yield from _parted(text, file, rows)
        except UnicodeDecodeError:
            raise Corrupt(file.name, "not UTF-8 text") from None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise Corrupt(
                file.name, "gzip data is truncated or damaged; fetch the file again"
            ) from None
        except csv.Error as error:
            raise Corrupt(file.name, f"not a comma-separated table: {error}") from None


def _unpacked(raw: BinaryIO) -> Any:
    """The bytes of a file, through gzip where it is packed."""
    magic = raw.read(2)
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if magic == GZIP_MAGIC else raw


def _parted(text: io.TextIOWrapper, file: DataFile, rows: int) -> Iterator[Chunk]:
    first = text.readline(MOST_HEADER)
    if len(first) == MOST_HEADER:
        raise InvalidInput(
            "data file", file.name, f"has no line of column names within {MOST_HEADER} characters"
        )
    reader = csv.reader(_from(first, text), delimiter=delimiter_of(first), strict=True)
    header = [name.strip() for name in next(reader, [])]
    check_header(header, file)
    held: list[list[str]] = []
    empty = True
    for number, row in enumerate(reader, start=1):
        if len(row) != len(header):
            raise Corrupt(
                file.name, f"row {number} has {len(row)} cells, the header has {len(header)}"
            )
        held.append(row)
        if len(held) == rows:
            yield dict(zip(header, zip(*held, strict=True), strict=True))
            held, empty = [], False
    if held or empty:
        yield dict(
            zip(header, zip(*held, strict=True) if held else [()] * len(header), strict=True)
        )


def _from(first: str, rest: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a text whose first one was read already."""
    yield first
    yield from rest


def _parquet(file: DataFile, rows: int) -> Iterator[Chunk]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise errors.missing("Parquet", "pyarrow") from None
    with storage.opened("data file", file.path, file.name) as raw:
        try:
            held = pyarrow.parquet.ParquetFile(raw)
            names = list(held.schema_arrow.names)
        except Exception:  # a damaged file raises a dozen types
            raise Corrupt(file.name, "not a Parquet file, or damaged") from None
        check_header(names, file)
        try:
            empty = True
            for batch in held.iter_batches(batch_size=rows):
                yield {
                    name: listed(column) for name, column in zip(names, batch.columns, strict=True)
                }
                empty = False
        except (GeneratorExit, InvalidInput, Corrupt):
            raise
        except Exception:
            raise Corrupt(file.name, "the Parquet file is damaged") from None
        if empty:
            yield {name: [] for name in names}
