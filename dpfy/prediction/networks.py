"""Voters that are networks: as many of them as there are shards, trained side by side as one
batched model.

Each begins with the same public weights and takes the same public number of steps, on minibatches
of its own records. The training is that of the clients of a federation (`dpfy.federated.local`):
weights are stacked, and one pass serves many voters.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dpfy.core import check, storage
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.data.users import MOST_PLACES, UserRecords
from dpfy.federated.local import LocalTraining, LocalUpdates, one_pass
from dpfy.models.build import build
from dpfy.models.config import ModelConfig
from dpfy.prediction.rules import Ask
from dpfy.prediction.voters import ABOUT, NETWORKS, checked, fixed, shards, tally
from dpfy.training.objective import Objective
from dpfy.training.runtime import check_device

VOTERS_AT_ONCE, ROWS_AT_ONCE = 25, 100
"""Of one pass that votes."""
STREAM = "voters' networks"


@dataclass(frozen=True)
class NetworkTraining:
    """How every voter learns, all of it public: a model, and `steps` of plain SGD on minibatches of
    `batch_size` of its own records.

    `model` is one by name, or a module of your own, whose weights are where all voters begin. The
    number of steps is the same for all, whatever they hold: one that followed from the number of
    records would change with a record of somebody else.
    """

    model: ModelConfig | nn.Module = field(default_factory=lambda: ModelConfig("lenet5"))
    steps: int = 240
    batch_size: int = 20
    learning_rate: float = 0.1
    device: str = "cpu"

    def __post_init__(self) -> None:
        check.integer("steps", self.steps)
        check.integer("batch_size", self.batch_size)
        check.positive("learning_rate", self.learning_rate)
        check_device(self.device)

    @property
    def local(self) -> LocalTraining:
        """The same as clients of a federation take it."""
        return LocalTraining(self.steps, self.batch_size, self.learning_rate)

    def begun(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network with which all voters begin."""
        if not isinstance(self.model, nn.Module):
            if self.model.name == "scattering-linear":
                raise Unsupported(
                    "scattering inside of a network of voters",
                    'give scattered features, with the model "linear"',
                )
            return build(self.model, shape, classes)
        if any(True for _ in self.model.buffers()):
            raise Unsupported(
                "voters that keep statistics (buffers, as of BatchNorm)",
                "use layers that keep none",
            )
        return copy.deepcopy(self.model)


def teach_networks(
    x: Any,
    y: Any,
    *,
    voters: int,
    classes: int,
    training: NetworkTraining,
    owners: Any = None,
    randomness: Randomness | None = None,
) -> NetworkVoters:
    """Voters that are networks: `x` are records of any one shape, `y` their classes, `owners` whose
    each record is.

    Guarantees: every unit (a record, or an owner with all records) is known to one voter alone: the
    weights of a voter are a function of its own records, the public settings and the secret. A
    voter without records learns that a record of zeros is of class 0. What comes out is as private
    as the records.
    """
    table, labels = checked(x, y, classes)
    secret = Randomness.from_os() if randomness is None else randomness
    places = shards(len(table), voters, secret, owners)
    model = training.begun(table.shape[1:], classes).to(training.device)
    rows = _by_voter(table, labels, places, voters, training.batch_size)
    held = UserRecords(tuple(field.to(training.device) for field in rows.tensors))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(secret.key(STREAM, 0, 7), "little"))
        updates = LocalUpdates(model, held, training.local, Objective(), secret)
        moved = updates(0, np.arange(voters))
    weights = {
        name: (p.detach() - moved.get(name, p.new_zeros(voters, *p.shape))).cpu()
        for name, p in model.named_parameters()
    }
    config = training.model if isinstance(training.model, ModelConfig) else None
    return NetworkVoters(model.cpu(), weights, table.shape[1:], classes, config)


def _by_voter(
    x: NDArray[np.float32], y: NDArray[np.int64], places: NDArray[np.int64], voters: int, least: int
) -> UserRecords:
    """A row for every voter: its records side by side, then places that repeat its first one; at
    least so many places.

    `least` is the size of a minibatch, so that the shape of what is computed does not depend on how
    many records anybody has.
    """
    counts = np.bincount(places, minlength=voters)
    width = max(least, int(counts.max(initial=0)))
    if voters * width * max(1, math.prod(x.shape[1:])) > MOST_PLACES:
        rule = (
            f"asks for more than {MOST_PLACES} numbers to be held, with as many places for each "
            f"voter as the largest part has records"
        )
        raise InvalidInput("voters", voters, rule)
    order = np.argsort(places, kind="stable")
    first = np.cumsum(counts) - counts
    place = np.broadcast_to(np.arange(width), (voters, width))
    real = place < np.maximum(counts, 1)[:, None]
    rows = first[:, None] + np.where(place < counts[:, None], place, 0)
    records, labels = np.concatenate([x, np.zeros((1, *x.shape[1:]), np.float32)]), np.append(y, 0)
    rows = np.where(counts[:, None] > 0, np.append(order, len(x))[np.minimum(rows, len(x))], len(x))
    fields = (
        torch.from_numpy(records[rows]),
        torch.from_numpy(labels[rows]),
        torch.from_numpy(real.copy()),
    )
    return UserRecords(fields)


@dataclass(frozen=True, eq=False)
class NetworkVoters:
    """Networks of one architecture: `weights` are stacked, [voters, *parameter] by name; a question
    is a record of `shape`, flat.
    """

    model: nn.Module = field(repr=False)
    weights: Mapping[str, Tensor] = field(repr=False)
    shape: tuple[int, ...]
    classes: int
    config: ModelConfig | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return len(next(iter(self.weights.values())))

    @property
    def features(self) -> int:
        """How many numbers a question has."""
        return math.prod(self.shape)

    @cached_property
    def _scores(self) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
        """From stacked weights and questions [voters, rows, ...] to scores [voters, rows,
        classes].
        """
        chained, model = one_pass(self.model.eval(), len(self.shape)), self.model
        return chained or vmap(
            lambda weights, rows: functional_call(model, dict(weights), (rows,)),
            randomness="different",
        )

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """See `predictor.Voters`."""
        return fixed(self.votes(questions))

    @torch.no_grad()
    def votes(self, questions: NDArray[np.float32]) -> NDArray[np.int64]:
        """How many voters say each class, question by question."""
        found = np.zeros((len(questions), self.classes), np.int64)
        for at in range(0, self.count, VOTERS_AT_ONCE):
            some = {name: t[at : at + VOTERS_AT_ONCE] for name, t in self.weights.items()}
            for start in range(0, len(questions), ROWS_AT_ONCE):
                rows = torch.from_numpy(questions[start : start + ROWS_AT_ONCE]).unflatten(
                    1, self.shape
                )
                scores = self._scores(
                    some, rows.expand(len(next(iter(some.values()))), *rows.shape)
                )
                found[start : start + ROWS_AT_ONCE] += tally(
                    scores.argmax(2).T.numpy(), self.classes
                )
        return found

    def fingerprint(self) -> bytes:
        """See `predictor.Voters`."""
        whole = hashlib.blake2b(f"{self.shape} {self.classes} {self.model}".encode())
        for name, stacked in sorted(self.weights.items()):
            whole.update(
                f"{name} {tuple(stacked.shape)}".encode() + stacked.contiguous().numpy().tobytes()
            )
        return whole.digest()

    def save(self, folder: Path, **about: Any) -> None:
        """Put them into a folder, readable by their owner alone: they are as private as the data
        they were made from.
        """
        if self.config is None:
            raise Unsupported(
                "a file of voters whose network is a module of your own",
                "use a model by name (ModelConfig)",
            )
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        content = save_tensors(
            {name: stacked.contiguous() for name, stacked in self.weights.items()}
        )
        write_atomically(folder / NETWORKS, content, mode=PRIVATE_MODE)
        held = {"model": asdict(self.config), "shape": self.shape, "classes": self.classes}
        told = about | {"networks": held, "sha256": hashlib.sha256(content).hexdigest()}
        write_atomically(folder / ABOUT, json.dumps(told).encode(), mode=PRIVATE_MODE)

    @classmethod
    def load(cls, folder: Path) -> tuple[NetworkVoters, dict[str, Any]]:
        """The voters that `save` wrote, and what was said about them."""
        about = storage.parsed_json(ABOUT, storage.content("voters", folder / ABOUT, name=ABOUT))
        content = storage.content(
            "voters", folder / NETWORKS, most=storage.MOST_DATA, name=NETWORKS
        )
        if not isinstance(about, dict) or hashlib.sha256(content).hexdigest() != about.get(
            "sha256"
        ):
            raise Corrupt(NETWORKS, f"is not what {ABOUT} was written for")
        try:
            held = about["networks"]
            said: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in held["model"].items()
            }
            config = ModelConfig(**said)
            shape, classes = tuple(held["shape"]), held["classes"]
            model, weights = build(config, shape, classes), load_tensors(content)
        except (KeyError, TypeError, InvalidInput, SafetensorError):
            raise Corrupt(ABOUT, "does not say which networks the voters are") from None
        due = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if {name: tuple(t.shape[1:]) for name, t in weights.items()} != due or len(
            {len(t) for t in weights.values()}
        ) != 1:
            raise Corrupt(NETWORKS, "does not hold the weights of these networks")
        return cls(model, weights, shape, classes, config), about
