"""Whose data is protected: the unit of privacy, and what makes two data sets neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
        return cls(check.one_of("adjacency", str(getattr(value, "value", value)), [a.value for a in cls]))


@dataclass(frozen=True)
class Unit:
    """What one neighbour differs in: an example, a user, a label. `name` completes the phrase "one ...".

    `most_records` bounds how many records one unit may own; an example is a unit of size one.
    """

    name: str = "example"
    most_records: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable() or len(self.name) > MOST_NAME:
            raise InvalidInput("unit.name", self.name, f"must be 1 to {MOST_NAME} printable characters: example, user, label")
        check.integer("unit.most_records", self.most_records)


EXAMPLE = Unit()
