"""The solvers of linear models: each learns, keeps to its bound on neighbours, states its
conditions, and refuses what has no proof.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from sklearn.linear_model import LogisticRegression as Plain
from sklearn.metrics import roc_auc_score

from dpfy.core import events, plugins
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency
from dpfy.estimators import LinearRegression, LinearSVC, LogisticRegression, Ridge
from dpfy.estimators.budget import FitTerms
from dpfy.estimators.columns import FeatureColumns, in_range
from dpfy.estimators.linear.design import Design, RowLayout
from dpfy.estimators.linear.models import LAB
from dpfy.estimators.linear.models import SOLVERS as OWN
from dpfy.estimators.linear.solver import (
    ADD,
    REPLACE,
    HuberHingeLoss,
    HuberLoss,
    LinearTask,
    LogisticLoss,
)
from dpfy.report.verify import verify
from dpfy_lab.estimators import bolt_on, minima

sys.path.insert(0, str(Path(__file__).parents[2] / "estimators"))
from people import SCHEMA, people
from replay import distances

SOLVERS = OWN | {name: plugins.find(plugins.SOLVERS, name) for name in LAB}
X, y = people(6000, seed=3)
TEST = people(2000, seed=4)
ONE = sorted(set(SOLVERS) - {"statistics"})


def adjacency(solver):
    return "replace-one" if solver == "bolt-on" else "add-or-remove-one"


@pytest.mark.parametrize("solver", ONE)
def test_every_solver_learns_and_its_card_verifies(solver, tmp_path):
    made = LogisticRegression(
        epsilon=4.0,
        schema=SCHEMA,
        solver=solver,
        adjacency=adjacency(solver),
        random_state=0,
        run=tmp_path / "run",
    ).fit(X, y)
    assert roc_auc_score(TEST[1] == "yes", made.decision_function(TEST[0])) > 0.9
    assert [f for f in verify(tmp_path / "run") if not f.holds] == []
    assert 4 * (1 - 1e-4) <= made.report_["guarantee"]["epsilon"] <= 4
    assert made.report_["sections"][0]["settings"]["solver"] == repr(solver)


@pytest.mark.parametrize(
    "solver", ["gradient", "newton", "statistics", "functional", "objective", "output"]
)
def test_regression_by_every_solver_that_knows_it(solver):
    rng = np.random.default_rng(0)
    given = rng.uniform(-1, 1, (8000, 3))
    values = given @ [3.0, -2.0, 0.5] + 1 + rng.normal(0, 0.3, 8000)
    made = LinearRegression(
        epsilon=4.0, bounds=(-1, 1), target_bounds=(-9, 9), solver=solver, random_state=0
    ).fit(given, values)
    assert made.score(given, values) > (0.9 if solver == "output" else 0.95)


def test_support_vectors_by_objective_perturbation():
    assert (
        LinearSVC(epsilon=4.0, schema=SCHEMA, solver="objective", random_state=0)
        .fit(X, y)
        .score(*TEST)
        > 0.8
    )


def test_a_softmax_by_newton():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 9000)
    points = rng.normal(0, 0.5, (9000, 2)) + np.array([[2, 2], [-2, 2], [0, -2]])[labels]
    made = LogisticRegression(
        epsilon=2.0, bounds=(-4, 4), classes=[0, 1, 2], solver="newton", random_state=0
    ).fit(points, labels)
    assert made.score(points, labels) > 0.95


@pytest.mark.parametrize("solver", ["gradient", "newton", "statistics", "output"])
def test_explanations_tell_how_far_noise_moves_coefficients(solver):
    """Over 16 fits the deviation of a coefficient is within a factor of 2.5 of what one of them
    tells; chi-square with 15 degrees of freedom leaves that range less than once in 1e5 where it is
    told rightly. What output perturbation tells is the same for all.
    """
    rng = np.random.default_rng(0)
    given = rng.uniform(-1, 1, (3000, 3))
    values = given @ [3.0, -2.0, 0.5] + 1 + rng.normal(0, 0.3, 3000)
    settings = {
        "epsilon": 1.0,
        "bounds": (-1, 1),
        "target_bounds": (-9, 9),
        "norm": 2.0,
        "solver": solver,
    }
    fits = [LinearRegression(random_state=k, **settings).fit(given, values) for k in range(16)]
    found = np.std([made.coef_ for made in fits], axis=0)
    told = {name: noise for name, _, noise in fits[0].explain().rows}
    for name, deviation in zip(fits[0].feature_names_out_, found, strict=True):
        assert deviation / 2.5 < told[name] < deviation * 2.5, (name, deviation, told)


def test_ridge_pulls_weights_to_zero():
    rng = np.random.default_rng(0)
    given = rng.uniform(-1, 1, (5000, 2))
    values = given @ [1.0, -1.0]
    for solver in ("gradient", "statistics", "output", "objective"):
        sizes = [
            np.linalg.norm(
                Ridge(
                    alpha=a,
                    epsilon=20.0,
                    bounds=(-1, 1),
                    target_bounds=(-2, 2),
                    solver=solver,
                    random_state=0,
                )
                .fit(given, values)
                .coef_
            )
            for a in (10.0, 20000.0)
        ]
        assert sizes[1] < 0.7 * sizes[0], solver


def table_of(solver):
    """Records for neighbours of a solver: some that are extreme."""
    table, labels = people(200, seed=2)
    table.loc[7] = {"age": 90.0, "job": "smith", "gain": 1e9}
    return table, labels.to_numpy()


@pytest.mark.parametrize("solver", ["newton", "functional", "output", "bolt-on"])
@pytest.mark.parametrize("how", ["add-or-remove-one", "replace-one"])
def test_neighbours_stay_within_the_bound(solver, how):
    if solver == "bolt-on" and how != "replace-one":
        pytest.skip("there is no proof")
    table, labels = table_of(solver)
    estimator = LogisticRegression(schema=SCHEMA, solver=solver, adjacency=how, random_state=0)
    if how == "replace-one":
        other, changed = table.copy(), labels.copy()
        other.loc[7] = {"age": 17.0, "job": "nurse", "gain": 0.0}
        changed[7] = "no" if labels[7] == "yes" else "yes"
        moved = distances(estimator, (table, labels), (other, changed))
        assert max(d for _, d in moved) <= 2
    else:
        keep = np.arange(len(table)) != 7
        moved = distances(
            estimator, (table, labels), (table[keep].reset_index(drop=True), labels[keep])
        )
        assert max(d for _, d in moved) <= 1
    assert any(d > 1e-3 for _, d in moved)


@pytest.mark.parametrize("seed", range(3))
def test_matrices_of_records_keep_to_their_bounds(seed):
    """The two bounds of second moments, on random and on extreme rows of the unit ball."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(300, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    target = np.sign(rng.normal(size=300))
    rows[1], target[:2] = -rows[0], (1.0, 1.0)
    held = [
        np.concatenate([np.outer(x, x), x[:, None] * t, x[:, None] * t], axis=1)
        for x, t in zip(rows, target, strict=True)
    ]
    assert max(np.linalg.norm(one) for one in held) <= ADD
    assert max(np.linalg.norm(a - b) for a in held[:60] for b in held) <= 2 * REPLACE
    assert np.linalg.norm(held[0] - held[1]) > 1.9  # the linear part moves to its other side


@pytest.mark.parametrize(
    "loss", [LogisticLoss(), HuberLoss(), HuberHingeLoss()], ids=lambda loss: type(loss).__name__
)
@pytest.mark.parametrize("sparse", [False, True])
def test_the_certificate_holds(loss, sparse):
    """The gradient at what was found, in 113 bits, is within the tolerance; and rounding is within
    what was set aside for it.
    """
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (400, 5)) / 3
    design = Design.of(scipy.sparse.csr_matrix(rows) if sparse else rows)
    target = rng.integers(0, 2, (400, 1)).astype(float)
    problem = minima.CutObjective(design, loss, target, 0.6, 0.5, rng.normal(size=5) * 3)
    found = minima.minimise(problem, 1e-9)
    held = design.part(slice(None))
    exact = np.asarray(held.todense() if sparse else held).astype(np.longdouble)
    scores = exact @ found.astype(np.longdouble)[:, None]
    if isinstance(loss, LogisticLoss):
        slopes = 1 / (1 + np.exp(-scores)) - target
    elif isinstance(loss, HuberLoss):
        slopes = scores - target
    else:
        sign = 2 * target - 1
        slopes = -sign * np.clip(1.5 - sign * scores, 0, 1)
    gradient = (exact.T @ np.clip(slopes, -0.6, 0.6))[:, 0] + 0.5 * found + problem.term
    assert float(np.linalg.norm(gradient)) <= 1e-9
    assert float(np.linalg.norm(gradient - problem.gradient(found))) <= problem.lost(found)


def test_a_minimum_that_is_not_reached_is_refused():
    rng = np.random.default_rng(0)
    design = Design.of(rng.uniform(-1, 1, (100, 3)) / 2)
    problem = minima.CutObjective(design, LogisticLoss(), np.ones((100, 1)), 1.0, 0.1, np.zeros(3))
    with pytest.raises(InvalidInput, match="must be reached"):
        minima.minimise(problem, 1e-15)


def test_objective_perturbation_without_noise_is_the_plain_minimum():
    """With hardly any noise and the same ridge the weights are scikit-learn's."""
    rng = np.random.default_rng(0)
    given = rng.uniform(-1, 1, (500, 3))
    labels = (given @ [2.0, -1.0, 0.5] + rng.logistic(size=500) > 0).astype(int)
    made = LogisticRegression(
        epsilon=5e3,
        bounds=(-1, 1),
        classes=[0, 1],
        solver="objective",
        alpha=5.0,
        fit_intercept=False,
        random_state=0,
    ).fit(given, labels)
    plain = Plain(C=1 / 5.0, fit_intercept=False, tol=1e-10).fit(given, labels)
    assert np.allclose(made.coef_, plain.coef_, atol=0.05)


def test_the_event_of_a_minimum_holds_all_gaussian_releases_beside_it():
    made = LogisticRegression(schema=SCHEMA, solver="objective", random_state=0).fit(X, y)
    claim = made.report_["sections"][0]["claim"]
    whole = made.report_["accesses"]["covered"][0]["event"]
    assert whole["kind"] == "objective-perturbation"
    beside = [
        r["event"]["noise_multiplier"] for r in claim["rounds"] if r["event"]["kind"] == "gaussian"
    ]
    assert whole["beside"] == pytest.approx(math.sqrt(sum(1 / m**2 for m in beside)), rel=1e-9)
    assert whole["one_sided"] is True
    rows = {row["what"]: row["holds"] for row in made.report_["sections"][0]["assumptions"]}
    assert rows == {
        "contribution": "yes",
        "domain": "yes",
        "convexity": "yes",
        "slopes": "yes",
        "optimum": "yes",
    }


def test_the_curvature_that_is_billed_is_that_of_the_rows_as_they_are():
    """A row of norm R has a curvature of R^2 / 4, over alpha: forgetting the square is a known
    mistake.
    """
    norm, alpha = 3.0, 60.0
    made = LogisticRegression(
        bounds=(-1, 1), classes=[0, 1], solver="objective", norm=norm, alpha=alpha, random_state=0
    )
    made.fit(np.random.default_rng(0).uniform(-1, 1, (200, 12)), np.arange(200) % 2)
    billed = made.report_["accesses"]["covered"][0]["event"]["curvature"]
    assert 0.25 * (norm**2 + 1) / alpha <= billed <= 0.25 * (norm**2 + 1) / alpha * (1 + 1e-6)


def test_the_linear_term_is_bound_to_the_records_before_it_is_drawn(tmp_path, monkeypatch):
    from dpfy.estimators import fitting
    from dpfy.runs.run import Run

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "finish", killed)
    settings = {"schema": SCHEMA, "solver": "objective"}
    with pytest.raises(KeyboardInterrupt):
        LogisticRegression(run=tmp_path / "run", **settings).fit(X, y)
    monkeypatch.undo()
    again = Run(tmp_path / "run", resume=True)
    with pytest.raises(InvalidInput, match="must be what the run had"):
        LogisticRegression(run=again, **settings).fit(X[1:], y[1:])
    assert LogisticRegression(run=again, **settings).fit(X, y).score(*TEST) > 0.5


def test_the_random_term_is_normal_and_on_its_grid(monkeypatch):
    """Of 4,000 numbers the mean square is within five deviations of one; it lies on whole multiples
    of 2^-40.
    """
    from dpfy.core.randomness import Randomness
    from dpfy.core.values import mock_permit
    from dpfy.estimators.claim import FitClaim, ReleaseRound
    from dpfy.estimators.fitting import FitSession

    claim = FitClaim(
        "a", "b", (), (ReleaseRound("term", events.ObjectivePerturbation(2.0, 0.1), 1.0),)
    )

    class Folder:
        randomness = Randomness.for_tests(1)

        def begin(self, name):
            return mock_permit(claim.event, 1, name)

    drawn = FitSession(Folder(), claim, False).draw("term", 4000, lambda: ())
    assert abs((drawn**2).mean() - 1) < 5 * math.sqrt(2 / 4000)
    assert np.array_equal(np.ldexp(drawn, 40), np.rint(np.ldexp(drawn, 40)))


@pytest.mark.parametrize("pull", [0.0, 0.05])
def test_bolt_on_descent_parts_neighbours_by_no_more_than_its_bound(pull):
    """Plain descent on neighbours that differ in the record of the last batch, the worst place,
    many times over.
    """
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(20):
        rows = rng.normal(size=(200, 3))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        target = rng.integers(0, 2, 200).astype(float)
        ends = []
        for sign in (1, -1):
            rows[-1], target[-1] = sign * np.array([1.0, 0, 0]), 1.0
            weights = np.zeros(3)
            for _pass in range(4):
                for start in range(0, 200, bolt_on.BATCH):
                    part = slice(start, start + bolt_on.BATCH)
                    slope = 1 / (1 + np.exp(-rows[part] @ weights)) - target[part]
                    weights = weights - 1.0 * (
                        rows[part].T @ slope / bolt_on.BATCH + pull * weights
                    )
            ends.append(weights)
        bound = bolt_on.apart(1.0, 1.0, pull, 4, 4, 10.0)
        worst = max(worst, float(np.linalg.norm(ends[0] - ends[1])) / bound)
    assert 0.2 < worst <= 1


REFUSED = [
    (LogisticRegression, {"solver": "statistics"}, Unsupported, "no function of second moments"),
    (LogisticRegression, {"solver": "bolt-on"}, Unsupported, "replace-one"),
    (LogisticRegression, {"solver": "objective", "alpha": 0.0}, InvalidInput, "strong convexity"),
    (
        LogisticRegression,
        {"solver": "objective", "alpha": 0.5},
        InvalidInput,
        "must be at least 0.\\d+ for solver='objective'",
    ),
    (LogisticRegression, {"solver": "output", "alpha": 0.0}, InvalidInput, "strong convexity"),
    (LogisticRegression, {"solver": "objective", "delta": 0.0}, Unsupported, "delta above 0"),
    (LogisticRegression, {"solver": "gradient", "delta": 0.0}, Unsupported, "l1"),
    (LinearSVC, {"solver": "functional"}, Unsupported, "no expansion"),
]


@pytest.mark.parametrize(("kind", "settings", "problem", "said"), REFUSED)
def test_what_has_no_proof_is_refused_and_spends_nothing(kind, settings, problem, said, tmp_path):
    with pytest.raises(problem, match=said) as refusal:
        kind(schema=SCHEMA, ledger=tmp_path / "people.jsonl", **settings).fit(X, y)
    assert "\n" not in str(refusal.value)
    from dpfy.core.ledger import Ledger

    assert (
        not (tmp_path / "people.jsonl").exists()
        or not Ledger.read(tmp_path / "people.jsonl").permits()
    )


@pytest.mark.parametrize("solver", ["objective", "approximate-minima", "output", "bolt-on"])
def test_proofs_for_one_score_refuse_several_classes(solver):
    with pytest.raises(Unsupported, match="one linear score"):
        LogisticRegression(
            bounds=(0, 1), classes=[0, 1, 2], solver=solver, adjacency=adjacency(solver)
        ).fit(np.zeros((9, 2)), np.arange(9) % 3)


def test_the_functional_mechanism_has_a_pure_guarantee():
    made = LogisticRegression(
        epsilon=8.0, delta=0.0, schema=SCHEMA, solver="functional", norm=2.0, random_state=0
    ).fit(X, y)
    assert (made.report_["guarantee"]["delta"], made.report_["guarantee"]["accountant"]) == (
        0.0,
        "basic",
    )
    assert made.report_["guarantee"]["epsilon"] == pytest.approx(8.0)
    assert roc_auc_score(TEST[1] == "yes", made.decision_function(TEST[0])) > 0.8


def test_needs_are_functions_of_the_task_alone():
    columns = FeatureColumns((in_range("a", -1, 1), in_range("b", -1, 1)))
    for solver in SOLVERS.values():
        task = LinearTask(
            LogisticLoss(),
            RowLayout(columns),
            FitTerms(1.0, 1e-6, Adjacency.REPLACE_ONE),
            1,
            norm=1.0,
        )
        shown = [
            [(n.name, n.bound, n.releases, n.share, n.how) for n in solver.needs(task)]
            for _ in range(2)
        ]
        assert shown[0] == shown[1]
        assert {n for n, *_ in shown[0]} >= set(solver.bits(task))
