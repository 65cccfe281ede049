"""A fit of labels from the command line: configuration, claim, reservation, data, model, in this
order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core import check, errors, settings
from dpfy.core.errors import InvalidInput
from dpfy.core.settings import setting
from dpfy.data import count, source, unlabelled
from dpfy.data.config import DataConfig, name_kind
from dpfy.labels.claim import BINS, METHODS, PROJECTION, SCHEMA, LabelClaim
from dpfy.labels.fitting import LabelFit, images, load, run_fit, section
from dpfy.labels.method import AUTO, CORRECTIONS, LabelMethod
from dpfy.runs.dataset import delta_of, ledger_delta
from dpfy.runs.mark import HIDDEN, Mark
from dpfy.runs.run import Run
from dpfy.tables.schema import training_schema
from dpfy.training.job import budget_of, public_records, require_run
from dpfy.training.load import CONFIG, ReleasedModel
from dpfy.training.paperwork import PAPERWORK, Paperwork
from dpfy.training.predict import AT_ONCE, Predictions, schema_of_run

DEFAULT_EPSILON = 1.0
OF_CLASSES = tuple(name for name in METHODS if name != BINS)


@dataclass(frozen=True)
class LabelsConfig:
    """[labels]: how labels are released, and what is learnt from the answers."""

    method: str = setting(PROJECTION, f"How labels are released: {', '.join(OF_CLASSES)}.")
    epsilon: float = setting(DEFAULT_EPSILON, "Epsilon to reach, for replacing one label.")
    delta: float | None = setting(
        None,
        "Delta (projection, pate-fm); the other methods are pure.",
        "the largest power of ten at most 1/records^1.1, at most 1e-5, or that of the budget",
    )
    records: int | None = setting(
        None, "Number of records to train on, which is public.", "that of the data set, or counted"
    )
    stages: int | None = setting(
        None, "Parts of the records, asked one after the other (lp-mst).", "2"
    )
    correction: str = setting(
        AUTO, f"What is made of noisy labels: auto, {', '.join(CORRECTIONS[:3])}."
    )
    rounds: int = setting(
        1, "How often the model is learnt, each time with the prior of the one before."
    )
    clusters: int = setting(256, "Clusters of the features (clusters).")
    teachers: int | None = setting(
        None, "Teachers who share the labels (pate-fm).", "one for 20 labels, 1000 at most"
    )
    asked: int | None = setting(
        None, "Records that teachers vote on (pate-fm).", "as many as leave a lead over the noise"
    )

    def __post_init__(self) -> None:
        check.one_of("labels.method", self.method, OF_CLASSES)
        check.epsilon("labels.epsilon", self.epsilon)
        if self.delta is not None:
            check.delta("labels.delta", self.delta)
        if self.records is not None:
            check.integer("labels.records", self.records, least=2, most=check.RECORDS)
        check.one_of("labels.correction", self.correction, (AUTO, *CORRECTIONS[:3]))
        try:
            _ = self.chosen
        except InvalidInput as problem:
            raise InvalidInput(f"labels.{problem.field}", problem.value, problem.rule) from None

    @property
    def chosen(self) -> LabelMethod:
        """The method with its settings."""
        shared = self.stages, self.correction, self.rounds, self.clusters
        return LabelMethod(self.method, *shared, teachers=self.teachers, asked=self.asked)


@dataclass(frozen=True)
class LabelJob(Paperwork):
    """Everything `dpfy train --protect labels` does, as data."""

    data: DataConfig = field(default_factory=DataConfig)
    labels: LabelsConfig = field(default_factory=LabelsConfig)

    def __post_init__(self) -> None:
        if self.data.user is not None:
            raise InvalidInput(
                "data.user",
                self.data.user,
                "goes with whole records (--protect records): a label is the unit here",
            )
        if self.data.test_use == "billed":
            raise InvalidInput(
                "data.test", self.data.test, "must be public or withheld where labels are protected"
            )
        if self.data.kind in ("text", "shakespeare"):
            raise InvalidInput("data.kind", self.data.kind, "has no labels")

    def records(self) -> int:
        """How many records there are to train on: public, so that a table may be counted."""
        return self.labels.records or public_records(self.data) or count.records(self.data)

    def delta(self) -> float:
        """The delta, by the rule of all commands."""
        return delta_of(self.labels.delta, self.records(), ledger_delta(self.ledger.path)).value

    def place(self, out: Path, resume: bool, seed: int | None) -> Run:
        """Where the run lives and what it may spend."""
        texts = self.to_toml(publish=True), self.to_toml(publish=False)
        about = {"model": "kernel ridge regression", "data": self.about.data or self.data.kind}
        about |= {} if self.about.author is None else {"author": self.about.author}
        budget = budget_of(self.ledger, self.delta())
        return Run(out, resume, self.ledger.path, budget, seed, texts, self.public.rows(), about)


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "labels": LabelsConfig,
    **PAPERWORK,
}
DECISIVE = {
    "data.kind": tuple(settings.names(DataConfig)),
    "labels.method": ("stages", "correction", "rounds", "clusters", "teachers", "asked"),
    "ledger.path": ("budget_epsilon", "budget_delta", "budget_approximation"),
}


def make(path: Path | None, given: Mapping[str, Any]) -> LabelJob:
    """The configuration in a file, if any, with what the command line gives over it: all that is
    wrong is told at once.
    """
    raw, found = settings.parsed(SECTIONS, path) if path else ({}, [])
    values = settings.merged(SECTIONS, raw, given, {})
    name_kind(values["data"])
    config, wrong = settings.assembled(LabelJob, SECTIONS, values, DECISIVE)
    errors.raise_all([*found, *wrong])
    made: LabelJob = config
    return made


def is_ours(out: Path) -> bool:
    """Whether `out` holds a run of this kind that can be resumed, or a finished one."""
    for file in (out / HIDDEN / CONFIG, out / CONFIG):
        if file.is_file():
            return "\n[labels]\n" in f"\n{file.read_text(errors='replace')}"
    return False


def stored(out: Path) -> Path:
    """Where an unfinished run keeps its whole configuration; a finished one has the published
    one.
    """
    hidden = out / HIDDEN / CONFIG
    if Mark.find(out) is None and (out / CONFIG).is_file():
        return out / CONFIG
    require_run(out)
    if not hidden.is_file():
        rule = (
            "was stopped before its configuration was stored, and nothing was spent: start it "
            "again without --resume"
        )
        raise InvalidInput("run", str(out), rule)
    return hidden


def run(
    config: LabelJob, out: Path, *, resume: bool = False, seed: int | None = None
) -> tuple[LabelFit, float]:
    """Run a job into the folder `out`, or resume it there; and the seconds it took.

    Guarantees: the claim is reserved before any data is read; refused data gives the reservation
    back and leaves nothing.
    """
    began, records = time.monotonic(), config.records()
    method = config.labels.chosen
    held: dict[str, source.DataSource] = {}

    def read() -> tuple[Tensor, Any]:
        data = source.load(config.data)
        if data.classes != claim.outcomes:
            raise InvalidInput("data.classes", data.classes, f"must be {claim.outcomes}")
        features, labels = data.train.tensors
        held["test"] = data
        return images(features), labels

    def measured(model: nn.Module) -> dict[str, Any]:
        data = held["test"]
        told: dict[str, Any] = {"reads": {"features": list(data.features), "classes": data.classes}}
        if config.data.test_use == "public":
            features, labels = data.test.tensors
            right = (model(images(features)).argmax(1) == labels).double().mean()
            told |= {
                "test_accuracy": round(float(right), 6),
                "tested_on": f"{len(labels)} public held-out records, as measured",
            }
        return told

    claim = _claim(config, records)
    with torch.no_grad():
        made = run_fit(
            config.place(out, resume, seed),
            claim,
            method,
            read,
            measured=measured,
            files=_files(config.data),
        )
    return made, time.monotonic() - began


def _files(data: DataConfig) -> dict[str, bytes]:
    """The public schema by which a table is read."""
    return {} if data.schema is None else {SCHEMA: training_schema(data.schema).to_toml().encode()}


def _claim(config: LabelJob, records: int) -> LabelClaim:
    return config.labels.chosen.claim(
        records, classes_of(config.data), config.labels.epsilon, config.delta()
    )


def classes_of(data: DataConfig) -> int:
    """The public number of classes, known without a look at the data."""
    if data.kind in ("embedded", "digits", "mnist", "fashion-mnist", "cifar10"):
        return 10
    if data.kind == "cifar100":
        return 100
    if data.names is not None:
        return len(data.names)
    if data.classes is not None:
        return data.classes
    return len(training_schema("adult" if data.kind == "adult" else str(data.schema)).label.classes)


def predicted(run: Path | str, data: Path | str) -> Predictions:
    """What the model of a finished run of ``dpfy train --protect labels`` says about the records in
    the file `data`.
    """
    released = ReleasedModel.read(run)
    config = make(released.file(CONFIG), {})
    reads = section(released.card)["reads"]
    schema = schema_of_run(released, config.data.kind)
    if schema is not None:
        features = unlabelled.of_table(str(data), schema, None)
    else:
        features = unlabelled.of_numbers(str(data), config.data, tuple(reads["features"]))
    names = tuple(map(str, range(reads["classes"]))) if schema is None else schema.label.classes
    model = load(run)
    with torch.no_grad():
        scores = torch.cat([model(part) for part in features.split(AT_ONCE)]).clamp(1e-6, 1.0)
    return Predictions(names, scores / scores.sum(1, keepdim=True))
