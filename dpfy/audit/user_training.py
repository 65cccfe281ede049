"""User-level training under audit: the real loop on users whose records have given gradients, and
canary users among them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from dpfy.audit.observation import LENGTH, Array, noisy_sum, watched
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Unit
from dpfy.data.records import Records
from dpfy.data.users import UserRecords, by_user
from dpfy.gradients.engine import per_user, trainable
from dpfy.plan.recipe import Plan, dpsgd
from dpfy.runs.run import Run
from dpfy.training.loop import PrivateTraining
from dpfy.training.runtime import Runtime


def observe_users(
    model: nn.Module,
    rows: Array,
    owners: NDArray[np.int64],
    plan: Plan,
    *,
    seed: int | None = 0,
) -> Array:
    """Run `plan` on users whose records have the gradients `rows` [records, parameters]; the noisy
    sums [steps, parameters].

    Both are in clip norms.
    """
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    users = by_user(Records((torch.arange(len(rows)),)), owners, plan.recipe.unit.most_records)
    assert isinstance(users, UserRecords)
    directions = (
        torch.tensor(rows, dtype=next(model.parameters()).dtype) * plan.recipe.clip.bound.l2
    )
    seen: list[Array] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run", seed=seed, checkpoint_every=1e9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        training = PrivateTraining(
            model, optimizer, users, plan, run, runtime=Runtime(engine="batched")
        )

        def look(t: PrivateTraining) -> None:
            seen.append(noisy_sum(plan, trainable(t.model)))

        with watched(training, look, keep=False):
            for index, real in training.batches():
                flat = torch.cat([p.reshape(-1) for p in trainable(model).values()])
                losses = functional.linear(directions[index.flatten()], flat[None]).squeeze(1)
                training.step(per_user(losses, real))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial[name])
    return np.array(seen)


MOST_SIZE = 2**25
"""Numbers that the gradients of all users, or all noisy sums, may hold together: some copies are
made of them.
"""

Observe = Callable[[nn.Module, Array, Plan, "int | None"], Array]
"""From a model, one update of each user [users, parameters] in clip norms, a plan and a seed to the
noisy sums [steps, parameters].
"""


@dataclass(frozen=True)
class UserFacts:
    """A user-level run with canary users: what is claimed, and of how many people. `records` is how
    many each of them owns.
    """

    noise_multiplier: float = 1.0
    users: int = 500
    canaries: int = 200
    records: int = 3
    rate: float = 0.2
    steps: int = 20
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        check.sampling_rate("sampling_rate", check.rate("sampling_rate", self.rate))
        check.integer("users", self.users, least=0)
        check.integer("canaries", self.canaries, least=10)
        check.integer("records", self.records)
        check.integer("steps", self.steps, most=10_000)
        check.delta("delta", self.delta)
        if (
            max((self.users + self.canaries) * self.records, self.steps) * self.dimension
            > MOST_SIZE
        ):
            asked = (
                f"{self.canaries}, {self.users} users, {self.records} records of each, "
                f"{self.steps} steps"
            )
            raise InvalidInput(
                "canaries",
                asked,
                f"must need at most {MOST_SIZE} numbers; ask for less of one of them",
            )

    @property
    def dimension(self) -> int:
        """Of the model: enough for directions that share nothing."""
        return max(2000, 4 * self.canaries)

    def plan(self, unit: Unit | None = None) -> Plan:
        """What is claimed."""
        people = self.users + self.canaries
        recipe = dpsgd(
            people, self.rate * people, steps=self.steps, unit=unit or Unit("user", self.records)
        )
        return recipe.with_noise(self.noise_multiplier, delta=self.delta, allow_large_delta=True)


@dataclass(frozen=True, repr=False)
class UsersSeen:
    """What an attacker saw of canary users: [steps, canaries] along their directions, in clip
    norms, and the cosines.

    `final` are the cosines with the whole movement of the model, `largest` the largest over all
    rounds.
    """

    plan: Plan
    included: NDArray[np.bool_]
    projections: Array
    final: Array
    largest: Array
    dimension: int


def audited_users(
    facts: UserFacts, observe: Observe, seed: int | None = None, unit: Unit | None = None
) -> UsersSeen:
    """A run with canary users, each in by a fair coin: an excluded one takes part with nothing to
    say.

    Canaries have random directions at right angles to each other; ordinary users have random ones
    of the same length.
    """
    randomness = Randomness.from_os() if seed is None else Randomness.for_tests(seed)
    rng = randomness.generator("audit users", 0)
    directions = np.linalg.qr(rng.standard_normal((facts.dimension, facts.canaries)))[0].T
    coins = rng.integers(2, size=facts.canaries).astype(bool)
    others = rng.standard_normal((facts.users, facts.dimension))
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    rows = LENGTH * np.concatenate([directions * coins[:, None], others])
    plan = facts.plan(unit)
    model = nn.Linear(facts.dimension, 1, bias=False, dtype=torch.float64)
    seen = observe(model, rows, plan, seed)
    moved = seen.sum(axis=0)
    lengths = np.linalg.norm(seen, axis=1, keepdims=True)
    return UsersSeen(
        plan,
        coins,
        seen @ directions.T,
        directions @ moved / np.linalg.norm(moved),
        (seen @ directions.T / lengths).max(axis=0),
        facts.dimension,
    )


def by_records(records: int) -> Observe:
    """Users who own so many records each, all with the gradient of their user."""

    def observe(model: nn.Module, rows: Array, plan: Plan, seed: int | None) -> Array:
        return observe_users(
            model,
            np.repeat(rows, records, axis=0),
            np.repeat(np.arange(len(rows)), records),
            plan,
            seed=seed,
        )

    return observe
