"""What is predicted: one of a public list of classes, or a number in a public range. Neither is
read from the records for free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from dpfy.core.check import interval
from dpfy.core.errors import InvalidInput
from dpfy.tables import cells as reading
from dpfy.tables.columns import Category, Column, Label, Number, OpenColumn

PUBLIC = "public"
"""The caller states that the set of labels that occur in y is public knowledge."""
NAME = "y"


@dataclass(frozen=True)
class ClassTarget:
    """A public list of labels, sorted. `stated`: the caller said that those in y are public, and
    they were read from it.
    """

    labels: tuple[Any, ...]
    stated: bool = False
    fill: str | None = field(default=None, compare=False)
    """The class of records without a usable label; without it they are left out."""

    def __post_init__(self) -> None:
        if len(self.labels) < 2:
            rule = "must be at least two: a classifier cannot be trained with 1 class"
            raise InvalidInput("classes", list(self.labels), rule)

    def __str__(self) -> str:
        return f"classes {', '.join(map(str, self.labels))}"

    @property
    def array(self) -> NDArray[Any]:
        """As scikit-learn keeps them."""
        return np.array(self.labels)

    def read(self, y: Any) -> NDArray[np.int64]:
        """The place of each label; -1 where it is not listed."""
        cells = column_of(y)
        if isinstance(self.labels[0], str):
            place = {label: k for k, label in enumerate(self.labels)}
            words, places = reading.distinct(cells)
            found = [place.get(text, -1) for text in words]
            return np.array([*found, -1], np.int64)[places]
        values, known = reading.numbers(cells, ()), self.array.astype(np.float64)
        codes = np.clip(np.searchsorted(known, values), 0, len(known) - 1).astype(np.int64)
        return np.where(known[codes] == values, codes, -1)


@dataclass(frozen=True)
class NumberTarget:
    """Numbers in a public range."""

    low: float
    high: float
    fill: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"target from {self.low:g} to {self.high:g}"

    @property
    def middle(self) -> float:
        """The centre of the range."""
        return self.low + (self.high - self.low) / 2

    @property
    def half(self) -> float:
        """Half its length."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class OpenTarget:
    """Numbers whose range nobody given: the fit buys it."""

    def __str__(self) -> str:
        return "target in a range that is bought"


Target = Union[ClassTarget, NumberTarget, OpenTarget]


def classes(given: Any, said: Column | None, y: Any) -> ClassTarget:
    """The public classes: those given, or those of the schema. `y` is looked at only where the
    caller states that its labels are public.
    """
    if given is None:
        if isinstance(said, Label):
            return ClassTarget(tuple(sorted(said.classes)), fill=said.fill)
        if isinstance(said, Category):
            return ClassTarget(tuple(sorted(said.categories)))
        rule = (
            'must be given: the public list of labels, a schema with a label, or "public" to state '
            "that those in y are"
        )
        raise InvalidInput("classes", given, rule)
    if isinstance(given, str):
        if given != PUBLIC:
            raise InvalidInput("classes", given, f'must be a list of labels, or "{PUBLIC}"')
        return ClassTarget(_labels(np.unique(_discrete(column_of(y)))), stated=True)
    if not isinstance(given, Sequence | np.ndarray) or not len(given):
        raise InvalidInput("classes", given, f'must be a list of labels, or "{PUBLIC}"')
    found = np.unique(np.asarray(given))
    if len(found) < len(given):
        raise InvalidInput("classes", list(given), "must not name a label twice")
    return ClassTarget(_labels(found))


def _discrete(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "f" and not (
        np.isfinite(values).all() and (values == np.rint(values)).all()
    ):
        if not np.isfinite(values).all():
            raise InvalidInput(
                "y", "NaN or inf", "Input y contains NaN or infinity: labels must be values"
            )
        raise InvalidInput(
            "y",
            "numbers that are not whole",
            "Unknown label type: continuous; labels must be classes",
        )
    return values


def _labels(found: NDArray[Any]) -> tuple[Any, ...]:
    if found.dtype.kind in "OUS":
        return tuple(sorted(str(v).strip() for v in found.tolist()))
    return tuple(found.tolist())


def number(given: Any, said: Column | None) -> NumberTarget | OpenTarget:
    """The public range of the target: that given, or that of the schema; open where there is
    none.
    """
    if given is not None:
        return NumberTarget(
            *interval(
                "target_bounds", tuple(given) if isinstance(given, Sequence | np.ndarray) else given
            )
        )
    if isinstance(said, Number):
        return NumberTarget(*said.range, said.fill)
    if said is not None and not isinstance(said, OpenColumn):
        raise InvalidInput("target", said.name, "must be a number for a regression")
    return OpenTarget()


def require_target(y: Any) -> None:
    """Refuse no target; nothing else of it is looked at."""
    if y is None:
        raise InvalidInput("y", None, "requires y to be passed, but the target y is None")


def column_of(y: Any) -> NDArray[Any]:
    """One value for each record."""
    require_target(y)
    try:
        held = np.asarray(reading.array(y) if hasattr(y, "to_numpy") else y)
    except ValueError:  # cells that are tables themselves
        held = np.fromiter(y, object, len(y))
    if held.ndim == 2 and held.shape[1] == 1:
        import warnings

        from sklearn.exceptions import DataConversionWarning

        warnings.warn(
            "A column-vector y was passed when a 1d array was expected",
            DataConversionWarning,
            stacklevel=4,
        )
        held = held[:, 0]
    if held.ndim != 1:
        raise InvalidInput(
            "y",
            f"shape {held.shape}",
            "must have one value for each record: y should be a 1d array",
        )
    if held.dtype.kind == "c":
        raise InvalidInput("y", str(held.dtype), "Complex data not supported")
    return held


def numbers_of(y: Any, missing: Sequence[str] = ()) -> NDArray[np.float64]:
    """The numbers of a regression; NaN where one is missing."""
    return reading.numbers(column_of(y), missing)
