"""`dpfy query`: private statistics of a table, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import option
from dpfy.cli.output import charged, tell


def query(
    data: options.Table,
    text: Annotated[
        str, typer.Argument(metavar="QUERY", help="What to ask, in quotes.", show_default=False)
    ],
    schema: options.SchemaFile,
    epsilon: Annotated[float, option("What the whole query may cost.")],
    out: options.Out = None,
    delta: Annotated[float, typer.Option(help="Delta; 0 for a pure guarantee.")] = 0.0,
    resume: options.Resume = False,
    ledger: options.LedgerFile = None,
    person: options.Person = None,
    at_most: options.AtMost = None,
    most_groups: Annotated[int | None, option("Most groups that one person adds to.")] = None,
    most_each: Annotated[int | None, option("Most rows of one person in a group.")] = None,
    records: Annotated[
        int | None, option("Public number of records: protects replacing one.")
    ] = None,
    contributions: Annotated[
        int | None, option("Ask about persons: column contributions, up to this public bound.")
    ] = None,
    insecure_seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Ask private statistics of a table, and leave a run folder that anyone can verify.

    A query is: statistics, then by, where and level. These hold for all statistics of the query.

    dpfy query people.csv "mean(age), count() by sex" --schema s.toml --epsilon 0.5

    dpfy query people.csv "median(age) where sex = 'Female' and age >= 18" --schema s.toml --epsilon
    0.5 --out runs/q

    Numbers: sum(x) mean(x) variance(x) stddev(x) covariance(x, y) median(x) quantile(x, 0.1, 0.9)
    min(x) max(x) histogram(x, 0, 10, 20)

    Words: histogram(c) mode(c) table(c, d) margins(c, d, e, order=2). Of any column: top(w)
    range(w). Records: count(). Different persons: count(distinct person)

    Groups: by c, by bins(x, 0, 10, 20), by month(d), by top(w). Conditions: and, or, in (...). At
    the end: level 0.9, for intervals that hold in 90% of releases. In a statistic: weight=3, its
    part of the budget

    Persons: quantile(contributions, 0.9) with --person patient --contributions 256: how many rows
    nine of ten persons own at most

    Models: accuracy(truth, guess) confusion(truth, guess) calibration(probability, truth)

    Ranges and categories come from the schema, never from the data. Numbers outside their range are
    moved to its end; missing ones add nothing (or count as the fill of the schema); words that are
    not listed are (other). Every answer says how far off it may be.
    """
    from dpfy.queries import run
    from dpfy.queries.plan import QueryTerms
    from dpfy.runs.run import Run

    out = options.run_folder(out, resume)
    terms = QueryTerms(
        epsilon, delta, person, at_most, most_groups, most_each, records, contributions
    )
    public = {
        "query": text,
        "epsilon": epsilon,
        "delta": delta,
        "person": person,
        "at_most": at_most,
    }
    public |= {
        "most_groups": most_groups,
        "most_each": most_each,
        "records": records,
        "contributions": contributions,
    }
    private = {"data": data, "schema": schema, "ledger": None if ledger is None else str(ledger)}
    place = Run(
        out,
        resume=resume,
        ledger=ledger,
        seed=insecure_seed,
        config=(options.toml(public), options.toml(public | private)),
    )
    flags = {
        key: value for key, value in (public | private).items() if key not in ("data", "query")
    }
    again = options.command_line(["query", data, text], flags)
    with resumable(out, again), _bar() as progress:
        found = run.answered(data, text, schema=schema, terms=terms, run=place, progress=progress)
    tell(
        found.to_json(),
        [*_lines(found), *charged(found.epsilon, ledger)],
        as_json=as_json,
    )


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
