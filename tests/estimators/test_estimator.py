"""What every estimator gets from the base: reservation before reading, card, ledger, verification,
refusals that spend nothing.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.ensemble import BaggingClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core.errors import BudgetExceeded, DpfyError, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.estimators import LogisticRegression, NaiveBayes, columns, load
from dpfy.estimators.estimator import every
from dpfy.report.verify import verify
from dpfy.runs.run import Run
from dpfy.tables import Category, Date, Label, Schema, Text

sys.path.insert(0, str(Path(__file__).parent))
from people import SCHEMA, people

X, y = people()


def wrong(place, **more):
    return [f for f in verify(place, **more) if not f.holds]


def fitted(**more):
    return NaiveBayes(schema=SCHEMA, random_state=1, **more).fit(X, y)


def test_a_fit_leaves_a_card_that_verifies_without_a_folder_and_with_one(tmp_path):
    without = fitted()
    assert without.release_.run is None
    assert wrong(without.release_.save(tmp_path / "saved")) == []
    inside = fitted(run=tmp_path / "run")
    assert wrong(tmp_path / "run") == []
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert np.array_equal(inside.log_likelihood_, without.log_likelihood_)
    assert without.report_["guarantee"]["epsilon"] == pytest.approx(1.0, rel=1e-9)
    assert without.report_["guarantee"]["epsilon"] <= 1.0


def test_every_flipped_byte_of_the_model_is_found(tmp_path):
    path = fitted().release_.save(tmp_path / "run")
    content = bytearray((path / "estimator.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "estimator.safetensors").write_bytes(content)
    assert wrong(path)


def test_the_claim_is_reserved_before_a_record_is_read(tmp_path, monkeypatch):
    seen = []
    read = dpfy.estimators.records.read
    monkeypatch.setattr(
        dpfy.estimators.estimator.records,
        "read",
        lambda *a: (
            seen.extend(p.name for p in Ledger.read(tmp_path / "people.jsonl").permits()),
            read(*a),
        )[1],
    )
    fitted(ledger=tmp_path / "people.jsonl")
    assert len(seen) == 1
    assert seen[0].startswith("fit NaiveBayes")


def test_the_ledger_of_a_data_set_holds_every_fit_and_refuses_what_does_not_fit(tmp_path):
    people_ledger = tmp_path / "people.jsonl"
    place = Run(tmp_path / "one", ledger=people_ledger, budget=RenyiFilter(epsilon=1.2, delta=1e-5))
    NaiveBayes(schema=SCHEMA, run=place).fit(X, y)
    assert len(Ledger.read(people_ledger).permits()) == 1
    with pytest.raises(BudgetExceeded):
        fitted(ledger=people_ledger)
    assert len(Ledger.read(people_ledger).permits()) == 1
    assert wrong(tmp_path / "one", ledger=people_ledger) == []


def test_all_forms_of_a_table_give_the_same_fit():
    whole = fitted()
    order = ["gain", "age", "job"]
    for given in (
        X[order],
        pyarrow.Table.from_pandas(X),
        X.astype({"job": "category"}),
        X.astype(object).to_numpy(),
    ):
        other = NaiveBayes(schema=SCHEMA, random_state=1).fit(given, y)
        assert np.array_equal(whole.log_likelihood_, other.log_likelihood_)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert np.array_equal(
                whole.predict_proba(X[:5]),
                other.predict_proba(
                    given[:5] if not hasattr(given, "slice") else given.slice(0, 5)
                ),
            )


def test_a_row_more_changes_what_is_released_by_one_contribution_only():
    """With the same secret, neighbours' releases differ by what the record adds: nothing else
    depends on it.
    """
    one = fitted().release_.model.arrays["counts"]
    other = (
        NaiveBayes(schema=SCHEMA, random_state=1)
        .fit(X[:-1], y[:-1])
        .release_.model.arrays["counts"]
    )
    moved = one - other
    assert np.abs(moved).sum() == len(SCHEMA) - 1
    assert set(np.unique(moved)) == {0.0, 1.0}


def test_what_is_loaded_predicts_as_what_was_fitted(tmp_path):
    whole = fitted(run=tmp_path / "run")
    assert np.array_equal(load(tmp_path / "run").predict_proba(X), whole.predict_proba(X))


def test_pickles_and_clones_hold_no_secret_and_no_record(tmp_path):
    table = X.assign(job=X["job"].where(X.index != 7, "a-word-of-one-record"))
    whole = NaiveBayes(schema=SCHEMA, run=tmp_path / "run").fit(table, y)
    kept = pickle.dumps(whole)
    assert b"a-word-of-one-record" not in kept
    assert b"secret" not in kept.replace(b"secret_", b"")
    assert X["age"].to_numpy().tobytes()[:64] not in kept
    assert np.array_equal(pickle.loads(kept).predict_proba(X), whole.predict_proba(X))
    assert not hasattr(clone(whole), "report_")


def test_a_fixed_seed_stands_on_the_card():
    assert any("seed was fixed" in line for line in fitted().report_["caveats"])
    assert not NaiveBayes(schema=SCHEMA).fit(X, y).report_["caveats"]


def test_labels_that_the_caller_states_to_be_public_stand_on_the_card_as_stated():
    made = NaiveBayes(bounds=(0, 100), classes="public", random_state=0).fit(X[["age"]], y)
    rows = {row["what"]: row["holds"] for row in made.report_["sections"][0]["assumptions"]}
    assert rows == {"contribution": "yes", "domain": "stated"}


def test_ranges_that_nobody_stated_are_bought_and_billed():
    made = NaiveBayes(classes=("no", "yes"), random_state=0, epsilon=4.0).fit(
        people(5000)[0][["age"]], people(5000)[1]
    )
    low, high = made.report_["sections"][0]["bought_ranges"]["age"]
    assert 0 <= low <= 30
    assert 80 <= high <= 128
    rounds = made.report_["sections"][0]["rounds"]
    assert [r["name"] for r in rounds] == ["powers of two", "ranges", "counts"]
    spent = [r["releases"] / r["event"]["noise_multiplier"] ** 2 for r in rounds]
    assert sum(spent[:2]) / sum(spent) == pytest.approx(0.1)
    assert made.report_["guarantee"]["epsilon"] == pytest.approx(4.0)


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one", "zero-out"])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_what_is_spent_is_what_was_asked(adjacency, delta):
    made = fitted(adjacency=adjacency, delta=delta, epsilon=0.7)
    assert 0.7 * (1 - 1e-6) <= made.report_["guarantee"]["epsilon"] <= 0.7
    assert made.report_["guarantee"]["delta"] == delta


SEARCHES = [
    lambda e: GridSearchCV(e, {"bins": [4, 8]}, cv=2, error_score="raise").fit(X[["age"]], y),
    lambda e: cross_val_score(e, X[["age"]], y, cv=2, error_score="raise"),
    lambda e: BaggingClassifier(e, n_estimators=2).fit(X[["age"]].to_numpy(), y),
]


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_and_ensembles_are_refused_with_the_way_out(search, tmp_path):
    with pytest.raises(Unsupported, match=r"dpfy\.tune\("):
        search(NaiveBayes(bounds=(0, 100), classes=("no", "yes"), ledger=tmp_path / "people.jsonl"))
    assert not (tmp_path / "people.jsonl").exists()


def test_a_pipeline_may_hold_steps_without_a_state_and_no_others():
    estimator = NaiveBayes(bounds=(0, 1), classes=("no", "yes"))
    made = make_pipeline(Normalizer(), estimator).fit(X[["age"]], y)
    assert made.predict(X[["age"]]).shape == y.shape
    with pytest.raises(Unsupported, match=r"StandardScaler.*learns from the records"):
        make_pipeline(StandardScaler(), clone(estimator)).fit(X[["age"]], y)


BAD = {
    "epsilon 0": ({"epsilon": 0}, X, y, "epsilon"),
    "epsilon nan": ({"epsilon": float("nan")}, X, y, "epsilon"),
    "delta 1": ({"delta": 1}, X, y, "delta"),
    "accountant": ({"accountant": "best"}, X, y, "accountant"),
    "adjacency": ({"adjacency": "swap"}, X, y, "adjacency"),
    "bins": ({"bins": 1}, X, y, "bins"),
    "bounds beside a schema": ({"bounds": (0, 1)}, X, y, "bounds"),
    "bounds that invert": (
        {"schema": None, "bounds": (1, 0), "classes": ("no", "yes")},
        X[["age"]],
        y,
        "bounds of age",
    ),
    "no schema for text": ({"schema": None, "classes": ("no", "yes")}, X, y, "X column"),
    "no classes": ({"schema": None, "bounds": (0, 99)}, X[["age"]], y, "classes"),
    "one class": (
        {"schema": None, "bounds": (0, 99), "classes": ("no",)},
        X[["age"]],
        y,
        "classes",
    ),
    "one class in y": (
        {"schema": None, "bounds": (0, 99), "classes": "public"},
        X[["age"]],
        ["a"] * 400,
        "1 class",
    ),
    "y missing": ({}, X, None, "y"),
    "y short": ({}, X, y[:-1], "y"),
    "a column missing": ({}, X[["age", "job"]], y, "gain"),
    "a column too many": ({}, X.assign(other=1), y, "other"),
    "columns": ({}, X.astype(object).to_numpy()[:, :2], y, "columns"),
    "no rows": ({}, X[:0], y[:0], "X"),
    "no table": ({}, 7, y, "X"),
    "sparse": (
        {"schema": None, "bounds": (0, 1), "classes": ("no", "yes")},
        scipy.sparse.eye(3),
        y,
        "sparse",
    ),
    "random_state": ({"random_state": -1}, X, y, "random_state"),
    "run": ({"run": 7}, X, y, "run"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_spends_nothing(name, tmp_path):
    settings, table, labels, said = BAD[name]
    ledger = tmp_path / "people.jsonl"
    estimator = NaiveBayes(**({"schema": SCHEMA} | settings), ledger=ledger)
    with pytest.raises(DpfyError, match=said) as problem:
        estimator.fit(table, labels)
    assert "\n" not in str(problem.value)
    assert not ledger.exists() or not Ledger.read(ledger).permits()
    assert not hasattr(estimator, "report_")


ODD = {
    "age": [np.nan, None, np.inf, -np.inf, "old", "", "1e400", [1], b"x"],
    "gain": [np.nan, np.inf, "$5"],
    "job": ["poet", "", None, np.nan, 5, "\0"],
}


@pytest.mark.parametrize("name", ODD)
def test_a_cell_that_does_not_fit_changes_its_own_record_alone(name):
    read = dpfy.estimators.records.read
    held = columns.public(columns.TableForm.of(X), SCHEMA, None)
    before = read(X, held)
    for cell in ODD[name]:
        cells = X[name].astype(object).tolist()
        cells[3] = cell
        odd = X.assign(**{name: pandas.Series(cells, dtype=object)})
        after = read(odd, held)
        there = np.arange(len(X)) != 3
        assert np.array_equal(after.given[there], before.given[there])
        assert np.array_equal(after.codes[there], before.codes[there])
        assert np.isfinite(after.given).all()
        NaiveBayes(schema=SCHEMA, random_state=1).fit(odd, y).predict(odd)


def test_records_without_a_usable_label_are_left_out_unless_their_number_is_public():
    odd = y.astype(object).copy()
    odd[[2, 5]] = ["maybe", None]
    seen = {}

    class Spy(NaiveBayes, abstract=True):
        def _learn(self, data, public, fit):
            seen["size"], seen["labels"] = data.size, data.labels
            return super()._learn(data, public, fit)

    Spy.__name__ = "NaiveBayes"
    Spy(schema=SCHEMA, random_state=1).fit(X, odd)
    assert seen["size"] == len(X) - 2
    Spy(schema=SCHEMA, random_state=1, adjacency="replace-one", records=len(X)).fit(X, odd)
    assert seen["size"] == len(X)
    assert seen["labels"][[2, 5]].tolist() == [0, 0]


def test_a_strict_schema_names_column_and_row():
    strict = Schema(tuple(SCHEMA), strict=True)
    clean = X.assign(job="clerk", gain=1.0)
    NaiveBayes(schema=strict).fit(clean, y)
    with pytest.raises(InvalidInput, match="column job, row 1: got 'a cell that does not fit'"):
        NaiveBayes(schema=strict).fit(clean.assign(job="poet"), y)
    with pytest.raises(InvalidInput, match="y, row 4"):
        NaiveBayes(schema=strict).fit(clean, ["no"] * 3 + ["maybe"] * (len(X) - 3))


def test_dates_and_text_are_features():
    rng = np.random.default_rng(1)
    seen = np.datetime64("2020-01-01") + rng.integers(0, 700, 300)
    table = pandas.DataFrame(
        {
            "seen": seen,
            "note": rng.choice(["good, good", "bad day", "", "?"], 300),
            "code": rng.choice(["A1", "B2", "C3"], 300),
            "id": range(300),
        }
    )
    labels = np.where(table.note.str.startswith("good"), "yes", "no")
    schema = [
        Date("seen", "2020-01-01", "2021-12-31", parts=["year", "month"]),
        Text("note", buckets=8),
        Category("code", ["A1", "B2", "C3"], buckets=4),
        Text("id"),
        Label("y", ["no", "yes"]),
    ]
    made = LogisticRegression(schema=schema, epsilon=100.0, random_state=0).fit(table, labels)
    assert (made.predict(table) == labels).mean() > 0.95
    names = [c.name for c in made._columns.columns]
    assert names[:4] == ["seen_year", "seen_month", "note_0", "note_1"]
    assert len(names) == 2 + 8 + 4
    again = type(made._columns).from_json(made._columns.to_json())
    assert (again.columns, again.sources) == (made._columns.columns, made._columns.sources)


def test_a_killed_fit_resumes_to_the_same_release_and_meets_no_other_data(tmp_path, monkeypatch):
    whole = fitted(run=tmp_path / "whole")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dpfy.estimators.fitting, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted(run=tmp_path / "run")
    monkeypatch.undo()
    again = Run(tmp_path / "run", resume=True, seed=1)
    with pytest.raises(InvalidInput, match="must be what the run had"):
        NaiveBayes(schema=SCHEMA, run=again).fit(X[1:], y[1:])
    resumed = NaiveBayes(schema=SCHEMA, run=again).fit(X, y)
    assert np.array_equal(resumed.log_likelihood_, whole.log_likelihood_)
    assert wrong(tmp_path / "run") == []
    assert np.array_equal(
        NaiveBayes(schema=SCHEMA, run=again).fit(X, y).log_likelihood_, whole.log_likelihood_
    )


EXCEPTIONS = {
    "check_supervised_y_no_nan": "a private target raises nothing: infinity is the end of the "
    "range",
    "check_dtype_object": "a cell that is no number and no word raises InvalidInput, a ValueError; "
    "scikit-learn asks for a TypeError",
    "check_all_zero_sample_weights_error": "weights are private: none of them raises an error",
    "check_sample_weight_equivalence_on_dense_data": "weights above the public max_weight are moved "
    "there, so that a weight of 3 is not three records; tests/estimators/test_weights.py has more",
    "check_clustering": "labels of the records are as private as the records: k-means keeps no "
    "labels_, which scikit-learn asks for",
}


def alike(name):
    """Regressors that a classifier of the same kind stands for by default."""
    return name.endswith("Regressor") and name.replace("Regressor", "Classifier") in every()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * alike(n)) for n in sorted(every())]
)
def test_the_checks_of_scikit_learn(name):
    kind = every()[name]
    small = {"classes": "public", "n_estimators": 40, "max_depth": 4}
    held = kind().get_params()
    more = {
        key: value
        for key, value in small.items()
        if key in held and (key == "classes" or (held[key] or 0) > value)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(
            kind(epsilon=1e4, random_state=0, **more), on_fail=None, on_skip=None
        )
    failed = {r["check_name"]: repr(r["exception"]) for r in found if r["status"] == "failed"}
    assert {k: v for k, v in failed.items() if k not in EXCEPTIONS} == {}
    assert sum(r["status"] == "passed" for r in found) > (
        35 if name == "GaussianMixture" else 40
    )  # few checks know densities


def test_a_table_is_not_changed():
    table, labels = people()
    kept = table.copy()
    NaiveBayes(schema=SCHEMA).fit(table, labels)
    pandas.testing.assert_frame_equal(table, kept)
