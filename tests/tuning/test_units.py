"""Searches that protect users who own several records: a user counts once in a score, and is in one
part of the data alone.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

import dpfy
from dpfy import accounting
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.data.given import as_source
from dpfy.data.split import part_of, stated
from dpfy.data.users import UserRecords, by_user
from dpfy.runs.folder import held_claims
from dpfy.runs.run import Run
from dpfy.tuning.routes import POINTS, PrivacyTarget, SearchRoute, calibrate_search
from dpfy.tuning.run import tune
from dpfy.tuning.sealed import TrialRights
from dpfy.tuning.terms import SearchSettings, TrialSplit
from dpfy.tuning.trial import Trial, TrialFailed, TrialTask, _points

sys.path.insert(0, str(Path(__file__).parent))
import toy

USERS, EACH = 30, 20
USER = dpfy.Unit("user", EACH)
OWNERS = torch.arange(USERS).repeat_interleave(EACH)
_GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(USERS * EACH, 3, generator=_GENERATOR)
Y = (X[:, 0] > 0).long()


def users() -> UserRecords:
    found = by_user((X, Y), OWNERS, EACH)
    assert isinstance(found, UserRecords)
    return found


def recipe(settings, records):
    return dpfy.dpsgd(records, max(1, records // 3), steps=2, unit=USER)


def terms(**more):
    given = {
        "epsilon": 3.0,
        "delta": 1e-4,
        "records": USERS,
        "trials": 3,
        "route": "composition",
        "score": "training",
    }
    return SearchSettings(**(given | more))


def trained(trial, records):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=trial.settings.get("rate", 0.5))
    dpfy.fit(net, records, plan=trial.plan, optimizer=optimizer, run=trial.run)
    return net


def answers(net, grouped):
    return net(grouped.flat[0]).argmax(1) == grouped.flat[1]


def on_training(trial):
    grouped = trial.train(users())
    return trial.count(answers(trained(trial, grouped), grouped))


def on_held_out(trial):
    net, apart = trained(trial, trial.train(users())), trial.valid(users())
    return trial.count(answers(net, apart))


def by_record(trial):
    """The mistake: 600 records are counted, each of them for one."""
    net = trained(trial, trial.train(users()))
    return trial.count(int((net(X).argmax(1) == Y).sum()))


def search(objective, place, **more):
    return tune(objective, {"rate": "0.1..1"}, recipe, terms(**more), Run(place, seed=5))


def given(place, most=EACH, score=None, parts=None, number=0):
    """A trial by itself whose score is exact (as under noisy max), so that neighbours can be
    compared.
    """
    plan = dpfy.dpsgd(USERS, 10, steps=2, unit=dpfy.Unit("user", most)).with_noise(1.0, delta=1e-3)
    source = TrialRights(None, "test", Randomness.for_tests(3))
    score = events.BoundedRange(1.0) if score is None else score
    trial = Trial(
        TrialTask(place, number, {}, plan.recipe, (plan,), score, source, on_training, parts=parts)
    )
    trial.planned(plan.recipe)
    return trial


def test_records_of_a_user_are_not_counted_one_by_one(tmp_path):
    with pytest.raises(TrialFailed, match="must count once"):
        search(by_record, tmp_path / "run")


@pytest.mark.parametrize("score", ["training", "held-out"])
@pytest.mark.parametrize(("route", "law"), [("composition", "auto"), ("random", "geometric")])
def test_the_report_covers_what_scores_tell_of_a_user(tmp_path, score, route, law):
    """The scores alone, told apart by the best test, cost no more than what the report says of
    everything.
    """
    objective = on_training if score == "training" else on_held_out
    found = search(objective, tmp_path / "run", score=score, route=route, law=law, held_out=0.4)
    assert "user" in found.report["guarantee"]["unit"]
    stated, delta = found.report["guarantee"]["epsilon"], found.report["guarantee"]["delta"]
    assert stated <= 3.0
    event = held_claims(tmp_path / "run")[0].paid.score
    assert event == events.DiscreteGaussian(event.sigma, POINTS)
    shown = 3 if route == "composition" else 1
    move = math.sqrt(shown) * POINTS / event.sigma  # a user moves a score by at most POINTS points
    told = norm.cdf(move / 2 - stated / move) - math.exp(
        stated + norm.logcdf(-move / 2 - stated / move)
    )
    assert told <= delta


@pytest.mark.parametrize("seed", range(25))
def test_one_user_moves_a_score_by_at_most_one_whatever_the_model_answers(tmp_path, seed):
    """Over random users, most records and answers: add, remove and replace a user; all others
    answer as before.
    """
    rng = np.random.default_rng(seed)
    most, count = int(rng.integers(2, 9)), int(rng.integers(2, 12))
    owners = rng.integers(0, count, size=int(rng.integers(count, 8 * count)))
    right, other = (rng.random(len(owners)) < rng.random() for _ in range(2))

    def score(kept, answered, name):
        grouped = by_user(
            (torch.from_numpy(answered[kept]), torch.zeros(int(kept.sum()))), owners[kept], most
        )
        trial = given(tmp_path / name, most)
        places = trial.train(grouped).flat
        found = trial.count(places[0].clone())
        assert found == int(found)
        assert 0 <= found <= POINTS * len(grouped)
        return found

    everybody = np.ones(len(owners), bool)
    whole = score(everybody, right, "whole")
    for user in np.unique(owners)[:4]:
        if (owners != user).any():
            assert abs(score(owners != user, right, f"without-{user}") - whole) <= POINTS
        assert (
            abs(
                score(everybody, np.where(owners == user, other, right), f"replaced-{user}") - whole
            )
            <= POINTS
        )


def test_a_user_counts_with_the_share_of_their_records_that_is_right(tmp_path):
    grouped = by_user(
        (torch.zeros(5, 1), torch.tensor([1, 1, 0, 0, 1])), torch.tensor([0, 0, 0, 1, 2]), 4
    )
    trial = given(tmp_path / "x", 4)
    assert trial.count(trial.train(grouped).flat[1].bool()) == 67 + 0 + 100
    with pytest.raises(InvalidInput, match="scored once"):
        trial.count(trial.train(grouped).flat[1].bool())


def test_what_is_no_score_of_the_users_of_the_trial_is_refused(tmp_path):
    grouped = users()
    good = torch.ones(USERS * EACH, dtype=torch.bool)
    with pytest.raises(InvalidInput, match="ask it for them first"):
        given(tmp_path / "a").count(good)
    for name, wrong in (("b", good.float()), ("c", good[:-1]), ("d", good.repeat(2))):
        trial = given(tmp_path / name)
        trial.train(grouped)
        with pytest.raises(InvalidInput, match="one bool for each record"):
            trial.count(wrong)
    trial = given(tmp_path / "e")
    trial.train((X, Y))  # records, not users: they may be trained on with user=, and not be scored
    with pytest.raises(InvalidInput, match="by_user"):
        trial.count(good)
    trial = given(tmp_path / "f")
    trial.train(by_user((X, Y), torch.arange(USERS * EACH), 1))  # every record called a user
    with pytest.raises(InvalidInput, match="by_user"):
        trial.count(good)


def test_an_old_reservation_for_single_records_does_not_pay_for_users(tmp_path):
    trial = given(tmp_path / "x", score=events.DiscreteGaussian(5.0))
    answered = trial.train(users()).flat[1].bool()
    with pytest.raises(Unsupported, match="start the search again"):
        trial.count(answered)


@pytest.mark.parametrize("seed", range(12))
def test_a_user_is_in_one_part_with_all_records_and_moves_nobody_else(seed):
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, 40, size=300)
    values, most = torch.arange(300.0), int(rng.integers(1, 9))
    secret = Randomness.for_tests(seed)
    parts = TrialSplit(40, float(rng.uniform(0.2, 0.8)))

    def split(kept):
        grouped = by_user((values[kept], values[kept]), owners[kept], most)
        train, valid = parts.train(grouped, secret, final=False), parts.valid(grouped, secret)
        assert train.records_each == valid.records_each == most
        own = [{int(owners[int(v)]) for v in part.tensors[0].unique()} for part in (train, valid)]
        assert not own[0] & own[1]
        return own

    whole = split(torch.ones(300, dtype=torch.bool))
    assert whole[0] | whole[1] == set(owners.tolist())
    last = split(torch.from_numpy(owners != owners.max()))  # without the user whose row is the last
    assert [part - {int(owners.max())} for part in whole] == last


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [None, "day"])
def test_users_whose_records_are_drawn_anew_are_in_one_part_whole(tmp_path, seed, window):
    """With records chosen at every step: a user is in one part with all records, a user less moves
    nobody else, and every score moves by one at most, whatever that user owns.
    """
    rng = np.random.default_rng(seed)
    counts = [1, 4, 50, *rng.integers(1, 9, 20)]
    owners = np.repeat([f"p{k:02d}" for k in rng.permutation(len(counts))], counts)
    when = rng.integers(0, 3, len(owners)) * 86400
    values, parts = torch.arange(float(len(owners))), TrialSplit(20, float(rng.uniform(0.3, 0.7)))
    right = rng.random(len(owners)) < 0.5
    trial = given(tmp_path / "x", 4, parts=parts)
    label = owners if window is None else np.char.add(owners, (when // 86400).astype(str))

    def split(kept):
        users = dpfy.Users(owners[kept], "random", "mean", when[kept] if window else None, window)
        grouped = by_user({"x": values[kept], "y": values[kept]}, users, 4)
        secret = trial._task.source.randomness
        train = parts.train(grouped, secret, final=False)
        valid = parts.valid(grouped, secret)
        assert (train.part, train.expected) == ("training records", parts.training)
        source = as_source(train)
        assert (part_of(source), stated(source)) == ("training records", parts.training)
        own = source.base.tensors[0].long()
        assert len(own) == np.isin(label[kept], label[own]).sum()  # all of their records
        held = valid.tensors[0][valid.tensors[-1]].long()
        score = int(_points(torch.from_numpy(right)[valid.tensors[0].long()], valid, POINTS))
        assert not set(label[own]) & set(label[held])
        return set(label[own]), set(label[held]), score

    whole = split(np.ones(len(owners), bool))
    assert whole[0] | whole[1] == set(label)
    last = max(label)
    less = split(label != last)
    assert [side - {last} for side in whole[:2]] == list(less[:2])
    assert abs(whole[2] - less[2]) <= (POINTS if last in whole[1] else 0)


def test_users_with_another_number_of_records_than_the_unit_are_refused(tmp_path):
    trial = given(tmp_path / "x", parts=TrialSplit(USERS, 0.4))
    with pytest.raises(InvalidInput, match="owns up to 20"):
        trial.train(by_user((X, Y), dpfy.Users(OWNERS), 3))


def test_a_named_field_of_owners_is_split_too(tmp_path):
    grouped = by_user({"x": X, "y": Y, "who": OWNERS}, dpfy.Users("who", loss="mean"), EACH)
    trial = given(tmp_path / "x", parts=TrialSplit(USERS, 0.4))
    train, valid = trial.train(grouped), trial.valid(grouped)
    assert sorted(as_source(train).base.take(torch.tensor([0]))) == ["x", "y"]
    assert len(valid) + len(as_source(train)) == USERS
    assert 0 <= trial.count(valid.flat[1].bool()) <= POINTS * len(valid)


@pytest.mark.parametrize("score", ["training", "held-out"])
def test_a_search_over_users_whose_records_are_drawn_anew(tmp_path, score):
    grouped = by_user((X, Y), dpfy.Users(OWNERS, loss="mean"), EACH)

    def objective(trial):
        net = trained(trial, trial.train(grouped))
        return trial.count(answers(net, trial.valid(grouped)))

    found = search(objective, tmp_path / "run", score=score, held_out=0.4)
    assert "user" in found.report["guarantee"]["unit"]
    assert found.report["guarantee"]["epsilon"] <= 3.0
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_parts_of_single_records_are_refused_where_a_user_owns_several(tmp_path):
    trial = given(tmp_path / "x", parts=TrialSplit(USERS, 0.3))
    for ask in (trial.train, trial.valid):
        with pytest.raises(InvalidInput, match="by_user"):
            ask((X, Y))
        with pytest.raises(Unsupported, match="by_user"):
            ask(by_user([(x, y) for x, y in zip(X, Y, strict=True)], dpfy.Users(OWNERS), EACH))
    single = dpfy.dpsgd(USERS, 10, steps=2, unit=USER, draw="record")
    with pytest.raises(Unsupported, match="one by one"):
        calibrate_search(
            SearchRoute("composition", 2, score="held-out"), PrivacyTarget(3.0, 1e-4), [single]
        )


def test_a_trial_that_protects_something_else_than_the_search_is_refused(tmp_path):
    """Sampling and noise are the same: only the unit, or the adjacency, differs."""
    plan = dpfy.dpsgd(USERS, 10, steps=2, unit=USER).with_noise(1.0, delta=1e-3)
    source = TrialRights(None, "test", Randomness.for_tests(3))
    for name, other in (
        ("record", dpfy.dpsgd(USERS, 10, steps=2)),
        ("fewer", dpfy.dpsgd(USERS, 10, steps=2, unit=dpfy.Unit("user", 2))),
        ("adjacency", dpfy.dpsgd(USERS, 10, steps=2, unit=USER, adjacency="zero-out")),
    ):
        trial = Trial(TrialTask(tmp_path / name, 0, {}, None, (plan,), None, source, on_training))
        with pytest.raises(InvalidInput, match="nothing was reserved"):
            trial.planned(other)


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one", "zero-out"])
@pytest.mark.parametrize("score", ["training", "held-out"])
def test_scores_of_users_cost_what_scores_of_records_cost(adjacency, score):
    """A user moves a score by POINTS points as a record moves it by one: the noise is the same in
    units, under every adjacency.
    """
    payment, target = (
        SearchRoute("composition", 3, score=score, adjacency=adjacency),
        PrivacyTarget(3.0, 1e-4, adjacency),
    )
    one, many = (
        calibrate_search(
            payment, target, [dpfy.dpsgd(USERS, 10, steps=2, unit=unit, adjacency=adjacency)]
        )
        for unit in (dpfy.Unit("user", 1), USER)
    )
    assert many.score.sigma / POINTS == pytest.approx(one.score.sigma, rel=0.05)
    assert accounting.epsilon(many.event, 1e-4, adjacency=adjacency) <= 3.0 * (1 + 1e-9)


def test_noisy_max_and_a_subset_take_whole_users(tmp_path):
    def only_trained(trial):
        seen.append(trial.train(users()))
        return trained(trial, seen[-1]) is None or 0.5

    found = search(
        on_held_out, tmp_path / "noisy", route="noisy-max", score="held-out", held_out=0.4
    )
    assert found.report["guarantee"]["epsilon"] <= 3.0
    seen = []
    work = dpfy.tuning.run.Execution(scaled=lambda settings, share: settings)
    made = tune(
        only_trained, {"rate": "0.1..1"}, recipe, terms(route="subset", score="public", sample=0.4, law="geometric"),
        Run(tmp_path / "subset", seed=5), work=work,
    )  # fmt: skip
    assert made.report["guarantee"]["epsilon"] <= 3.0
    assert all(isinstance(part, UserRecords) and part.records_each == EACH for part in seen)


# records held out are not trained on, however few they are


def held(tmp_path, share, train):
    def objective(trial):
        net = torch.nn.Linear(toy.FEATURES, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        dpfy.fit(net, train(trial), plan=trial.plan, optimizer=optimizer, run=trial.run)
        return trial.count(toy.right(net, *trial.valid((toy.X, toy.Y)).tensors))

    asked = toy.terms(score="held-out", held_out=share, route="composition", trials=2)
    return tune(objective, toy.SPACE, toy.recipe, asked, Run(tmp_path / "run", seed=7))


EVERYTHING = {
    "all": lambda trial: (toy.X, toy.Y),
    "held out": lambda trial: trial.valid((toy.X, toy.Y)),
    "unwrapped": lambda trial: torch.utils.data.TensorDataset(*trial.train((toy.X, toy.Y)).tensors),
    "a slice": lambda trial: (
        toy.X[: trial.plan.recipe.records],
        toy.Y[: trial.plan.recipe.records],
    ),
}


@pytest.mark.parametrize("share", [0.009, 0.02, 0.5])
@pytest.mark.parametrize("what", EVERYTHING)
def test_training_on_records_that_are_held_out_is_refused(tmp_path, share, what):
    with pytest.raises(
        TrialFailed, match=r"must train on its training records|the plan was made for|too few"
    ):
        held(tmp_path, share, EVERYTHING[what])


def test_training_on_what_the_trial_gives_is_not_refused(tmp_path):
    assert held(tmp_path, 0.1, lambda trial: trial.train((toy.X, toy.Y))).settings


def test_parts_are_taken_of_the_same_rows(tmp_path):
    trial = given(tmp_path / "x", most=1, parts=TrialSplit(300, 0.3))
    trial.train((toy.X, toy.Y))
    with pytest.raises(InvalidInput, match="same order"):
        trial.valid((toy.X[:200], toy.Y[:200]))


def test_a_score_is_at_most_the_number_of_records(tmp_path):
    trial = given(tmp_path / "x", most=1, parts=TrialSplit(300, 0.3))
    trial.train((toy.X, toy.Y))
    valid = trial.valid((toy.X, toy.Y))
    with pytest.raises(InvalidInput, match="at most the number") as caught:
        trial.count(len(valid) + 1)
    assert str(len(valid)) not in str(caught.value)
    assert trial.count(len(valid)) == len(valid)
