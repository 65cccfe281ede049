"""Tuning that pays its own price: a search within the budget against none and against composition,
and the guide's recipes on images.

The guide (Ponomareva et al. 2023) claims of section 5.4.1: accuracy depends on the noise of the
average gradient, so that (sigma, B) and (2 sigma, 2 B) do alike; ClipSearch and the strategy for
privacy and computation find settings as good as those of a full grid.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

import dpfy
from dpfy.core.codec import number
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.data.records import Records
from dpfy.data.source import load
from dpfy.training import Update
from dpfy.training import config as configuration
from dpfy.training import job as training
from dpfy.tuning import config as searches
from dpfy.tuning import job
from dpfy.tuning.sealed import SealedRun
from dpfy_lab import strategies
from dpfy_lab.studies.study import Cell, Options, Study
from dpfy_lab.studies.tuning_page import page

EPSILON, DELTA, SEEDS = 3.0, 1e-5, 5
SEARCH: dict[str, Any] = {
    "data": {"kind": "embedded"},
    "model": {"name": "scattering-linear"},
    "privacy": {"epsilon": EPSILON, "delta": DELTA},
    "training": {"steps": 24},
    "search": {
        "training": {
            "learning_rate": "0.05..5 log",
            "clip_norm": "0.05..2 log",
            "batch_size": [256, 512, 1024],
        },
        "model": {"groups": [9, 27, 81]},
    },
    "tune": {"trials": 20},
}
"""Rate, clip norm, batch and features of a linear model on the embedded images: wide ranges, as of
somebody who knows nothing of them.
"""
ARMS: dict[str, dict[str, Any]] = {
    "random": {"law": "poisson"},
    "composition": {"route": "composition"},
}
CNN: dict[str, dict[str, Any]] = {
    "model": {"name": "lenet5"},
    "privacy": {"epsilon": EPSILON, "delta": DELTA},
}
UNTUNED: dict[str, dict[str, dict[str, Any]]] = {
    "untuned-default": CNN,
    "untuned": {**CNN, "training": {"batch_size": 512}},
}
"""A generic network at the defaults of `dpfy train`, which were chosen for another model: as they
are, and with a smaller batch.
"""
MNIST: dict[str, Any] = {"records": 10_000, "test": 5_000, "steps": 60, "rate": 0.5, "clip": 0.5}
PAIRS = tuple((batch, noise) for noise in (1.0, 4.0, 16.0) for batch in (250, 500, 1000))
"""Batches and noise multipliers; those with the same ratio should do alike."""
FASHION: dict[str, Any] = {"records": 6_000, "validation": 4_000}
"""The first training images, and those behind them, by which strategies choose; what they chose is
measured on all test images.
"""
LIMITS = {"batch_size": 300.0, "epochs": 5.0, "most_batch": 1500.0, "most_epochs": 15.0}
RATES, NORMS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SMALL: dict[str, Any] = {"batch_size": 150.0, "steps": 60}
NOISES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
GRID_NORMS, GRID_RATES, GRID_SEEDS = NORMS[1:-1], (*RATES, 30.0), (0, 1, 2)


def cells(options: Options) -> list[Cell]:
    """Searches on the embedded images; pairs of batch and noise on MNIST; strategies and a full
    grid on Fashion-MNIST.
    """
    found = []
    for seed, arm in itertools.product(range(1 if options.fast else SEEDS), ARMS):
        settings = {"search": SEARCH, "arm": ARMS[arm], "seed": seed}
        found.append(
            Cell(f"search-{arm}-{seed}", settings, functools.partial(searched, ARMS[arm], seed))
        )
    for seed, name in itertools.product(range(1 if options.fast else SEEDS), UNTUNED):
        settings = {"job": UNTUNED[name], "seed": seed}
        found.append(
            Cell(f"{name}-{seed}", settings, functools.partial(untuned, UNTUNED[name], seed))
        )
    if options.fast:
        return found
    for (batch, noise), seed in itertools.product(PAIRS, range(3)):
        settings = {**MNIST, "batch": batch, "noise": noise * batch / 1000, "seed": seed}
        found.append(
            Cell(
                f"scaling-{noise:g}-{batch}-{seed}",
                settings,
                functools.partial(scaling, settings, options.data_dir),
            )
        )
    about = {
        **FASHION,
        "limits": LIMITS,
        "rates": list(RATES),
        "norms": list(NORMS),
        "epsilon": EPSILON,
        "delta": DELTA,
    }
    for norm in GRID_NORMS:
        settings = {
            **about,
            "norms": list(GRID_NORMS),
            "rates": list(GRID_RATES),
            "clip": norm,
            "seeds": list(GRID_SEEDS),
        }
        found.append(
            Cell(f"grid-{norm:g}", settings, functools.partial(grid_row, norm, options.data_dir))
        )
    found.append(
        Cell("strategy-computation", about, functools.partial(computation, options.data_dir))
    )
    small = {**about, "small": SMALL, "noises": list(NOISES)}
    found.append(Cell("strategy-accuracy", small, functools.partial(accuracy, options.data_dir)))
    found.append(Cell("strategy-clip", small, functools.partial(clipped, options.data_dir)))
    return found


def searched(arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """One search on the embedded images, verified; accuracy on the images that no trial was scored
    on.
    """
    raw = {**SEARCH, "tune": {**SEARCH["tune"], **arm}}
    with tempfile.TemporaryDirectory() as place:
        found = job.run(searches.made(raw, {}, {}), Path(place) / "run", seed=seed)
        wrong = [f.what for f in dpfy.verify(Path(place) / "run") if not f.holds]
    told = found.to_json()
    kept = {
        key: told[key]
        for key in ("settings", "score", "test_accuracy", "epsilon", "training_alone")
    }
    return {**kept, "noise_ratio": told["bill"]["noise_ratio"], "wrong": wrong}


def untuned(asked: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """A generic network at the same epsilon, without a search, on the same test images."""
    with tempfile.TemporaryDirectory() as place:
        config = configuration.make(asked, {})
        outcome = training.run(config, Path(place) / "run", seed=seed)
        model = dpfy.load(outcome.run)
        test, _ = job.halves(load(config.data).test, 0.5)
        return {
            "test_accuracy": job.right(model, test) / len(test),
            "epsilon": outcome.card["guarantee"]["epsilon"],
        }


@functools.lru_cache(maxsize=2)
def images(kind: str, records: int, test: int, data_dir: str | None) -> tuple[Records, Records]:
    """The first so many images of a public set, and of its test set, as rows of pixels."""
    found = load(kind, data_dir=data_dir)
    taken = [
        part.take(torch.arange(count))
        for part, count in ((found.train, records), (found.test, test))
    ]
    train, held = (Records((x.flatten(1), y)) for x, y in taken)
    return train, held


def accuracies(
    settings: Mapping[str, Any], train: Records, held: Sequence[Records], seed: int = 0
) -> list[float]:
    """The accuracies of a linear model trained with these settings; the data of the study is
    public, so nothing is billed.
    """
    size = {"steps": settings["steps"]} if "steps" in settings else {"epochs": settings["epochs"]}
    recipe = dpfy.dpsgd(len(train), settings["batch_size"], clip_norm=settings["clip_norm"], **size)
    plan = recipe.with_noise(settings["noise_multiplier"], delta=DELTA)
    model = nn.Linear(train.tensors[0].shape[1], 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["learning_rate"], momentum=0.9)
    with tempfile.TemporaryDirectory() as place:
        permit, secret = mock_permit(plan.event, plan.recipe.steps), Randomness.for_tests(seed)
        run = SealedRun(Path(place) / "run", plan, permit, secret, math.inf)
        with dpfy.PrivateTraining(
            model, optimizer, train, plan, run, update=Update(0.9)
        ) as training_run:
            for x, y in training_run.batches():
                training_run.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
            with training_run.averaged():
                return [job.right(model, each) / len(each) for each in held]


def scaling(settings: Mapping[str, Any], data_dir: str | None) -> dict[str, Any]:
    """Accuracy on MNIST at one batch and noise multiplier."""
    train, test = images("mnist", settings["records"], settings["test"], data_dir)
    asked = {
        "batch_size": float(settings["batch"]),
        "noise_multiplier": settings["noise"],
        "clip_norm": settings["clip"],
    }
    asked |= {"steps": settings["steps"], "learning_rate": settings["rate"]}
    return {"accuracy": accuracies(asked, train, [test], settings["seed"])[0]}


@dataclass(frozen=True)
class Fashion:
    """Fashion-MNIST in three parts: trained on, chosen by, measured on."""

    train: Records
    validation: Records
    test: Records

    @classmethod
    def loaded(cls, data_dir: str | None) -> Fashion:
        """The first training images, those behind them, and all test images."""
        both, test = images(
            "fashion-mnist", FASHION["records"] + FASHION["validation"], 10_000, data_dir
        )
        return cls(*split(both, FASHION["records"]), test)

    def utility(self, settings: Mapping[str, Any]) -> float:
        """What strategies look at."""
        return accuracies(settings, self.train, [self.validation])[0]

    def measured(self, settings: Mapping[str, Any], seeds: Sequence[int]) -> list[list[float]]:
        """Accuracies on validation and on test images, one pair a seed."""
        return [
            accuracies(settings, self.train, [self.validation, self.test], seed) for seed in seeds
        ]


def split(records: Records, first: int) -> tuple[Records, Records]:
    """The first so many records, and the others."""
    at = torch.arange(len(records))
    return Records(records.take(at[:first])), Records(records.take(at[first:]))


def _noise() -> float:
    records, batch = FASHION["records"], LIMITS["most_batch"]
    return (
        dpfy.dpsgd(records, batch, epochs=LIMITS["most_epochs"])
        .calibrate(EPSILON, DELTA)
        .noise_multiplier
    )


def grid_row(norm: float, data_dir: str | None) -> dict[str, Any]:
    """Accuracy over rates at one clip norm, with the noise of (epsilon, delta) at the largest
    feasible batch and epochs.
    """
    data, sigma = Fashion.loaded(data_dir), _noise()
    base = {
        "batch_size": LIMITS["most_batch"],
        "epochs": LIMITS["most_epochs"],
        "noise_multiplier": sigma,
        "clip_norm": norm,
    }
    rows = [data.measured({**base, "learning_rate": rate}, GRID_SEEDS) for rate in GRID_RATES]
    validation, test = ([mean(pair[k] for pair in row) for row in rows] for k in (0, 1))
    return {"noise": sigma, "validation": validation, "accuracies": test}


def computation(data_dir: str | None) -> dict[str, Any]:
    """The strategy for privacy and computation, and what its settings reach."""
    data = Fashion.loaded(data_dir)
    found = strategies.privacy_and_computation(
        data.utility, records=FASHION["records"], epsilon=EPSILON, delta=DELTA,
        limits=strategies.ComputeLimits(**LIMITS), rates=RATES, norms=NORMS,
    )  # fmt: skip
    return _found(found, data)


def accuracy(data_dir: str | None) -> dict[str, Any]:
    """The strategy for privacy and accuracy, asked for as much as there is to be had."""
    data = Fashion.loaded(data_dir)
    plain = strategies.plain_rate(data.utility, SMALL, RATES)
    base = {"batch_size": SMALL["batch_size"], **plain.settings}
    found = strategies.privacy_and_accuracy(
        data.utility, base, records=FASHION["records"], steps=SMALL["steps"], epsilon=EPSILON, delta=DELTA, noises=NOISES,  # noqa: E501
        norms=NORMS, rates=RATES,
    )  # fmt: skip
    return _found(plain.then(found), data)


def clipped(data_dir: str | None) -> dict[str, Any]:
    """ClipSearch alone at the largest feasible batch and epochs, then the best rate with noise at
    its clip norm.
    """
    data = Fashion.loaded(data_dir)
    size = {"batch_size": LIMITS["most_batch"], "epochs": LIMITS["most_epochs"]}
    found = strategies.plain_rate(data.utility, size, RATES)
    found = found.then(strategies.clip_search(data.utility, {**size, **found.settings}, NORMS))
    noisy = {**size, **found.settings, "noise_multiplier": _noise()}
    return _found(
        found.then(strategies.Advice(noisy, ())).then(
            strategies.rate_sweep(data.utility, noisy, RATES)
        ),
        data,
    )


def _found(found: strategies.Advice, data: Fashion) -> dict[str, Any]:
    reached = [test for _, test in data.measured(found.settings, (1, 2, 3))]
    tried = [
        [{k: number(v) for k, v in settings.items()}, score] for settings, score in found.tried
    ]
    return {
        "settings": found.settings,
        "reasons": list(found.reasons),
        "reached": reached,
        "tried": tried,
        "runs": len(tried),
    }


STUDY = Study(
    "tuning",
    "Tuning that pays its own price",
    "Ponomareva et al. 2023, How to DP-fy ML, section 5.4; Papernot & Steinke 2022, Hyperparameter "
    "Tuning with Renyi Differential Privacy.",
    cells,
    page,
)
