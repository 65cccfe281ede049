"""Flower's own simulation with its own wrapper for DP: seconds a round of 100 clients of LeNet-5,
10 local steps of 20 examples each.

Run it with an environment that has Flower and Ray (`make test-flower` makes one): one JSON line.
benchmarks/federated.py is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn.functional import cross_entropy

CLIENTS, STEPS, BATCH = 100, 10, 20


def lenet() -> nn.Module:
    """LeNet-5 with tanh, for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),  # noqa: E501
        nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def client_app() -> ClientApp:
    """A client with data made in memory."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = lenet()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        images, labels = (
            torch.rand(STEPS, BATCH, 1, 28, 28, generator=made),
            torch.randint(10, (STEPS, BATCH), generator=made),
        )
        for x, y in zip(images, labels, strict=True):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": STEPS * BATCH})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
            reply_to=message,
        )

    return app


class Timed(DifferentialPrivacyServerSideFixedClipping):
    """Notes when each round begins and ends."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.began: list[tuple[float, float]] = []
        self.ended: list[tuple[float, float]] = []

    def configure_train(self, *given):  # type: ignore[no-untyped-def]
        """As it is."""
        self.began.append((time.perf_counter(), processor_seconds()))
        return super().configure_train(*given)

    def aggregate_train(self, *given):  # type: ignore[no-untyped-def]
        """As it is."""
        found = super().aggregate_train(*given)
        self.ended.append((time.perf_counter(), processor_seconds()))
        return found


def processor_seconds() -> float:
    """Of this process and of the workers of the simulation, which are found by their name."""
    total, tick = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), os.sysconf("SC_CLK_TCK")
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{number}/stat") as file:
                name, fields = file.read().rsplit(")", 1)
        except OSError:
            continue
        if "ray::" in name or "raylet" in name or "gcs_server" in name:
            total += (int(fields.split()[11]) + int(fields.split()[12])) / tick
    return total


def main() -> None:
    """A round to warm up, and `rounds` that are timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    strategy = Timed(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS, min_train_nodes=CLIENTS),
        1.0,
        1.0,
        CLIENTS,
    )
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy.start(grid, ArrayRecord(lenet().state_dict()), num_rounds=rounds + 1)

    backend = {
        "client_resources": {"num_cpus": 1},
        "init_args": {"num_cpus": 2, "object_store_memory": 200_000_000, "log_to_driver": False},
    }
    run_simulation(server, client_app(), CLIENTS, backend_config=backend)  # type: ignore[arg-type]
    pairs = list(zip(strategy.began, strategy.ended, strict=True))[1:]
    found = {
        "rounds": rounds,
        "seconds_per_round": sum(e[0] - b[0] for b, e in pairs) / rounds,
        "cpu_seconds_per_round": sum(e[1] - b[1] for b, e in pairs) / rounds,
        "clients": CLIENTS,
        "steps": STEPS,
        "batch": BATCH,
        "model": "lenet5",
    }
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
