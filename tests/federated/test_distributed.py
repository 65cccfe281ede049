"""Rounds whose noise the clients add: billed, kept, resumed and verified like all others, and
nothing of a round with too few.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.federated import fleet
from torch import nn

import dpfy
from dpfy.core import events as ev
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.federated import LocalTraining, PrivateRounds
from dpfy.federated import shares as sh
from dpfy.plan.recipe import Plan

CLIENTS, DIMENSION = 24, sum(p.numel() for p in fleet.model().parameters())
ABOUT = {"clients": CLIENTS, "dimension": DIMENSION, "rounds": 3, "epsilon": 6.0, "delta": 1e-3, "least": 16, "clip_norm": 0.5,  # noqa: E501
         "bits": 20, "rotation": 7}  # fmt: skip
PLAN = sh.plan(**ABOUT)


def opened(
    run: object, plan: Plan = PLAN, net: nn.Module | None = None, **options
) -> sh.DistributedRounds:
    net = net or fleet.model()
    return sh.DistributedRounds(
        net, torch.optim.SGD(net.parameters(), lr=1.0), plan, run, **options
    )


def flat(update: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([t.reshape(-1) for t in update])


def serve(
    run: object,
    *,
    until: int = 3,
    lost: int = 4,
    plan: Plan = PLAN,
    messages: bool = False,
    **options,
) -> nn.Module:
    """Rounds until one; in each some clients never answer. Everything is a function of client and
    round.
    """
    net = fleet.model()
    with opened(run, plan, net, **options) as rounds:
        devices = [sh.Client(rounds.scheme, c, Randomness.for_tests(c)) for c in range(CLIENTS)]
        for cohort in rounds.cohorts():
            for client in cohort.clients[lost:].tolist():
                update = fleet.answer(client, cohort.step, net)
                if messages:
                    cohort.add_message(client, devices[client].message(flat(update), cohort.step))
                else:
                    cohort.add(client, update)
            if cohort.step + 1 == until < 3:
                cohort.close()
                break
    return net


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def test_a_plan_bills_every_round_for_the_least_survivors_and_claims_no_amplification() -> None:
    event = PLAN.event
    assert isinstance(event, ev.Repeated)
    assert event.count == 3
    assert (event.event.shares, event.event.coordinates) == (16, 64)
    assert 5.9 < PLAN.epsilon <= 6.0
    sampled = sh.plan(**ABOUT | {"cohort": 12, "least": 8})
    assert sampled.epsilon <= 6.0
    assert isinstance(sampled.event, ev.Repeated)
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    with pytest.raises(dpfy.Unsupported, match="zero-out or replace-one"):
        sh.plan(**ABOUT | {"adjacency": Adjacency.ADD_OR_REMOVE_ONE})


@pytest.mark.parametrize("messages", [False, True])
def test_rounds_leave_a_verified_card_that_says_who_is_trusted(
    tmp_path: Path, messages: bool
) -> None:
    serve(tmp_path / "run", messages=messages)
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["guarantee"]["trust"] == card["setting"]["model"] == "distributed"
    assert "at least 16 honest clients" in card["setting"]["trusted"]
    assert card["guarantee"]["epsilon"] <= 6.0
    (part,) = (p for p in card["sections"] if p["name"] == "training")
    assert "wraps around with a probability of at most" in part["mechanism"]["noise"]
    rows = {row["what"]: row for row in part["assumptions"]}
    assert rows["secure aggregation"]["holds"] == "no"
    assert ("instead of the clients" in rows["secure aggregation"]["done"]) != messages
    assert "fewer than 16" in rows["honest clients"]["done"]


def test_the_sum_that_the_model_takes_is_the_mean_of_the_clipped_updates(tmp_path: Path) -> None:
    """Hardly any noise: the first step is the mean over the expected cohort, rotated there and
    back.
    """
    quiet = sh.plan(**ABOUT | {"rounds": 1, "epsilon": 1e5, "bits": 40, "least": 20})
    before = weights(fleet.model())
    net = serve(tmp_path / "run", lost=2, plan=quiet)
    expected = np.zeros(DIMENSION)
    for client in range(2, CLIENTS):
        update = flat(fleet.answer(client, 0, fleet.model())).astype(np.float64)
        expected += update * min(1.0, 0.5 / np.linalg.norm(update))
    moved = flat([(a - b.detach()).numpy() for a, b in zip(before, net.parameters(), strict=True)])
    assert np.abs(moved - expected / CLIENTS).max() < 3 * 6 * 0.5 / CLIENTS * quiet.noise_multiplier
    assert np.abs(expected / CLIENTS).max() > 20 * np.abs(moved - expected / CLIENTS).max()


def test_the_noise_of_a_round_is_as_billed_or_larger(tmp_path: Path) -> None:
    """Updates of zero: what moves the model is noise of all who answered, which is at least that of
    the least.
    """
    plan, found = sh.plan(**ABOUT | {"rounds": 12, "epsilon": 3.0}), []
    net = fleet.model()
    with opened(tmp_path / "run", plan, net) as rounds:
        for cohort in rounds.cohorts():
            before = weights(net)
            for client in cohort.clients.tolist():
                cohort.add(client, [np.zeros(tuple(p.shape), np.float32) for p in net.parameters()])
            cohort.close()
            found += [(a - b).reshape(-1) for a, b in zip(before, weights(net), strict=True)]
        scale = rounds.scheme.step * rounds.scheme.share / CLIENTS
    drawn = torch.cat(found).double() / (scale * math.sqrt(CLIENTS))
    assert abs(float((drawn**2).mean()) - 1) < 5 * math.sqrt(2 / len(drawn))


def test_too_few_release_nothing_and_the_round_goes_on(tmp_path: Path) -> None:
    net = fleet.model()
    with opened(tmp_path / "run", net=net) as rounds:
        cohort = rounds.cohort()
        for client in cohort.clients[:15].tolist():
            cohort.add(client, fleet.answer(client, 0, net))
        before = weights(net)
        with pytest.raises(sh.TooFew, match="15 of at least 16"):
            cohort.close()
        assert rounds.steps_done == 0
        assert all(map(torch.equal, before, weights(net)))
        assert not list((tmp_path / "run" / "checkpoint").glob("round*"))
        cohort.add(cohort.clients[20], [np.full_like(t, np.nan) for t in fleet.answer(20, 0, net)])
        tally = cohort.close()
        assert (tally.answered, tally.unusable) == (16, (20,))
        assert all(p.isfinite().all() for p in net.parameters())
        assert rounds.steps_done == 1
        skipped = rounds.cohort()
        skipped.add(skipped.clients[0], fleet.answer(0, 1, net))
        before = weights(net)
        assert skipped.skip().answered == 0
        assert all(map(torch.equal, before, weights(net)))
        assert rounds.steps_done == 2


def test_a_run_that_was_left_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = serve(dpfy.Run(tmp_path / "whole", seed=3))
    serve(dpfy.Run(tmp_path / "left", seed=3), until=1)
    again = serve(dpfy.Run(tmp_path / "left", seed=3, resume=True))
    assert all(map(torch.equal, weights(whole), weights(again)))


def test_masks_that_cancel_give_the_same_model(tmp_path: Path) -> None:
    plain = serve(dpfy.Run(tmp_path / "plain", seed=3))
    secure = sh.MaskedSum(range(CLIENTS), Randomness.for_tests(9))
    masked = serve(dpfy.Run(tmp_path / "masked", seed=3), aggregator=secure)
    assert all(map(torch.equal, weights(plain), weights(masked)))


class Elsewhere(sh.TrustedSum):
    """Stands for a protocol."""

    words = "a protocol between the clients, with a server that follows it"


def test_a_protocol_is_named_and_a_simulation_before_it_is_not_forgotten(tmp_path: Path) -> None:
    def said(path: Path) -> dict[str, str]:
        card = json.loads((path / "privacy.json").read_text())
        (part,) = (p for p in card["sections"] if p["name"] == "training")
        return next(row for row in part["assumptions"] if row["what"] == "secure aggregation")

    serve(tmp_path / "real", messages=True, aggregator=Elsewhere())
    assert said(tmp_path / "real")["holds"] == "stated"
    assert said(tmp_path / "real")["done"] == Elsewhere.words
    serve(dpfy.Run(tmp_path / "mixed", seed=3), until=1, messages=True)
    serve(dpfy.Run(tmp_path / "mixed", seed=3, resume=True), messages=True, aggregator=Elsewhere())
    assert said(tmp_path / "mixed")["holds"] == "no"
    serve(tmp_path / "here", aggregator=Elsewhere())
    assert said(tmp_path / "here")["holds"] == "no"


def test_one_call_trains_with_noise_in_shares(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    records = (
        torch.from_numpy(rng.normal(size=(96, 5)).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 2, 96)),
    )
    clients = dpfy.by_user(records, np.repeat(np.arange(CLIENTS), 4), 4)
    for steps in (1, 2):
        net = fleet.model()
        found = dpfy.federated.fit(
            net, clients, plan=PLAN, optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
            local=LocalTraining(steps=steps), run=tmp_path / str(steps),
        )  # fmt: skip
        assert found.guarantee.trust == "distributed"
        assert found.epsilon <= 6.0
        assert all(finding.holds for finding in dpfy.verify(tmp_path / str(steps)))


def test_messages_count_once_and_only_those_of_the_cohort(tmp_path: Path) -> None:
    plan = sh.plan(**ABOUT | {"cohort": 12, "least": 4})
    with opened(tmp_path / "run", plan) as rounds:
        cohort = rounds.cohort()
        first, outsider = (
            int(cohort.clients[0]),
            next(c for c in range(CLIENTS) if c not in cohort.clients),
        )
        message = sh.Client(rounds.scheme, first).message(np.ones(DIMENSION), 0)
        cohort.add_message(first, message)
        assert first not in cohort.waiting
        for act in (
            lambda: cohort.add_message(first, message),
            lambda: cohort.add(first, fleet.answer(0, 0, rounds.model)),
        ):
            with pytest.raises(dpfy.InvalidInput, match="second"):
                act()
        with pytest.raises(dpfy.InvalidInput, match="not drawn"):
            cohort.add_message(outsider, message)


def test_plans_with_shares_do_not_run_without_them_nor_others_with_them(tmp_path: Path) -> None:
    net = fleet.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with pytest.raises(dpfy.Unsupported, match="DistributedRounds"):
        PrivateRounds(net, optimizer, PLAN, tmp_path / "run")
    with pytest.raises(dpfy.Unsupported, match="DistributedRounds"):
        dpfy.PrivateTraining(net, optimizer, (torch.zeros(CLIENTS, 5),), PLAN, tmp_path / "run")
    with pytest.raises(dpfy.Unsupported, match="not in shares"):
        opened(tmp_path / "run", fleet.plan())
    with pytest.raises(dpfy.InvalidInput, match="dimension"):
        opened(tmp_path / "run", sh.plan(**ABOUT | {"dimension": DIMENSION + 1}))
    shorter = replace(PLAN, recipe=replace(PLAN.recipe, steps=2))
    assert shorter.epsilon < PLAN.epsilon
    assert not (tmp_path / "run").exists()
