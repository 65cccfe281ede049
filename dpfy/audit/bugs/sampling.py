"""Mistakes in sampling: another scheme than billed, another rate, another divisor."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

SAMPLING = "sampling"


class WrongSampler:
    """A sampler that says it is the real one. Every field that the plan reads is the real one's."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.rate = real.rate

    @property
    def participation(self) -> Any:
        """What is billed."""
        return self.real.participation

    def expected_batch(self, records: int) -> float:
        """What is planned."""
        return float(self.real.expected_batch(records))

    def address(self, step: int) -> int:
        """A generator for each step."""
        return step

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Any:
        """The real batch."""
        return self.real.batch(step, records=records, rng=rng)


class Counted(WrongSampler):
    """The real batches; the size of the last one is remembered, for :class:`RealisedDivisor`."""

    last = 1

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Any:
        """The real batch."""
        drawn = self.real.batch(step, records=records, rng=rng)
        Counted.last = max(1, len(drawn))
        return drawn


class RealisedDivisor:
    """The noisy sum is divided by the size of the batch that happened to be drawn."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def init(self, like: Any) -> Any:
        """As the real stream."""
        return self.real.init(like)

    def release(self, total: Any, step: int, state: Any, permit: Any, into: Any = None) -> Any:
        """The real release with another divisor."""
        return dataclasses.replace(self.real, divisor=float(Counted.last)).release(
            total, step, state, permit, into
        )


class Shuffled(WrongSampler):
    """Each epoch is a fresh permutation, cut into equal batches."""

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Any:
        """The step's part of its epoch's permutation."""
        batches = max(1, round(1 / self.rate))
        order = np.random.default_rng(step // batches).permutation(records)
        return np.sort(np.array_split(order, batches)[step % batches])


class Fixed(WrongSampler):
    """The data in its order, cut into equal batches, the same in every epoch."""

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Any:
        """The step's part."""
        batches = max(1, round(1 / self.rate))
        return np.array_split(np.arange(records), batches)[step % batches]


class Workers(WrongSampler):
    """Each of several workers samples at the full rate; the union is billed as one."""

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Any:
        """Whoever is in any of two batches."""
        drawn = [self.real.batch(step, records=records, rng=rng) for _ in range(2)]
        return np.unique(np.concatenate(drawn))


class SameBatch(WrongSampler):
    """The sampler's generator is seeded alike at every step."""

    def address(self, step: int) -> int:
        """Always the generator of step 0."""
        return 0


BUGS = (
    Bug(
        "divisor-realised",
        "the realised batch size as divisor",
        "divisor",
        sampler=Counted,
        stream=RealisedDivisor,
    ),
    Bug("batches-shuffled", "shuffling billed as Poisson", SAMPLING, sampler=Shuffled),
    Bug("batches-fixed", "fixed batches billed as Poisson", SAMPLING, sampler=Fixed),
    Bug("rate-workers", "rate off by the number of workers", SAMPLING, sampler=Workers),
    Bug("batches-same-seed", "the same coins at every step", SAMPLING, sampler=SameBatch),
)
