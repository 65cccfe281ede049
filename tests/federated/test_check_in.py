"""Clients that nobody can sample: they check in when they can, rest between two rounds, and noise
is correlated over the rounds.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import nn

import dpfy
from dpfy.core.unit import Adjacency, Separated
from dpfy.federated import CLIENT, LocalTraining, OwnTimes, PrivateRounds, check_in
from dpfy.federated import fit as federated_fit
from dpfy.federated.recipes import Participations
from dpfy.plan.recipe import Plan

CLIENTS, ROUNDS = 30, 9
pytestmark = pytest.mark.filterwarnings("ignore:run .*")


def recipe(strategy: str = "blt", separation: int = 3, most: int | None = None):
    return check_in(
        CLIENTS,
        8,
        rounds=ROUNDS,
        separation=separation,
        most=most,
        strategy=strategy,
        clip_norm=0.5,
    )


@lru_cache
def plan(**options) -> Plan:
    return recipe(**options).calibrate(4.0, 1e-3)


def opened(tmp_path, the_plan=None, resume=False, **options):
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.zero_()
    run = dpfy.Run(tmp_path / "run", seed=3, resume=resume)
    return PrivateRounds(
        net, torch.optim.SGD(net.parameters(), lr=1.0), the_plan or plan(), run, **options
    )


def answers(cohort):
    for client in cohort.clients:
        rng = np.random.default_rng([int(client), cohort.step])
        cohort.add(client, [rng.normal(size=(2, 3)), rng.normal(size=2)])


@pytest.mark.parametrize("strategy", ["blt", "bands", "independent"])
def test_plans_claim_no_amplification_and_bill_the_worst_schedule(strategy):
    made = plan(strategy=strategy)
    assert made.recipe.adjacency is Adjacency.ZERO_OUT
    assert made.recipe.sampler.participation == Separated(3, 3)
    assert made.epsilon == pytest.approx(4.0, rel=1e-3)
    assert made.epsilon <= 4.0
    assert Plan.from_json(made.to_json()) == made
    if strategy == "independent":  # three releases of its sum, whatever anyone knows about who came
        three = dpfy.dpsgd(CLIENTS, CLIENTS, steps=3, unit=CLIENT, adjacency="zero-out").calibrate(
            4.0, 1e-3
        )
        assert made.scale == pytest.approx(three.noise_multiplier, rel=1e-3)


def test_sensitivity_is_that_of_the_worst_schedule():
    """Every schedule that the server would admit, tried one by one, against what is billed."""
    for strategy in ("blt", "bands"):
        made = recipe(strategy)
        column = np.zeros(ROUNDS)
        found = made.strategy.coefficients(ROUNDS)
        column[: len(found)] = found
        encoder = np.array(
            [[column[i - j] if i >= j else 0.0 for j in range(ROUNDS)] for i in range(ROUNDS)]
        )
        worst = 0.0
        for count in (1, 2, 3):
            for rounds in combinations(range(ROUNDS), count):
                if all(b - a >= 3 for a, b in pairwise(rounds)):
                    worst = max(worst, float(np.linalg.norm(encoder[:, list(rounds)].sum(1))))
        assert worst <= made.strategy.sensitivity(made.sampler.participation, ROUNDS) * (1 + 1e-9)


def test_who_rests_is_refused_and_nothing_begins(tmp_path):
    with opened(tmp_path) as rounds:
        answers(cohort := rounds.check_in([4, 2, 9]))
        assert cohort.clients.tolist() == [2, 4, 9]
        with pytest.raises(dpfy.InvalidInput, match="is under way"):
            rounds.check_in([1])
        cohort.close()
        with pytest.raises(dpfy.InvalidInput, match="client 4"):
            rounds.check_in([1, 4])
        with pytest.raises(dpfy.InvalidInput, match="once a round"):
            rounds.check_in([1, 1])
        with pytest.raises(dpfy.InvalidInput, match="client 30"):
            rounds.check_in([30])
        rounds.check_in([1]).close()
        rounds.check_in([]).close()
        assert {2, 4, 9} <= set(rounds.may_take_part().tolist())
        assert 1 not in rounds.may_take_part()
        rounds.check_in([2, 4, 9]).close()


def test_a_client_takes_part_as_often_as_planned_and_no_more(tmp_path):
    with opened(tmp_path, plan(most=2)) as rounds:
        for _ in range(2):
            rounds.check_in([0]).close()
            rounds.check_in([]).close()
            rounds.check_in([]).close()
        with pytest.raises(dpfy.InvalidInput, match="client 0"):
            rounds.check_in([0])


def test_what_is_not_enforced_is_refused(tmp_path):
    with pytest.raises(dpfy.Unsupported, match="zero-out"):
        replace(recipe(), adjacency=Adjacency.ADD_OR_REMOVE_ONE)
    with pytest.raises(dpfy.InvalidInput, match="cohort"):
        check_in(CLIENTS, 11, rounds=ROUNDS, separation=3)
    with pytest.raises(dpfy.InvalidInput, match="separation"):
        check_in(CLIENTS, 1, rounds=ROUNDS, separation=10)
    with opened(tmp_path) as rounds:
        with pytest.raises(dpfy.Unsupported, match="arrivals"):
            rounds.cohort()
        rounds.check_in([5]).close()
        rounds.kept.clear()
        with pytest.raises(dpfy.InvalidInput, match="leave it alone"):
            rounds.check_in([5])
    sampled = dpfy.dpsgd(CLIENTS, 8, steps=3, unit=CLIENT).with_noise(1.0, delta=1e-3)
    with (
        opened(tmp_path / "sampled", sampled) as rounds,
        pytest.raises(dpfy.Unsupported, match="draws its clients"),
    ):
        rounds.check_in([5])
    net = nn.Linear(3, 2)
    with (
        pytest.raises(dpfy.Unsupported, match="PrivateRounds"),
        dpfy.PrivateTraining(
            net,
            torch.optim.SGD(net.parameters(), lr=1.0),
            torch.zeros(CLIENTS, 3),
            plan(),
            tmp_path / "x",
        ) as training,
    ):
        next(iter(training.batches()))


def test_a_killed_server_remembers_who_took_part(tmp_path):
    """Also the round whose sum was kept, and whose step no checkpoint held."""

    def die(total):
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), opened(tmp_path) as rounds:
        answers(cohort := rounds.check_in([3, 7]))
        cohort.close()
        answers(cohort := rounds.check_in([8]))
        rounds.__dict__["_update"] = die
        cohort.close()
    with opened(tmp_path, resume=True) as rounds:
        with pytest.raises(dpfy.InvalidInput, match="client 8"):
            rounds.check_in([8])
        assert rounds.steps_done == 2
        assert rounds.participations.rounds == [[3, 7], [8]]


def test_own_times_keep_to_what_may_be():
    arrivals, made = OwnTimes(4, seed=1), []
    for step in range(60):
        may = Participations(CLIENTS, made).eligible(step, 3, 20)
        came = arrivals(step, may)
        assert set(came) <= set(may.tolist())
        assert len(came) == 4
        made.append(came.tolist())
    often = np.bincount(np.concatenate(made), minlength=CLIENTS)
    assert often.max() > 1.2 * often.mean()  # not in turn: some come more often


@pytest.mark.parametrize("local", [LocalTraining(3, 4, 0.2), LocalTraining()], ids=["steps", "one"])
def test_a_simulation_without_sampling_ends_in_a_verified_card(tmp_path, local):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(150, 3))).float()
    data = dpfy.by_user((x, (x.sum(1) > 0).long()), np.arange(150) % CLIENTS, 5)
    net = nn.Linear(3, 2)
    the_plan = plan()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    result = federated_fit(
        net,
        data,
        plan=the_plan,
        optimizer=optimizer,
        local=local,
        run=dpfy.Run(tmp_path / "run", seed=1),
    )
    assert result.epsilon <= 4.0
    assert all(found.holds for found in dpfy.verify(tmp_path / "run"))
    sampled = dpfy.dpsgd(CLIENTS, 8, steps=3, unit=CLIENT).with_noise(1.0, delta=1e-3)
    with pytest.raises(dpfy.InvalidInput, match="arrivals"):
        federated_fit(net, data, plan=sampled, optimizer=optimizer, arrivals=OwnTimes(3))
