"""The end of a run: model, ledger note, card, and then the secrets are erased. Each step can be repeated after a crash."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

import dpfy
from dpfy.core.errors import Unsupported
from dpfy.core.storage import sha256_of, write_atomically
from dpfy.report import card
from dpfy.report.assumptions import NOTHING, PUBLIC
from dpfy.report.words import absent
from dpfy.training import guard, state
from dpfy.training.run import erase_secrets, publish
from dpfy.training.watch import Checks

if TYPE_CHECKING:
    from dpfy.training.loop import PrivateTraining


def write(
    training: PrivateTraining, utility: dict[str, float], confusion: list[list[int]] | None = None, test: str = "none"
) -> None:
    """Write model.safetensors, the reports and privacy.json and erase the checkpoint folder.

    Guarantees: the card is written last, so a folder with a card is complete; until then the run can be resumed from the checkpoint of
    its last step. The model released is the averaged one where there is averaging; all of it but the trained weights is, bit for bit,
    what it was when the run began. The ledger holds one end of the run, with the hash of the card and of every file: a crash after it
    publishes that very card, whatever is asked then.
    """
    folder = training.folder
    folder.ledger.refresh()
    if folder.ledger.book.finish is None:
        training.save()
        with training.averaged():
            write_atomically(folder.path / "model.safetensors", save(_weights(training), metadata={"format": "pt"}))
        _end(training, utility, confusion, test)
    publish(folder.path)
    erase_secrets(folder.path)


def _end(training: PrivateTraining, utility: dict[str, float], confusion: list[list[int]] | None, test: str) -> None:
    """Compute the card, lay it down beside the secrets, and write the end of the run with its hash to the ledger."""
    folder = training.folder
    folder.note_begun()
    folder.ledger.refresh()
    run = card.RunFacts(
        plan=training.plan,
        guarantee=state.guarantee(training),
        steps_done=training.steps_done,
        utility=utility,
        provenance=_provenance(training),
        optimizer=_optimizer(training),
        components=_components(training),
        confusion=confusion,
        test=test,
    )
    made = card.build(folder.path, run, folder.ledger)
    files = card.write_pages(folder.path, made) | card.hashes(folder.path)
    write_atomically(folder.secrets / card.NAME, card.render(made))
    folder.ledger.finish(folder.permit, steps=training.steps_done, card=sha256_of(folder.secrets / card.NAME), files=files)


def _weights(training: PrivateTraining) -> dict[str, Tensor]:
    """A full copy of the state_dict: tied weights are written under each of their names. Refuses what training had to leave alone."""
    now = guard.seal(training.model, training.folder.randomness)
    still = training.terms.still
    if changed := sorted(name for name in now.keys() | still.keys() if now.get(name) != still.get(name)):
        raise Unsupported(f"publishing {changed[0]}, which changed in training without noise,", guard.STILL)
    return {name: t.detach().cpu().contiguous().clone() for name, t in training.model.state_dict().items()}


def _optimizer(training: PrivateTraining) -> dict[str, Any]:
    """The update rule: public settings, for the card."""
    group, rule = training.optimizer.param_groups[0], training.rule
    kept = {k: group[k] for k in ("momentum", "betas", "weight_decay", "nesterov") if group.get(k)}
    rates = training.rates.base
    return {
        "name": type(training.optimizer).__name__,
        "learning_rate": rates[0] if len(set(rates)) == 1 else rates,
        "schedule": _schedule(training),
        **{k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()},
        "weight_average": rule.averaging.decay,
        "initial_state": PUBLIC if rule.public_state else "empty",
        "projection": "none" if rule.project is None else "a rule of the weights, after each step",
    }


def _schedule(training: PrivateTraining) -> str:
    """How the learning rates went, as they were at each step."""
    made = training.state.rates
    if training.rule.schedule is not None:
        return "given by a function of the step"
    if len(made) < 2 and all(rates == training.rates.base for _, rates in made):
        return "constant"
    first, last = (", ".join(f"{r:g}" for r in dict.fromkeys(rates)) for rates in (made[0][1], made[-1][1]))
    return f"set by the caller's loop: {first} at step {made[0][0]}, {len(made) - 1} changes, {last} from step {made[-1][0]} on"


def _components(training: PrivateTraining) -> dict[str, Any]:
    """What the model is made of, that it was checked, and what was replaced to make it trainable privately."""
    leaves = [m for m in training.model.modules() if not any(True for _ in m.children())]
    names = [type(m).__name__ for m in leaves]
    replaced = sorted({f"{m.replaces} by {type(m).__name__}" for m in leaves if isinstance(getattr(m, "replaces", None), str)})
    return {
        "modules": {name: names.count(name) for name in dict.fromkeys(names)},
        "parameters": sum(p.numel() for p in training.model.parameters() if p.requires_grad),
        "checked": training.watch.checks.words if training.watch is not None else Checks().words,
        "replaced": replaced or absent("the model that was given needed no replacement"),
    }


def _provenance(training: PrivateTraining) -> dict[str, str]:
    fixed = training.folder.randomness.fixed
    return {
        "dpfy": dpfy.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {training.device.type}",
        "engine": training.engine.name,
        "recorded": ", ".join(sorted(training.state.recorded)) or NOTHING,
        "seed": card.FIXED_SEED if fixed else "256 bits of operating system entropy, erased at the end of the run",
    }
