"""Predictions of a released model on records of one's own. They cost nothing: the model was
released, and they are post-processing.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core import storage
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.storage import write_atomically
from dpfy.data import unlabelled
from dpfy.tables.schema import Schema, training_schema
from dpfy.tables.sources import cells_of
from dpfy.training.load import CONFIG, ReleasedModel

SCHEMA = "schema.toml"
AT_ONCE = 1000
NOTE = (
    "Predictions of a released model are post-processing: they tell nothing more about its "
    "training data than its report states, and cost "
    "nothing. The guarantee protects that data, not the records predicted on."
)


@dataclass(frozen=True)
class Predictions:
    """The probability of each class for each record."""

    classes: tuple[str, ...]
    probabilities: Tensor

    def predicted(self) -> list[str]:
        """The most probable class of each record."""
        return [self.classes[place] for place in self.probabilities.argmax(1).tolist()]

    def to_json(self) -> dict[str, Any]:
        """As JSON: the classes, and for each record its class and the probabilities in the order of
        the classes.
        """
        told = zip(self.predicted(), self.probabilities.tolist(), strict=True)
        rows = [
            {"prediction": name, "probabilities": [round(p, 6) for p in each]}
            for name, each in told
        ]
        return {
            "classes": list(self.classes),
            "records": len(rows),
            "predictions": rows,
            "note": NOTE,
        }

    def to_csv(self) -> str:
        """As CSV: the class, then one probability for each class."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["prediction", *(f"probability {name}" for name in self.classes)])
        for name, each in zip(self.predicted(), self.probabilities.tolist(), strict=True):
            writer.writerow([name, *(f"{p:.6f}" for p in each)])
        return out.getvalue()


def predict(run: Path | str, data: Any, model: nn.Module | None = None) -> Predictions:
    """What the model of a finished run says about the records in the file or the table `data`. A
    run of ``dpfy train`` knows its model; that of another is given as `model`.

    A table (CSV, Parquet) is read by the schema that the run keeps; its label may be missing.
    Images and arrays are given as NPZ (array `x`), IDX or a CSV of numbers.

    Guarantees: the model's hash is checked; records are encoded as those it was trained on; nothing
    of the run is changed.
    """
    released = ReleasedModel.read(run)
    if model is not None or (
        SCHEMA in released.card["files"] and CONFIG not in released.card["files"]
    ):
        return _of_program(released, data, model)
    config, model = released.config(), released.built()
    shape, count = released.reads()
    schema = schema_of_run(released, config.data.kind)
    if schema is not None and not isinstance(data, str | Path):
        features = _of_cells(data, schema)
    elif schema is not None:
        features = unlabelled.of_table(str(data), schema, config.data.user)
    elif config.data.kind in (*unlabelled.SCALES, "npz"):
        features = unlabelled.of_numbers(str(data), config.data, shape)
    else:
        raise Unsupported(
            f"predicting for data of kind {config.data.kind!r}",
            "load the model with dpfy.load and call it",
        )
    names = tuple(map(str, range(count))) if schema is None else schema.label.classes
    if len(names) != count or tuple(features.shape[1:]) != shape:
        seen = f"{list(features.shape[1:])} numbers, {len(names)} classes"
        raise InvalidInput(
            SCHEMA,
            seen,
            f"must be what the model was trained on: {list(shape)} numbers, {count} classes",
        )
    with torch.no_grad():
        found = torch.cat([model(part).softmax(1) for part in features.split(AT_ONCE)])
    if not bool(torch.isfinite(found).all()):
        raise InvalidInput(
            "run", str(run), "its model gives no numbers for these records: training diverged"
        )
    return Predictions(names, found)


def _of_program(released: ReleasedModel, data: Any, model: nn.Module | None) -> Predictions:
    """The same for a run of `dpfy.fit` on a Dataset, whose folder keeps the schema."""
    if model is None:
        rule = "was made by a program: give its model, dpfy.predict(run, data, model=net)"
        raise InvalidInput("run", str(released.folder), rule)
    schema = Schema.parse(
        storage.content("schema", released.file(SCHEMA), name=SCHEMA).decode(),
        SCHEMA,
        labelled=True,
    )
    made = released.into(model).eval()
    with torch.no_grad():
        parts = _of_cells(data, schema).split(AT_ONCE)
        return Predictions(
            schema.label.classes, torch.cat([made(part).softmax(1) for part in parts])
        )


def _of_cells(data: Any, schema: Schema) -> Tensor:
    cells = cells_of(data, [column.name for column in schema.features])
    known = {name: held for name, held in cells.items() if name in schema.names}
    return unlabelled.table.unlabelled(known, schema, "the rows")


def schema_of_run(released: ReleasedModel, kind: str) -> Schema | None:
    """The schema by which the run read its table; None for data that has none."""
    if kind == "adult":
        return training_schema("adult")
    if kind not in ("csv", "parquet"):
        return None
    if SCHEMA not in released.card["files"]:
        rule = (
            f"keeps no {SCHEMA}: it was made by an earlier version; use dpfy.load(run, model) and "
            f"encode the records yourself"
        )
        raise InvalidInput("run", str(released.folder), rule)
    text = storage.content("schema", released.file(SCHEMA), name=SCHEMA).decode()
    return Schema.parse(text, SCHEMA, labelled=True)


def write(found: Predictions, run: Path, out: Path) -> None:
    """Put predictions into a new file, as JSON where its name ends so, else as CSV."""
    if out.exists():
        raise InvalidInput("--out", str(out), "is there already; choose another name")
    if run.resolve() in out.resolve().parents:
        raise InvalidInput(
            "--out",
            str(out),
            "must lie outside of the run folder; dpfy report derive adds a file to a run",
        )
    if not out.resolve().parent.is_dir():
        raise InvalidInput("--out", str(out), "must lie in a folder that exists")
    text = json.dumps(found.to_json(), indent=1) + "\n" if out.suffix == ".json" else found.to_csv()
    write_atomically(out, text.encode())
