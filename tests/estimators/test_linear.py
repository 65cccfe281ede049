"""Linear models: rows in the unit ball, sums without rounding, solvers that learn, and noise of the
stated scale.
"""

from __future__ import annotations

import sys
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression as Plain
from sklearn.linear_model import PoissonRegressor as PlainPoisson
from sklearn.metrics import mean_poisson_deviance, roc_auc_score

from dpfy.core.errors import DpfyError
from dpfy.estimators import LinearRegression, LinearSVC, LogisticRegression, PoissonRegressor
from dpfy.estimators import records as reading
from dpfy.estimators.columns import FeatureColumns, TableForm, public
from dpfy.estimators.linear import descent
from dpfy.estimators.linear import design as designs
from dpfy.estimators.linear.design import Design, RowLayout
from dpfy.estimators.linear.solver import (
    HuberHingeLoss,
    HuberLoss,
    LogisticLoss,
    PoissonLoss,
    SoftmaxLoss,
)
from dpfy.tables.columns import Number

sys.path.insert(0, str(Path(__file__).parent))
from people import SCHEMA, people

X, y = people(3000)


def rows(norm=None, constant=True):
    data = reading.read(X, public(TableForm.of(X), SCHEMA, None))
    layout = RowLayout(data.columns, constant)
    norm = layout.largest if norm is None else norm
    return layout, data, Design(layout, data, norm)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("norm", [None, 1.0, 0.3])
def test_rows_lie_in_the_unit_ball_on_the_grid(norm, constant):
    layout, _, design = rows(norm, constant)
    dense = design.part(slice(None))
    steps = np.ldexp(dense, designs.ROW)
    assert np.array_equal(steps, np.rint(steps))
    assert max(sum(Fraction(v) ** 2 for v in row) for row in dense[:200].tolist()) <= 1
    assert (np.linalg.norm(dense, axis=1) <= 1).all()
    assert dense.shape == (len(X), layout.width)


def test_sparse_and_dense_rows_are_the_same(monkeypatch):
    layout, data, _ = rows()
    dense = layout.rows(data, 1.1)
    monkeypatch.setattr(designs, "DENSE", 0)
    sparse = layout.rows(data, 1.1)
    assert np.array_equal(sparse.toarray(), dense)
    weights = np.random.default_rng(0).normal(size=(layout.width, 2))
    one, other = Design.of(dense, 2.0), Design.of(sparse, 2.0)
    factors = np.clip(one.scores(weights), -0.7, 0.7)
    assert np.array_equal(one.total(factors), other.total(factors))
    assert np.array_equal(one.gram(), other.gram())


def test_sums_are_exact_in_any_order_and_in_any_blocks(monkeypatch):
    _, _, design = rows()
    factors = np.random.default_rng(1).uniform(-0.7, 0.7, (design.size, 2))
    total, gram, whole = design.total(factors), design.gram(), design.part(slice(None))
    cut = np.trunc(factors * 2.0**designs.FACTOR) * 2.0**-designs.FACTOR
    exact = [
        [sum(Fraction(a) * Fraction(b) for a, b in zip(whole[:, i], cut[:, k])) for k in (0, 1)]
        for i in (0, 2, 4)
    ]
    assert [[Fraction(v) for v in total[i]] for i in (0, 2, 4)] == exact
    order = np.random.default_rng(2).permutation(design.size)
    other, factors = Design.of(whole[order] * (1 / designs.SAFE)), factors[order]
    assert np.array_equal(other.part(slice(None)), whole[order])
    monkeypatch.setattr(designs, "BLOCK", 700)
    monkeypatch.setattr(designs, "GRAM_BLOCK", 999)
    assert np.array_equal(other.total(factors), total)
    assert np.array_equal(
        other.gradient(np.zeros((6, 2)), lambda scores, part: factors[part]), total
    )
    assert np.array_equal(other.gram(), gram)


@pytest.mark.parametrize("length", [1e-3, 1.0, 7.3, 1e6])
def test_scores_are_exact_and_do_not_depend_on_where_a_record_stands(length):
    rng = np.random.default_rng(1)
    given = rng.normal(size=(300, 7))
    design = Design.of(given / np.linalg.norm(given, axis=1, keepdims=True))
    weights = rng.normal(size=(7, 1))
    weights = designs.without_rounding(weights * length / np.linalg.norm(weights))
    held = design.part(slice(None))
    scores = design.scores(weights)[:, 0]
    for k in range(40):
        whole = sum(
            (
                Fraction(x) * Fraction(w)
                for x, w in zip(held[k].tolist(), weights[:, 0].tolist(), strict=True)
            ),
            Fraction(0),
        )
        assert Fraction(float(scores[k])) == whole
    assert np.array_equal((held[::-1][:, ::-1] @ weights[::-1])[::-1, 0], scores)


def test_rows_that_are_kept_and_rows_that_are_made_anew_are_the_same():
    layout, data, kept = rows(1.1)
    anew = Design(layout, data, 1.1, keep=False)
    assert np.array_equal(kept.part(slice(None)), anew.part(slice(None)))
    assert np.array_equal(kept.gram(), anew.gram())


def value(loss, scores, target):
    """The loss of each record, whose derivative `slopes` is."""
    first = scores[:, 0]
    match loss:
        case SoftmaxLoss():
            top = scores.max(axis=1)
            total = np.exp(scores - top[:, None]).sum(axis=1)
            return top + np.log(total) - (scores * target).sum(axis=1)
        case LogisticLoss():
            return np.logaddexp(0.0, first) - target[:, 0] * first
        case HuberLoss():
            return (first - target[:, 0]) ** 2 / 2
        case PoissonLoss():
            return np.exp(np.minimum(first, 0)) + np.maximum(first, 0) - target[:, 0] * first
    margin = (2 * target[:, 0] - 1) * first
    inside = (1 + loss.WIDTH - margin) ** 2 / (4 * loss.WIDTH)
    straight = np.where(margin < 1 - loss.WIDTH, 1 - margin, inside)
    return np.where(margin > 1 + loss.WIDTH, 0.0, straight)


LOSSES = [LogisticLoss(), HuberLoss(), HuberHingeLoss(), PoissonLoss(), SoftmaxLoss()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_slopes_are_derivatives_and_bounds_hold(loss):
    rng = np.random.default_rng(3)
    outputs = 3 if isinstance(loss, SoftmaxLoss) else 1
    scores = rng.normal(0, 2, (500, outputs))
    target = (
        np.eye(3)[rng.integers(0, 3, 500)]
        if outputs == 3
        else rng.integers(0, 2, (500, 1)).astype(float)
    )
    slopes = loss.slopes(scores, target)
    for k in range(outputs):
        step = np.zeros(outputs)
        step[k] = 1e-6
        numeric = (value(loss, scores + step, target) - value(loss, scores - step, target)) / 2e-6
        assert np.allclose(numeric, slopes[:, k], atol=1e-5)
    if not isinstance(loss, HuberLoss):
        assert (np.linalg.norm(slopes, axis=1) <= loss.steepest + 1e-12).all()
    if outputs == 1:
        numeric = (loss.slopes(scores + 1e-6, target) - loss.slopes(scores - 1e-6, target))[
            :, 0
        ] / 2e-6
        bends = loss.bends(scores, target)
        assert np.quantile(np.abs(numeric - bends), 0.99) < 1e-4
        assert (bends <= loss.curvature + 1e-12).all()
        assert (
            np.diff(loss.slopes(np.linspace(-9, 9, 400)[:, None], np.ones((400, 1)))[:, 0])
            >= -1e-15
        ).all()
    if loss.one_sided:
        assert (slopes * (2 * target - 1) <= 0).all()


def test_logistic_regression_learns():
    train, labels = people(20000, seed=5)
    test, truth = people(4000, seed=6)
    made = LogisticRegression(epsilon=2.0, schema=SCHEMA, random_state=0).fit(train, labels)
    assert roc_auc_score(truth == "yes", made.decision_function(test)) > 0.93
    assert made.score(test, truth) > 0.85
    assert set(made.predict(test)) == {"no", "yes"}
    assert np.allclose(made.predict_proba(test).sum(axis=1), 1)
    assert "age" in str(made.explain())
    assert made.explain().svg().startswith("<svg")


def test_support_vectors_learn():
    train, labels = people(20000, seed=5)
    made = LinearSVC(epsilon=2.0, schema=SCHEMA, random_state=0).fit(train, labels)
    assert made.score(*people(4000, seed=6)) > 0.85


def test_a_softmax_learns_several_classes():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 12000)
    points = rng.normal(0, 0.5, (12000, 2)) + np.array([[2, 2], [-2, 2], [2, -2], [-2, -2]])[labels]
    made = LogisticRegression(
        epsilon=1.0, bounds=(-4, 4), classes=[0, 1, 2, 3], random_state=0
    ).fit(points, labels)
    assert made.score(points, labels) > 0.95
    assert made.coef_.shape == (4, 2)


@pytest.mark.parametrize("intercept", [True, False])
def test_linear_regression_comes_close_to_the_plain_one(intercept):
    rng = np.random.default_rng(0)
    given = rng.uniform(-1, 1, (20000, 3))
    values = given @ [3.0, -2.0, 0.5] + 2 * intercept + rng.normal(0, 0.3, 20000)
    made = LinearRegression(
        epsilon=2.0,
        bounds=(-1, 1),
        target_bounds=(-9, 9),
        fit_intercept=intercept,
        norm=3**0.5,
        random_state=0,
    ).fit(given, values)
    plain = Plain(fit_intercept=intercept).fit(given, values)
    assert np.allclose(made.coef_, plain.coef_, atol=0.1)
    assert made.intercept_ == pytest.approx(plain.intercept_, abs=0.1)
    assert made.score(given, values) > plain.score(given, values) - 0.005


def test_poisson_regression_of_large_counts_gets_better_with_more_records():
    """Targets near the middle of their range bend the loss more than rare counts do: a step for
    those would swing for ever.
    """
    rng, found = np.random.default_rng(7), []
    for size in (5_000, 50_000):
        given = rng.uniform(-1, 1, (size, 20))
        counts = np.clip(given @ np.linspace(-1.5, 1.5, 20) + rng.normal(size=size) + 10, 0, 20)
        made = PoissonRegressor(
            epsilon=1.0, bounds=(-1, 1), target_bounds=(0, 20), random_state=0
        ).fit(given, counts)
        plain = PlainPoisson(alpha=1e-6).fit(given, counts)
        found.append(
            mean_poisson_deviance(counts, made.predict(given))
            / mean_poisson_deviance(counts, plain.predict(given))
        )
    assert found[1] < 1.05
    assert found[1] < found[0] < 1.5


def test_poisson_regression_learns_rates():
    rng = np.random.default_rng(0)
    given = rng.uniform(0, 1, (20000, 2))
    counts = rng.poisson(np.exp(0.5 + 1.5 * given[:, 0] - given[:, 1]))
    made = PoissonRegressor(epsilon=2.0, bounds=(0, 1), target_bounds=(0, 20), random_state=0).fit(
        given, counts
    )
    expected = np.exp(0.5 + 1.5 * given[:, 0] - given[:, 1])
    assert np.corrcoef(made.predict(given), expected)[0, 1] > 0.98
    assert made.predict(given).mean() == pytest.approx(counts.mean(), rel=0.1)


def test_steps_are_shortened_where_columns_are_copies():
    """Forty copies of a column have forty times the curvature that independent ones would have: no
    step may run away.
    """
    rng = np.random.default_rng(0)
    one = rng.uniform(-1, 1, (5000, 1))
    given = np.repeat(one, 40, axis=1)
    made = LogisticRegression(epsilon=50.0, bounds=(-1, 1), classes=[0, 1], random_state=0).fit(
        given, (one[:, 0] > 0).astype(int)
    )
    assert made.score(given, (one[:, 0] > 0).astype(int)) > 0.97
    assert np.abs(made.coef_).max() < 20


def test_the_noise_of_gradients_has_the_stated_scale(monkeypatch):
    """Of 51 releases of 7 coordinates: a chi-square statistic within five deviations, which 2/3 and
    3/2 of the scale are not.
    """
    noise = []
    release = descent.FitSession.release

    def released(self, name, total, bits=0):
        out = release(self, name, total, bits)
        if name == descent.GRADIENTS:
            noise.append((out - total).ravel() / self.round(name).scale)
        return out

    monkeypatch.setattr(descent.FitSession, "release", released)
    LogisticRegression(schema=SCHEMA, random_state=0).fit(X, y)
    drawn = np.concatenate(noise)
    off = lambda scale: abs((drawn**2).mean() / scale**2 - 1) / (2 / len(drawn)) ** 0.5  # noqa: E731
    assert len(drawn) == 50 * 6
    assert off(1.0) < 5
    assert off(2 / 3) > 5
    assert off(3 / 2) > 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"solver": "best"}, "solver"),
        ({"rounds": 0}, "rounds"),
        ({"clip": 0}, "clip"),
        ({"alpha": -1}, "alpha"),
        ({"norm": 0}, "norm"),
        ({"epsilon": 1e-8}, "noise"),
    ],
)
def test_bad_settings_are_one_line(settings, said):
    with pytest.raises(DpfyError, match=said) as problem:
        LogisticRegression(schema=SCHEMA, **settings).fit(X, y)
    assert "\n" not in str(problem.value)


def test_constant_columns_and_fewer_records_than_features_are_fitted():
    given = np.concatenate([np.zeros((20, 30)), np.ones((20, 10))], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (
            LogisticRegression(classes=[0, 1], bounds=(0, 1)),
            LinearRegression(bounds=(0, 1), target_bounds=(0, 1)),
        ):
            assert np.isfinite(made.fit(given, np.arange(20) % 2).predict(given)).all()


def test_layouts_name_every_coordinate():
    layout = RowLayout(FeatureColumns((Number("a", 0, 1), *(c for c in SCHEMA if c.name == "job"))))
    assert layout.names == ("a", "job=clerk", "job=nurse", "job=smith")
    assert layout.width == 5
