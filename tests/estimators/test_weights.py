"""Weights of records: what a record adds is multiplied by its weight over the public maximum, in
every release that is made of contributions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.estimators import LinearRegression, LogisticRegression, NaiveBayes
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, every
from dpfy.estimators.records import weights_of

sys.path.insert(0, str(Path(__file__).parent))
from people import SCHEMA, people
from replay import distances, totals

X, y = people(240, seed=2)
NUMBER = (y == "yes").to_numpy().astype(float)
RNG = np.random.default_rng(3)
WEIGHTS = RNG.uniform(0, 3, 240)
NAMES = sorted(
    n for n, kind in every().items() if issubclass(kind, PrivateClassifier | PrivateRegressor)
)
PUBLIC = {"norm": 1.5, "quantiles": False}
"""Settings without releases that count records to choose a norm or cuts: those have no weights."""


class Weighted:
    """An estimator whose fit takes weights in the place of persons, for the tests of neighbours."""

    def __init__(self, made):
        self.made = made

    def fit(self, X, y, users=None):
        return self.made.fit(X, y, sample_weight=users)


def case(name, **more):
    kind = every()[name]
    held = {k: v for k, v in PUBLIC.items() if k in kind().get_params()}
    held |= {"random_state": 0, "max_weight": 2.0, **more}
    if issubclass(kind, PrivateClassifier):
        return kind(schema=SCHEMA, **held), X, y.to_numpy()
    return kind(bounds=(17, 90), target_bounds=(0, 1), **held), X[["age"]], NUMBER


def kept(mask, *parts):
    return tuple(
        p[mask].reset_index(drop=True) if hasattr(p, "reset_index") else p[mask] for p in parts
    )


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("name", NAMES)
def test_one_record_of_any_weight_moves_no_release_beyond_its_bound(name, adjacency):
    estimator, table, target = case(name, adjacency=adjacency)
    for weight in (0.3, 2.0, 1e9):
        weights = WEIGHTS.copy()
        weights[7] = weight
        one = (table, target, weights)
        if adjacency == "replace-one":
            other = table.copy()
            other.loc[7, "age"] = -1e9
            moved = distances(Weighted(estimator), one, (other, target, weights))
            assert max(d for _, d in moved) <= 2 * (1 + 1e-12), moved
        else:
            moved = distances(Weighted(estimator), one, kept(np.arange(240) != 7, *one))
            assert max(d for _, d in moved) <= 1 + 1e-12, moved


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_zero_is_no_record(name):
    estimator, table, target = case(name)
    weights = np.where(np.arange(240) % 3 == 0, 0.0, WEIGHTS)
    whole = totals(Weighted(estimator), table, target, weights)
    part = kept(weights > 0, table, target, weights)
    again = totals(Weighted(estimator), *part, seen=[out for *_, out in whole])
    for (round_name, _, one, _), (_, _, other, _) in zip(whole, again, strict=True):
        assert np.array_equal(one, other), round_name


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_weight_for_all_is_no_weight(name):
    estimator, table, target = case(name)
    plain = totals(estimator, table, target)
    seen = [out for *_, out in plain]
    again = totals(Weighted(estimator), table, target, np.full(240, 2.0), seen=seen)
    for (round_name, _, one, _), (_, _, other, _) in zip(plain, again, strict=True):
        assert one == pytest.approx(other, abs=1e-3 * max(1.0, np.abs(one).max())), round_name


def test_counts_are_sums_of_weights():
    estimator, table, target = case("NaiveBayes")
    moved = distances(
        Weighted(estimator),
        (table, target, WEIGHTS),
        kept(np.arange(240) != 7, table, target, WEIGHTS),
    )
    assert moved == [("counts", pytest.approx(min(WEIGHTS[7], 2.0) / 2, abs=1e-3))]


def test_weights_change_what_is_learnt():
    """Records of weight zero would pull the line the other way."""
    rng = np.random.default_rng(0)
    table = rng.uniform(-1, 1, (4000, 1))
    wrong = rng.random(4000) < 0.5
    target = np.where(wrong, -table[:, 0], table[:, 0])
    for solver in ("gradient", "statistics"):
        made = LinearRegression(
            bounds=(-1, 1), target_bounds=(-1, 1), epsilon=8, random_state=0, solver=solver
        )
        flat = made.fit(table, target).coef_[0]
        assert abs(flat) < 0.3
        assert made.fit(table, target, sample_weight=~wrong * 1.0).coef_[0] > 0.5


def test_persons_with_weights_keep_the_bound():
    ids = np.arange(240) // 6

    class Both:
        def fit(self, X, y, users=None):
            ids, weights = users if isinstance(users, tuple) else (users[:, 0], users[:, 1])
            made = LogisticRegression(
                schema=SCHEMA, unit=dpfy.Person("id", 3), max_weight=2.0, random_state=0
            )
            return made.fit(X, y, users=ids, sample_weight=weights)

    pairs = np.stack([ids, WEIGHTS], axis=1)
    one = (X, y.to_numpy(), pairs)
    moved = distances(Both(), one, kept(ids != 4, *one))
    assert 0 < max(d for _, d in moved) <= 1 + 1e-12


def test_no_weight_raises_an_error_or_leaves_the_range():
    found = weights_of([-1.0, 0.0, 1.0, 5.0, np.nan, np.inf, -np.inf], 2.0, 7)
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0]
    assert weights_of(np.array(["1", "x", None], object), 2.0, 3).tolist() == [0.5, 0.0, 0.0]


def test_the_report_says_that_there_are_weights(tmp_path):
    made = NaiveBayes(schema=SCHEMA, random_state=0, max_weight=3.0)
    rows = {
        r["what"]: r
        for r in made.fit(X, y, sample_weight=WEIGHTS).report_["sections"][0]["assumptions"]
    }
    assert "max_weight" in rows["weights"]["done"]
    assert made.report_["sections"][0]["settings"]["max_weight"] == "3.0"
    plain = {r["what"] for r in made.fit(X, y).report_["sections"][0]["assumptions"]}
    assert "weights" not in plain


@pytest.mark.parametrize(
    ("settings", "weights", "kind", "said"),
    [
        ({}, np.ones((240, 2)), InvalidInput, "one for each of the 240"),
        ({}, [1.0, 2.0], InvalidInput, "one for each of the 240"),
        ({"max_weight": 0}, WEIGHTS, InvalidInput, "max_weight"),
        ({"solver": "newton"}, WEIGHTS, Unsupported, 'use solver="gradient"'),
        ({"solver": "output"}, WEIGHTS, Unsupported, 'use solver="gradient"'),
    ],
)
def test_bad_weights_are_one_line_and_spend_nothing(settings, weights, kind, said, tmp_path):
    ledger = tmp_path / "people.jsonl"
    made = LogisticRegression(schema=SCHEMA, ledger=ledger, **settings)
    with pytest.raises(kind, match=said) as problem:
        made.fit(X, y, sample_weight=weights)
    assert "\n" not in str(problem.value)
    assert not ledger.exists() or not Ledger.read(ledger).permits()
