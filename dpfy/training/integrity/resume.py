"""What a resumed run must share with the run it resumes: else the same noise would meet other
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.noise import chacha, gaussian
from dpfy.training import metrics
from dpfy.training.integrity import checkpoint, computation, copies, guard, journal
from dpfy.training.integrity.checkpoint import FORMAT, Snapshot
from dpfy.training.integrity.journal import Journal
from dpfy.training.integrity.settings import numbers
from dpfy.training.integrity.state import TrainState
from dpfy.training.run import TRAINING
from dpfy.training.validation import check_optimizer

if TYPE_CHECKING:
    from dpfy.training.loop import PrivateTraining
    from dpfy.training.parallel.read_only_run import ReadOnlyRun
    from dpfy.training.parallel.world import World
    from dpfy.training.run import TrainingRun

SECRET = ("data", "model", "plan", "schedule", "scheduler", "projection")
"""Parts of the identity that are fingerprints: a refusal does not show them."""


@dataclass(frozen=True)
class Terms:
    """What a run was started with, and keeps: the `identity` that a resumed run must have, and seals
    of what training leaves alone.
    """

    identity: Mapping[str, Any]
    rates: list[float]
    physical: int
    still: Mapping[str, str]

    def facts(self) -> dict[str, Any]:
        """Their part of a checkpoint."""
        return asdict(self)


def found(folder: TrainingRun | ReadOnlyRun, world: World) -> Snapshot | None:
    """The checkpoint of an opened run; None if it has none and made no step."""
    if world.broadcast_object("the search for a checkpoint", folder.state.is_file):
        return checkpoint.read_ranks(folder.state, folder.randomness, world)
    if folder.has_begun(TRAINING):
        raise Corrupt(
            "checkpoint/state.safetensors", "is missing though steps were made: start a new run"
        )
    return None


def opened(
    training: PrivateTraining, state: TrainState, snapshot: Snapshot | None
) -> tuple[Terms, TrainState]:
    """The terms of the run and the state to go on from: that of `snapshot`, or `state`, the one
    before the first step.

    Guarantees: before the first release a checkpoint with the initial weights is on disk; with
    another identity nothing is restored.
    """
    folder, mine = training.folder, identity(training)
    training.world.agree("the beginning", {"number of records": len(training.records), **mine})
    if snapshot is None:
        check_optimizer(training.model, training.optimizer, empty=not training.rule.public_state)
        if not training.rule.public_weights:
            chosen = numbers(training.optimizer.param_groups)
            copies.check(state.weights, chosen, training.records, folder.randomness)
        terms = _terms(training, mine)
        if training.world.first:
            journal.make(folder.secrets, folder.randomness)
        training.parallel.save(folder.state, state.snapshot(terms.facts()), folder.randomness)
        return terms, state
    _require_same(mine, snapshot.facts["identity"])
    state = state.restored(snapshot, training.device)
    terms = _terms(training, mine)
    if terms.still != snapshot.facts["still"]:
        raise Corrupt(
            "checkpoint/state.safetensors",
            "holds a buffer or frozen weight that changed in training: start a new run",
        )
    if (ended := folder.ledger.settlements.get(TRAINING)) is not None and ended[0] != state.step:
        raise Corrupt(
            "checkpoint/state.safetensors",
            f"is not that of step {ended[0]}, after which the ledger says that the run ended",
        )
    if training.world.first:
        metrics.cut(folder.path, state.step)
    return terms, state


def journal_of(training: PrivateTraining, snapshot: Snapshot | None) -> Journal:
    """The journal of the steps since `snapshot`: where that is not of an earlier version, it must
    be there, and as long as it was.
    """
    folder, due = training.folder, snapshot is not None and snapshot.format == FORMAT
    return Journal(
        folder.secrets if training.world.first else None,
        folder.randomness,
        training.steps_done,
        due,
    )


def _terms(training: PrivateTraining, mine: Mapping[str, Any]) -> Terms:
    """The terms of a training with this identity, as its model stands now."""
    return Terms(
        mine,
        training.rates.base,
        training.physical_batch,
        guard.seal(training.model, training.folder.randomness),
    )


def _require_same(mine: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    for key, value in begun.items():
        if mine.get(key) != value:
            secret = key in SECRET
            rule = "must be what the run was started with" + ("" if secret else f": {value}")
            raise InvalidInput(f"resume {key}", f"another {key}" if secret else mine.get(key), rule)


def identity(training: PrivateTraining) -> dict[str, Any]:
    """Everything of a training that the bits of its steps depend on, by name; what may be secret as
    a keyed fingerprint.
    """
    randomness, model, rule = training.folder.randomness, training.model, training.rule
    shapes = [
        f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters() if p.requires_grad
    ]
    return {
        "plan": training.plan.fingerprint(),
        "data": training.records.fingerprint(randomness),
        "model": randomness.tag(
            "model",
            "\n".join([type(model).__name__, *shapes, computation.of_model(model)]).encode(),
        ),
        "optimizer": f"{type(training.optimizer).__name__} {_hyperparameters(training)}",
        "engine": training.engine.name,
        "physical batch": f"{training.physical_batch} {training.runtime.padded}",
        "device": training.device.type,
        "average": rule.averaging.decay,
        "schedule": randomness.tag("schedule", repr(training.rates.factors).encode()),
        "scheduler": randomness.tag("scheduler", training.schedules.fingerprint().encode()),
        "projection": randomness.tag("projection", computation.of_function(rule.project).encode()),
        "torch": f"{torch.__version__} {torch.get_num_threads()} threads",
        "vector code": f"numpy {np.__version__} {torch.backends.cpu.get_cpu_capability()}",
        "noise": _noise_maker(
            training.device, sum(p.numel() for p in model.parameters() if p.requires_grad)
        ),
    }


def _hyperparameters(training: PrivateTraining) -> list[dict[str, Any]]:
    groups, rates = training.optimizer.state_dict()["param_groups"], iter(training.rates.base)
    return [
        {
            k: (next(rates) if k == "lr" else v)
            for k, v in g.items()
            if k not in ("params", "initial_lr")
        }
        for g in groups
    ]


def _noise_maker(device: torch.device, values: int) -> str:
    """What turns keys into noise: another one would give other noise to a step that is made
    again.
    """
    if device.type == "cpu":
        return (
            "keystream 4" if values >= gaussian.CHUNK else "keystream 3"
        )  # fewer values are made as they were
    return "kernel 4" if chacha.triton is not None else "generator 2"
