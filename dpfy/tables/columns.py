"""What a column may hold, as the public says, and how its cells are read. Nothing here is learnt
from the cells.

One policy for all commands: a cell that is no number or no date is missing. A number or a date
outside its range is moved to the nearest end, infinity too. A word that is not listed is "other". A
missing cell counts as the column's public `fill`; with `drop` its row is left out; with neither it
is missing, and each statistic or learner says what that means to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import date
from typing import Any, ClassVar

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.tables import cells as reading
from dpfy.tables.cells import EPOCH, Codes, Floats, Mask

OTHER = "(other)"
"""The category of all words that are not listed."""
FILL_OTHER = "other"
"""A `fill` that makes a missing cell one of the others."""
SCALES = ("symmetric", "unit")
TRANSFORMS = ("none", "log1p")
PARTS = ("year", "month", "weekday")
EVERY = ("day", "week", "month", "year")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(str(month) for month in range(1, 13))
MOST_BUCKETS = 1 << 16


@dataclass(frozen=True)
class Column:
    """What every column has: a name, and whether rows are left out where its cell is missing.

    A column reads cells in two steps: `parse` says what is there, `settle` moves it into what is
    public.
    """

    name: str
    _: KW_ONLY
    drop: bool = False
    required: bool = False
    """For synthesis: no value may be missing, so that there is no cell for it."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInput("columns", self.name, "must have words for names")
        for key in ("drop", "required"):
            if not isinstance(held := getattr(self, key), bool):
                raise InvalidInput(self.key(key), held, "must be true or false")
        if self.drop and getattr(self, "fill", None) is not None:
            raise InvalidInput(
                self.key("drop"), True, "must not stand beside fill: a row is left out, or filled"
            )

    def key(self, field: str) -> str:
        """What a message calls a field of this column."""
        return f"columns.{self.name}.{field}"

    def parse(self, cells: Any, missing: Sequence[str]) -> Any:
        """What stands in the cells, before ranges and fills: here each as text, None where it is
        missing.
        """
        words, places = reading.distinct(cells)
        found = [None if text == "" or text in missing else text for text in words]
        return np.array([*found, None], object)[places]

    def absent(self, found: Any) -> Mask:
        """Which parsed cells are missing."""
        return np.array([text is None for text in found.tolist()], bool)

    @property
    def width(self) -> int:
        """How many numbers a learner reads of a cell."""
        return getattr(self, "buckets", None) or 1

    def fits(self, found: Any) -> Mask:
        """Which parsed cells are what the column may hold."""
        return np.asarray(~self.absent(found))

    def settle(self, found: Any) -> Any:
        """Parsed cells, moved into what is public."""
        return found

    def read(self, cells: Any, missing: Sequence[str] = ("",)) -> Any:
        """The cells by the policy."""
        return self.settle(self.parse(cells, missing))


class RangedColumn(Column):
    """Numbers in a public range, or dates, which are numbers of days."""

    low: float
    high: float
    scale: str
    transform: str
    fill: Any

    def absent(self, found: Floats) -> Mask:
        """See `Column`."""
        return np.isnan(found)

    def fits(self, found: Floats) -> Mask:
        """See `Column`."""
        return (found >= self.low) & (found <= self.high)

    def settle(self, found: Floats) -> Floats:
        """Numbers in the range; NaN where one is missing and there is no fill."""
        values = np.clip(found, self.low, self.high)
        filled = self.filled
        return values if filled is None else np.where(np.isnan(values), filled, values)

    @property
    def filled(self) -> float | None:
        """The number that a missing cell counts as."""
        filled: float | None = self.fill
        return filled

    def value(self, text: str) -> float | None:
        """The number that a text says, None where it says none."""
        found = float(self.parse([text], ())[0])
        return None if math.isnan(found) else found

    def transformed(self, value: float) -> float:
        """A value of the range, through the transform."""
        return math.log1p(value) if self.transform == "log1p" else value

    @property
    def range(self) -> tuple[float, float]:
        """Both ends."""
        return self.low, self.high

    @property
    def middle(self) -> float:
        """The centre of the range."""
        return self.low + (self.high - self.low) / 2

    @property
    def half(self) -> float:
        """Half its length."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Number(RangedColumn):
    """A number in a public range.

    Args:
        name: The column.
        low, high: The range; what lies outside counts as its nearest end.
        fill: What a missing cell counts as.
        drop: Leave out the rows where it is missing.
        scale: For learners, "symmetric" (onto [-1, 1]) or "unit" (onto [0, 1]).
        transform: "log1p" takes range and values through log(1 + x) first.
        bins: For synthesis, a number of bins or their edges.
        required: For synthesis, no cell for missing values.

    Raises:
        InvalidInput: The range is empty, or a value does not fit its rule.

    Example:
        >>> import dpfy
        >>> age = dpfy.Number("age", 0, 100)
        >>> age.low, age.high
        (0.0, 100.0)
    """

    low: float
    high: float
    _: KW_ONLY
    fill: float | None = None
    scale: str = "symmetric"
    transform: str = "none"
    bins: int | tuple[float, ...] | None = None

    kind = "number"

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = check.interval(self.key("range"), [self.low, self.high])
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        check.one_of(self.key("scale"), self.scale, SCALES)
        check.one_of(self.key("transform"), self.transform, TRANSFORMS)
        if self.transform == "log1p" and low <= -1:
            raise InvalidInput(self.key("range"), [low, high], "must lie above -1 for log1p")
        if self.fill is not None:
            fill = check.real(self.key("fill"), self.fill)
            if not low <= fill <= high:
                raise InvalidInput(self.key("fill"), fill, f"must lie in the range {[low, high]}")
        if isinstance(self.bins, list):
            object.__setattr__(self, "bins", tuple(self.bins))

    def __str__(self) -> str:
        through = "" if self.transform == "none" else f" through {self.transform}"
        return f"{self.name} from {self.low:g} to {self.high:g}{through}{_filling(self)}"

    def parse(self, cells: Any, missing: Sequence[str]) -> Floats:
        """Numbers; NaN where there is none."""
        return reading.numbers(cells, missing)


@dataclass(frozen=True)
class Date(RangedColumn):
    """A date in a public range; of a time its day counts. It is read as days after the first one.

    Args:
        name: The column.
        first, last: The range, as dates or as "2020-01-31".
        fill: The date that a missing cell counts as.
        drop: Leave out the rows where it is missing.
        parts: For learners and group-by, some of "year", "month", "weekday" as columns
            NAME_year, ... in its place; without them learners read one number.
        every: For synthesis, bins of a "day", "week", "month" or "year".
        required: For synthesis, no cell for missing values.

    Raises:
        InvalidInput: The range is empty, or a value does not fit its rule.

    Example:
        >>> import dpfy
        >>> visit = dpfy.Date("visit", "2020-01-01", "2020-12-31")
        >>> visit.first, visit.every
        ('2020-01-01', 'month')
    """

    first: str | date
    last: str | date
    _: KW_ONLY
    fill: str | date | None = None
    parts: tuple[str, ...] = ()
    every: str = "month"

    kind = "date"
    scale = "symmetric"
    transform = "none"
    low = 0.0

    def __post_init__(self) -> None:
        rule = 'must be two dates, ["2020-01-01", "2023-12-31"]'
        for key in ("first", "last"):
            object.__setattr__(self, key, _date(self.key("range"), getattr(self, key), rule))
        if self.fill is not None:
            fill = _date(self.key("fill"), self.fill, "must be a date, written 2020-01-31")
            object.__setattr__(self, "fill", fill)
        super().__post_init__()
        if not self.first < self.last:  # type: ignore[operator]
            raise InvalidInput(
                self.key("range"), [str(self.first), str(self.last)], "must end after it begins"
            )
        if self.fill is not None and not self.first <= self.fill <= self.last:  # type: ignore[operator]
            raise InvalidInput(
                self.key("fill"), str(self.fill), f"must lie from {self.first} to {self.last}"
            )
        check.one_of(self.key("every"), self.every, EVERY)
        parts = (self.parts,) if isinstance(self.parts, str) else tuple(self.parts)
        for part in parts:
            check.one_of(self.key("parts"), part, PARTS)
        object.__setattr__(self, "parts", tuple(part for part in PARTS if part in parts))

    def __str__(self) -> str:
        return f"{self.name} in days after {self.first}, until {self.last}{_filling(self)}"

    @property
    def high(self) -> float:  # type: ignore[override]
        """Days from the first date to the last."""
        return self._day(self.last)

    @property
    def filled(self) -> float | None:
        """See `RangedColumn`."""
        return None if self.fill is None else self._day(self.fill)

    @property
    def start(self) -> int:
        """The first date, in days since 1970."""
        return date.fromisoformat(str(self.first)).toordinal() - EPOCH

    def _day(self, written: str | date) -> float:
        return float(date.fromisoformat(str(written)).toordinal() - EPOCH - self.start)

    def parse(self, cells: Any, missing: Sequence[str]) -> Floats:
        """Days after the first date; NaN where there is no date."""
        return reading.days(cells, missing) - self.start

    @property
    def width(self) -> int:
        """See `Column`."""
        return sum(part.width for part in self.part_columns()) or 1

    def part_columns(self) -> tuple[Number | Category, ...]:
        """The columns that its parts are."""
        years = (int(str(self.first)[:4]), int(str(self.last)[:4]))
        made: dict[str, Number | Category] = {
            "year": Number(f"{self.name}_year", years[0], max(years[1], years[0] + 1)),
            "month": Category(f"{self.name}_month", MONTHS),
            "weekday": Category(f"{self.name}_weekday", WEEKDAYS),
        }
        return tuple(made[part] for part in self.parts)

    def part(self, name: str, settled: Floats) -> Any:
        """A part of dates that were read: years as numbers (NaN where one is missing), others as
        places in their lists (their length where one is missing).
        """
        there = ~np.isnan(settled)
        day = np.where(there, settled, 0.0).astype(np.int64) + self.start
        if name == "weekday":
            return np.where(there, (day + 3) % 7, 7)  # 1970 began on a Thursday
        months = day.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
        if name == "month":
            return np.where(there, months % 12, 12)
        return np.where(there, 1970.0 + months // 12, np.nan)


class WordColumn(Column):
    """One of a public list of words."""

    fill: str | None
    ordered: bool
    listed: ClassVar[str]

    @property
    def words(self) -> tuple[str, ...]:
        """The public list."""
        held: tuple[str, ...] = getattr(self, self.listed)
        return held

    @property
    def width(self) -> int:
        """See `Column`: one for each word, or for each bucket."""
        return getattr(self, "buckets", None) or len(self.words)

    @property
    def cells(self) -> tuple[str, ...]:
        """What a cell can count as: the listed words, then all others."""
        return (*self.words, OTHER)

    def _check(self, least: int) -> None:
        super().__post_init__()
        field = self.listed
        listed = word_list(self.key(field), self.words, least=least)
        object.__setattr__(self, field, listed)
        object.__setattr__(self, "_place", {text: k for k, text in enumerate(listed)})
        if OTHER in listed:
            rule = "must not be listed: it is the category of all that is not"
            raise InvalidInput(self.key(field), OTHER, rule)
        if not isinstance(self.ordered, bool):
            raise InvalidInput(self.key("ordered"), self.ordered, "must be true or false")
        if self.fill is not None:
            check.one_of(self.key("fill"), self.fill, (*listed, FILL_OTHER))

    def __str__(self) -> str:
        order = "in this order " if self.ordered else ""
        return f"{self.name}: {order}{', '.join(self.words)}{_filling(self)}"

    def parse(self, cells: Any, missing: Sequence[str]) -> Codes:
        """The place of each cell's word in the list: its length for a word that is not listed, -1
        where there is none. A word that is listed is one, also where a missing cell is so written.
        """
        words, places = reading.distinct(cells)
        place, other = self.__dict__["_place"], len(self.words)
        found = [place.get(text, -1 if text == "" or text in missing else other) for text in words]
        return np.array([*found, -1], np.int64)[places]

    def absent(self, found: Codes) -> Mask:
        """See `Column`."""
        return np.asarray(found < 0)

    def fits(self, found: Codes) -> Mask:
        """See `Column`."""
        return np.asarray((found >= 0) & (found < len(self.words)))

    def settle(self, found: Codes) -> Codes:
        """Places in `cells`."""
        other = len(self.words)
        place: int = other if self.fill is None else self.__dict__["_place"].get(self.fill, other)
        return np.where(found < 0, place, found)


@dataclass(frozen=True)
class Category(WordColumn):
    """One of a public list of words; any other word is "other".

    Args:
        name: The column.
        categories: The list.
        fill: What a missing cell counts as: a listed word, or "other".
        drop: Leave out the rows where it is missing.
        buckets: For learners, read a long list as so many hashed features.
        ordered: For synthesis, the order of the list means something.
        required: For synthesis, no cell for missing values.

    Raises:
        InvalidInput: The list is empty or names a word twice, or a value does not fit its rule.

    Example:
        >>> import dpfy
        >>> dpfy.Category("job", ["clerk", "nurse"]).words[:2]
        ('clerk', 'nurse')
    """

    categories: tuple[str, ...]
    _: KW_ONLY
    fill: str | None = None
    buckets: int | None = None
    ordered: bool = False

    kind, listed = "category", "categories"

    def __post_init__(self) -> None:
        self._check(1)
        if self.buckets is not None:
            check.integer(self.key("buckets"), self.buckets, most=MOST_BUCKETS)


@dataclass(frozen=True)
class Label(WordColumn):
    """What is to be predicted: one of a public list of classes.

    Args:
        name: The column.
        classes: The list. The first class is number 0.
        fill: The class of a row without a listed one. Without it, learners leave such rows out.
        drop: Leave out the rows where it is missing.
        ordered: For synthesis, the order of the list means something.
        required: For synthesis, no cell for missing values.

    Raises:
        InvalidInput: There are fewer than two classes, or a value does not fit its rule.

    Example:
        >>> import dpfy
        >>> dpfy.Label("income", ["low", "high"]).classes
        ('low', 'high')
    """

    classes: tuple[str, ...]
    _: KW_ONLY
    fill: str | None = None
    ordered: bool = False

    kind, listed = "label", "classes"

    def __post_init__(self) -> None:
        self._check(2)
        if self.fill is not None:
            check.one_of(self.key("fill"), self.fill, self.classes)

    def settle(self, found: Codes) -> Codes:
        """Places of classes; their number where there is none."""
        return super().settle(np.where(self.fits(found), found, -1))


@dataclass(frozen=True)
class OpenColumn(Column):
    """A column about which nothing is public, `ignore = true` in a file.

    No learner reads it. A query may ask for its frequent words, or for the range of its numbers.

    Args:
        name: The column.
        drop: Leave out the rows where it is missing.
        required: For synthesis, no cell for missing values.

    Example:
        >>> from dpfy.tables import OpenColumn, Schema
        >>> Schema.of([OpenColumn("note")]).ignored
        frozenset({'note'})
    """

    kind = "ignored"

    def __str__(self) -> str:
        return f"{self.name}: nothing is public"


@dataclass(frozen=True)
class Text(OpenColumn):
    """Free text, or words of which no list is public.

    Args:
        name: The column.
        buckets: For learners, so many hashed features; without them they do not read it.
        drop: Leave out the rows where it is missing.

    Raises:
        InvalidInput: `buckets` is not a positive whole number.

    Example:
        >>> import dpfy
        >>> dpfy.Text("note", buckets=64).buckets
        64
    """

    _: KW_ONLY
    buckets: int | None = None

    kind = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buckets is not None:
            check.integer(self.key("buckets"), self.buckets, most=MOST_BUCKETS)

    def __str__(self) -> str:
        return f"{self.name}: text" + (f" in {self.buckets} buckets" if self.buckets else "")


def word_list(name: str, value: object, least: int = 0) -> tuple[str, ...]:
    """A list of different words."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise InvalidInput(name, value, "must be a list of words in quotes")
    if len(set(value)) != len(value):
        raise InvalidInput(name, value, "must not name one word twice")
    if len(value) < least:
        raise InvalidInput(name, value, f"must name at least {least}")
    return tuple(value)


def _filling(column: Any) -> str:
    if column.drop:
        return ", rows left out where it is missing"
    return "" if column.fill is None else f", missing counts as {column.fill}"


def _date(field: str, value: object, rule: str) -> str:
    try:
        return date.fromisoformat(str(value)[:10]).isoformat()
    except ValueError:
        raise InvalidInput(field, str(value), rule) from None
