"""Noise schedules: billed as the phases they are, added as billed, resumed bit for bit, and
verified from the run folder.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpfy
from dpfy import accounting
from dpfy.cli.app import main
from dpfy.core import events
from dpfy.core.codec import digest
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.clip import FlatClip, QuantileClip
from dpfy.noise.schedule import Schedule, equal_phases
from dpfy.noise.strategy import Identity
from dpfy.plan.recipe import Recipe
from dpfy.report import card as cards
from dpfy.sampling.samplers import FixedOrderSampler

sys.path.insert(0, str(Path(__file__).parent))
import small

PHASES = Schedule((8, 12, 10), (2.0, 1.0, 1.5))


def recipe(schedule: Schedule | Identity = PHASES, batch: float = 20) -> Recipe:
    return replace(dpfy.dpsgd(small.RECORDS, batch, steps=30, clip_norm=0.5), strategy=schedule)


def phase(noise: float, steps: int, rate: float = 0.1) -> events.Event:
    return events.Repeated(events.PoissonSampled(rate, events.Gaussian(noise)), steps)


# --- the bill
# -------------------------------------------------------------------------------------------------------------------


def test_the_event_is_the_phases_one_after_the_other():
    plan = recipe().with_noise(1.25, delta=1e-3)
    assert plan.event == events.Composed((phase(2.5, 8), phase(1.25, 12), phase(1.875, 10)))
    assert plan.stddev == 1.25 * 0.5, "what is given is what every step has at least"
    full = recipe(batch=small.RECORDS).with_noise(2.0, delta=1e-3)
    mu = math.sqrt(8 / 16 + 12 / 4 + 10 / 9)  # Gaussians compose exactly
    assert full.epsilon == pytest.approx(
        accounting.epsilon(events.Gaussian(1 / mu), 1e-3), rel=1e-6
    )


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 20, 21, 29])
def test_a_run_cut_short_is_billed_for_the_steps_it_made(steps):
    plan = recipe().with_noise(1.25, delta=1e-3)
    made = [phase(1.25 * PHASES.factor(s), 1) for s in range(steps)]
    assert plan.epsilon_after(steps) == pytest.approx(
        accounting.epsilon(events.Composed(tuple(made)), 1e-3), rel=1e-9
    )
    assert (
        plan.epsilon_after(steps)
        < plan.epsilon_after(steps + 1)
        <= plan.epsilon_after(30)
        == plan.epsilon
    )


@pytest.mark.parametrize("batch", [20, small.RECORDS])
def test_one_phase_is_dpsgd(batch, tmp_path):
    plain, one = recipe(Identity(), batch), recipe(Schedule((30,), (1.0,)), batch)
    assert one.event(1.7) == plain.event(1.7)
    assert one.calibrate(2.0, 1e-3).noise_multiplier == plain.calibrate(2.0, 1e-3).noise_multiplier
    weights = [
        train(tmp_path / name, r.with_noise(2.0, delta=1e-3))
        for name, r in (("a", plain), ("b", one))
    ]
    for a, b in zip(
        *weights, strict=True
    ):  # DP-SGD adds and divides in one pass, which rounds differently
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("relative", [(1.5, 1.0), (1.0, 1.5), (3.0, 0.5, 1.0, 2.0)])
@pytest.mark.parametrize("accountant", ["tight", "rdp"])
def test_calibration_scales_the_whole_schedule_to_the_private_side(relative, accountant):
    plan = recipe(equal_phases(30, relative)).calibrate(2.0, 1e-3, accountant=accountant)
    assert 2.0 * 0.999 <= plan.epsilon <= 2.0
    constant = recipe(Identity()).calibrate(2.0, 1e-3, accountant=accountant).noise_multiplier
    assert (
        plan.noise_multiplier < constant < plan.noise_multiplier * max(plan.recipe.strategy.factors)
    )


def test_a_schedule_travels_with_its_plan():
    plan = recipe().with_noise(1.25, delta=1e-3)
    again = dpfy.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.event == plan.event
    other = recipe(Schedule((8, 12, 10), (2.0, 1.0, 1.4))).with_noise(1.25, delta=1e-3)
    assert other.fingerprint() != plan.fingerprint()


def test_equal_phases_cover_the_run_and_are_relative():
    schedule = equal_phases(31, (3.0, 2.0, 4.0))
    assert schedule.steps == 31
    assert set(schedule.lengths) <= {10, 11}
    assert schedule.factors == (1.5, 1.0, 2.0)
    assert [schedule.factor(s) for s in (0, 9, 10, 20, 30)] == [1.5, 1.5, 1.0, 2.0, 2.0]
    assert sum(n for n, _ in schedule.phases(25)) == 25


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule((), ()),
        lambda: Schedule((5,), (1.0, 2.0)),
        lambda: Schedule((5, 5), (1.5, 2.0)),  # the stated noise would be less than any step has
        lambda: Schedule((5, 5), (0.5, 1.0)),  # and here more than a step has
        lambda: Schedule((5, 0), (1.0, 2.0)),
        lambda: Schedule((5, 5), (1.0, math.inf)),
        lambda: Schedule((5, 5), (1.0, -1.0)),
        lambda: equal_phases(2, (1.0, 2.0, 3.0)),
        lambda: equal_phases(2, ()),
        lambda: recipe(Schedule((8, 12, 11), (2.0, 1.0, 1.5))),
        lambda: recipe(Schedule((8, 12), (2.0, 1.0))),
    ],
)
def test_schedules_that_are_none_are_refused(make):
    with pytest.raises(InvalidInput):
        make()


def test_only_poisson_sampling_has_a_proof():
    with pytest.raises(Unsupported, match="Poisson with Schedule"):
        Recipe(small.RECORDS, FixedOrderSampler(10, 3), 30, FlatClip(0.5), PHASES)


# --- the noise
# ------------------------------------------------------------------------------------------------------------------


def train(path: Path, plan: dpfy.Plan, cut: int | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Linear(small.FEATURES, small.CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), plan, dpfy.Run(path, seed=3, resume=True)
    ) as training:
        for x, y in training.batches():
            training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == cut:
                break
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("wrong", [2 / 3, 1.0, 3 / 2])
def test_each_phase_has_the_noise_that_is_billed(tmp_path, wrong):
    """Empty batches leave the noise alone in the weights: 20,000 values a step. The squared scale
    of a step has a relative standard error of 1/100: five of them at one of 30 steps come by chance
    once in fifty thousand; a factor of 2/3 or 3/2 is off by over fifty.
    """
    net = nn.Linear(2000, 10, bias=False)
    plan = replace(
        dpfy.dpsgd(small.RECORDS, 1e-9, steps=30, clip_norm=0.5), strategy=PHASES
    ).with_noise(1.25, delta=1e-3)
    seen: list[torch.Tensor] = []

    class Watch(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(net.weight.grad.clone())

    x = torch.zeros(small.RECORDS, 2000), torch.zeros(small.RECORDS, dtype=torch.int64)
    with dpfy.PrivateTraining(
        net, Watch(net.parameters(), lr=1.0), x, plan, dpfy.Run(tmp_path / "run", seed=4)
    ) as training:
        assert list(training.batches()) == []
    billed = [
        part.event.event.noise_multiplier for part in plan.event.events for _ in range(part.count)
    ]
    assert len(seen) == len(billed) == 30
    found = (
        np.array([float(g.double().square().mean()) for g in seen]) * plan.recipe.expected_batch**2
    )
    due = (np.array(billed) * 0.5 * wrong) ** 2
    assert (np.abs(found / due - 1).max() < 5 / 100) == (wrong == 1.0)


@pytest.mark.parametrize("cut", [7, 8, 9, 20, 25])
def test_a_run_cut_at_a_phase_boundary_releases_the_same_bits(tmp_path, cut):
    plan = recipe().with_noise(1.25, delta=1e-3)
    whole = train(tmp_path / "whole", plan)
    train(tmp_path / "cut", plan, cut)
    assert all(torch.equal(a, b) for a, b in zip(whole, train(tmp_path / "cut", plan), strict=True))
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


def test_a_run_is_not_resumed_under_another_schedule(tmp_path):
    train(tmp_path / "run", recipe().with_noise(1.25, delta=1e-3), cut=9)
    other = recipe(Schedule((8, 12, 10), (2.0, 1.0, 1.4))).with_noise(1.25, delta=1e-3)
    with pytest.raises(dpfy.DpfyError, match="plan"):
        train(tmp_path / "run", other)


def test_adaptive_clipping_goes_with_a_schedule(tmp_path):
    adaptive = replace(recipe(), clip=QuantileClip(0.5)).with_noise(1.25, delta=1e-3)
    assert adaptive.event == recipe().with_noise(1.25, delta=1e-3).event
    train(tmp_path / "run", adaptive)
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


# --- the card
# -------------------------------------------------------------------------------------------------------------------


def test_verification_passes_and_finds_an_edited_schedule(tmp_path):
    run = tmp_path / "run"
    plan = recipe().with_noise(1.25, delta=1e-3)
    train(run, plan)
    assert all(f.holds for f in dpfy.verify(run)), [f for f in dpfy.verify(run) if not f.holds]
    card = json.loads((run / "privacy.json").read_text())
    assert card["guarantee"]["epsilon"] == pytest.approx(plan.epsilon)
    assert card["sections"][0]["mechanism"]["strategy"] == "schedule"
    assert "least noise" in card["sections"][0]["mechanism"]["theorem"]
    for change in ({"factors": [9.0, 1.0, 1.5]}, {"lengths": [8, 2, 20]}):
        edited = json.loads(json.dumps(card))
        edited["sections"][0]["claim"]["plan"]["recipe"]["strategy"] |= change
        del edited["digest"]
        (run / "privacy.json").write_bytes(cards.render(edited | {"digest": digest(edited)}))
        assert any(not f.holds and "plan" in f.what + f.detail for f in dpfy.verify(run))
    (run / "privacy.json").write_bytes(cards.render(card))
    written = json.loads((run / "plan.json").read_text())
    where = written["recipe"] if "recipe" in written else written["plan"]["recipe"]
    where["strategy"]["factors"] = [9.0, 1.0, 1.5]
    (run / "plan.json").write_text(json.dumps(written))
    assert any(not f.holds and "plan" in f.what + f.detail for f in dpfy.verify(run))


def test_an_audit_of_a_scheduled_run_is_refused_with_the_way_out():
    from dpfy.audit.job import _auditable

    with pytest.raises(Unsupported, match="auditing Schedule noise"):
        _auditable(recipe().with_noise(1.25, delta=1e-3))


# --- the command line
# -----------------------------------------------------------------------------------------------------------

FAST = [
    "--data",
    "digits",
    "--records",
    "1438",
    "--model",
    "linear",
    "--delta",
    "1e-4",
    "--batch-size",
    "200",
    "--steps",
    "9",
]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    return int(stop.value.code or 0)


def test_phases_from_the_command_line_train_and_verify(tmp_path, capsys):
    out = tmp_path / "run"
    flags = ["--epsilon", "3", "--set", "training.noise_phases=[2, 1.5, 1]", "--insecure-seed", "1"]
    assert call("train", *FAST, *flags, "--out", str(out), "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] <= 3
    assert call("verify", str(out)) == 0
    assert "noise_phases = [2.0, 1.5, 1.0]" in (out / "config.toml").read_text()
    plan = json.loads((out / "plan.json").read_text())
    assert plan["recipe"]["strategy"]["lengths"] == [3, 3, 3]
    assert plan["recipe"]["strategy"]["factors"] == [2.0, 1.5, 1.0]


def test_phases_from_a_file_are_the_same_plan():
    from dpfy.training import config, job

    flags = {
        "training.steps": 9,
        "training.batch_size": 200.0,
        "privacy.delta": 1e-4,
        "data.kind": "digits",
    }
    made = config.make({"training": {"noise_phases": [2.0, 1.5, 1.0]}}, flags)
    assert config.make(tomllib.loads(made.to_toml(publish=False)), {}) == made, (
        "what a resumed run reads"
    )
    given = job.plan_of(made)
    assert given == job.plan_of(config.make({}, flags | {"training.noise_phases": (2.0, 1.5, 1.0)}))
    assert given.recipe.strategy == Schedule((3, 3, 3), (2.0, 1.5, 1.0))
    assert given.noise_multiplier < job.plan_of(config.make({}, flags)).noise_multiplier, (
        "the quietest phase, at the same epsilon"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--set", "training.noise_phases=2,x"], "2,x"),
        (["--set", "training.noise_phases=[2,0]"], "training.noise_phases"),
        (["--set", "training.noise_phases=[1,2,3,4,5,6,7,8,9,10]"], "at most the steps (9)"),
        (["--set", "training.noise_phases=[2,1]", "--mechanism", "blt"], "dp-sgd"),
        (
            ["--set", "training.noise_phases=[2,1]", "--set", "training.phase_steps=[4,4]"],
            "add up to the steps of the run (9)",
        ),
        (
            ["--set", "training.noise_phases=[2,1]", "--set", "training.phase_steps=[9]"],
            "training.phase_steps",
        ),
        (["--set", "training.phase_steps=[9]"], "training.phase_steps"),
    ],
)
def test_bad_phases_are_refused_in_one_line(flags, told, capsys, tmp_path):
    assert call("train", *FAST, *flags, "--out", str(tmp_path / "run")) == 2
    error = capsys.readouterr().err.strip()
    assert told in error
    assert "\n" not in error
    assert not (tmp_path / "run").exists()
