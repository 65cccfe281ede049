"""Two tables that belong together: people, and what each of them has several of (visits, orders). A
person is protected as a whole.

Each person becomes one wide record: the columns of the person, how many visits there are, and the
columns of the first `most` visits, in their order. So a person adds one record, whatever their
visits; what goes with what, also from visit to visit, is measured as in any other table; and the
synthetic records are unfolded into two tables again, which costs nothing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.storage import write_atomically
from dpfy.runs.run import Run
from dpfy.synthetic.columns import BinnedColumn, ListedColumn, TableColumn, table_column
from dpfy.synthetic.constraints import ColumnComparison, Constraint, Mask
from dpfy.synthetic.counts import checked_chunks
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms
from dpfy.synthetic.run import SynthesisResult, synthesize_table
from dpfy.tables.cells import word
from dpfy.tables.columns import Number

COUNT = "visits"
"""The column of the wide table that says how many there are."""
MOST = 16
Row = dict[str, str]


@dataclass(frozen=True)
class Attendance(Constraint):
    """The columns of visit `number` hold something where there are that many visits, and nothing
    where there are not.

    Where the column `may_miss`, a visit that is there may leave it empty.
    """

    number: int = 1
    may_miss: bool = False

    def allowed(self, columns: Sequence[TableColumn]) -> Mask:
        """See `Constraint`: how many visits by the cells of the column."""
        counted, column = (columns[k] for k in self.clique)
        there = np.arange(counted.cells)[:, None] >= self.number
        known = np.arange(column.cells)[None, :] < column.known
        return np.asarray(np.where(there, known | self.may_miss, ~known))


@dataclass(frozen=True)
class Link:
    """How two tables belong together: the domain of each, the column `key` that says whose a row
    is, and how many visits are used.
    """

    people: Domain
    visits: Domain
    key: str
    most: int

    def __post_init__(self) -> None:
        check.integer("most_visits", self.most, most=MOST)
        for name, domain in (("people", self.people), ("visits", self.visits)):
            if self.key not in domain.ignored:
                raise InvalidInput(
                    "key", self.key, f"must be a column of the schema of {name}, with ignore = true"
                )
        names = [column.name for column in self.domain.columns]
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(
                    "column",
                    name,
                    "must not be a column of people: the wide table has one of that name",
                )

    @cached_property
    def domain(self) -> Domain:
        """That of the wide table."""
        first = len(self.people.columns)
        counted = table_column(Number(COUNT, 0, self.most, required=True))
        columns: list[TableColumn] = [*self.people.columns, counted]
        rules: list[Constraint] = list(self.people.constraints)
        for number in range(1, self.most + 1):
            start = len(columns)
            for k, column in enumerate(self.visits.columns):
                text = f"{column.name} of visit {number} where there is one"
                always = ColumnComparison(">=", (first,), 0.0)
                rules.append(
                    Attendance(text, (first, start + k), always, None, number, column.absent)
                )
                name = f"{column.name}.{number}"
                optional = replace(column.column, name=name, required=False, fill=None, drop=False)
                columns.append(replace(column, column=optional))
            rules += [_moved(rule, start) for rule in self.visits.constraints]
        return Domain(tuple(columns), frozenset({self.key}), tuple(rules))

    def rows(self, people: Any, visits: Any) -> dict[str, list[Any]]:
        """The wide records: of a person the first row is used; visits of nobody in the table of
        people are left out.
        """
        held: dict[str, list[list[Any]]] = {}
        for chunk in checked_chunks(visits, self.visits, self.key):
            told = [
                [_told(column, cell) for cell in chunk[column.name]]
                for column in self.visits.columns
            ]
            for row, whose in enumerate(chunk[self.key]):
                own = held.setdefault(word(whose), [])
                if len(own) < self.most:
                    own.append([column[row] for column in told])
        found: dict[str, list[Any]] = {name: [] for name in (self.key, *self.domain.names)}
        width = len(self.visits.columns)
        for chunk in checked_chunks(people, self.people, self.key):
            for row, whose in enumerate(chunk[self.key]):
                own = held.get(word(whose), [])
                cells = [*(chunk[name][row] for name in self.people.names), str(len(own))]
                cells += [cell for visit in own for cell in visit] + [None] * (
                    width * (self.most - len(own))
                )
                for name, cell in zip(
                    (self.key, *self.domain.names), (word(whose), *cells), strict=True
                ):
                    found[name].append(cell)
        return found

    def unfolded(self, wide: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Synthetic people and their visits; the key is a new number for each."""
        people, visits = [], []
        for number, row in enumerate(wide, start=1):
            people.append({self.key: str(number)} | {name: row[name] for name in self.people.names})
            for k in range(1, int(row[COUNT]) + 1):
                visits.append(
                    {self.key: str(number)}
                    | {name: row[f"{name}.{k}"] for name in self.visits.names}
                )
        return people, visits


class _Lazy(Mapping[str, list[Any]]):
    """The wide records, joined when they are asked for: that is when the charge is reserved."""

    def __init__(self, link: Link, people: Any, visits: Any) -> None:
        self._given = link, people, visits

    @cached_property
    def _held(self) -> dict[str, list[Any]]:
        link, people, visits = self._given
        return link.rows(people, visits)

    def __getitem__(self, name: str) -> list[Any]:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True)
class LinkedTables:
    """Synthetic people and visits, and the run of the wide table that they come from."""

    made: SynthesisResult
    people: list[Row] = field(repr=False)
    visits: list[Row] = field(repr=False)
    link: Link = field(repr=False)

    def write(self, folder: Path | str) -> tuple[Path, Path]:
        """Both tables as CSV files, people.csv and visits.csv."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        parts = (
            ("people", self.people, self.link.people),
            ("visits", self.visits, self.link.visits),
        )
        for name, rows, domain in parts:
            whole = io.StringIO()
            writer = csv.DictWriter(whole, [self.link.key, *domain.names], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomically(place / f"{name}.csv", whole.getvalue().encode())
        return place / "people.csv", place / "visits.csv"


def synthesize_linked(
    people: Any,
    visits: Any,
    *,
    schemas: tuple[Domain | str | Path, Domain | str | Path],
    key: str,
    most_visits: int,
    epsilon: float,
    delta: float,
    run: Run | str | Path | None = None,
    **options: Any,
) -> LinkedTables:
    """Two synthetic tables that belong together. `schemas` are those of people and of visits; `key`
    says in both whose a row is; `options`
    are settings of `dpfy.synthesize` (method, workload, target, rows).

    Guarantees: those of `synthesize`, for one person with all their visits: anyone who they are, they
    add one record, made of their first row and their first `most_visits` visits.
    """
    link = Link(Domain.given(schemas[0]), Domain.given(schemas[1]), key, most_visits)
    check.known_keys("synthesize_linked", options, [f.name for f in fields(SynthesisOptions)])
    made = synthesize_table(
        _Lazy(link, people, visits),
        schema=link.domain,
        terms=SynthesisTerms(epsilon, delta, key, 1),
        run=Run.of(run),
        options=SynthesisOptions(**options),
    )
    with made.table.open(newline="", encoding="utf-8") as file:
        return LinkedTables(made, *link.unfolded(list(csv.DictReader(file))), link)


def _told(column: TableColumn, cell: object) -> str | None:
    """A cell of a visit as the wide table reads it, where what is missing is a visit that is not
    there: `fill` is filled in here.
    """
    code = int(column.codes([cell])[0])
    if column.absent or not np.isnan(column.values([cell])[0]):  # type: ignore[list-item]
        return word(cell)
    if isinstance(column, ListedColumn):
        return column.words[code]
    assert isinstance(column, BinnedColumn)
    return column.shown(column.ends[0][code])


def _moved(rule: Constraint, start: int) -> Constraint:
    """A rule of the table of visits, for the columns of one visit."""

    def at(part: ColumnComparison) -> ColumnComparison:
        return replace(part, columns=tuple(start + k for k in part.columns))

    condition = None if rule.condition is None else at(rule.condition)
    return replace(
        rule, clique=tuple(start + k for k in rule.clique), rule=at(rule.rule), condition=condition
    )
