"""Counts of marginals: a table is read once, some rows at a time, and every marginal that may be
asked for is counted on the way. What an engine reads is counted where it is.

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
from dpfy.engines.aggregates import KeepRequest, KeptColumn, left_in
from dpfy.engines.contributions import ContributionLimit
from dpfy.engines.expressions import Expression, counted_where, kept, of
from dpfy.engines.sources import column_names, opened, parquet_files
from dpfy.runs.run import Progress, quiet
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.domain import Clique, Domain
from dpfy.tables.cells import array
from dpfy.tables.columns import OpenColumn
from dpfy.tables.schema import Schema
from dpfy.tables.sources import ROWS, Chunk, TableFile, cells_of, chunks
from dpfy.tables.table import owner_names, owners_of, refuse_misfits

Counts = NDArray[np.int64]
MOST_CELLS = 1 << 27
"""Cells of all marginals that are counted: a gigabyte."""
MOST_TOGETHER, MOST_SETS = 1 << 22, 250
"""Cells, and marginals, that an engine counts in one reading."""


@dataclass(frozen=True)
class RecordOwners:
    """Whose records are: the column that says it, and how many records of each are used; a keyed
    hash chooses them.
    """

    column: str
    most: int

    def __post_init__(self) -> None:
        check.integer("most_records", self.most, most=1 << 20)

    @property
    def limit(self) -> ContributionLimit:
        """The same as engines take it."""
        return ContributionLimit(self.most)


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
    data: Any,
    domain: Domain,
    cliques: Iterable[Clique],
    owners: RecordOwners | None = None,
    key: str = "",
    progress: Progress = quiet,
) -> Marginals:
    """Count these marginals of a table.

    `data` is a CSV file, a pandas or Arrow table, or arrays by column, which are read once; or what
    an engine counts where it is: Parquet files, a table of a DuckDB database, a relation. Only its
    form is looked at: the columns must be those of the schema, whatever their order. `key` chooses
    the records of an owner.
    """
    wanted = list(dict.fromkeys(cliques))
    if (cells := sum(domain.cells(clique) for clique in wanted)) > MOST_CELLS:
        rule = (
            f"must be at most {MOST_CELLS} for all marginals together: use fewer bins, or a "
            f"smaller workload"
        )
        raise InvalidInput("cells", cells, rule)
    if (names := _names_in_engine(data)) is not None and not domain.strict:
        _check_columns(names, domain, owners)
        shaped, records = _counted_in_engine(data, domain, wanted, owners, key, progress)
    else:
        tables = {clique: np.zeros(domain.cells(clique), np.int64) for clique in wanted}
        records = 0
        for codes in encoded(data, domain, owners, key=key):
            records += codes.shape[1]
            _add(tables, codes, domain)
        shaped = {clique: table.reshape(domain.shape(clique)) for clique, table in tables.items()}
    return Marginals(domain, shaped, 1 if owners is None else owners.most, records)


def _names_in_engine(data: Any) -> list[str] | None:
    """The columns of a source that an engine counts where it is; None for another one."""
    names = column_names(data)
    if names is None and isinstance(data, str | Path) and parquet_files(str(data)) is not None:
        names = list(TableFile(data).names)
    return names


def _counted_in_engine(
    data: Any,
    domain: Domain,
    wanted: Sequence[Clique],
    owners: RecordOwners | None,
    key: str,
    progress: Progress,
) -> tuple[dict[Clique, Counts], int]:
    """Counts of a table that stays in its engine. The largest marginals are counted, many in one
    reading; smaller ones are sums of theirs.
    """
    columns = [column.column for column in domain.columns]
    more = [] if owners is None else [OpenColumn(owners.column)]
    schema = Schema((*columns, *more), domain.columns[0].missing)
    engine = opened(data, schema, None if owners is None else owners.column)
    held = {
        f"c{k}": KeptColumn(column.place(), 0, column.cells - 1)
        for k, column in enumerate(domain.columns)
    }
    cells = tuple(column.value for column in held.values())
    limit, content = (ContributionLimit(1), ()) if owners is None else (owners.limit, cells)
    group = counted_where(of(0), left_in(schema))
    largest = _largest([*wanted, (0,)])
    parts = _parts(largest, domain)
    rows = engine.keep_rows(KeepRequest(group, held, content, limit, key, len(parts) == 1))
    found: dict[Clique, Counts] = {}
    try:
        for k, part in enumerate(parts):
            progress("counting", k / len(parts))
            asked = [(_joint(clique, domain), domain.cells(clique)) for clique in part]
            for clique, table in zip(part, rows.sums(asked), strict=True):
                found[clique] = table[:, 0].reshape(domain.shape(clique))
    finally:
        rows.close()
    shaped = {}
    for clique in wanted:
        whole = next(big for big in largest if set(clique) <= set(big))
        axes = tuple(k for k, number in enumerate(whole) if number not in clique)
        shaped[clique] = found[whole].sum(axis=axes)
    return shaped, int(next(iter(found.values())).sum())


def _largest(cliques: Sequence[Clique]) -> list[Clique]:
    """Those that are no part of another one."""
    found: list[Clique] = []
    covered: set[Clique] = set()
    for clique in sorted(dict.fromkeys(cliques), key=len, reverse=True):
        if clique not in covered:
            found.append(clique)
            covered |= {p for size in range(len(clique)) for p in combinations(clique, size)}
    return found


def _parts(cliques: Sequence[Clique], domain: Domain) -> list[list[Clique]]:
    """Marginals that are counted together: few enough for their counts to stay in memory."""
    found: list[list[Clique]] = [[]]
    cells = 0
    for clique in cliques:
        cells += domain.cells(clique)
        if found[-1] and (cells > MOST_TOGETHER or len(found[-1]) >= MOST_SETS):
            found.append([])
            cells = domain.cells(clique)
        found[-1].append(clique)
    return found


def _joint(clique: Clique, domain: Domain) -> Expression:
    """The cell of a row in a marginal."""
    place = kept(f"c{clique[0]}")
    for number in clique[1:]:
        place = place * domain.columns[number].cells + kept(f"c{number}")
    return place


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
    data: Any,
    domain: Domain,
    owners: RecordOwners | None = None,
    rows: int = ROWS,
    key: str = "",
) -> Iterator[Codes]:
    """The cells of the records that are used [columns, rows], some rows at a time; all at once where
    records have owners. `key` chooses the records of an owner.
    """
    held: list[Codes] = []
    names: list[NDArray[Any]] = []
    for chunk in _chunks(data, domain, rows):
        _check_columns(chunk, domain, owners)
        found = [
            column.column.parse(chunk[column.name], column.missing) for column in domain.columns
        ]
        there = np.ones(len(found[0]), bool)
        for column, cells in zip(domain.columns, found, strict=True):
            if domain.strict:
                refuse_misfits(column.column, cells)
            if column.column.drop:
                there &= ~column.column.absent(cells)
        codes = np.stack([c.placed(cells) for c, cells in zip(domain.columns, found, strict=True)])
        codes = codes if there.all() else codes[:, there]
        if owners is None:
            yield codes
        else:
            held.append(codes.astype(np.uint32))
            names.append(owner_names(chunk[owners.column])[there])
    if owners is not None:
        yield _of_owners(np.concatenate(held, axis=1), np.concatenate(names), owners, key)


def _of_owners(codes: Codes, names: NDArray[Any], owners: RecordOwners, key: str) -> Codes:
    """The records that are used: a keyed hash of an owner's own records chooses them."""
    numbers, words = owners_of(names)
    groups = np.zeros(len(names), np.int64)
    return codes[:, owners.limit.kept(numbers, groups, words, list(codes), key)].astype(np.int64)


def checked_chunks(data: Any, domain: Domain, key: str) -> Iterator[Chunk]:
    """The cells of a table by column, some rows at a time, with the column `key`; the columns must
    be those of the schema.
    """
    for chunk in _chunks(data, domain, ROWS):
        _check_columns(chunk, domain, RecordOwners(key, 1))
        yield chunk


def _chunks(data: Any, domain: Domain, rows: int) -> Iterator[Chunk]:
    """Cells by column from whatever holds them."""
    if isinstance(data, str | Path):
        yield from chunks(DataFile.given(str(data)), rows)
        return
    held = {name: array(column) for name, column in cells_of(data, domain.names).items()}
    size = len(next(iter(held.values()), []))
    for start in range(0, max(1, size), rows):
        yield {name: column[start : start + rows] for name, column in held.items()}


def _check_columns(chunk: Iterable[str], domain: Domain, owners: RecordOwners | None) -> None:
    needed = {*domain.names} if owners is None else {*domain.names, owners.column}
    there = list(chunk)
    for name in sorted(needed - set(there)):
        raise InvalidInput(
            "data column",
            name,
            "is in the schema but not in the data"
            if name in domain.names
            else "is not in the data",
        )
    for name in there:
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
