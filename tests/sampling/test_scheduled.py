"""Samplers with places: every record keeps the pattern its sensitivity assumes, with the
probabilities its accounting assumes.
"""

from __future__ import annotations

import numpy as np
import pytest

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.sampling.samplers import (
    BallsInBinsSampler,
    CyclicPoissonSampler,
    FixedOrderSampler,
    ReshuffledSampler,
    SeparatedSampler,
)

RECORDS = 4000


def run(sampler, steps, records=RECORDS, seed=0):
    """steps x records: who took part when."""
    randomness = Randomness.for_tests(seed)
    taken = np.zeros((steps, records), dtype=int)
    for step in range(steps):
        indices = sampler.batch(
            step, records=records, rng=randomness.generator("sampling", sampler.address(step))
        )
        assert (np.diff(indices) > 0).all()
        taken[step, indices] += 1
    return taken


def within(found, probability, trials):
    """Five standard errors: false alarm below one in a million."""
    assert abs(found / trials - probability) < 5 * np.sqrt(probability * (1 - probability) / trials)


@pytest.mark.parametrize("kind", [FixedOrderSampler, BallsInBinsSampler])
def test_one_place_kept_for_all_epochs(kind):
    taken = run(kind(10, 4), 40)
    assert (taken.reshape(4, 10, RECORDS) == taken[None, :10]).all()
    assert (taken.sum(axis=0) == 4).all()
    for place in range(10):
        within(taken[place].sum(), 0.1, RECORDS)
    with pytest.raises(InvalidInput, match="below 40"):
        kind(10, 4).batch(40, records=10, rng=np.random.default_rng(0))


def test_reshuffled_epochs_hold_each_record_once_in_independent_places():
    taken = run(ReshuffledSampler(10, 4), 40).reshape(4, 10, RECORDS)
    assert (taken.sum(axis=1) == 1).all()
    places = taken.argmax(axis=1)
    within((places[0] == places[1]).sum(), 0.1, RECORDS)
    within((places[0] == places[3]).sum(), 0.1, RECORDS)


def test_cyclic_poisson_is_poisson_within_a_block():
    taken = run(CyclicPoissonSampler(0.3, 5), 100).reshape(20, 5, RECORDS)
    used = taken.any(axis=0)
    assert (used.sum(axis=0) <= 1).all(), "a record lives in one block"
    rounds = taken.sum(axis=1)
    within(rounds.sum(), 0.3, rounds.size)
    within((rounds[0] & rounds[1]).sum(), 0.09, RECORDS)
    assert CyclicPoissonSampler(0.3, 5).expected_batch(RECORDS) == pytest.approx(240)
    within(taken[0, 0].sum(), 0.06, RECORDS)


def test_a_cycle_at_rate_one_is_a_fixed_order():
    taken = run(CyclicPoissonSampler(1.0, 8), 16)
    assert (taken[:8] == taken[8:]).all()
    assert (taken[:8].sum(axis=0) == 1).all()


@pytest.mark.parametrize(
    ("rate", "separation", "most"), [(0.2, 6, 5), (1.0, 4, 10), (0.05, 1, 100), (0.5, 3, 2)]
)
def test_separated_participations_are_never_too_near_or_too_many(rate, separation, most):
    taken = run(SeparatedSampler(rate, separation, most), 80)
    for shift in range(1, separation):
        assert not (taken[shift:] & taken[:-shift]).any()
    assert (taken.sum(axis=0) <= most).all()
    assert (taken <= 1).all()


def test_separated_batches_have_the_expected_size_from_the_first_step():
    sampler = SeparatedSampler(0.2, 6, 50)
    taken = run(sampler, 60)
    share = sampler.expected_batch(RECORDS) / RECORDS
    for step in (0, 1, 5, 6, 17, 59):
        within(taken[step].sum(), share, RECORDS)


@pytest.mark.parametrize(
    "sampler",
    [
        FixedOrderSampler(5, 3),
        ReshuffledSampler(5, 3),
        BallsInBinsSampler(5, 3),
        CyclicPoissonSampler(0.5, 3),
        SeparatedSampler(0.5, 3, 4),
    ],
)
def test_a_batch_is_a_pure_function_of_the_step(sampler):
    assert (run(sampler, 15, 50) == run(sampler, 15, 50)).all()
    assert (run(sampler, 15, 50) != run(sampler, 15, 50, seed=1)).any()
    late = sampler.batch(
        14, records=50, rng=Randomness.for_tests(0).generator("sampling", sampler.address(14))
    )
    assert set(late) == set(np.flatnonzero(run(sampler, 15, 50)[14]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedOrderSampler(0, 1),
        lambda: FixedOrderSampler(3, 0),
        lambda: BallsInBinsSampler(2.5, 1),
        lambda: CyclicPoissonSampler(0.0, 2),
        lambda: CyclicPoissonSampler(1.1, 2),
        lambda: SeparatedSampler(0.5, 0, 1),
        lambda: ReshuffledSampler(True, 1),
    ],
)
def test_bad_fields_are_refused(make):
    with pytest.raises(InvalidInput):
        make()
