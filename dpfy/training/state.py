"""What a checkpoint of a training holds, and what must be the same for a resumed run to be the same run."""

from __future__ import annotations

import secrets as entropy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpfy import accounting
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.guarantee import Guarantee
from dpfy.noise import chacha
from dpfy.plan.recipe import CODEC
from dpfy.training import checkpoint, computation, guard, metrics
from dpfy.training.update import check_optimizer

if TYPE_CHECKING:
    from dpfy.training.loop import PrivateTraining


def fresh_path() -> Path:
    """A new folder under runs/ for a run that was not given one."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{entropy.token_hex(2)}"


def guarantee(training: PrivateTraining) -> Guarantee:
    """The guarantee of the run's ledger, with the caveats that this run has earned."""
    folder = training.folder
    return folder.ledger.guarantee(accounting.accountant(training.plan.accountant), folder.claim.caveats)


def identity(training: PrivateTraining) -> dict[str, Any]:
    """Everything a resumed run must share with the run it resumes: else the same noise would meet other gradients."""
    randomness = training.folder.randomness
    model = training.model
    shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters() if p.requires_grad]
    rule = training.rule
    data = "".join(randomness.tag("data", bytes(piece)) for piece in training.records.content())
    return {
        "plan": training.plan.fingerprint(),
        "data": randomness.tag("records", data.encode()),
        "model": randomness.tag("model", "\n".join([type(model).__name__, *shapes, computation.of_model(model)]).encode()),
        "optimizer": f"{type(training.optimizer).__name__} {_hyperparameters(training)}",
        "engine": training.engine.name,
        "physical batch": f"{training.physical_batch} {training.runtime.padded}",
        "device": training.device.type,
        "average": rule.averaging.decay,
        "schedule": randomness.tag("schedule", repr(training._factors).encode()),
        "projection": randomness.tag("projection", computation.of_function(rule.project).encode()),
        "torch": f"{torch.__version__} {torch.get_num_threads()} threads",
        "vector code": f"numpy {np.__version__} {torch.backends.cpu.get_cpu_capability()}",
        "noise": _noise_maker(training.device),
    }


def _noise_maker(device: torch.device) -> str:
    """What turns keys into noise: another one would give other noise to a step that is made again."""
    return "keystream 3" if device.type == "cpu" else "kernel 3" if chacha.triton is not None else "generator 2"


def restore_or_begin(training: PrivateTraining) -> None:
    """Restore the last checkpoint, or write the one of step 0 (initial weights included) before the first release."""
    file = training.folder.state
    if not file.is_file():
        if training.folder.begun:
            raise Corrupt("checkpoint/state.safetensors", "is missing though steps were made: start a new run")
        check_optimizer(training.model, training.optimizer, empty=not training.rule.public_state)
        training.identity = identity(training)
        training._sealed = guard.seal(training.model, training.folder.randomness)
        save(training)
        return
    snapshot = checkpoint.read(file, training.folder.randomness)
    if training.runtime.max_physical_batch == "auto":
        training.physical_batch = snapshot.facts["physical"]
    training.identity = identity(training)
    for key, value in snapshot.facts["identity"].items():
        if training.identity.get(key) != value:
            secret = key in ("data", "model", "plan", "schedule", "projection")
            shown = f"another {key}" if secret else training.identity.get(key)
            rule = "must be what the run was started with" + ("" if secret else f": {value}")
            raise InvalidInput(f"resume {key}", shown, rule)
    _load(training, snapshot)
    metrics.cut(training.folder.path, training.steps_done)


def save(training: PrivateTraining) -> None:
    """Write the state between two steps: weights, optimizer, averages, noise state, generator position."""
    tensors, optimizer = checkpoint.split_optimizer(training.optimizer.state_dict())
    parts: dict[str, Mapping[str, Tensor]] = {
        "model": _weights(training),
        "optimizer": tensors,
        "average": training.average,
        "noise": training._noise_state,
        "random": training._random if training._pieces is not None else generators(training.device),
    }
    named = {f"{prefix}.{name}": t for prefix, part in parts.items() for name, t in part.items()}
    facts = {
        "identity": training.identity,
        "optimizer": optimizer,
        "rates": training._base_rates,
        "physical": training.physical_batch,
        "clip": CODEC.encode(training.clip),
        "still": training._sealed,
        "rates made": training._rates_made,
        "recorded": sorted(training._recorded),
        "computed": training._computed,
    }
    checkpoint.write(training.folder.state, checkpoint.Snapshot(training.steps_done, facts, named), training.folder.randomness)
    if training._journal is not None:
        training._journal.forget(training.steps_done)


def _load(training: PrivateTraining, snapshot: checkpoint.Snapshot) -> None:
    weights = snapshot.part("model")
    try:
        with torch.no_grad():
            for name, value in _weights(training).items():
                value.copy_(weights[name])
            for name, value in snapshot.part("average").items():
                training.average[name].copy_(value)
        optimizer = checkpoint.join_optimizer(snapshot.part("optimizer"), snapshot.facts["optimizer"])
        training.optimizer.load_state_dict(optimizer)
    except (KeyError, RuntimeError, ValueError) as problem:
        raise Corrupt("checkpoint/state.safetensors", f"does not fit this model ({problem})") from None
    training._noise_state = {name: t.to(training.device) for name, t in snapshot.part("noise").items()}
    training._base_rates = list(snapshot.facts["rates"])
    training._clip = CODEC.decode(snapshot.facts["clip"])
    training._steps_done = snapshot.step
    training._sealed = guard.seal(training.model, training.folder.randomness)
    if training._sealed != snapshot.facts["still"]:
        raise Corrupt("checkpoint/state.safetensors", "holds a buffer or frozen weight that changed in training: start a new run")
    training._rates_made = [(step, rates) for step, rates in snapshot.facts["rates made"]]
    training._recorded, training._computed = set(snapshot.facts["recorded"]), dict(snapshot.facts["computed"])
    positions = snapshot.part("random")
    torch.set_rng_state(positions["cpu"])
    if "device" in positions:
        torch.cuda.set_rng_state(positions["device"], training.device)


def _weights(training: PrivateTraining) -> dict[str, Tensor]:
    """Parameters and buffers, each storage once (shared ones under their first name)."""
    named: dict[str, Tensor] = dict(training.model.named_parameters())
    named |= dict(training.model.named_buffers())
    return {name: t.detach() for name, t in named.items()}


def generators(device: torch.device) -> dict[str, Tensor]:
    """Positions of torch's own generators (dropout and the like): not privacy, but exactness."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_rng_state(device)
    return found


def _hyperparameters(training: PrivateTraining) -> list[dict[str, Any]]:
    groups = training.optimizer.state_dict()["param_groups"]
    rates = iter(training._base_rates)
    return [{k: (next(rates) if k == "lr" else v) for k, v in g.items() if k not in ("params", "initial_lr")} for g in groups]
