"""Federated training on MNIST by its writers: local steps against gradients, adaptive clipping, and
noise that needs no sampling.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy import federated
from dpfy.core.errors import Internal
from dpfy.data.config import DataConfig
from dpfy.data.records import Records
from dpfy.data.source import load
from dpfy.data.users import UserRecords
from dpfy.federated import LocalTraining
from dpfy.gradients.clip import FlatClip, QuantileClip
from dpfy.report import verify
from dpfy_lab.studies.federated_page import page
from dpfy_lab.studies.study import Cell, Options, Study

SEEDS = range(5)
EPSILON, DELTA = 4.0, 1e-4
COHORT, ROUNDS, SEPARATION = 100, 30, 5
MOST = 131
"""Images of the writer with the most."""
MEAN, SCALE = 0.1307, 0.3
"""Public constants by which pixels are shifted and scaled."""


@dataclass(frozen=True)
class FederatedRow:
    """One way to train: how clients are gathered, what they send, the clip norm (the first, if it
    adapts) and the server's rate.
    """

    method: str
    gathered: str
    clip: float
    rate: float
    adaptive: bool = False


AMPLIFIED, CHECK_IN, UNAMPLIFIED = "sampled", "check-in, bands", "check-in, independent"
FIXED = (0.25, 0.5, 1.0)
QUANTILE, PACE = 0.3, 0.3
ROWS = {
    **{f"fedavg-{clip:g}": FederatedRow("fedavg", AMPLIFIED, clip, 1.0 / clip) for clip in FIXED},
    "fedavg-adaptive": FederatedRow("fedavg", AMPLIFIED, 0.5, 1.5, adaptive=True),
    "fedsgd": FederatedRow("fedsgd", AMPLIFIED, 8.0, 0.0875),
    "dpftrl": FederatedRow("fedavg", CHECK_IN, 0.5, 2.0),
    "fedavg-unamplified": FederatedRow("fedavg", UNAMPLIFIED, 0.5, 2.0),
}
"""Settings were chosen on a sixth of the writers, held apart (the page says how)."""
LOCAL = {
    "fedavg": LocalTraining(10, 20, 0.3, at_once=COHORT),
    "fedsgd": LocalTraining(10, 20, method="fedsgd", at_once=COHORT),
}


def cells(options: Options) -> list[Cell]:
    """A run for each row and seed."""
    found = []
    for name, row in ROWS.items():
        for seed in range(1) if options.fast else SEEDS:
            settings = {
                "row": asdict(row),
                "local": asdict(LOCAL[row.method]),
                "seed": seed,
                "fast": options.fast,
            }
            settings |= {
                "epsilon": EPSILON,
                "delta": DELTA,
                "rounds": 4 if options.fast else ROUNDS,
                "separation": SEPARATION,
            }
            found.append(
                Cell(
                    f"run-{name}-{seed}",
                    settings,
                    functools.partial(run_one, name, settings, options),
                )
            )
    return found


def plan_of(row: FederatedRow, clients: UserRecords, rounds: int) -> dpfy.Plan:
    """The plan of a row, at the one epsilon of the study."""
    cohort = COHORT * len(clients) / 539
    clip = QuantileClip(row.clip, QUANTILE, PACE) if row.adaptive else FlatClip(row.clip)
    if row.gathered == AMPLIFIED:
        recipe = dpfy.dpsgd(len(clients), cohort, steps=rounds, unit=clients.unit)
    else:
        strategy = row.gathered.rpartition(" ")[2]
        recipe = federated.check_in(
            len(clients),
            cohort,
            rounds=rounds,
            separation=min(SEPARATION, rounds),
            strategy=strategy,
            unit=clients.unit,
        )
    return replace(recipe, clip=clip).calibrate(EPSILON, DELTA)


def run_one(name: str, settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A verified run of one row; accuracy is on the test images, of writers that are in no
    cohort.
    """
    clients, test = writers(options)
    row, seed = ROWS[name], settings["seed"]
    plan = plan_of(row, clients, settings["rounds"])
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(clients.tensors[0][0, 0].numel(), 32), nn.Tanh(), nn.Linear(32, 10)
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result = federated.fit(
            model,
            clients,
            plan=plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=row.rate),
            local=LOCAL[row.method],
            run=dpfy.Run(Path(place) / "run", seed=seed),
            evaluation=dpfy.PublicTest(test),
            device=options.device,
        )
        wrong = [found for found in dpfy.verify(result.run) if not found.holds]
        if wrong:
            raise Internal(f"the run of {name} verifies", f"{wrong[0].what}: {wrong[0].detail}")
        card = verify.load_card(result.run / "privacy.json")
    return {
        "test_accuracy": result.utility["test_accuracy"],
        "epsilon": card["guarantee"]["epsilon"],
        "delta": DELTA,
        "adjacency": card["guarantee"]["adjacency"],
        "unit": card["unit"]["name"],
        "noise_multiplier": plan.noise_multiplier,
        "noise_on_mean": plan.stddev / plan.recipe.expected_batch,
        "clients": len(clients),
        "cohort": plan.recipe.expected_batch,
        "training_seconds": time.monotonic() - started,
    }


@functools.lru_cache(maxsize=1)
def writers(options: Options) -> tuple[UserRecords, Records]:
    """(images by writer, test images), 14 x 14. The short form makes 60 users of the embedded
    images, each with few of the digits.
    """
    if options.fast:
        source = load(DataConfig(kind="embedded"))
        x, y = source.train.tensors
        owner = (y * 6 + torch.from_numpy(np.random.default_rng(0).integers(0, 12, len(y)))) % 60
        clients = dpfy.by_user((_halved(x), y), owner, MOST)
    else:
        config = DataConfig(
            kind="mnist", user="writer", most_records=MOST, pick="first", user_loss="sum"
        )
        source = load(config, data_dir=options.data_dir)
        assert isinstance(source.train, UserRecords)
        x, y, real = source.train.tensors
        clients = UserRecords((_halved(x.flatten(0, 1)).unflatten(0, real.shape), y, real))
    assert isinstance(clients, UserRecords)
    assert source.test is not None
    return clients, Records((_halved(source.test.tensors[0]), source.test.tensors[1]))


def _halved(images: Tensor) -> Tensor:
    return (functional.avg_pool2d(images, 2) - MEAN) / SCALE


STUDY = Study(
    "federated",
    "Federated training on MNIST by its writers",
    "539 writers with 19 to 131 images each, 10,000 test images of other writers; user-level "
    "epsilon 4, delta 1e-4. "
    "Methods: McMahan et al. 2018 (DP-FedAvg), Andrew et al. 2021 (adaptive clipping), Kairouz et "
    "al. 2021 (DP-FTRL).",
    cells,
    page,
)
