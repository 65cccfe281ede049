"""The private training loop as the checks see it: records whose gradients are given, and the noisy
sums that an attacker sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from dpfy.audit.observation import Discarded, noisy_sum, watched
from dpfy.core.unit import Adjacency
from dpfy.data.records import Records
from dpfy.gradients import engine as joined
from dpfy.gradients.engine import trainable
from dpfy.plan.recipe import Plan, dpsgd
from dpfy.runs.run import Run
from dpfy.training.loop import PrivateTraining
from dpfy.training.runtime import Runtime
from dpfy_lab.checks.published import temporary

Array = NDArray[np.float64]
CLIP = 2.7
"""Not 1, or noise that forgets the clipping norm could not be told from noise that knows it; above
1, so that forgetting makes it too small.
"""
NOISE_MULTIPLIER, RATE, STEPS, DELTA, PHYSICAL = 1.5, 0.5, 20, 1e-5, 128
"""What is claimed; and records of a physical batch."""
LENGTH = 10.0
"""Of gradients before clipping, in clipping norms."""


@cache
def _network() -> nn.Module:
    """Two layers with 904 parameters in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 4)).double()


@contextmanager
def network() -> Iterator[nn.Module]:
    """The model that is trained. Its weights are put back afterwards."""
    model = _network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        yield model
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])


@cache
def places() -> dict[str, slice]:
    """Where each parameter tensor lies in the flat vector."""
    found, start = {}, 0
    for name, p in _network().named_parameters():
        found[name] = slice(start, start + p.numel())
        start += p.numel()
    return found


def dimension() -> int:
    """Length of the flat parameter vector."""
    return max(place.stop for place in places().values())


def plan_of(
    records: int,
    noise: float = NOISE_MULTIPLIER,
    rate: float = RATE,
    steps: int = STEPS,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
) -> Plan:
    """DP-SGD on so many records."""
    recipe = dpsgd(records, rate * records, steps=steps, clip_norm=CLIP, adjacency=adjacency)
    return recipe.with_noise(noise, delta=DELTA, allow_large_delta=True)


class Attempt:
    """A training on records with given gradients, of which every noisy sum is kept."""

    def __init__(self, training: PrivateTraining, rows: Array) -> None:
        self.training, self.rows, self.fail = training, rows, -1
        self.seen: list[tuple[int, Array]] = []

    def look(self, training: PrivateTraining) -> None:
        """Keep a noisy sum; fail after the noise where asked."""
        sums = noisy_sum(training.plan, trainable(training.model))
        self.seen.append((training.steps_done, sums))
        if training.steps_done == self.fail:
            raise Discarded

    def run(
        self,
        *,
        fail: int = -1,
        leave: int | None = None,
        between: Callable[[PrivateTraining], object] = lambda training: None,
    ) -> None:
        """Make all steps that are left, or leave after so many."""
        self.fail, model, clip = fail, self.training.model, self.training.plan.recipe.clip
        directions = torch.tensor(self.rows, dtype=torch.float64) * clip.bound.l2
        for index, *real in self.training.batches():
            between(self.training)
            flat = torch.cat([p.reshape(-1) for p in trainable(model).values()])
            losses = functional.linear(directions[index.flatten()], flat[None]).squeeze(1)
            self.training.step(joined.per_user(losses, *real) if real else losses)
            if self.training.steps_done == leave:
                return


@contextmanager
def attempt(
    model: nn.Module,
    rows: Array,
    plan: Plan,
    folder: Path,
    *,
    seed: int = 7,
    physical: int = 64,
    by: Callable[[Records], object] = lambda records: records,
) -> Iterator[Attempt]:
    """A training that has begun, or that is resumed, on records whose gradients are `rows`
    [records, parameters] in clipping norms. `by` arranges the records, by their owners say.
    """
    run = Run(folder, resume=True, seed=seed, checkpoint_every=1e9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    runtime, records = (
        Runtime("batched", max_physical_batch=physical),
        Records((torch.arange(len(rows)),)),
    )
    training = PrivateTraining(model, optimizer, by(records), plan, run, runtime=runtime)
    made = Attempt(training, rows)
    with watched(training, made.look, keep=False):
        yield made


def noisy_sums(
    rows: Array,
    plan: Plan,
    *,
    seed: int = 0,
    physical: int = 64,
    interrupt: int | None = None,
    by: Callable[[Records], object] = lambda records: records,
) -> Array:
    """Run a plan: the noisy sums [steps, parameters] in clipping norms. With `interrupt`, the run
    is left after so many steps and resumed from its checkpoint.

    The whole loop runs: sampler, engine, accumulation over physical batches, noise, divisor.
    """
    seen: dict[int, Array] = {}
    with temporary() as folder:
        for leave in [interrupt, None] if interrupt else [None]:
            with (
                network() as model,
                attempt(model, rows, plan, folder, seed=seed, physical=physical, by=by) as made,
            ):
                made.run(leave=leave)
            seen.update(made.seen)
    return np.array([seen[step] for step in sorted(seen)])


def updates(
    rows: Array,
    *,
    noise: float = NOISE_MULTIPLIER,
    rate: float = RATE,
    steps: int = STEPS,
    seed: int = 0,
    interrupt: int | None = None,
) -> Array:
    """What DP-SGD on records with these gradients releases: see :func:`noisy_sums`."""
    plan = plan_of(len(rows), noise, rate, steps)
    physical = PHYSICAL if len(rows) > 16 else 4
    return noisy_sums(rows, plan, seed=seed, physical=physical, interrupt=interrupt)
