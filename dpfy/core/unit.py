"""Whose data is protected: the unit of privacy, and what makes two data sets neighbours.

How often, and with which randomness, one unit may take part in training. Samplers promise it;
accounting and noise read it.

Every pattern is frozen data. A sampler that cannot keep the promise must not hand out the pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Union

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported

MOST_NAME = 80


class Adjacency(str, Enum):
    """Which change of the data set the guarantee hides.

    Args:
        value: The name of an adjacency: "add-or-remove-one", "replace-one" or "zero-out".

    Example:
        >>> import dpfy
        >>> dpfy.Adjacency("replace-one").meaning
        'the data of one unit is replaced by any other data'
    """

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
    "content": "What the records of one person hold is protected, also of records that they own "
    "with others. Who owns which record is not protected.",
}
"""What of a unit's data a guarantee may cover."""


@dataclass(frozen=True)
class Unit:
    """What one neighbour differs in: an example, a person, a label.

    Args:
        name: Completes the phrase "one ...".
        most_records: How many records one unit may own. An example is a unit of size one.
        protects: What of a unit is covered, whatever it is called: a key of `PROTECTS`.
        tokens: The length of a unit of text, in tokens.

    Raises:
        InvalidInput: A value does not fit its rule.

    Example:
        >>> import dpfy
        >>> user = dpfy.Unit("user", most_records=8, protects="user")
        >>> user.to_json()["most_records"]
        8
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
TOKEN_WINDOW = "token window"
"""The name of a unit of text that is only its number of tokens."""

WINDOWS = ("day", "week", "month", "year")
"""Windows of time, by the calendar in UTC; a week begins on Monday."""


def user_unit(most_records: int, window: str | None = None, shared: bool = False) -> Unit:
    """A user with at most `most_records` records, or what a user contributed within one `window` of
    time, or with `shared` what the records hold that a user owns, alone or with others.
    """
    if window is None:
        return Unit("user", most_records, "content" if shared else "record")
    return Unit(f"user's {check.one_of('window', window, WINDOWS)}", most_records, "window")


@dataclass(frozen=True)
class Person:
    """A person as the unit of privacy of a table: the column that says whose a row is.

        dpfy.Person("patient", at_most=5)
        dpfy.Person("sender,receiver", at_most=5)          # a row belongs to both

    Args:
        column: The column with the person's identifier. It is never a feature. Where a row belongs
            to several persons: the names of their columns, with commas between them.
        at_most: The most rows of one person that a release uses; further rows are left out.

    Raises:
        InvalidInput: `at_most` is not a positive whole number, or the column has no name.

    Guarantees: with several columns, what a person's rows hold is protected (zero-out), and not who
    owns which row: see `dpfy.tables.shared`.

    Example:
        >>> import dpfy
        >>> dpfy.Person("patient", at_most=5).unit.most_records
        5
        >>> dpfy.Person("sender,receiver", at_most=5).unit.protects
        'content'
    """

    column: str
    at_most: int

    def __post_init__(self) -> None:
        owner_columns("person.column", self.column)
        check.integer("person.at_most", self.at_most, most=check.RECORDS)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that name the owners of a row."""
        return owner_columns("person.column", self.column)

    @property
    def unit(self) -> Unit:
        """The unit that a guarantee for persons names."""
        return user_unit(self.at_most, shared=len(self.columns) > 1)


def owner_columns(name: str, text: object) -> tuple[str, ...]:
    """The columns that name the owners of a record, out of their names with commas between them."""
    found = tuple(part.strip() for part in text.split(",")) if isinstance(text, str) else ()
    if not all(found) or not found or len(set(found)) < len(found):
        rule = 'must be the name of a column, or different names: "sender,receiver"'
        raise InvalidInput(name, text, rule)
    return found


def check_content(unit: Unit, adjacency: Adjacency) -> None:
    """Refuse a promise about owners where the unit protects only what records hold."""
    if unit.protects == "content" and adjacency is not Adjacency.ZERO_OUT:
        raise Unsupported(
            f"records with several owners under {adjacency.value}",
            "state zero-out: what a person's records hold is protected, not who owns them",
        )


def single_owner(what: str, text: str | None) -> str | None:
    """The one column of owners, for what cannot use records with several.

    Raises:
        Unsupported: There are several.
    """
    if text is not None and "," in text:
        raise Unsupported(
            f"{what} of records with several owners ({text})",
            "train a network (dpfy.fit, dpfy train) or ask statistics (dpfy.query)",
        )
    return text


@dataclass(frozen=True)
class Poisson:
    """At every step each unit takes part independently with probability `rate`; rate 1 is full
    batch.
    """

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("participation.rate", self.rate))

    @property
    def words(self) -> str:
        """How units take part in steps."""
        if self.rate == 1:
            return "every unit takes part in every step (full batch)"
        return (
            f"Poisson sampling: at every step each unit takes part independently with probability "
            f"{self.rate:g}"
        )


@dataclass(frozen=True)
class WithoutReplacement:
    """Every step takes a fresh uniform subset of exactly `batch_size` of `records` units. Their
    number is public and does not change.
    """

    batch_size: int
    records: int

    def __post_init__(self) -> None:
        check.integer("participation.records", self.records, most=check.RECORDS)
        check.integer("participation.batch_size", self.batch_size, most=self.records)

    @property
    def words(self) -> str:
        """How units take part in steps."""
        return (
            f"sampling without replacement: every step takes exactly {self.batch_size:,} of "
            f"{self.records:,} units, chosen again"
        )


@dataclass(frozen=True)
class SinglePass:
    """Each unit takes part at most once, at a step that nobody needs to hide."""

    @property
    def words(self) -> str:
        """How units take part in steps."""
        return "a single pass: each unit takes part at most once"


@dataclass(frozen=True)
class FixedOrder:
    """The same order in every epoch: a unit takes part at steps s, s + steps_per_epoch, ..., at
    most `epochs` times.
    """

    steps_per_epoch: int
    epochs: int

    def __post_init__(self) -> None:
        check.integer("participation.steps_per_epoch", self.steps_per_epoch)
        check.integer("participation.epochs", self.epochs)

    @property
    def words(self) -> str:
        """How units take part in steps."""
        return (
            f"a fixed order: each unit takes part every {self.steps_per_epoch} steps, at most "
            f"{self.epochs} times"
        )


@dataclass(frozen=True)
class Reshuffled:
    """Once in every epoch, in a place that may differ from epoch to epoch: two participations may
    be one step apart.
    """

    steps_per_epoch: int
    epochs: int

    def __post_init__(self) -> None:
        check.integer("participation.steps_per_epoch", self.steps_per_epoch)
        check.integer("participation.epochs", self.epochs)

    @property
    def words(self) -> str:
        """How units take part in steps."""
        return (
            f"shuffled epochs: each unit takes part once in {self.steps_per_epoch} steps, "
            f"{self.epochs} times"
        )


@dataclass(frozen=True)
class Separated:
    """Two participations of a unit are at least `separation` steps apart, and there are at most
    `most` of them.
    """

    separation: int
    most: int

    def __post_init__(self) -> None:
        check.integer("participation.separation", self.separation)
        check.integer("participation.most", self.most)

    @property
    def words(self) -> str:
        """How units take part in steps."""
        return f"participations at least {self.separation} steps apart, at most {self.most} of them"


@dataclass(frozen=True)
class CyclicPoisson:
    """Units live in `cycle` fixed blocks; step t takes each unit of block t mod `cycle`
    independently with probability `rate`.
    """

    rate: float
    cycle: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("participation.rate", self.rate))
        check.integer("participation.cycle", self.cycle)

    @property
    def words(self) -> str:
        """How units take part in steps."""
        return (
            f"cyclic Poisson sampling: in its turn, every {self.cycle} steps, each unit takes part "
            f"with probability {self.rate:g}"
        )


@dataclass(frozen=True)
class SecretBins:
    """Each unit falls once, secretly and uniformly, into one of `bins` bins; bin s is the batch of
    steps s, s + bins, ... .
    """

    bins: int
    epochs: int

    def __post_init__(self) -> None:
        check.integer("participation.bins", self.bins)
        check.integer("participation.epochs", self.epochs)

    @property
    def words(self) -> str:
        """How units take part in steps."""
        return (
            f"balls in bins: each unit falls secretly into one of {self.bins} batches, each used "
            f"{self.epochs} times"
        )


@dataclass(frozen=True)
class RandomAllocation:
    """In every epoch each unit takes part in exactly `times` of `steps_per_epoch` steps, chosen
    uniformly and in secret, again for each epoch.
    """

    steps_per_epoch: int
    epochs: int
    times: int = 1

    def __post_init__(self) -> None:
        check.integer("participation.steps_per_epoch", self.steps_per_epoch)
        check.integer("participation.epochs", self.epochs)
        check.integer("participation.times", self.times, most=self.steps_per_epoch)

    @property
    def words(self) -> str:
        """How units take part in steps."""
        count = "one" if self.times == 1 else f"{self.times:,}"
        return (
            f"random allocation: in each of {self.epochs:,} epochs every unit takes part in exactly "
            f"{count} of {self.steps_per_epoch:,} steps, chosen again"
        )


Participation = Union[
    Poisson,
    WithoutReplacement,
    SinglePass,
    FixedOrder,
    Reshuffled,
    Separated,
    CyclicPoisson,
    SecretBins,
    RandomAllocation,
]
"""The union of all patterns; grows with the samplers."""


def varies(pattern: object) -> bool:
    """Whether batches have random sizes: the number of records in one is then no constant of the
    run.
    """
    return isinstance(pattern, CyclicPoisson | Separated | RandomAllocation) or (
        isinstance(pattern, Poisson) and pattern.rate < 1
    )
