"""What is searched: ranges and lists of settings, by name, all of it public. Draws are independent
of each other and of the data.

In a file or on a command line a range is a word: ``0.05..5 log`` (evenly in the logarithm),
``0..0.5`` (evenly), ``1..8 whole`` (whole numbers); a list is a TOML list: ``[256, 512, 1024]``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"\s*({NUMBER})\s*\.\.\s*({NUMBER})\s*(log|whole)?\s*")
FORMS = "must be a range as in '0.05..5 log', '0..0.5' or '1..8 whole', or a list as in [256, 512]"
DIGITS = 6
"""Significant digits of a number that is drawn: what is printed is what was used."""
MOST_CHOICES, MOST_NAMES = 1000, 64

Settings = dict[str, Any]


@dataclass(frozen=True)
class FloatRange:
    """Numbers from `low` to `high`, evenly, or evenly in the logarithm."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        low, high = check.real("low", self.low), check.real("high", self.high)
        if not low < high:
            raise InvalidInput("range", (low, high), "low must be less than high")
        if self.log and low <= 0:
            raise InvalidInput(
                "range", (low, high), "must begin above 0 to be even in the logarithm"
            )

    def at(self, share: float) -> float:
        """The number below which lie `share` of the draws, rounded to what is printed and kept
        inside of the range.
        """
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        drawn = low + share * (high - low)
        return float(
            f"{min(max(math.exp(drawn) if self.log else drawn, self.low), self.high):.{DIGITS}g}"
        )

    def share(self, value: float) -> float:
        """Where a number lies in the range, from 0 to 1."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def draw(self, rng: np.random.Generator) -> float:
        """A number of the range."""
        return self.at(float(rng.random()))

    def ends(self) -> tuple[Any, ...]:
        """Values that stand for all of them where a rule is tried."""
        return (self.at(0.0), self.at(0.5), self.at(1.0))

    @property
    def words(self) -> str:
        """As it is written in a file."""
        return f"{self.low:g}..{self.high:g}" + (" log" if self.log else "")


@dataclass(frozen=True)
class IntegerRange:
    """Whole numbers from `low` to `high`, both included, all equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check.integer("low", self.low, least=-check.MOST)
        if check.integer("high", self.high, least=-check.MOST) <= self.low:
            raise InvalidInput("range", (self.low, self.high), "low must be less than high")

    def share(self, value: float) -> float:
        """Where a number lies in the range, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def draw(self, rng: np.random.Generator) -> int:
        """A number of the range."""
        return int(rng.integers(self.low, self.high, endpoint=True))

    def ends(self) -> tuple[Any, ...]:
        """All of them where they are few, else the ends and one between."""
        few = self.high - self.low < MOST_CHOICES
        return (
            tuple(range(self.low, self.high + 1))
            if few
            else (self.low, (self.low + self.high) // 2, self.high)
        )

    @property
    def words(self) -> str:
        """As it is written in a file."""
        return f"{self.low}..{self.high} whole"


@dataclass(frozen=True)
class ListedValues:
    """A list of values, all equally likely."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "values", tuple(tuple(v) if isinstance(v, list) else v for v in self.values)
        )
        if not 1 <= len(self.values) <= MOST_CHOICES:
            raise InvalidInput("choices", len(self.values), f"must be 1 to {MOST_CHOICES}")
        if any(a == b for a, b in itertools.combinations(self.values, 2)):
            raise InvalidInput("choices", self.values, "must differ from each other")
        for value in self.values:
            if not isinstance(value, str | int | float | bool | tuple) or (
                isinstance(value, float) and not math.isfinite(value)
            ):
                raise InvalidInput(
                    "choices", value, "must be numbers, texts, true or false, or lists of them"
                )

    def share(self, value: Any) -> float:
        """Where a value stands in the list, from 0 to 1."""
        return self.values.index(value) / max(1, len(self.values) - 1)

    def draw(self, rng: np.random.Generator) -> Any:
        """One of the values."""
        return self.values[int(rng.integers(len(self.values)))]

    def ends(self) -> tuple[Any, ...]:
        """All of them."""
        return self.values

    @property
    def words(self) -> str:
        """As it is written in a file."""
        from dpfy.core.settings import toml

        return toml(self.values)


Dimension = FloatRange | IntegerRange | ListedValues


def log_range(low: float, high: float) -> FloatRange:
    """Numbers that are even in the logarithm: rates, clip norms."""
    return FloatRange(low, high, log=True)


def choice(*values: Any) -> ListedValues:
    """One of these values."""
    return ListedValues(values)


@dataclass(frozen=True)
class Space:
    """What is searched, by name.

    Guarantees: a draw is a function of the generator that it is given and of nothing else; draws of
    one space are independent and alike.
    """

    dimensions: Mapping[str, Dimension]

    def __post_init__(self) -> None:
        if not 1 <= len(self.dimensions) <= MOST_NAMES:
            raise InvalidInput(
                "space", list(self.dimensions), f"must name 1 to {MOST_NAMES} settings to search"
            )
        for name, dimension in self.dimensions.items():
            check.one_line("space", name, 80)
            if not isinstance(dimension, FloatRange | IntegerRange | ListedValues):
                raise InvalidInput(f"space.{name}", dimension, FORMS)
        object.__setattr__(self, "dimensions", dict(self.dimensions))

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> Space:
        """The space of words and lists, as a file or a command line gives them."""
        return cls({name: dimension(name, given) for name, given in words.items()})

    def draw(self, rng: np.random.Generator) -> Settings:
        """One setting of everything."""
        return {name: dimension.draw(rng) for name, dimension in self.dimensions.items()}

    def corners(self, names: Iterable[str] | None = None) -> Iterator[Settings]:
        """Every combination of the values that stand for the dimensions called `names`, all others
        at their first.
        """
        chosen = set(self.dimensions if names is None else names)
        rows = [d.ends() if name in chosen else d.ends()[:1] for name, d in self.dimensions.items()]
        return (
            dict(zip(self.dimensions, values, strict=True)) for values in itertools.product(*rows)
        )

    def one_by_one(self) -> Iterator[Settings]:
        """Every value that stands for a dimension, with all others at their first."""
        first = {name: d.ends()[0] for name, d in self.dimensions.items()}
        for name, d in self.dimensions.items():
            yield from (first | {name: value} for value in d.ends())

    def at(self, settings: Mapping[str, Any]) -> list[float]:
        """Where settings lie in each dimension, from 0 to 1."""
        return [
            round(dimension.share(settings[name]), 6) for name, dimension in self.dimensions.items()
        ]

    def axes(self) -> list[dict[str, str]]:
        """Each dimension with its lower and its upper end, as words."""
        ends = {name: d.ends() for name, d in self.dimensions.items()}
        return [
            {"name": name, "low": _shown(found[0]), "high": _shown(found[-1])}
            for name, found in ends.items()
        ]

    def words(self) -> dict[str, str]:
        """The space as it is written in a file."""
        return {name: dimension.words for name, dimension in self.dimensions.items()}


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def dimension(name: str, given: Any) -> Dimension:
    """The range or list that a word, a TOML list or a dimension is."""
    if isinstance(given, FloatRange | IntegerRange | ListedValues):
        return given
    if isinstance(given, str):
        found = RANGE.fullmatch(given)
        if found is not None:
            return _range(name, *found.groups())
        try:
            given = storage.parsed_toml(f"search.{name}", given, f"value = {given}")["value"]
        except (InvalidInput, KeyError):
            raise InvalidInput(f"search.{name}", given, FORMS) from None
    if not isinstance(given, list | tuple):
        raise InvalidInput(f"search.{name}", given, FORMS)
    return _named(name, lambda: ListedValues(tuple(given)))


def _range(name: str, low: str, high: str, kind: str | None) -> Dimension:
    if kind != "whole":
        return _named(name, lambda: FloatRange(float(low), float(high), kind == "log"))
    if (
        not (low.lstrip("+-").isdecimal() and high.lstrip("+-").isdecimal())
        or max(len(low), len(high)) > 18
    ):
        raise InvalidInput(f"search.{name}", f"{low}..{high} whole", "must have whole ends")
    return _named(name, lambda: IntegerRange(int(low), int(high)))


def _named(name: str, make: Any) -> Any:
    try:
        return make()
    except InvalidInput as problem:
        raise InvalidInput(f"search.{name}", problem.value, problem.rule) from None
