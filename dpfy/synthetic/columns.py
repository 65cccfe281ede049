"""Columns as cells: what a column may hold, as the public says, in finitely many cells; how a value
finds its cell, and back.

No cell of a table raises anything, and none changes how another is read. A number or a date outside
its range is moved to the nearest end. What is missing, not listed or no number counts as the
column's public `fill`; without one it has a cell of its own, the last. A `required` column has
none: there it counts as the first cell.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput

Codes = NDArray[np.int64]
MEMORY = 1 << 20
"""Different writings of one column that are remembered."""
MOST_CELLS = 1 << 16
"""Cells of one column."""
WHOLE = 128
"""A column of whole numbers with at most so many has a cell for each."""
BINS = 32
"""Bins of other columns of numbers, where the schema does not say."""
DIGITS = 4
"""Digits of a number drawn within its bin, beyond the width of the bin."""
EVERY = ("day", "week", "month", "year")


@dataclass(frozen=True)
class TableColumn(ABC):
    """What every column has: a name, how missing cells are written, and whether there is a cell for
    them.
    """

    name: str
    missing: tuple[str, ...] = ("",)
    required: bool = False

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
        return not self.required and getattr(self, "fill", None) is None

    @property
    def nowhere(self) -> int:
        """Where what has no cell of its own is counted."""
        if (fill := getattr(self, "fill", None)) is not None:
            return self.place(str(fill)) or 0
        return self.known if self.absent else 0

    @abstractmethod
    def place(self, text: str) -> int | None:
        """The cell of a value that is there, None where it has none."""

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

    def code(self, text: str | None) -> int:
        """The cell of what is written in a table, without the blanks around it; None is missing."""
        if text is None or (text in self.missing and not self._lists(text)):
            return self.nowhere
        found = self.place(text)
        return self.nowhere if found is None else found

    def _lists(self, text: str) -> bool:
        """Whether `text` is a value, although it is how a missing cell is written."""
        return False

    def codes(self, cells: Sequence[Any], memory: dict[str | None, int]) -> Codes:
        """The cell of each value; `memory` holds those met before."""
        texts = [
            cell if type(cell) is str else None if cell is None else str(cell) for cell in cells
        ]
        found = [memory.get(text, -1) for text in texts]
        if -1 in found:
            for row, code in enumerate(found):
                if code < 0:
                    text = texts[row]
                    found[row] = self.code(None if text is None else text.strip())
                    if len(memory) < MEMORY:
                        memory[text] = found[row]
        return np.array(found, np.int64)

    def written(self, codes: Codes, rng: np.random.Generator) -> list[str]:
        """A value in each cell, and nothing where it is missing."""
        there = codes < self.known
        values = iter(self.drawn(codes[there], rng))
        return [
            next(values) if here else self.missing[0] if self.missing else ""
            for here in there.tolist()
        ]


@dataclass(frozen=True)
class ListedColumn(TableColumn):
    """One of a public list of words."""

    words: tuple[str, ...] = ()
    fill: str | None = None
    in_order: bool = False

    def __post_init__(self) -> None:
        place = {word: number for number, word in enumerate(self.words)}
        object.__setattr__(self, "_place", place)
        if not place or len(place) < len(self.words) or len(place) > MOST_CELLS:
            raise InvalidInput(
                f"columns.{self.name}.categories",
                len(self.words),
                f"must be 1 to {MOST_CELLS} words, each once",
            )
        if self.fill is not None:
            check.one_of(f"columns.{self.name}.fill", self.fill, self.words)

    @property
    def known(self) -> int:
        """The words."""
        return len(self.words)

    @property
    def ordered(self) -> bool:
        """As the schema says."""
        return self.in_order

    def place(self, text: str) -> int | None:
        """See `TableColumn`."""
        found: int | None = self.__dict__["_place"].get(text)
        return found

    def _lists(self, text: str) -> bool:
        return text in self.__dict__["_place"]

    def label(self, cell: int) -> str:
        """See `TableColumn`."""
        return self.words[cell] if cell < self.known else "(missing)"

    def drawn(self, codes: Codes, rng: np.random.Generator) -> list[str]:
        """See `TableColumn`."""
        return [self.words[code] for code in codes.tolist()]

    def __str__(self) -> str:
        shown = ", ".join(self.words[:8]) + (", ..." if self.known > 8 else "")
        return (
            f"{self.name}: {'in this order ' if self.in_order else ''}{shown}{_missing_words(self)}"
        )


@dataclass(frozen=True)
class BinnedColumn(TableColumn):
    """Numbers in bins: cell i holds those from edges[i] up to edges[i + 1]. Of whole numbers the
    last edge is in no bin.
    """

    edges: tuple[float, ...] = ()
    whole: bool = False
    fill: float | None = None

    def __post_init__(self) -> None:
        if len(self.edges) < 2 or any(
            b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)
        ):
            raise InvalidInput(
                f"columns.{self.name}.bins",
                list(self.edges)[:4],
                "must be at least two edges that ascend",
            )
        if len(self.edges) - 1 > MOST_CELLS:
            raise InvalidInput(
                f"columns.{self.name}.bins", len(self.edges) - 1, f"must be at most {MOST_CELLS}"
            )
        object.__setattr__(self, "_edges", np.array(self.edges))

    @property
    def known(self) -> int:
        """The bins."""
        return len(self.edges) - 1

    def place(self, text: str) -> int | None:
        """See `TableColumn`."""
        value = self.value(text)
        if value is None:
            return None
        found = int(np.searchsorted(self.__dict__["_edges"], value, side="right")) - 1
        return min(max(found, 0), self.known - 1)

    def value(self, text: str) -> float | None:
        """The number that a text is."""
        try:
            value = float(text)
        except ValueError:
            return None
        return None if math.isnan(value) or "_" in text else value

    def label(self, cell: int) -> str:
        """See `TableColumn`."""
        if cell >= self.known:
            return "(missing)"
        low, high = self._ends(cell)
        if self.whole:
            return self.shown(low) if high == low else f"{self.shown(low)} to {self.shown(high)}"
        return f"[{low:g}, {high:g}{']' if cell == self.known - 1 else ')'}"

    def _ends(self, cell: int) -> tuple[float, float]:
        """The least and the largest value of a cell; of whole numbers both are in it."""
        low, high = self.edges[cell], self.edges[cell + 1]
        return (math.ceil(low), math.ceil(high) - 1) if self.whole else (low, high)

    @property
    def ends(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The least and the largest value of every cell."""
        both = np.array([self._ends(cell) for cell in range(self.known)], dtype=np.float64)
        return both[:, 0], both[:, 1]

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
            return rng.integers(
                low[codes].astype(np.int64), high[codes].astype(np.int64), endpoint=True
            ).astype(np.float64)
        values = low[codes] + (high - low)[codes] * rng.random(len(codes))
        places = np.maximum(0, DIGITS - np.floor(np.log10(high - low))[codes]).astype(np.int64)
        return np.array(
            [round(v, int(p)) for v, p in zip(values.tolist(), places.tolist(), strict=True)]
        )

    def shown(self, value: float) -> str:
        """A number as it is written."""
        return str(int(value)) if self.whole else repr(float(value))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.known} bins from {self.edges[0]:g} to "
            f"{self.edges[-1] - self.whole:g}{_missing_words(self)}"
        )


@dataclass(frozen=True)
class DateColumn(BinnedColumn):
    """Dates (of times the day counts), in bins of days, weeks, months or years: numbers of days."""

    def value(self, text: str) -> float | None:
        """See `BinnedColumn`."""
        try:
            return float(date.fromisoformat(text[:10]).toordinal())
        except ValueError:
            return None

    def shown(self, value: float) -> str:
        """See `BinnedColumn`."""
        return date.fromordinal(int(value)).isoformat()

    def __str__(self) -> str:
        first, last = self.shown(self.edges[0]), self.shown(self.edges[-1] - 1)
        return f"{self.name}: {self.known} bins from {first} to {last}{_missing_words(self)}"


def _missing_words(column: TableColumn) -> str:
    if (fill := getattr(column, "fill", None)) is not None:
        return f", missing counts as {fill}"
    return ", or missing" if column.absent else ""


def number_column(name: str, entry: dict[str, Any], missing: tuple[str, ...]) -> BinnedColumn:
    """A column of numbers as the schema writes it: `range`, and `bins` as a number of them or as a
    list of edges.
    """
    low, high = _interval(name, entry.get("range"))
    whole = float(low).is_integer() and float(high).is_integer()
    bins = entry.get("bins", int(high - low) + 1 if whole and high - low < WHOLE else BINS)
    fill = entry.get("fill")
    required = _truth(name, "required", entry)
    if isinstance(bins, list):
        edges = tuple(check.real(f"columns.{name}.bins", edge) for edge in bins)
        if len(edges) < 2 or (edges[0], edges[-1]) != (low, high):
            raise InvalidInput(
                f"columns.{name}.bins",
                bins,
                f"must begin and end with the range, {low:g} and {high:g}",
            )
        edges = (*edges[:-1], high + 1) if whole else edges
    else:
        edges = _equal(
            name,
            low,
            high,
            check.integer(f"columns.{name}.bins", bins, most=MOST_CELLS),
            whole,
            entry.get("transform"),
        )
    column = BinnedColumn(
        name,
        missing,
        required,
        edges,
        whole,
        None if fill is None else check.real(f"columns.{name}.fill", fill),
    )
    if column.fill is not None and not low <= column.fill <= high:
        raise InvalidInput(f"columns.{name}.fill", fill, f"must lie in the range {[low, high]}")
    return column


def _equal(
    name: str, low: float, high: float, bins: int, whole: bool, transform: object
) -> tuple[float, ...]:
    """Edges of bins of equal width, or of equal width after the transform; of whole numbers none is
    split, and none is empty.
    """
    if whole:
        if bins > high - low + 1:
            raise InvalidInput(
                f"columns.{name}.bins",
                bins,
                f"must be at most the {int(high - low) + 1} whole numbers of the range",
            )
        ends = [round(low + (high + 1 - low) * k / bins) for k in range(bins + 1)]
        if transform == "log1p":
            grown = np.expm1(np.linspace(math.log1p(low), math.log1p(high + 1), bins + 1))
            ends = sorted(
                {
                    int(low),
                    int(high + 1),
                    *(min(max(round(e), int(low)), int(high) + 1) for e in grown.tolist()),
                }
            )
        return tuple(float(end) for end in ends)
    if transform == "log1p":
        inner = np.expm1(np.linspace(math.log1p(low), math.log1p(high), bins + 1))[1:-1]
    else:
        inner = np.linspace(low, high, bins + 1)[1:-1]
    return (low, *(float(edge) for edge in inner), high)


def listed_column(name: str, entry: dict[str, Any], missing: tuple[str, ...]) -> ListedColumn:
    """A column of words: `categories` (or the `classes` of a label), `ordered` where their order
    means something.
    """
    key = "classes" if entry.get("kind") == "label" else "categories"
    words = entry.get(key)
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise InvalidInput(f"columns.{name}.{key}", words, "must be a list of words in quotes")
    fill = None if entry.get("fill") == "other" and "other" not in words else entry.get("fill")
    return ListedColumn(
        name,
        missing,
        _truth(name, "required", entry),
        tuple(words),
        fill,
        _truth(name, "ordered", entry),
    )


def date_column(name: str, entry: dict[str, Any], missing: tuple[str, ...]) -> DateColumn:
    """A column of dates: `range` of two dates, `every` day, week, month (the default) or year."""
    key, held = f"columns.{name}.range", entry.get("range")
    if not isinstance(held, list | tuple) or len(held) != 2:
        raise InvalidInput(key, held, 'must be two dates, ["2020-01-01", "2023-12-31"]')
    try:
        first, last = (day if type(day) is date else date.fromisoformat(str(day)) for day in held)
    except ValueError:
        raise InvalidInput(
            key, [str(day) for day in held], "must be two dates, written 2020-01-31"
        ) from None
    if last < first:
        raise InvalidInput(key, [str(first), str(last)], "must not end before it begins")
    every = check.one_of(f"columns.{name}.every", entry.get("every", "month"), EVERY)
    edges = _days(first, last, every)
    return DateColumn(name, missing, _truth(name, "required", entry), edges, True, None)


def _days(first: date, last: date, every: str) -> tuple[float, ...]:
    """The first day of every bin, by the calendar, and the end of the last one."""
    starts: list[float] = []
    day = first
    while day <= last and len(starts) <= MOST_CELLS:
        starts.append(float(day.toordinal()))
        if every == "day":
            day += timedelta(days=1)
        elif every == "week":
            day += timedelta(days=7 - day.weekday())
        elif every == "month":
            day = date(day.year + day.month // 12, day.month % 12 + 1, 1)
        else:
            day = date(day.year + 1, 1, 1)
    return (*starts, float(last.toordinal() + 1))


def _interval(name: str, held: object) -> tuple[float, float]:
    key = f"columns.{name}.range"
    if not isinstance(held, list | tuple) or len(held) != 2:
        raise InvalidInput(key, held, "must be [low, high]")
    low, high = (check.real(key, end) for end in held)
    if not low < high or not math.isfinite(high - low):
        raise InvalidInput(key, held, "must be [low, high] with low below high")
    return low, high


def _truth(name: str, key: str, entry: dict[str, Any]) -> bool:
    held = entry.get(key, False)
    if not isinstance(held, bool):
        raise InvalidInput(f"columns.{name}.{key}", held, "must be true or false")
    return held
