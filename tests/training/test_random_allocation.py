"""Training with random allocation: charged by its epochs, resumed bit for bit, audited and
verified.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy.accounting.patterns import TrainingPattern
from dpfy.cli.app import main
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise.toeplitz import Banded
from dpfy.plan.recipe import Recipe
from dpfy.report import card as cards
from dpfy.sampling.samplers import RandomAllocationSampler

sys.path.insert(0, str(Path(__file__).parent))
import small


def recipe(**changes: object) -> Recipe:
    settings = {"steps": 20, "clip_norm": 0.5, "sampling": "random-allocation"} | changes
    return dpfy.dpsgd(small.RECORDS, 20, **settings)


def test_it_is_charged_by_its_epochs():
    plan = recipe().with_noise(1.5, delta=1e-3)
    assert plan.event == events.Repeated(events.RandomlyAllocated(1.5, 10), 2)
    assert recipe(steps=21).event(1.5) == events.Repeated(events.RandomlyAllocated(1.5, 10), 3)
    assert plan.event == TrainingPattern(1.5, 0.1, 20, "random-allocation").claim().event
    assert plan.recipe.expected_batch == 20
    assert plan.stddev == 0.75
    assert dpfy.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    poisson = dpfy.dpsgd(small.RECORDS, 20, steps=20, clip_norm=0.5).calibrate(2.0, 1e-3)
    ours = recipe().calibrate(2.0, 1e-3)
    assert ours.noise_multiplier < 0.99 * poisson.noise_multiplier
    assert 1.99 < ours.epsilon <= 2.0
    assert recipe(stopping=[10, 20]).event(1.5, 10).event == events.Repeated(
        events.RandomlyAllocated(1.5, 10), 1
    )


def test_what_has_no_proof_is_refused():
    with pytest.raises(Unsupported, match="replace-one"):
        recipe(adjacency="replace-one").with_noise(1.0, delta=1e-3).guarantee().epsilon(1e-3)
    base = recipe()
    with pytest.raises(Unsupported, match="RandomAllocation participation with Banded"):
        Recipe(base.records, base.sampler, 20, base.clip, Banded((1.0, 0.5)))
    with pytest.raises(InvalidInput, match="at most 2 epochs"):
        Recipe(base.records, RandomAllocationSampler(10, 2), 21, base.clip).event(1.0)


def train(folder: Path, stop: int | None = None, resume: bool = False) -> list[torch.Tensor]:
    """Train, or go on with, a run that ends early where `stop` says so."""
    torch.set_num_threads(1)
    net = small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    plan, runtime = recipe().with_noise(2.0, delta=1e-3), dpfy.Runtime(max_physical_batch=12)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), plan, dpfy.Run(folder, seed=3, resume=resume), runtime=runtime
    ) as training:
        for x, y in training.batches():
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == stop:
                break
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_resumed_run_is_the_same_run_and_its_report_is_verified(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", stop=13)
    for a, b in zip(whole, train(tmp_path / "cut", resume=True), strict=True):
        assert torch.equal(a, b)
    card = json.loads((tmp_path / "cut" / "privacy.json").read_text())
    told = cards.section(card, "training")
    assert told["mechanism"]["sampling"] == {
        "kind": "random-allocation",
        "steps_per_epoch": 10,
        "epochs": 2,
        "times": 1,
    }
    assert any("exactly one of 10 steps" in line for line in card["warnings"])
    assert all(f.holds for f in dpfy.verify(tmp_path / "cut"))


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    return int(stop.value.code or 0)


def test_on_the_command_line(tmp_path, capsys):
    fast = ["--data", "digits", "--model", "linear", "--delta", "1e-4", "--batch-size", "256"]
    fast += ["--steps", "12", "--sampling", "random-allocation"]
    assert call("train", *fast, "--out", str(tmp_path / "a")) == 0
    assert call("verify", str(tmp_path / "a")) == 0
    audited = ["audit", "train", "--data", "digits", "--model", "linear", "--canaries", "40"]
    chosen = {
        "privacy.delta": "1e-4",
        "training.batch_size": "256",
        "training.steps": "12",
        "training.sampling": "random-allocation",
    }
    for name, value in chosen.items():
        audited += ["--set", f"{name}={value}"]
    assert call(*audited, "--out", str(tmp_path / "b")) == 0
    assert call("verify", str(tmp_path / "b")) == 0
    capsys.readouterr()
    plan = ["--noise-multiplier", "0.8", "--sampling-rate", str(1 / 117), "--steps", "4680"]
    plan += ["--sampling", "random-allocation", "--delta", "1e-5", "--json"]
    assert call("plan", "account", *plan) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 5.29 < answer["epsilon_lower"] <= answer["epsilon"] < 5.30
