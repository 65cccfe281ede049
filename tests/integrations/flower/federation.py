"""A federation in one process: a Grid whose nodes run a ClientApp when a message is pushed to them,
and may be made unreliable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import dpfy
from dpfy.federated import CLIENT
from dpfy.integrations.flower import PrivateFedAvg, private_mod

SHAPE = (3, 2)


class Federation(Grid):
    """Nodes 1000, 1001, ... with partitions 0, 1, ...; `meddle` sees each reply and gives the
    replies that arrive.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int,
        meddle: Callable[[int, Message], list[Message]] | None = None,
    ) -> None:
        self.app, self.nodes, self.meddle = app, {1000 + i: i for i in range(nodes)}, meddle
        self.asked: list[int] = []
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self.on_push: Callable[[list[Message]], None] | None = None
        self._ids, self._replies = itertools.count(), {}
        self._states: dict[int, RecordDict] = {}

    run = property(lambda self: None)

    def set_run(self, run):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, public_key=f"key {part:05d}".encode())
            for node, part in self.nodes.items()
        ]

    def push_messages(self, messages):
        messages = list(messages)
        if self.on_push is not None:
            self.on_push(messages)
        keys = []
        for message in messages:
            key = f"message {next(self._ids)}"
            message.metadata.__dict__["_message_id"] = key
            node = message.metadata.dst_node_id
            config = UserConfig(
                {"partition-id": self.nodes[node], "num-partitions": len(self.nodes)}
            )
            content = RecordDict(
                {name: _copied(record) for name, record in message.content.items()}
            )
            local = Message(content, dst_node_id=node, message_type=message.metadata.message_type)
            local.metadata.__dict__["_message_id"] = key
            try:
                reply = self.app(
                    local,
                    Context(
                        0, node, config, self._states.setdefault(node, RecordDict()), UserConfig()
                    ),
                )
            except Exception as problem:
                reply = Message(Error(code=0, reason=str(problem)), reply_to=local)
            if "dpfy" not in message.content or "name" not in message.content["dpfy"]:
                self.asked.append(node)
                self._replies[key] = (
                    [reply] if self.meddle is None else self.meddle(self.nodes[node], reply)
                )
            else:
                self._replies[key] = [reply]
            keys.append(key)
        return keys

    def pull_messages(self, message_ids):
        return [reply for key in list(message_ids) for reply in self._replies.pop(key, [])]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


def _copied(record):
    return (
        type(record)(dict(record))
        if not isinstance(record, ArrayRecord)
        else ArrayRecord(dict(record.items()))
    )


def client_app(
    *mods, move: Callable[[int, int], float] = lambda part, number: 0.1 * (part + 1)
) -> ClientApp:
    """An app whose clients add a number of their own to every weight."""
    app = ClientApp(mods=[private_mod, *mods])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(message.content["config"]["server-round"])
        step = move(int(context.node_config["partition-id"]), number)
        arrays = {
            name: Array(np.asarray(a.numpy() + step, np.float32))
            for name, a in message.content["arrays"].items()
        }
        metrics = MetricRecord({"train_loss": 3.5, "num-examples": 1000})
        return Message(
            RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message
        )

    return app


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(SHAPE[0], SHAPE[1])


def plan(
    clients: int = 5,
    expected: float = 5,
    rounds: int = 3,
    clip: float = 1.0,
    noise: float = 1.0,
    delta: float = 1e-2,
):
    recipe = dpfy.dpsgd(clients, expected, steps=rounds, clip_norm=clip, unit=CLIENT)
    return recipe.with_noise(noise, delta=delta)


def strategy(folder, planned=None, **options) -> PrivateFedAvg:
    net = model()
    return PrivateFedAvg(net, planned or plan(), dpfy.Run(folder, seed=7), device="cpu", **options)


def train(folder, grid=None, planned=None, start=None, **options):
    """Run all rounds; the strategy, and the weights as one vector."""
    made = strategy(folder, planned, **options)
    grid = grid or Federation(client_app(), made.plan.recipe.records)
    result = made.start(grid, ArrayRecord(made.model.state_dict()), timeout=0.05, **(start or {}))
    return made, np.concatenate([a.numpy().ravel() for a in result.arrays.values()])
