"""Small finished runs of every kind that a card must be able to describe."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import dpfy
from dpfy.core.events import Gaussian, Repeated
from dpfy.core.unit import Adjacency, Unit
from dpfy.gradients.clip import FlatClip
from dpfy.noise.toeplitz import Banded
from dpfy.plan.claim import ForeignBatches
from dpfy.plan.recipe import Plan, Recipe
from dpfy.sampling.samplers import FixedOrderSampler, ReshuffledSampler

RECORDS, STEPS, DELTA = 120, 8, 1e-3


def data(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(RECORDS, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def fit(path: Path | dpfy.Run, plan: Plan) -> Path | dpfy.Run:
    net = model()
    dpfy.fit(
        net,
        data(),
        plan=plan,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        run=path,
        evaluation=dpfy.PublicTest(data(4)),
    )
    return path


def plain_plan(noise: float = 2.0, **terms: object) -> Plan:
    recipe = dpfy.dpsgd(RECORDS, 30, steps=STEPS, **terms)  # type: ignore[arg-type]
    return recipe.with_noise(noise, delta=DELTA)


def dpsgd(path: Path) -> Path:
    return fit(path, plain_plan())


def correlated(path: Path) -> Path:
    recipe = Recipe(
        RECORDS, FixedOrderSampler(4, 2), STEPS, FlatClip(1.0), Banded((1.0, 0.5, 0.25))
    )
    return fit(path, recipe.with_noise(3.0, delta=DELTA))


def shuffled(path: Path) -> Path:
    recipe = Recipe(RECORDS, ReshuffledSampler(4, 2), STEPS, FlatClip(1.0), Banded((1.0,)))
    return fit(path, recipe.with_noise(3.0, delta=DELTA))


def resumed(path: Path) -> Path:
    _loop(path, stop=3)
    _loop(path, resume=True)
    return path


def tuned(path: Path) -> Path:
    """Three candidates were tried on the same data before; the ledger pays for them."""
    _loop(
        path,
        before=lambda training: training.folder.ledger.reserve(
            "tuning: 3 candidates", Repeated(Gaussian(9.0), STEPS), 3
        ),
    )
    return path


def foreign(path: Path, most: int | None = 2) -> Path:
    """The plan says Poisson; the batches came from somewhere else."""
    _loop(
        path, batches=ForeignBatches("batches came from a loader that shuffles every epoch", most)
    )
    return path


def user_level(path: Path) -> Path:
    return fit(path, plain_plan(unit=Unit("user")))


def replaced(path: Path) -> Path:
    return fit(path, plain_plan(adjacency=Adjacency.REPLACE_ONE))


def without_privacy(path: Path) -> Path:
    return fit(path, plain_plan(0.0))


def shared(path: Path) -> Path:
    """Billed to the ledger of its data set as well."""
    return fit(dpfy.Run(path, ledger=path.parent / "people.jsonl"), plain_plan()) and path


def converted(path: Path) -> Path:
    """A model whose batch normalisation had to be replaced."""
    from dpfy.models.repair import repair

    torch.manual_seed(0)
    net = repair(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    ).model
    dpfy.fit(
        net,
        data(),
        plan=plain_plan(),
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        run=path,
    )
    return path


def _loop(
    path: Path,
    *,
    stop: int | None = None,
    resume: bool = False,
    before: object = None,
    batches: ForeignBatches | None = None,
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = dpfy.Run(path, resume=resume)
    with dpfy.PrivateTraining(
        net, optimizer, data(), plain_plan(), run, batches=batches
    ) as training:
        if before is not None:
            before(training)  # type: ignore[operator]
        for x, y in training.batches():
            training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == stop:
                break


FIVE = {
    "dp-sgd": dpsgd,
    "correlated": correlated,
    "non-poisson": shuffled,
    "resumed": resumed,
    "tuned": tuned,
}
MORE = {
    "foreign": foreign,
    "user-level": user_level,
    "replace-one": replaced,
    "no-privacy": without_privacy,
}
MORE |= {"shared": shared, "converted": converted}
