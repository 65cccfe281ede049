"""What a model tells of its features, where one column of a table is several of them."""

from __future__ import annotations

import numpy as np
import pandas
import pytest

import dpfy
from dpfy.estimators import (
    PCA,
    DecisionTreeClassifier,
    GaussianMixture,
    GradientBoostingClassifier,
    KMeans,
    NaiveBayes,
    PrivateScaler,
    RandomForestClassifier,
)

SCHEMA = [
    dpfy.Number("age", 0, 100),
    dpfy.Date("seen", "2020-01-01", "2021-12-31"),
    dpfy.Text("note", buckets=3),
]
PARTS = dpfy.Date("seen", "2020-01-01", "2021-12-31", parts=["year", "month"])
FEATURES = {"age", "seen", "note_0", "note_1", "note_2"}


def table() -> pandas.DataFrame:
    days = [f"202{k % 2}-{1 + k % 12:02d}-0{1 + k % 9}" for k in range(300)]
    cells = {
        "age": [str(k % 90) for k in range(300)],
        "seen": days,
        "note": ["good day", "bad", "no change at all"] * 100,
    }
    return pandas.DataFrame(cells)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (NaiveBayes, {}),
        (RandomForestClassifier, {"n_estimators": 3, "max_depth": 3}),
        (DecisionTreeClassifier, {"max_depth": 2}),
        (GradientBoostingClassifier, {"n_estimators": 3, "max_depth": 2}),
        (KMeans, {"n_clusters": 2}),
        (GaussianMixture, {"n_components": 2}),
        (PCA, {"n_components": 2}),
    ],
)
@pytest.mark.parametrize("parts", [False, True])
def test_features_of_dates_and_texts_are_named(kind, more, parts) -> None:
    numbers = kind in (KMeans, GaussianMixture, PCA)
    if parts and numbers:
        pytest.skip("the parts of a date are categories, which these do not read")
    schema = [SCHEMA[0], PARTS, SCHEMA[2]] if parts else SCHEMA
    labels = () if numbers else (np.arange(300) % 2,)
    named = {} if numbers else {"classes": [0, 1]}
    made = kind(epsilon=5.0, schema=schema, random_state=1, **named, **more).fit(table(), *labels)
    said = str(made.explain())
    due = FEATURES - {"seen"} | {"seen_year", "seen_month"} if parts else FEATURES
    shown = {name for name in due if name in said}
    assert shown
    assert shown == due or kind in (NaiveBayes, PCA)


def test_the_scale_of_every_feature_is_told() -> None:
    made = PrivateScaler(epsilon=5.0, schema=SCHEMA, random_state=1).fit(table())
    said = str(made.explain())
    assert all(name in said for name in FEATURES)
