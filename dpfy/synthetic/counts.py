"""Counts of marginals: a table is read once, some rows at a time, and every marginal that may be
asked for is counted on the way.

What is held afterwards are counts alone; how much memory that takes follows from the domain, not
from the number of records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.files import DataFile
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique, Domain
from dpfy.tables.cells import array
from dpfy.tables.sources import ROWS, Chunk, cells_of, chunks
from dpfy.tables.table import owner_names, refuse_misfits

Counts = NDArray[np.int64]
MOST_CELLS = 1 << 27
"""Cells of all marginals that are counted: a gigabyte."""


@dataclass(frozen=True)
class RecordOwners:
    """Whose records are: the column that says it, and how many records of each are used, the first
    ones.
    """

    column: str
    most: int

    def __post_init__(self) -> None:
        check.integer("most_records", self.most, most=1 << 20)


@dataclass(frozen=True)
class Marginals:
    """The counts of marginals. Sensitive: nothing of it may leave but through a mechanism.

    Guarantees: adding or removing all records of a unit changes every table by at most `bound` in
    the L1 norm.
    """

    domain: Domain
    tables: Mapping[Clique, Counts]
    bound: int
    records: int

    def fingerprint(self) -> bytes:
        """A hash of all counts."""
        whole = hashlib.blake2b(str(self.records).encode())
        for clique, table in sorted(self.tables.items()):
            whole.update(str(clique).encode() + table.tobytes())
        return whole.digest()


def count(
    data: Any, domain: Domain, cliques: Iterable[Clique], owners: RecordOwners | None = None
) -> Marginals:
    """Count these marginals of a table in one pass.

    `data` is a CSV or Parquet file, a pandas or Arrow table, or arrays by column. Only its form is
    looked at: the columns must be those of the schema, whatever their order.
    """
    wanted = list(dict.fromkeys(cliques))
    if (cells := sum(domain.cells(clique) for clique in wanted)) > MOST_CELLS:
        rule = (
            f"must be at most {MOST_CELLS} for all marginals together: use fewer bins, or a "
            f"smaller workload"
        )
        raise InvalidInput("cells", cells, rule)
    tables = {clique: np.zeros(domain.cells(clique), np.int64) for clique in wanted}
    records = 0
    for codes in encoded(data, domain, owners):
        records += codes.shape[1]
        _add(tables, codes, domain)
    shaped = {clique: table.reshape(domain.shape(clique)) for clique, table in tables.items()}
    return Marginals(domain, shaped, 1 if owners is None else owners.most, records)


def _add(tables: dict[Clique, Counts], codes: Codes, domain: Domain) -> None:
    """Add the rows of a chunk [columns, rows] to every table; what two columns of a marginal share
    with the next is computed once.
    """
    sizes, last = domain.sizes, (-1, -1)
    pair = codes[0]
    for clique, table in sorted(tables.items()):
        if len(clique) > 1:
            if last != clique[:2]:
                last, pair = (
                    (clique[0], clique[1]),
                    codes[clique[0]] * sizes[clique[1]] + codes[clique[1]],
                )
            place = pair
            for number in clique[2:]:
                place = place * sizes[number] + codes[number]
        else:
            place = codes[clique[0]]
        table += np.bincount(place, minlength=len(table))


def encoded(
    data: Any, domain: Domain, owners: RecordOwners | None = None, rows: int = ROWS
) -> Iterator[Codes]:
    """The cells of the records that are used [columns, rows], some rows at a time."""
    known: dict[str, int] = {}
    for chunk in _chunks(data, domain, rows):
        _check_columns(chunk, domain, owners)
        found = [
            column.column.parse(chunk[column.name], column.missing) for column in domain.columns
        ]
        kept = np.ones(len(found[0]), bool)
        for column, cells in zip(domain.columns, found, strict=True):
            if domain.strict:
                refuse_misfits(column.column, cells)
            if column.column.drop:
                kept &= ~column.column.absent(cells)
        codes = np.stack([c.placed(cells) for c, cells in zip(domain.columns, found, strict=True)])
        if owners is not None:
            names = owner_names(chunk[owners.column])
            kept &= names != ""
            kept[kept] = _kept(names[kept].tolist(), owners.most, known)
        yield codes if kept.all() else codes[:, kept]


def checked_chunks(data: Any, domain: Domain, key: str) -> Iterator[Chunk]:
    """The cells of a table by column, some rows at a time, with the column `key`; the columns must
    be those of the schema.
    """
    for chunk in _chunks(data, domain, ROWS):
        _check_columns(chunk, domain, RecordOwners(key, 1))
        yield chunk


def _kept(names: Sequence[str], most: int, known: dict[Any, int]) -> NDArray[np.bool_]:
    """Which rows are among the first `most` of their owner; `known` counts those of each, over all
    chunks.
    """
    kept = np.zeros(len(names), bool)
    for row, name in enumerate(names):
        had = known.get(name, 0)
        if had < most:
            known[name], kept[row] = had + 1, True
    return kept


def _chunks(data: Any, domain: Domain, rows: int) -> Iterator[Chunk]:
    """Cells by column from whatever holds them."""
    if isinstance(data, str | Path):
        yield from chunks(DataFile.given(str(data)), rows)
        return
    held = {name: array(column) for name, column in cells_of(data, domain.names).items()}
    size = len(next(iter(held.values()), []))
    for start in range(0, max(1, size), rows):
        yield {name: column[start : start + rows] for name, column in held.items()}


def _check_columns(chunk: Chunk, domain: Domain, owners: RecordOwners | None) -> None:
    needed = {*domain.names} if owners is None else {*domain.names, owners.column}
    for name in sorted(needed - set(chunk)):
        raise InvalidInput(
            "data column",
            name,
            "is in the schema but not in the data"
            if name in domain.names
            else "is not in the data",
        )
    for name in chunk:
        if name not in needed and name not in domain.ignored:
            raise InvalidInput(
                "data column",
                name,
                "is in the data but not in the schema; describe it there, or set ignore = true",
            )


def closure(cliques: Iterable[Clique]) -> list[Clique]:
    """All marginals of marginals, the small ones first."""
    found = {
        part
        for clique in cliques
        for size in range(1, len(clique) + 1)
        for part in combinations(clique, size)
    }
    return sorted(found, key=lambda clique: (len(clique), clique))
