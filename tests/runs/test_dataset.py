"""The data set: nothing is read early, budgets add up, delta follows one rule."""

from __future__ import annotations

import math
from fractions import Fraction

import pandas as pd
import pytest

import dpfy
from dpfy.core.guarantee import default_delta
from dpfy.core.ledger import Ledger
from dpfy.runs.dataset import DeltaRule, delta_of

SCHEMA = [dpfy.Number("age", 0, 100), dpfy.Category("job", ["clerk", "nurse"])]
FRAME = pd.DataFrame({"age": [20, 30, 40] * 50, "job": ["clerk", "nurse", "nurse"] * 50})


class Watched(dict):
    """Cells by column that note when they are read."""

    def __init__(self, ledger):
        super().__init__(age=list(FRAME["age"]), job=list(FRAME["job"]))
        self.ledger, self.read = ledger, []

    def items(self):
        self.read.append(len(Ledger.read(self.ledger).permits()))
        return super().items()


@pytest.fixture
def people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return dpfy.Dataset(FRAME, SCHEMA, ledger="people.jsonl", budget=dpfy.Budget(3, 1e-6))


@pytest.mark.parametrize("records", [1, 2, 10, 1000, 20_000, 10**6, 10**7, 10**9])
def test_delta_is_the_largest_power_of_ten_that_is_small_enough(records):
    found = Fraction(str(default_delta(records)))
    most = max(2, records)
    assert found**10 * most**11 <= 1
    assert found == Fraction("1e-5") or (10 * found) ** 10 * most**11 > 1
    assert found <= Fraction("1e-5")


def test_where_delta_comes_from():
    assert delta_of(1e-7, 1000, 1e-3) == DeltaRule(1e-7, "given by the caller")
    assert delta_of(None, 20_000).value == 1e-5
    assert "20,000" in delta_of(None, 20_000).origin
    assert delta_of(None, 20_000, 1e-6) == DeltaRule(1e-6, "that of the budget of the data set")
    assert delta_of(0, None).value == 0
    assert delta_of(None, 100).value == 1e-5
    assert delta_of(None, 60_000).value == 1e-6
    assert delta_of(None, None) == DeltaRule(1e-6, "the default, 1e-06")
    assert delta_of(None, None, 1e-7).value == 1e-7
    assert delta_of(None, None, default=0.0) == DeltaRule(0.0, "none is needed")


def test_a_release_is_written_down_before_the_data_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Watched(tmp_path / "people.jsonl")
    people = dpfy.Dataset(data, SCHEMA, ledger="people.jsonl", budget=dpfy.Budget(3, 1e-6))
    assert data.read == []
    dpfy.query(people, "mean(age)", epsilon=1.0)
    assert data.read
    assert min(data.read) == 1


def test_what_the_budget_does_not_cover_is_refused_before_the_data_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Watched(tmp_path / "people.jsonl")
    people = dpfy.Dataset(data, SCHEMA, ledger="people.jsonl", budget=dpfy.Budget(3, 1e-6))
    for release in (
        lambda: dpfy.query(people, "mean(age)", epsilon=9.0),
        lambda: dpfy.synthesize(people, epsilon=9.0, method="mst"),
    ):
        with pytest.raises(dpfy.BudgetExceeded):
            release()
    assert data.read == []
    assert people.spent().epsilon == 0
    assert not list((tmp_path / "runs").glob("*"))


def test_the_ledger_adds_up(people):
    first = dpfy.query(people, "mean(age)", epsilon=0.5)
    after = people.spent().epsilon
    dpfy.synthesize(people, epsilon=0.5, method="mst")
    assert 0.5 <= after < people.spent().epsilon <= 3
    assert people.left().epsilon == pytest.approx(3 - people.spent().epsilon)
    again = dpfy.Dataset(FRAME, SCHEMA, ledger="people.jsonl", budget=dpfy.Budget(3, 1e-6))
    assert again.spent() == people.spent()
    assert dpfy.Dataset(FRAME, SCHEMA, ledger="people.jsonl").left() == people.left()
    assert all(f.holds for f in first.verify(ledger="people.jsonl"))
    with pytest.raises(dpfy.InvalidInput, match="set once"):
        dpfy.Dataset(FRAME, SCHEMA, ledger="people.jsonl", budget=dpfy.Budget(4, 1e-6))


def test_a_result_says_what_it_is(people):
    found = dpfy.query(people, "mean(age), count() by job", epsilon=0.5)
    assert found.run.is_dir()
    assert found.epsilon <= 0.5
    assert found.guarantee.epsilon(found.delta) == pytest.approx(found.epsilon)
    assert found.guarantee.epsilon(1e-9) >= found.epsilon
    assert found.report["statement"] in str(found)
    assert "<table" in found._repr_html_()
    assert found.to_json()["epsilon"] == found.epsilon
    assert "budget" in found.report["sections"][0]["delta_from"]
    assert all(finding.holds for finding in found.verify())
    assert dpfy.load(found.run).to_json() == found.to_json()


def test_runs_are_one_type(people, tmp_path):
    run = dpfy.Run(tmp_path / "x", resume=True, checkpoint_every=30, about={"author": "me"})
    one = dpfy.query(people, "count()", epsilon=0.1, run=run)
    assert dpfy.query(people, "count()", epsilon=0.1, run=run).to_json() == one.to_json()
    assert dpfy.Run.of(None).path != dpfy.Run.of(None).path
    assert dpfy.Run.of("a", ledger="l").ledger == "l"
    with pytest.raises(dpfy.InvalidInput, match="that of the data set"):
        dpfy.Run.of(dpfy.Run("a", ledger="l"), ledger="m")
    with pytest.raises(dpfy.InvalidInput, match="checkpoint_every"):
        dpfy.Run("a", checkpoint_every=-1)
    assert dpfy.Run("a", checkpoint_every=math.inf).checkpoint_every == math.inf


def test_progress_is_told_in_one_form(people):
    told = []

    def progress(what, share=None):
        told.append((what, share))

    dpfy.query(people, "count()", epsilon=0.1, progress=progress)
    dpfy.synthesize(people, epsilon=0.5, method="mst", progress=progress)
    assert all(isinstance(what, str) for what, _ in told)
    assert all(share is None or 0 <= share <= 1 for _, share in told)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: dpfy.Dataset(None), "source"),
        (lambda: dpfy.Dataset(FRAME, SCHEMA, unit="who"), "dpfy.Person"),
        (lambda: dpfy.Dataset(FRAME, SCHEMA, budget=dpfy.Budget(1, 1e-6)), "needs a ledger"),
        (lambda: dpfy.Dataset(FRAME, SCHEMA, ledger="l", budget=3), "dpfy.Budget"),
        (lambda: dpfy.Dataset(FRAME, SCHEMA, records=0), "records"),
        (lambda: dpfy.Dataset(FRAME, strict=True), "goes with a schema"),
        (lambda: dpfy.Dataset(FRAME).schema, "dpfy init"),
    ],
)
def test_what_does_not_fit_is_one_line(made, words):
    with pytest.raises(dpfy.InvalidInput, match=words) as refused:
        made()
    assert "\n" not in str(refused.value)
