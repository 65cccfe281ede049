"""Soft trees: leaves share out every row, they learn, and their folders are those of training: billed, verified, resumed, loaded."""

from __future__ import annotations

import json
import pickle
import warnings

import numpy as np
import pandas
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.data.schema import Category, Label, Number
from dpfy.estimators import SoftTreeClassifier, SoftTreeRegressor, load
from dpfy.report.verify import verify
from dpfy.runs.folder import Place
from dpfy.soft_trees.module import SoftTrees, scores, smooth_step
from dpfy.training import loop

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
        "records": SIZE,
        "epsilon": 4.0,
        "delta": 1e-5,
        "random_state": 0,
        "epochs": 2.0,
    }
    return SoftTreeClassifier(**settings | more)


X, y = boxes()
FITTED = made().fit(X, y)


def holds(run) -> bool:
    return all(finding.holds for finding in verify(run))


def test_a_step_is_smooth_and_ends():
    scores_ = torch.linspace(-1, 1, 401, dtype=torch.float64, requires_grad=True)
    found = smooth_step(scores_)
    (slope,) = torch.autograd.grad(found.sum(), scores_)
    assert found[scores_ <= -0.5].abs().max() == 0
    assert (found[scores_ >= 0.5] == 1).all()
    assert (found.detach().diff() >= 0).all()
    assert slope[(scores_ - 0.5).abs() < 1e-9].item() == pytest.approx(0, abs=1e-6)
    assert slope[200].item() == pytest.approx(1.5)
    assert smooth_step(np.array([0.2])) == pytest.approx(1 - smooth_step(np.array([-0.2])))


@pytest.mark.parametrize(("trees", "depth"), [(1, 1), (3, 2), (5, 4)])
def test_leaves_share_out_every_row_and_numpy_says_what_torch_says(trees, depth):
    module = SoftTrees(6, 2, trees, depth, seed=1).double()
    rows = torch.randn(50, 6, dtype=torch.float64)
    torch.nn.init.ones_(module.leaves.weight)
    assert module(rows).detach().numpy() == pytest.approx(trees), "shares of the leaves of a tree add up to one"
    torch.nn.init.normal_(module.leaves.weight)
    weights = {name: value.detach().numpy() for name, value in module.named_parameters()}
    assert scores(rows.numpy(), weights, trees, depth) == pytest.approx(module(rows).detach().numpy())


def test_a_hard_split_sends_rows_to_one_leaf():
    """A tree of depth two by hand: the first feature decides, then the second."""
    module = SoftTrees(2, 1, 1, 2)
    with torch.no_grad():
        module.splits.weight.copy_(torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 9.0]]))
        module.splits.bias.zero_()
        module.leaves.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    corners = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    assert module(corners)[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_it_learns_what_no_line_tells():
    model, (held, truth) = made(epochs=20.0).fit(X, y), boxes(2000, 1)
    assert (model.predict(held) == truth).mean() > 0.85
    assert model.predict_proba(held).sum(axis=1) == pytest.approx(1.0)
    assert {name for name, _ in model.explain().rows[:2]} == {"x0", "x1"}


def test_it_learns_numbers():
    target = np.sin(3 * X[:, 0]) + X[:, 1] ** 2
    model = SoftTreeRegressor(bounds=(-1, 1), target_bounds=(-1, 2), records=SIZE, epsilon=8.0, delta=1e-5, random_state=0)
    model.set_params(epochs=30.0).fit(X, target)
    assert model.score(X, target) > 0.6
    assert -1 <= model.predict(100 * X).min() <= model.predict(100 * X).max() <= 2


def test_the_bill_is_what_was_asked_for_and_the_card_says_what_is_public(tmp_path):
    card = FITTED.card_
    assert 0.99 * 4 <= card["guarantee"]["epsilon"] <= 4
    assert card["guarantee"]["delta"] == 1e-5
    assert "(4.000, 1e-05)" in FITTED.guarantee_
    plan = json.loads(FITTED.release_.files["plan.json"])
    assert plan["recipe"]["records"] == SIZE
    assert holds(FITTED.release_.save(tmp_path / "run"))
    stated = made(classes="public", epochs=1.0).fit(X, y).card_
    assert "the labels that occur in y" in json.dumps(stated)
    assert "the labels that occur in y" not in json.dumps(card)


def test_the_same_seed_gives_the_same_trees_and_another_other_ones():
    again, other, elsewhere = made().fit(X, y), made(random_state=1).fit(X, y), made(structure=1).fit(X, y)
    assert np.array_equal(FITTED.predict_proba(X), again.predict_proba(X))
    assert not np.array_equal(FITTED.predict_proba(X), other.predict_proba(X))
    assert not np.array_equal(FITTED.predict_proba(X), elsewhere.predict_proba(X))
    assert not np.array_equal(
        made(random_state=None).fit(X, y).predict_proba(X), made(random_state=None).fit(X, y).predict_proba(X)
    )


def test_a_ledger_bounds_all_fits_together(tmp_path):
    people = tmp_path / "people.jsonl"
    first = Place(tmp_path / "one", ledger=people, budget=RenyiFilter(epsilon=4.5, delta=1e-4))
    made(random_state=None, run=first).fit(X, y)
    assert len(Ledger.read(people).permits()) == 1
    with pytest.raises(dpfy.BudgetExceeded):
        made(random_state=None, ledger=people, run=tmp_path / "two").fit(X, y)
    assert not (tmp_path / "two").exists()


def test_a_killed_fit_resumes_to_the_same_trees_and_is_loaded(tmp_path, monkeypatch):
    real, steps = loop.PrivateTraining.step, []

    def killed(self, *args, **more):
        steps.append(1)
        if len(steps) > 4:
            raise KeyboardInterrupt
        return real(self, *args, **more)

    whole = made(random_state=None, run=Place(tmp_path / "whole", seed=5)).fit(X, y)
    monkeypatch.setattr(loop.PrivateTraining, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        made(random_state=None, run=Place(tmp_path / "run", seed=5)).fit(X, y)
    monkeypatch.undo()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    resumed = made(random_state=None, run=Place(tmp_path / "run", resume=True, seed=5)).fit(X, y)
    assert np.array_equal(resumed.predict_proba(X), whole.predict_proba(X))
    assert holds(tmp_path / "run")
    again = load(tmp_path / "run")
    assert np.array_equal(again.predict_proba(X), whole.predict_proba(X))
    assert again.predict(X).tolist() == whole.predict(X).tolist()


def test_what_is_loaded_is_what_was_released(tmp_path):
    path = FITTED.release_.save(tmp_path / "run")
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(bytes(content))
    with pytest.raises(Corrupt, match="hash"):
        load(path)


def test_a_run_of_another_model_is_not_loaded(tmp_path):
    model = torch.nn.Linear(4, 2)
    plan = dpfy.dpsgd(records=SIZE, batch_size=600, steps=2).calibrate(epsilon=4.0, delta=1e-5)
    given = (torch.from_numpy(X.astype(np.float32)), torch.from_numpy(y))
    dpfy.fit(model, given, plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), run=tmp_path / "run")
    with pytest.raises(Corrupt, match="no soft trees"):
        load(tmp_path / "run")


def test_tables_with_words_pickles_and_clones():
    rng = np.random.default_rng(2)
    table = pandas.DataFrame({"age": rng.uniform(18, 80, 900), "job": rng.choice(["clerk", "nurse"], 900)})
    rich = np.where((table["age"] > 50) & (table["job"] == "nurse"), "yes", "no")
    schema = (Number("age", (18.0, 80.0)), Category("job", ("clerk", "nurse", *JOBS)), Label("rich", ("no", "yes")))
    model = SoftTreeClassifier(schema=schema, adjacency="replace-one", epsilon=8.0, delta=1e-4, epochs=20.0, random_state=0)
    model.fit(table, rich)
    assert (model.predict(table) == rich).mean() > 0.9
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(table), model.predict(table))
    assert clone(model).get_params() == model.get_params()


REFUSED = [
    ({"records": None}, "records"),
    ({"bounds": None}, "bounds"),
    ({"records": SIZE + 600}, "records"),
    ({"epsilon": 0}, "epsilon"),
    ({"delta": 0}, "delta"),
    ({"delta": 0.5}, "delta"),
    ({"n_estimators": 0}, "n_estimators"),
    ({"max_depth": 13}, "max_depth"),
    ({"epochs": -1}, "epochs"),
    ({"batch_size": 1e6}, "batch_size"),
    ({"learning_rate": float("nan")}, "learning_rate"),
    ({"clip_norm": 0}, "clip_norm"),
    ({"structure": -1}, "structure"),
    ({"bounds": (1, -1)}, "bounds"),
    ({"classes": (0,)}, "classes"),
    ({"classes": (0, 2)}, "y"),
]


@pytest.mark.parametrize(("more", "field"), REFUSED)
def test_what_cannot_be_is_refused_and_spends_nothing(more, field, tmp_path):
    with pytest.raises(DpfyError) as refusal:
        made(run=tmp_path / "run", **more).fit(X, y)
    assert field in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_missing_values_and_searches_are_refused(tmp_path):
    wrong = X.copy()
    wrong[3, 1] = np.nan
    with pytest.raises(InvalidInput, match="must have a value"):
        made(run=tmp_path / "run").fit(wrong, y)
    assert not (tmp_path / "run").exists()
    with pytest.raises(DpfyError, match="tune"):
        GridSearchCV(made(), {"max_depth": [2, 3]}, cv=2, error_score="raise").fit(X, y)


EXCEPTIONS = {"check_dtype_object", "check_readonly_memmap_input"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SoftTreeClassifier, SoftTreeRegressor])
def test_the_checks_of_scikit_learn(kind):
    settings = {"classes": "public"} if kind is SoftTreeClassifier else {"target_bounds": (-5, 5), "epochs": 100.0}
    common = {
        "epsilon": 1e4,
        "delta": 1e-5,
        "bounds": (-5, 5),
        "adjacency": "replace-one",
        "random_state": 0,
        "learning_rate": 0.1,
    }
    estimator = kind(**{"epochs": 3.0} | common | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(estimator, on_fail=None, on_skip=None)
    failed = {r["check_name"]: repr(r["exception"]) for r in found if r["status"] == "failed"}
    assert {k: v for k, v in failed.items() if k not in EXCEPTIONS} == {}
    assert sum(r["status"] == "passed" for r in found) > 40
