"""Batches of a fixed size: uniform subsets, fresh at every step. Thresholds lie beyond 5 standard
errors (false alarms below 1e-6).
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.sampling.samplers import WithoutReplacementSampler


def drawn(sampler, steps, seed=0):
    randomness = Randomness.for_tests(seed)
    return [
        sampler.batch(
            step,
            records=sampler.records,
            rng=randomness.generator("sampling", sampler.address(step)),
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("size", "records"),
    [(1, 1), (1, 50), (7, 50), (49, 50), (50, 50), (30, 20_000), (9_000, 20_000)],
)
def test_every_batch_is_a_set_of_exactly_that_size(size, records):
    for batch in drawn(WithoutReplacementSampler(size, records), 20):
        assert batch.dtype == np.int64
        assert len(batch) == size
        assert (np.diff(batch) > 0).all()
        assert 0 <= batch[0] <= batch[-1] < records


def test_every_subset_is_equally_likely():
    """All 20 subsets of 3 of 6: chi-square with 19 degrees of freedom; a pair of records that
    avoids itself would show.
    """
    steps = 20_000
    counts = dict.fromkeys(combinations(range(6), 3), 0)
    for batch in drawn(WithoutReplacementSampler(3, 6), steps):
        counts[tuple(int(i) for i in batch)] += 1
    found = np.array(list(counts.values()))
    assert ((found - steps / 20) ** 2).sum() / (steps / 20) < 70


@pytest.mark.parametrize(("size", "records"), [(40, 400), (360, 400), (300, 12_000)])
def test_records_have_the_rate_of_the_batch_and_steps_are_independent(size, records):
    steps, rate = 1500, size / records
    table = np.zeros((steps, records), dtype=bool)
    for step, batch in enumerate(drawn(WithoutReplacementSampler(size, records), steps)):
        table[step, batch] = True
    error = np.abs(table.mean(0) - rate) / np.sqrt(rate * (1 - rate) / steps)
    assert 2 < error.max() < 6
    x = (table - rate) / np.sqrt(rate * (1 - rate))
    assert abs((x[1:] * x[:-1]).mean()) < 5 / np.sqrt(x[1:].size)
    assert abs((x[:, 1:] * x[:, :-1]).mean() + 1 / (records - 1)) < 5 / np.sqrt(x[:, 1:].size)


def test_a_batch_is_a_pure_function_of_step_and_generator():
    sampler = WithoutReplacementSampler(8, 90)
    once, again, other = drawn(sampler, 10), drawn(sampler, 10), drawn(sampler, 10, seed=1)
    assert all((a == b).all() for a, b in zip(once, again, strict=True))
    assert any((a != b).any() for a, b in zip(once, other, strict=True))
    assert any((a != b).any() for a, b in pairwise(once))
    late = sampler.batch(9, records=90, rng=Randomness.for_tests(0).generator("sampling", 9))
    assert (late == once[9]).all()


def test_it_promises_what_it_does_and_refuses_other_data():
    sampler = WithoutReplacementSampler(8, 90)
    assert sampler.participation == patterns.WithoutReplacement(8, 90)
    assert sampler.expected_batch(90) == 8
    for records in (89, 91):
        with pytest.raises(InvalidInput, match="must be 90"):
            sampler.batch(0, records=records, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("size", "records"),
    [(0, 5), (6, 5), (-1, 5), (2.0, 5), (2, 5.5), (True, 5), (1, 0), (1, 10**20)],
)
def test_bad_sizes_are_refused(size, records):
    for kind in (WithoutReplacementSampler, patterns.WithoutReplacement):
        with pytest.raises(InvalidInput):
            kind(size, records)
