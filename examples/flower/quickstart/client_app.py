"""The client: receives weights, trains on its own data, returns weights. The mod bounds them and
sends nothing else.
"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from dpfy.integrations.flower import private_mod
from quickstart.task import Net, load_data
from quickstart.task import train as train_fn

app = ClientApp(mods=[private_mod])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Local training."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    torch.manual_seed(int(msg.content["config"]["server-round"]))
    loader = load_data(
        int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    )
    loss = train_fn(
        model, loader, int(context.run_config["local-epochs"]), float(context.run_config["lr"])
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg
    )
