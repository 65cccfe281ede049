"""A query, from the line of text to the run folder: plan, reserve, read, release, report. In this
order.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dpfy
from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.unit import Person
from dpfy.engines.aggregates import Answered, TableEngine
from dpfy.engines.sources import opened
from dpfy.queries.plan import QueryPlan, QueryTerms, plan
from dpfy.report import card
from dpfy.runs.dataset import Dataset
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, Run, quiet
from dpfy.statistics.answer import LEVEL, Answer
from dpfy.statistics.answers import Answers
from dpfy.statistics.claim import FILE, StatisticClaim
from dpfy.statistics.selection import TopStatistic
from dpfy.statistics.statistic import Spend, Statistic, key_of
from dpfy.tables.schema import Schema

MOST_SHOWN = 20
"""Answers of one statistic that are repeated in the report; all of them are in answers.json."""


@dataclass(frozen=True, repr=False)
class QueryResult(Released):
    """What a query leaves: its answers, in a finished run."""

    answers: Answers

    def to_frame(self) -> Any:
        """The answers as a pandas frame: see :meth:`Answers.to_frame`."""
        return self.answers.to_frame()

    def plot(self, statistic: str | None = None, axes: Any = None) -> Any:
        """Bars with intervals: see :meth:`Answers.plot`."""
        return self.answers.plot(statistic, axes)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, place: int) -> Answer:
        return self.answers[place]

    def _told(self) -> dict[str, Any]:
        shown = [answer.to_json() for answer in self.answers]
        return {"answers": shown, "level": self.answers.level}

    def _shown(self) -> str:
        return str(self.answers)

    def _shown_html(self) -> str:
        return str(self.answers._repr_html_())


def query(
    data: Any,
    text: str,
    *,
    epsilon: float,
    delta: float | None = None,
    schema: Any = None,
    unit: Person | None = None,
    records: int | None = None,
    adjacency: str = "add-or-remove-one",
    most_groups: int | None = None,
    most_each: int | None = None,
    contributions: int | None = None,
    public: Mapping[str, Any] | None = None,
    level: float | None = None,
    run: Run | str | Path | None = None,
    progress: Progress = quiet,
) -> QueryResult:
    """Answer a query on private records, in a run folder that anyone can verify.

        answers = dpfy.query(people, "mean(age), count() by job", epsilon=0.5)

    Args:
        data: A `dpfy.Dataset`; or a file, a table or arrays by column.
        text: The question, in the short form or as a SELECT: docs/statistics.md has both.
        epsilon: What all answers together cost.
        delta: The chance with which the guarantee may fail; 0 asks for a pure one. Without it that
            of the data set, or the one that follows from `records`.
        schema, unit, records: What is public about `data` where it is no Dataset.
        adjacency: "replace-one" hides which record is replaced, where `records` is public; a data
            set with a ledger keeps to one adjacency for all of its releases.
        most_groups, most_each: Of one person, in at most so many groups, and so many rows in each.
        contributions: The query is about persons instead of rows: each has one column
            `contributions`, how many rows they have, moved to at most this public bound.
        public: Public tables that a SELECT may join, by name.
        level: The level of confidence of the intervals, 0.95 where nothing is said.
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.
        progress: Told what is being done.

    Returns:
        The answers, with the guarantee and the report of their run.

    Raises:
        InvalidInput: The question or a setting is wrong.
        BudgetExceeded: The budget of the data set does not cover it.

    Guarantees: everything about the query is checked, and its price computed and reserved, before
    the data is opened. A query that is refused spends nothing and leaves no folder.

    Example:
        >>> import dpfy
        >>> people = dpfy.Dataset({"age": [30, 41, 58]}, [dpfy.Number("age", 0, 100)])
        >>> answers = dpfy.query(people, "sum(age)", epsilon=1.0, delta=0)
        >>> list(answers.to_frame().columns)[:2]
        ['statistic', 'value']
    """
    held = Dataset.of(data, schema, unit=unit, records=records)
    chosen = held.rule(delta, default=0.0)
    person = held.unit
    terms = QueryTerms(
        epsilon,
        chosen.value,
        None if person is None else person.column,
        None if person is None or contributions is not None else person.at_most,
        most_groups,
        most_each,
        held.replaced(adjacency),
        contributions,
    )
    place = held.run(run)
    progress("planning")
    made = plan(text, held.table_schema, terms, public, level)
    return answer(held.source, made, place, progress, chosen.origin)


def answered(
    data: Any,
    text: str,
    *,
    schema: Any,
    terms: QueryTerms,
    public: Mapping[str, Any] | None = None,
    level: float | None = None,
    run: Run | str | Path,
    progress: Progress = quiet,
) -> QueryResult:
    """`query`, with its terms as one value."""
    progress("planning")
    made = plan(text, Schema.of(schema), terms, public, level)
    return answer(data, made, Run.of(run), progress)


def answer(
    data: Any,
    made: QueryPlan,
    place: Run,
    progress: Progress = quiet,
    delta_from: str = "given by the caller",
) -> QueryResult:
    """The answers of a plan. `delta_from` says where its delta came from, for the report."""
    if complete(place, *made.claims):
        return finished(Path(place.path))
    with RunFolder(place, *made.claims) as folder:
        progress("reading")
        table = table_of(data, made)
        found: list[Answer] = []
        words: dict[str, tuple[str, ...]] = {}
        for statistic, claim, known in _asked(folder, table, made, words):
            progress(claim.question)
            permit = folder.begin(claim.name)
            spend = Spend(
                claim, made.terms.contribution, permit, folder.randomness, made.query.level
            )
            answers = [
                replace(answer, level=made.query.level)
                for answer in statistic.release(known, spend)
            ]
            if isinstance(statistic, TopStatistic):
                words |= statistic.words(answers)
            shown = " | ".join(_printable(str(a)) for a in answers[:MOST_SHOWN])
            folder.tell(
                claim.name,
                answers=shown or "none",
                answers_in_all=len(answers),
                delta_from=delta_from,
            )
            found += answers
        if made.select is not None:
            found = made.select.shown(found)
        progress("card")
        folder.write(FILE, json.dumps([answer.to_json() for answer in found], indent=1).encode())
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        folder.finish(card.Facts(about, releases=made.releases))
    return finished(Path(place.path))


def _printable(text: str) -> str:
    """Text of the data, a frequent word say, as a report can hold it."""
    return "".join(c if c.isprintable() else "?" for c in text)


def finished(path: Path | str) -> QueryResult:
    """The answers of a finished run."""
    path = Path(path)
    held = storage.parsed_json(FILE, storage.content(FILE, path / FILE))
    try:
        answers = Answers(
            Answer(
                row["statistic"],
                row["value"],
                row.get("standard_error"),
                tuple(row["interval"]) if "interval" in row else None,
                row.get("place", {}),
                row.get("note", ""),
                row.get("level", LEVEL),
            )
            for row in held
        )
    except (KeyError, TypeError):
        raise Corrupt(FILE, "does not hold answers") from None
    return QueryResult.read(path, answers=answers)


def table_of(data: Any, made: QueryPlan) -> TableEngine:
    """The private records, with their owners."""
    table = opened(data, made.columns, made.terms.user, made.terms.most_records)
    if made.terms.records is not None and made.terms.records != table.rows():
        raise InvalidInput(
            "records",
            made.terms.records,
            "is not the number of records in the data, which must be public to be given",
        )
    return table if made.terms.contributions is None else table.persons(made.terms.contributions)


def _asked(
    folder: RunFolder, table: TableEngine, made: QueryPlan, words: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[Statistic, StatisticClaim, TableEngine]]:
    """The statistics, and the table that knows what they ask. It is read once; twice where groups
    are made of words that were released. All exact answers are bound to the run before noise is
    made for one of them: a run that is resumed finds the same, or stops.
    """
    pairs = list(zip(made.statistics, made.claims, strict=True))
    key = key_of(folder.randomness)
    for later in (False, True):
        mine = [(s.knowing(words), c) for s, c in pairs if s.groups.open == later]
        if not mine:
            continue
        limit = made.terms.contribution
        known = Answered(table, [s.asked(table.schema, c, limit, key) for s, c in mine])
        folder.bind("query of released words" if later else "query", known.content)
        for statistic, claim in mine:
            yield statistic, claim, known
