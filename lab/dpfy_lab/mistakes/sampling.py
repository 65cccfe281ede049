"""Mistakes in sampling: another scheme than billed, another rate, another divisor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpfy_lab.checks.training import ALLOCATION, DIVISOR, SAMPLING
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

SAMPLER = "dpfy.sampling.samplers.PoissonSampler"
BATCH = f"{SAMPLER}.batch"


@mistake("divisor-realised", "the realised batch size as divisor", DIVISOR)
def _(patch: Patch) -> None:
    sizes: list[int] = []

    def batch(real: Any, self: Any, step: int, *, records: int, rng: Any) -> Any:
        drawn = real(self, step, records=records, rng=rng)
        sizes.append(max(1, len(drawn)))
        return drawn

    def release(real: Any, self: Any, *given: Any) -> Any:
        return real(replace(self, divisor=float(sizes[-1])), *given)

    patch.around(BATCH, batch)
    patch.around("dpfy.noise.stream.NoiseStream.release", release)


@mistake("batches-shuffled", "shuffling charged as Poisson", SAMPLING, BATCH)
def _(real: Any, self: Any, step: int, *, records: int, rng: Any) -> Any:
    batches = max(1, round(1 / self.rate))
    order = np.random.default_rng(step // batches).permutation(records)
    return np.sort(np.array_split(order, batches)[step % batches])


@mistake("batches-fixed", "fixed batches charged as Poisson", SAMPLING, BATCH)
def _(real: Any, self: Any, step: int, *, records: int, rng: Any) -> Any:
    batches = max(1, round(1 / self.rate))
    return np.array_split(np.arange(records), batches)[step % batches]


@mistake("rate-workers", "rate off by the number of workers", SAMPLING, BATCH)
def _(real: Any, self: Any, step: int, **given: Any) -> Any:
    return np.unique(np.concatenate([real(self, step, **given) for _ in range(2)]))


@mistake("batches-same-seed", "the same coins at every step", SAMPLING, f"{SAMPLER}.address")
def _(real: Any, self: Any, step: int) -> int:
    return 0


ALLOCATED = "dpfy.sampling.samplers.RandomAllocationSampler.batch"


@mistake("allocation-kept", "random allocation drawn once for all epochs", ALLOCATION, ALLOCATED)
def _(real: Any, self: Any, step: int, **given: Any) -> Any:
    return real(self, step % self.steps_per_epoch, **given)


@mistake("allocation-permuted", "a permutation instead of random allocation", ALLOCATION, ALLOCATED)
def _(real: Any, self: Any, step: int, *, records: int, rng: Any) -> Any:
    epoch, place = divmod(step, self.steps_per_epoch)
    order = np.random.default_rng([int(rng.integers(2**32)), epoch]).permutation(records)
    return np.sort(order[place :: self.steps_per_epoch])


@mistake(
    "allocation-epochs",
    "one epoch charged for all",
    ALLOCATION,
    "dpfy.core.events.random_allocation",
)
def _(real: Any, noise_multiplier: float, steps_per_epoch: int, epochs: int, times: int = 1) -> Any:
    return real(noise_multiplier, steps_per_epoch, 1, times)
