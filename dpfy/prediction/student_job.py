"""`dpfy serve student`: from the name of a data set to a released student."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import single_owner
from dpfy.data import source, unlabelled
from dpfy.data.config import KNOWN, DataConfig
from dpfy.data.dataset import DataSource
from dpfy.labels.job import classes_of
from dpfy.prediction import regression
from dpfy.prediction.claim import StudentAnswersClaim
from dpfy.prediction.pate import Student, Teachers, loaded, train_student
from dpfy.prediction.student import chances
from dpfy.prediction.voters import owners_of
from dpfy.runs.run import Run
from dpfy.training.load import ReleasedModel
from dpfy.training.predict import Predictions

KINDS = ("embedded", "digits", "mnist", "fashion-mnist", "npz")
PART = 0.9
"""Of the held-out records of a public data set that serve as public inputs where no file is given;
the others measure the student.
"""
USED_FOR = (
    "inputs without labels: coordinates that all teachers share, questions, and what the student "
    "learns from"
)


@dataclass(frozen=True)
class PublicInputs:
    """Where public inputs come from: a `file` with its `provenance`, or so many `records` of the
    held-out part of a public data set.
    """

    file: str | None = None
    provenance: str | None = None
    records: int | None = None

    def declared(self, data: DataConfig) -> dict[str, str]:
        """The row of the report."""
        if self.file is not None:
            if self.provenance is None:
                raise InvalidInput(
                    "--provenance",
                    None,
                    "must say where the public inputs are from, and why they are public",
                )
            return {
                "data": Path(self.file).name,
                "used_for": USED_FOR,
                "provenance": self.provenance,
            }
        if data.kind not in KNOWN:
            raise InvalidInput(
                "--public",
                None,
                "must be a file of public inputs; records held out of a private file are private",
            )
        if self.provenance is not None:
            raise InvalidInput("--provenance", self.provenance, "goes with --public FILE")
        said = "a part" if self.records is None else f"{self.records}"
        where = f"the held-out part of {data.kind}, a public data set; their classes were not used"
        return {
            "data": f"{said} of the held-out records of {data.kind}",
            "used_for": USED_FOR,
            "provenance": where,
        }


def claim_classes(data: DataConfig) -> int:
    """The public number of classes; data that the command does not take is refused."""
    if data.kind not in KINDS:
        raise Unsupported(
            f"a student for data of kind {data.kind!r} on the command line",
            "use dpfy.prediction.train_student in Python",
        )
    return classes_of(data)


def run(
    place: Callable[[dict[str, str]], Run],
    claim: StudentAnswersClaim,
    data: DataConfig,
    public: PublicInputs,
    teachers: Teachers,
) -> Student:
    """Train a student into a run folder. `place` is given how the public inputs are declared.

    Guarantees: nothing is read before all answers are reserved.
    """
    single_owner("teaching", data.user)
    opened: Callable[[], DataSource] = cache(lambda: source.load(data))

    def private() -> tuple[Any, Any]:
        x, y = opened().train.tensors[:2]
        return x.numpy(), y.numpy()

    def inputs() -> Tensor:
        held = opened()
        if public.file is not None:
            return unlabelled.of_numbers(public.file, data, tuple(held.features))
        found: Tensor = held.test.tensors[0][: _taken(public, held)]
        return found

    def measured(model: nn.Module) -> dict[str, Any]:
        held = opened()
        told: dict[str, Any] = {
            "reads": {"kind": data.kind, "features": list(held.features), "classes": held.classes}
        }
        x, y = (
            part[0 if public.file is not None else _taken(public, held) :]
            for part in held.test.tensors[:2]
        )
        if data.test_use != "public" or not len(x):
            return told
        right = float((chances(model, x).argmax(1) == y).double().mean())
        words = f"{len(x)} public held-out records that the student did not see, as measured"
        return told | {"test_accuracy": round(right, 6), "tested_on": words}

    return train_student(
        place(public.declared(data)),
        claim,
        private,
        inputs,
        teachers=teachers,
        owners=None if data.user is None else lambda: owners_of(opened()),
        measured=measured,
    )


def _taken(public: PublicInputs, held: DataSource) -> int:
    """How many of the held-out records are public inputs."""
    count = len(held.test)
    taken = (
        int(PART * count)
        if public.records is None
        else check.integer("--public-records", public.records)
    )
    if taken > count:
        raise InvalidInput(
            "--public-records", taken, f"must be at most the number of held-out records ({count})"
        )
    return taken


def predicted(run: Path | str, data: Path | str) -> Predictions | regression.NumberPredictions:
    """What the student of a finished run says about the records in the file `data`."""
    released = ReleasedModel.read(run)
    if regression.is_released(released):
        return regression.predicted(released, data)
    model, shape, classes = loaded(released)
    section = next(
        dict(part) for part in released.card["sections"] if part["name"] == StudentAnswersClaim.kind
    )
    if "reads" not in section:
        raise InvalidInput(
            "run",
            str(run),
            "was made by a program: load its student with dpfy.prediction.load(run).model",
        )
    kind = section["reads"]["kind"]
    config = (
        DataConfig(kind="npz", path=str(data), classes=classes)
        if kind == "npz"
        else DataConfig(kind=kind)
    )
    features = unlabelled.of_numbers(str(data), config, shape)
    with torch.no_grad():
        return Predictions(tuple(map(str, range(classes))), chances(model, features))
