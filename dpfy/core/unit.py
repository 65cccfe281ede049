"""Whose data is protected: the unit of privacy, and what makes two data sets neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from dpfy.core import check
from dpfy.core.errors import InvalidInput

MOST_NAME = 80


class Adjacency(str, Enum):
    """Which change of the data set the guarantee hides."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"

    @property
    def meaning(self) -> str:
        """The change in words, for reports."""
        return {
            Adjacency.ADD_OR_REMOVE_ONE: "the data of one unit is added or removed",
            Adjacency.REPLACE_ONE: "the data of one unit is replaced by any other data",
            Adjacency.ZERO_OUT: "the contribution of one unit is replaced by zero",
        }[self]

    @classmethod
    def parse(cls, value: str | Adjacency) -> Adjacency:
        """The adjacency called `value`; an unknown name is an error that lists the known ones."""
        return cls(
            check.one_of("adjacency", str(getattr(value, "value", value)), [a.value for a in cls])
        )


PROTECTS = {
    "record": "Everything in the unit's records is protected, features and labels.",
    "label": "Only the labels are protected; the features are treated as public.",
    "prediction": "Only what is predicted is protected; the model itself must not be released.",
    "user": "Everything that one user contributed is protected, in all of their records together.",
    "window": "What one user contributed within one window of time is protected; their other "
    "records are other units.",
}
"""What of a unit's data a guarantee may cover."""


@dataclass(frozen=True)
class Unit:
    """What one neighbour differs in: an example, a user, a label. `name` completes the phrase "one
    ...".

    `most_records` bounds how many records one unit may own; an example is a unit of size one.
    `protects` says what of it is covered, whatever it is called (:data:`PROTECTS`); `tokens` is the
    length of a unit of text.
    """

    name: str = "example"
    most_records: int = 1
    protects: str = "record"
    tokens: int | None = None

    LATER: ClassVar[tuple[str, ...]] = ("protects", "tokens")

    def __post_init__(self) -> None:
        if (
            not isinstance(self.name, str)
            or not self.name.strip()
            or not self.name.isprintable()
            or len(self.name) > MOST_NAME
        ):
            raise InvalidInput(
                "unit.name",
                self.name,
                f"must be 1 to {MOST_NAME} printable characters: example, user, label",
            )
        check.integer("unit.most_records", self.most_records)
        check.one_of("unit.protects", self.protects, PROTECTS)
        if self.tokens is not None:
            check.integer("unit.tokens", self.tokens)

    def to_json(self) -> dict[str, Any]:
        """Its fields; those that came later are left out while they say nothing."""
        later: dict[str, Any] = {"protects": self.protects} if self.protects != "record" else {}
        later |= {"tokens": self.tokens} if self.tokens is not None else {}
        return {"name": self.name, "most_records": self.most_records} | later

    @property
    def whole(self) -> bool:
        """Whether all of the unit's data is protected, not its label or a prediction alone."""
        return self.protects not in ("label", "prediction")


EXAMPLE = Unit()

WINDOWS = ("day", "week", "month", "year")
"""Windows of time, by the calendar in UTC; a week begins on Monday."""


def user_unit(most_records: int, window: str | None = None) -> Unit:
    """A user with at most `most_records` records, or what a user contributed within one `window` of
    time.
    """
    if window is None:
        return Unit("user", most_records)
    return Unit(f"user's {check.one_of('window', window, WINDOWS)}", most_records, "window")
