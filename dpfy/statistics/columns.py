"""What a column may hold, as the public says, and cells read by it. No cell raises anything; no
cell changes how another is read.

A number outside its range is moved to the nearest end, infinity too. A cell that is no number is
missing: it counts as the column's public `fill`, or adds nothing where there is none. A word that
is not listed is `OTHER`, a category of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput

OTHER = "(other)"
Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class NumberColumn:
    """Numbers in a public range."""

    name: str
    low: float
    high: float
    fill: float | None = None

    def __post_init__(self) -> None:
        low, high = (
            check.real(f"{self.name} range", self.low),
            check.real(f"{self.name} range", self.high),
        )
        if not low < high or not math.isfinite(high - low):
            raise InvalidInput(
                f"{self.name} range",
                [self.low, self.high],
                "must be [low, high] with low below high",
            )

    def __str__(self) -> str:
        filled = "" if self.fill is None else f", missing counts as {self.fill:g}"
        return f"{self.name} from {self.low:g} to {self.high:g}{filled}"

    @property
    def middle(self) -> float:
        """The centre of the range."""
        return self.low + (self.high - self.low) / 2

    @property
    def half(self) -> float:
        """Half its length."""
        return (self.high - self.low) / 2

    def read(self, cells: Any, missing: Sequence[str]) -> Floats:
        """Each cell as a number in the range, or NaN where it is missing and there is no fill."""
        values = np.clip(numbers(cells, missing), self.low, self.high)
        return values if self.fill is None else np.where(np.isnan(values), self.fill, values)


@dataclass(frozen=True)
class CategoryColumn:
    """One of a public list of words."""

    name: str
    words: tuple[str, ...]
    fill: str | None = None

    def __post_init__(self) -> None:
        if not self.words or len(set(self.words)) < len(self.words):
            raise InvalidInput(
                f"{self.name} categories", list(self.words), "must be at least one word, each once"
            )
        if OTHER in self.words:
            raise InvalidInput(
                f"{self.name} categories",
                OTHER,
                "must not be listed: it is the category of all that is not",
            )

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.words)}" + (
            "" if self.fill is None else f", missing counts as {self.fill}"
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The categories a record can fall into: the listed ones, then all others."""
        return (*self.words, OTHER)

    def read(self, cells: Any, missing: Sequence[str]) -> Codes:
        """The place of each cell's word in `cells`."""
        place = {word: position for position, word in enumerate(self.words)}
        other, markers = len(self.words), frozenset(missing)
        absent = place.get(self.fill, other) if self.fill is not None else other
        found = np.empty(len(cells), np.int64)
        for row, cell in enumerate(_listed(cells)):
            text = word(cell)
            found[row] = place.get(text, absent if text in markers or cell is None else other)
        return found


@dataclass(frozen=True)
class OpenColumn:
    """A column about which nothing is public: its words, or the range of its numbers, can be found
    with a release of their own.
    """

    name: str

    def __str__(self) -> str:
        return f"{self.name}: nothing is public"

    def read(self, cells: Any, missing: Sequence[str]) -> list[str | None]:
        """Each cell as text; None where it is missing."""
        texts = [word(cell) for cell in _listed(cells)]
        return [None if text in missing or text == "" else text for text in texts]


Column = NumberColumn | CategoryColumn | OpenColumn


class PrivateTable:
    """Private records: cells by the name of their column. All are read through the public columns,
    when they are asked for.
    """

    def __init__(
        self,
        cells: Mapping[str, Any],
        columns: Mapping[str, Column],
        missing: Sequence[str] = ("",),
        owners: Codes | None = None,
    ) -> None:
        self.columns, self.missing, self.owners, self._cells = (
            columns,
            tuple(missing),
            owners,
            cells,
        )
        sizes = {name: len(held) for name, held in cells.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidInput(
                "data", "columns of different lengths", "all must have the same number of cells"
            )
        self.size = next(iter(sizes.values()), 0)
        self._read: dict[str, Any] = {}

    def numbers(self, name: str) -> Floats:
        """A column of numbers, in its range; NaN where one is missing."""
        return np.asarray(self._of(name))

    def codes(self, name: str) -> Codes:
        """A column of words, as places in its categories."""
        return np.asarray(self._of(name))

    def texts(self, name: str) -> list[str | None]:
        """A column as it is written."""
        return OpenColumn(name).read(self.cells(name), self.missing)

    def raw(self, name: str) -> Floats:
        """A column of numbers without a range; NaN where one is missing."""
        return numbers(self.cells(name), self.missing)

    def cells(self, name: str) -> Any:
        """A column of the data."""
        if name not in self._cells:
            raise InvalidInput("column", name, "is in the schema but not in the data")
        return self._cells[name]

    def content(self, name: str, written: bool) -> bytes:
        """All that statistics may read of a column; `written` if they read it as it is written, or
        without its range.
        """
        column = self.columns[name]
        read = b"" if isinstance(column, OpenColumn) else np.asarray(self._of(name)).tobytes()
        if not written:
            return read
        texts = ["\0" if text is None else text for text in self.texts(name)]
        return read + "\1".join(texts).encode("utf-8", "surrogatepass") + self.raw(name).tobytes()

    def _of(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = self.columns[name].read(self.cells(name), self.missing)
        return self._read[name]


def word(cell: Any) -> str:
    """A cell as a word: whole floats as whole numbers, since missing cells make floats of them;
    what has no text as nothing.
    """
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    try:
        return (
            str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()
        )
    except Exception:  # whatever an object of a stranger does when it is shown
        return ""


def number(cell: Any, missing: Sequence[str]) -> float:
    """A cell as a number: infinite where it is beyond every float, NaN where it is none."""
    try:
        if isinstance(cell, str) and (cell.strip() in missing or "_" in cell):
            return math.nan
        return float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf
    except Exception:  # text, an object, nothing
        return math.nan


def numbers(cells: Any, missing: Sequence[str]) -> Floats:
    """Cells as numbers; NaN where one is missing."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "biuf" and cells.ndim == 1:
        return cells.astype(np.float64)
    return np.array([number(cell, missing) for cell in _listed(cells)], np.float64)


def _listed(cells: Any) -> Any:
    """Cells as Python objects, one for each record."""
    return cells.tolist() if isinstance(cells, np.ndarray) and cells.ndim == 1 else cells
