"""The server's side: who is in a round, what an update may be, what it can do at most, and what a
crash leaves.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.federated.fleet import CLIENTS, ROUNDS, answer, forked, model, plan, serve

import dpfy
from dpfy.core.ledger import Ledger
from dpfy.core.unit import EXAMPLE
from dpfy.federated import CLIENT, PrivateRounds
from dpfy.gradients.clip import PerLayerClip, QuantileClip
from dpfy.plan import bandmf, dpftrl
from dpfy.training import Update

HUGE = 1e30
pytestmark = pytest.mark.filterwarnings("ignore:run .*")  # most tests leave a run before its end


def opened(tmp_path, the_plan=None, net=None, **options):
    net = net or model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return PrivateRounds(
        net, optimizer, the_plan or plan(), dpfy.Run(tmp_path / "run", seed=3), **options
    )


def sound(path) -> bool:
    """Whether every check of the folder passes."""
    return all(found.holds for found in dpfy.verify(path))


def some(rounds):
    """The first cohort that is not empty."""
    return next(cohort for cohort in rounds.cohorts() if len(cohort) > 1)


def test_a_federation_leaves_a_verified_card_of_clients(tmp_path):
    net = serve(tmp_path / "run")
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["unit"]["name"] == "client"
    assert "in however many records" in card["unit"]["meaning"]
    assert "all of their records" in card["unit"]["protection_words"]
    section = card["sections"][0]
    assert section["components"]["checked"].startswith("the update of each client was bounded")
    assert sound(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert net is not None


def test_noise_none_is_the_mean_over_the_expected_cohort_of_clipped_updates(tmp_path):
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    with opened(tmp_path, plan(1, noise=0.0), net) as rounds:
        cohort = rounds.cohort()
        for client in cohort.clients[:-1]:
            cohort.add(client, answer(client, 0, net))
        updates = [[torch.from_numpy(t) for t in answer(c, 0, net)] for c in cohort.clients[:-1]]
        lost = cohort.clients[-1]
        tally = cohort.close()
        expected = [torch.zeros_like(p) for p in before]
        for update in updates:
            norm = torch.sqrt(sum(t.double().square().sum() for t in update))
            for total, t in zip(expected, update, strict=True):
                total += t * min(1.0, 0.5 / float(norm))
        for p, start, total in zip(net.parameters(), before, expected, strict=True):
            assert torch.allclose(
                start - p, total / 8, atol=1e-4
            )  # 8 are expected, however many answer
        assert (tally.missing, tally.answered) == (1, len(updates))
        assert lost not in cohort._rows


BAD = [
    (lambda c, u: c.add(c.outsider, u), "was not drawn"),
    (lambda c, u: c.add(True, u), "was not drawn"),
    (lambda c, u: c.add("3", u), "was not drawn"),
    (lambda c, u: (c.add(c.clients[0], u), c.add(c.clients[0], u)), "a second update"),
    (
        lambda c, u: (c.add(c.clients[0], u), c.add_all([np.stack([t] * len(c)) for t in u])),
        "a second update",
    ),
    (lambda c, u: c.add(c.clients[0], u[:-1]), "3 tensors"),
    (lambda c, u: c.add(c.clients[0], [t[..., None] for t in u]), "shape"),
    (lambda c, u: c.add(c.clients[0], [t.reshape(-1) for t in u]), "shape"),
    (lambda c, u: c.add(c.clients[0], dict(zip("abcd", u, strict=True))), "is missing or too many"),
    (lambda c, u: c.add(c.clients[0], [t.astype(int) for t in u]), "floating-point"),
    (lambda c, u: c.add(c.clients[0], [list(t) for t in u]), "floating-point"),
    (lambda c, u: c.add_all([np.stack([t] * (len(c) + 1)) for t in u]), "shape"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_is_no_update_of_a_drawn_client_is_refused(tmp_path, case):
    act, words = BAD[case]
    with opened(tmp_path) as rounds:
        cohort = some(rounds)
        cohort.outsider = next(n for n in range(CLIENTS) if n not in set(cohort.clients.tolist()))
        with pytest.raises(dpfy.InvalidInput, match=words):
            act(cohort, answer(0, 0, rounds.model))


def test_a_round_that_is_over_takes_nothing(tmp_path):
    with opened(tmp_path) as rounds:
        cohort = some(rounds)
        cohort.close()
        cohort.close()
        with pytest.raises(dpfy.InvalidInput, match="is over"):
            cohort.add(cohort.clients[0], answer(0, 0, rounds.model))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), HUGE])
def test_poison_counts_as_nothing_and_is_told(tmp_path, poison):
    """Of two runs that differ in one client's update alone, NaN and nothing, the models are the
    same to the last bit.
    """
    models = []
    for bad in (True, False):
        net = model()
        with opened(tmp_path / str(bad), plan(1, noise=1.0, cohort=20), net) as rounds:
            cohort = some(rounds)
            for client in cohort.clients:
                sent = answer(client, 0, net)
                if client == cohort.clients[1]:
                    if not bad:
                        continue
                    sent[0][0, 0] = poison
                cohort.add(client, sent)
            tally = cohort.close()
            assert tally.unusable == ((int(cohort.clients[1]),) if bad else ())
            models.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *models))


def test_one_client_moves_the_sum_by_the_bound_at_most(tmp_path):
    for clip in (
        dpfy.dpsgd(9, 3, steps=1, clip_norm=0.3).clip,
        PerLayerClip(0.3),
        QuantileClip(0.3),
    ):
        with opened(tmp_path / type(clip).__name__, plan(clip=clip, cohort=30)) as rounds:
            cohort = some(rounds)
            last = cohort.clients[-1]
            for client in cohort.clients[:-1]:
                cohort.add(client, answer(client, 0, rounds.model))
            without, _ = cohort.bounded(rounds.clip, CLIENT)
            cohort.add(last, [1e6 * t for t in answer(last, 0, rounds.model)])
            whole, _ = cohort.bounded(rounds.clip, CLIENT)
            moved = torch.sqrt(
                sum(
                    (whole.value[n] - without.value[n]).double().square().sum() for n in whole.value
                )
            )
            assert 0.9 * rounds.clip.bound.l2 < float(moved) <= rounds.clip.bound.l2 * (1 + 1e-6)


def test_the_order_of_arrival_changes_no_bit(tmp_path):
    sums = []
    for order in (1, -1):
        with opened(tmp_path / str(order)) as rounds:
            cohort = some(rounds)
            for client in cohort.clients[::order]:
                cohort.add(client, answer(client, 0, rounds.model))
            sums.append(cohort.bounded(rounds.clip, CLIENT)[0].value)
            whole = [
                np.stack(t)
                for t in zip(*[answer(c, 0, rounds.model) for c in cohort.clients], strict=True)
            ]
            cohort._rows.clear()
            cohort.add_all(whole)
            assert cohort.waiting == []
            sums.append(cohort.bounded(rounds.clip, CLIENT)[0].value)
    assert all(torch.equal(sums[0][n], other[n]) for other in sums for n in sums[0])


def test_what_a_client_sent_is_copied(tmp_path):
    with opened(tmp_path) as rounds:
        cohort = some(rounds)
        sent = [torch.from_numpy(t) for t in answer(0, 0, rounds.model)]
        cohort.add(cohort.clients[0], sent)
        before = cohort.bounded(rounds.clip, CLIENT)[0].value
        for t in sent:
            t.fill_(9.0)
        after = cohort.bounded(rounds.clip, CLIENT)[0].value
        assert all(torch.equal(before[n], after[n]) for n in before)


def test_a_plan_of_examples_and_a_loop_over_batches_are_refused(tmp_path):
    with pytest.raises(dpfy.InvalidInput, match="plan unit"):
        opened(tmp_path, plan(unit=EXAMPLE))
    with pytest.raises(dpfy.InvalidInput, match="the plan was made for 40"):
        opened(tmp_path, clients=50)
    with pytest.raises(dpfy.Unsupported, match="cohorts"), opened(tmp_path) as rounds:
        rounds.batches()


def test_a_killed_server_goes_on_from_the_sum_that_it_kept(tmp_path):
    """Killed at many writes of its life, a server whose clients answer *otherwise* after the crash
    resumes, and bills it all.
    """
    whole = str(tmp_path / "whole")
    assert forked(whole, None) == 0
    calls = int(Path(whole + ".calls").read_text())
    model_of = (Path(whole) / "model.safetensors").read_bytes()
    for n, death in enumerate(range(5, calls, calls // 5)):
        path = str(tmp_path / str(death))
        assert forked(path, death) == -9
        if (Path(path) / "checkpoint" / "state.safetensors").is_file():
            assert (
                len(Ledger.read(Path(path) / "ledger.jsonl").permits()) == 1
            )  # reserved whole, before anything
        other = n % 2
        assert forked(path, None, salt=other) == 0
        made = (Path(path) / "model.safetensors").read_bytes()
        assert other or made == model_of  # the same answers: the same bits
        assert sound(path)
        assert not (Path(path) / "checkpoint").exists()


def test_a_kept_sum_is_released_though_the_clients_now_say_something_else(tmp_path):
    """Noise is made once for a round: the kept sum, not the new answers, is what it is made for."""

    def die(total):
        raise KeyboardInterrupt

    made = []
    for dies in (False, True):
        folder = tmp_path / str(dies)
        with contextlib.suppress(KeyboardInterrupt), opened(folder) as rounds:
            cohort = some(rounds)
            for client in cohort.clients:
                cohort.add(client, answer(client, 0, rounds.model))
            if dies:
                rounds.__dict__["_update"] = die
            cohort.close()
        net, run = model(), dpfy.Run(folder / "run", seed=3, resume=True)
        with PrivateRounds(net, torch.optim.SGD(net.parameters(), lr=1.0), plan(), run) as rounds:
            assert rounds.steps_done == cohort.step + (not dies)
            assert rounds.cohort().step == cohort.step + 1
            made.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *made))


def test_the_repeatable_form_refuses_other_answers_after_a_crash(tmp_path):
    run = dpfy.Run(tmp_path / "run", seed=3, checkpoint_every=float("inf"))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    with PrivateRounds(
        net, optimizer, plan(), run, repeatable=True, update=Update(average=0.5)
    ) as rounds:
        for cohort in rounds.cohorts():
            if cohort.step == 3:
                break
            for client in cohort.clients:
                cohort.add(client, answer(client, cohort.step, net))
    with pytest.raises(dpfy.InvalidInput, match="another sum"):
        serve(replace(run, resume=True), repeatable=True, salt=1)


@pytest.mark.parametrize("kind", ["quantile", "bands", "tree", "exact"])
def test_clip_rules_and_noise_strategies_of_the_loop_serve_rounds(tmp_path, kind):
    recipes = {
        "quantile": lambda: replace(
            dpfy.dpsgd(CLIENTS, 8, steps=ROUNDS, unit=CLIENT), clip=QuantileClip(0.5)
        ),
        "bands": lambda: bandmf(CLIENTS, 8, bands=3, steps=ROUNDS, unit=CLIENT),
        "tree": lambda: dpftrl(CLIENTS, 8, steps=ROUNDS, unit=CLIENT),
        "exact": lambda: dpfy.dpsgd(CLIENTS, 8, steps=ROUNDS, unit=CLIENT, noise="exact"),
    }
    the_plan = recipes[kind]().calibrate(3.0, 1e-3)
    serve(dpfy.Run(tmp_path / "run", seed=1), the_plan=the_plan)
    assert sound(tmp_path / "run")
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == model().state_dict().keys()


def test_the_setting_of_the_federated_tutorial_is_billed_tightly():
    """3,383 clients, 120 a round, noise 1.2, 100 rounds, delta 1e-5."""
    tutorial = dpfy.dpsgd(3383, 120, steps=100, unit=CLIENT).with_noise(1.2, delta=1e-5)
    assert tutorial.epsilon == pytest.approx(1.7075, abs=1e-3)
