"""Soft trees: leaves share out every row, gradients are those of an oracle, they learn, and their
folders are billed and verified.
"""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pandas
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core.errors import DpfyError
from dpfy.core.ledger import Ledger
from dpfy.estimators import SoftTreeClassifier, SoftTreeRegressor, fitting, load
from dpfy.estimators.linear.design import BITS, Design, RowLayout
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.trees import residuals
from dpfy.report.verify import verify
from dpfy.runs.run import Run
from dpfy.tables.columns import Category, Label, Number
from dpfy_lab.estimators import soft_trees as soft
from dpfy_lab.estimators.forward_pass import Ensemble, ForwardPass, smooth_step
from dpfy_lab.estimators.soft_tree_module import SoftTrees
from dpfy_lab.estimators.soft_tree_module import smooth_step as torch_step

SIZE = 3000
JOBS = tuple(f"job number {k}" for k in range(60))
"""More than a line of a card holds."""


def boxes(size: int = SIZE, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Numbers between -1 and 1; a class that no line tells."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (size, 4))
    return X, ((X[:, 0] > 0) ^ (X[:, 1] > 0)).astype(np.int64)


def made(**more):
    settings = {
        "bounds": (-1, 1),
        "classes": (0, 1),
        "epsilon": 4.0,
        "delta": 1e-5,
        "random_state": 0,
    }
    return SoftTreeClassifier(**settings | more)


X, y = boxes()
FITTED = made().fit(X, y)


def holds(run) -> bool:
    return all(finding.holds for finding in verify(run))


def test_a_step_is_smooth_and_ends():
    scores = torch.linspace(-1, 1, 401, dtype=torch.float64, requires_grad=True)
    found = torch_step(scores)
    (slope,) = torch.autograd.grad(found.sum(), scores)
    assert found[scores <= -0.5].abs().max() == 0
    assert (found[scores >= 0.5] == 1).all()
    assert (found.detach().diff() >= 0).all()
    value, closed = smooth_step(scores.detach().numpy())
    assert value == pytest.approx(found.detach().numpy(), abs=1e-15)
    inside = (scores.abs() < 0.5).numpy()
    assert closed[inside] == pytest.approx(slope.numpy()[inside], abs=1e-12)
    assert closed[~inside] == pytest.approx(0, abs=1e-12)


def random_trees(trees, depth, outputs, width, seed=0):
    """A module of the oracle, and the same weights as the estimator keeps them: splits level by
    level, records last.
    """
    rng = np.random.default_rng(seed)
    oracle = SoftTrees(width - 1, outputs, trees, depth).double()
    shape = Ensemble(trees, depth, outputs)
    splits, leaves = rng.normal(size=(width, shape.splits)) / 2, rng.normal(size=shape.values)
    with torch.no_grad():
        levels = [
            part.transpose(1, 0, 2) for part in _levels(splits.T, trees, depth)
        ]  # [nodes, trees, width]
        mine = np.concatenate(levels).transpose(1, 0, 2).reshape(-1, width)  # tree by tree
        oracle.splits.weight.copy_(torch.from_numpy(mine[:, 1:]))
        oracle.splits.bias.copy_(torch.from_numpy(mine[:, 0]))
        oracle.leaves.weight.copy_(torch.from_numpy(leaves.reshape(-1, outputs).T))
    return oracle, shape, splits, leaves


def _levels(rows, trees, depth):
    ends = [trees * (2**level - 1) for level in range(depth + 1)]
    return [
        rows[a:b].reshape(trees, b // trees - a // trees, -1) for a, b in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize(
    ("trees", "depth", "outputs"), [(1, 1, 1), (3, 2, 1), (2, 3, 3), (5, 4, 2)]
)
def test_scores_shares_and_derivatives_are_those_of_the_oracle(trees, depth, outputs):
    oracle, shape, splits, leaves = random_trees(trees, depth, outputs, width=6)
    rows = np.concatenate([np.ones((40, 1)), np.random.default_rng(1).normal(size=(40, 5))], axis=1)
    passed = ForwardPass(shape, np.ascontiguousarray((rows @ splits).T), leaves)
    found = oracle(torch.from_numpy(rows[:, 1:]))
    assert pytest.approx(found.detach().numpy(), abs=1e-12) == passed.scores.T
    assert passed.leaves.reshape(trees, -1, 40).sum(axis=1) == pytest.approx(1.0), (
        "shares of the leaves of a tree add up to one"
    )
    weights = np.random.default_rng(2).normal(size=(outputs, 40))
    (found * torch.from_numpy(weights.T)).sum().backward()
    closed = (passed.derivatives(list(weights)) @ rows).reshape(-1, 6)
    mine = (
        np.concatenate([p.transpose(1, 0, 2) for p in _levels(closed, trees, depth)])
        .transpose(1, 0, 2)
        .reshape(-1, 6)
    )
    assert mine[:, 1:] == pytest.approx(oracle.splits.weight.grad.numpy(), abs=1e-11)
    assert mine[:, 0] == pytest.approx(oracle.splits.bias.grad.numpy(), abs=1e-11)
    in_leaves = np.stack([passed.leaves @ w for w in weights])
    assert in_leaves == pytest.approx(oracle.leaves.weight.grad.numpy(), abs=1e-11)


@pytest.mark.parametrize(("classes", "norm"), [(2, 0.2), (2, 5.0), (3, 0.5)])
def test_the_released_sum_is_that_of_shortened_gradients_one_by_one(classes, norm):
    """Against a float64 oracle that makes the gradient of every record by automatic differentiation
    and shortens it: the grid and single precision take away at most 2^-13 of a step a coordinate
    and record, always towards zero.
    """
    rng = np.random.default_rng(3)
    rows, labels = rng.uniform(-1, 1, (60, 3)), rng.integers(classes, size=60)
    loss, layout = (
        residuals.ClassResiduals(classes),
        RowLayout(made(classes=tuple(range(classes)))._public(rows, labels).columns),
    )
    data = EncodedRecords(layout.columns, rows, np.empty((60, 0), np.int64))
    design, begin = Design(layout, data, layout.largest), loss.begin(np.full(classes, 20.0))
    oracle, shape, splits, leaves = random_trees(3, 2, loss.width, width=4, seed=4)
    problem = soft._Problem(loss, begin, shape, layout, design, design.squares(), labels)
    found = problem.gradient(soft._Weights(splits, leaves), norm)
    exact = np.zeros_like(found)
    held = design.part(slice(0, 60)) * design.radius  # the rows as they stand on the grid
    for k in range(60):
        oracle.zero_grad()
        scores = oracle(torch.from_numpy(held[[k], 1:]))
        steps = [
            np.array([a + b])
            for a, b in zip(
                residuals.steps(begin.score),
                residuals.steps(scores.detach().numpy()[0]),
                strict=True,
            )
        ]
        left = (
            np.concatenate(loss.residuals(labels[[k]], steps, begin.clip)) * 2.0**-12 * begin.clip
        )
        (scores[0] * torch.from_numpy(left)).sum().backward()
        mine = np.concatenate(
            [
                oracle.splits.bias.grad.numpy()[:, None] * held[k, 0],
                oracle.splits.weight.grad.numpy(),
            ],
            axis=1,
        )
        by_level = [mine.reshape(3, 3, 4)[:, a:b].reshape(-1, 4) for a, b in ((0, 1), (1, 3))]
        own = (
            np.concatenate(
                [np.concatenate(by_level).T.ravel(), oracle.leaves.weight.grad.numpy().T.ravel()]
            )
            / norm
        )
        exact += own / max(float(np.linalg.norm(own)), 1.0)
    assert np.abs(found - exact).max() <= 60 * 2.0**-13
    assert np.array_equal(np.rint(found * 2.0**BITS), found * 2.0**BITS), (
        "the sum stands on the grid"
    )


def test_what_a_record_adds_is_within_the_bound_and_does_not_depend_on_where_it_stands():
    """Random weights, far out and not: any record, in any order of the others, adds the same
    vector, of norm one at most.
    """
    rng = np.random.default_rng(5)
    rows, labels = rng.uniform(-1, 1, (9000, 4)), rng.integers(3, size=9000)
    rows[:20] = np.sign(rows[:20])
    loss, layout = (
        residuals.ClassResiduals(3),
        RowLayout(made(classes=(0, 1, 2))._public(rows, labels).columns),
    )
    begin = loss.begin(np.array([5.0, 30.0, 70.0]))
    for scale, norm in ((0.3, 1.0), (1.0, 0.01), (1e4, 1e-6)):
        _, shape, splits, leaves = random_trees(4, 3, 3, width=5, seed=int(scale))
        weights = soft._Weights(
            scale * splits, np.clip(scale * leaves, -soft.FARTHEST, soft.FARTHEST)
        )

        def total(order, weights=weights, shape=shape, norm=norm):
            data = EncodedRecords(
                layout.columns,
                np.ascontiguousarray(rows[order]),
                np.empty((len(order), 0), np.int64),
            )
            design = Design(layout, data, layout.largest)
            return soft._Problem(
                loss, begin, shape, layout, design, design.squares(), labels[order]
            ).gradient(weights, norm)

        whole = total(np.arange(9000))
        for k in (0, 7, 4444):
            alone = total(np.array([k]))
            assert np.linalg.norm(alone) <= 1
            others = rng.permutation(np.delete(np.arange(9000), k))
            assert np.array_equal(whole - total(others), alone)


def test_it_learns_what_no_line_tells():
    held, truth = boxes(2000, 1)
    assert (FITTED.predict(held) == truth).mean() > 0.9
    assert FITTED.predict_proba(held).sum(axis=1) == pytest.approx(1.0)
    assert {name for name, _ in FITTED.explain().rows[:2]} == {"x0", "x1"}


def test_it_learns_several_classes_and_numbers():
    places = (X[:, 0] > 0.2).astype(int) + (X[:, 0] > 0.6)
    model = made(classes=(0, 1, 2)).fit(X, places)
    assert (model.predict(X) == places).mean() > 0.85
    target = np.sin(3 * X[:, 0]) + X[:, 1] ** 2
    numbers = SoftTreeRegressor(
        bounds=(-1, 1), target_bounds=(-1, 2), epsilon=8.0, delta=1e-5, random_state=0, rounds=60
    )
    assert numbers.fit(X, target).score(X, target) > 0.85
    assert -1 <= numbers.predict(100 * X).min() <= numbers.predict(100 * X).max() <= 2


def test_the_module_is_trained_through_a_plan():
    module = SoftTrees(4, 2, trees=5, depth=2)
    plan = dpfy.dpsgd(records=SIZE, batch_size=600, steps=5).calibrate(epsilon=8.0, delta=1e-5)
    given = (torch.from_numpy(X.astype(np.float32)), torch.from_numpy(y))
    before = module.leaves.weight.clone()
    dpfy.fit(module, given, plan=plan, optimizer=torch.optim.Adam(module.parameters(), lr=0.05))
    assert not torch.equal(before, module.leaves.weight)


def test_the_bill_is_what_was_asked_for_and_the_card_says_what_is_public(tmp_path):
    card = FITTED.report_
    assert 0.99 * 4 <= card["guarantee"]["epsilon"] <= 4
    assert card["guarantee"]["delta"] == 1e-5
    assert "(4.000, 1e-05)" in FITTED.guarantee_
    assert holds(FITTED.release_.save(tmp_path / "run"))
    assert np.array_equal(load(tmp_path / "run").predict_proba(X), FITTED.predict_proba(X))


def test_the_same_seed_gives_the_same_trees_and_another_other_ones():
    again, other, elsewhere = (
        made().fit(X, y),
        made(random_state=1).fit(X, y),
        made(structure=1).fit(X, y),
    )
    assert np.array_equal(FITTED.predict_proba(X), again.predict_proba(X))
    assert not np.array_equal(FITTED.predict_proba(X), other.predict_proba(X))
    assert not np.array_equal(FITTED.predict_proba(X), elsewhere.predict_proba(X))
    assert not np.array_equal(
        made(random_state=None).fit(X, y).predict_proba(X),
        made(random_state=None).fit(X, y).predict_proba(X),
    )


def test_a_ledger_bounds_all_fits_together(tmp_path):
    people = tmp_path / "people.jsonl"
    first = Run(tmp_path / "one", ledger=people, budget=RenyiFilter(epsilon=4.5, delta=1e-4))
    made(random_state=None, run=first).fit(X, y)
    assert len(Ledger.read(people).permits()) == 1
    with pytest.raises(dpfy.BudgetExceeded):
        made(random_state=None, ledger=people, run=tmp_path / "two").fit(X, y)
    assert not (tmp_path / "two").exists()


def test_a_killed_fit_resumes_to_the_same_trees(tmp_path, monkeypatch):
    real, calls = fitting.FitSession.release, []

    def killed(self, *args, **more):
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return real(self, *args, **more)

    whole = made(random_state=None, run=Run(tmp_path / "whole", seed=5)).fit(X, y)
    monkeypatch.setattr(fitting.FitSession, "release", killed)
    with pytest.raises(KeyboardInterrupt):
        made(random_state=None, run=Run(tmp_path / "run", seed=5)).fit(X, y)
    monkeypatch.undo()
    resumed = made(random_state=None, run=Run(tmp_path / "run", resume=True, seed=5)).fit(X, y)
    assert np.array_equal(resumed.predict_proba(X), whole.predict_proba(X))
    assert holds(tmp_path / "run")


def test_tables_with_words_pickles_and_clones():
    rng = np.random.default_rng(2)
    table = pandas.DataFrame(
        {"age": rng.uniform(18, 80, 900), "job": rng.choice(["clerk", "nurse"], 900)}
    )
    rich = np.where((table["age"] > 50) & (table["job"] == "nurse"), "yes", "no")
    schema = (
        Number("age", 18.0, 80.0),
        Category("job", ("clerk", "nurse", *JOBS)),
        Label("rich", ("no", "yes")),
    )
    model = SoftTreeClassifier(
        schema=schema, adjacency="replace-one", epsilon=8.0, delta=1e-4, random_state=0
    )
    model.fit(table, rich)
    assert (model.predict(table) == rich).mean() > 0.9
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(table), model.predict(table))
    assert clone(model).get_params() == model.get_params()


REFUSED = [
    ({"epsilon": 0}, "epsilon"),
    ({"delta": 0}, "delta"),
    ({"n_estimators": 0}, "n_estimators"),
    ({"max_depth": 13}, "max_depth"),
    ({"rounds": 0}, "rounds"),
    ({"n_estimators": 10_000, "max_depth": 5}, "n_estimators"),
    ({"epsilon": float("nan")}, "epsilon"),
    ({"structure": -1}, "structure"),
    ({"bounds": (1, -1)}, "bounds"),
    ({"classes": (0,)}, "classes"),
]


@pytest.mark.parametrize(("more", "field"), REFUSED)
def test_what_cannot_be_is_refused_and_spends_nothing(more, field, tmp_path):
    with pytest.raises(DpfyError) as refusal:
        made(run=tmp_path / "run", **more).fit(X, y)
    assert field in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_missing_values_are_the_middle_and_searches_are_refused(tmp_path):
    wrong = X.copy()
    wrong[3, 1] = np.nan
    found = made(run=tmp_path / "run").fit(wrong, y).predict_proba(wrong)
    assert np.isfinite(found).all()
    with pytest.raises(DpfyError, match="tune"):
        GridSearchCV(made(), {"max_depth": [2, 3]}, cv=2, error_score="raise").fit(X, y)
