"""An existing Optuna study becomes private by its objective's trainer and by `optimize`: what is
refused, stored and selected.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.report import card as cards
from dpfy.runs.run import Run
from dpfy.tuning.run import Execution
from dpfy.tuning.trial import TrialFailed

optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'dpfy[optuna]'")
from dpfy.integrations.optuna import optimize  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "tuning"))
import toy  # noqa: E402

RECIPES = [dpfy.dpsgd(toy.RECORDS, batch, steps=toy.STEPS) for batch in (30, 60)]


def objective(trial):
    """As in any program with Optuna, but for the plan and the run that the trainer is given."""
    rate = trial.suggest_float("rate", 0.05, 5, log=True)
    clip = trial.suggest_categorical("clip", [0.5, 1.0, 2.0])
    batch = trial.suggest_int("batch", 30, 60, step=30)
    net = torch.nn.Linear(toy.FEATURES, 2)
    plan = trial.planned(dpfy.dpsgd(toy.RECORDS, batch, steps=toy.STEPS, clip_norm=clip))
    dpfy.fit(
        net,
        trial.train((toy.X, toy.Y)),
        plan=plan,
        optimizer=torch.optim.SGD(net.parameters(), lr=rate),
        run=trial.run,
    )
    return toy.right(net, toy.PUBLIC_X, toy.PUBLIC_Y) / len(toy.PUBLIC_Y) - 1e-6 * float(
        net.weight.detach().norm()
    )


def studied(sampler=None, **more):
    return optuna.create_study(
        direction="maximize",
        sampler=sampler or optuna.samplers.TPESampler(seed=1, n_startup_trials=2),
        **more,
    )


def test_an_adaptive_study_is_paid_by_composition_and_holds_every_trial(tmp_path):
    study = studied()
    found = optimize(
        study,
        objective,
        recipes=RECIPES,
        terms=toy.terms(route="composition", trials=4),
        run=tmp_path / "run",
    )
    assert len(study.trials) == 4
    assert study.best_params == found.settings
    part = cards.section(found.report, "tuning")
    assert study.best_value == part["score"]
    assert part["search"]["engine"] == "optuna TPESampler"
    assert found.report["guarantee"]["epsilon"] <= 4.0
    assert len((tmp_path / "run" / "trials.jsonl").read_text().splitlines()) == 4
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_a_study_that_minimises_selects_the_smallest(tmp_path):
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=1))
    terms = toy.terms(route="composition", trials=3)
    found = optimize(
        study, lambda trial: -objective(trial), recipes=RECIPES, terms=terms, run=tmp_path / "run"
    )
    assert study.best_params == found.settings
    assert study.best_value == min(trial.value for trial in study.trials)


@pytest.mark.parametrize("storage", [False, True])
def test_a_random_number_of_trials_leaves_the_selected_one_in_the_study_and_nothing_of_the_others(
    tmp_path, capfd, caplog, storage
):
    where = f"sqlite:///{tmp_path}/study.db" if storage else None
    study = studied(optuna.samplers.RandomSampler(seed=1), storage=where)
    seen = []

    def noted(trial):
        score = objective(trial)
        seen.append((trial.params["rate"], score))
        return score

    run = Run(tmp_path / "run", seed=29)
    found = optimize(study, noted, recipes=RECIPES, terms=toy.terms(trials=9), run=run)
    assert len(seen) > 3
    assert [t.params for t in study.trials] == [found.settings]
    assert study.best_value == max(score for _, score in seen)
    out = capfd.readouterr()
    text = out.out + out.err + caplog.text + json.dumps(found.to_json())
    text += "".join(
        file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file()
    )
    for rate, score in seen:
        if score != study.best_value:
            assert repr(rate) not in text
            assert repr(score) not in text
            assert np.float64(rate).tobytes().decode("latin-1") not in text
            assert (
                np.float64(score).tobytes()[::-1].decode("latin-1") not in text
            )  # as SQLite keeps numbers
    if storage:
        assert np.float64(study.best_value).tobytes()[::-1].decode("latin-1") in text
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_noisy_max_tells_the_study_nothing_for_its_scores_are_exact(tmp_path):
    seen = []

    def counted(trial):
        rate = trial.suggest_float("rate", 0.05, 5, log=True)
        net = torch.nn.Linear(toy.FEATURES, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        plan = trial.planned(dpfy.dpsgd(240, 48, steps=toy.STEPS))
        dpfy.fit(net, trial.train((toy.X, toy.Y)), plan=plan, optimizer=optimizer, run=trial.run)
        seen.append(trial.count(toy.right(net, *trial.valid((toy.X, toy.Y)).tensors)))
        return seen[-1]

    study = studied(optuna.samplers.RandomSampler(seed=1))
    terms = toy.terms(route="noisy-max", score="held-out", held_out=0.2, trials=3)
    found = optimize(
        study,
        counted,
        recipes=[dpfy.dpsgd(240, 48, steps=toy.STEPS)],
        terms=terms,
        run=tmp_path / "run",
    )
    assert len(seen) == 3
    assert study.trials == []
    assert "absent" in cards.section(found.report, "tuning")["score"]


def test_what_a_sampler_may_not_see_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(
        Unsupported,
        match=r"TPESampler under the route 'random'.*RandomSampler, or pay by composition",
    ):
        optimize(studied(), objective, recipes=RECIPES, terms=toy.terms(), run=tmp_path / "run")
    terms = toy.terms(route="composition", trials=3)
    with pytest.raises(Unsupported, match="several processes"):
        optimize(
            studied(),
            objective,
            recipes=RECIPES,
            terms=terms,
            run=tmp_path / "run",
            work=Execution(workers=2),
        )
    with pytest.raises(Unsupported, match="subset"):
        optimize(
            studied(),
            objective,
            recipes=RECIPES,
            terms=toy.terms(route="subset"),
            run=tmp_path / "run",
        )
    many = optuna.create_study(directions=["maximize", "minimize"])
    with pytest.raises(Unsupported, match="several objectives"):
        optimize(many, objective, recipes=RECIPES, terms=toy.terms(), run=tmp_path / "run")
    used = studied()
    used.optimize(lambda trial: trial.suggest_float("rate", 0.05, 5, log=True), n_trials=2)
    with pytest.raises(InvalidInput, match="does not pay for"):
        optimize(
            used,
            objective,
            recipes=RECIPES,
            terms=toy.terms(route="composition", trials=3),
            run=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_trial_with_a_bill_that_nothing_was_reserved_for_is_refused(tmp_path):
    def greedy(trial):
        trial.planned(dpfy.dpsgd(toy.RECORDS, 60, steps=toy.STEPS + 1))
        return 1.0

    with pytest.raises(TrialFailed, match="nothing was reserved for it"):
        optimize(
            studied(),
            greedy,
            recipes=RECIPES,
            terms=toy.terms(route="composition", trials=3),
            run=tmp_path / "run",
        )


def test_looking_at_a_trial_under_way_is_refused_where_it_is_not_paid_for(tmp_path):
    def looks(trial):
        trial.suggest_float("rate", 0.05, 5)
        trial.report(0.5, step=1)
        return 1.0

    sampler = optuna.samplers.RandomSampler()
    with pytest.raises(TrialFailed, match="pay by composition, with pruning"):
        optimize(studied(sampler), looks, recipes=RECIPES, terms=toy.terms(), run=tmp_path / "run")


def test_pruned_trials_are_billed_for_their_steps_and_leave_room_for_more(tmp_path):
    """A pruner that ends every trial but the first after two steps of six: more trials fit than
    were asked for, within the same bill.
    """

    class Ends(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number > 0

    def pruned(trial):
        rate = trial.suggest_float("rate", 0.05, 5, log=True)
        net = torch.nn.Linear(toy.FEATURES, 2)
        plan = trial.planned(RECIPES[1])
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        with dpfy.PrivateTraining(
            net, optimizer, trial.train((toy.X, toy.Y)), plan, trial.run
        ) as training:
            for x, y in training.batches():  # a step may come in several physical batches
                training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
                if training.steps_done == 2:
                    trial.report(toy.right(net, toy.PUBLIC_X, toy.PUBLIC_Y) / 200, 2)
                    if trial.should_prune():
                        raise optuna.TrialPruned
        return toy.right(net, toy.PUBLIC_X, toy.PUBLIC_Y) / 200

    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=1), pruner=Ends()
    )
    terms = toy.terms(route="composition", trials=3, prune=True)
    found = optimize(study, pruned, recipes=RECIPES[1:], terms=terms, run=tmp_path / "run")
    states = [trial.state.name for trial in study.trials]
    assert states[0] == "COMPLETE"
    assert set(states[1:]) == {"PRUNED"}
    assert len(states) > 3
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "trials.jsonl").read_text().splitlines()
    ]
    assert [row.get("pruned_after") for row in rows] == [None] + [2] * (len(rows) - 1)
    assert found.report["guarantee"]["epsilon"] <= 4.0
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


@pytest.mark.parametrize("route", ["composition", "random"])
def test_killed_it_is_resumed_with_the_settings_that_its_noise_met(tmp_path, route):
    """Killed in the third trial, after its settings were drawn: the resumed search, of a new study,
    trains with the same.
    """
    sampler = optuna.samplers.RandomSampler if route == "random" else optuna.samplers.TPESampler
    terms = toy.terms(route=route, trials=4 if route == "composition" else 9)
    drawn, calls = [], []

    def counted(trial):
        score = objective(trial)
        drawn.append((trial.number, trial.params))
        calls.append(score)
        if len(calls) == 3 and os.getpid() == parent:
            raise KeyboardInterrupt
        return score

    parent = os.getpid()
    with pytest.raises(KeyboardInterrupt):
        optimize(
            studied(sampler()),
            counted,
            recipes=RECIPES,
            terms=terms,
            run=Run(tmp_path / "run", seed=29),
        )
    study, before = studied(sampler()), dict(drawn)
    place = Run(tmp_path / "run", seed=29, resume=True)
    found = optimize(study, counted, recipes=RECIPES, terms=terms, run=place)
    again = dict(drawn[3:])
    assert again[2] == before[2]
    assert set(again).isdisjoint({0, 1})
    assert found.settings in [*before.values(), *again.values()]
    if route == "composition":
        complete = [t.params for t in study.trials if t.state.name == "COMPLETE"]
        assert sorted(map(repr, complete)) == sorted(map(repr, ({**before, **again}).values()))
        assert study.best_params == found.settings


@pytest.mark.parametrize("whole", [False, True])
def test_a_study_over_users_counts_each_user_once(tmp_path, whole):
    unit = dpfy.Unit("user", 10)
    users = dpfy.by_user((toy.X, toy.Y), torch.arange(toy.RECORDS) // 10, 10)
    recipe = dpfy.dpsgd(toy.RECORDS // 10, 10, steps=2, unit=unit)

    def scored(trial):
        rate = trial.suggest_float("rate", 0.05, 5, log=True)
        net = torch.nn.Linear(toy.FEATURES, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        dpfy.fit(
            net, trial.train(users), plan=trial.planned(recipe), optimizer=optimizer, run=trial.run
        )
        right = net(users.flat[0]).argmax(1) == users.flat[1]
        return trial.count(right if whole else int(right.sum()))

    asked = {
        "recipes": [recipe],
        "terms": toy.terms(records=30, route="composition", trials=2, score="training"),
    }
    if whole:
        assert (
            optimize(studied(), scored, **asked, run=tmp_path / "run").report["guarantee"][
                "epsilon"
            ]
            <= 4.0
        )
    else:
        with pytest.raises(TrialFailed, match="must count once"):
            optimize(studied(), scored, **asked, run=tmp_path / "run")
