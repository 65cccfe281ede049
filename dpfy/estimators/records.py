"""Private records, read by their public columns: numbers moved into their ranges, categories as
places in their lists.

A number outside its range is moved to the nearest end, infinity too. A missing cell is what the
schema says (`fill`), else the middle of the range, or no category. A record without a usable target
is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.errors import InvalidInput
from dpfy.data.features import feature_values, features_of
from dpfy.estimators.columns import Feature, FeatureColumns, as_array
from dpfy.estimators.target import ClassTarget, NumberTarget, Target
from dpfy.tables import cells as reading
from dpfy.tables.columns import Category, Number, OpenColumn
from dpfy.tables.table import refuse_misfits

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
FARTHEST = 2.0**40
"""Where infinity lies, as long as no range is known."""
WEIGHT_BITS = 12
CONTENT = 2.0**53
"""What the choice of a person's records looks at: numbers in whole shares of their range."""


@dataclass(frozen=True, repr=False)
class EncodedRecords:
    """Records as arrays. `codes[:, k]` is the place of the k-th category (the length of its list
    where it is other).

    `given` holds the numbers as they came, finite and filled (NaN where a missing value has a cell
    of its own), and is never written to: it may be the caller's own array. All that is made of it
    (`numbers`, `scaled`, `cells`) is moved into the public ranges first. `target` holds places of
    classes, or numbers in their range, as `aim` says; both are None where nothing is predicted.
    `owners` is the number of each record's person, in ascending order; None where a record is the
    unit of privacy. `left_out` are the rows that the schema leaves out.
    unit of privacy. `weights` are numbers from 0 to 1 in whole steps of 2^-WEIGHT_BITS, by which
    what a record adds is multiplied; None where all count alike.
    """

    columns: FeatureColumns
    given: Floats
    codes: Codes
    target: NDArray[Any] | None = None
    aim: Target | None = None
    owners: Codes | None = None
    left_out: NDArray[np.bool_] | None = None
    weights: Floats | None = None

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

    def content(self) -> list[Codes]:
        """All that the choice of a person's records looks at, in whole numbers."""
        found, category = [], 0
        shares, numbers = None, 0
        if not self.columns.open:
            shares = _unit(self.given, self.columns)
        for column in self.columns.columns:
            if isinstance(column, Category):
                found.append(self.codes[:, category])
                category += 1
                continue
            if shares is None:
                found.append(self.given[:, numbers].view(np.int64))
            else:
                share = shares[:, numbers]
                found.append(np.rint(np.where(np.isnan(share), -1.0, share * CONTENT)).astype(int))
            numbers += 1
        if isinstance(self.aim, ClassTarget):
            found.append(self.labels)
        elif isinstance(self.aim, NumberTarget):
            low, high = self.aim.low, self.aim.high
            share = (self.numeric[1] - low) * (1 / (high - low))
            found.append(np.rint(share * CONTENT).astype(np.int64))
        elif self.target is not None:
            found.append(np.ascontiguousarray(self.target, np.float64).view(np.int64))
        if self.weights is not None:
            found.append(np.rint(self.weights * 2.0**WEIGHT_BITS).astype(np.int64))
        return found

    def class_cells(self, bins: int) -> Floats:
        """How many records of each class lie in each cell of every column, or the sum of their
        weights [classes, cells of all columns].
        """
        sizes = self.cells(bins, slice(0))[1]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        counts = np.zeros(self.classes * starts[-1], np.float64)
        for part in parts(self.size):
            at = self.cells(bins, part)[0] + starts[:-1] + self.labels[part, None] * starts[-1]
            weights = None if self.weights is None else np.repeat(self.weights[part], at.shape[1])
            counts += np.bincount(at.ravel(), weights, len(counts))
        return counts.reshape(self.classes, starts[-1])

    def rows(self, place: slice | Codes) -> EncodedRecords:
        """The records at these places, without their owners."""
        target = None if self.target is None else self.target[place]
        given, codes = self.given[place], self.codes[place]
        kept = replace(self, given=given, codes=codes, target=target, owners=None, left_out=None)
        return kept if self.weights is None else replace(kept, weights=self.weights[place])

    def weighed(self, added: Floats, bits: int) -> Floats:
        """What records add, times their weights, cut towards zero to whole steps of 2^-bits; as it
        is where there are no weights.

        Guarantees: lengthens nothing. A record's part follows from that record alone.
        """
        if self.weights is None:
            return added
        weights = self.weights if added.ndim == 1 else self.weights[:, None]
        return np.asarray(np.trunc(added * weights * 2.0**bits) * 2.0**-bits)

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


def _category(column: Feature) -> Category:
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


def weights_of(given: Any, most: float, size: int) -> Floats:
    """Weights as shares of their public maximum, cut to their grid.

    Guarantees: no weight raises an error. Below 0, and what is no number, counts as 0; above the
    maximum as the maximum.
    """
    held = given.to_numpy() if hasattr(given, "to_numpy") else np.asarray(given)
    if held.shape != (size,):
        rule = f"must be one for each of the {size} records of X: a 1D array"
        raise InvalidInput("sample_weight", f"shape {held.shape}", rule)
    values = reading.numbers(held, ())
    shares = np.clip(np.nan_to_num(values, nan=0.0) / most, 0.0, 1.0)
    return np.asarray(np.trunc(shares * 2.0**WEIGHT_BITS) * 2.0**-WEIGHT_BITS)


def read(X: Any, columns: FeatureColumns) -> EncodedRecords:
    """Every record by its columns. Columns that are still open must get a range before anything is
    made of them.

    Guarantees: no cell raises an error, unless the schema is strict, and none changes how another
    one is read, or whether its row is left out.
    """
    if any(hasattr(X, name) for name in ("columns", "column_names", "column")):
        cells = [column(X, c.name) for c in columns.sources]
    else:
        array = as_array(X)
        plain = all(isinstance(c, Number | OpenColumn) and not c.drop for c in columns.sources)
        if array.dtype.kind in "biuf" and plain and not columns.strict:
            values = filled(np.asarray(array, np.float64), columns)
            return EncodedRecords(columns, values, np.empty((len(array), 0), np.int64))
        cells = [array[:, k] for k in range(array.shape[1])]
    size, numbers, masks = len(cells[0]) if cells else 0, [], []
    codes: list[Codes] = []
    for source, held in zip(columns.sources, cells, strict=True):
        if type(source) is OpenColumn:  # its range is bought
            numbers.append(reading.numbers(held, columns.missing))
            continue
        found = source.parse(held, columns.missing)
        if columns.strict:
            refuse_misfits(source, found)
        if source.drop:
            masks.append(source.absent(found))
        if isinstance(source, Number):
            numbers.append(found)
            continue
        features = features_of(source)
        for feature, made in zip(features, feature_values(source, held, found), strict=True):
            (numbers if isinstance(feature, Number) else codes).append(made)
    return EncodedRecords(
        columns,
        filled(np.stack(numbers, axis=1) if numbers else np.empty((size, 0)), columns),
        np.stack(codes, axis=1) if codes else np.empty((size, 0), np.int64),
        left_out=np.logical_or.reduce(masks) if masks else None,
    )


def filled(values: Floats, columns: FeatureColumns) -> Floats:
    """Finite numbers: those that came, or a copy in which infinity is the end of a range, and a
    missing number the fill of its column or the middle of its range. Numbers of an open column
    stay missing, and so do those that have a cell of their own.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(values.sum()) or np.isfinite(values).all():
            return values
    found = values.copy()
    for k, feature in enumerate(c for c in columns.columns if not isinstance(c, Category)):
        mine = found[:, k]
        low, high = feature.range if isinstance(feature, Number) else (-FARTHEST, FARTHEST)
        np.copyto(mine, np.clip(mine, low, high), where=np.isinf(mine))
        if isinstance(feature, Number) and not (feature.fill is None and columns.cell_of_missing):
            mine[np.isnan(mine)] = feature.middle if feature.fill is None else feature.fill
    return found


def column(X: Any, name: str) -> Any:
    """A column of a file, or of a pandas, an Arrow or a Polars table."""
    if hasattr(X, "column"):
        return X.column(name)
    if hasattr(X, "get_column"):
        return X.get_column(name)
    return X.iloc[:, [str(c) for c in X.columns].index(name)]


def parts(size: int, length: int = 1 << 13) -> list[slice]:
    """Records in parts that stay in the cache: at least one part, which may be empty."""
    return [slice(start, min(start + length, size)) for start in range(0, max(size, 1), length)]


def open_values(records: EncodedRecords) -> tuple[Floats, list[OpenColumn]]:
    """The numbers of the columns that are open, with their columns."""
    held = [c for c in records.columns.columns if not isinstance(c, Category)]
    places = [k for k, c in enumerate(held) if isinstance(c, OpenColumn)]
    return records.given[:, places], [c for c in held if isinstance(c, OpenColumn)]
