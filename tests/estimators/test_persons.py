"""Every estimator with persons as the unit of privacy: what all records of one person change in any
release is within the bound, whatever person it is and however many records it has.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Person
from dpfy.estimators import LogisticRegression, NaiveBayes, fitting, load, persons
from dpfy.estimators.estimator import PrivateClassifier, PrivateRegressor, every
from dpfy.report.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
from people import SCHEMA, people
from replay import distances

AT_MOST, SIZE = 4, 240
EXTREME = {"age": 90.0, "job": "smith", "gain": 1e9}
OTHER = {"age": -1e9, "job": "?", "gain": 0.0}
NAMES = sorted(every())


def table(rows: int, extreme: dict, answer: str, spread: bool = False):
    """People of several records each, and one person more with so many records: all of them alike,
    or each another.
    """
    X, y = people(SIZE, seed=3)
    ids = np.array([f"p{k // 3}" for k in range(SIZE)], object)
    more, labels = people(rows, seed=4)
    if not spread:
        more, labels = pandas.DataFrame([extreme] * rows), pandas.Series([answer] * rows)
    X = pandas.concat([X, more], ignore_index=True)
    y = np.concatenate([y.to_numpy(), labels.to_numpy()[:rows]])
    return X, y, np.concatenate([ids, np.array(["x"] * rows, object)])


def case(name: str, **more):
    """An estimator, and the part of a table that it takes."""
    kind = every()[name]
    held = {"unit": Person("patient", AT_MOST), "random_state": 0, **more}
    if issubclass(kind, PrivateClassifier):
        return kind(schema=SCHEMA, **held), lambda X, y, ids: (X, y, ids)
    bounds = {"bounds": (17, 90)}
    if issubclass(kind, PrivateRegressor):
        bounds["target_bounds"] = (0, 1)
    return kind(**bounds, **held), lambda X, y, ids: (
        X[["age"]],
        (y == "yes").astype(float),
        ids,
    )


def without(whole, who="x"):
    X, y, ids = whole
    kept = ids != who
    return X[kept].reset_index(drop=True), y[kept], ids[kept]


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("name", NAMES)
def test_one_person_changes_no_release_by_more_than_its_bound(name, adjacency):
    estimator, some = case(name, adjacency=adjacency)
    for rows, spread in ((1, False), (AT_MOST, False), (50, False), (50, True)):
        one = table(rows, EXTREME, "no", spread)
        if adjacency == "replace-one":
            for others in (1, 50):
                moved = distances(estimator, some(*one), some(*table(others, OTHER, "yes")))
                assert max(d for _, d in moved) <= 2 * (1 + 1e-12), moved
        else:
            moved = distances(estimator, some(*one), some(*without(one)))
            assert max(d for _, d in moved) <= 1 + 1e-12, moved
        assert any(d > 0 for _, d in moved)


@pytest.mark.parametrize(
    "settings",
    [
        *({"method": m} for m in ("coreset", "lloyd", "synopsis", "hybrid", "aggregate")),
    ],
    ids=lambda s: "-".join(s.values()),
)
def test_every_start_of_clusters_keeps_the_bound(settings):
    estimator, some = case("KMeans", n_clusters=2, **settings)
    one = table(50, EXTREME, "no", spread=True)
    assert max(d for _, d in distances(estimator, some(*one), some(*without(one)))) <= 1 + 1e-12


@pytest.mark.parametrize("solver", ["statistics", "functional", "newton"])
@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_every_solver_keeps_the_bound(solver, adjacency):
    estimator, some = case("LinearRegression", solver=solver, adjacency=adjacency)
    one = table(50, EXTREME, "no", spread=True)
    other = without(one) if adjacency == "add-or-remove-one" else table(1, OTHER, "yes")
    most = 1 if adjacency == "add-or-remove-one" else 2
    moved = distances(estimator, some(*one), some(*other))
    assert max(d for _, d in moved) <= most * (1 + 1e-12), moved


def test_a_person_with_all_records_alike_reaches_the_bound_of_counts():
    estimator, some = case("NaiveBayes")
    one = table(50, EXTREME, "no")
    assert distances(estimator, some(*one), some(*without(one))) == [
        ("counts", pytest.approx(1.0, abs=1e-12))
    ]


def test_a_gradient_is_bounded_by_the_root_of_the_records_and_other_sums_by_their_number():
    made = case("LogisticRegression")[0].fit(*table(9, EXTREME, "no")[:2], users=["a", *"b" * 248])
    bounds = {r["name"]: r["bound"] for r in made.report_["sections"][0]["rounds"]}
    assert bounds["gradients"] == pytest.approx(AT_MOST**0.5)
    assert bounds["sum of rows"] == AT_MOST
    assert bounds["norms of rows"] == pytest.approx(AT_MOST)


@pytest.mark.parametrize("at_most", [1, 2, 7, 300])
@pytest.mark.parametrize("classes", [2, 3])
def test_gradients_of_a_person_are_shortened_to_the_root_whatever_the_person(at_most, classes):
    """Rows of one person that all point the same way, and rows of others beside them."""
    rng = np.random.default_rng(at_most)
    size = at_most + 60
    X = rng.uniform(-1, 1, (size, 3))
    y = rng.integers(0, classes, size)
    X[:at_most], y[:at_most] = 1.0, 0
    ids = np.concatenate([np.zeros(at_most, int), 1 + np.arange(60) // 2])
    estimator = LogisticRegression(
        bounds=(-1, 1),
        classes=tuple(range(classes)),
        unit=Person("id", at_most),
        random_state=0,
        rounds=5,
        clip=0.3,
    )
    kept = ids != 0
    moved = distances(estimator, (X, y, ids), (X[kept], y[kept], ids[kept]))
    gradients = [d for name, d in moved if name == "gradients"]
    assert max(gradients) <= 1 + 1e-12
    assert max(gradients) > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_table_does_not_matter(name):
    estimator, some = case(name)
    X, y, ids = table(50, EXTREME, "no", spread=True)
    order = np.random.default_rng(1).permutation(len(X))
    first = estimator.fit(*some(X, y, ids)[:2], users=ids).release_.model
    shuffled = some(X.iloc[order].reset_index(drop=True), y[order], ids[order])
    again = estimator.fit(*shuffled[:2], users=shuffled[2]).release_.model
    assert first.arrays.keys() == again.arrays.keys()
    for key, value in first.arrays.items():
        assert np.array_equal(value, again.arrays[key]), key


def test_which_records_are_used_depends_on_the_person_and_the_key_alone():
    X, y, ids = table(50, EXTREME, "no", spread=True)
    estimator, _ = case("NaiveBayes")
    data = estimator._read(X, y, estimator._public(X, y))
    kept = ids != "p3"
    less = estimator._read(X[kept].reset_index(drop=True), y[kept], estimator._public(X, y))

    def used(records, cells, key):
        found = persons.bounded(records, cells, AT_MOST, key)
        assert np.bincount(found.owners).max() == AT_MOST
        return set(map(bytes, found.given[found.owners == found.owners.max()]))

    assert used(data, ids, b"one") == used(less, ids[kept], b"one")
    assert used(data, ids, b"one") != used(data, ids, b"another")


@pytest.mark.parametrize("cells", [[None] * 300, [float("nan")] * 300, [""] * 300])
@pytest.mark.parametrize("name", NAMES)
def test_records_of_nobody_are_left_out_and_a_fit_of_none_is_a_fit(name, cells):
    estimator, some = case(name)
    X, y, _ = table(60, EXTREME, "no")
    held = some(X, y, np.array(cells, object))
    counted = []
    real = fitting.FitSession.release

    def release(self, name, total, bits=0):
        counted.append(float(np.abs(total).max(initial=0)))
        return real(self, name, total, bits)

    fitting.FitSession.release = release
    try:
        estimator.fit(held[0], held[1], users=held[2])
    finally:
        fitting.FitSession.release = real
    assert set(counted) == {0.0}


def test_the_column_is_no_feature_in_all_forms_of_a_table(tmp_path):
    X, y, ids = table(9, EXTREME, "no")
    whole = X.assign(patient=ids)
    given = NaiveBayes(schema=SCHEMA, unit=Person("patient", AT_MOST), random_state=0)
    made = given.fit(X, y, users=ids)
    assert made.n_features_in_ == 3
    for form in (whole, whole[["patient", *X.columns]], pyarrow.Table.from_pandas(whole)):
        again = NaiveBayes(schema=SCHEMA, unit=Person("patient", AT_MOST), random_state=0).fit(
            form, y
        )
        assert np.array_equal(again.log_likelihood_, made.log_likelihood_)
        assert "patient" not in again._columns.names
        assert np.array_equal(again.predict(X), again.predict(whole))
    again.release_.save(tmp_path / "run")
    assert np.array_equal(load(tmp_path / "run").predict(whole), made.predict(X))
    bounded = NaiveBayes(
        bounds={"age": (17, 90)},
        classes=("no", "yes"),
        unit=Person("patient", AT_MOST),
        random_state=0,
    ).fit(whole[["patient", "age"]], y)
    assert list(bounded.feature_names_in_) == ["age"]


def test_claim_ledger_and_report_say_it(tmp_path):
    X, y, ids = table(9, EXTREME, "no")
    made = NaiveBayes(
        schema=SCHEMA,
        unit=Person("patient", AT_MOST),
        run=tmp_path / "run",
        ledger=tmp_path / "people.jsonl",
    ).fit(X.assign(patient=ids), y)
    assert [
        f for f in verify(tmp_path / "run", ledger=tmp_path / "people.jsonl") if not f.holds
    ] == []
    entry = Ledger.read(tmp_path / "people.jsonl").permits()[0].claim["claim"]
    assert (entry["unit"]["name"], entry["unit"]["most_records"]) == ("user", AT_MOST)
    assert made.report_["guarantee"]["unit"] == "user"
    assert "for one user" in made.guarantee_
    assert "of which at most 4 are used" in made.guarantee_
    rows = {r["what"]: r for r in made.report_["sections"][0]["assumptions"]}
    assert rows["contribution"]["assumed"].startswith("what the records of one person add")
    assert "at most 4 records of a person" in rows["persons"]["assumed"]
    assert "patient" in rows["persons"]["done"]
    assert "of them are protected together" in (tmp_path / "run" / "report.md").read_text()
    with pytest.raises(InvalidInput, match="unit"):  # one ledger has one unit
        NaiveBayes(schema=SCHEMA, ledger=tmp_path / "people.jsonl").fit(X, y)


BAD = {
    "users without a unit": ({"unit": None}, {"users": [1] * 249}, "unit=dpfy.Person"),
    "no column and no users": ({}, {}, r"fit\(X, y, users=ids\)"),
    "another kind of unit": ({"unit": "patient"}, {}, "dpfy.Person"),
    "users of another length": ({}, {"users": [1, 2]}, "one for each of the 249"),
    "users in two columns": ({}, {"users": np.ones((249, 2))}, "one name of a person"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_persons_are_one_line_and_spend_nothing(name, tmp_path):
    settings, named, said = BAD[name]
    X, y, _ = table(9, EXTREME, "no")
    held = {"schema": SCHEMA, "unit": Person("patient", 2), "ledger": tmp_path / "p.jsonl"}
    with pytest.raises(InvalidInput, match=said) as problem:
        NaiveBayes(**(held | settings)).fit(X, y, **named)
    assert "\n" not in str(problem.value)
    ledger = tmp_path / "p.jsonl"
    assert not ledger.exists() or not Ledger.read(ledger).permits()


def test_users_beside_the_column_are_refused():
    X, y, ids = table(9, EXTREME, "no")
    with pytest.raises(InvalidInput, match="must be left out"):
        case("NaiveBayes")[0].fit(X.assign(patient=ids), y, users=ids)


@pytest.mark.parametrize("solver", ["objective", "approximate-minima", "output", "bolt-on"])
def test_solvers_whose_proof_is_about_one_record_name_the_way_out(solver):
    X, y, ids = table(9, EXTREME, "no")
    for at_most in (1, 5):
        estimator = LogisticRegression(
            schema=SCHEMA, solver=solver, adjacency="replace-one", unit=Person("id", at_most)
        )
        with pytest.raises(Unsupported, match='use solver="gradient"'):
            estimator.fit(X, y, users=ids)


def test_one_record_of_a_person_costs_what_a_record_costs():
    X, y, ids = table(9, EXTREME, "no")
    for name in NAMES:
        estimator, some = case(name, unit=Person("patient", 1))
        held = some(X, y, ids)
        alone = case(name, unit=None)[0].fit(*held[:2]).report_["sections"][0]["rounds"]
        assert estimator.fit(*held[:2], users=ids).report_["sections"][0]["rounds"] == alone, name
