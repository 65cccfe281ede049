"""Planning: any one of noise, batch size, steps or epsilon given the others; the batch-size
curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpfy.accounting import calibrate, table
from dpfy.accounting.flatten import MOST_COUNT
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.events import poisson
from dpfy.core.unit import Adjacency

ADD = Adjacency.ADD_OR_REMOVE_ONE


def epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    *,
    accountant: str = table.DEFAULT,
) -> float:
    """Epsilon given noise, rate and steps."""
    return (
        table.accountant(accountant)
        .curve(poisson(noise_multiplier, sampling_rate, steps), ADD)
        .epsilon(delta)
    )


def noise(
    target: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    *,
    accountant: str = table.DEFAULT,
) -> float:
    """The least noise multiplier given epsilon, rate and steps."""
    return calibrate.noise(
        lambda sigma: poisson(sigma, sampling_rate, steps), target, delta, accountant=accountant
    )


def steps(
    target: float,
    noise_multiplier: float,
    sampling_rate: float,
    delta: float,
    *,
    accountant: str = table.DEFAULT,
) -> int:
    """The largest number of steps that stays within epsilon `target`; zero where one step is
    already too many.
    """
    check.positive("epsilon", target)

    def fits(count: int) -> bool:
        return (
            epsilon(noise_multiplier, sampling_rate, count, delta, accountant=accountant) <= target
        )

    return _largest(fits, 1 << 40)


def batch_size(
    target: float,
    noise_multiplier: float,
    count: int,
    delta: float,
    *,
    records: int,
    accountant: str = table.DEFAULT,
) -> int:
    """The largest expected batch size that stays within epsilon `target`; zero where a batch of one
    is already too much.
    """
    check.positive("epsilon", target)
    if check.integer("records", records) > MOST_COUNT:
        raise InvalidInput("records", records, f"must be at most {MOST_COUNT:.0e}")

    def fits(size: int) -> bool:
        return (
            epsilon(noise_multiplier, size / records, count, delta, accountant=accountant) <= target
        )

    return _largest(fits, records)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest whole number up to `limit` that fits, for a property that holds up to some number
    and not beyond.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    if high > limit:
        if fits(limit):
            return limit
        high = limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class BatchPoint:
    """One batch size of the guide's Figure 1: the noise it needs, and that noise per example of the
    batch.
    """

    batch_size: int
    noise_multiplier: float
    relative_noise: float


def batch_curve(
    records: int,
    count: int,
    target: float,
    delta: float,
    sizes: Sequence[int],
    *,
    accountant: str = table.DEFAULT,
) -> list[BatchPoint]:
    """Noise over batch size, at fixed epsilon and steps: it falls until about the knee and then
    stays.
    """
    points = []
    for size in sizes:
        if check.integer("batch_size", size) > check.integer("records", records):
            raise InvalidInput(
                "batch_size", size, f"must be at most the number of records ({records})"
            )
        sigma = noise(target, size / records, count, delta, accountant=accountant)
        points.append(BatchPoint(size, sigma, sigma / size))
    return points


def knee(records: int, count: int, target: float) -> float:
    """The batch size beyond which more examples hardly lower the relative noise: n sqrt(epsilon /
    T) (the guide, Figure 1).
    """
    return records * math.sqrt(check.positive("epsilon", target) / check.integer("steps", count))
