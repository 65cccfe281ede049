"""What is public about the columns of a table: from a schema, or from bounds. Only the form of the
data is looked at, never a value.

A column is a number in a range, a category out of a list, or open: a number whose range nobody
stated, which the fit has to buy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from dpfy.core.check import interval
from dpfy.core.codec import Codec
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.estimators.claim import MOST_DOMAIN
from dpfy.estimators.files import FileTable
from dpfy.tables.cells import listed, word
from dpfy.tables.columns import Category, Label, Number, OpenColumn
from dpfy.tables.schema import Schema

Column = Union[Number, Category, OpenColumn]
CODEC = Codec(
    "column", {"number": Number, "category": Category, "label": Label, "open": OpenColumn}
)
MISSING = ("", "?")
NEARLY = 1e-5
"""A range whose lower end is so small a part of its upper end begins at zero."""


@dataclass(frozen=True)
class TableForm:
    """The form of a table: how many columns, what they are called (None for positions), and which
    of them are text.
    """

    width: int
    names: tuple[str, ...] | None
    text: frozenset[int]
    named: bool = True
    """Whether scikit-learn keeps the names: those of a table in memory that are words."""

    @classmethod
    def of(cls, X: Any) -> TableForm:
        """Of an array, a pandas or an Arrow table. Anything else that is no table of numbers or
        text is refused.
        """
        if isinstance(X, FileTable):
            return cls(len(X.names), X.names, frozenset(range(len(X.names))), named=False)
        if hasattr(X, "column_names") and hasattr(X, "column"):  # Arrow
            text = (k for k, f in enumerate(X.schema) if not _is_number(str(f.type)))
            return cls(
                _some(len(X.column_names), X.shape),
                tuple(map(str, X.column_names)),
                frozenset(text),
            )
        if hasattr(X, "columns") and hasattr(X, "dtypes"):  # pandas
            text = (k for k, kind in enumerate(X.dtypes) if not _is_number(str(kind)))
            words = all(isinstance(c, str) for c in X.columns)
            return cls(
                _some(len(X.columns), X.shape), tuple(map(str, X.columns)), frozenset(text), words
            )
        if hasattr(X, "toarray"):
            raise InvalidInput(
                "X",
                f"a sparse {type(X).__name__}",
                "must be dense: sparse input is not supported (X.toarray())",
            )
        array = as_array(X)
        return cls(
            _some(array.shape[1], array.shape),
            None,
            frozenset(range(array.shape[1])) if array.dtype.kind not in "biuf" else frozenset(),
        )

    def without(self, name: str) -> TableForm:
        """The form of the table less a column, which it may not have."""
        if self.names is None or name not in self.names:
            return self
        kept = [k for k, n in enumerate(self.names) if n != name]
        return TableForm(
            _some(len(kept), (0, len(kept))),
            tuple(self.names[k] for k in kept),
            frozenset(place for place, k in enumerate(kept) if k in self.text),
            self.named,
        )


def _some(width: int, shape: Sequence[int]) -> int:
    if not width:
        rule = (
            f"Found array with 0 feature(s) (shape={tuple(shape)}) while a minimum of 1 is "
            f"required."
        )
        raise InvalidInput("X", "no columns", rule)
    return width


def as_array(X: Any) -> np.ndarray:
    """An array with one row for each record."""
    try:
        array = np.asarray(X)
    except (TypeError, ValueError):
        raise InvalidInput(
            "X", type(X).__name__, "must be a table: one row for each record, all of one length"
        ) from None
    if array.dtype.kind == "c":
        raise InvalidInput("X", str(array.dtype), "Complex data not supported: it must be real")
    if array.dtype.kind == "O":
        array = _numeric(array)
    if array.ndim != 2:
        rule = (
            f"Expected 2D array, got {array.ndim}D array instead. Reshape your data: one row for "
            f"each record"
        )
        raise InvalidInput("X", f"shape {array.shape}", rule)
    return array


def _numeric(array: np.ndarray) -> np.ndarray:
    """An array of objects as numbers, if all of them are; else as it is."""
    for cell in array.ravel()[:1]:
        if isinstance(cell, str):
            return array
        if isinstance(cell, dict | list | set):
            raise InvalidInput(
                "X",
                type(cell).__name__,
                "argument must be a string or a real number: one in each cell",
            )
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError):
        return array


def _is_number(kind: str) -> bool:
    return kind.lower().startswith(
        ("int", "uint", "float", "double", "halffloat", "bool", "decimal")
    )


@dataclass(frozen=True)
class FeatureColumns:
    """All that is public about the features: their columns in order, and how a missing cell is
    written.

    `cell_of_missing`: a missing value without a fill is kept as one (NaN; for a category, as
    others), for estimators that give it a cell.
    """

    columns: tuple[Column, ...]
    missing: tuple[str, ...] = MISSING
    cell_of_missing: bool = False

    @property
    def open(self) -> tuple[int, ...]:
        """Places of the columns whose range must be bought."""
        return tuple(k for k, column in enumerate(self.columns) if isinstance(column, OpenColumn))

    @cached_property
    def numbers(self) -> tuple[Number, ...]:
        """The numbers, in order."""
        return tuple(c for c in self.columns if isinstance(c, Number))

    @cached_property
    def categories(self) -> tuple[Category, ...]:
        """The categories, in order."""
        return tuple(c for c in self.columns if isinstance(c, Category))

    @cached_property
    def ends(self) -> NDArray[np.float64]:
        """The ranges of the numbers, as they are given."""
        return np.array([c.range for c in self.numbers], np.float64).reshape(-1, 2)

    @cached_property
    def spans(self) -> NDArray[np.float64]:
        """The ranges of the numbers, transformed."""
        return np.array(
            [[c.transformed(c.range[0]), c.transformed(c.range[1])] for c in self.numbers],
            np.float64,
        ).reshape(-1, 2)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns."""
        return tuple(c.name for c in self.columns)

    def to_json(self) -> dict[str, Any]:
        """For the file of an estimator."""
        held = {"columns": CODEC.encode(self.columns), "missing": list(self.missing)}
        return held | ({"cell_of_missing": True} if self.cell_of_missing else {})

    @classmethod
    def from_json(cls, data: Any) -> FeatureColumns:
        """What `to_json` wrote."""
        try:
            return cls(
                tuple(CODEC.decode(data["columns"])),
                tuple(data["missing"]),
                data.get("cell_of_missing", False) is True,
            )
        except (DpfyError, KeyError, TypeError) as problem:
            raise Corrupt("columns", f"cannot be read ({problem})") from None


def described(parts: Sequence[object]) -> str:
    """Public facts in words, cut where they are long and ending in a hash of the whole."""
    safe = (
        "".join(c if c.isprintable() else "?" for c in "; ".join(_words(p) for p in parts))
        or "nothing"
    )
    return (
        f"{safe[:MOST_DOMAIN]} "
        f"({hashlib.sha256(repr(tuple(parts)).encode('utf-8', 'surrogatepass')).hexdigest()[:16]})"
    )


def _words(part: object) -> str:
    if isinstance(part, Number):
        through = "" if part.transform == "none" else f" through {part.transform}"
        return f"{part.name} from {part.range[0]:g} to {part.range[1]:g}{through}"
    if isinstance(part, Category):
        return f"{part.name}: {', '.join(part.categories)}"
    return str(part)


def public(
    form: TableForm,
    schema: Any,
    bounds: Any,
    target: str | None = None,
    person: str | None = None,
) -> FeatureColumns:
    """The public columns of a table of this form: those of the schema less the target and the
    column of persons, or numbers within the bounds.

    Guarantees: depends on schema, bounds, and the names, types and number of columns alone.
    """
    if schema is not None:
        if bounds is not None:
            raise InvalidInput(
                "bounds", bounds, "must not be given beside a schema, which holds the ranges"
            )
        held, ignored, missing = of_schema(schema)
        held = [c for c in held if c.name != person]
        return _ordered(held, ignored, missing, form, target)
    if form.text:
        place = min(form.text)
        name = form.names[place] if form.names else place
        rule = (
            "is no column of numbers: its categories must be public; describe the columns in a "
            "schema"
        )
        raise InvalidInput("X column", name, rule)
    names = form.names or tuple(f"x{k}" for k in range(form.width))
    pairs = ranges(bounds, names)
    return FeatureColumns(
        tuple(
            OpenColumn(n) if pair is None else in_range(n, *pair)
            for n, pair in zip(names, pairs, strict=True)
        )
    )


def in_range(name: str, low: float, high: float) -> Number:
    """A number in a range that no schema describes: onto [0, 1] where it begins at zero, which
    stays zero, else onto [-1, 1].
    """
    return Number(name, low, high, scale="unit" if abs(low) <= NEARLY * high else "symmetric")


def ranges(bounds: Any, names: Sequence[str]) -> list[tuple[float, float] | None]:
    """A range for each column, None where there is none: from (low, high), numbers or one for each
    column, or from pairs by name.
    """
    if bounds is None:
        return [None] * len(names)
    if isinstance(bounds, Mapping):
        for key in bounds:
            if key not in names:
                raise InvalidInput(
                    "bounds", key, f"must name columns of X: {', '.join(names[:20])}"
                )
        return [_pair(f"bounds of {n}", bounds[n]) if n in bounds else None for n in names]
    try:
        low, high = (np.broadcast_to(np.asarray(end, np.float64), (len(names),)) for end in bounds)
    except (TypeError, ValueError):
        rule = (
            f"must be (low, high): two numbers, or two lists of {len(names)}, or pairs by the name "
            f"of a column"
        )
        raise InvalidInput("bounds", bounds, rule) from None
    return [
        _pair(f"bounds of {n}", pair)
        for n, pair in zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True)
    ]


def _pair(name: str, pair: Any) -> tuple[float, float]:
    return interval(
        name,
        pair if isinstance(pair, list) else tuple(pair) if isinstance(pair, Sequence) else pair,
    )


def of_schema(schema: Any) -> tuple[list[Column | Label], frozenset[str], tuple[str, ...]]:
    """The columns of a schema: a packaged one or a TOML file by name, a Schema, or columns by
    name.
    """
    if isinstance(schema, str | Path | Schema):
        found = Schema.of(schema)
        open_names = frozenset(c.name for c in found.columns if isinstance(c, OpenColumn))
        known = [c for c in found.columns if c.name not in open_names]
        return known, open_names, found.missing  # type: ignore[return-value]
    given = (
        list(schema.values())
        if isinstance(schema, Mapping)
        else list(schema)
        if isinstance(schema, Sequence)
        else [schema]
    )
    for column in given:
        if not isinstance(column, Number | Category | Label | OpenColumn):
            rule = "must be a TOML file, the name of a packaged schema, or columns (dpfy.tables)"
            raise InvalidInput("schema", column, rule)
    if len({c.name for c in given}) < len(given):
        raise InvalidInput("schema", [c.name for c in given], "must name each column once")
    return given, frozenset(), MISSING


def _ordered(
    held: list[Column | Label],
    ignored: frozenset[str],
    missing: tuple[str, ...],
    form: TableForm,
    target: str | None,
) -> FeatureColumns:
    """The features of a schema, in its order; a table with names must have them, and may have the
    ignored columns and the target.
    """
    features = tuple(c for c in held if not isinstance(c, Label) and c.name != target)
    if not features:
        raise InvalidInput(
            "schema", "no feature", "must describe at least one column beside the target"
        )
    names = [c.name for c in features]
    others = {c.name for c in held if c not in features} | ignored
    if form.names is None:
        if form.width != len(names):
            rule = (
                f"must have one column for each feature of the schema, in its order: "
                f"{', '.join(names)[:200]}"
            )
            raise InvalidInput("X", f"{form.width} columns", rule)
    else:
        for name in names:
            if name not in form.names:
                raise InvalidInput("X column", name, "is in the schema but not in X")
        for name in form.names:
            if name not in names and name not in others:
                raise InvalidInput(
                    "X column",
                    name,
                    "is in X but not in the schema; describe it, or set ignore = true",
                )
    return FeatureColumns(features, missing)


def label_of(schema: Any, target: str | None) -> Column | Label | None:
    """What a schema says about the target: the column of that name, or its label; None without a
    schema or a target.
    """
    if schema is None:
        return None
    held, _, _ = of_schema(schema)
    if target is None:
        return next((c for c in held if isinstance(c, Label)), None)
    if target not in {c.name for c in held}:
        raise InvalidInput(
            "target",
            target,
            f"must be a column of the schema: {', '.join(c.name for c in held)[:200]}",
        )
    return next(c for c in held if c.name == target)


def refuse_categories(columns: FeatureColumns, what: str) -> None:
    """Refuse categories where only numbers have a meaning."""
    if columns.categories:
        raise Unsupported(
            f"{what} of the category {columns.categories[0].name!r}",
            "leave it out, or use an estimator that takes it",
        )


def distinct(cells: Any) -> tuple[list[str], NDArray[np.int64]]:
    """The words of a column, each once, and the place of each cell among them; -1 where there is no
    value.
    """
    if hasattr(cells, "dictionary_encode"):  # Arrow
        held = cells.combine_chunks() if hasattr(cells, "combine_chunks") else cells
        held = held if hasattr(held, "dictionary") else held.dictionary_encode()
        return [word(w) for w in listed(held.dictionary)], np.asarray(
            held.indices.fill_null(-1), np.int64
        )
    if hasattr(cells, "cat"):  # a pandas column of categories
        return [word(w) for w in cells.cat.categories], np.asarray(cells.cat.codes, np.int64)
    try:
        import pandas
    except ImportError:
        place: dict[str, int] = {}
        each = [place.setdefault(word(cell), len(place)) for cell in np.asarray(cells).tolist()]
        return list(place), np.array(each, np.int64)
    places, found = pandas.factorize(np.asarray(cells))
    return [word(w) for w in found], np.asarray(places, np.int64)
