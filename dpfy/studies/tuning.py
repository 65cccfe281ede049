"""Tuning that pays its own price: a search within the budget against none and against composition, and the guide's recipes on images.

The guide (Ponomareva et al. 2023) claims of section 5.4.1: accuracy depends on the noise of the average gradient, so that (sigma, B) and
(2 sigma, 2 B) do alike; ClipSearch and the strategy for privacy and computation find settings as good as those of a full grid.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpfy
from dpfy.core.book import rehearsal
from dpfy.core.codec import number
from dpfy.core.random import Randomness
from dpfy.data.records import Records
from dpfy.data.source import load
from dpfy.studies.study import Cell, Options, Study
from dpfy.studies.tuning_page import page
from dpfy.training import config as configuration
from dpfy.training import job as training
from dpfy.tuning import config as searches
from dpfy.tuning import job, strategies
from dpfy.tuning.sealed import SealedRun

EPSILON, DELTA, SEEDS = 3.0, 1e-5, 5
SEARCH: dict[str, Any] = {
    "data": {"kind": "embedded"},
    "model": {"name": "scattering-linear"},
    "privacy": {"epsilon": EPSILON, "delta": DELTA},
    "training": {"steps": 24},
    "search": {
        "training": {"learning_rate": "0.05..5 log", "clip_norm": "0.05..2 log", "batch_size": [256, 512, 1024]},
        "model": {"groups": [9, 27, 81]},
    },
    "tune": {"trials": 20},
}
"""Rate, clip norm, batch and features of a linear model on the embedded images: wide ranges, as of somebody who knows nothing of them."""
ARMS: dict[str, dict[str, Any]] = {"random": {"law": "poisson"}, "composition": {"route": "composition"}}
CNN: dict[str, dict[str, Any]] = {
    "model": {"name": "lenet5"},
    "privacy": {"epsilon": EPSILON, "delta": DELTA},
    "training": {"batch_size": 512},
}
"""A generic network at the defaults of `dpfy train`, which were chosen for another model, but for its batch."""
MNIST: dict[str, Any] = {"records": 10_000, "test": 5_000, "steps": 60, "rate": 0.5, "clip": 0.5}
PAIRS = tuple((batch, noise) for noise in (1.0, 4.0, 16.0) for batch in (250, 500, 1000))
"""Batches and noise multipliers; those with the same ratio should do alike."""
FASHION: dict[str, Any] = {"records": 6_000, "test": 2_000}
LIMITS = {"batch_size": 300.0, "epochs": 5.0, "most_batch": 1500.0, "most_epochs": 15.0}
RATES, NORMS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SMALL: dict[str, Any] = {
    "batch_size": 150.0,
    "learning_rate": 0.1,
    "steps": 60,
    "epsilon": 3.0,
    "share": 0.95,
    "norms": [0.3, 1.0, 3.0, 10.0, 30.0],
}
NOISES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


def cells(options: Options) -> list[Cell]:
    """Searches on the embedded images; pairs of batch and noise on MNIST; strategies and a full grid on Fashion-MNIST."""
    found = []
    for seed, arm in itertools.product(range(1 if options.fast else SEEDS), ARMS):
        settings = {"search": SEARCH, "arm": ARMS[arm], "seed": seed}
        found.append(Cell(f"search-{arm}-{seed}", settings, functools.partial(searched, ARMS[arm], seed)))
    for seed in range(1 if options.fast else SEEDS):
        found.append(Cell(f"untuned-{seed}", {"job": CNN, "seed": seed}, functools.partial(untuned, seed)))
    if options.fast:
        return found
    for (batch, noise), seed in itertools.product(PAIRS, range(3)):
        settings = {**MNIST, "batch": batch, "noise": noise * batch / 1000, "seed": seed}
        found.append(Cell(f"scaling-{noise:g}-{batch}-{seed}", settings, functools.partial(scaling, settings, options.data_dir)))
    about = {**FASHION, "limits": LIMITS, "rates": list(RATES), "norms": list(NORMS), "epsilon": EPSILON, "delta": DELTA}
    for norm in NORMS:
        found.append(Cell(f"grid-{norm:g}", {**about, "clip": norm}, functools.partial(grid_row, norm, options.data_dir)))
    found.append(Cell("strategy-computation", about, functools.partial(computation, options.data_dir)))
    small = {**about, "small": SMALL, "noises": list(NOISES)}
    found.append(Cell("strategy-accuracy", small, functools.partial(accuracy, options.data_dir)))
    return found


def searched(arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """One search on the embedded images, verified; accuracy on the images that no trial was scored on."""
    raw = {**SEARCH, "tune": {**SEARCH["tune"], **arm}}
    with tempfile.TemporaryDirectory() as place:
        found = job.run(searches.made(raw, {}, {}), Path(place) / "run", seed=seed)
        wrong = [f.what for f in dpfy.verify(Path(place) / "run") if not f.holds]
    told = found.to_json()
    kept = {key: told[key] for key in ("settings", "score", "test_accuracy", "epsilon", "training_alone")}
    return {**kept, "noise_ratio": told["bill"]["noise_ratio"], "wrong": wrong}


def untuned(seed: int) -> dict[str, Any]:
    """A generic network at the same epsilon, at default settings, on the same test images."""
    with tempfile.TemporaryDirectory() as place:
        config = configuration.make(CNN, {})
        outcome = training.run(config, Path(place) / "run", seed=seed)
        model = dpfy.load(outcome.run)
        test, _ = job.halves(load(config.data).test, 0.5)
        return {"test_accuracy": job.right(model, test) / len(test), "epsilon": outcome.card["guarantee"]["epsilon"]}


@functools.lru_cache(maxsize=2)
def images(kind: str, records: int, test: int, data_dir: str | None) -> tuple[Records, Records]:
    """The first so many images of a public set, and of its test set, as rows of pixels."""
    found = load(kind, data_dir=data_dir)
    taken = [part.take(torch.arange(count)) for part, count in ((found.train, records), (found.test, test))]
    train, held = (Records((x.flatten(1), y)) for x, y in taken)
    return train, held


def utility(settings: Mapping[str, Any], data: tuple[Records, Records], seed: int = 0) -> float:
    """The accuracy of a linear model trained with these settings; the data of the study is public, so nothing is billed."""
    train, test = data
    size = {"steps": settings["steps"]} if "steps" in settings else {"epochs": settings["epochs"]}
    recipe = dpfy.dpsgd(len(train), settings["batch_size"], clip_norm=settings["clip_norm"], **size)
    plan = recipe.with_noise(settings["noise_multiplier"], delta=DELTA)
    model = nn.Linear(train.tensors[0].shape[1], 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["learning_rate"], momentum=0.9)
    with tempfile.TemporaryDirectory() as place:
        permit, secret = rehearsal(plan.event, plan.recipe.steps), Randomness.for_tests(seed)
        run = SealedRun(Path(place) / "run", plan, permit, secret, math.inf)
        with dpfy.PrivateTraining(model, optimizer, train, plan, run, update=dpfy.Update(0.9)) as training_run:
            for x, y in training_run.batches():
                training_run.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
            with training_run.averaged():
                return job.right(model, test) / len(test)


def scaling(settings: Mapping[str, Any], data_dir: str | None) -> dict[str, Any]:
    """Accuracy on MNIST at one batch and noise multiplier."""
    data = images("mnist", settings["records"], settings["test"], data_dir)
    asked = {"batch_size": float(settings["batch"]), "noise_multiplier": settings["noise"], "clip_norm": settings["clip"]}
    return {"accuracy": utility({**asked, "steps": settings["steps"], "learning_rate": settings["rate"]}, data, settings["seed"])}


def _fashion(data_dir: str | None) -> tuple[Records, Records]:
    return images("fashion-mnist", FASHION["records"], FASHION["test"], data_dir)


def _noise() -> float:
    records, batch = FASHION["records"], LIMITS["most_batch"]
    return dpfy.dpsgd(records, batch, epochs=LIMITS["most_epochs"]).calibrate(EPSILON, DELTA).noise_multiplier


def grid_row(norm: float, data_dir: str | None) -> dict[str, Any]:
    """Accuracy over rates at one clip norm, with the noise of (epsilon, delta) at the largest feasible batch and epochs."""
    data, sigma = _fashion(data_dir), _noise()
    base = {"batch_size": LIMITS["most_batch"], "epochs": LIMITS["most_epochs"], "noise_multiplier": sigma, "clip_norm": norm}
    return {"noise": sigma, "accuracies": [utility({**base, "learning_rate": rate}, data) for rate in RATES]}


def computation(data_dir: str | None) -> dict[str, Any]:
    """The strategy for privacy and computation, and what its settings reach, with another noise too."""
    data = _fashion(data_dir)
    found = strategies.privacy_and_computation(
        lambda settings: utility(settings, data), records=FASHION["records"], epsilon=EPSILON, delta=DELTA,
        limits=strategies.Limits(**LIMITS), rates=RATES, norms=NORMS,
    )  # fmt: skip
    return _found(found, data)


def accuracy(data_dir: str | None) -> dict[str, Any]:
    """The strategy for privacy and accuracy: asked for a share of what is reached without privacy."""
    data = _fashion(data_dir)
    base = {"batch_size": SMALL["batch_size"], "learning_rate": SMALL["learning_rate"]}
    plain = utility({**base, "steps": SMALL["steps"], "clip_norm": math.inf, "noise_multiplier": 0.0}, data)
    found = strategies.privacy_and_accuracy(
        lambda settings: utility(settings, data), base, records=FASHION["records"], steps=SMALL["steps"], epsilon=SMALL["epsilon"],
        delta=DELTA, wanted=SMALL["share"] * plain, noises=NOISES, norms=SMALL["norms"],
    )  # fmt: skip
    return {**_found(found, data), "plain": plain, "wanted": SMALL["share"] * plain}


def _found(found: strategies.Advice, data: tuple[Records, Records]) -> dict[str, Any]:
    reached = [utility(found.settings, data, seed) for seed in (1, 2, 3)]
    tried = [[{k: number(v) for k, v in settings.items()}, score] for settings, score in found.tried]
    return {"settings": found.settings, "reasons": list(found.reasons), "reached": reached, "tried": tried, "runs": len(tried)}


STUDY = Study(
    "tuning",
    "Tuning that pays its own price",
    "Ponomareva et al. 2023, How to DP-fy ML, section 5.4; Papernot & Steinke 2022, Hyperparameter Tuning with Renyi Differential Privacy.",
    cells,
    page,
)
