"""Trees and boosting: contributions within their bounds, smoothing as dense matrices do it, leaves
as a walk finds them, and models that learn.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import r2_score, roc_auc_score

import dpfy
from dpfy.core.errors import DpfyError
from dpfy.estimators import (
    AdditiveBoostingClassifier,
    AdditiveBoostingRegressor,
    DecisionTreeClassifier,
    DecisionTreeRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from dpfy.estimators.trees import leaves, residuals, top_down
from dpfy.estimators.trees.cells import FeatureBins, cells, grouped, grown
from dpfy.estimators.trees.residuals import (
    FAR,
    ONE,
    RESIDUAL_BITS,
    SCORE_BITS,
    ClassResiduals,
    NumberResiduals,
)
from dpfy.report.verify import verify
from dpfy.runs.run import Run
from dpfy.tables.columns import Category, Label, Number

sys.path.insert(0, str(Path(__file__).parent))
from people import SCHEMA, people
from replay import distances

X, y = people(3000)
CLASSIFIERS = (
    AdditiveBoostingClassifier,
    GradientBoostingClassifier,
    RandomForestClassifier,
    DecisionTreeClassifier,
)
REGRESSORS = (
    AdditiveBoostingRegressor,
    GradientBoostingRegressor,
    RandomForestRegressor,
    DecisionTreeRegressor,
)


def scores_of(loss, count, rng):
    return [rng.integers(-FAR - 50, FAR + 50, count).astype(np.int32) for _ in range(loss.width)]


@pytest.mark.parametrize(
    "loss", [ClassResiduals(2), ClassResiduals(3), ClassResiduals(11), NumberResiduals(-3.0, 12.0)]
)
@pytest.mark.parametrize("clip", [0.05, 0.5, 0.7071, 2.0])
def test_residuals_and_curvatures_are_whole_steps_of_norm_at_most_one(loss, clip):
    rng = np.random.default_rng(0)
    target = (
        rng.uniform(-9, 20, 4000)
        if isinstance(loss, NumberResiduals)
        else rng.integers(0, loss.classes, 4000)
    )
    scores = scores_of(loss, 4000, rng)
    scores[0][:1000] //= 512  # many are uncertain, too
    for found in (loss.residuals(target, scores, clip), loss.curvatures(scores)):
        steps = np.stack(found, axis=1)
        assert np.array_equal(steps, np.rint(steps))
        assert (np.square(steps).sum(axis=1) <= ONE**2).all()
        assert np.linalg.norm(steps, axis=1).max() > (0.7 if clip < 1 else 0.4) * ONE


@pytest.mark.parametrize("loss", [ClassResiduals(2), ClassResiduals(5), NumberResiduals(0.0, 1.0)])
def test_what_a_record_adds_does_not_depend_on_where_it_stands(loss):
    rng = np.random.default_rng(1)
    target = (
        rng.random(997) if isinstance(loss, NumberResiduals) else rng.integers(0, loss.classes, 997)
    )
    scores = scores_of(loss, 997, rng)
    whole = np.stack(loss.residuals(target, scores, 0.5))
    for part in (slice(3, None), slice(None, None, 7), slice(500, 501)):
        assert np.array_equal(
            np.stack(loss.residuals(target[part], [s[part] for s in scores], 0.5)), whole[:, part]
        )


@pytest.mark.parametrize("classes", [2, 4])
def test_clipped_residuals_balance_at_scores_whose_probabilities_are_put_right(classes):
    """At the score where the expected residual is zero, `log_joint` gives the true shares back."""
    loss, rng = ClassResiduals(classes), np.random.default_rng(2)
    for _ in range(3):
        shares = rng.dirichlet(np.full(classes, 2.0))
        begin = loss.begin(shares * 1e6)
        score = begin.score.copy()
        for _ in range(1000):
            steps = [np.full(classes, s, np.int32) for s in residuals.steps(score)]
            residual = (
                shares
                @ np.stack(loss.residuals(np.arange(classes), steps, begin.clip), axis=1)
                * 2.0**-RESIDUAL_BITS
            )
            score += 0.2 * residual
        found = np.exp(loss.log_joint(score[None], begin.clip))[0]
        assert found / found.sum() == pytest.approx(shares, abs=0.02)


def dense(links, columns, level, spike):
    """The covariance of a function on groups, entry by entry."""
    size, found = len(links), np.zeros((len(links), len(links)))
    for i in range(size):
        for j in range(i, size):
            between = (
                links[i + 1 : j + 1].sum() if not np.isinf(links[i + 1 : j + 1]).any() else np.inf
            )
            found[i, j] = found[j, i] = level[i] * level[j] * np.exp(-between / leaves.REACH)
    return found + np.diag(spike**2)


def test_smoothing_is_that_of_dense_matrices():
    rng = np.random.default_rng(3)
    starts = np.array([0, 7, 9, 20])
    links = rng.uniform(0.01, 0.3, 20)
    links[[0, 6, 7, 8, 9, 15]] = np.inf
    per = np.diff(starts)
    level, spike = np.repeat([0.5, 2.0, 1.0], per), np.repeat([0.3, 0.02, 1.0], per)
    weight, variance = rng.uniform(0.1, 50, (20, 2)), rng.uniform(1, 90, (20, 2))
    sums = rng.normal(0, 40, (20, 2))
    chain = leaves.TridiagonalPrecision.of(links, starts)
    found = leaves.smooth(chain, sums, weight, variance, level, spike)
    deviation = leaves.deviation(chain, weight, variance, level, spike)
    prior, likelihood = dense(links, starts, level, spike), np.zeros(3)
    for k in range(2):
        h = weight[:, k]
        seen = h[:, None] * prior * h + np.diag(variance[:, k])
        gain = prior @ np.diag(h) @ np.linalg.inv(seen)
        assert found.mean[:, k] == pytest.approx(gain @ sums[:, k], rel=1e-9)
        assert deviation[:, k] ** 2 == pytest.approx(
            np.diag(prior - gain @ np.diag(h) @ prior), rel=1e-9
        )
        for f, (a, b) in enumerate(pairwise(starts)):
            part, z = seen[a:b, a:b], sums[a:b, k]
            likelihood[f] -= 0.5 * (np.linalg.slogdet(part)[1] + z @ np.linalg.solve(part, z))
    assert found.likelihood == pytest.approx(likelihood, rel=1e-9)


def test_the_likeliest_level_is_near_the_true_one():
    rng = np.random.default_rng(4)
    starts, links = np.array([0, 400, 800]), np.full(800, np.inf)
    level = np.repeat([0.1, 3.0], 400)
    weight = np.full((800, 1), 30.0)
    sums = weight * (level * rng.normal(size=800))[:, None] + 5 * rng.normal(size=(800, 1))
    slow, spike = leaves.likeliest(
        leaves.TridiagonalPrecision.of(links, starts), sums, weight, np.full((800, 1), 25.0)
    )
    found = np.sqrt(slow**2 + spike**2)  # without links both parts are independent
    assert found[0] == pytest.approx(0.1, rel=0.6)
    assert found[-1] == pytest.approx(3.0, rel=0.6)


def test_cells_that_stand_out_are_groups_of_their_own():
    fine = np.zeros(65)
    fine[20], fine[40] = 100.0, 90.0
    groups = grouped((65,), (True,), 4, [fine, np.array([5.0, 105.0, 95.0, 5.0])], [10.0, 30.0])
    group = groups.of_cell[0]
    assert len(group) == 65
    for alone in (20, 40):
        assert (group == group[alone]).sum() == 1
    assert group[0] == group[15] != group[16] == group[19] != group[21]
    assert group[64] == group[63] + 1  # a missing value
    assert groups.counts[group[20]] == 100.0
    assert groups.size == 9
    assert np.isinf(groups.links[[0, 8]]).all()
    assert np.isfinite(groups.links[1:8]).all()


def data_of(table=X, labels=y, schema=SCHEMA):
    made = AdditiveBoostingClassifier(schema=schema)
    return made._read(table, labels, made._public(table, labels))


@pytest.mark.parametrize("counts", [False, True])
def test_leaves_of_random_trees_are_those_of_a_walk(counts):
    held = cells(data_of(), 16)
    given = [held.counts(f).astype(float) for f in range(len(held.sizes))] if counts else None
    trees = grown(held.sizes, held.ordered, 9, 5, 3, given)
    for t in range(trees.count):
        leaf = trees.leaf(t, held.places)
        for i in range(0, 3000, 271):
            bits = [
                trees.right[t, level, held.places[c][i]] for level, c in enumerate(trees.columns[t])
            ]
            assert leaf[i] == sum(int(b) << k for k, b in enumerate(bits))
        assert sorted(trees.columns[t][:3]) == [0, 1, 2]  # no column twice while others are left
    asked = np.bincount(trees.columns.ravel(), minlength=3)
    assert asked.max() - asked.min() <= 2


def test_the_structure_is_public_and_the_noise_is_not_part_of_it():
    one, other = (
        GradientBoostingClassifier(schema=SCHEMA, n_estimators=5, random_state=s).fit(X, y)
        for s in (0, 1)
    )
    assert np.array_equal(one._trees.right, other._trees.right)
    assert not np.array_equal(one.values_, other.values_)
    assert not np.array_equal(
        one._trees.right,
        GradientBoostingClassifier(schema=SCHEMA, n_estimators=5, structure=1)
        .fit(X, y)
        ._trees.right,
    )


def test_leaves_of_a_tree_from_the_top_are_those_of_a_walk():
    made = DecisionTreeClassifier(schema=SCHEMA, max_depth=4, random_state=0).fit(X, y)
    held = cells(data_of(), 32)
    leaf = made._splits.leaf(held.places)
    for i in range(0, 3000, 271):
        node = 0
        while node < len(made._splits.columns):
            node = (
                2 * node + 1 + made._splits.right[node, held.places[made._splits.columns[node]][i]]
            )
        assert leaf[i] == node - len(made._splits.columns)


@pytest.mark.parametrize("classes", [2, 5, 0])
def test_one_record_moves_no_score_of_a_split_by_more_than_its_bound(classes):
    """Small nodes, where it moves most: every place that a record can be added to."""
    rng, worst = np.random.default_rng(5), 0.0
    bound = (1.0 if classes else 2.0) + top_down.ROUNDED
    for _ in range(60):
        n = int(rng.integers(0, 5))
        places = (
            rng.integers(0, 4, n + 1).astype(np.uint16),
            rng.integers(0, 3, n + 1).astype(np.uint16),
        )
        labels = rng.integers(0, max(classes, 1), n + 1)
        numbers = rng.choice([-1.0, 1.0, 0.5], n + 1)
        added = [(labels == k).astype(float) for k in range(classes)] if classes else [numbers]
        at = rng.integers(0, 2, n + 1)
        whole = top_down.scores(FeatureBins(places, (4, 3), (True, False)), at, 2, added)
        less = FeatureBins(tuple(p[:-1] for p in places), (4, 3), (True, False))
        moved = whole - top_down.scores(less, at[:-1], 2, [a[:-1] for a in added])
        assert (moved[1 - at[-1]] == 0).all()  # the other node has not met the record
        worst = max(worst, float(np.abs(moved).max()))
    assert bound / 2 < worst <= bound


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_one_record_of_many_classes_changes_no_release_by_more_than_its_bound(kind, adjacency):
    rng = np.random.default_rng(6)
    table, labels = rng.uniform(0, 1, (120, 3)), rng.integers(0, 4, 120)
    table[::9, 1] = np.nan
    small = {"rounds": 3} if kind is AdditiveBoostingClassifier else {"n_estimators": 4}
    made = kind(
        bounds=(0, 1),
        classes=range(4),
        adjacency=adjacency,
        random_state=0,
        **({} if kind is DecisionTreeClassifier else small),
    )
    for row in ([np.nan, np.nan, np.nan], [5.0, -5.0, 1.0]):
        other, changed = table.copy(), labels.copy()
        other[7], changed[7] = row, (labels[7] + 1) % 4
        if adjacency == "replace-one":
            moved = distances(made, (table, labels), (other, changed))
            assert max(d for _, d in moved) <= 2 * (1 + 1e-12), moved
        else:
            keep = np.arange(120) != 7
            moved = distances(made, (other, changed), (other[keep], changed[keep]))
            assert max(d for _, d in moved) <= 1 + 1e-12, moved
        assert max(d for _, d in moved) > 0.5


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers_learn(kind):
    test, truth = people(2000, seed=9)
    made = kind(schema=SCHEMA, epsilon=4.0, random_state=0).fit(X, y)
    found = made.predict_proba(test)
    assert roc_auc_score(truth == "yes", found[:, 1]) > (
        0.92 if kind is not DecisionTreeClassifier else 0.9
    )
    assert (made.predict(test) == truth).mean() > 0.83
    assert found[:, 1].mean() == pytest.approx((truth == "yes").mean(), abs=0.06)
    assert str(made.explain()).splitlines()[1].startswith("age")


@pytest.mark.parametrize("kind", REGRESSORS)
def test_regressors_learn(kind):
    rng = np.random.default_rng(7)
    table = rng.uniform(-1, 1, (4000, 4))
    target = 10 + 20 * table[:, 0] + 15 * np.sin(4 * table[:, 1]) + rng.normal(0, 3, 4000)
    made = kind(bounds=(-1, 1), target_bounds=(-60, 80), epsilon=4.0, random_state=0).fit(
        table[:3000], target[:3000]
    )
    found = made.predict(table[3000:])
    assert r2_score(target[3000:], found) > (0.6 if kind in REGRESSORS[:2] else 0.4)
    assert found.min() >= -60
    assert found.max() <= 80


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_many_classes_missing_values_and_a_pure_guarantee(kind):
    rng = np.random.default_rng(8)
    table = rng.uniform(0, 1, (4000, 3))
    labels = np.floor(table[:, 0] * 3).astype(int)
    hidden = rng.random(4000) < 0.3
    table[hidden, 0] = np.nan
    labels[hidden] = 2  # that the number is missing tells the class
    made = kind(bounds=(0, 1), classes=(0, 1, 2), delta=0.0, epsilon=8.0, random_state=0).fit(
        table, labels
    )
    assert made.report_["guarantee"]["delta"] == 0
    assert made.report_["guarantee"]["epsilon"] == pytest.approx(8.0)
    plain = np.array([[0.1, 0.5, 0.5], [0.5, 0.5, 0.5], [np.nan, 0.5, 0.5]])
    assert made.predict(plain).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *REGRESSORS])
@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_every_fit_verifies_and_spends_what_was_asked(kind, adjacency, tmp_path):
    more = (
        {"schema": SCHEMA} if kind in CLASSIFIERS else {"bounds": (17, 90), "target_bounds": (0, 1)}
    )
    table, target = (
        (X, y) if kind in CLASSIFIERS else (X[["age"]], (y == "yes").to_numpy().astype(float))
    )
    more |= {"max_depth": 3} if kind in (DecisionTreeClassifier, DecisionTreeRegressor) else {}
    made = kind(epsilon=0.8, adjacency=adjacency, random_state=0, **more).fit(table, target)
    assert [f for f in verify(made.release_.save(tmp_path / "run")) if not f.holds] == []
    assert 0.8 * (1 - 1e-4) <= made.report_["guarantee"]["epsilon"] <= 0.8


def test_columns_in_turn_cost_the_same_and_learn_the_same():
    one, other = (
        AdditiveBoostingClassifier(schema=SCHEMA, cyclic=c, epsilon=4.0, random_state=0).fit(X, y)
        for c in (False, True)
    )
    spent = [r["event"]["noise_multiplier"] for r in one.report_["sections"][0]["rounds"]]
    turns = [r["event"]["noise_multiplier"] for r in other.report_["sections"][0]["rounds"]]
    assert turns[1] == pytest.approx(spent[1] * np.sqrt(3))
    found = [roc_auc_score(y == "yes", made.predict_proba(X)[:, 1]) for made in (one, other)]
    assert found[0] == pytest.approx(found[1], abs=0.01)


def test_scores_that_are_kept_up_to_date_are_those_computed_anew():
    from dpfy.estimators.trees import additive

    data = data_of()
    held, loss = cells(data, 64), residuals.of(data.aim)
    groups = grouped(
        held.sizes,
        held.ordered,
        8,
        [np.zeros(n) for n, fine in additive.counted_cells(held.sizes, held.ordered, 8)],
        [1.0] * 9,
    )
    rounds = additive.BoostingRounds(held, groups, loss, data, loss.begin(np.array([10.0, 5.0])))
    rng = np.random.default_rng(0)
    for _ in range(4):
        function = rng.normal(size=(groups.size, 1)) * 3
        found = rounds.scores(function)[0]
        begin = int(residuals.steps(rounds.beginning.score)[0])
        anew = [
            begin
            + sum(
                int(
                    residuals.steps(
                        function[groups.starts[f] + groups.of_cell[f][held.places[f][i]]]
                    )[0]
                )
                for f in range(3)
            )
            for i in range(0, 3000, 97)
        ]
        assert found[::97].tolist() == anew
    assert rounds.sums(function, [1]).shape == (groups.starts[2] - groups.starts[1], 1)


def test_bands_hold_what_noise_does():
    """Most values of functions fitted with noise lie within two deviations of those fitted with
    hardly any.
    """
    truth = AdditiveBoostingClassifier(schema=SCHEMA, epsilon=1e4, max_bins=32).fit(X, y).explain()
    within = []
    for seed in range(6):
        made = (
            AdditiveBoostingClassifier(schema=SCHEMA, epsilon=1.0, max_bins=32, random_state=seed)
            .fit(X, y)
            .explain()
        )
        for a, b in zip(truth.shapes, made.shapes, strict=True):
            if len(a.values) == len(b.values):
                likely = a.counts > 30
                within += (np.abs(a.values - b.values) <= 2 * b.deviation)[likely].ravel().tolist()
    assert np.mean(within) > 0.85


def test_shapes_tell_ranges_in_their_own_units_and_draw_every_column():
    made = AdditiveBoostingClassifier(schema=SCHEMA, epsilon=8.0, random_state=0).fit(X, y)
    shapes = made.explain()
    table = str(shapes["gain"])
    assert "0 to " in table
    assert "1000" in table
    assert "missing" in table
    assert "nurse" in str(shapes["job"])
    picture = shapes.svg()
    assert all(f">{name}</text>" in picture for name in ("age", "job", "gain"))
    assert picture.count("<polygon") == 3
    with pytest.raises(DpfyError, match="column"):
        shapes["height"]


def test_names_of_columns_cannot_leave_the_picture():
    schema = (Number("<b>", 0, 1), Category("job", ("<i>", "b")), Label("l", ("no", "yes")))
    table = {"<b>": [0.1, 0.9] * 50, "job": ["<i>", "b"] * 50}
    import pandas

    made = AdditiveBoostingClassifier(schema=schema).fit(
        pandas.DataFrame(table), ["no", "yes"] * 50
    )
    assert "<b>" not in made.explain().svg()


def test_a_killed_fit_of_many_rounds_resumes_to_the_same_release(tmp_path, monkeypatch):
    whole = AdditiveBoostingClassifier(
        schema=SCHEMA, run=Run(tmp_path / "whole", seed=1), rounds=5
    ).fit(X, y)
    release, done = dpfy.estimators.fitting.FitSession.release, []

    def killed(self, *more):
        done.append(release(self, *more))
        if len(done) == 4:
            raise KeyboardInterrupt
        return done[-1]

    monkeypatch.setattr(dpfy.estimators.fitting.FitSession, "release", killed)
    with pytest.raises(KeyboardInterrupt):
        AdditiveBoostingClassifier(schema=SCHEMA, run=Run(tmp_path / "run", seed=1), rounds=5).fit(
            X, y
        )
    monkeypatch.undo()
    again = AdditiveBoostingClassifier(
        schema=SCHEMA, run=Run(tmp_path / "run", seed=1, resume=True), rounds=5
    ).fit(X, y)
    assert np.array_equal(again.function_, whole.function_)


BAD = [
    (AdditiveBoostingClassifier, {"rounds": 0}, "rounds"),
    (AdditiveBoostingClassifier, {"learning_rate": 0.0}, "learning_rate"),
    (AdditiveBoostingClassifier, {"bins": 1}, "bins"),
    (AdditiveBoostingClassifier, {"bins": 64, "max_bins": 32}, "max_bins"),
    (GradientBoostingClassifier, {"n_estimators": 0}, "n_estimators"),
    (GradientBoostingClassifier, {"max_depth": 13}, "max_depth"),
    (GradientBoostingClassifier, {"structure": -1}, "structure"),
    (RandomForestClassifier, {"n_estimators": 2.5}, "n_estimators"),
    (DecisionTreeClassifier, {"decay": 0}, "decay"),
    (DecisionTreeClassifier, {"leaf_share": 1.0}, "leaf_share"),
]


@pytest.mark.parametrize(("kind", "settings", "said"), BAD)
def test_bad_settings_are_one_line_and_spend_nothing(kind, settings, said, tmp_path):
    with pytest.raises(DpfyError, match=said) as problem:
        kind(schema=SCHEMA, ledger=tmp_path / "people.jsonl", **settings).fit(X, y)
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "people.jsonl").exists()


def test_extreme_tables_are_fitted_like_any():
    """A constant column, one class only, fewer rows than columns, one row, budgets from tiny to
    huge.
    """
    for epsilon in (1e-3, 1e3):
        for table, labels in (
            (np.zeros((50, 2)), np.zeros(50, int)),
            (np.random.default_rng(0).uniform(0, 1, (3, 30)), np.array([0, 1, 0])),
            (np.full((1, 2), np.nan), np.array([1])),
        ):
            for kind in CLASSIFIERS:
                small = {} if kind is AdditiveBoostingClassifier else {"max_depth": 2}
                found = (
                    kind(bounds=(0, 1), classes=(0, 1), epsilon=epsilon, **small)
                    .fit(table, labels)
                    .predict_proba(table)
                )
                assert np.isfinite(found).all()
                assert found.sum(axis=1) == pytest.approx(1.0)


def test_scores_never_leave_their_range():
    assert residuals.steps(np.array([1e9, -1e9, 0.25])).tolist() == [
        FAR,
        -FAR,
        1 << (SCORE_BITS - 2),
    ]
