"""DP-SGD against DP-FTRL on MNIST (Mehta & Kumar): Tables I to IV at the printed settings, with
what their epsilons really are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import dpfy
from dpfy import accounting
from dpfy.data.config import DataConfig
from dpfy.data.records import Records
from dpfy.data.source import load
from dpfy.gradients.clip import FlatClip
from dpfy.models.build import build
from dpfy.models.config import ModelConfig
from dpfy.noise.tree import Tree
from dpfy.plan.recipe import Recipe
from dpfy.sampling.samplers import FixedOrderSampler, ReshuffledSampler
from dpfy_lab.studies import dpsgd_dpftrl_future as future
from dpfy_lab.studies import images as recipe_of_ours
from dpfy_lab.studies import trials
from dpfy_lab.studies.dpsgd_dpftrl_page import (
    CLIP,
    MOMENTUM,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4_FTRL,
    TABLE_4_SGD,
    node_noise,
    page,
)
from dpfy_lab.studies.study import Cell, Options, Study

DELTA = 1e-5
RECORDS = 54_000
"""The printed epsilons belong to this many training records: sampling rate 1/210 and 4,200
steps.
"""
MEAN, DEVIATION = 0.1307, 0.3081
"""The study's normalisation: public constants."""
OTHER_MOMENTA = (0.0, 0.8)
FTRL = (120, 10)
"""Steps an epoch and epochs of Tables III and IV: batches of 500 out of 60,000."""


def mlp() -> nn.Module:
    """784-512-256-128-10 with ReLU and dropout 0.2."""
    return build(
        ModelConfig(name="mlp", hidden=(512, 256, 128), activation="relu", dropout=0.2),
        (1, 28, 28),
        10,
    )


def lenet() -> nn.Module:
    """LeNet-5 as the study has it: ReLU and max pooling, 400 values into the first dense layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),  # noqa: E501
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


def lenet_kaiming() -> nn.Module:
    """The same with the study's initialisation for DP-FTRL: Kaiming for the weights, zero for the
    biases.
    """
    model = lenet()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in model.children():
            if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "lenet-kaiming": lenet_kaiming,
}


@functools.lru_cache(maxsize=1)
def images(options: Options, kind: str = "mnist") -> tuple[Records, Records]:
    """MNIST (or Fashion-MNIST), normalised by the study's constants."""
    source = load(DataConfig(kind=kind), data_dir=options.data_dir)
    train, test = (
        Records(((r.tensors[0] - MEAN) / DEVIATION, r.tensors[1]))
        for r in (source.train, source.test)
    )
    return train, test


def sgd_recipe(batch: int) -> Recipe:
    """Poisson batches at the rate and for the steps that the printed epsilons belong to."""
    per_epoch = RECORDS // batch
    return dpfy.dpsgd(RECORDS, RECORDS / per_epoch, steps=20 * per_epoch, clip_norm=CLIP)


def ftrl_recipe(sampler: FixedOrderSampler | ReshuffledSampler) -> Recipe:
    """One tree over all steps, never restarted, complete nodes only."""
    return Recipe(60_000, sampler, FTRL[0] * FTRL[1], FlatClip(CLIP), Tree("completed"))


def ftrl_plan(node_noise: float, sampler: FixedOrderSampler | ReshuffledSampler) -> dpfy.Plan:
    """The plan whose tree nodes carry `node_noise` clip norms of noise, whatever that costs under
    the sampler.
    """
    recipe = ftrl_recipe(sampler)
    sensitivity = recipe.strategy.sensitivity(sampler.participation, recipe.steps)
    return recipe.with_noise(node_noise / sensitivity, delta=DELTA)


def cells(options: Options) -> list[Cell]:
    """Epsilons, baselines, the four tables; unless fast, our recipe on the same data and on
    Fashion-MNIST (made for a GPU).
    """
    found = [Cell("epsilons", {"delta": DELTA}, epsilons)]
    for model, epochs in (("mlp", 15), ("lenet", 15)):
        settings = {
            "model": model,
            "epochs": epochs,
            "batch": 128,
            "optimizer": "adam",
            "learning_rate": 1e-3,
            "seed": 0,
        }
        found.append(
            Cell(f"plain-{model}", settings, functools.partial(run_plain, settings, options))
        )
    seeds = 1 if options.fast else 2
    for seed in range(seeds):
        for model, table in (("mlp", TABLE_1), ("lenet", TABLE_2)):
            found += [sgd_cell(model, 256, 0.05, noise, seed, options) for noise in table]
        found += [ftrl_cell(noise, seed, options) for noise in TABLE_3]
        found += [sgd_cell("lenet", 500, 0.1, noise, seed, options) for noise in TABLE_4_SGD]
        found += [
            ftrl_cell(node_noise(noise), seed, options)
            for noise in TABLE_4_FTRL
            if node_noise(noise) not in TABLE_3
        ]
    return (
        found
        if options.fast
        else found
        + momentum_cells(options)
        + fashion_cells(options)
        + recipe_of_ours.run_cells(options)
    )


def sgd_settings(model: str, batch: int, rate: float, noise: float, seed: int) -> dict[str, Any]:
    """A DP-SGD run at printed settings."""
    return {
        "model": model,
        "batch": batch,
        "learning_rate": rate,
        "momentum": MOMENTUM,
        "noise": noise,
        "clip": CLIP,
        "seed": seed,
    }


def sgd_cell(
    model: str, batch: int, rate: float, noise: float, seed: int, options: Options
) -> Cell:
    """One DP-SGD run at printed settings."""
    settings = sgd_settings(model, batch, rate, noise, seed)
    return Cell(
        f"sgd-{model}-{batch}-{noise:g}-{seed}",
        settings,
        functools.partial(run_sgd, settings, options),
    )


def momentum_cells(options: Options) -> list[Cell]:
    """The momentum is not printed: the rows of DP-SGD with other momenta, to say what follows from
    which.
    """
    rows = [("mlp", 256, 0.05, noise) for noise in TABLE_1] + [
        ("lenet", 256, 0.05, noise) for noise in TABLE_2
    ]
    rows += [("lenet", 500, 0.1, noise) for noise in TABLE_4_SGD]
    found = []
    for seed, momentum, row in itertools.product(range(2), OTHER_MOMENTA, rows):
        if momentum == 0 and (seed or row[1] == 500):
            continue
        settings = sgd_settings(*row, seed) | {"momentum": momentum}
        name = f"momentum-{momentum:g}-{row[0]}-{row[1]}-{row[3]:g}-{seed}"
        found.append(Cell(name, settings, functools.partial(run_sgd, settings, options)))
    return found


def fashion_cells(options: Options) -> list[Cell]:
    """LeNet at the settings of Table II on Fashion-MNIST: without privacy, then every variant at
    each epsilon.
    """
    plain = {
        "data": future.DATA,
        "model": "lenet",
        "epochs": 15,
        "batch": 128,
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "seed": 0,
    }
    found = [Cell("fashion-plain", plain, functools.partial(run_plain, plain, options))]
    for seed, epsilon, (name, variant) in itertools.product(
        future.SEEDS, future.EPSILONS, future.VARIANTS.items()
    ):
        settings = sgd_settings("lenet", 256, 0.05, 1.0, seed) | {
            "data": future.DATA,
            "epsilon": epsilon,
            "delta": DELTA,
        }
        settings |= {"quantile": variant.quantile, "noise": list(variant.noise)} | (
            {"follow": True} if variant.follow else {}
        )
        found.append(
            Cell(
                f"fashion-{name}-{epsilon:g}-{seed}",
                settings,
                functools.partial(run_fashion, settings, variant, options),
            )
        )
    return found


def ftrl_cell(noise: float, seed: int, options: Options) -> Cell:
    """One DP-FTRL run at printed settings."""
    settings = {
        "model": "lenet-kaiming",
        "batch": 500,
        "learning_rate": 1.0,
        "node_noise": noise,
        "clip": CLIP,
        "seed": seed,
        "epochs": 10,
    }
    return Cell(f"ftrl-{noise:g}-{seed}", settings, functools.partial(run_ftrl, settings, options))


def run_plain(s: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A baseline without privacy."""
    model = MODELS[s["model"]]()
    optimizer = torch.optim.Adam(model.parameters(), lr=s["learning_rate"])
    return trials.plain(
        model,
        optimizer,
        images(options, s.get("data", "mnist")),
        epochs=s["epochs"],
        batch=s["batch"],
        seed=s["seed"],
        device=options.device,
    )


def run_sgd(s: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """DP-SGD on the first 54,000 images."""
    train, test = images(options)
    part = Records(tuple(t[:RECORDS] for t in train.tensors))
    model = MODELS[s["model"]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=s["learning_rate"], momentum=s["momentum"])
    plan = sgd_recipe(s["batch"]).with_noise(s["noise"], delta=DELTA)
    return trials.private(
        model, optimizer, (part, test), plan, seed=s["seed"], device=options.device
    )


def run_fashion(s: Mapping[str, Any], variant: future.Variant, options: Options) -> dict[str, Any]:
    """DP-SGD on the first 54,000 images with a clip rule and a noise schedule, calibrated to the
    epsilon asked for.
    """
    train, test = images(options, s["data"])
    part = Records(tuple(t[:RECORDS] for t in train.tensors))
    model = MODELS[s["model"]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=s["learning_rate"], momentum=s["momentum"])
    plan = variant.recipe(sgd_recipe(s["batch"])).calibrate(s["epsilon"], s["delta"])
    run = trials.following if variant.follow else trials.private
    return run(model, optimizer, (part, test), plan, seed=s["seed"], device=options.device)


def run_ftrl(s: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """DP-FTRL: tree noise is correlated noise, so the loop is the same and the optimizer is plain
    SGD.
    """
    model = MODELS[s["model"]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=s["learning_rate"])
    plan = ftrl_plan(s["node_noise"], FixedOrderSampler(*FTRL))
    return trials.private(
        model, optimizer, images(options), plan, seed=s["seed"], device=options.device
    )


def epsilons() -> dict[str, Any]:
    """What the printed noise costs: our tight bound and RDP, at 54,000 records and at all 60,000;
    the tree in fixed and in new orders.
    """
    rows = []
    for batch, table in ((256, TABLE_1), (500, TABLE_4_SGD)):
        for noise, (printed, _) in table.items():
            row: dict[str, Any] = {
                "mechanism": "dp-sgd",
                "batch": batch,
                "noise": noise,
                "printed": printed,
            }
            for records in (RECORDS, 60_000):
                per_epoch = RECORDS // batch if records == RECORDS else -(-records // batch)
                recipe = dpfy.dpsgd(
                    records, records / per_epoch, steps=20 * per_epoch, clip_norm=CLIP
                )
                for name in ("tight", "rdp"):
                    row[f"{name} {records}"] = recipe.with_noise(
                        noise, delta=DELTA, accountant=name
                    ).epsilon
            rows.append(row)
    nodes = [(n, e) for n, (e, _) in TABLE_3.items()] + [
        (node_noise(n), e) for n, (e, _) in TABLE_4_FTRL.items()
    ]
    for noise, printed in nodes:
        row = {"mechanism": "dp-ftrl", "batch": 500, "noise": noise, "printed": printed}
        for order, sampler in (
            ("fixed", FixedOrderSampler(*FTRL)),
            ("reshuffled", ReshuffledSampler(*FTRL)),
        ):
            plan = ftrl_plan(noise, sampler)
            row[f"tight {order}"] = plan.epsilon
            row[f"rdp {order}"] = accounting.epsilon(plan.event, DELTA, accountant="rdp")
        rows.append(row)
    return {"rows": rows}


STUDY = Study(
    "dpsgd-dpftrl",
    "DP-SGD and DP-FTRL on MNIST",
    "Mehta & Kumar, Implementation and comparative analysis of DP-SGD & DP-FTRL: Tables I to IV.",
    cells,
    page,
)
