"""Clipped means of groups: one record moves the sum by at most twice the norm, and may do so."""

from __future__ import annotations

import numpy as np
import pytest

from dpfy.core.errors import InvalidInput
from dpfy_lab.microbatches import clipped_means, coins, errors


@pytest.mark.parametrize("seed", range(20))
def test_one_record_moves_the_sum_by_at_most_twice_the_norm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    records, groups, norm = int(rng.integers(1, 40)), int(rng.integers(1, 8)), rng.uniform(0.1, 3)
    rows = rng.normal(size=(records, 3)) * 10 ** rng.uniform(-2, 3)
    places, left = coins(records, groups, rng), int(rng.integers(records))
    kept = np.arange(records) != left
    whole, bound = clipped_means(rows, places, groups, norm)
    without, _ = clipped_means(rows[kept], places[kept], groups, norm)
    assert bound.l2 == 2 * norm
    assert np.linalg.norm(whole - without) <= bound.l2 * (1 + 1e-9)


def test_the_bound_is_reached_and_consecutive_groups_break_it() -> None:
    rows = np.array([[1.0], [-1000.0]])
    turned, bound = clipped_means(rows, np.zeros(2, np.int64), 1, 1.0)
    alone, _ = clipped_means(rows[:1], np.zeros(1, np.int64), 1, 1.0)
    assert np.linalg.norm(turned - alone) == pytest.approx(bound.l2)
    rows = np.array([[(-1.0) ** (k + 1) * 2 * k] for k in range(40)])  # pairs add up to 2
    more = np.concatenate([[[0.0]], rows])  # one record at the front: pairs add up to -2
    before, _ = clipped_means(rows, np.arange(40) // 2, 21, 1.0)
    after, _ = clipped_means(more, np.arange(41) // 2, 21, 1.0)
    assert np.linalg.norm(before - after) > 10 * bound.l2


def test_at_equal_norms_the_noise_is_twice_the_group_times_that_of_single_records() -> None:
    one, many = (errors(256, size, 0.0, 1.0)[0] for size in (1, 8))
    assert many / one == pytest.approx(16)


def test_bad_input_is_one_line() -> None:
    rows, places = np.ones((3, 2)), np.zeros(3, np.int64)
    for given in (
        (rows, places[:2], 1, 1.0),
        (rows * np.nan, places, 1, 1.0),
        (rows, places, 1, 0.0),
    ):
        with pytest.raises(InvalidInput) as found:
            clipped_means(*given)
        assert "\n" not in str(found.value)
