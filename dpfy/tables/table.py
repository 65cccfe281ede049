"""The private table that every family reads: cells by column, read through the public schema when
they are asked for; whose each row is; and which rows are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import owner_columns
from dpfy.tables import cells as reading
from dpfy.tables import shared
from dpfy.tables.cells import Codes, Floats, Mask
from dpfy.tables.columns import Column, Date, Label, OpenColumn
from dpfy.tables.schema import Schema
from dpfy.tables.sources import cells_of

LONGEST_NAME = 60


class PrivateTable:
    """Private records by a public schema.

    Args:
        data: A file, a table of any library, or cells by column.
        schema: The public schema, or whatever describes one.
        owner: The column that says whose a row is. Several, with commas between them, where a row
            belongs to several persons.
        at_most: The most rows of one person, where rows belong to several: the table then has
            only the rows that are used, and no owners.

    Raises:
        InvalidInput: The schema names a column that the data does not have.

    Guarantees: without `strict` no cell raises an error; how a cell is read, and whether its row is
    left out, depends on its row and the schema alone.

    Example:
        >>> import dpfy
        >>> from dpfy.tables import PrivateTable
        >>> table = PrivateTable({"age": ["30", "41", "?"]}, [dpfy.Number("age", 0, 100, fill=0)])
        >>> table.has("age")
        True
    """

    def __init__(
        self, data: Any, schema: Any, owner: str | None = None, at_most: int | None = None
    ) -> None:
        self.schema = Schema.of(schema)
        self.columns: Mapping[str, Column] = self.schema.named
        self._cells = cells_of(data, [column.name for column in self.schema.columns])
        self.size = len(next(iter(self._cells.values()), []))
        self._found: dict[str, Any] = {}
        self._settled: dict[str, Any] = {}
        self.owners: Codes | None = None
        self.owner_words: list[str] = []
        """The owners by their numbers; without them the numbers are their names."""
        names = () if owner is None else owner_columns("owner", owner)
        if len(names) == 1:
            self.owners, self.owner_words = owners_of(self.cells(names[0]))
        elif names:
            most = check.integer("at_most", at_most)
            self._keep(shared.within_limit(shared.numbered([*map(self.cells, names)]), most))

    def __repr__(self) -> str:
        return f"PrivateTable({', '.join(c.name for c in self.schema.columns)})"

    def _keep(self, rows: Mask) -> None:
        """Forget all other rows."""
        places = np.flatnonzero(rows)
        self._cells = {name: reading.taken(held, places) for name, held in self._cells.items()}
        self.size = len(places)

    def has(self, name: str) -> bool:
        """Whether the data has a column of that name."""
        return name in self._cells

    def cells(self, name: str) -> Any:
        """A column of the data, as it is there."""
        if name not in self._cells:
            raise InvalidInput("column", name, "is in the schema but not in the data")
        return self._cells[name]

    def found(self, name: str) -> Any:
        """A column as it was parsed, before ranges and fills."""
        if name not in self._found:
            column = self.columns[name]
            found = column.parse(self.cells(name), self.schema.missing)
            if self.schema.strict:
                refuse_misfits(column, found)
            self._found[name] = found
        return self._found[name]

    def read(self, name: str) -> Any:
        """A column by the policy; a part of a date by its date."""
        if name not in self._settled:
            column, part = self._source(name)
            settled = column.settle(self.found(column.name))
            if part is not None:
                assert isinstance(column, Date)
                settled = column.part(part, settled)
            self._settled[name] = settled
        return self._settled[name]

    def _source(self, name: str) -> tuple[Column, str | None]:
        """The column of the data that holds what is called `name`, and which part of a date it
        is.
        """
        for column in self.schema.columns:
            if isinstance(column, Date) and name.removeprefix(f"{column.name}_") in column.parts:
                return column, name.removeprefix(f"{column.name}_")
        return self.columns[name], None

    def numbers(self, name: str) -> Floats:
        """A column of numbers or dates, in its range; NaN where one is missing."""
        return np.asarray(self.read(name))

    def codes(self, name: str) -> Codes:
        """A column of words, as places in its cells."""
        return np.asarray(self.read(name))

    def texts(self, name: str) -> list[str | None]:
        """A column as it is written; None where a cell is missing."""
        found = OpenColumn(name).parse(self.cells(name), self.schema.missing)
        return list(found.tolist())

    def raw(self, name: str) -> Floats:
        """A column of numbers without a range; NaN where one is missing."""
        return reading.numbers(self.cells(name), self.schema.missing)

    def unfit(self, name: str) -> Mask:
        """Which cells of a column are not what it may hold. Private, as the cells are."""
        column, _ = self._source(name)
        return np.asarray(~column.fits(self.found(column.name)))

    def left_out(self, label: str | None = None) -> Mask | None:
        """Which rows are left out: those where a column with `drop` is missing, those without one
        of the classes of `label`, and those that name no owner; None where there can be none.
        """
        masks = [c.absent(self.found(c.name)) for c in self.schema.columns if c.drop]
        column = None if label is None else self.columns[label]
        if isinstance(column, Label):
            masks.append(~column.fits(column.settle(self.found(column.name))))
        if self.owners is not None:
            masks.append(self.owners < 0)
        return np.logical_or.reduce(masks) if masks else None

    def content(self, name: str, written: bool) -> bytes:
        """All that statistics may read of a column; `written` if they read it as it is written, or
        without its range.
        """
        column = self.columns[name]
        read = b"" if isinstance(column, OpenColumn) else np.asarray(self.read(name)).tobytes()
        if not written:
            return read
        texts = ["\0" if text is None else text for text in self.texts(name)]
        return read + "\1".join(texts).encode("utf-8", "surrogatepass") + self.raw(name).tobytes()


def owners_of(cells: Any) -> tuple[Codes, list[str]]:
    """Whose each row is, as numbers; -1 where it names nobody. And the words of the numbers."""
    words, places = reading.distinct(cells)
    known: dict[str, int] = {"": -1}
    codes = [known.setdefault(text, len(known) - 1) for text in [*words, ""]]
    return np.array(codes, np.int64)[places], list(known)[1:]


def owner_names(cells: Any) -> np.ndarray:
    """Whose each row is, as short words, "" where it names nobody; other owners have other
    words.
    """
    words, places = reading.distinct(cells)
    short = [
        text if text.isprintable() and len(text) <= LONGEST_NAME else _digest(text)
        for text in words
    ]
    return np.array([*short, ""], object)[places]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def refuse_misfits(column: Column, found: Any) -> None:
    """For data that the caller declared clean: an error for the first cell that does not fit."""
    bad = ~column.fits(found)
    if column.drop or getattr(column, "fill", None) is not None:
        bad &= ~column.absent(found)
    if len(rows := np.flatnonzero(bad)):
        rule = f"must be what the schema says ({column})"
        where = f"column {column.name}, row {int(rows[0]) + 1}"
        raise InvalidInput(where, "a cell that does not fit", f"{rule}: the schema is strict")
