"""Sizes of physical batches: few shapes for random batches, at little cost."""

from __future__ import annotations

import numpy as np
import pytest

from dpfy.sampling.sampler import physical
from dpfy.training.physical import common, snug


@pytest.mark.parametrize("expected", [32, 100, 256, 1000, 4096, 20_000])
def test_random_batches_fall_into_few_shapes(expected: int) -> None:
    sizes = np.random.default_rng(0).poisson(expected, 2000)
    rows = [len(piece) for size in sizes for piece, _ in physical(np.arange(size), 10**6, grain=common(expected))]
    share = np.unique(rows, return_counts=True)[1] / len(rows)
    assert sum(sorted(share)[-5:]) > 0.8
    assert np.mean(rows) < 1.04 * expected + 8


def test_a_few_expected_records_are_not_filled_up() -> None:
    assert [common(n) for n in (0.5, 1, 7)] == [1, 1, 1]
    assert common(8) == 8
    assert snug(100) == 144
