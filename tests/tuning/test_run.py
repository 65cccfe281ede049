"""A search end to end: every route leaves a folder that verifies, whose card states the run alone
and with its search.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy import accounting
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, DpfyError, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.report import card as cards
from dpfy.runs.run import Run
from dpfy.tuning import run as runs
from dpfy.tuning.run import Execution, tune
from dpfy.tuning.trial import TrialFailed

sys.path.insert(0, str(Path(__file__).parent))
import toy

ROUTES = {
    "random": {},
    "poisson": {"law": "poisson", "trials": 3},
    "few": {"law": "poisson", "trials": 0.8},
    "held out": {"score": "held-out", "held_out": 0.2},
    "training records": {"score": "training"},
    "composition": {"route": "composition", "trials": 3},
    "noisy max": {"route": "noisy-max", "score": "held-out", "held_out": 0.2, "trials": 3},
    "subset": {"route": "subset", "sample": 0.5},
}


def _event(out: Path) -> events.Event:
    return Ledger.read(out / "ledger.jsonl").event()


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_leaves_a_folder_that_verifies_and_costs_what_was_asked(tmp_path, route):
    found = toy.search(tmp_path / "run", **ROUTES[route])
    failed = [f for f in dpfy.verify(tmp_path / "run") if not f.holds]
    assert not failed
    card, stated = found.report, found.report["guarantee"]
    assert stated["epsilon"] == pytest.approx(
        accounting.epsilon(_event(tmp_path / "run"), 1e-3), rel=1e-6
    )
    assert 3.9 < stated["epsilon"] <= 4.0
    alone = card["formal"]["training"]["epsilon"]
    part = cards.section(card, "tuning")
    assert card["formal"]["with_tuning"]["epsilon"] == stated["epsilon"] > alone
    assert part["bill"]["training_alone"] == pytest.approx(alone)
    assert part["bill"]["noise_ratio"] > 1
    assert card["statement"].startswith("Training with tuning satisfies")
    assert not any(row["kind"] in ("training", "tuning") for row in card["accesses"]["not_covered"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The search for settings" in page
    assert "How it was trained" in page
    assert 'aria-label="Trials that may be shown, over their settings"' in page
    assert found.settings is not None
    assert set(found.settings) == set(toy.SPACE)


def test_the_released_run_is_the_one_that_was_trained_and_loads(tmp_path):
    found = toy.search(tmp_path / "run")
    model = dpfy.load(tmp_path / "run", torch.nn.Linear(toy.FEATURES, 2))
    assert toy.right(model, toy.PUBLIC_X, toy.PUBLIC_Y) / 200 == pytest.approx(
        cards.section(found.report, "tuning")["score"] + 1e-6 * float(model.weight.detach().norm()),
        abs=1e-6,
    )
    part = cards.section(found.report, "tuning")
    assert part["mechanism"]["clip_norm"] == found.settings["clip"]
    assert part["optimizer"]["learning_rate"] == found.settings["rate"]
    assert (
        part["mechanism"]["noise_multiplier"]
        == part["search"]["kinds"][part["selected_kind"]]["noise_multiplier"]
    )


def test_everything_is_reserved_and_begun_before_the_first_trial(tmp_path):
    seen = []

    def objective(trial):
        ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
        people = Ledger.read(tmp_path / "people.jsonl")
        seen.append((ledger.permits()[0].event, bool(ledger.book.begun), bool(people.book.begun)))
        return toy.objective(trial)

    place = Run(
        tmp_path / "run", seed=3, ledger=tmp_path / "people.jsonl", budget=RenyiFilter(8.0, 2e-3)
    )
    tune(objective, toy.SPACE, toy.recipe, toy.terms(), place)
    assert seen
    assert all(
        isinstance(event, events.RepeatAndSelect) and own and shared for event, own, shared in seen
    )
    assert all(f.holds for f in dpfy.verify(tmp_path / "run", ledger=tmp_path / "people.jsonl"))


def test_a_budget_that_does_not_allow_the_search_is_refused_before_anything_is_tried(tmp_path):
    def objective(trial):
        raise AssertionError("must not be called")

    place = Run(tmp_path / "run", ledger=tmp_path / "people.jsonl", budget=RenyiFilter(1.0, 1e-3))
    with pytest.raises(BudgetExceeded):
        tune(objective, toy.SPACE, toy.recipe, toy.terms(), place)
    assert not (tmp_path / "run").exists()


def test_settings_that_cost_differently_get_noise_of_their_own_within_one_bill(tmp_path):
    space = toy.SPACE | {"batch": [30, 60]}
    found = toy.search(tmp_path / "run", space=space)
    part = cards.section(found.report, "tuning")
    small, large = sorted(part["search"]["kinds"], key=lambda kind: kind["batch"])
    assert small["noise_multiplier"] < large["noise_multiplier"]
    event = _event(tmp_path / "run")
    kinds = event.events[0].event.event.events
    assert len(kinds) == 2
    assert found.report["guarantee"]["epsilon"] <= 4.0
    each = [accounting.epsilon(events.RepeatAndSelect(kind, 4.0, 1.0), 1e-3) for kind in kinds]
    assert all(0.9 * 4.0 < one <= 4.0 for one in each)


def test_a_range_that_changes_the_bill_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(InvalidInput, match=r"batch.*list its values"):
        toy.search(tmp_path / "run", space=toy.SPACE | {"batch": "30..60"})
    assert not (tmp_path / "run").exists()


def test_trials_that_train_without_their_plan_or_permit_are_refused(tmp_path):
    """Less noise than the trial's plan, another run than its own, no training at all, a score that
    nothing pays for.
    """

    def weaker(trial):
        net = torch.nn.Linear(toy.FEATURES, 2)
        plan = trial.plan.recipe.with_noise(0.1, delta=1e-3)
        dpfy.fit(
            net,
            (toy.X, toy.Y),
            plan=plan,
            optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
            run=trial.run,
        )
        return 1.0

    def nothing(trial):
        return 1.0

    def unpaid(trial):
        return trial.count(toy.right(toy.trained(trial), toy.X, toy.Y))

    for number, (objective, words) in enumerate(
        ((weaker, "plan"), (nothing, "trained nothing"), (unpaid, "nothing is reserved"))
    ):
        with pytest.raises(TrialFailed, match=words):
            tune(objective, toy.SPACE, toy.recipe, toy.terms(), tmp_path / f"run{number}")
    with pytest.raises(TrialFailed, match="not scored"):
        tune(
            toy.objective, toy.SPACE, toy.recipe, toy.terms(score="training"), tmp_path / "unscored"
        )


def test_held_out_records_are_in_one_part_only_and_a_search_that_trains_on_all_is_refused(tmp_path):
    seen = []

    def objective(trial):
        train, apart = trial.train((toy.X, toy.Y)), trial.valid((toy.X, toy.Y))
        rows = [{tuple(row.tolist()) for row in part.tensors[0]} for part in (train, apart)]
        seen.append(tuple(map(frozenset, rows)))
        return toy.held_out(trial)

    tune(
        objective,
        toy.SPACE,
        toy.recipe,
        toy.terms(score="held-out", held_out=0.2),
        Run(tmp_path / "run", seed=3),
    )
    assert len(set(seen)) == 1
    train, apart = seen[0]
    assert not train & apart
    assert len(train) + len(apart) == toy.RECORDS
    assert 30 < len(apart) < 90

    def careless(trial):
        net = torch.nn.Linear(toy.FEATURES, 2)
        dpfy.fit(
            net,
            (toy.X, toy.Y),
            plan=trial.plan,
            optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
            run=trial.run,
        )
        return trial.count(1)

    with pytest.raises(TrialFailed, match="the plan was made for 240"):
        tune(
            careless,
            toy.SPACE,
            toy.recipe,
            toy.terms(score="held-out", held_out=0.2),
            Run(tmp_path / "all", seed=3),
        )


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_a_number_is_the_worst(tmp_path, wrong):
    scores = iter([wrong, 0.5, 0.9, *[0.1] * 100])

    def objective(trial):
        toy.trained(trial)
        return next(scores)

    found = tune(
        objective, toy.SPACE, toy.recipe, toy.terms(route="composition", trials=3), tmp_path / "run"
    )
    assert cards.section(found.report, "tuning")["score"] == 0.9


def test_no_trial_at_all_is_possible_and_leaves_a_folder_without_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "drawn", lambda claim, permit, randomness: 0)
    found = toy.search(tmp_path / "run", law="poisson", trials=3)
    assert found.settings is None
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert "number of trials that was drawn is 0" in (tmp_path / "run" / "report.html").read_text()
    for use in (dpfy.load, lambda run: dpfy.load(run, torch.nn.Linear(toy.FEATURES, 2)),
                lambda run: dpfy.predict(run, np.zeros((1, toy.FEATURES)))):  # fmt: skip
        with pytest.raises(InvalidInput, match="no trial was made: the number of trials"):
            use(tmp_path / "run")


def test_a_failure_tells_nothing_of_the_trial(tmp_path):
    def objective(trial):
        raise ValueError(f"record 17 and rate {trial.settings['rate']}")

    with pytest.raises(TrialFailed) as caught:
        tune(objective, toy.SPACE, toy.recipe, toy.terms(), tmp_path / "run")
    assert "17" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"route": "noisy-max"}, "noisy max over scores of public records"),
        ({"prune": True}, "independent settings"),
        ({"prune": True, "route": "composition", "score": "held-out"}, "private losses"),
        ({"trials": 1}, "ask for 1 to 100,000"),
        ({"trials": 2.5, "route": "composition"}, "whole number"),
        ({"law": "normal"}, "must be one of"),
        ({"route": "free"}, "must be one of"),
        ({"epsilon": 0.0}, "greater than 0"),
    ],
)
def test_what_has_no_theorem_is_refused_with_the_way_out(tmp_path, more, words):
    with pytest.raises(DpfyError, match=words):
        toy.search(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_a_search_on_a_subset_needs_a_rule_that_scales_settings(tmp_path):
    with pytest.raises(Unsupported, match="scales settings"):
        toy.search(tmp_path / "run", route="subset", work=Execution())


def test_trials_of_a_billed_search_are_published_and_those_of_a_random_one_are_not(tmp_path):
    toy.search(tmp_path / "all", route="composition", trials=3)
    rows = [
        json.loads(line) for line in (tmp_path / "all" / "trials.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3
    assert sum(row["selected"] for row in rows) == 1
    assert max(rows, key=lambda row: row["score"])["selected"]
    toy.search(tmp_path / "max", **ROUTES["noisy max"] | {"seed": 8})
    rows = [
        json.loads(line) for line in (tmp_path / "max" / "trials.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3
    assert not any("score" in row for row in rows)
    toy.search(tmp_path / "one")
    assert not (tmp_path / "one" / "trials.jsonl").exists()
    card = json.loads((tmp_path / "one" / "privacy.json").read_text())
    assert len(cards.section(card, "tuning")["trials"]) == 1
