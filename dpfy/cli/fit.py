"""`dpfy fit`: a classical learner on a table of private records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import option
from dpfy.cli.output import charged, tell

FLAGS = (
    *("schema", "estimator", "epsilon", "target", "delta", "ledger", "adjacency", "records"),
    *("person", "at_most"),
)
"""Fields that are flags; the others are parameters of the estimator."""


def fit(
    data: options.Table,
    schema: options.SchemaFile,
    estimator: Annotated[
        str,
        option(
            "logistic, svm, naive-bayes; linear, ridge, poisson; boosting, boosted-trees, forest, "
            "tree, soft-trees (classes or "
            "numbers, as the target is); kmeans, mixture, pca."
        ),
    ],
    epsilon: Annotated[float, option("What the fit may cost.")],
    target: Annotated[
        str | None, option("Column to predict (default: the label of the schema).")
    ] = None,
    delta: Annotated[
        float, typer.Option(help="Delta; 0 for a pure guarantee, where the estimator has one.")
    ] = 1e-6,
    out: Annotated[Path | None, option("Run folder (default: new, in runs/).")] = None,
    resume: options.Resume = False,
    ledger: options.LedgerFile = None,
    adjacency: Annotated[str, typer.Option(help="Which change is hidden.")] = "add-or-remove-one",
    records: Annotated[int | None, option("Public number of records, if there is one.")] = None,
    person: Annotated[str | None, option("Column with the person that a row belongs to.")] = None,
    at_most: options.AtMost = None,
    assignments: Annotated[
        list[str] | None,
        option("A parameter of the estimator, key=value; may be repeated.", "--set"),
    ] = None,
    test: Annotated[
        Path | None, option("Public rows to measure on: what is measured is published as it is.")
    ] = None,
    insecure_seed: options.Seed = None,
    as_json: options.Json = False,
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
    from dpfy.estimators import job
    from dpfy.runs.run import Run

    out = options.run_folder(out, resume)
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
        config=(options.toml(public), options.toml(public | private)),
    )
    asked = job.FitRequest(
        estimator, data, schema, target, given, None if test is None else str(test)
    )
    fields = public | private
    again = options.command_line(
        ["fit", data, *(word for text in assignments or [] for word in ("--set", text))],
        {key: fields.get(key) for key in FLAGS},
    )
    with resumable(out, again), _bar() as progress:
        made, found = asked.run(place, progress)
    stated = made.report_["guarantee"]
    told = {"run": str(out), "estimator": type(made).__name__, **found}
    told |= {key: stated[key] for key in ("epsilon", "delta", "accountant", "adjacency", "unit")}
    told["statement"] = made.guarantee_
    tell(told, [*_lines(made, found, out), *charged(stated["epsilon"], ledger)], as_json=as_json)


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
