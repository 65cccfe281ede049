"""Every estimator, on neighbours: what one record changes in any release, given the same outputs
before it, is within the bound.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, every

sys.path.insert(0, str(Path(__file__).parent))
from people import SCHEMA, people
from replay import distances

NAMES = sorted(
    n for n, kind in every().items() if issubclass(kind, PrivateClassifier | PrivateRegressor)
)
EXTREMES = (
    {"age": 90.0, "job": "smith", "gain": 1e9},
    {"age": -1e9, "job": "?", "gain": 0.0},
    {"age": 50.0, "job": "nurse", "gain": np.nan},
)


def case(name: str, adjacency: str, **more):
    """An estimator, and records for it."""
    table, labels = people(300, seed=2)
    kind = every()[name]
    if issubclass(kind, PrivateClassifier):
        return (
            kind(schema=SCHEMA, adjacency=adjacency, random_state=0, **more),
            table,
            labels.to_numpy(),
        )
    bounds = {"bounds": {"age": (17, 90)}, "target_bounds": (0, 1)}
    return (
        kind(adjacency=adjacency, random_state=0, **bounds, **more),
        table[["age"]],
        (labels == "yes").to_numpy().astype(float),
    )


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("name", NAMES)
def test_one_record_changes_no_release_by_more_than_its_bound(name, adjacency):
    estimator, table, labels = case(name, adjacency)
    for k, extreme in enumerate(EXTREMES):
        other = table.copy()
        for column in table.columns:
            other.loc[7, column] = extreme[column]
        outlier = labels.copy()
        outlier[7] = labels[(labels != labels[7])][0] if k % 2 else labels[7]
        if adjacency == "replace-one":
            moved = distances(estimator, (table, labels), (other, outlier))
            assert max(d for _, d in moved) <= 2 * (1 + 1e-12), moved
        else:
            keep = np.arange(len(table)) != 7
            moved = distances(
                estimator, (other, outlier), (other[keep].reset_index(drop=True), outlier[keep])
            )
            assert max(d for _, d in moved) <= 1 + 1e-12, moved
        assert any(d > 0 for _, d in moved)
