"""What cannot be: rules that hold for every record, as cells that are empty whatever the data say.

A schema lists them:

    [[constraints]]
    rule = "age >= 18"                  # a column and a value, or two columns: = != < <= > >=
    [[constraints]]
    rule = "end >= start"
    [[constraints]]
    rule = "sex = 'Female'"
    when = "pregnant = 'yes'"           # then, and only then, the rule must hold

A rule is public: it is about what can be, not about what the records hold. A cell is forbidden
where none of its values obeys the rule; a value that is missing obeys every rule.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.synthetic.columns import BinnedColumn, Codes, ListedColumn, TableColumn

Mask = NDArray[np.bool_]
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
RULE = re.compile(r"\s*(?P<left>.+?)\s*(?P<comparison><=|>=|!=|<|>|=)\s*(?P<right>.+?)\s*")
TRIES = 40
"""How often values within their bins are drawn again where they break a rule."""


@dataclass(frozen=True)
class ColumnComparison:
    """One comparison: a column with another one, or with a value; a word counts as its place.
    `columns` are their numbers.
    """

    comparison: str
    columns: tuple[int, ...]
    value: float | None = None

    def may_hold(self, held: Sequence[TableColumn]) -> Mask:
        """For every combination of cells, whether some values in them obey it; cells of missing
        values do.
        """
        low, high = zip(*(_ends(column) for column in held), strict=True)
        if self.value is not None:
            low, high = (*low, np.array([self.value])), (*high, np.array([self.value]))
        left = (low[0][:, None], high[0][:, None])
        right = (low[1][None, :], high[1][None, :])
        found = {
            "<=": left[0] <= right[1],
            "<": left[0] < right[1],
            ">=": left[1] >= right[0],
            ">": left[1] > right[0],
            "=": (left[0] <= right[1]) & (left[1] >= right[0]),
            "!=": ~((left[0] == left[1]) & (right[0] == right[1]) & (left[0] == right[0])),
        }[self.comparison]
        mask = np.ones(tuple(column.cells for column in held), bool)
        mask[tuple(slice(0, column.known) for column in held)] = (
            found[:, 0] if self.value is not None else found
        )
        return mask

    def holds(self, values: Sequence[NDArray[Any]]) -> Mask:
        """Whether values obey it."""
        right = values[1] if self.value is None else self.value
        return np.asarray(COMPARISONS[self.comparison](values[0], right))


@dataclass(frozen=True)
class Constraint:
    """A rule over the columns `clique`; where there is a condition, only where it holds."""

    text: str
    clique: tuple[int, ...]
    rule: ColumnComparison
    condition: ColumnComparison | None = None

    def allowed(self, columns: Sequence[TableColumn]) -> Mask:
        """For every combination of cells of its columns, whether it can be."""
        mask = self._spread(self.rule, columns)
        return mask if self.condition is None else mask | ~self._always(columns)

    def _spread(
        self, part: ColumnComparison, columns: Sequence[TableColumn], opposite: bool = False
    ) -> Mask:
        """The mask of one comparison over all columns of the rule."""
        made = _opposite(part) if opposite else part
        mask = made.may_hold([columns[number] for number in part.columns])
        if part.columns != tuple(sorted(part.columns)):
            mask = mask.T
        shape = [columns[number].cells if number in part.columns else 1 for number in self.clique]
        return np.broadcast_to(
            mask.reshape(shape), [columns[number].cells for number in self.clique]
        )

    def _always(self, columns: Sequence[TableColumn]) -> Mask:
        """Where the condition holds for all values of the cells."""
        assert self.condition is not None
        return ~self._spread(self.condition, columns, opposite=True)


def _opposite(part: ColumnComparison) -> ColumnComparison:
    other = {"<=": ">", ">": "<=", "<": ">=", ">=": "<", "=": "!=", "!=": "="}
    return ColumnComparison(other[part.comparison], part.columns, part.value)


def _ends(column: TableColumn) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the largest value of every cell, for words their places."""
    if isinstance(column, BinnedColumn):
        return column.ends
    places = np.arange(column.known, dtype=np.float64)
    return places, places


def parse_constraints(rules: Any, columns: Sequence[TableColumn]) -> tuple[Constraint, ...]:
    """The constraints of a schema; a rule that no combination of cells obeys is refused."""
    if not isinstance(rules, list):
        raise InvalidInput(
            "constraints", rules, "must be sections [[constraints]], each with a rule"
        )
    return tuple(
        _constraint(f"constraints.{number}", entry, columns)
        for number, entry in enumerate(rules, start=1)
    )


def _constraint(field: str, entry: Any, columns: Sequence[TableColumn]) -> Constraint:
    if not isinstance(entry, Mapping):
        raise InvalidInput(field, entry, "must be a section with a rule")
    check.known_keys(field, entry, ("rule", "when"))
    rule = _comparison(f"{field}.rule", entry.get("rule"), columns)
    condition = _comparison(f"{field}.when", entry["when"], columns) if "when" in entry else None
    clique = tuple(sorted({*rule.columns, *(condition.columns if condition else ())}))
    text = str(entry["rule"]) + (f" when {entry['when']}" if condition else "")
    made = Constraint(check.one_line(field, text), clique, rule, condition)
    if not made.allowed(columns).any():
        raise InvalidInput(field, text, "forbids every combination of values")
    return made


def _comparison(field: str, text: object, columns: Sequence[TableColumn]) -> ColumnComparison:
    found = RULE.fullmatch(text) if isinstance(text, str) else None
    names = [column.name for column in columns]
    if found is None or found["left"] not in names:
        raise InvalidInput(
            field, text, "must be a column, one of = != < <= > >=, and a value or another column"
        )
    left, right = names.index(found["left"]), found["right"]
    if right in names:
        other = names.index(right)
        if (
            type(columns[left].column) is not type(columns[other].column)
            or isinstance(columns[left], ListedColumn)
            or left == other
        ):
            raise InvalidInput(
                field, text, "must compare two different columns of numbers, or two of dates"
            )
        return ColumnComparison(found["comparison"], (left, other))
    return ColumnComparison(
        found["comparison"], (left,), _value(field, right, columns[left], found["comparison"])
    )


def _value(field: str, text: str, column: TableColumn, comparison: str) -> float:
    bare = text.strip("'\"")
    if isinstance(column, ListedColumn):
        if comparison not in ("=", "!=") and not column.ordered:
            raise InvalidInput(
                field,
                text,
                f"{column.name} has no order: compare it with = or !=, or set ordered = true",
            )
        return float(column.words.index(check.one_of(field, bare, column.words)))
    assert isinstance(column, BinnedColumn)
    value = column.column.value(bare)
    if value is None:
        raise InvalidInput(field, text, f"must be a value that {column.name} can have")
    return value


def within_bins(
    columns: Sequence[TableColumn],
    rules: Sequence[Constraint],
    codes: Codes,
    rng: np.random.Generator,
) -> list[list[str]]:
    """Values in the cells of rows [rows, columns], one list a column, that obey the rules.

    What breaks a rule is drawn again within its cells. What breaks it still, since few values in
    them obey it, becomes the ends of its cells, which do.
    """
    written: list[list[str]] = [
        column.written(codes[:, k], rng) for k, column in enumerate(columns)
    ]
    for rule in rules:
        for attempt in range(TRIES + 1):
            broken = np.flatnonzero(_broken(rule, columns, written, codes))
            if not len(broken):
                break
            for place, number in enumerate(rule.rule.columns):
                column = columns[number]
                if not isinstance(column, BinnedColumn):
                    continue
                cells = codes[broken, number]
                if attempt < TRIES:
                    fresh = column.drawn(cells, rng)
                else:
                    up = (rule.rule.comparison in (">", ">=")) == (place == 0)
                    fresh = [
                        column.shown(end) for end in column.ends[1 if up else 0][cells].tolist()
                    ]
                for row, value in zip(broken.tolist(), fresh, strict=True):
                    written[number][row] = value
    return written


def _broken(
    rule: Constraint, columns: Sequence[TableColumn], written: list[list[str]], codes: Codes
) -> Mask:
    """Rows whose values break a rule that their cells allow."""
    there = np.logical_and.reduce(
        [codes[:, number] < columns[number].known for number in rule.clique]
    )
    broken = there & ~rule.rule.holds([columns[n].values(written[n]) for n in rule.rule.columns])
    if rule.condition is not None:
        broken &= rule.condition.holds(
            [columns[n].values(written[n]) for n in rule.condition.columns]
        )
    return np.asarray(broken)
