"""What a row adds, as an expression over its own cells: one description for every engine.

An expression is a number, a whole number or a truth value. The leaves read one cell of the row by
the policy of its column. Arithmetic is that of IEEE doubles, one operation at a time, so that every
engine finds the same bits. A missing number is NaN here and NULL in SQL; a comparison with it is
false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from dpfy.tables.columns import RangedColumn, WordColumn
from dpfy.tables.schema import Schema

LEAVES = frozenset({"number", "code", "part", "unfit", "absent", "text", "raw", "kept"})
Given = Union["Expression", float, int, bool]


@dataclass(frozen=True)
class Expression:
    """An operation and its parts: expressions, or public values."""

    op: str
    parts: tuple[Any, ...] = ()

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:  # once: parts are shared, and lists of values are long
            found = hash((self.op, self.parts))
            object.__setattr__(self, "_hash", found)
        return int(found)

    def __add__(self, other: Given) -> Expression:
        return Expression("+", (self, of(other)))

    def __sub__(self, other: Given) -> Expression:
        return Expression("-", (self, of(other)))

    def __mul__(self, other: Given) -> Expression:
        return Expression("*", (self, of(other)))

    def __truediv__(self, other: Given) -> Expression:
        return Expression("/", (self, of(other)))

    def __lt__(self, other: Given) -> Expression:
        return Expression("<", (self, of(other)))

    def __le__(self, other: Given) -> Expression:
        return Expression("<=", (self, of(other)))

    def __gt__(self, other: Given) -> Expression:
        return Expression(">", (self, of(other)))

    def __ge__(self, other: Given) -> Expression:
        return Expression(">=", (self, of(other)))

    def __and__(self, other: Expression) -> Expression:
        return (
            other if self == TRUE else self if other == TRUE else Expression("and", (self, other))
        )

    def __or__(self, other: Expression) -> Expression:
        return Expression("or", (self, other))

    def __invert__(self) -> Expression:
        return Expression("not", (self,))

    def equals(self, other: Given) -> Expression:
        """Whether both are the same; false where one is missing."""
        return Expression("=", (self, of(other)))

    def among(self, values: Sequence[float]) -> Expression:
        """Whether it is one of the values."""
        return Expression("in", (self, tuple(values)))

    def missing(self) -> Expression:
        """Whether a number is missing."""
        return Expression("missing", (self,))

    def filled(self, value: float) -> Expression:
        """The number, or `value` where it is missing."""
        return choose(self.missing(), value, self)

    def clip(self, low: float, high: float) -> Expression:
        """The number moved into a range; missing where it is missing."""
        return Expression("clip", (self, float(low), float(high)))

    def floor(self) -> Expression:
        """The largest whole number that is not above it."""
        return Expression("floor", (self,))

    def whole(self) -> Expression:
        """The nearest whole number, the even one of two, as an integer. It must not be missing."""
        return Expression("whole", (self,))

    def toward_zero(self) -> Expression:
        """The number without its fraction, as an integer. It must not be missing."""
        return Expression("toward zero", (self,))

    def root(self) -> Expression:
        """The square root of a number that is not negative."""
        return Expression("root", (self,))

    def place(self, edges: Sequence[float]) -> Expression:
        """How many of the edges, which grow, are at most this number; 0 where it is missing."""
        return Expression("place", (self, tuple(map(float, edges))))

    def lookup(self, values: Sequence[float]) -> Expression:
        """The value at the place that this whole number says, which must be one of theirs."""
        return Expression("lookup", (self, tuple(values)))

    def leaves(self) -> Iterator[Expression]:
        """The leaves, each as often as it is there."""
        if self.op in LEAVES:
            yield self
            return
        for part in self.parts:
            if isinstance(part, Expression):
                yield from part.leaves()


def of(value: Given) -> Expression:
    """A public value as an expression."""
    return value if isinstance(value, Expression) else Expression("value", (value,))


TRUE = of(True)


def number(name: str) -> Expression:
    """A column of numbers or dates, in its range."""
    return Expression("number", (name,))


def code(name: str) -> Expression:
    """A column of words, as the place of each in its cells."""
    return Expression("code", (name,))


def part(name: str, which: str) -> Expression:
    """The year, the month or the weekday of a date; see `Date.part`."""
    return Expression("part", (name, which))


def unfit(name: str) -> Expression:
    """Whether a cell is not what its column may hold."""
    return Expression("unfit", (name,))


def absent(name: str) -> Expression:
    """Whether a cell is missing."""
    return Expression("absent", (name,))


def text(name: str, most: int) -> Expression:
    """The first characters of a cell as it is written; None where it is missing."""
    return Expression("text", (name, most))


def raw(name: str) -> Expression:
    """A cell as a number without a range."""
    return Expression("raw", (name,))


def kept(name: str) -> Expression:
    """A column of rows that an engine keeps; see `dpfy.engines.aggregates.KeptRows`."""
    return Expression("kept", (name,))


def choose(condition: Expression, yes: Given, no: Given) -> Expression:
    """One value where the condition is true, the other elsewhere."""
    return Expression("choose", (condition, of(yes), of(no)))


def word_place(found: Expression, words: Sequence[str]) -> Expression:
    """The place of a text among released words; their number for any other."""
    return Expression("word place", (found, tuple(words)))


def counted_where(place: Expression, condition: Expression) -> Expression:
    """The place where the condition is true, -1 elsewhere."""
    return place if condition == TRUE else choose(condition, place, -1)


def bounds(asked: Expression, schema: Schema) -> tuple[float, float] | None:
    """The least and the largest value that an expression can have, where it is not missing; None
    where nobody can tell. Rounding is monotone, so the ends are those of the very same operations.
    """
    op, parts = asked.op, asked.parts
    if op == "value":
        return parts[0], parts[0]
    if op in ("number", "code"):
        column = schema.named.get(parts[0])
        if op == "code":
            return (0, len(column.words)) if isinstance(column, WordColumn) else None
        return (column.low, column.high) if isinstance(column, RangedColumn) else None
    if op in ("place", "word place"):
        return 0, len(parts[1])
    if op == "lookup":
        return min(parts[1]), max(parts[1])
    if op == "choose":
        held = [bounds(part, schema) for part in parts[1:]]
    elif op in ("+", "-", "*", "/", "clip", "whole", "floor"):
        held = [bounds(part, schema) for part in parts if isinstance(part, Expression)]
    else:
        return None
    ends = [end for part in held if part is not None for end in part]
    if len(ends) < 2 * len(held):
        return parts[1:] if op == "clip" else None  # type: ignore[return-value]
    if op == "clip":
        return min(max(min(ends), parts[1]), parts[2]), max(min(max(ends), parts[2]), parts[1])
    if op in ("choose", "whole", "floor"):
        if not all(map(math.isfinite, ends)):
            return None
        moved = (
            ends if op == "choose" else [round(e) if op == "whole" else math.floor(e) for e in ends]
        )
        return min(moved), max(moved)
    (a, b), (c, d) = held  # type: ignore[misc]
    if op == "/" and c <= 0 <= d:
        return None
    pairs = [(a, c), (b, d)] if op == "+" else [(a, d), (b, c)]
    if op in ("*", "/"):
        pairs = [(x, y) for x in (a, b) for y in (c, d)]
    found = [_computed(op, *pair) for pair in pairs]
    return (min(found), max(found)) if all(map(math.isfinite, found)) else None


def within(asked: Expression, schema: Schema) -> bool:
    """Whether a clip changes nothing."""
    inner = bounds(asked.parts[0], schema)
    return inner is not None and asked.parts[1] <= inner[0] and inner[1] <= asked.parts[2]


def _computed(op: str, x: float, y: float) -> float:
    if op == "+":
        return x + y
    if op == "-":
        return x - y
    return x * y if op == "*" else x / y


COMPUTED: dict[str, Callable[..., Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "=": np.equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "missing": np.isnan,
    "floor": np.floor,
    "root": np.sqrt,
    "choose": np.where,
    "clip": np.clip,
    "in": np.isin,
}


def evaluate(asked: Expression, table: Any) -> np.ndarray:
    """An expression for every row, in memory: the reference."""
    memory: dict[Expression, Any] = {}
    with np.errstate(all="ignore"):
        found = np.asarray(_evaluated(asked, table, memory))
    return np.broadcast_to(found, (table.size,)) if found.ndim == 0 else found


def _evaluated(asked: Expression, table: Any, memory: dict[Expression, Any]) -> Any:
    if asked in memory:
        return memory[asked]
    parts = [_evaluated(p, table, memory) if isinstance(p, Expression) else p for p in asked.parts]
    memory[asked] = found = _one(asked.op, parts, table)
    return found


def _one(op: str, parts: list[Any], table: Any) -> Any:
    if op in COMPUTED:
        return COMPUTED[op](*parts)
    if op == "value":
        return np.asarray(parts[0])
    if op == "whole":
        return np.rint(parts[0]).astype(np.int64)
    if op == "toward zero":
        return np.trunc(parts[0]).astype(np.int64)
    if op == "place":
        found = np.searchsorted(np.array(parts[1]), parts[0], side="right")
        return np.where(np.isnan(parts[0]), 0, found)
    if op == "lookup":
        return np.array(parts[1])[parts[0]]
    if op == "word place":
        known = {word: k for k, word in enumerate(parts[1])}
        return np.array([known.get(t, len(known)) for t in parts[0].tolist()], np.int64)
    return _leaf(op, parts, table)


def _leaf(op: str, parts: list[Any], table: Any) -> Any:
    name = parts[0]
    if op == "kept":
        return table.kept(name)
    if op == "number":
        return table.numbers(name)
    if op == "code":
        return table.codes(name)
    if op == "raw":
        return table.raw(name)
    if op == "text":
        found = [None if t is None else t[: parts[1]] for t in table.texts(name)]
        return np.array([*found, None], object)[:-1]
    if op == "part":
        column: Any = table.columns[name]
        return column.part(parts[1], table.numbers(name))
    if op == "unfit":
        return table.unfit(name)
    return table.columns[name].absent(table.found(name))
