"""Poisson sampling has the distribution it promises. False-alarm rates: each threshold is beyond 5
standard errors (below 1e-6).
"""

from __future__ import annotations

import numpy as np
import pytest

from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.sampling.samplers import PoissonSampler, physical

RECORDS, STEPS = 400, 4000


def inclusion(rate: float, seed: int = 0) -> np.ndarray:
    randomness, sampler = Randomness.for_tests(seed), PoissonSampler(rate)
    table = np.zeros((STEPS, RECORDS), dtype=bool)
    for step in range(STEPS):
        table[
            step,
            sampler.batch(
                step, records=RECORDS, rng=randomness.generator("sampling", sampler.address(step))
            ),
        ] = True
    return table


@pytest.fixture(scope="module")
def table():
    return inclusion(0.1)


def rate_error(table, rate):
    """Standard errors between the observed and the stated rate."""
    count = table.size
    return abs(table.mean() - rate) / np.sqrt(rate * (1 - rate) / count)


def test_rate_is_accepted_and_wrong_rates_are_rejected(table):
    assert rate_error(table, 0.1) < 5
    assert rate_error(table, 0.1 * 1.03) > 5
    assert rate_error(table, 0.1 / 1.03) > 5


def test_every_record_has_the_same_rate(table):
    error = np.abs(table.mean(0) - 0.1) / np.sqrt(0.09 / STEPS)
    assert error.max() < 5.5
    assert error.max() > 2  # not a constant pattern


def test_batch_sizes_have_binomial_variance(table):
    sizes = table.sum(1)
    truth = RECORDS * 0.09
    spread = sizes.var() / truth
    assert (
        1 - 5 * np.sqrt(2 / STEPS) < spread < 1 + 5 * np.sqrt(2 / STEPS)
    )  # a fixed batch size would give 0


def test_records_and_steps_are_independent(table):
    x = (table - 0.1) / 0.3
    between_records = x.T @ x / STEPS
    np.fill_diagonal(between_records, 0)
    assert np.abs(between_records).max() < 6 / np.sqrt(STEPS)
    neighbours = (x[:, :-1] * x[:, 1:]).mean()
    assert abs(neighbours) < 5 / np.sqrt(x[:, 1:].size)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / np.sqrt(x[1:].size)


def test_pure_in_step_and_generator():
    sampler, randomness = PoissonSampler(0.2), Randomness.for_tests(0)
    a, b = (
        sampler.batch(3, records=100, rng=randomness.generator("sampling", 3)) for _ in range(2)
    )
    assert (a == b).all()
    assert len(np.unique(a)) == len(a)


@pytest.mark.parametrize("rate", [1e-9, 1e-6, 0.999, 1.0])
def test_extreme_rates(rate):
    found = PoissonSampler(rate).batch(0, records=1000, rng=np.random.default_rng(0))
    assert len(found) == {1e-9: 0, 1e-6: 0, 1.0: 1000}.get(rate, len(found))
    assert len(found) > 980 or rate < 0.5
    assert PoissonSampler(rate).participation == patterns.Poisson(rate)


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, float("nan")])
def test_bad_rates(rate):
    with pytest.raises(InvalidInput, match="sampling_rate"):
        PoissonSampler(rate)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 9, 12])
@pytest.mark.parametrize("row_multiple", [1, 2, 3, 4])
def test_physical_batches_cover_the_logical_one(size, row_multiple):
    indices = np.arange(100, 100 + size)
    pieces = list(physical(indices, 4, row_multiple=row_multiple))
    assert np.concatenate([p[m] for p, m in pieces] or [indices]).tolist() == indices.tolist()
    assert all(
        len(p) == 4 or (len(p) % row_multiple == 0 and len(p) - m.sum() < row_multiple)
        for p, m in pieces
    )
    assert all(len(p) <= 4 for p, _ in pieces)
