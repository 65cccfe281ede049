"""Columns as cells: what a column of the schema may hold, in finitely many cells; how a value finds
its cell, and back.

What is missing or not listed counts as the column's public `fill`; without one it has a cell of its
own, the last. A `required` column has none: there it counts as the first cell.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.engines.expressions import Expression, choose, code, number
from dpfy.tables.columns import Column, Date, Number, WordColumn

Codes = NDArray[np.int64]
MOST_CELLS = 1 << 16
"""Cells of one column."""
WHOLE = 128
"""A column of whole numbers with at most so many has a cell for each."""
BINS = 32
"""Bins of other columns of numbers, where the schema does not say."""
DIGITS = 4
"""Digits of a number drawn within its bin, beyond the width of the bin."""


@dataclass(frozen=True)
class TableColumn(ABC):
    """A column of the schema, and how missing cells are written."""

    column: Any
    missing: tuple[str, ...] = ("",)

    @property
    def name(self) -> str:
        """Of the column."""
        return str(self.column.name)

    @property
    @abstractmethod
    def known(self) -> int:
        """Cells of values that are there."""

    @property
    def cells(self) -> int:
        """All cells."""
        return self.known + self.absent

    @property
    def absent(self) -> bool:
        """Whether there is a cell for what is missing."""
        return not self.column.required and self._filled is None

    @property
    def nowhere(self) -> int:
        """Where what has no cell of its own is counted."""
        if self._filled is not None:
            return self._filled
        return self.known if self.absent else 0

    @property
    @abstractmethod
    def _filled(self) -> int | None:
        """The cell of the public fill."""

    @abstractmethod
    def label(self, cell: int) -> str:
        """A cell in words."""

    @abstractmethod
    def drawn(self, codes: Codes, rng: np.random.Generator) -> list[str]:
        """A value in each cell, written as in a file."""

    @property
    def ordered(self) -> bool:
        """Whether the order of cells means something."""
        return True

    @property
    def centres(self) -> NDArray[np.float64]:
        """A number for each cell that is not missing: the middle of its values, or its place."""
        return np.arange(self.known, dtype=np.float64)

    def codes(self, cells: Any) -> Codes:
        """The cell of each value."""
        return self.placed(self.column.parse(cells, self.missing))

    @abstractmethod
    def placed(self, found: Any) -> Codes:
        """The cell of each value that the column has parsed."""

    @abstractmethod
    def place(self) -> Expression:
        """The cell of a row, for engines."""

    def values(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Written values as numbers, words as their places; NaN where one is missing."""
        found = self.column.parse(texts, self.missing)
        return np.where(self.column.absent(found), np.nan, found)

    def written(self, codes: Codes, rng: np.random.Generator) -> list[str]:
        """A value in each cell, and nothing where it is missing."""
        there = codes < self.known
        values = iter(self.drawn(codes[there], rng))
        nothing = self.missing[0] if self.missing else ""
        return [next(values) if here else nothing for here in there.tolist()]

    def _missing_words(self) -> str:
        if self._filled is not None:
            return f", missing counts as {self.column.fill}"
        return ", or missing" if self.absent else ""


@dataclass(frozen=True)
class ListedColumn(TableColumn):
    """One of a public list of words."""

    def __post_init__(self) -> None:
        if self.known > MOST_CELLS:
            key = "classes" if self.column.kind == "label" else "categories"
            rule = f"must be 1 to {MOST_CELLS} words, each once"
            raise InvalidInput(self.column.key(key), self.known, rule)

    @property
    def words(self) -> tuple[str, ...]:
        """The list."""
        words: tuple[str, ...] = self.column.words
        return words

    @property
    def known(self) -> int:
        """The words."""
        return len(self.words)

    @property
    def ordered(self) -> bool:
        """As the schema says."""
        return bool(self.column.ordered)

    @property
    def _filled(self) -> int | None:
        fill = self.column.fill
        return self.words.index(fill) if fill in self.words else None

    def placed(self, found: Any) -> Codes:
        """See `TableColumn`."""
        return np.where(self.column.fits(found), found, self.nowhere)

    def place(self) -> Expression:
        """See `TableColumn`."""
        found = code(self.name)
        return choose(found < self.known, found, self.nowhere)

    def label(self, cell: int) -> str:
        """See `TableColumn`."""
        return self.words[cell] if cell < self.known else "(missing)"

    def drawn(self, codes: Codes, rng: np.random.Generator) -> list[str]:
        """See `TableColumn`."""
        return [self.words[code] for code in codes.tolist()]

    def __str__(self) -> str:
        shown = ", ".join(self.words[:8]) + (", ..." if self.known > 8 else "")
        order = "in this order " if self.ordered else ""
        return f"{self.name}: {order}{shown}{self._missing_words()}"


@dataclass(frozen=True)
class BinnedColumn(TableColumn):
    """Numbers or dates in bins: cell i holds those from edges[i] up to edges[i + 1]. Of whole
    numbers, as days are, the last edge is in no bin.
    """

    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.edges:
            made = _days(self.column) if isinstance(self.column, Date) else _edges(self.column)
            object.__setattr__(self, "edges", made)
        if self.known > MOST_CELLS:
            raise InvalidInput(self.column.key("bins"), self.known, f"must be at most {MOST_CELLS}")
        if any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            rule = "must be at least two edges that ascend"
            raise InvalidInput(self.column.key("bins"), list(self.edges)[:4], rule)

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.column, Date) or _is_whole(self.column)

    @property
    def known(self) -> int:
        """The bins."""
        return len(self.edges) - 1

    @property
    def _filled(self) -> int | None:
        fill = self.column.filled
        return None if fill is None else int(self._binned(np.array([fill]))[0])

    @property
    def absent(self) -> bool:
        """See `TableColumn`. Where rows are left out, no number is missing."""
        return super().absent and not self.column.drop

    @cached_property
    def _inner(self) -> NDArray[np.float64]:
        return np.array(self.edges[1:-1])

    def _binned(self, values: NDArray[np.float64]) -> Codes:
        return np.searchsorted(self._inner, values, side="right")

    def placed(self, found: Any) -> Codes:
        """See `TableColumn`."""
        return np.where(np.isnan(found), self.nowhere, self._binned(found))

    def place(self) -> Expression:
        """See `TableColumn`."""
        found = number(self.name)
        return choose(found.missing(), self.nowhere, found.place(self.edges[1:-1]))

    def label(self, cell: int) -> str:
        """See `TableColumn`."""
        if cell >= self.known:
            return "(missing)"
        low, high = (float(end[cell]) for end in self.ends)
        if self.whole:
            return self.shown(low) if high == low else f"{self.shown(low)} to {self.shown(high)}"
        return f"[{low:g}, {high:g}{']' if cell == self.known - 1 else ')'}"

    @cached_property
    def ends(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The least and the largest value of every cell; of whole numbers both are in it."""
        low, high = np.array(self.edges[:-1]), np.array(self.edges[1:])
        return (np.ceil(low), np.ceil(high) - 1) if self.whole else (low, high)

    @property
    def centres(self) -> NDArray[np.float64]:
        """The middles of the bins."""
        low, high = self.ends
        return np.asarray((low + high) / 2)

    def drawn(self, codes: Codes, rng: np.random.Generator) -> list[str]:
        """See `TableColumn`."""
        return [self.shown(value) for value in self.numbers(codes, rng).tolist()]

    def numbers(self, codes: Codes, rng: np.random.Generator) -> NDArray[np.float64]:
        """A number in each bin, all of them equally likely; not the rounding of a float but whole
        ones, or few digits.
        """
        low, high = self.ends
        if self.whole:
            first, last = low[codes].astype(np.int64), high[codes].astype(np.int64)
            return rng.integers(first, last, endpoint=True).astype(np.float64)
        values = low[codes] + (high - low)[codes] * rng.random(len(codes))
        places = np.maximum(0, DIGITS - np.floor(np.log10(high - low))[codes]).astype(np.int64)
        return np.array(
            [round(v, int(p)) for v, p in zip(values.tolist(), places.tolist(), strict=True)]
        )

    def shown(self, value: float) -> str:
        """A number as it is written."""
        if isinstance(self.column, Date):
            first = date.fromisoformat(str(self.column.first))
            return (first + timedelta(days=int(value))).isoformat()
        return str(int(value)) if self.whole else repr(float(value))

    def __str__(self) -> str:
        low, high = self.edges[0], self.edges[-1] - self.whole
        dates = isinstance(self.column, Date)
        ends = f"{self.shown(low)} to {self.shown(high)}" if dates else f"{low:g} to {high:g}"
        return f"{self.name}: {self.known} bins from {ends}{self._missing_words()}"


def table_column(column: Column, missing: tuple[str, ...] = ("",)) -> TableColumn:
    """A column of the schema as cells."""
    if isinstance(column, WordColumn):
        return ListedColumn(column, missing)
    return BinnedColumn(column, missing)


def _is_whole(column: Number) -> bool:
    return float(column.low).is_integer() and float(column.high).is_integer()


def _edges(column: Number) -> tuple[float, ...]:
    """The edges that the schema gives, or those of so many bins of equal width, or of equal width
    after the transform; of whole numbers none is split, and none is empty.
    """
    low, high, whole, key = column.low, column.high, _is_whole(column), column.key("bins")
    if isinstance(column.bins, tuple):
        edges = tuple(check.real(key, edge) for edge in column.bins)
        if len(edges) < 2 or (edges[0], edges[-1]) != (low, high):
            rule = f"must begin and end with the range, {low:g} and {high:g}"
            raise InvalidInput(key, list(column.bins), rule)
        return (*edges[:-1], high + 1) if whole else edges
    default = int(high - low) + 1 if whole and high - low < WHOLE else BINS
    bins = check.integer(key, default if column.bins is None else column.bins, most=MOST_CELLS)
    log = column.transform == "log1p"
    last = high + 1 if whole else high
    if log:
        grown = np.expm1(np.linspace(math.log1p(low), math.log1p(last), bins + 1))[1:-1].tolist()
    else:
        grown = np.linspace(low, high, bins + 1)[1:-1].tolist()
    if not whole:
        return (low, *grown, high)
    if bins > high - low + 1:
        rule = f"must be at most the {int(high - low) + 1} whole numbers of the range"
        raise InvalidInput(key, bins, rule)
    if log:
        inner = {min(max(round(edge), int(low)), int(last)) for edge in grown}
        return tuple(float(edge) for edge in sorted({int(low), int(last), *inner}))
    return tuple(float(round(low + (last - low) * k / bins)) for k in range(bins + 1))


def _days(column: Date) -> tuple[float, ...]:
    """The first day of every bin, by the calendar, and the end of the last one: days after the
    first date.
    """
    first, last = date.fromisoformat(str(column.first)), date.fromisoformat(str(column.last))
    starts: list[float] = []
    day = first
    while day <= last and len(starts) <= MOST_CELLS:
        starts.append(float((day - first).days))
        if column.every == "day":
            day += timedelta(days=1)
        elif column.every == "week":
            day += timedelta(days=7 - day.weekday())
        elif column.every == "month":
            day = date(day.year + day.month // 12, day.month % 12 + 1, 1)
        else:
            day = date(day.year + 1, 1, 1)
    return (*starts, column.high + 1)
