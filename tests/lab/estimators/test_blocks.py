"""k-means on disjoint blocks: which block a point is in, and what one record can change."""

from __future__ import annotations

import numpy as np
import pytest

from dpfy.core.unit import Adjacency
from dpfy.estimators import KMeans
from dpfy.estimators.budget import FitTerms
from dpfy.estimators.clusters import points
from dpfy_lab.estimators import blocks


def _in_ball(count: int, dimensions: int) -> np.ndarray:
    """Points of the unit ball on the grid, many of them at its edge."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(count, dimensions))
    rows *= (points.SAFE * np.minimum(1.0, 2 * rng.random(count)) / np.linalg.norm(rows, axis=1))[
        :, None
    ]
    return points.on_grid(rows).astype(np.float32)


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


def test_a_record_of_another_block_changes_two_blocks():
    one, other = (
        blocks.bound(4, 2, FitTerms(1.0, 1e-6, adjacency))
        for adjacency in Adjacency
        if "zero" not in adjacency.value
    )
    assert max(one.l2, other.l2) == pytest.approx(4.0)
    assert min(one.l2, other.l2) == pytest.approx(4.0 / np.sqrt(2))  # half of what two blocks move


def test_blocks_follow_from_points_and_are_of_about_one_size():
    rows = _in_ball(20_000, 2)
    block = blocks.blocks_of(rows)
    assert np.array_equal(blocks.blocks_of(rows[5:9]), block[5:9])
    sizes = np.bincount(block, minlength=blocks.COUNT)
    assert (sizes > 50).all()  # 100 on average: 5 deviations, false alarms below 1e-4
    assert (sizes < 160).all()
