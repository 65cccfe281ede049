"""Columns as learners read them: numbers and categories alone, each row by itself.

A number stays one; a missing one is the middle of its range. A category is a place in its list, and
other words are nowhere in it (all zeros). A date is a number of days, or its parts. Text, and a
category with `buckets`, is hashed: each word adds 1 or -1 to one of so many numbers, and the whole
is scaled to length 1. Which one is public and the same for all data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from dpfy.tables import cells as reading
from dpfy.tables.cells import Codes, Floats
from dpfy.tables.columns import Category, Column, Date, Number, OpenColumn, RangedColumn
from dpfy.tables.table import PrivateTable

KEY = b"dpfy hashed words"
"""The public key of the hash."""
WORDS = re.compile(r"\w+")
MOST_TEXT = 1 << 16
"""Characters of a cell that are read."""
Feature = Union[Number, Category]


def features_of(column: Column) -> tuple[Feature, ...]:
    """The numbers and categories that learners read instead of a column."""
    buckets = getattr(column, "buckets", None)
    if buckets is not None:
        return tuple(Number(f"{column.name}_{k}", -1, 1) for k in range(buckets))
    if isinstance(column, Date):
        days = Number(column.name, column.low, column.high, fill=column.filled)
        return column.part_columns() or (days,)
    if isinstance(column, Number | Category):
        return (column,)
    return ()


def feature_values(column: Column, cells: Any, found: Any) -> list[Any]:
    """The values of each of `features_of`: numbers, NaN where one is missing, or places. `found` is
    what the column has parsed.
    """
    buckets = getattr(column, "buckets", None)
    if buckets is not None:
        listed = column.categories if isinstance(column, Category) else None
        return list(hashed(*reading.distinct(cells), buckets, listed).T)
    settled = column.settle(found)
    if isinstance(column, Date) and column.parts:
        return [column.part(part, settled) for part in column.parts]
    return [] if isinstance(column, OpenColumn) else [settled]


def hashed(
    words: Sequence[str], places: Codes, buckets: int, listed: Sequence[str] | None = None
) -> Floats:
    """The numbers [cells, buckets] of texts. Of a list of words, those that are not in it are none.

    Guarantees: each row has length at most 1, up to rounding, whatever stands in its cell.
    """
    found = np.zeros((len(words) + 1, buckets))
    known = None if listed is None else frozenset(listed)
    memory: dict[str, tuple[int, float]] = {}
    for row, text in enumerate(words):
        if known is None:
            tokens: Iterable[str] = WORDS.findall(text[:MOST_TEXT].lower())
        else:
            tokens = [text] if text in known else []
        for token in tokens:
            if token not in memory:
                memory[token] = _place(token, buckets)
            place, sign = memory[token]
            found[row, place] += sign
    lengths = np.sqrt((found**2).sum(axis=1, keepdims=True))
    return np.asarray((found / np.where(lengths > 0, lengths, 1.0))[places])


def _place(token: str, buckets: int) -> tuple[int, float]:
    held = hashlib.blake2b(token.encode("utf-8", "surrogatepass"), digest_size=8, key=KEY).digest()
    value = int.from_bytes(held)
    return (value >> 1) % buckets, 1.0 if value & 1 else -1.0


def encoded(table: PrivateTable, columns: Iterable[Column]) -> NDArray[np.float32]:
    """All features as numbers [rows, width]: numbers on their scales, one column for each listed
    word.

    Guarantees: each row is encoded by itself, and each feature lies in [-1, 1].
    """
    blocks = [
        block
        for column in columns
        for block in _blocks(column, table.cells(column.name), table.found(column.name))
    ]
    return np.concatenate(blocks, axis=1)


def _blocks(column: Column, cells: Any, parsed: Any) -> Iterator[NDArray[np.float32]]:
    values = feature_values(column, cells, parsed)
    for feature, found in zip(features_of(column), values, strict=True):
        if isinstance(feature, Number):
            yield scaled(feature, found).astype(np.float32)[:, None]
        else:
            block = np.zeros((len(found), len(feature.words)), np.float32)
            rows = np.flatnonzero(found < len(feature.words))
            block[rows, found[rows]] = 1.0
            yield block


def scaled(column: RangedColumn, values: Floats) -> Floats:
    """Numbers of a range on their scale; a missing one as the middle of the range."""
    low, high = column.transformed(column.low), column.transformed(column.high)
    there = np.where(np.isnan(values), column.middle, values)
    if column.transform == "log1p":
        there = np.log1p(there)
    share = (there - low) / (high - low)
    return np.clip(2 * share - 1 if column.scale == "symmetric" else share, -1.0, 1.0)
