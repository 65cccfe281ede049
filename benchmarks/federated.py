"""Seconds for a private round of a simulated federation: 100 clients, LeNet-5, 10 local steps of 20
examples each.

    python benchmarks/federated.py                    # CPU, all cores that torch uses python
    benchmarks/federated.py --device cuda python benchmarks/federated.py --way loop         # the
    same, client by client python benchmarks/federated.py --folded           # by grouped
    convolutions, which other chains of layers take python benchmarks/federated.py --against 22.2
    # a figure of benchmarks/federated_flower.py, for the ratio

A round is all of it: cohort, local training, clipping, noise, server step, journal. Prints one JSON
line; the fastest and the median round after a warm-up are told. Flower's own simulation with its DP
wrapper is measured by benchmarks/federated_flower.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch

import dpfy
import dpfy.federated.local as local_training
from dpfy.federated import CLIENT, LocalTraining, LocalUpdates, PrivateRounds
from dpfy.models.build import build
from dpfy.models.config import ModelConfig
from dpfy.training.objective import Objective

CLIENTS, STEPS, BATCH = 100, 10, 20


def main() -> None:
    """Time some rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", default="batched", choices=("batched", "loop"))
    parser.add_argument("--at-once", type=int)
    parser.add_argument(
        "--folded", action="store_true", help="Grouped convolutions instead of products over tiles."
    )
    parser.add_argument("--against", type=float, help="Seconds a round of what to compare with.")
    given = parser.parse_args()
    if given.folded:
        local_training.stages = lambda layers: None
    torch.manual_seed(0)
    owners = torch.arange(CLIENTS).repeat_interleave(STEPS * BATCH)
    x, y = torch.randn(len(owners), 1, 28, 28), torch.randint(0, 10, (len(owners),))
    clients = dpfy.by_user((x, y), owners, STEPS * BATCH)
    plan = dpfy.dpsgd(CLIENTS, CLIENTS, steps=given.rounds + 2, unit=CLIENT).with_noise(
        1.0, delta=1e-3
    )
    model = build(ModelConfig(name="lenet5"), (1, 28, 28), 10).to(given.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    local = LocalTraining(STEPS, BATCH, 0.1, way=given.way, at_once=given.at_once)
    wall, cpu = [], []
    with tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore")
        run = dpfy.Run(Path(place) / "run", seed=0)
        with PrivateRounds(
            model, optimizer, plan, run, repeatable=True, device=given.device
        ) as rounds:
            updates = LocalUpdates(
                model, clients.to(rounds.device), local, Objective(), rounds.folder.randomness
            )
            began, began_cpu = time.perf_counter(), time.process_time()
            for cohort in rounds.cohorts():
                cohort.add_all(updates(cohort.step, cohort.clients))
                cohort.close()
                if rounds.device.type == "cuda":
                    torch.cuda.synchronize()
                wall.append(time.perf_counter() - began)
                cpu.append(time.process_time() - began_cpu)
                began, began_cpu = time.perf_counter(), time.process_time()
    told = {
        "rounds": given.rounds,
        "seconds_per_round": statistics.median(wall[2:]),
        "fastest": min(wall[2:]),
        "cpu_seconds_per_round": statistics.median(cpu[2:]),
        "device": torch.cuda.get_device_name()
        if given.device.startswith("cuda")
        else f"cpu, {torch.get_num_threads()} threads",
    }
    if given.against:
        told["times_faster"] = given.against / told["seconds_per_round"]
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}))


if __name__ == "__main__":
    main()
