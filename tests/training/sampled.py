"""Two small runs of which every kind of state has something: the samples of checkpoints that
earlier versions wrote are of these.

python tests/training/sampled.py FOLDER     writes FOLDER/adaptive.safetensors and
FOLDER/banded.safetensors, after three steps
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import dpfy
from dpfy.gradients.clip import FlatClip, QuantileClip
from dpfy.noise.toeplitz import Banded
from dpfy.plan.recipe import Recipe
from dpfy.sampling.samplers import PoissonSampler, SeparatedSampler
from dpfy.training import Update

RECORDS, STEPS, STOP = 60, 6, 3
RECIPES = {
    "adaptive": lambda: Recipe(RECORDS, PoissonSampler(0.2), STEPS, QuantileClip(0.5)),
    "banded": lambda: Recipe(
        RECORDS, SeparatedSampler(0.2, 3, 2), STEPS, FlatClip(1.0), Banded((1.0, 0.5, 0.25))
    ),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def train(run: dpfy.Run, kind: str, stop: int = STEPS) -> dict[str, Tensor]:
    """Train until `stop` steps are made, then leave; the weights. Adam, an average and dropout, or
    momentum and correlated noise.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 2))
    adam, sgd = (
        torch.optim.Adam(model.parameters(), lr=0.05),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
    )
    optimizer, update = (adam, Update(average=0.8)) if kind == "adaptive" else (sgd, Update())
    plan = RECIPES[kind]().with_noise(2.0, delta=1e-3)
    runtime = dpfy.Runtime(max_physical_batch=8)
    with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
        warnings.filterwarnings("ignore", "run .* unfinished")
        with dpfy.PrivateTraining(
            model, optimizer, data(), plan, run, runtime=runtime, update=update
        ) as training:
            if not stop:
                raise KeyboardInterrupt
            for x, y in training.batches():
                training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
                if training.steps_done == stop < STEPS:
                    break
    return {name: p.detach().clone() for name, p in model.named_parameters()}


if __name__ == "__main__":
    for name in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            train(dpfy.Run(Path(folder) / "run", seed=11), name, STOP)
            shutil.copy(
                Path(folder) / "run" / "checkpoint" / "state.safetensors",
                Path(sys.argv[1]) / f"{name}.safetensors",
            )
