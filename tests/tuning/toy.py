"""A small search: a linear model on made-up records, with everything in one place, so that other
processes can import it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dpfy
from dpfy.plan.recipe import Recipe
from dpfy.runs.run import Run
from dpfy.tuning.run import Execution, Tuned, tune
from dpfy.tuning.terms import SearchSettings
from dpfy.tuning.trial import Trial

RECORDS, FEATURES, STEPS = 300, 4, 6
SPACE = {"rate": "0.05..5 log", "clip": [0.5, 1.0, 2.0]}
SEED = 7

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(RECORDS, FEATURES, generator=_GENERATOR)
WEIGHTS = torch.randn(FEATURES, generator=_GENERATOR)
Y = (X @ WEIGHTS + 0.3 * torch.randn(RECORDS, generator=_GENERATOR) > 0).long()
PUBLIC_X = torch.randn(200, FEATURES, generator=_GENERATOR)
PUBLIC_Y = (PUBLIC_X @ WEIGHTS > 0).long()


def recipe(settings: dict[str, Any], records: int) -> Recipe:
    return dpfy.dpsgd(
        records,
        settings.get("batch", 60) * records / RECORDS,
        steps=STEPS,
        clip_norm=settings["clip"],
    )


def trained(trial: Trial) -> torch.nn.Module:
    """A model trained in a trial, on the records that are its own."""
    net = torch.nn.Linear(FEATURES, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=trial.settings["rate"])
    dpfy.fit(net, trial.train((X, Y)), plan=trial.plan, optimizer=optimizer, run=trial.run)
    return net


def right(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    return int((net(x).argmax(1) == y).sum())


def objective(trial: Trial) -> float:
    """Scored on public records: by a small part too fine to tie."""
    net = trained(trial)
    return right(net, PUBLIC_X, PUBLIC_Y) / len(PUBLIC_Y) - 1e-6 * float(net.weight.detach().norm())


def held_out(trial: Trial) -> float:
    """Scored on records held out of training."""
    net, apart = trained(trial), trial.valid((X, Y))
    return trial.count(right(net, *apart.tensors))


def on_training(trial: Trial) -> float:
    """Scored on the training records."""
    return trial.count(right(trained(trial), X, Y))


OBJECTIVES = {"public": objective, "held-out": held_out, "training": on_training}


def scaled(settings: dict[str, Any], share: float) -> dict[str, Any]:
    return {**settings, "rate": settings["rate"] * share}


def terms(**more: Any) -> SearchSettings:
    given = {"epsilon": 4.0, "delta": 1e-3, "records": RECORDS, "trials": 4, "law": "geometric"}
    return SearchSettings(**(given | more))


def search(
    out: Path,
    *,
    seed: int | None = SEED,
    resume: bool = False,
    work: Execution | None = None,
    space: Any = SPACE,
    **more: Any,
) -> Tuned:
    """One whole search."""
    asked = terms(**more)
    place = Run(out, seed=seed, resume=resume)
    return tune(
        OBJECTIVES[asked.score], space, recipe, asked, place, work=work or Execution(scaled=scaled)
    )


if __name__ == "__main__":
    import json
    import sys

    options = json.loads(sys.argv[2])
    work = Execution(workers=options.pop("workers", 1), scaled=scaled, checkpoint_every=0.0)
    found = search(Path(sys.argv[1]), work=work, **options)
    print(json.dumps(found.to_json()))
