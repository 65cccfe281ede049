"""A query, from the line of text to the run folder: plan, reserve, read, release, card. In this
order.
"""

from __future__ import annotations

import hashlib
import html
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import dpfy
from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.queries.plan import CONTRIBUTIONS, QueryPlan, QueryTerms, per_user, plan
from dpfy.report import card
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.run import Run
from dpfy.statistics.answer import LEVEL, Answer
from dpfy.statistics.answers import Answers
from dpfy.statistics.claim import FILE
from dpfy.statistics.selection import TopStatistic, UnknownKeys
from dpfy.statistics.statistic import Spend
from dpfy.tables.schema import Schema
from dpfy.tables.table import PrivateTable

MOST_SHOWN = 20
"""Answers of one statistic that are repeated in the card; all of them are in answers.json."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class QueryResult:
    """What a query leaves: its answers, and the run folder with its card."""

    run: Path
    answers: Answers
    card: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.answers}\n{self.card['statement']} Run: {self.run}"

    def _repr_html_(self) -> str:
        statement = html.escape(f"{self.card['statement']} Run: {self.run}")
        return f"{self.answers._repr_html_()}<p>{statement}</p>"

    def to_frame(self) -> Any:
        """The answers as a pandas frame: see :meth:`Answers.to_frame`."""
        return self.answers.to_frame()

    def plot(self, statistic: str | None = None, axes: Any = None) -> Any:
        """Bars with intervals: see :meth:`Answers.plot`."""
        return self.answers.plot(statistic, axes)

    def to_json(self) -> dict[str, Any]:
        """The answers, and what they cost."""
        stated = self.card["guarantee"]
        return {
            "run": str(self.run),
            "answers": [answer.to_json() for answer in self.answers],
            "level": self.answers.level,
            **{key: stated[key] for key in ("epsilon", "delta", "accountant", "adjacency", "unit")},
            "statement": self.card["statement"],
        }


def query(
    data: Any,
    text: str,
    *,
    schema: Any,
    terms: QueryTerms,
    run: Run | str | Path,
    progress: Progress = lambda what: None,
) -> QueryResult:
    """Answer a query on private records, in a run folder that anyone can verify.

    `data` is a file, a table or arrays by column; `schema` a TOML file, the name of a packaged one,
    or a list of columns; `terms` what the query may cost and whose data it protects; `run` a new
    folder.

    Guarantees: everything about the query is checked, and its price computed and reserved, before
    `data` is opened. A query that is refused spends nothing and leaves no folder.
    """
    progress("planning")
    made = plan(text, Schema.of(schema), terms)
    return answer(data, made, Run.of(run), progress)


def answer(
    data: Any, made: QueryPlan, place: Run, progress: Progress = lambda what: None
) -> QueryResult:
    """The answers of a plan."""
    if complete(place, *made.claims):
        return finished(Path(place.path))
    with RunFolder(place, *made.claims) as folder:
        progress("reading")
        table = table_of(data, made)
        folder.bind("query", _fingerprint(table, made))
        found: list[Answer] = []
        words: dict[str, tuple[str, ...]] = {}
        for statistic, claim in zip(made.statistics, made.claims, strict=True):
            progress(claim.question)
            permit = folder.begin(claim.name)
            spend = Spend(
                claim, made.terms.contribution, permit, folder.randomness, made.query.level
            )
            answers = [
                replace(answer, level=made.query.level)
                for answer in statistic.knowing(words).release(table, spend)
            ]
            if isinstance(statistic, TopStatistic):
                words |= statistic.words(answers)
            shown = " | ".join(_printable(str(a)) for a in answers[:MOST_SHOWN])
            folder.tell(claim.name, answers=shown or "none", answers_in_all=len(answers))
            found += answers
        progress("card")
        folder.write(FILE, json.dumps([answer.to_json() for answer in found], indent=1).encode())
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        folder.finish(card.Facts(about, releases=made.releases))
    return finished(Path(place.path))


def _printable(text: str) -> str:
    """Text of the data, a frequent word say, as a card can hold it."""
    return "".join(c if c.isprintable() else "?" for c in text)


def finished(path: Path) -> QueryResult:
    """The answers of a finished run."""
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
    return QueryResult(
        path, answers, storage.parsed_json(card.NAME, storage.content(card.NAME, path / card.NAME))
    )


def table_of(data: Any, made: QueryPlan) -> PrivateTable:
    """The private records, with their owners."""
    table = PrivateTable(data, made.columns, made.terms.user)
    if made.terms.records not in (None, table.size):
        raise InvalidInput(
            "records",
            made.terms.records,
            "is not the number of records in the data, which must be public to be given",
        )
    if made.terms.contributions is None or table.owners is None:
        return table
    found = PrivateTable(
        {CONTRIBUTIONS: np.bincount(table.owners)}, per_user(made.terms.contributions)
    )
    found.owners = np.arange(found.size)
    return found


def _fingerprint(table: PrivateTable, made: QueryPlan) -> bytes:
    """All that the answers depend on: the columns that the query uses, as they are read."""
    whole = hashlib.blake2b(str(table.size).encode())
    written = {s.column.name for s in made.statistics if isinstance(s, UnknownKeys)}
    for name in sorted(used(made)):
        whole.update(name.encode() + b"\0" + table.content(name, name in written))
    if (left_out := table.left_out()) is not None:
        whole.update(left_out.tobytes())
    if table.owners is not None:
        whole.update(table.owners.tobytes())
    return whole.digest()


def used(made: QueryPlan) -> set[str]:
    """The columns that a query names."""
    return made.query.columns
