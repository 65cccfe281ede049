"""Sizes of physical batches: few shapes for random batches, at little cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfy.gradients.cuda_graphs.recorder import bucket_size
from dpfy.gradients.engines.choice import ENGINES
from dpfy.sampling.samplers import physical
from dpfy.training.batches import padded_size


@pytest.mark.parametrize("expected", [32, 100, 256, 1000, 4096, 20_000])
def test_random_batches_fall_into_few_shapes(expected: int) -> None:
    sizes = np.random.default_rng(0).poisson(expected, 2000)
    rows = [
        len(piece)
        for size in sizes
        for piece, _ in physical(np.arange(size), 10**6, row_multiple=bucket_size(expected))
    ]
    share = np.unique(rows, return_counts=True)[1] / len(rows)
    assert sum(sorted(share)[-5:]) > 0.8
    assert np.mean(rows) < 1.04 * expected + 8


def test_a_few_expected_records_are_not_filled_up() -> None:
    assert [bucket_size(n) for n in (0.5, 1, 7)] == [1, 1, 1]
    assert bucket_size(8) == 8
    assert padded_size(100) == 144


def test_only_an_engine_that_records_asks_for_multiples_and_only_on_a_gpu() -> None:
    for name, make in ENGINES.items():
        asked = [make().row_multiple(1000, torch.device(device)) for device in ("cpu", "cuda")]
        assert asked == ([1, bucket_size(1000)] if name == "bookkeeping" else [1, 1])
