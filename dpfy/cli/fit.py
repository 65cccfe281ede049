"""`dpfy fit`: a classical learner on a table of private records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.cli.form import RULE, Asked, TableRunForm, command, flag
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell


@dataclass(frozen=True)
class FitForm(TableRunForm):
    """`dpfy fit`."""

    estimator: str = flag(
        "logistic, svm, naive-bayes; linear, ridge, poisson; boosting, boosted-trees, forest, "
        "tree, soft-trees (classes or numbers, as the target is); kmeans, mixture, pca."
    )
    epsilon: float = flag("What the fit may cost.")
    target: str | None = flag("Column to predict.", None, "the label of the schema")
    delta: float | None = flag("Delta; 0 for a pure guarantee.", None, RULE)
    adjacency: str = flag("Which change is hidden.", "add-or-remove-one")
    records: int | None = flag("Public number of records, if there is one.", None)
    test: str | None = flag(
        "Public rows to measure on: what is measured is published as it is.", None, path=True
    )
    parameters: dict[str, Any] = flag("Parameters of the estimator, by --set.", rest=True)  # noqa: RUF009


@command(FitForm)
def fit(asked: Asked[FitForm]) -> None:
    """Fit a classical learner on private records, and leave a run folder that anyone can verify.

    With --person patient --at-most 5 all records of one patient are protected together, of which
    at most five are used. Ranges, categories and classes come from the schema, never from the data.
    Parameters of an estimator: --set solver=statistics; docs/estimators.md lists them. Use the
    model with dpfy predict RUN ROWS.

    Example: dpfy fit people.csv --schema people.toml --estimator logistic --epsilon 1
    """
    from dpfy.estimators import job

    form = asked.form
    given = job.settings(job.kind_for(form.estimator, form.schema, form.target), form.parameters)
    given |= {"epsilon": form.epsilon, "delta": asked.delta(), "adjacency": form.adjacency}
    given |= {"records": form.records, "unit": job.person(form.person, form.at_most)}
    request = job.FitRequest(form.estimator, form.data, form.schema, form.target, given, form.test)
    with resumable(asked.out, asked.again("fit")), _bar() as progress:
        made, found = request.run(asked.run(), progress)
    stated = made.report_["guarantee"]
    told = {"run": str(asked.out), "estimator": type(made).__name__, **found}
    told |= {key: stated[key] for key in ("epsilon", "delta", "accountant", "adjacency", "unit")}
    told["statement"] = made.guarantee_
    lines = [*_lines(made, found, asked.out), *charged(stated["epsilon"], form.ledger)]
    tell(told, lines, as_json=asked.as_json)


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
