"""The server: FedAvg became PrivateFedAvg, and a plan says what the clients are promised."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import dpfy
from dpfy.federated import CLIENT
from dpfy.integrations.flower import PrivateFedAvg
from quickstart.task import Net, test

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """The model on the public test set."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test(model)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds of the plan."""
    config = context.run_config
    clients, rounds = int(config["clients"]), int(config["num-server-rounds"])
    recipe = dpfy.dpsgd(
        clients, float(config["cohort"]), steps=rounds, clip_norm=float(config["clip"]), unit=CLIENT
    )
    plan = recipe.with_noise(float(config["noise"]), delta=float(config["delta"]))
    model = Net()
    strategy = PrivateFedAvg(
        model, plan, str(config["run"]), identity="partition-id", wait_for=clients
    )
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate,
    )
