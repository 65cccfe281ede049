"""Private estimators in pipelines of scikit-learn: which steps may stand before them, the private
scaler, and what transformers give out.
"""

from __future__ import annotations

import doctest
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import RBFSampler
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    QuantileTransformer,
    SplineTransformer,
    StandardScaler,
)
from sklearn.random_projection import GaussianRandomProjection

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.estimators import (
    PCA,
    KMeans,
    LinearRegression,
    LogisticRegression,
    NaiveBayes,
    PrivateScaler,
    scaler,
)
from dpfy.estimators.steps import RULES

sys.path.insert(0, str(Path(__file__).parent))
from people import JOBS, people
from replay import distances

X, y = people(500)
NUMBERS = X[["age"]]
ONE_HOT = {"categories": [list(JOBS)], "handle_unknown": "ignore", "sparse_output": False}


def bayes(bounds=(-10, 100), **more):
    return NaiveBayes(bounds=bounds, classes=("no", "yes"), random_state=0, **more)


GOOD = {
    "Normalizer": Normalizer(),
    "Binarizer": Binarizer(threshold=50),
    "function": FunctionTransformer(np.log1p),
    "polynomials": PolynomialFeatures(2),
    "splines": SplineTransformer(knots=np.array([[0.0], [50.0], [100.0]])),
    "imputer": SimpleImputer(strategy="constant", fill_value=50, keep_empty_features=True),
    "projection": GaussianRandomProjection(n_components=1, random_state=0),
    "kernel": RBFSampler(gamma=0.1, random_state=0),
    "ordinal": OrdinalEncoder(
        categories=[list(range(100))], handle_unknown="use_encoded_value", unknown_value=-1
    ),
    "nothing": "passthrough",
    "union": FeatureUnion([("a", Normalizer()), ("b", PolynomialFeatures(1))]),
    "pipeline": make_pipeline(Normalizer(), PolynomialFeatures(1)),
}


@pytest.mark.parametrize("name", GOOD)
def test_steps_that_learn_nothing_may_stand_before_a_fit(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make_pipeline(GOOD[name], bayes()).fit(NUMBERS, y)
    assert made.predict(NUMBERS).shape == y.shape


@pytest.mark.parametrize("name", [n for n in GOOD if n not in ("nothing", "union", "pipeline")])
def test_what_they_give_out_for_a_row_does_not_depend_on_other_rows(name):
    """The rule of the list: fitted on other records, they do the same to a row."""
    one, other = NUMBERS.iloc[:200], NUMBERS.iloc[150:] * 0.5 + 7
    row = NUMBERS.iloc[[160]]
    first, second = (clone(GOOD[name]).fit(part).transform(row) for part in (one, other))
    assert np.array_equal(np.asarray(first), np.asarray(second))


BAD = {
    "StandardScaler": (StandardScaler(), "PrivateScaler"),
    "MinMaxScaler": (MinMaxScaler(), "PrivateScaler"),
    "QuantileTransformer": (QuantileTransformer(n_quantiles=10), "learns from the records"),
    "encoder without categories": (OrdinalEncoder(), "categories="),
    "one-hot that may raise": (
        OneHotEncoder(categories=[list(range(100))], sparse_output=False, handle_unknown="error"),
        "handle_unknown",
    ),
    "imputer of the mean": (SimpleImputer(), "fill_value"),
    "imputer that drops columns": (
        SimpleImputer(strategy="constant", fill_value=0, keep_empty_features=False),
        "keep_empty_features=True",
    ),
    "splines of the data": (SplineTransformer(), "knots"),
    "kernel of the data": (RBFSampler(gamma="scale"), "gamma"),
    "function that mixes": (FunctionTransformer(lambda x: x - x.mean(axis=0)), "mixes rows"),
    "nested": (make_pipeline(Normalizer(), StandardScaler()), "StandardScaler"),
    "union": (FeatureUnion([("s", StandardScaler())]), "StandardScaler"),
    "columns": (ColumnTransformer([("s", StandardScaler(), ["age"])]), "StandardScaler"),
    "remainder": (ColumnTransformer([], remainder=StandardScaler()), "StandardScaler"),
    "a selector that sees the table": (
        ColumnTransformer([("n", Normalizer(), lambda table: [0])]),
        "name the columns",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_steps_that_learn_are_refused_with_the_way_out_and_spend_nothing(name, tmp_path):
    step, said = BAD[name]
    ledger = tmp_path / "people.jsonl"
    values = NUMBERS.round() if "one-hot" in name else NUMBERS
    pipeline = make_pipeline(clone(step), bayes(ledger=ledger))
    with pytest.raises(Unsupported, match=said) as problem:
        pipeline.fit(values, y)
    assert "\n" not in str(problem.value)
    assert not ledger.exists()


def test_every_rule_is_of_a_step_of_scikit_learn():
    from sklearn.utils import all_estimators

    assert set(RULES) <= {name for name, _ in all_estimators(type_filter="transformer")}


def test_a_column_transformer_with_public_categories():
    table = X.assign(job=X["job"].replace("?", "poet"), gain=X["gain"].fillna(0))
    made = make_pipeline(
        ColumnTransformer(
            [
                ("job", OneHotEncoder(**ONE_HOT), ["job"]),
                ("log", FunctionTransformer(np.log1p), ["gain"]),
                ("age", "passthrough", make_column_selector("age")),
            ]
        ),
        LogisticRegression(
            bounds=([0, 0, 0, 0, 17], [1, 1, 1, 10, 90]),
            classes=("no", "yes"),
            epsilon=8,
            random_state=0,
        ),
    ).fit(table, y)
    assert made.score(table, y) > 0.75
    rows = {r["what"]: r for r in made[-1].report_["sections"][0]["assumptions"]}
    said = rows["steps before the fit"]
    assert said["done"] == "OneHotEncoder, FunctionTransformer (declared by the caller)"
    assert said["holds"] == "stated"


def test_a_step_of_another_library_is_what_it_says_of_itself():
    class Doubled(TransformerMixin, BaseEstimator):
        learns = False

        def fit(self, X, y=None):
            return self

        def transform(self, X):
            return np.asarray(X) * 2

        def __sklearn_tags__(self):
            tags = super().__sklearn_tags__()
            tags.requires_fit = self.learns
            return tags

    made = make_pipeline(Doubled(), bayes()).fit(NUMBERS, y)
    rows = {r["what"]: r for r in made[-1].report_["sections"][0]["assumptions"]}
    assert rows["steps before the fit"]["holds"] == "stated"
    Doubled.learns = True
    with pytest.raises(Unsupported, match=r"docs/estimators.md"):
        make_pipeline(Doubled(), bayes()).fit(NUMBERS, y)


def test_a_transformed_target_must_not_learn_either():
    number = np.linspace(0, 1, len(X))
    inner = LinearRegression(bounds=(0, 100), target_bounds=(-2, 2), random_state=0)
    with pytest.raises(Unsupported, match="StandardScaler"):
        TransformedTargetRegressor(regressor=inner, transformer=StandardScaler()).fit(
            NUMBERS, number
        )
    made = TransformedTargetRegressor(
        regressor=inner, func=np.log1p, inverse_func=np.expm1, check_inverse=False
    ).fit(NUMBERS, number)
    assert made.predict(NUMBERS).shape == number.shape


def test_private_steps_are_charged_each_for_itself(tmp_path):
    ledger = tmp_path / "people.jsonl"
    made = make_pipeline(
        PrivateScaler(epsilon=0.5, bounds=(17, 90), ledger=ledger),
        PCA(epsilon=0.5, bounds=(-3, 3), ledger=ledger),
        bayes(bounds=(-4, 4), epsilon=1.0, ledger=ledger).set_params(random_state=None),
    ).fit(NUMBERS, y)
    assert len(Ledger.read(ledger).permits()) == 3
    rows = {r["what"]: r for r in made[-1].report_["sections"][0]["assumptions"]}
    assert "PrivateScaler (private itself" in rows["steps before the fit"]["done"]
    assert rows["steps before the fit"]["holds"] == "yes"


def test_persons_go_through_a_pipeline_beside_the_table():
    ids = np.arange(len(X)) // 3
    unit = dpfy.Person("patient", 2)
    made = make_pipeline(
        PrivateScaler(bounds=(17, 90), unit=unit, random_state=0), bayes(unit=unit)
    ).fit(NUMBERS, y, privatescaler__users=ids, naivebayes__users=ids)
    assert made[-1].report_["guarantee"]["unit"] == "user"
    with pytest.raises(InvalidInput, match="users=ids"):
        make_pipeline(Normalizer(), bayes(unit=unit)).fit(NUMBERS, y)


# The scaler.


def test_means_and_deviations_are_about_those_of_the_records():
    rng = np.random.default_rng(0)
    table = rng.normal([50.0, -3.0], [2.0, 0.5], (20_000, 2))
    made = PrivateScaler(epsilon=2, bounds=([0, -10], [100, 10]), random_state=0).fit(table)
    assert made.mean_ == pytest.approx([50, -3], abs=0.2)
    assert made.scale_ == pytest.approx([2, 0.5], rel=0.2)
    found = made.transform(table)
    assert np.abs(found).max() <= 3
    assert found.std(axis=0) == pytest.approx([1, 1], rel=0.2)
    unit = PrivateScaler(epsilon=2, bounds=(0, 100), random_state=0).fit(table[:, [0]])
    assert unit.mean_ == pytest.approx([50], abs=0.5)  # on the scale [0, 1]
    assert unit.transform(table[:, [0]]).std() == pytest.approx(1, rel=0.3)


def test_ranges_are_bought_with_all_of_the_budget():
    rng = np.random.default_rng(0)
    table = rng.uniform(20, 80, (5000, 1))
    made = PrivateScaler(method="ranges", epsilon=1, random_state=0).fit(table)
    rounds = made.report_["sections"][0]["rounds"]
    assert [r["name"] for r in rounds] == ["powers of two", "ranges"]
    assert made.report_["guarantee"]["epsilon"] == pytest.approx(1.0)
    found = made.transform(table)
    assert (np.abs(found) <= 1).all()
    assert found.max() - found.min() > 0.6
    with pytest.raises(InvalidInput, match="buys ranges"):
        PrivateScaler(method="ranges", bounds=(0, 1)).fit(table)


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_one_record_moves_the_sums_within_their_bound(adjacency):
    rng = np.random.default_rng(0)
    table = rng.uniform(-1, 1, (300, 3))
    table[7] = 1.0
    made = PrivateScaler(bounds=(-1, 1), random_state=0, adjacency=adjacency)
    if adjacency == "replace-one":
        other = table.copy()
        other[7] = -1.0
        moved, most = distances(made, (table, None), (other, None)), 2
    else:
        moved, most = distances(made, (table, None), (np.delete(table, 7, axis=0), None)), 1
    assert 0.5 < max(d for _, d in moved) <= most * (1 + 1e-12)


def test_the_scaler_refuses_categories_and_bad_settings():
    for wrong, said in (({"method": "robust"}, "method"), ({"limit": 0}, "limit")):
        with pytest.raises(InvalidInput, match=said):
            PrivateScaler(bounds=(0, 1), **wrong).fit(NUMBERS)
    with pytest.raises(Unsupported, match="category"):
        PrivateScaler(schema=(dpfy.estimators.columns.Category("age", ("1", "2")),)).fit(NUMBERS)


@pytest.mark.parametrize(
    "made",
    [
        PrivateScaler(bounds=(17, 90), random_state=0),
        PCA(bounds=(17, 90), random_state=0),
        KMeans(n_clusters=2, bounds=(17, 90), random_state=0),
    ],
    ids=lambda made: type(made).__name__,
)
def test_transformers_give_out_frames_where_they_are_asked_to(made):
    table = NUMBERS.set_index(NUMBERS.index + 100)
    found = clone(made).set_output(transform="pandas").fit(table).transform(table)
    assert isinstance(found, pandas.DataFrame)
    assert list(found.index) == list(table.index)
    assert list(found.columns) == list(clone(made).fit(table).get_feature_names_out())
    assert isinstance(clone(made).fit(table).transform(table), np.ndarray)


def test_the_card_of_a_fit_outside_a_pipeline_says_nothing_of_steps():
    told = json.dumps(bayes().fit(NUMBERS, y).report_)
    assert "steps before the fit" not in told


def test_the_example_of_the_scaler_runs():
    assert doctest.testmod(scaler).failed == 0
