"""`dpfy predict`: what a released model says about records in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.output import tell

ESTIMATOR = "estimator.safetensors"
"""The file of a run of `dpfy fit`."""
ANSWERS = "answers.safetensors"
"""A file of a run of `dpfy train --protect labels`."""
STUDENT = "answers.json"
"""A file of a run of `dpfy serve student`."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def predict(
    run: Annotated[
        Path, typer.Argument(help="The folder of a finished run of dpfy train or dpfy fit.")
    ],
    data: Annotated[
        Path,
        typer.Argument(
            help="Records: CSV or Parquet by the run's schema; for images and arrays NPZ, IDX or "
            "CSV."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write to this new file (.csv or .json) instead of the screen."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict with a released model: the class of each record, and the probability of each class.

    The model's hash is checked against card and ledger, and the records are encoded as those it was
    trained on; the label column may be missing. Predictions of a released model are
    post-processing: they cost nothing, and tell nothing more about its training data.

    Example: dpfy predict runs/x people.csv --out predictions.csv
    """
    from dpfy.training import predict as predictions

    if (run / ESTIMATOR).is_file():
        _by_estimator(run, data, out, as_json)
        return
    if (run / ANSWERS).is_file():
        from dpfy.labels import job

        found = job.predicted(run, data)
    elif (run / STUDENT).is_file():
        from dpfy.prediction import student_job

        found = student_job.predicted(run, data)
    else:
        found = predictions.predict(run, data)
    told = found.to_json() | {"run": str(run)}
    if out is not None:
        predictions.write(found, run, out)
        told, lines = told | {"out": str(out)}, [f"{len(found.probabilities)} predictions: {out}"]
    else:
        lines = found.to_csv().splitlines()
    if not as_json:
        print(predictions.NOTE, file=sys.stderr)
    tell(told, lines, as_json=as_json)


def _by_estimator(run: Path, data: Path, out: Path | None, as_json: bool) -> None:
    """The same for a run of `dpfy fit`."""
    from dpfy.core.storage import write_atomically
    from dpfy.estimators import job

    found = job.predicted(run, data)
    told, rows = found.told, list(found.lines)
    if out is not None:
        if out.exists():
            from dpfy.core.errors import InvalidInput

            raise InvalidInput("--out", str(out), "exists already; choose a new file")
        write_atomically(out, ("\n".join(rows) + "\n").encode())
        told, rows = told | {"out": str(out)}, [f"{len(rows) - 1} predictions: {out}"]
    tell(told | {"run": str(run)}, rows, as_json=as_json)
