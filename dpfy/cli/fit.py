"""`dpfy fit`: a classical learner on a table of private records."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell


def _option(help_text: str, *names: str, hidden: bool = False) -> Any:
    return typer.Option(*names, help=help_text, show_default=False, hidden=hidden)


def fit(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="The private table: CSV or Parquet.", show_default=False
        ),
    ],
    schema: Annotated[str, _option("Public schema of the columns (TOML), or adult.")],
    estimator: Annotated[
        str,
        _option(
            "logistic, svm, naive-bayes; linear, ridge, poisson; boosting, boosted-trees, forest, "
            "tree, soft-trees (classes or "
            "numbers, as the target is); kmeans, mixture, pca."
        ),
    ],
    epsilon: Annotated[float, _option("What the fit may cost.")],
    target: Annotated[
        str | None, _option("Column to predict (default: the label of the schema).")
    ] = None,
    delta: Annotated[
        float, typer.Option(help="Delta; 0 for a pure guarantee, where the estimator has one.")
    ] = 1e-6,
    out: Annotated[Path | None, _option("Run folder (default: new, in runs/).")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out: give the same command again."),
    ] = False,
    ledger: Annotated[
        Path | None, _option("Ledger of the data set, over all its releases.")
    ] = None,
    adjacency: Annotated[str, typer.Option(help="Which change is hidden.")] = "add-or-remove-one",
    records: Annotated[int | None, _option("Public number of records, if there is one.")] = None,
    person: Annotated[str | None, _option("Column with the person that a row belongs to.")] = None,
    at_most: Annotated[int | None, _option("Most rows of one person that are used.")] = None,
    assignments: Annotated[
        list[str] | None,
        _option("A parameter of the estimator, key=value; may be repeated.", "--set"),
    ] = None,
    test: Annotated[
        Path | None, _option("Public rows to measure on: what is measured is published as it is.")
    ] = None,
    insecure_seed: Annotated[
        int | None, _option("Fix all randomness, for tests: protects nothing.", hidden=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fit a classical learner on private records, and leave a run folder that anyone can verify.

    dpfy fit adult.csv --schema adult --estimator logistic --target income --epsilon 1

    dpfy fit people.csv --schema s.toml --estimator linear --target hours --epsilon 0.5 --set
    solver=statistics --out runs/hours

    Persons: with --person patient --at-most 5 all records of one patient are protected together, of
    which at most five are used.

    Ranges, categories and classes come from the schema, never from the data. Use the model with
    dpfy predict RUN ROWS, or in Python: dpfy.estimators.load(RUN). Which parameters an estimator
    has: docs/estimators.md.
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.estimators import job
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
    given = job.settings(job.kind_for(estimator, schema, target), assignments or [])
    given |= {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "records": records}
    persons = {"person": person, "at_most": at_most}
    public = {"estimator": estimator, "target": target, **given, **persons}
    given["unit"] = job.person(person, at_most)
    private = {"data": data, "schema": schema, "ledger": None if ledger is None else str(ledger)}
    place = Run(
        out,
        resume=resume,
        ledger=ledger,
        seed=insecure_seed,
        config=(_toml(public), _toml(public | private)),
    )
    asked = job.FitRequest(
        estimator, data, schema, target, given, None if test is None else str(test)
    )
    again = [
        "dpfy",
        "fit",
        data,
        *_flags(public | private),
        *(word for text in assignments or [] for word in ("--set", text)),
    ]
    with resumable(out, shlex.join(again)), _bar() as progress:
        made, found = asked.run(place, progress)
    stated = made.card_["guarantee"]
    told = {"run": str(out), "estimator": type(made).__name__, **found}
    told |= {key: stated[key] for key in ("epsilon", "delta", "accountant", "adjacency", "unit")}
    told["statement"] = made.guarantee_
    tell(told, [*_lines(made, found, out), *charged(stated["epsilon"], ledger)], as_json=as_json)


def _toml(fields: dict[str, Any]) -> str:
    """Strings, numbers and lists of them as TOML."""
    return "".join(
        f"{key} = {json.dumps(value, default=str)}\n"
        for key, value in fields.items()
        if value is not None
    )


def _flags(fields: dict[str, Any]) -> list[str]:
    known = (
        *("schema", "estimator", "epsilon", "target", "delta", "ledger", "adjacency", "records"),
        *("person", "at_most"),
    )
    found = [
        (f"--{key.replace('_', '-')}", fields[key]) for key in known if fields.get(key) is not None
    ]
    return [str(word) for flag in found for word in flag]


@contextmanager
def _bar() -> Iterator[Any]:
    """How many releases were made, on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)  # to a file a bar is one empty line
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("releases", total=1)
        yield lambda what, share=None: shown.update(task, completed=share)


def _lines(made: Any, found: dict[str, float], out: Path) -> list[str]:
    lines = [f"{name.replace('_', ' ')}: {value:.4f}" for name, value in found.items()]
    shown = str(made.explain()).splitlines()[:12] if hasattr(made, "explain") else []
    return [
        *shown,
        *([""] if shown else []),
        *lines,
        made.guarantee_,
        f"check it: dpfy verify {out}",
    ]
