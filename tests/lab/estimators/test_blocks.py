"""k-means on disjoint blocks: which block a point is in, and what one record can change."""

from __future__ import annotations

import numpy as np
import pytest

from dpfy.estimators import KMeans
from dpfy.estimators.clusters import summary
from dpfy_lab.estimators import blocks


def _in_ball(count: int, dimensions: int) -> np.ndarray:
    """Points of the unit ball on the grid, many of them at its edge."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(count, dimensions))
    rows *= (summary.SAFE * np.minimum(1.0, 2 * rng.random(count)) / np.linalg.norm(rows, axis=1))[
        :, None
    ]
    return summary.on_grid(rows).astype(np.float32)


def test_wherever_a_record_stands_it_is_in_a_block_with_the_same_others(monkeypatch):
    met: list[frozenset] = []

    def watch(rows, weights, clusters, *more, **named):
        met.append(frozenset(map(tuple, rows.tolist())))
        return np.zeros((clusters, rows.shape[1])), None, None

    monkeypatch.setattr(blocks, "weighted_kmeans", watch)
    table = np.random.default_rng(0).uniform(-1, 1, (300, 3))
    for order in (table, table[::-1], np.roll(table, 7, axis=0)):
        KMeans(n_clusters=3, method="aggregate", bounds=(-1, 1), random_state=0).fit(order.copy())
    third = len(met) // 3
    assert set(met[:third]) == set(met[third : 2 * third]) == set(met[2 * third :])
    assert sum(map(len, met[:third])) == 300


def test_a_record_moves_the_sum_over_blocks_within_the_bound():
    """One that is replaced can move two blocks the same way: half of that is one block's move."""
    bound = blocks.bound(4, 2)
    assert bound.l2 == pytest.approx(4.0)
    end, start = np.full((4, 2), 1 / np.sqrt(2)), -np.full((4, 2), 1 / np.sqrt(2))
    of_one_block = float(np.linalg.norm(end - start))
    assert of_one_block <= bound.l2 * (1 + 1e-12)
    assert np.linalg.norm(2 * end - 2 * start) / 2 <= bound.l2 * (1 + 1e-12)


def test_blocks_follow_from_points_and_are_of_about_one_size():
    rows = _in_ball(20_000, 2)
    block = blocks.blocks_of(rows)
    assert np.array_equal(blocks.blocks_of(rows[5:9]), block[5:9])
    sizes = np.bincount(block, minlength=blocks.COUNT)
    assert (sizes > 50).all()  # 100 on average: 5 deviations, false alarms below 1e-4
    assert (sizes < 160).all()
