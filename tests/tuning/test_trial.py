"""One trial by itself: its secret, its score, what it may ask for, and what is kept of it."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.runs.run import Run
from dpfy.tuning.run import tune
from dpfy.tuning.sealed import TrialResult, TrialRights, secret_of
from dpfy.tuning.terms import TrialKinds
from dpfy.tuning.trial import Trial, TrialFailed, TrialTask, _seeded

sys.path.insert(0, str(Path(__file__).parent))
import toy

PLAN = dpfy.dpsgd(toy.RECORDS, 60, steps=toy.STEPS).with_noise(2.0, delta=1e-3)


def task(place: Path, number: int = 0, score: events.Event | None = None, **more) -> TrialTask:
    source = TrialRights(None, "test", Randomness.for_tests(3))
    settings = {"rate": 1.0, "clip": 1.0}
    return TrialTask(
        place, number, settings, PLAN.recipe, (PLAN,), score, source, toy.objective, **more
    )


def planned(given: TrialTask) -> Trial:
    trial = Trial(given)
    trial.planned(PLAN.recipe)
    return trial


def test_every_trial_has_a_secret_and_noise_of_its_own(tmp_path):
    secret = Randomness.for_tests(3)
    keys = {secret_of(secret, number).key("noise", 0, 16) for number in range(50)} | {
        secret.key("noise", 0, 16)
    }
    assert len(keys) == 51
    assert task(tmp_path / "0")() != task(tmp_path / "1", 1)()
    assert task(tmp_path / "again")() == task(tmp_path / "0")()


def test_generators_begin_alike_in_every_trial_and_go_on_as_they_were_after_it():
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def begun(number: int) -> list[float]:
        with _seeded(secret_of(Randomness.for_tests(3), number)):
            return drawn()

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    first = drawn()
    assert begun(0) == begun(0)
    assert not set(begun(0)) & set(begun(1))
    after = drawn()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert [drawn(), drawn()] == [first, after]


def test_the_rights_of_trials_end_with_their_search(tmp_path):
    def objective(trial):
        found.append(trial.plan.event)
        return toy.objective(trial)

    found = []
    made = tune(objective, toy.SPACE, toy.recipe, toy.terms(), Run(tmp_path / "run", seed=3))
    source = TrialRights(made.run / "ledger.jsonl", "tuning", Randomness.for_tests(3))
    with pytest.raises(InvalidInput, match="permit"):
        source.permit(found[0], 0, toy.STEPS)


def test_a_score_on_private_records_has_noise_and_is_given_once(tmp_path):
    scores = []
    for number in range(40):
        trial = planned(task(tmp_path / str(number), number, events.DiscreteGaussian(5.0)))
        scores.append(trial.count(100) - 100)
        with pytest.raises(InvalidInput, match="scored once"):
            trial.count(100)
    assert (
        3.0 < float(np.std(scores)) < 7.5
    )  # 2/3 and 3/2 of the scale lie outside by more than 2.5 standard deviations


def test_what_is_selected_already_is_not_looked_at_again(tmp_path):
    assert math.isnan(
        planned(task(tmp_path / "x", score=events.DiscreteGaussian(5.0), final=True)).count(100)
    )
    with pytest.raises(Unsupported, match="nothing is reserved for"):
        planned(task(tmp_path / "y")).count(100)


def test_a_trial_says_once_what_it_does_and_only_what_was_reserved(tmp_path):
    trial = Trial(task(tmp_path / "x"))
    with pytest.raises(InvalidInput, match="say first"):
        trial.plan  # noqa: B018
    with pytest.raises(InvalidInput, match="nothing was reserved"):
        trial.planned(dpfy.dpsgd(toy.RECORDS, 60, steps=toy.STEPS + 1))
    assert (
        trial.planned(dpfy.dpsgd(toy.RECORDS, 60, steps=toy.STEPS, clip_norm=0.3)).noise_multiplier
        == 2.0
    )
    with pytest.raises(InvalidInput, match="trains once"):
        trial.planned(PLAN.recipe)


def test_what_a_trial_says_of_a_value_is_not_told(tmp_path):
    def wrong(trial):
        raise InvalidInput("rate", 0.123456, "is wrong")

    with pytest.raises(TrialFailed, match="rate: is wrong") as caught:
        TrialTask(
            tmp_path / "x",
            0,
            {},
            PLAN.recipe,
            (PLAN,),
            None,
            TrialRights(None, "t", Randomness.for_tests(3)),
            wrong,
        )()
    assert "0.123456" not in str(caught.value)


def test_rows_are_read_back_and_settings_drawn_on_the_way_are_kept(tmp_path):
    row = TrialResult(-math.inf, 3, 1, {"rate": 0.1, "sizes": (1, 2)}, {"pruned": True})
    assert (
        TrialResult.from_json(row.to_json() | {"settings": {"rate": 0.1, "sizes": [1, 2]}}) == row
    )
    (tmp_path / "x").mkdir()
    trial = Trial(task(tmp_path / "x"))
    trial.drew("depth", 3)
    assert trial.settings["depth"] == 3
    assert '"depth": 3' in (tmp_path / "x" / "settings.json").read_text()
    assert (tmp_path / "x" / "settings.json").stat().st_mode & 0o777 == 0o600


def test_kinds_of_trials_that_draw_for_themselves_are_listed_once():
    same = [dpfy.dpsgd(300, 60, steps=6, clip_norm=clip) for clip in (0.5, 1.0)]
    assert len(TrialKinds.listed(same).recipes) == 1
    with pytest.raises(InvalidInput, match="1 to 64"):
        TrialKinds.listed([])
