"""Searches over the settings of an estimator: fits and scores under one reservation."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import dpfy
from dpfy import accounting
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.randomness import Randomness
from dpfy.estimators import KMeans, LogisticRegression, RandomForestClassifier, Ridge
from dpfy.estimators.estimator import load
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism
from dpfy.runs.folder import held_claims
from dpfy.tuning import fits
from dpfy.tuning.routes import POINTS
from dpfy.tuning.trial import TrialFailed

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (1500, 3))
Y = (X @ [1.0, -2.0, 0.5] + 0.3 * RNG.normal(size=1500) > 0).astype(int)
OWNERS = np.arange(1500) % 300
SPACE = {"alpha": "1e-5..1e-1 log", "norm": [0.5, 2.0]}
KNOWN = {"bounds": (-1, 1), "classes": [0, 1], "random_state": 5}


def search(path, estimator=None, space=None, data=None, **more):
    given = {"epsilon": 3.0, "delta": 1e-5, "trials": 5, "run": path}
    chosen = LogisticRegression(**KNOWN) if estimator is None else estimator
    return dpfy.tune(chosen, space or SPACE, (X, Y) if data is None else data, **(given | more))


@pytest.mark.parametrize("more", [{}, {"route": "composition"}, {"law": "geometric"}])
def test_a_search_is_one_reservation_for_fits_and_scores(tmp_path, more):
    found = search(tmp_path / "run", records=1500, ledger=tmp_path / "all.jsonl", **more)
    assert 2.9 < found.epsilon <= 3.0
    (claim,) = held_claims(tmp_path / "run")
    assert accounting.epsilon(claim.event, 1e-5, adjacency=claim.adjacency) <= 3.0
    assert [p.event for p in Ledger.read(tmp_path / "all.jsonl").permits()] == [claim.event]
    assert isinstance(claim.score, events.DiscreteGaussian)
    assert all(f.holds for f in dpfy.verify(tmp_path / "run")), dpfy.verify(tmp_path / "run")
    assert found.accuracy > 0.7
    assert set(found.settings) == set(SPACE)
    assert (found.estimator.predict(X) == Y).mean() > 0.7
    assert (load(tmp_path / "run").predict(X) == found.estimator.predict(X)).all()
    assert found.estimator.guarantee_ == found.statement
    assert "tuning" in found.statement
    assert found.to_json()["accuracy"] == found.accuracy
    assert str(found.accuracy) in str(found)


def test_nothing_of_other_trials_is_left(tmp_path):
    """The same selected trial, whatever the others are: the same files but times and random names."""
    search(tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "estimator.safetensors", "ledger.jsonl", "ledger.jsonl.head", "privacy.json",
        "report.html", "report.md", "search.json",
    }  # fmt: skip
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    told = next(part for part in card["sections"] if part.get("settings"))
    assert "trials" not in told


def test_the_same_secret_makes_the_same_search(tmp_path):
    one, other = (search(tmp_path / name) for name in "ab")
    assert (one.settings, one.score) == (other.settings, other.score)


def test_scores_share_no_noise_with_fits(tmp_path, monkeypatch):
    """Every draw of a search has an address of its own: (secret, name of the permit, step)."""
    from dpfy.mechanisms import mechanism

    seen, real = [], mechanism.Bits

    def bits(randomness, name, step):
        seen.append((randomness.tag("address", b""), name, step))
        return real(randomness, name, step)

    monkeypatch.setattr(mechanism, "Bits", bits)
    search(tmp_path / "run", route="composition")
    assert len(seen) >= 10
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("rows", [1, 4, 50])
@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.parametrize("seed", range(5))
def test_one_person_moves_a_score_by_at_most_one(rows, kind, seed):
    rng = np.random.default_rng(seed)
    owners = rng.permutation(np.concatenate([np.zeros(rows, int), rng.integers(1, 9, 60)]))
    if kind == "classes":
        facts = LogisticRegression(**KNOWN)._public(X, Y)
        y, told = rng.integers(0, 2, (2, len(owners)))
    else:
        facts = Ridge(bounds=(-1, 1), target_bounds=(0, 2))._public(X, Y.astype(float))
        y, told = rng.normal(size=(2, len(owners))) * 3
    keep = owners != 0
    whole = fits.scored(facts, told, y, owners, POINTS)
    less = fits.scored(facts, told[keep], y[keep], owners[keep], POINTS)
    assert 0 <= whole - less <= POINTS
    changed = np.where(owners == 0, y.max(), told)
    assert abs(fits.scored(facts, changed, y, owners, POINTS) - whole) <= POINTS
    single = fits.scored(facts, told[keep], y[keep], np.arange(keep.sum()), 1)
    assert 0 <= single <= keep.sum()


def test_a_person_counts_with_the_share_that_is_right():
    facts = LogisticRegression(**KNOWN)._public(X, Y)
    owners = np.array([0, 0, 0, 0, 1, 2, 2, 2])
    told, due = np.ones(8, int), np.array([1, 0, 0, 0, 1, 0, 0, 0])
    assert fits.scored(facts, told, due, owners, POINTS) == 25 + 100 + 0
    assert fits.scored(facts, told, due, np.arange(8), 1) == 2


@pytest.mark.parametrize("seed", range(8))
def test_a_person_is_in_one_part_with_all_records_and_moves_nobody_else(seed):
    rng, secret = np.random.default_rng(seed), Randomness.for_tests(seed)
    owners = rng.integers(-1, 30, 400)  # of nobody: -1
    held = fits._by_coin(owners, 0.4, secret)
    out = set(owners[held])
    assert not out & set(owners[~held])
    assert -1 not in out
    keep = owners != owners.max()
    assert (fits._by_coin(owners[keep], 0.4, secret) == held[keep]).all()  # the last one left


@pytest.mark.parametrize("people", [False, True])
def test_nobody_is_trained_on_and_scored_on(tmp_path, monkeypatch, people):
    """Every record, or person, is in one part in all trials, and the parts are the whole."""
    trained, held = [], []
    whose = OWNERS if people else np.arange(1500)
    rows = {tuple(x): int(o) for x, o in zip(X.tolist(), whose, strict=True)}
    real, scored = LogisticRegression._fitted, LogisticRegression.predict

    def fitted(self, given, *rest):
        trained.append({rows[tuple(x)] for x in given.tolist()})
        return real(self, given, *rest)

    def predict(self, given):
        held.append({rows[tuple(x)] for x in given.tolist()})
        return scored(self, given)

    monkeypatch.setattr(LogisticRegression, "_fitted", fitted)
    monkeypatch.setattr(LogisticRegression, "predict", predict)
    unit = {"unit": dpfy.Person("who", at_most=3)} if people else {}
    search(
        tmp_path / "run", LogisticRegression(**KNOWN, **unit), route="composition", trials=2,
        epsilon=8.0, users=OWNERS if people else None,
    )  # fmt: skip
    assert len(trained) == len(held) == 2
    for one, other in zip(trained, held, strict=True):
        assert not one & other
        assert one | other == set(rows.values())


@pytest.mark.parametrize("form", ["users", "column"])
def test_a_search_protects_a_person(tmp_path, form):
    """1,500 records of 300 people: the reservation is for a person, and a score counts people."""
    unit = dpfy.Person("who", at_most=3)
    if form == "users":
        given = {"data": (X, Y), "users": [f"p{k}" for k in OWNERS]}
    else:
        given = {"data": (pd.DataFrame(X, columns=list("abc")).assign(who=OWNERS), Y)}
    space = {"alpha": [0.001, 0.01]}
    found = search(
        tmp_path / "run", LogisticRegression(**KNOWN, unit=unit), space, epsilon=8.0,
        records=300, held_out=0.3, **given,
    )  # fmt: skip
    (claim,) = held_claims(tmp_path / "run")
    assert claim.unit == dpfy.Unit("user", 3)
    assert claim.score.sensitivity == POINTS
    assert found.expected == 90
    assert abs(found.score) < 90 + 20 * found.standard_error
    assert "one user" in found.statement
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_trials_may_be_scored_on_public_records(tmp_path):
    found = search(tmp_path / "run", public=(X[:200], Y[:200]))
    assert found.standard_error is None
    assert found.score == found.estimator.score(X[:200], Y[:200])
    assert held_claims(tmp_path / "run")[0].score is None


def test_settings_that_change_the_cost_get_noise_of_their_own(tmp_path):
    forest = RandomForestClassifier(**KNOWN)
    name = next(k for k in ("n_estimators", "trees") if k in forest.get_params())
    found = search(tmp_path / "run", forest, {name: [2, 8]}, trials=3)
    assert found.epsilon <= 3.0
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_a_regression_is_tuned_by_its_error_in_its_range(tmp_path):
    data = X, X @ [1.0, -0.5, 0.2]
    ridge = Ridge(bounds=(-1, 1), target_bounds=(-2, 2), random_state=5)
    found = search(tmp_path / "run", ridge, {"alpha": "1e-3..10 log"}, data, records=1500)
    assert found.accuracy > 0.8


def test_a_resumed_search_that_is_finished_gives_its_result(tmp_path):
    found = search(tmp_path / "run")
    again = search(dpfy.Run(tmp_path / "run", resume=True, seed=5))
    assert (again.settings, again.score) == (found.settings, found.score)
    assert (again.estimator.predict(X) == found.estimator.predict(X)).all()


def test_what_no_theorem_covers_is_refused_before_anything_is_reserved(tmp_path):
    place = tmp_path / "run"
    for name in ("epsilon", "bounds", "classes", "nonsense"):
        with pytest.raises(InvalidInput, match="space"):
            search(place, space={name: [1, 2]})
    replaced = LogisticRegression(**KNOWN, adjacency="replace-one")
    with pytest.raises(Unsupported, match="score on public records"):
        search(place, replaced)
    with pytest.raises(Unsupported, match="tune a classifier"):
        search(place, KMeans(n_clusters=2, bounds=(-1, 1)), {"n_clusters": [2, 3]}, (X, None))
    with pytest.raises(Unsupported, match="target_bounds"):
        search(place, Ridge(bounds=(-1, 1)), {"alpha": [1.0, 2.0]}, (X, Y.astype(float)))
    with pytest.raises(InvalidInput, match=r"or a pair: \(X, y\)"):
        search(place, data=X)
    with pytest.raises(InvalidInput, match=r"must be a dpfy\.Dataset where an objective"):
        dpfy.tune(lambda trial: 0.0, SPACE, (X, Y), epsilon=1.0)
    with pytest.raises(InvalidInput, match="left out with an objective"):
        dpfy.tune(lambda trial: 0.0, SPACE, (X, Y), epsilon=1.0, users=OWNERS)
    with pytest.raises(InvalidInput, match="unit="):
        search(place, users=OWNERS)
    assert not place.exists()


def test_a_trial_that_fails_says_nothing_of_the_records(tmp_path, monkeypatch):
    def broken(*given):
        raise ValueError("row 7 holds 1234")

    monkeypatch.setattr(LogisticRegression, "_learn", broken)
    with pytest.raises(TrialFailed) as found:
        search(tmp_path / "run")
    assert "1234" not in str(found.value)


def test_the_noise_of_a_score_is_that_of_the_reservation(tmp_path, monkeypatch):
    seen = []
    real = DiscreteGaussianMechanism.release
    monkeypatch.setattr(
        DiscreteGaussianMechanism,
        "release",
        lambda self, *given: (seen.append(self.event), real(self, *given))[1],
    )
    search(tmp_path / "run", route="composition", trials=3)
    (claim,) = held_claims(tmp_path / "run")
    assert len(seen) == 3
    assert set(seen) == {claim.score}


def test_a_search_of_scikit_learn_is_refused_with_the_call_that_works():
    from sklearn.model_selection import GridSearchCV

    grid = GridSearchCV(LogisticRegression(**KNOWN), {"alpha": [0.1, 1.0]}, error_score="raise")
    with pytest.raises(Unsupported, match=r"dpfy\.tune\(estimator, space, \(X, y\)"):
        grid.fit(X, Y)


@pytest.mark.parametrize("people", [False, True])
@pytest.mark.parametrize("file", [False, True])
def test_a_data_set_says_what_the_search_needs(tmp_path, people, file):
    """Schema, person, ledger, budget and delta come from the data set; its file is read by rows."""
    table = pd.DataFrame(X, columns=list("abc")).assign(who=OWNERS, y=np.where(Y, "yes", "no"))
    table.to_csv(tmp_path / "people.csv", index=False)
    schema = [*(dpfy.Number(name, -1, 1) for name in "abc"), dpfy.Label("y", ["no", "yes"])]
    data = dpfy.Dataset(
        tmp_path / "people.csv" if file else table,
        schema=schema,
        unit=dpfy.Person("who", at_most=3) if people else None,
        ledger=tmp_path / "all.jsonl",
        budget=dpfy.Budget(10, 1e-5),
    )
    if not people:
        table = table.drop(columns="who")
        table.to_csv(tmp_path / "people.csv", index=False)
        data = dpfy.Dataset(
            tmp_path / "people.csv" if file else table, schema=schema,
            ledger=tmp_path / "all.jsonl", budget=dpfy.Budget(10, 1e-5), records=1500,
        )  # fmt: skip
    found = dpfy.tune(
        LogisticRegression(random_state=5), SPACE, data, epsilon=8.0, trials=3,
        law="geometric", run=tmp_path / "run",
    )  # fmt: skip
    assert found.delta <= 1e-5
    assert found.epsilon <= 8.0
    assert data.spent().epsilon > 7
    assert set(found.estimator.predict(X)) <= {"no", "yes"}
    assert found.expected == (None if people else 300)
    assert ("one user" in found.statement) == people
    with pytest.raises(InvalidInput, match="left out with a Dataset"):
        dpfy.tune(LogisticRegression(), SPACE, data, epsilon=1.0, ledger=tmp_path / "x.jsonl")
