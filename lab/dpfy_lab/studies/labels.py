"""Private labels of public images: MNIST and Fashion-MNIST with scattering features, beside the
papers' figures.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpfy
from dpfy.core.errors import Internal
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.labels.claim import PROJECTION, RR
from dpfy.labels.fitting import images, run_fit
from dpfy.labels.learners import KernelLearner, KernelModel, SelfTrainingRules
from dpfy.labels.method import LabelMethod
from dpfy.runs.run import Run
from dpfy_lab.studies import images as whole_records
from dpfy_lab.studies import labels_sweep
from dpfy_lab.studies.labels_page import page
from dpfy_lab.studies.study import Cell, Options, Study

DELTA = 1e-5
CLASSES = 10
SEEDS = range(5)
DATA = ("mnist", "fashion-mnist")
EPSILONS = {PROJECTION: (0.1, 0.5, 1.0), RR: (0.1, 0.5, 1.0)}
METHODS = {name: LabelMethod(name) for name in EPSILONS}


WHOLE = (0.1, 0.5)
"""At which epsilons the recipe that protects whole records is run here; the study of images has it
from 1 on.
"""
WHOLE_SEEDS = range(3)


def cells(options: Options) -> list[Cell]:
    """The sweep on held-out training images, the runs, and runs of the recipe that protects whole
    records.
    """
    found = []
    for data in ("embedded",) if options.fast else DATA:
        found.append(
            labels_sweep.cell(
                data, EPSILONS[PROJECTION], DELTA, functools.partial(training, data, options)
            )
        )
        found += run_cells(data, options)
    return found + ([] if options.fast else whole_cells(options))


def run_cells(data: str, options: Options) -> list[Cell]:
    """One cell for each method, epsilon and noise seed."""
    found = []
    rows = [(method, epsilon) for method, epsilons in EPSILONS.items() for epsilon in epsilons]
    for (method, epsilon), seed in itertools.product(rows, SEEDS):
        told = {"data": data, "method": method, "epsilon": epsilon, "delta": DELTA, "seed": seed}
        told |= {
            "stages": METHODS[method].parts,
            "correction": METHODS[method].corrected,
            "rules": asdict(SelfTrainingRules()),
        }
        found.append(
            Cell(
                f"run-{data}-{method}-{epsilon:g}-{seed}",
                told,
                functools.partial(one, told, options),
            )
        )
    return found


def whole_cells(options: Options) -> list[Cell]:
    """The recipe that protects whole records (`dpfy reproduce images`) at small epsilons, with the
    settings that it has at epsilon 1.
    """
    found = []
    for data, epsilon, seed in itertools.product(DATA, WHOLE, WHOLE_SEEDS):
        recipe = whole_records.CHOSEN[data, 1.0]
        told = {
            "data": data,
            "epsilon": epsilon,
            "delta": whole_records.DELTA,
            "seed": seed,
            "recipe": asdict(recipe),
        }
        compute = functools.partial(whole_records.run_one, data, epsilon, seed, recipe, options)
        found.append(Cell(f"whole-{data}-{epsilon:g}-{seed}", told, compute))
    return found


@functools.lru_cache(maxsize=1)
def scattered(data: str, options: Options) -> tuple[Tensor, Tensor, float]:
    """Training features, labels, and the processor seconds that the features took."""
    x, y = load(
        DataConfig(kind=data), data_dir=None if data == "embedded" else options.data_dir
    ).train.tensors
    started = time.process_time()
    features = images(x)
    return features, y, time.process_time() - started


def training(data: str, options: Options) -> tuple[Tensor, Tensor]:
    """Training features and labels: all that a sweep is given."""
    return scattered(data, options)[:2]


@functools.lru_cache(maxsize=1)
def extracted(data: str, options: Options) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], float]:
    """(training features, labels, test features, labels), and the processor seconds that the
    training features took.
    """
    features, labels, spent = scattered(data, options)
    x, y = load(
        DataConfig(kind=data), data_dir=None if data == "embedded" else options.data_dir
    ).test.tensors
    return (features, labels, images(x), y), spent


@functools.lru_cache(maxsize=1)
def learner(data: str, options: Options) -> tuple[KernelLearner, Tensor, float]:
    """What follows from all training features alone: shared by the runs. What the map gives for the
    test images; processor seconds.
    """
    (features, _, test, _), spent = extracted(data, options)
    started, made = time.process_time(), KernelLearner()
    made.prepared(features)
    return made, made.prepared(features).public.mapped(test), spent + time.process_time() - started


def one(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A private run from claim to verified card. The processor time is that of a run that makes its
    own features and map.
    """
    (features, labels, _, truth), _ = extracted(settings["data"], options)
    made, test, before = learner(settings["data"], options)
    started = time.process_time()
    model, card = fitted(
        METHODS[settings["method"]], settings["epsilon"], settings["seed"], (features, labels), made
    )
    spent = time.process_time() - started
    stated = card["guarantee"]
    return {
        "test_accuracy": float((model.of_rows(test).argmax(1) == truth).double().mean()),
        "epsilon": stated["epsilon"],
        "delta": stated["delta"],
        "accountant": stated["accountant"],
        "adjacency": stated["adjacency"],
        "unit": stated["unit"],
        "whole_cpu_seconds": round(before + spent, 2),
    }


def fitted(
    method: LabelMethod,
    epsilon: float,
    seed: int,
    data: tuple[Tensor, Tensor],
    with_: KernelLearner,
) -> tuple[KernelModel, dict[str, Any]]:
    """A model and its card, through the public interface, verified."""
    claim = method.claim(len(data[0]), CLASSES, epsilon, DELTA)
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        run = Path(place) / "run"
        made = run_fit(Run(run, seed=seed), claim, method, lambda: data, with_)
        wrong = [f for f in dpfy.verify(run) if not f.holds]
    if wrong:
        raise Internal(f"a run of {method.name} verifies", f"{wrong[0].what}: {wrong[0].detail}")
    model: nn.Module = made.model
    assert isinstance(model, KernelModel)
    return model, made.report


STUDY = Study(
    "labels",
    "Private labels of public images",
    "60,000 images to learn from, 10,000 to test on; one label replaced. Published for comparison: "
    "Ghazi et al. 2021 (LP-2ST) and 2024 "
    "(LabelDP-Pro).",
    cells,
    page,
)
