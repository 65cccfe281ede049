"""What the check that examples do not mix costs in a run of 1,000 steps, in CPU time: recorded and
checked steps, batches that the monitor sees, and what is left at all other steps, in one sum.

    python benchmarks/isolation.py [--steps 300] [--runs 8] [--models linear transformer]

Every step is timed by itself, from the batch being asked for to the end of `step`. What a step costs
beyond the median of the quiet steps around it is the price of its check; the first two steps are
compared with those of a run without checks, because they are the engine's first too. The number of
checks that are due does not depend on the number of steps. What the monitor may take is a fixed time
and a share of what is left of the budget: in a shorter run its cost is scaled to what 1,000 steps
allow. What the calls at a quiet step cost is timed in those calls. Runs follow each other in turns
over all models, each with other secret steps; the interval is that of the mean of the runs (95%,
Student's t).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from scipy.stats import t as student
from torch import nn
from torch.nn import functional as F

import dpfy
from dpfy.isolation import monitored_steps
from dpfy.isolation.schedule import LIMIT, QUIET, CheckLevel

RECORDS = 4000
WHOLE = 1000
FIRST = 60
"""Steps of a run without checks: its first two, and what timing calls that do nothing takes."""

AROUND = 15
"""Quiet steps on either side of a step that its time is compared with."""


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


@dataclass
class Step:
    """One step: what was done, its CPU seconds, and those within the calls of the check."""

    level: CheckLevel
    seen: bool
    seconds: float
    calls: float

    @property
    def quiet(self) -> bool:
        """Whether nothing was done at it."""
        return self.level is CheckLevel.NOTHING and not self.seen


@dataclass
class Cost:
    """Shares of 1,000 ordinary steps, and the seconds of one of those."""

    step: float
    checks: float
    monitor: float
    quiet: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.checks + self.monitor + self.quiet


def timed(
    make: Callable[[], nn.Module], batch: int, steps: int, seed: int, checks: bool
) -> tuple[list[Step], float]:
    """Train, and time every step; and the seconds of the checks, as the run itself counts them."""
    torch.manual_seed(0)
    model, found, calls = make(), list[Step](), 0.0
    data = torch.randn(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))
    plan = dpfy.dpsgd(RECORDS, batch, steps=steps).with_noise(1.0, delta=1e-5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)

    def within(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            before = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                calls += time.process_time() - before

        return run

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = dpfy.Run(Path(folder) / "run", seed=seed, checkpoint_every=1e9)
        with dpfy.PrivateTraining(model, sgd, data, plan, run) as training:
            check = training.isolation
            assert check is not None
            if not checks:
                check.isolate("without checks, to compare with")
            for name in ("begin", "end", "after", "pause"):
                call = getattr(check, name) if checks else lambda *args, **kwargs: None
                setattr(check, name, within(call))
            level, seen, started, done = CheckLevel.NOTHING, False, time.process_time(), 0
            for x, y in training.batches():
                level = max(level, check.level)
                seen = seen or check.monitored.active
                training.step(F.cross_entropy(model(x), y, reduction="none"))
                if training.steps_done > done:
                    found.append(Step(level, seen, time.process_time() - started, calls))
                    level, seen, calls = CheckLevel.NOTHING, False, 0.0
                    started, done = time.process_time(), training.steps_done
                    if not checks and done == FIRST:
                        break
    return found, check.budget.checks


def cost(make: Callable[[], nn.Module], batch: int, steps: int, seed: int) -> Cost:
    """The cost in one run of so many steps."""
    first, _ = timed(make, batch, steps, seed, checks=False)
    found, counted = timed(make, batch, steps, seed, checks=True)
    quiet = [(place, step.seconds) for place, step in enumerate(found) if step.quiet]
    plain = statistics.median(seconds for _, seconds in quiet)

    def extra(place: int) -> float:
        if place < 2:
            return found[place].seconds - first[place].seconds
        nearest = sorted(quiet, key=lambda one: abs(one[0] - place))[: 2 * AROUND]
        return found[place].seconds - statistics.median(seconds for _, seconds in nearest)

    checked = [p for p, step in enumerate(found) if step.level is not CheckLevel.NOTHING]
    seen = [p for p, step in enumerate(found) if step.seen and step.level is CheckLevel.NOTHING]
    longer = monitor_may(WHOLE, plain, counted) / monitor_may(steps, plain, counted)
    # Single steps that the machine interrupted say nothing: the median of what the monitor adds.
    added = statistics.median(map(extra, seen)) * len(seen) if seen else 0.0
    calls, without = (
        statistics.median(step.calls for step in steps if step.quiet) for steps in (found, first)
    )
    whole = WHOLE * plain
    return Cost(
        plain, sum(map(extra, checked)) / whole, longer * added / whole, (calls - without) / plain
    )


def monitor_may(steps: int, step: float, checks: float) -> float:
    """The seconds that the monitor may take in a run of so many steps, of so many seconds each."""
    whole, free = steps * step, monitored_steps.FREE
    left = LIMIT * whole - QUIET * steps - checks - free
    return free + max(0.0, min(monitored_steps.SHARE * whole, left))


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95% interval."""
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return statistics.mean(values), float(student.ppf(0.975, max(1, len(values) - 1))) * spread


MODELS = {f.__name__: f for f in (linear, perceptron, convolutions, transformer)}


def main() -> None:
    """Print one line for each model and batch size."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--runs", type=int, default=8)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    given = options.parse_args()
    torch.set_num_threads(1)
    cost(linear, 64, WHOLE, 0)
    cases = [(name, batch) for name in given.models for batch in (64, 256)]
    found: dict[tuple[str, int], list[Cost]] = {case: [] for case in cases}
    for seed in range(1, given.runs + 1):
        for name, batch in cases:
            found[name, batch].append(cost(MODELS[name], batch, given.steps, seed))
    for (name, batch), costs in found.items():
        mean, half = interval([c.total for c in costs])
        step = statistics.median(c.step for c in costs)
        parts = [
            f"{what} {100 * statistics.mean(getattr(c, what) for c in costs):.2f}%"
            for what in ("checks", "monitor", "quiet")
        ]
        print(
            f"{name:12} batch {batch:4}  step {1e3 * step:6.2f} ms  {', '.join(parts)}  "
            f"sum {100 * mean:.2f}% +- {100 * half:.2f}% of 1,000 steps",
            flush=True,
        )


if __name__ == "__main__":
    main()
