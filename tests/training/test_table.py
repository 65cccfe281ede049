"""A Dataset through a network, a search and a service: plans, counts, persons, refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import dpfy
from dpfy.training import table

COLUMNS = [
    dpfy.Number("age", 0, 100),
    dpfy.Category("job", ["clerk", "nurse"]),
    dpfy.Label("income", ["low", "high"]),
]
RNG = np.random.default_rng(0)
AGE = RNG.integers(18, 90, 600)
FRAME = pd.DataFrame(
    {
        "who": RNG.integers(0, 200, 600),
        "age": AGE,
        "job": RNG.choice(["clerk", "nurse"], 600),
        "income": np.where(AGE > 50, "high", "low"),
    }
)
PERSON = dpfy.Person("who", at_most=3)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def people(frame=FRAME, **more):
    return dpfy.Dataset(frame, COLUMNS, ledger="p.jsonl", budget=dpfy.Budget(30, 1e-6), **more)


def trained(data, **more):
    net = nn.Linear(3, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"epsilon": 3.0, "epochs": 2, "batch_size": 100} | more
    return dpfy.fit(net, data, optimizer=opt, **given)


def test_a_count_and_the_training_cost_together_what_was_asked():
    held = people()
    made = trained(held, run="x")
    count = dpfy.load("x-count")
    assert made.epsilon + count.epsilon <= 3.0
    assert made.epsilon + count.epsilon > 2.9
    assert count.delta == 0
    assert "count" in made.report["sections"][0]["records_from"]
    assert all(f.holds for f in made.verify(ledger="p.jsonl"))
    assert held.spent().epsilon >= 3.0


def test_a_public_number_is_not_counted(tmp_path):
    made = trained(people(records=600), run="x")
    assert 2.99 < made.epsilon <= 3.0
    assert not (tmp_path / "x-count").exists()
    assert "records_from" not in made.report["sections"][0]


def test_a_run_goes_on_with_the_plan_that_it_has():
    held, run = people(), dpfy.Run("x", resume=True)
    first = trained(held, run=run)
    again = trained(held, run=run)
    assert again.engine == "finished before"
    assert torch.equal(first.model.weight, again.model.weight)
    assert again.epsilon == first.epsilon


def test_persons_are_the_unit_and_are_counted():
    made = trained(people(unit=PERSON), run="x")
    assert made.guarantee.unit.name == "user"
    counted = dpfy.load("x-count").answers[0].value
    assert abs(counted - FRAME["who"].nunique()) < 150
    assert made.report["unit"]["most_records"] == 3


@pytest.mark.parametrize("extra", [0, 1, 3, 50])
def test_a_person_adds_one_record_whatever_they_have(extra):
    more = FRAME.iloc[:extra].assign(who=999)
    plan = dpfy.dpsgd(200, 50, steps=2, unit=PERSON.unit).with_noise(1.0, delta=1e-5)
    one, other = (
        table.records_of(dpfy.Dataset(frame, COLUMNS, unit=PERSON), plan)
        for frame in (FRAME, pd.concat([FRAME, more]))
    )
    assert len(other) - len(one) == (extra > 0)
    assert all(t.shape[1] == 3 for t in other.tensors[:2])
    assert all(torch.equal(a, b[: len(a)]) for a, b in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("cell", ["", "?", "$1,234.50", "inf", "-7", "x" * 50])
def test_no_cell_stops_a_training(cell):
    odd = FRAME.astype(object).copy()
    odd.loc[3, ["age", "job", "income"]] = cell
    assert trained(people(odd, records=600), run="x").steps == 12


def test_the_budget_is_asked_before_the_data_is_read(monkeypatch):
    monkeypatch.setattr(table, "read", lambda data: pytest.fail("was read"))
    with pytest.raises(dpfy.BudgetExceeded):
        trained(people(records=600), epsilon=90.0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"epsilon": None}, "epsilon"),
        ({"batch_size": None}, "batch_size"),
        ({"epochs": None}, "epochs"),
        ({"plan": dpfy.dpsgd(600, 60, steps=2).with_noise(1.0, delta=1e-5)}, "left out with plan"),
    ],
)
def test_what_is_missing_is_named(more, words):
    with pytest.raises(dpfy.InvalidInput, match=words):
        trained(people(), **more)


def test_progress_is_told():
    told = []
    trained(people(records=600), progress=lambda what, share=None: told.append((what, share)))
    assert told[-1] == ("training", 1.0)


def test_a_service_answers_and_ends_with_a_report():
    held = people()
    with dpfy.serve(held, epsilon=4.0, answers=5) as service:
        assert service.answer({"age": 85, "job": "nurse"}).label in ("low", "high")
        assert not service.answer({"age": 85, "job": "nurse"}).paid
        assert service.left() == {"answer": 4}
    assert service.released.epsilon <= 4.0
    assert all(f.holds for f in service.released.verify(ledger="p.jsonl"))
    with pytest.raises(dpfy.InvalidInput, match="must be open"):
        service.answer([0.0, 0, 1])


def test_rows_of_a_person_make_one_teacher(monkeypatch):
    from dpfy.prediction import session

    seen = []
    real = session.teach
    monkeypatch.setattr(
        session, "teach", lambda x, y, **more: seen.append(more["owners"]) or real(x, y, **more)
    )
    with dpfy.serve(people(unit=PERSON), epsilon=4.0, answers=2) as service:
        service.answer([0.0, 0, 1])
    assert len(set(seen[0])) == FRAME["who"].nunique()
    assert service.released.guarantee.unit.name == "user"


def test_a_search_by_an_objective():
    held = people()

    def objective(trial):
        net = nn.Linear(3, 2)
        opt = torch.optim.SGD(net.parameters(), lr=trial.settings["lr"])
        dpfy.fit(net, trial.data, plan=trial.plan, run=trial.run, optimizer=opt)
        x, y = trial.held_out.tensors[:2]
        return trial.count(net(x).argmax(1) == y)

    found = dpfy.tune(
        objective, {"lr": "0.1..1 log", "epochs": [1]}, held, epsilon=3.0, trials=2, run="x"
    )
    count = dpfy.load("x-count")
    assert found.epsilon + count.epsilon <= 3.0
    assert all(f.holds for f in found.verify())
