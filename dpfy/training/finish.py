"""The end of a run: model, ledger note, report, and then the secrets are erased. Each step can be
repeated after a crash.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

import dpfy
from dpfy.core.codec import number
from dpfy.core.errors import Unsupported
from dpfy.isolation.summary import CheckSummary
from dpfy.models import repair as repaired
from dpfy.plan.claim import NOTHING, PUBLIC, SEARCHED
from dpfy.report import card, uses
from dpfy.report.words import absent
from dpfy.training import weights
from dpfy.training.integrity import guard
from dpfy.training.parallel.dtensor import full
from dpfy.training.run import TRAINING, TrainingRun

NO_NORMS = (
    "gradient norms were not released: showing them would cost privacy, and no reservation pays "
    "for it"
)

if TYPE_CHECKING:
    from dpfy.training.loop import PrivateTraining


def write(
    training: PrivateTraining,
    utility: dict[str, float],
    confusion: list[list[int]] | None = None,
    test: str = "none",
) -> None:
    """Write model.safetensors, the reports and privacy.json and erase the checkpoint folder.

    A run that may end early is settled first: its last step is in a checkpoint, then no ledger lets
    it go on, then it is charged for less.

    Guarantees: those of `TrainingRun.settle` and `TrainingRun.finish`; until the ledger holds the end,
    the run can be resumed from the checkpoint of its last step. The model released is the averaged
    one where there is averaging; all of it but the trained weights is, bit for bit, what it was
    when the run began.
    """

    folder = training.folder
    training.save()
    with training.averaged():
        released, base = _weights(training), weights.base_of(training.model)

    def facts() -> card.Facts:
        assert isinstance(folder, TrainingRun)
        folder.write("model.safetensors", save(released, metadata={"format": "pt"}))
        about = _told(training, utility, confusion, test) | {"model": _model(training, base)}
        told = {TRAINING: folder.told.get(TRAINING, {}) | about}
        return card.Facts(_provenance(training), training.steps_done, told)

    if isinstance(folder, TrainingRun):
        if training.steps_done < training.plan.recipe.steps:
            folder.settle(TRAINING, training.steps_done)
        folder.finish(facts)
    training.world.exchange("the end of the run")


def _told(
    training: PrivateTraining,
    utility: dict[str, float],
    confusion: list[list[int]] | None,
    test: str,
) -> dict[str, Any]:
    """What the section on training tells beside what follows from its claim. What it does not know
    is given as absent.
    """
    measured = uses.words(test)
    return {
        "steps_done": training.steps_done,
        "evaluation": {"test": test},
        "utility": {k: number(v) for k, v in utility.items()} or absent(measured),
        "confusion": confusion
        or absent("there are no classes to confuse" if utility else measured),
        "gradient_norms": absent(NO_NORMS),
        "components": _components(training),
        "optimizer": _optimizer(training),
        "recorded": ", ".join(sorted(training.state.recorded)) or NOTHING,
    }


def _weights(training: PrivateTraining) -> dict[str, Tensor]:
    """A full copy of what is released, by plain names; tied weights under each of theirs. Refuses
    what training had to leave alone.
    """
    now = guard.seal(training.model, training.folder.randomness)
    still = training.terms.still
    if changed := sorted(
        name for name in now.keys() | still.keys() if now.get(name) != still.get(name)
    ):
        raise Unsupported(
            f"publishing {changed[0]}, which changed in training without noise,", guard.STILL
        )
    return {
        name: full(t).detach().cpu().contiguous().clone()
        for name, t in weights.released(training.model).items()
    }


def _optimizer(training: PrivateTraining) -> dict[str, Any]:
    """The update rule: public settings, for the report."""
    group, rule = training.optimizer.param_groups[0], training.rule
    kept = {k: group[k] for k in ("momentum", "betas", "weight_decay", "nesterov") if group.get(k)}
    rates = [
        g.get("initial_lr", r)
        for g, r in zip(training.optimizer.param_groups, training.rates.base, strict=True)
    ]
    return {
        "name": type(training.optimizer).__name__,
        "learning_rate": rates[0] if len(set(rates)) == 1 else rates,
        "schedule": _schedule(training),
        **{k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()},
        "weight_average": rule.averaging.decay,
        "initial_state": PUBLIC if rule.public_state else "empty",
        "initial_weights": PUBLIC if rule.public_weights else SEARCHED,
        "projection": "none" if rule.project is None else "a rule of the weights, after each step",
    }


def _schedule(training: PrivateTraining) -> str:
    """How the learning rates went, as they were at each step."""
    made = training.state.rates
    if training.rule.schedule is not None:
        return "given by a function of the step"
    if not made:
        return training.schedules.words or "constant"
    first, last = (
        ", ".join(f"{r:g}" for r in dict.fromkeys(rates)) for rates in (made[0][1], made[-1][1])
    )
    return (
        f"{training.schedules.words}: {first} at step {made[0][0]}, {len(made) - 1} changes, "
        f"{last} from step {made[-1][0]} on"
    )


def _checked(training: PrivateTraining) -> str:
    """What was checked of the isolation of examples: in what the loop computes, and in how batches
    are read (by this process).
    """
    if training.isolation is None:
        return CheckSummary().words
    return "; ".join(
        words
        for words in (training.isolation.summary.words, training.drawing.inspected.words)
        if words
    )


def _components(training: PrivateTraining) -> dict[str, Any]:
    """What the model is made of, that it was checked, and what was replaced to make it trainable
    privately.
    """
    leaves = [m for m in training.model.modules() if not any(True for _ in m.children())]
    names = [type(m).__name__ for m in leaves]
    replaced = sorted(
        {repaired.words(m) for m in leaves if isinstance(getattr(m, "replaces", None), str)}
    )
    return {
        "modules": {name: names.count(name) for name in dict.fromkeys(names)},
        "parameters": sum(p.numel() for p in training.model.parameters() if p.requires_grad),
        "checked": _checked(training),
        "replaced": replaced or absent("the model that was given needed no replacement"),
    }


def _model(training: PrivateTraining, base: dict[str, Any] | None) -> dict[str, Any]:
    """What the released file holds: all of the model, or an adapter on a base that is named and
    recognised by its fingerprint.
    """
    return training.folder.told.get(TRAINING, {}).get("model", {}) | {
        "class": type(weights.inside(training.model)).__name__,
        "holds": "all weights" if base is None else "the adapter alone",
        "base": base or absent("the model has no base that is kept elsewhere"),
        "statistics": repaired.statistics(training.model)
        or absent("no layer normalises by statistics of other records"),
    }


def _provenance(training: PrivateTraining) -> dict[str, str]:
    fixed = training.folder.randomness.fixed
    return {
        "dpfy": dpfy.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {training.device.type}",
        "ranks": str(training.world.count),
        "engine": training.engine.name,
        **(
            {}
            if "model" in training.folder.run.about
            else {"model": type(weights.inside(training.model)).__name__}
        ),
        "seed": card.FIXED_SEED if fixed else card.SECRET_SEED,
    }
