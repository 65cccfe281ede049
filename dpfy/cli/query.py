"""`dpfy query`: private statistics of a table, in one line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli.aliases import FLAGS
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _option(help_text: str, *names: str, hidden: bool = False) -> Any:
    return typer.Option(*names, help=help_text, show_default=False, hidden=hidden)


def query(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="The private table: CSV or Parquet.", show_default=False
        ),
    ],
    text: Annotated[
        str, typer.Argument(metavar="QUERY", help="What to ask, in quotes.", show_default=False)
    ],
    schema: Annotated[str, _option("Public schema of the columns (TOML), or adult.")],
    epsilon: Annotated[float, _option("What the whole query may cost.")],
    out: Annotated[Path | None, _option("Run folder (default: new, in runs/).")] = None,
    delta: Annotated[float, typer.Option(help="Delta; 0 for a pure guarantee.")] = 0.0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out: give the same query again."),
    ] = False,
    ledger: Annotated[
        Path | None, _option("Ledger of the data set, over all its releases.")
    ] = None,
    user: Annotated[
        str | None, _option("Column with the person that a row belongs to.", "--person")
    ] = None,
    most_records: Annotated[
        int | None, _option("Most rows of one person that are used.", "--at-most")
    ] = None,
    most_groups: Annotated[int | None, _option("Most groups that one user adds to.")] = None,
    most_each: Annotated[int | None, _option("Most records of one user in a group.")] = None,
    records: Annotated[
        int | None, _option("Public number of records: protects replacing one.")
    ] = None,
    contributions: Annotated[
        int | None, _option("Ask about users: column contributions, up to this public bound.")
    ] = None,
    insecure_seed: Annotated[
        int | None, _option("Fix all randomness, for tests: protects nothing.", hidden=True)
    ] = None,
    as_json: Json = False,
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
    from dpfy.core.errors import InvalidInput
    from dpfy.queries import run
    from dpfy.queries.plan import QueryTerms
    from dpfy.runs.folder import ended
    from dpfy.runs.mark import Mark
    from dpfy.runs.run import Run, fresh_path

    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
    out = out or fresh_path()
    if resume and Mark.find(out) is None and not ended(out):
        raise InvalidInput(
            "--resume", str(out), "holds no run to resume; leave --resume out to start one"
        )
    terms = QueryTerms(
        epsilon, delta, user, most_records, most_groups, most_each, records, contributions
    )
    public = {
        "query": text,
        "epsilon": epsilon,
        "delta": delta,
        "user": user,
        "most_records": most_records,
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
        config=(_toml(public), _toml(public | private)),
    )
    with resumable(out, _again(data, text, public | private)), _bar() as progress:
        found = run.answered(data, text, schema=schema, terms=terms, run=place, progress=progress)
    tell(
        found.to_json(),
        [*_lines(found), *charged(found.epsilon, ledger)],
        as_json=as_json,
    )


def _toml(fields: dict[str, Any]) -> str:
    """Strings and numbers as TOML."""
    return "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in fields.items() if value is not None
    )


def _again(data: str, text: str, fields: dict[str, Any]) -> str:
    """The command that asks the same again."""
    flags = [
        (FLAGS.get(flag := f"--{key.replace('_', '-')}", flag), value)
        for key, value in fields.items()
        if key not in ("data", "query") and value is not None
    ]
    return shlex.join(
        ["dpfy", "query", data, text, *(str(word) for flag in flags for word in flag)]
    )


@contextmanager
def _bar() -> Iterator[Any]:
    """What is being done, on standard error."""
    from rich.console import Console

    with Console(stderr=True).status("planning") as shown:
        yield lambda what, share=None: shown.update(what.replace("[", "\\["))


def _lines(found: Any) -> list[str]:
    return [
        *found.answers.lines(),
        "",
        found.report["statement"],
        f"check it: dpfy verify {found.run}",
    ]
