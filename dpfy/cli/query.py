"""`dpfy query`: private statistics of a table, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dpfy.cli.form import RULE, Asked, TableRunForm, command, flag
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell
from dpfy.core.errors import InvalidInput


@dataclass(frozen=True)
class QueryForm(TableRunForm):
    """`dpfy query`."""

    query: str = flag("What to ask, in quotes.", metavar="QUERY", placed=True)
    epsilon: float = flag("What the whole query may cost.")
    delta: float | None = flag("Delta.", None, RULE + "; else 0, a pure guarantee")
    most_groups: int | None = flag("Most groups that one person adds to.", None)
    most_each: int | None = flag("Most rows of one person in a group.", None)
    records: int | None = flag("Public number of records: protects replacing one.", None)
    contributions: int | None = flag(
        "Ask about persons: column contributions, up to this public bound.", None
    )
    level: float | None = flag("Level of confidence of the intervals.", None)
    public: str | None = flag(
        "Public tables that a SELECT joins, NAME=FILE; several with commas.", None, path=True
    )
    explain: bool | None = flag("Show noise, errors and cost; read no data, and stop.", None)


@command(QueryForm)
def query(asked: Asked[QueryForm]) -> None:
    """Ask private statistics of a table (CSV, Parquet, FILE.duckdb::TABLE), and leave a run folder
    that anyone can verify. A query is statistics, then by, where and level; or a SELECT.

    Numbers: sum(x) mean(x) variance(x) stddev(x) covariance(x, y) median(x) quantile(x, 0.1, 0.9)
    min(x) max(x) histogram(x, 0, 10, 20). Words: histogram(c) mode(c) table(c, d) margins(c, d, e,
    order=2). Of any column: top(w) range(w). Records: count(). Different persons: count(distinct
    person). Models: accuracy(truth, guess) confusion(truth, guess) calibration(probability, truth).

    Groups: by c, by bins(x, 0, 10, 20), by month(d), by top(w). Conditions: where with and, or,
    in (...). At the end: level 0.9, for intervals that hold in 90% of releases.

    Ranges and categories come from the schema, never from the data. Every answer says how far off
    it may be. docs/statistics.md has the rest.

    Example: dpfy query people.csv "mean(age), count() by job" --schema people.toml --epsilon
    0.5
    """
    from dpfy.queries import run
    from dpfy.queries.plan import QueryTerms, plan
    from dpfy.tables.schema import Schema

    form = asked.form
    terms = QueryTerms(
        form.epsilon,
        asked.delta(default=0.0),
        form.person,
        form.at_most,
        form.most_groups,
        form.most_each,
        form.records,
        form.contributions,
    )
    joined = _public(form.public)
    if form.explain:
        lines = plan(form.query, Schema.of(form.schema), terms, joined, form.level).explain()
        tell({"explain": lines}, lines, as_json=asked.as_json)
        return
    with resumable(asked.out, asked.again("query")), _bar() as progress:
        found = run.answered(
            form.data,
            form.query,
            schema=form.schema,
            terms=terms,
            public=joined,
            level=form.level,
            run=asked.run(),
            progress=progress,
        )
    lines = [*_lines(found), *charged(found.epsilon, form.ledger)]
    tell(found.to_json(), lines, as_json=asked.as_json)


def _public(given: str | None) -> dict[str, str]:
    """Public tables by name."""
    found = {}
    for text in given.split(",") if given else []:
        name, mark, path = text.strip().partition("=")
        if not mark or not name or not path:
            raise InvalidInput("--public", text, "must be written NAME=FILE")
        found[name] = path
    return found


@contextmanager
def _bar() -> Iterator[Any]:
    """What is being done, on standard error."""
    from rich.console import Console

    with Console(stderr=True).status("planning") as shown:
        yield lambda what, share=None: shown.update(what.replace("[", "\\["))


def _lines(found: Any) -> list[str]:
    return [
        *(found.answers.lines() or ["no word was frequent enough to be shown"]),
        "",
        found.report["statement"],
        f"check it: dpfy verify {found.run}",
    ]
