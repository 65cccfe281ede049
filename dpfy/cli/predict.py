"""`dpfy predict`: what a released model says about records in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli import options
from dpfy.cli.output import tell


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
    as_json: options.Json = False,
) -> None:
    """Predict with a released model: the class of each record, and the probability of each class.

    The model's hash is checked against report and ledger, and the records are encoded as those it was
    trained on; the label column may be missing. Predictions of a released model are
    post-processing: they cost nothing, and tell nothing more about its training data.

    Example: dpfy predict runs/x people.csv --out predictions.csv
    """
    from dpfy.runs import released
    from dpfy.training import predict as predictions

    found = released.predict(run, data)
    told = found.to_json() | {"run": str(run)}
    lines = found.to_csv().splitlines()
    if out is not None:
        predictions.write(found, run, out)
        told, lines = told | {"out": str(out)}, [f"{len(lines) - 1} predictions: {out}"]
    if not as_json:
        print(predictions.NOTE, file=sys.stderr)
    tell(told, lines, as_json=as_json)
