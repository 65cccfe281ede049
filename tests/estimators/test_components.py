"""Principal components: close to plain ones, within their bound on neighbours, refused where they
have no meaning.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA as Plain
from sklearn.pipeline import make_pipeline

from dpfy.core.errors import DpfyError
from dpfy.estimators import PCA, LogisticRegression

sys.path.insert(0, str(Path(__file__).parent))
from people import SCHEMA, people
from replay import distances


def cloud(count=20000, seed=0):
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    return np.clip(rng.normal(size=(count, 5)) * [0.3, 0.2, 0.1, 0.05, 0.02] @ turn + 0.1, -1, 1)


def test_components_are_close_to_plain_ones():
    points = cloud()
    made = PCA(epsilon=2.0, bounds=(-1, 1), n_components=2, random_state=0).fit(points)
    plain = Plain(n_components=2).fit(points)
    assert np.allclose(made.mean_, plain.mean_, atol=0.01)
    assert np.allclose(made.explained_variance_, plain.explained_variance_, rtol=0.1)
    assert (np.abs((made.components_ * plain.components_).sum(axis=1)) > 0.99).all()
    assert made.transform(points).shape == (20000, 2)
    assert list(made.get_feature_names_out()) == ["pca0", "pca1"]
    assert made.noise_level_ < made.explained_variance_[1]
    assert "variance" in str(made.explain())


def test_whitened_components_have_variance_one():
    points = cloud()
    made = PCA(epsilon=8.0, bounds=(-1, 1), n_components=3, whiten=True, random_state=0).fit(points)
    assert np.allclose(made.transform(points).var(axis=0), 1, atol=0.1)


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_neighbours_stay_within_the_bound(adjacency):
    points = cloud(200)
    points[7] = 1.0
    estimator = PCA(bounds=(-1, 1), adjacency=adjacency, random_state=0)
    other = np.delete(points, 7, axis=0)
    if adjacency == "replace-one":
        other = points.copy()
        other[7] = [1, -1, 1, -1, 0]
    moved = distances(estimator, (points, None), (other, None))
    assert max(d for _, d in moved) <= (2 if adjacency == "replace-one" else 1)
    assert max(d for _, d in moved) > 0.3


def test_a_private_step_may_stand_in_a_pipeline():
    points = cloud(3000)
    labels = (points[:, 0] > 0.1).astype(int)
    made = make_pipeline(
        PCA(epsilon=4.0, bounds=(-1, 1)),
        LogisticRegression(epsilon=4.0, bounds=(-2, 2), classes=[0, 1]),
    )
    assert made.fit(points, labels).score(points, labels) > 0.8


def test_bad_settings():
    for settings, said in (
        ({"n_components": 9}, "n_components"),
        ({"n_components": 0}, "n_components"),
        ({"norm": -1}, "norm"),
    ):
        with pytest.raises(DpfyError, match=said):
            PCA(bounds=(-1, 1), **settings).fit(cloud(50))
    with pytest.raises(DpfyError, match="category"):
        PCA(schema=SCHEMA).fit(people()[0])
