"""What the checks for mixing cost in a run of 1,000 steps: CPU seconds of the steps that were
recorded, beyond those of the others.

    python benchmarks/isolation.py [--steps 300]

Every step is timed by itself, from the batch being asked for to the end of `step`; the extra time
of the recorded ones, over the median of the others, is divided by 1,000 such medians. The number of
checks that are due does not depend on the number of steps; further ones take less than half a
percent of the time. Beside it stands what watching every step adds to an ordinary one: their median
over that of a run that watches none, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
from dpfy.isolation.check import CheckLevel

RECORDS = 4000


def linear() -> nn.Module:
    """Logistic regression on images: a step of about a millisecond."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def perceptron() -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutions() -> nn.Module:
    """The small network of many studies."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),  # noqa: E501
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    """Two encoder layers over the rows of an image."""
    layer = nn.TransformerEncoderLayer(28, 4, 112, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Flatten(1, 2), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(784, 10)
    )


def share(
    make: Callable[[], nn.Module], batch: int, steps: int, watched: bool = True
) -> tuple[float, float]:
    """Median seconds of an ordinary step, and the share of the checks in 1,000 of them."""
    torch.manual_seed(0)
    model, times = make(), dict[CheckLevel, list[float]]()
    data = torch.randn(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))
    plan = dpfy.dpsgd(RECORDS, batch, steps=steps).with_noise(1.0, delta=1e-5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = dpfy.Run(Path(folder) / "run", seed=1, checkpoint_every=1e9)
        with dpfy.PrivateTraining(model, sgd, data, plan, run) as training:
            assert training.isolation is not None
            training.isolation.alone = watched
            kinds = {}
            begin = training.isolation.begin

            def noting(step: int, fields: tuple[Tensor, ...], first: bool) -> None:
                begin(step, fields, first)
                if first:
                    kinds[step] = training.isolation._kind  # type: ignore[union-attr]

            first, end = 0.0, training.isolation.end

            def timed(losses: Tensor, released: bool) -> None:
                nonlocal first
                before = time.process_time()
                end(losses, released)
                first += time.process_time() - before if not released else 0.0

            training.isolation.begin, training.isolation.end = noting, timed  # type: ignore[method-assign]
            started, done = time.process_time(), 0
            for x, y in training.batches():
                training.step(F.cross_entropy(model(x), y, reduction="none"))
                if training.steps_done > done:
                    times.setdefault(kinds[done], []).append(time.process_time() - started)
                    started, done = time.process_time(), training.steps_done
    plain = statistics.median(times[CheckLevel.NOTHING])
    # The first step is the engine's first too; of it only the check itself counts.
    later = [
        t
        for kind in CheckLevel
        if kind is not CheckLevel.NOTHING
        for t in times.get(kind, [])[kind is CheckLevel.THOROUGH :]
    ]
    extra = first + sum(t - plain for t in later)

    return plain, extra / (1000 * plain)


def main() -> None:
    """Print one line for each model and batch size."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    steps = options.parse_args().steps
    torch.set_num_threads(1)
    share(linear, 64, 50)
    for make in (linear, perceptron, convolutions, transformer):
        for batch in (64, 256):
            found = [share(make, batch, steps) for _ in range(3)]
            without = [share(make, batch, steps, watched=False)[0] for _ in range(3)]
            plain, part = (
                statistics.median(f[0] for f in found),
                statistics.median(f[1] for f in found),
            )
            ratio = min(f[0] for f in found) / min(without)
            line = (
                f"{make.__name__:12} batch {batch:4}  step {1e3 * plain:6.2f} ms  checks "
                f"{100 * part:.2f}% of 1,000 steps"
            )
            print(f"{line}  watched / not {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
