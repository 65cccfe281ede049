"""What is public about the columns of a table: from a schema, or from bounds. Only the form of the
data is looked at, never a value.

A column is a number in a range, a category out of a list, or open: a number whose range nobody
given, which the fit has to buy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from dpfy.core.check import interval
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.data.features import features_of
from dpfy.estimators.claim import MOST_DOMAIN
from dpfy.estimators.given import FileTable
from dpfy.tables.columns import Category, Column, Label, Number, OpenColumn
from dpfy.tables.schema import Schema, column_of, entry_of

Feature = Union[Number, Category, OpenColumn]
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
            frozenset(range(array.shape[1])) if array.dtype.kind not in "biufO" else frozenset(),
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
    if array.ndim != 2:
        rule = (
            f"Expected 2D array, got {array.ndim}D array instead. Reshape your data: one row for "
            f"each record"
        )
        raise InvalidInput("X", f"shape {array.shape}", rule)
    return array


def _is_number(kind: str) -> bool:
    return kind.lower().startswith(
        ("int", "uint", "float", "double", "halffloat", "bool", "decimal")
    )


@dataclass(frozen=True)
class FeatureColumns:
    """All that is public about the features: their columns in order, and how a missing cell is
    written.

    `sources` are the columns of the table that they are made of: a date or a text may be several
    features. `cell_of_missing`: a missing value without a fill is kept as one (NaN; for a category,
    as others), for estimators that give it a cell. `strict`: the caller declares the data clean.
    """

    columns: tuple[Feature, ...]
    missing: tuple[str, ...] = ("",)
    cell_of_missing: bool = False
    sources: tuple[Column, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        if not self.sources:
            object.__setattr__(self, "sources", self.columns)

    @classmethod
    def of(
        cls, sources: Sequence[Column], missing: Sequence[str] = ("",), **more: bool
    ) -> FeatureColumns:
        """The features that learners read in the columns of a table."""
        features = tuple(feature for column in sources for feature in features_of(column))
        return cls(features, tuple(missing), sources=tuple(sources), **more)

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
        """Of all columns of the table."""
        return tuple(c.name for c in self.sources)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of the features: of a date its parts, of a text its buckets."""
        return tuple(c.name for c in self.columns)

    def to_json(self) -> dict[str, Any]:
        """For the file of an estimator."""
        held = {
            "columns": [{"name": c.name} | entry_of(c) for c in self.sources],
            "missing": list(self.missing),
        }
        return held | ({"cell_of_missing": True} if self.cell_of_missing else {})

    @classmethod
    def from_json(cls, data: Any) -> FeatureColumns:
        """What `to_json` wrote."""
        try:
            held = [
                column_of(
                    entry["name"], {k: v for k, v in entry.items() if k != "name" and v is not None}
                )
                for entry in data["columns"]
            ]
            keep = data.get("cell_of_missing", False) is True
            return cls.of(held, data["missing"], cell_of_missing=keep)
        except (DpfyError, KeyError, TypeError, AttributeError) as problem:
            raise Corrupt("columns", f"cannot be read ({problem})") from None


def described(parts: Sequence[object]) -> str:
    """Public facts in words, cut where they are long and ending in a hash of the whole."""
    safe = "".join(c if c.isprintable() else "?" for c in "; ".join(map(str, parts))) or "nothing"
    return (
        f"{safe[:MOST_DOMAIN]} "
        f"({hashlib.sha256(repr(tuple(parts)).encode('utf-8', 'surrogatepass')).hexdigest()[:16]})"
    )


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
        return _ordered(Schema.of(schema), form, target, person)
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
    column, from a list of pairs (low, high), or from pairs by name.
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
    if isinstance(bounds, list) and all(isinstance(b, tuple) and len(b) == 2 for b in bounds):
        if len(bounds) != len(names):
            rule = f"must have a pair for each of the {len(names)} columns"
            raise InvalidInput("bounds", f"{len(bounds)} pairs", rule)
        return [_pair(f"bounds of {n}", pair) for n, pair in zip(names, bounds, strict=True)]
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


def _ordered(
    schema: Schema, form: TableForm, target: str | None, person: str | None
) -> FeatureColumns:
    """The features of a schema, in its order; a table with names must have them, and may have the
    other columns.
    """
    features = tuple(c for c in schema.features if c.name not in (target, person))
    if not features:
        raise InvalidInput(
            "schema", "no feature", "must describe at least one column beside the target"
        )
    names = [c.name for c in features]
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
            if name not in schema.names:
                raise InvalidInput(
                    "X column",
                    name,
                    "is in X but not in the schema; describe it, or set ignore = true",
                )
    return FeatureColumns.of(features, schema.missing, strict=schema.strict)


def label_of(schema: Any, target: str | None) -> Column | None:
    """What a schema says about the target: the column of that name, or its label; None without a
    schema or a target.
    """
    if schema is None:
        return None
    held = Schema.of(schema).columns
    if target is None:
        return next((c for c in held if isinstance(c, Label)), None)
    names = [c.name for c in held]
    if target not in names:
        rule = f"must be a column of the schema: {', '.join(names)[:200]}"
        raise InvalidInput("target", target, rule)
    return held[names.index(target)]


def refuse_categories(columns: FeatureColumns, what: str) -> None:
    """Refuse categories where only numbers have a meaning."""
    if columns.categories:
        raise Unsupported(
            f"{what} of the category {columns.categories[0].name!r}",
            "leave it out, or use an estimator that takes it",
        )
