"""The names, and where the file states them the types, of the columns of a table: all that may be
known of it before anything is billed.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from dataclasses import dataclass
from datetime import date

from dpfy.core import errors, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.data.files import GZIP_MAGIC, DataFile

MOST_HEADER = 1 << 20
"""Bytes of the longest header that is read."""
DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True)
class Header:
    """The columns of a table in order, with the kind that the file itself states for each (None: it
    states none).
    """

    names: tuple[str, ...]
    kinds: tuple[str | None, ...]


def delimiter_of(text: str) -> str:
    """What separates the columns of the first line of `text`: a comma, or where there is none
    outside of quotes a semicolon or a tab.
    """
    bare = "".join(text[:MOST_HEADER].split('"')[::2]).lstrip("\r\n")
    line = next(iter(bare.splitlines()), "")
    return next((mark for mark in DELIMITERS if mark in line), ",")


def first_record(text: str, name: str) -> list[str]:
    """The cells of the first record of a text, separated as :func:`delimiter_of` says."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter_of(text), strict=True)
    try:
        return [cell.strip() for cell in next(reader, [])]
    except csv.Error as error:
        raise Corrupt(name, f"its first line is not one of column names: {error}") from None


def read(file: DataFile, *, parquet: bool) -> Header:
    """The header of a table.

    Guarantees: of a CSV file nothing after its first line is read; of a Parquet file the schema
    alone, no value and no statistic.
    """
    return _parquet(file) if parquet else _csv(file)


def _csv(file: DataFile) -> Header:
    try:
        text = _first_line(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Corrupt(file.name, f"not UTF-8 text (byte {error.start})") from None
    names = first_record(text, file.name)
    if not any(names):
        raise InvalidInput("data file", file.name, "must begin with a line of column names")
    return Header(tuple(names), (None,) * len(names))


def _first_line(file: DataFile) -> bytes:
    """The bytes up to the first end of a line outside of quotes, and none after it; through gzip
    where the file is packed.
    """
    with storage.opened("data file", file.path, file.name) as raw:
        magic = raw.read(2)
        raw.seek(0)
        source = gzip.GzipFile(fileobj=raw) if magic == GZIP_MAGIC else raw
        try:
            held = b""
            while len(held) <= MOST_HEADER:
                line = source.readline(MOST_HEADER + 2 - len(held))
                held += line
                if not line or (held.endswith(b"\n") and held.count(b'"') % 2 == 0):
                    return held
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise Corrupt(
                file.name, "gzip data is truncated or damaged; fetch the file again"
            ) from None
    raise InvalidInput(
        "data file", file.name, f"has no line of column names within {MOST_HEADER} bytes"
    )


def _parquet(file: DataFile) -> Header:
    try:
        import pyarrow.parquet
        from pyarrow import types
    except ImportError:
        raise errors.missing("Parquet", "pyarrow") from None
    with storage.opened("data file", file.path, file.name) as raw:
        try:
            schema = pyarrow.parquet.read_schema(raw)
        except Exception:  # a damaged file raises a dozen types
            raise Corrupt(file.name, "not a Parquet file, or damaged") from None

    def kind(found: object) -> str:
        if types.is_integer(found) or types.is_floating(found) or types.is_decimal(found):
            return "number"
        words = (
            types.is_string(found)
            or types.is_large_string(found)
            or types.is_dictionary(found)
            or types.is_boolean(found)
        )
        return "category" if words else "ignore"

    return Header(tuple(schema.names), tuple(kind(field.type) for field in schema))


def looks_like_a_record(names: tuple[str, ...]) -> bool:
    """Whether a line of names holds a number or a date: then it is more likely somebody's data."""
    return any(_is_value(name) for name in names)


def _is_value(name: str) -> bool:
    for read_as in (float, date.fromisoformat):
        try:
            read_as(name)
            return name.lower() not in ("nan", "inf", "infinity")
        except ValueError:
            pass
    return False
