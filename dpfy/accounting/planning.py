"""Planning: any one of noise, batch size, records, steps, epochs or epsilon given the others; the
batch-size curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpfy.accounting import calibrate, table
from dpfy.accounting.flatten import MOST_COUNT
from dpfy.accounting.patterns import TrainingPattern
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


UNKNOWNS = ("steps", "epochs", "batch-size", "records")
"""Whole numbers that can be solved for."""


def solve(
    unknown: str,
    plan: TrainingPattern,
    target: float,
    delta: float,
    *,
    accountant: str = table.DEFAULT,
    adjacency: Adjacency = ADD,
) -> int:
    """The most steps, epochs or units in a batch, or the fewest records, with which `plan` stays
    within epsilon `target`; zero where none does.

    Epochs, batches and records need `plan.records` or `plan.batch_size`, as far as they are not
    solved for. An epoch has records / batch size steps, rounded up.

    Guarantees: the epsilon of the plan with the number returned was computed, and is at most
    `target`.
    """
    check.one_of("solve", unknown, UNKNOWNS)
    check.epsilon("epsilon", target)
    check.noise_multiplier("noise_multiplier", check.positive("noise", plan.noise_multiplier))
    route = table.accountant(accountant)

    def fits(value: int) -> bool:
        changed = _with(unknown, plan, value)
        return route.curve(changed.claim().event, adjacency).epsilon(delta) <= target

    if unknown == "records":
        return _fewest(fits, check.integer("batch_size", plan.batch_size))
    if unknown != "steps":
        check.integer("records", plan.records, most=MOST_COUNT)
    limit = {"steps": check.STEPS, "epochs": check.STEPS, "batch-size": plan.records}[unknown]
    if unknown == "epochs":
        limit //= steps_per_epoch(plan.records, plan.batch_size)
    return _largest(fits, limit)


def steps_per_epoch(records: int, batch_size: int) -> int:
    """Records by batch size, rounded up."""
    return -(-check.integer("records", records) // check.integer("batch_size", batch_size))


def _with(unknown: str, plan: TrainingPattern, value: int) -> TrainingPattern:
    """The plan with one number put in, and the sampling rate that goes with it."""
    if unknown == "steps":
        return replace(plan, steps=value)
    records = value if unknown == "records" else plan.records
    batch = value if unknown == "batch-size" else plan.batch_size
    steps = value * steps_per_epoch(records, batch) if unknown == "epochs" else plan.steps
    if batch > records:
        raise InvalidInput("batch_size", batch, f"must be at most the records ({records})")
    return replace(
        plan, sampling_rate=batch / records, records=records, batch_size=batch, steps=steps
    )


def _fewest(fits: Callable[[int], bool], least: int) -> int:
    """The smallest whole number from `least` on that fits, for a property that holds from some
    number on; zero where none does.
    """
    if fits(least):
        return least
    low, high = least, 2 * least
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST_COUNT:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


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
