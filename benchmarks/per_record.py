"""What isolation by construction costs: a private step whose loss is written for one record,
against the step of the batched loss.

    python benchmarks/per_record.py [--rounds 60]

Short runs of the same plan take turns, one of each kind; each step is timed by itself, in CPU
seconds, from the batch being asked for to the end of `step`, noise and update included. The
smallest time of each kind is printed, and their ratio. Steps that are checked by replay belong to
no minimum: the ratio is that of steps without checks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
import isolation

RUN = 15
"""Steps of a run."""


def one(model: nn.Module, record: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of one record, through a model that is written for batches."""
    x, y = record
    return F.cross_entropy(model(x[None]), y[None])


def steps(
    make: Callable[[], nn.Module], batch: int, rounds: int, folder: Path, per_record: bool
) -> Iterator[float]:
    """Seconds of each step of a run."""
    torch.manual_seed(0)
    model = make()
    data = torch.randn(isolation.RECORDS, 1, 28, 28), torch.randint(0, 10, (isolation.RECORDS,))
    fixed = {
        "sampling": "without-replacement",
        "adjacency": "replace-one",
    }  # all batches of one size
    plan = dpfy.dpsgd(isolation.RECORDS, batch, steps=rounds, **fixed).with_noise(1.0, delta=1e-5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    run, loss = (
        dpfy.Run(folder / str(per_record), seed=1, checkpoint_every=1e9),
        dpfy.per_record(one),
    )
    with dpfy.PrivateTraining(model, sgd, data, plan, run) as training:
        if per_record and training.isolation is not None:
            training.isolation.isolate(loss.words)
        held, started, done = training.records.held, time.process_time(), 0
        for x, y in training.batches():
            losses: Any = (
                loss.losses(model, (x, y), held)
                if per_record
                else F.cross_entropy(model(x), y, reduction="none")
            )
            training.step(losses)
            if training.steps_done > done:  # a step that is checked has two batches
                yield time.process_time() - started
                started, done = time.process_time(), training.steps_done


def ratio(make: Callable[[], nn.Module], batch: int, rounds: int) -> tuple[float, float]:
    """The smallest seconds of a step of the batched loss, and of the loss for one record: short
    runs of each kind in turn.
    """
    least = {False: float("inf"), True: float("inf")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(-(-rounds // RUN)):
            # one after the other: what watches the operations of one run would see those of another
            for kind in least:
                with tempfile.TemporaryDirectory() as folder:
                    times = list(steps(make, batch, RUN, Path(folder), kind))
                least[kind] = min(
                    least[kind], *times[3:]
                )  # the engine still learns the model in the first
    return least[False], least[True]


def main() -> None:
    """Print one line for each model and batch size."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60)
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    for make in (isolation.perceptron, isolation.convolutions, isolation.transformer):
        for batch in (64, 256):
            plain, apart = ratio(make, batch, rounds)
            told = (
                f"{1e3 * plain:6.2f} ms  by construction {1e3 * apart:6.2f} ms  ratio "
                f"{apart / plain:.2f}"
            )
            print(f"{make.__name__:12} batch {batch:4}  {told}", flush=True)


if __name__ == "__main__":
    main()
