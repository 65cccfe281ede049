"""The data set that every family takes first: where the records are, what is public about them,
whose they are, and what all releases on them together may cost.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfy.accounting.filters import RenyiFilter
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.guarantee import default_delta
from dpfy.core.ledger import Ledger
from dpfy.core.unit import EXAMPLE, Adjacency, Person, Unit
from dpfy.engines.sources import column_names
from dpfy.report import figures, spending
from dpfy.report.words import down, up
from dpfy.runs.run import Run
from dpfy.tables.columns import OpenColumn
from dpfy.tables.schema import Schema
from dpfy.tables.sources import TableFile

SHOWN = 8
"""Columns of the schema that a representation names."""


@dataclass(frozen=True)
class Budget(RenyiFilter):
    """What all releases on a data set together may cost, also where later ones are chosen by the
    results of earlier ones.

        dpfy.Budget(8, 1e-6)

    Args:
        epsilon, delta: What everything together stays within.
        approximation: The part of delta that is set aside for releases that may fail with a small
            probability, such as ``top()``; a fifth of delta where nothing is said.

    Raises:
        InvalidInput: A value is no epsilon, or no probability.

    Guarantees: those of `dpfy.accounting.filters.RenyiFilter`.

    Example:
        >>> import dpfy
        >>> budget = dpfy.Budget(8, 1e-6)
        >>> budget.epsilon, budget.delta
        (8, 1e-06)
    """

    approximation: float = -1.0

    def __post_init__(self) -> None:
        if self.approximation == -1.0:
            part = figures.new_budget(None, self.epsilon, self.delta).approximation
            object.__setattr__(self, "approximation", part)
        super().__post_init__()


@dataclass(frozen=True)
class PrivacyCost:
    """An epsilon at a delta."""

    epsilon: float
    delta: float

    def __str__(self) -> str:
        return f"epsilon {up(self.epsilon)} at delta {self.delta:g}"

    def __float__(self) -> float:
        return self.epsilon


DELTA = 1e-6
"""The delta where nothing public says how many records there are."""


@dataclass(frozen=True)
class DeltaRule:
    """The delta of a release, and where it came from."""

    value: float
    origin: str


class Dataset:
    """Private records with everything that is public about them. Every family takes one first.

        people = dpfy.Dataset("people.csv", schema="people.toml", ledger="people.jsonl",
                              budget=dpfy.Budget(8, 1e-6))

    Args:
        source: The records: a CSV or Parquet file, a pandas, Polars or Arrow table, arrays by
            column, or for `dpfy.fit` tensors and torch datasets as it takes them. For
            `dpfy.query` also a folder or a pattern of Parquet files, "warehouse.duckdb::visits",
            a DuckDB relation or a Polars LazyFrame: they are read where they are.
        schema: What is public about the columns: a TOML file, the name of a packaged schema, or
            columns (dpfy.Number, dpfy.Category, ...).
        unit: A `dpfy.Person` where a person owns several rows; else each row is one person's.
        ledger: The file that writes down what every release costs, before it reads the data.
        budget: What all releases together may cost; kept in the ledger.
        records: The number of rows, if it is public. Delta is then derived from it.
        strict: The caller declares the data clean: a cell that does not fit the schema is an error
            that names column and row.

    Raises:
        InvalidInput: An argument does not fit its rule.

    Guarantees: nothing is read from the source here, and no text that this object makes shows
    anything of it, nor how many rows it has. A release that the budget does not cover is refused
    before the source is read.

    Example:
        >>> import dpfy
        >>> people = dpfy.Dataset(
        ...     {"age": [30, 41, 58]},
        ...     schema=[dpfy.Number("age", 0, 100)],
        ...     ledger="people.jsonl",
        ...     budget=dpfy.Budget(8, 1e-6),
        ... )
        >>> answers = dpfy.query(people, "sum(age)", epsilon=1.0)
        >>> people.left().epsilon < 8
        True
    """

    def __init__(
        self,
        source: Any,
        schema: Any = None,
        *,
        unit: Person | None = None,
        ledger: str | Path | None = None,
        budget: Budget | tuple[float, float] | None = None,
        records: int | None = None,
        strict: bool = False,
    ) -> None:
        if isinstance(source, Dataset):
            raise InvalidInput("source", "a Dataset", "is one already: use it as it is")
        if source is None:
            raise InvalidInput("source", None, "must be a file, a table, arrays or tensors")
        if unit is not None and not isinstance(unit, Person):
            rule = 'must be dpfy.Person("column", at_most=5), or None where each row is a person'
            raise InvalidInput("unit", type(unit).__name__, rule)
        if ledger is not None and not isinstance(ledger, str | Path):
            rule = 'must be the path of a file, ledger="people.jsonl"'
            raise InvalidInput("ledger", type(ledger).__name__, rule)
        if records is not None:
            check.integer("records", records, most=check.RECORDS)
        if not isinstance(strict, bool):
            raise InvalidInput("strict", type(strict).__name__, "must be True or False")
        self._source, self._schema = source, _schema(schema, strict)
        self.unit, self.records = unit, records
        self.ledger = None if ledger is None else Path(ledger)
        self.budget: Any = _budget(budget, self.ledger)

    @classmethod
    def of(
        cls,
        data: Any,
        schema: Any = None,
        *,
        unit: Person | None = None,
        records: int | None = None,
    ) -> Dataset:
        """`data` as a data set: what a family does with its first argument.

        Raises:
            InvalidInput: A Dataset is given, and beside it what it says itself.
        """
        if not isinstance(data, Dataset):
            return cls(data, schema, unit=unit, records=records)
        for name, value in (("schema", schema), ("unit", unit), ("records", records)):
            if value is not None:
                rule = f"must be left out: say it once, Dataset(..., {name}=)"
                raise InvalidInput(name, type(value).__name__, rule)
        return data

    @property
    def source(self) -> Any:
        """The records as they were given: private."""
        return self._source

    @property
    def schema(self) -> Schema:
        """The public schema; an error where none was given."""
        if self._schema is None:
            rule = (
                "must be given: Dataset(..., schema=...), a TOML file (dpfy init drafts one) or a "
                "list of columns"
            )
            raise InvalidInput("schema", None, rule)
        return self._schema

    @property
    def described(self) -> bool:
        """Whether a schema was given."""
        return self._schema is not None

    @property
    def table_schema(self) -> Any:
        """The schema with every other column of the data as one that nobody reads. Of the data its
        form is looked at: the names of its columns.
        """
        schema = self.schema
        if not isinstance(schema, Schema):
            return schema
        others = [name for name in _column_names(self._source) if name not in schema.names]
        return replace(schema, columns=(*schema.columns, *map(OpenColumn, others)))

    @property
    def columns(self) -> list[str]:
        """The names of the public columns."""
        return [column.name for column in self.schema.columns]

    @property
    def width(self) -> int:
        """How many numbers a learner reads of a row: the inputs of a network."""
        return sum(column.width for column in self.schema.features)

    @property
    def privacy_unit(self) -> Unit:
        """Whose data is protected as a whole."""
        return EXAMPLE if self.unit is None else self.unit.unit

    def run(self, given: Run | Path | str | None, **terms: Any) -> Run:
        """The run of a release on this data: that of the caller, with the ledger and the budget."""
        return Run.of(given, ledger=self.ledger, budget=self.budget, **terms)

    def rule(self, given: float | None, default: float = DELTA) -> DeltaRule:
        """The delta of a release: as given; else the smaller of what follows from the public number
        of records and what the budget has; else the default.
        """
        budget = None if self.budget is None else self.budget.delta
        return delta_of(given, self.records, budget, default)

    def replaced(self, adjacency: Adjacency | str) -> int | None:
        """The public number of records where replacing one is what is hidden; else None.

        Raises:
            InvalidInput: There is no such number, or no such adjacency.
        """
        if Adjacency.parse(adjacency) is not Adjacency.REPLACE_ONE:
            return None
        if self.records is None:
            raise InvalidInput("records", None, "must be given where one record is replaced")
        return self.records

    def spent(self) -> PrivacyCost:
        """What all releases so far cost together, as the budget counts it."""
        ledger = self._held()
        if ledger is None:
            return PrivacyCost(0.0, 0.0 if self.budget is None else self.budget.delta)
        allowed = spending.allowance(ledger)
        if allowed.budget is None:
            if not ledger.permits():
                return PrivacyCost(0.0, 0.0)
            found = spending.of(ledger)
            return PrivacyCost(_known(found.total), found.delta)
        return PrivacyCost(_known(allowed.spent), allowed.budget.delta)

    def left(self) -> PrivacyCost:
        """What later releases may still cost together.

        Raises:
            InvalidInput: There is no budget.
        """
        if self.budget is None:
            rule = 'must be given: Dataset(..., ledger="people.jsonl", budget=dpfy.Budget(8, 1e-6))'
            raise InvalidInput("budget", None, rule)
        return PrivacyCost(max(0.0, self.budget.epsilon - self.spent().epsilon), self.budget.delta)

    def _held(self) -> Ledger | None:
        """The ledger, if it is there already."""
        if self.ledger is None:
            rule = 'must be given: Dataset(..., ledger="people.jsonl") keeps what releases cost'
            raise InvalidInput("ledger", None, rule)
        return Ledger.read(self.ledger) if self.ledger.is_file() else None

    def _facts(self) -> list[str]:
        """What a representation tells: public facts alone."""
        source, person = self._source, self.unit
        told = [Path(source).name if isinstance(source, str | Path) else type(source).__name__]
        if self._schema is not None:
            names = [column.name for column in self._schema.columns]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            told.append(f"columns {', '.join(names[:SHOWN])}{more}")
        if person is not None:
            told.append(f"one person ({person.column}) with at most {person.at_most} rows")
        if self.ledger is not None:
            told.append(f"ledger {self.ledger.name}")
        if self.budget is not None:
            left = down(self.left().epsilon)
            told.append(f"{left} of epsilon {self.budget.epsilon:g} left")
        return told

    def __repr__(self) -> str:
        return f"Dataset({'; '.join(self._facts())})"

    def _repr_html_(self) -> str:
        return f"<p><b>Dataset</b> {html.escape('; '.join(self._facts()))}</p>"

    def __reduce__(self) -> Any:
        raise InvalidInput("Dataset", "pickled", "holds private records: give what it is made of")

    def __getattr__(self, name: str) -> Any:
        if name in HINTS:
            raise AttributeError(f"Dataset has no {name}: {HINTS[name]}")
        raise AttributeError(f"Dataset has no attribute {name!r}")


ASK = 'private rows are not shown; ask with dpfy.query(people, "mean(age)", epsilon=...)'
HINTS = dict.fromkeys(
    ("head", "tail", "sample", "iloc", "loc", "values", "describe", "mean", "sum", "info"), ASK
) | {
    "shape": 'how many rows there are is private; ask with dpfy.query(people, "count()", ...)',
    "query": "it is a function: dpfy.query(people, ...)",
    "fit": "a model is fitted to it: LogisticRegression(epsilon=1.0).fit(people, target=...)",
    "synthesize": "it is a function: dpfy.synthesize(people, epsilon=...)",
    "epsilon": "people.spent() and people.left() say what releases cost",
}


def delta_of(
    given: float | None,
    records: int | None,
    budget: float | None = None,
    default: float = DELTA,
) -> DeltaRule:
    """The delta of a release by the one rule of all families and commands, and where it came from.
    `default` holds where neither the number of records nor a budget is known.
    """
    if given is not None:
        if check.below_one("delta", given):
            check.delta("delta", given)
        return DeltaRule(given, "given by the caller")
    found = []
    if records is not None:
        origin = (
            f"derived from the public number of records ({records:,}): at most 1 / n^1.1 and 1e-5"
        )
        found.append(DeltaRule(default_delta(records), origin))
    if budget is not None:
        found.append(DeltaRule(budget, "that of the budget of the data set"))
    if not found and default == 0:
        return DeltaRule(0.0, "none is needed")
    if not found:
        return DeltaRule(default, f"the default, {default:g}")
    return min(found, key=lambda rule: rule.value)


def ledger_delta(ledger: str | Path | None) -> float | None:
    """The delta of the budget of a ledger, where it is there and has one."""
    if ledger is None or not Path(ledger).is_file():
        return None
    held: Any = figures.budget_of(Ledger.read(Path(ledger)))
    return None if held is None else float(held.delta)


def _budget(given: Any, ledger: Path | None) -> Any:
    """The budget that the ledger has, or is made with."""
    if isinstance(given, tuple) and len(given) == 2:
        given = Budget(*given)
    if given is None:
        there = ledger is not None and ledger.is_file()
        return figures.budget_of(Ledger.read(ledger)) if there and ledger is not None else None
    if not isinstance(given, RenyiFilter):
        rule = "must be dpfy.Budget(epsilon, delta)"
        raise InvalidInput("budget", type(given).__name__, rule)
    if ledger is None:
        rule = 'needs a ledger to be kept in: Dataset(..., ledger="people.jsonl")'
        raise InvalidInput("budget", str(given), rule)
    if ledger.is_file():
        held = figures.budget_of(Ledger.read(ledger))
        stated = Budget(given.epsilon, given.delta).approximation
        if given.approximation == stated and isinstance(held, RenyiFilter):
            given = RenyiFilter(given.epsilon, given.delta, held.approximation)
        if held is None or held.to_json() != given.to_json():
            rule = f"{ledger.name} was made with {held}: a budget is set once"
            raise InvalidInput("budget", str(given), rule)
    return given


def _known(figure: spending.SpendingFigure) -> float:
    if figure.epsilon is None:
        raise InvalidInput("ledger", "a release without a bound", figure.why)
    return figure.epsilon


def _column_names(source: Any) -> list[str]:
    """The names of the columns of a table; none where it has no names."""
    if isinstance(source, Mapping):
        return list(map(str, source))
    if (names := column_names(source)) is not None:
        return names
    if isinstance(source, str | Path):
        return list(TableFile(source).names)
    names = getattr(source, "column_names", None) or getattr(source, "columns", None)
    if names is None and getattr(source, "dtype", None) is not None:
        names = getattr(source.dtype, "names", None)
    return [] if names is None else [str(name) for name in names]


def _schema(given: Any, strict: bool) -> Any:
    """What is public about the columns. A description of another kind, as the domain of a
    synthesis, is taken as it is.
    """
    if given is None:
        if strict:
            raise InvalidInput("strict", True, "goes with a schema, which the cells must fit")
        return None
    if hasattr(given, "cells") and hasattr(given, "columns") and not isinstance(given, Schema):
        return given
    found = Schema.of(given)
    return replace(found, strict=True) if strict else found
