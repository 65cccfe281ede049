"""Private records, read by their public columns: numbers moved into their ranges, categories as
places in their lists.

A number outside its range is moved to the nearest end. A missing cell is what the schema says
(`fill`), and refused where it says nothing; so are infinity, and a category that is not listed
unless others are allowed (fill = "other"). Refusals come before any release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.estimators.columns import Column, FeatureColumns, as_array, distinct
from dpfy.estimators.target import ClassTarget, NumberTarget, Target
from dpfy.tables.cells import listed, numbers, word
from dpfy.tables.columns import FILL_OTHER, Category, Number, OpenColumn

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
ABSENT, UNLISTED = -1, -2


@dataclass(frozen=True, repr=False)
class EncodedRecords:
    """Records as arrays. `codes[:, k]` is the place of the k-th category (the length of its list
    where it is other).

    `given` holds the numbers as they came, finite and filled (NaN where a missing value has a cell
    of its own), and is never written to: it may be the caller's own array. All that is made of it
    (`numbers`, `scaled`, `cells`) is moved into the public ranges first. `target` holds places of
    classes, or numbers in their range, as `aim` says; both are None where nothing is predicted.
    `owners` is the number of each record's person, in ascending order; None where a record is the
    unit of privacy.
    """

    columns: FeatureColumns
    given: Floats
    codes: Codes
    target: NDArray[Any] | None = None
    aim: Target | None = None
    owners: Codes | None = None

    @property
    def labels(self) -> Codes:
        """The place of each record's class."""
        assert self.target is not None
        return self.target

    @property
    def classes(self) -> int:
        """How many classes there are."""
        assert isinstance(self.aim, ClassTarget)
        return len(self.aim.labels)

    @property
    def numeric(self) -> tuple[NumberTarget, Floats]:
        """The range of a numeric target, and its values."""
        assert isinstance(self.aim, NumberTarget)
        assert self.target is not None
        return self.aim, self.target

    @property
    def size(self) -> int:
        """How many records; as private as they are."""
        return len(self.given)

    def part(self, place: slice) -> EncodedRecords:
        """Some of the records."""
        return self.rows(place)

    def rows(self, place: slice | Codes) -> EncodedRecords:
        """The records at these places, without their owners."""
        target = None if self.target is None else self.target[place]
        given, codes = self.given[place], self.codes[place]
        return replace(self, given=given, codes=codes, target=target, owners=None)

    @property
    def numbers(self) -> Floats:
        """The numbers in their ranges: column k is the k-th number of the columns."""
        return np.clip(self.given, self.columns.ends[:, 0], self.columns.ends[:, 1])

    def scaled(self, part: slice = slice(None)) -> Floats:
        """The numbers through their transforms and onto their scales: [-1, 1], or [0, 1] where the
        schema says unit.
        """
        symmetric = np.array([c.scale == "symmetric" for c in self.columns.numbers], bool)
        return _unit(
            self.given[part],
            self.columns,
            width=np.where(symmetric, 2.0, 1.0),
            start=np.where(symmetric, -1.0, 0.0),
        )

    def units(self, number: int) -> Floats:
        """A number as a share of its transformed range, from 0 to 1; NaN where it is missing and
        has a cell of its own.
        """
        return _unit(self.given[:, [number]], self.columns, slice(number, number + 1))[:, 0]

    def cells(self, bins: int, part: slice = slice(None)) -> tuple[Codes, tuple[int, ...]]:
        """Every column as places: numbers in so many equal bins of their transformed range,
        categories as they are; and how many each has.

        Guarantees: places lie below their counts, whatever the records hold.
        """
        codes = self.codes[part]
        binned = _unit(self.given[part], self.columns)
        binned *= bins
        np.clip(binned, 0, bins - 1, out=binned)
        if not self.columns.categories:
            return binned.astype(np.int64), (bins,) * len(self.columns.numbers)
        places, sizes = np.empty((len(codes), len(self.columns.columns)), np.int64), []
        number = category = 0
        for k, column in enumerate(self.columns.columns):
            if isinstance(column, Number):
                places[:, k], number = binned[:, number], number + 1
                sizes.append(bins)
            else:
                places[:, k], category = codes[:, category], category + 1
                sizes.append(len(_category(column).categories) + 1)
        return places, tuple(sizes)


def _category(column: Column) -> Category:
    assert isinstance(column, Category)
    return column


def _unit(
    values: Floats,
    columns: FeatureColumns,
    which: slice = slice(None),
    width: Floats | float = 1.0,
    start: Floats | float = 0.0,
) -> Floats:
    """Numbers, moved into their ranges, as shares of their transformed ranges; times `width`, from
    `start` on: a copy.

    Guarantees: no share lies outside 0 and 1, times `width`, from `start` on, wherever numbers lie
    and however they are rounded.
    """
    ends, spans = columns.ends[which], columns.spans[which]
    alike = len(ends) > 1 and bool((ends == ends[0]).all())  # one range for all is quicker
    shares = np.clip(values, *(ends[0] if alike else (ends[:, 0], ends[:, 1])))
    logs = [k for k, c in enumerate(columns.numbers[which]) if c.transform == "log1p"]
    if logs:
        shares[:, logs] = np.log1p(shares[:, logs])
    factor = width / (spans[:, 1] - spans[:, 0])
    offset = start - spans[:, 0] * factor
    if (
        not logs and (factor == 1).all() and not offset.any()
    ):  # numbers that stand on their scale as they are
        return shares
    shares *= factor
    shares += offset
    ends = np.stack(np.broadcast_arrays(start, start + width), axis=-1)
    alike = ends.ndim == 1 or bool((ends == ends[0]).all())
    low, high = ends.reshape(-1, 2)[0] if alike else (ends[:, 0], ends[:, 1])
    return np.clip(shares, low, high, out=shares)


def read(X: Any, columns: FeatureColumns) -> EncodedRecords:
    """Every record by its columns. Columns that are still open must get a range before anything is
    made of them.
    """
    if not any(hasattr(X, name) for name in ("columns", "column_names", "column")):
        array = as_array(X)
        if array.dtype.kind in "biuf" and not columns.categories:
            return EncodedRecords(
                columns,
                _filled(np.asarray(array, np.float64), columns),
                np.empty((len(array), 0), np.int64),
            )
        cells = [array[:, k] for k in range(array.shape[1])]
    else:
        cells = [column(X, c.name) for c in columns.columns]
    size = len(cells[0]) if cells else 0
    values = [
        _numbers(cell, c, columns.missing)
        for cell, c in zip(cells, columns.columns, strict=True)
        if not isinstance(c, Category)
    ]
    codes = [
        _codes(cell, c, columns)
        for cell, c in zip(cells, columns.columns, strict=True)
        if isinstance(c, Category)
    ]
    table = np.stack(values, axis=1) if values else np.empty((size, 0))
    return EncodedRecords(
        columns,
        _filled(table, columns),
        np.stack(codes, axis=1) if codes else np.empty((size, 0), np.int64),
    )


def _filled(values: Floats, columns: FeatureColumns) -> Floats:
    """Numbers without a missing one: those that came, or a copy with the fills of their columns."""
    if np.isfinite(values.sum()) or np.isfinite(values).all():
        return values
    found = values.copy()
    _fill(
        found, [c for c in columns.columns if not isinstance(c, Category)], columns.cell_of_missing
    )
    return found


def _fill(values: Floats, held: Sequence[Column], keep: bool) -> None:
    for k, column in enumerate(held):
        mine = values[:, k]
        if np.isinf(mine).any():
            raise InvalidInput(
                f"X column {column.name}",
                "inf",
                "must be finite: Input X contains infinity or a value too large",
            )
        absent = np.isnan(mine)
        if absent.any():
            if not isinstance(column, Number) or column.fill is None:
                if keep:
                    continue
                raise InvalidInput(
                    f"X column {column.name}",
                    "NaN",
                    "must have a value: give the column a public fill in a schema",
                )
            mine[absent] = column.fill


def column(X: Any, name: str) -> Any:
    """A column of a pandas or Arrow table."""
    if hasattr(X, "column"):
        return X.column(name)
    return X.iloc[:, [str(c) for c in X.columns].index(name)]


def _numbers(cells: Any, column: Column, missing: Sequence[str]) -> Floats:
    """Cells as numbers, NaN where one is missing. Text that is no number is refused."""
    try:
        held = cells.to_numpy() if hasattr(cells, "to_numpy") else np.asarray(cells)
    except Exception:  # Arrow tells the cell that it has no value for
        held = np.array(listed(cells), dtype=object)
    found = numbers(held, missing)
    if held.dtype.kind not in "biuf" and (absent := np.isnan(found)).any():
        for row in np.flatnonzero(absent).tolist():
            text = word(held[row])
            if text and text not in missing and text.lower() != "nan":
                raise InvalidInput(
                    f"X column {column.name}, row {row + 1}",
                    "a cell that is no number",
                    "must be a number",
                )
    return np.array(found, np.float64)


def _codes(cells: Any, column: Category, columns: FeatureColumns) -> Codes:
    """The place of each cell's word in the list of its column; the length of the list for
    others.
    """
    words, places = distinct(cells)
    known = {w: k for k, w in enumerate(column.categories)}
    found = [_place(w, known, column, columns.missing) for w in words] + [
        _place("", known, column, columns.missing, absent=True)
    ]
    codes = np.array(found, np.int64)[places]  # place -1, no value, is the last
    if columns.cell_of_missing:
        codes[codes == ABSENT] = len(column.categories)
    if len(refused := np.flatnonzero(codes < 0)):
        row = int(refused[0])
        said, rule = (
            "a category that is not listed",
            'must be one of the public categories: list it, or allow others with fill = "other"',
        )
        if codes[row] == ABSENT:
            said, rule = "NaN", "must have a value: give the column a public fill"
        raise InvalidInput(f"X column {column.name}, row {row + 1}", said, rule)
    return codes


def _place(
    text: str, known: dict[str, int], column: Category, missing: Sequence[str], absent: bool = False
) -> int:
    """`ABSENT` for a missing value without a fill, `UNLISTED` for a word that is not listed where
    others are not allowed.
    """
    other = len(column.categories)
    if text in known and not absent:
        return known[text]
    if absent or text in missing:
        return ABSENT if column.fill is None else known.get(column.fill, other)
    return other if column.fill == FILL_OTHER else UNLISTED


def parts(size: int, length: int = 1 << 13) -> list[slice]:
    """Records in parts that stay in the cache: at least one part, which may be empty."""
    return [slice(start, min(start + length, size)) for start in range(0, max(size, 1), length)]


def open_values(records: EncodedRecords) -> tuple[Floats, list[OpenColumn]]:
    """The numbers of the columns that are open, with their columns."""
    held = [c for c in records.columns.columns if not isinstance(c, Category)]
    places = [k for k, c in enumerate(held) if isinstance(c, OpenColumn)]
    return records.given[:, places], [c for c in held if isinstance(c, OpenColumn)]
