"""A fit of labels: reserved before they are read, read once, answered once; what learns sees
answers alone; a folder that verifies.
"""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core.claim import Reserved
from dpfy.core.errors import BudgetExceeded, Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.labels import (
    METHODS,
    KernelLearner,
    KernelSettings,
    LabelMethod,
    NetworkLearner,
    fit,
    load,
)
from dpfy.labels.claim import LabelResponses, LabelSums
from dpfy.labels.fitting import run_fit
from dpfy.labels.learning import LabelQuestions, LabelSetup, learn
from dpfy.labels.questions import Question, Response, SealedLabels
from dpfy.runs.folder import RunFolder
from dpfy.runs.run import Run

N, K = 400, 3


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Runs without a folder of their own are made in an empty place."""
    monkeypatch.chdir(tmp_path)


SMALL = KernelSettings(near=4, wide=4, landmarks=60, directions=40)
torch.manual_seed(0)
Y = torch.arange(N) % K
X = 3 * torch.randn(K, 4)[Y] + torch.randn(N, 4)
WAYS = {
    **{name: LabelMethod(name) for name in METHODS if name != "rr-on-bins"},
    "rr-on-bins": LabelMethod("rr-on-bins", span=(0.0, 2.0)),
    "iterative alibi": LabelMethod("alibi", rounds=3),
    "three stages": LabelMethod("lp-mst", stages=3),
    "plain": LabelMethod("rr", correction="plain"),
}


def claim_of(method, records=N):
    return method.claim(records, K, 2.0, 1e-4)


def made(path, method="rr", labels=Y, **more):
    chosen = LabelMethod.of(method)
    return run_fit(
        Run(path, **more), claim_of(chosen), chosen, lambda: (X, labels), KernelLearner(SMALL)
    )


@pytest.mark.parametrize("name", WAYS)
def test_folder_card_and_verification(tmp_path, name):
    found = fit(
        X,
        Y,
        classes=K,
        epsilon=2.0,
        delta=1e-4,
        method=WAYS[name],
        learner=KernelLearner(SMALL),
        run=tmp_path / "run",
    )
    assert [f for f in dpfy.verify(tmp_path / "run") if not f.holds] == []
    stated = found.report["guarantee"]
    pure = name not in ("projection", "pate-fm")
    assert stated["epsilon"] <= 2.0 + 1e-9
    assert stated["epsilon"] > 1.99
    assert (stated["adjacency"], stated["delta"]) == ("replace-one", 0.0 if pure else 1e-4)
    assert "labels only" in found.statement
    text = (tmp_path / "run" / "report.md").read_text()
    assert "the features are treated as public" in text
    assert "Training saw what was released, and never the labels" in text
    assert torch.equal(load(tmp_path / "run")(X), found.model(X))
    assert not (tmp_path / "run" / "checkpoint").exists()
    claim = claim_of(WAYS[name])
    assert Reserved.from_json(json.loads(json.dumps(Reserved(claim).to_json()))).claim == claim


@pytest.mark.parametrize("name", [name for name in WAYS if name != "rr-on-bins"])
def test_models_learn(name):
    """Chance is 1/3; the groups lie about three deviations apart."""
    x, y = X.repeat(5, 1), Y.repeat(5)
    found = fit(x, y, classes=K, epsilon=3.0, method=WAYS[name], learner=KernelLearner(SMALL))
    assert found.run.parent.name == "runs"
    assert float((found.model(x).argmax(1) == y).float().mean()) > 0.8


def test_numbers_are_learnt():
    x = torch.rand(4000, 2)
    y = 10 * x[:, 0].double().numpy()
    found = fit(
        x,
        y,
        classes=1,
        epsilon=3.0,
        method=LabelMethod("rr-on-bins", span=(0, 10)),
        learner=KernelLearner(SMALL),
    )
    error = float((found.model(x)[:, 0] - torch.from_numpy(y)).square().mean())
    assert error < 0.35 * y.var()


@pytest.mark.parametrize("correction", ["plain", "backward", "posterior", "forward"])
def test_a_network_of_ones_own_learns_by_every_correction(tmp_path, correction):
    learner = NetworkLearner(lambda: torch.nn.Linear(4, K), epochs=4, batch_size=50)
    method = LabelMethod("rr", correction=correction)
    found = fit(X, Y, classes=K, epsilon=3.0, method=method, learner=learner, run=tmp_path / "run")
    assert float((found.model(X).argmax(1) == Y).float().mean()) > 0.7
    assert torch.equal(load(tmp_path / "run", torch.nn.Linear(4, K))(X), found.model(X))
    for wrong in (None, torch.nn.Linear(4, K + 1)):
        with pytest.raises(InvalidInput, match="model"):
            load(tmp_path / "run", wrong)


@pytest.mark.parametrize("name", WAYS)
def test_what_learns_depends_on_labels_through_answers_alone(tmp_path, name):
    """The answers on some labels, replayed on others: the same questions in the same order, and the
    same model to the last bit.
    """
    method = WAYS[name]
    claim = claim_of(method)
    asked: list[list[bytes]] = [[], []]
    answers: list[np.ndarray] = []
    with RunFolder(Run(tmp_path / "run", seed=1), claim) as folder:
        ask = LabelQuestions(folder, claim, SealedLabels(Y, N, claim.outcomes, method.span))

        def first(question: Question) -> np.ndarray:
            asked[0].append(question.public())
            answers.append(ask(question))
            return answers[-1]

        def replayed(question: Question) -> np.ndarray:
            asked[1].append(question.public())
            return answers[len(asked[1]) - 1]

        models = [
            learn(LabelSetup(claim, method, X, KernelLearner(SMALL)), way)
            for way in (first, replayed)
        ]
    assert asked[0] == asked[1]
    assert len(answers) == claim.releases
    for one, other in zip(
        models[0].state_dict().values(), models[1].state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_stages_ask_every_record_once(tmp_path):
    found = made(tmp_path / "run", WAYS["three stages"])
    rows = np.concatenate([found.answers[f"rows.{n}"] for n in range(3)])
    assert sorted(rows.tolist()) == list(range(N))


def test_the_claim_is_reserved_before_labels_are_read(tmp_path):
    seen = []

    def labels():
        seen.extend(p.name for p in Ledger.read(tmp_path / "run" / "ledger.jsonl").permits())
        return Y

    made(tmp_path / "run", labels=labels)
    assert seen == ["labels"]


@pytest.mark.parametrize("bad", [Y[:-1], Y.double() / 7, np.array(["a"] * N), Y.reshape(2, -1)])
def test_bad_labels_leave_nothing_and_cost_nothing(tmp_path, bad):
    people = tmp_path / "people.jsonl"
    with pytest.raises(InvalidInput, match="labels"):
        made(tmp_path / "run", labels=bad, ledger=people)
    assert not (tmp_path / "run").exists()
    assert made(tmp_path / "run", ledger=people, budget=None).run == tmp_path / "run"


def test_a_budget_ends(tmp_path):
    people, budget = tmp_path / "people.jsonl", RenyiFilter(12.0, 1e-5)
    made(tmp_path / "one", ledger=people, budget=budget)
    opened = []

    def again(number):
        opened.clear()
        made(tmp_path / f"more{number}", labels=lambda: opened.append(1) or Y, ledger=people)

    with pytest.raises(BudgetExceeded):
        list(map(again, range(20)))
    assert opened == []


def killed_at(path, place, step):
    """A child that is killed by SIGKILL before the call number `step` of a function of the run
    folder.
    """
    pid = os.fork()
    if pid == 0:
        real, calls = getattr(RunFolder, place), []

        def dying(self, *given, **named):
            calls.append(1)
            if len(calls) > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *given, **named)

        setattr(RunFolder, place, dying)
        made(path, WAYS["three stages"], seed=4)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def test_killed_anywhere_it_goes_on_to_the_same_answers(tmp_path):
    whole = made(tmp_path / "whole", WAYS["three stages"], seed=4)
    for place, steps in (("bind", (0, 1)), ("begin", (0,)), ("write", (0, 2, 3)), ("finish", (0,))):
        for step in steps:
            path = tmp_path / f"{place}{step}"
            assert killed_at(path, place, step)
            again = made(path, WAYS["three stages"], seed=4, resume=True)
            assert all(np.array_equal(again.answers[k], whole.answers[k]) for k in whole.answers)
            assert [f for f in dpfy.verify(path) if not f.holds] == []


def test_answers_that_are_there_are_not_asked_for_again(tmp_path):
    assert killed_at(tmp_path / "run", "write", 3)

    def gone():
        raise AssertionError("labels were opened again")

    whole = made(tmp_path / "whole", WAYS["three stages"], seed=4)
    again = made(tmp_path / "run", WAYS["three stages"], labels=gone, seed=4, resume=True)
    assert torch.equal(again.model(X), whole.model(X))
    assert (
        made(tmp_path / "run", WAYS["three stages"], labels=gone, resume=True).report
        == again.report
    )


def test_the_same_noise_never_meets_other_labels(tmp_path):
    assert killed_at(tmp_path / "run", "write", 0)
    other = (Y + 1) % K
    with pytest.raises(InvalidInput, match="must be what the run had"):
        made(tmp_path / "run", WAYS["three stages"], labels=other, seed=4, resume=True)
    assert made(tmp_path / "run", WAYS["three stages"], seed=4, resume=True).run == tmp_path / "run"


def test_more_questions_and_dearer_ones_are_refused(tmp_path):
    claim = claim_of(LabelMethod("rr"))
    with RunFolder(Run(tmp_path / "run", seed=1), claim) as folder:
        held = SealedLabels(Y, N, K)
        ask = LabelQuestions(folder, claim, held)
        with pytest.raises(InvalidInput, match="must cost what was reserved"):
            ask(Response(np.arange(N), 2.5, K))
        assert "400 not yet taken" in repr(held)
        ask(Response(np.arange(200), 2.0, K))
        with pytest.raises(InvalidInput, match="one more than was reserved"):
            ask(Response(np.arange(200, 400), 2.0, K))


def test_what_a_claim_may_not_be():
    for wrong in (
        {"stages": 2, "method": "rr"},
        {"method": "lp-mst", "epsilon": None},
        {"method": "lp-mst", "delta": 1e-6},
        {"method": "lp-mst", "records": None},
        {"method": "lp-mst", "adjacency": "add-or-remove-one"},
        {"method": "lp-mst", "unit": dpfy.Unit()},
        {"method": "clusters"},
        {"method": "rr", "outcomes": 1},
    ):
        with pytest.raises(InvalidInput):
            LabelResponses(**({"outcomes": 3, "epsilon": 1.0, "records": 9} | wrong))
    with pytest.raises(InvalidInput, match="delta"):
        LabelSums("projection", 3, noise_multiplier=1.0, records=9)


def test_what_a_fit_refuses():
    for given, match in (
        ({"classes": 1}, "classes"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"method": "laplace"}, "method"),
        ({"features": Y}, "features"),
        ({"features": Y[:, None]}, "real numbers"),
        ({"features": X * float("nan")}, "finite"),
    ):
        whole = {"features": X, "labels": Y, "classes": K, "epsilon": 1.0} | given
        with pytest.raises(InvalidInput, match=match):
            fit(whole.pop("features"), whole.pop("labels"), **whole)
    for field in (
        {"stages": 2},
        {"clusters": 4},
        {"span": (0, 1)},
        {"rounds": 0},
        {"correction": "sideways"},
    ):
        with pytest.raises(InvalidInput, match=next(iter(field))):
            LabelMethod("rr", **field)
    with pytest.raises(Unsupported, match="network"):
        fit(X, Y, classes=K, epsilon=1.0, learner=NetworkLearner(lambda: torch.nn.Linear(4, K)))
    with pytest.raises(Unsupported, match="forward"):
        fit(
            X,
            Y,
            classes=K,
            epsilon=1.0,
            method=LabelMethod("rr", correction="forward"),
            learner=KernelLearner(SMALL),
        )


def test_a_changed_model_is_not_loaded(tmp_path):
    made(tmp_path / "run")
    file = tmp_path / "run" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    with pytest.raises(Corrupt, match="hash"):
        load(tmp_path / "run")
    with pytest.raises(InvalidInput):
        load(tmp_path / "nothing")
