"""How the settings of `projection` are chosen: on a sixth of the training images, each setting
moved by itself from the default.

This is not a private run: nothing is reserved, billed or released, and noise is torch's own, the
same for all settings of one shape. It makes the model exactly as a run does
(`self_training.learn`), from the other five sixths. Test images are not read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import mean, variance
from typing import Any

import torch
from torch import Tensor

from dpfy.labels import learners
from dpfy.labels.claim import PROJECTION
from dpfy.labels.kernel import KernelSettings, PreparedFeatures
from dpfy.labels.learners import WHITENING, KernelModel, SelfTrainingRules
from dpfy.labels.method import LabelMethod
from dpfy.labels.questions import HALF_L2
from dpfy_lab.studies.page import Table
from dpfy_lab.studies.study import Cell, Results

PARTS = 6
"""One record in so many is held out: 10,000 of 60,000."""
SEEDS = (0, 1, 2)
DEFAULT = "default"


@dataclass(frozen=True)
class Choice:
    """What is chosen: the map of the features, the rules, and the whitening of the rows along which
    labels are summed.
    """

    kernel: KernelSettings = field(default_factory=KernelSettings)
    rules: SelfTrainingRules = field(default_factory=SelfTrainingRules)
    whitening: float = WHITENING


CHOICES = {
    DEFAULT: Choice(),
    "records each 6": Choice(rules=SelfTrainingRules(records_each=6.0)),
    "records each 16": Choice(rules=SelfTrainingRules(records_each=16.0)),
    "penalty 3": Choice(rules=SelfTrainingRules(penalty=3.0)),
    "penalty 12": Choice(rules=SelfTrainingRules(penalty=12.0)),
    "student's penalty 0.3": Choice(rules=SelfTrainingRules(student_penalty=0.3)),
    "student's penalty 3": Choice(rules=SelfTrainingRules(student_penalty=3.0)),
    "whitening of sums 0.5": Choice(whitening=0.5),
    "whitening of sums 1": Choice(whitening=1.0),
    "kernel width 0.45": Choice(KernelSettings(width=0.45)),
    "kernel width 0.8": Choice(KernelSettings(width=0.8)),
    "whitening of features 0.3": Choice(KernelSettings(whitening=0.3)),
    "whitening of features 0.7": Choice(KernelSettings(whitening=0.7)),
}
"""The default first; choices of one map follow one another."""
Labelled = tuple[Tensor, Tensor]


def cell(
    data: str, epsilons: tuple[float, ...], delta: float, read: Callable[[], Labelled]
) -> Cell:
    """The sweep of a data set. `read` gives features and labels of all training images."""
    told: dict[str, Any] = {
        "data": data,
        "choices": {name: asdict(choice) for name, choice in CHOICES.items()},
        "seeds": list(SEEDS),
    }
    told |= {
        "epsilons": list(epsilons),
        "delta": delta,
        "held_out": f"one in {PARTS} training records",
    }
    return Cell(f"sweep-{data}", told, functools.partial(tried, epsilons, delta, read))


@torch.no_grad()
def tried(
    epsilons: tuple[float, ...], delta: float, read: Callable[[], Labelled]
) -> dict[str, Any]:
    """Accuracy on the held-out part for each choice, epsilon and noise seed; and on how many images
    a choice and the default differ.
    """
    features, labels = read()
    out = torch.arange(len(features)) % PARTS == PARTS - 1
    (taught, known_labels), (asked, truth) = (
        (features[part], labels[part]) for part in (~out, out)
    )
    classes, rows = int(labels.max()) + 1, list[dict[str, Any]]()
    first: dict[float, list[Tensor]] = {}
    last: tuple[KernelSettings, PreparedFeatures, Tensor] | None = None
    for name, choice in CHOICES.items():
        if last is None or last[0] != choice.kernel:
            known = PreparedFeatures.of(taught, choice.kernel)
            last = choice.kernel, known, known.public.mapped(asked)
        for epsilon in epsilons:
            noise = (
                LabelMethod(PROJECTION).claim(len(taught), classes, epsilon, delta).noise_multiplier
            )
            assert noise is not None
            models = (
                learnt(last[1], known_labels, choice, noise * HALF_L2, seed) for seed in SEEDS
            )
            right = [model.of_rows(last[2]).argmax(1) == truth for model in models]
            apart = mean(
                float((a != b).double().sum())
                for a, b in zip(first.setdefault(epsilon, right), right, strict=True)
            )
            told = {
                "choice": name,
                "epsilon": epsilon,
                "accuracies": [float(r.double().mean()) for r in right],
            }
            rows.append(told | {"apart": round(apart, 2)})
    return {"images": len(truth), "rows": rows}


def learnt(
    known: PreparedFeatures, labels: Tensor, choice: Choice, deviation: float, seed: int
) -> KernelModel:
    """The model of one noisy sum of labels, its noise drawn by torch."""
    classes = int(labels.max()) + 1
    count = choice.rules.directions(len(labels), deviation, classes, known.public.directions)
    matrix = known.public.directed(known.rows, count, choice.whitening)
    summed = matrix.T @ torch.nn.functional.one_hot(labels, classes).to(matrix.dtype)
    released = summed + deviation * torch.randn(
        count, classes, generator=torch.Generator().manual_seed(seed)
    )
    model = KernelModel(known.public, count, classes, choice.whitening)
    return learners.learn(model, known, matrix, released, (deviation, choice.rules))


@dataclass(frozen=True)
class Tried:
    """A choice: its accuracy by data set and epsilon, in points, its mean lead over the default,
    and the standard error of the lead.
    """

    name: str
    by_row: dict[tuple[str, float], float]
    lead: float
    error: float


def compared(results: Results) -> list[Tried]:
    """Every choice, the default first. What is chosen are constants for all data sets and epsilons:
    so their mean decides.

    The error has two parts: of the images (those of one data set are the same at all epsilons:
    their errors add up) and of the noise.
    """
    found: dict[str, list[tuple[str, int, dict[str, Any], dict[str, Any]]]] = {}
    for stored in results.starting("sweep-"):
        default = {row["epsilon"]: row for row in stored.result["rows"] if row["choice"] == DEFAULT}
        for row in stored.result["rows"]:
            place = stored.settings["data"], stored.result["images"], row, default[row["epsilon"]]
            found.setdefault(row["choice"], []).append(place)
    return [_tried(name, rows) for name, rows in found.items()]


def _tried(name: str, rows: list[tuple[str, int, dict[str, Any], dict[str, Any]]]) -> Tried:
    by_row = {(data, row["epsilon"]): 100 * mean(row["accuracies"]) for data, _, row, _ in rows}
    leads = [
        [100 * (a - b) for a, b in zip(row["accuracies"], default["accuracies"], strict=True)]
        for *_, row, default in rows
    ]
    of_noise = sum(variance(lead) / len(lead) for lead in leads)
    by_data: dict[str, float] = {}
    for data, images, row, _ in rows:
        by_data[data] = by_data.get(data, 0.0) + 100 * math.sqrt(row["apart"]) / images
    error = math.sqrt(of_noise + sum(part**2 for part in by_data.values())) / len(rows)
    return Tried(name, by_row, mean(mean(lead) for lead in leads), error)


def table(results: Results) -> Table:
    """The choices side by side."""
    found = compared(results)
    keys = list(found[0].by_row) if found else []
    columns = [
        "setting",
        *(f"{data} {epsilon:g}" for data, epsilon in keys),
        "mean %",
        "lead over the default",
        "standard error",
    ]
    rows = [
        [t.name, *(t.by_row.get(key) for key in keys), mean(t.by_row.values()), t.lead, t.error]
        for t in found
    ]
    return Table(
        "validation",
        "Accuracy on held-out training images, one setting moved at a time",
        columns,
        rows,
    )
