"""Training with correlated noise: every mechanism runs, resumes bit for bit, and the loop does not
know which one it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dpfy
from dpfy.cli.app import main
from dpfy.core.errors import InvalidInput
from dpfy.gradients.clip import FlatClip
from dpfy.noise.toeplitz import square_root_banded
from dpfy.plan.auto import MECHANISMS, CalibrationTarget, RunSetting, recipe_for
from dpfy.plan.recipe import Recipe
from dpfy.sampling.samplers import BallsInBinsSampler, SeparatedSampler
from dpfy.training import loop
from dpfy.training.step import Ftrl

RECORDS, STEPS = 120, 18


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 6, generator=generator)
    return x, (x[:, 0] > 0).long()


def plan_of(mechanism: str) -> dpfy.Plan:
    if mechanism == "separated":
        recipe = Recipe(
            RECORDS, SeparatedSampler(0.2, 4, 5), STEPS, FlatClip(1.0), square_root_banded(4)
        )
    elif mechanism == "balls-in-bins":
        recipe = Recipe(
            RECORDS, BallsInBinsSampler(6, 3), STEPS, FlatClip(1.0), square_root_banded(3)
        )
        return recipe.with_noise(2.0, delta=1e-3, accountant="monte-carlo")
    else:
        recipe = recipe_for(mechanism, RunSetting(RECORDS, 20, STEPS), CalibrationTarget(4.0, 1e-3))
    return recipe.calibrate(4.0, 1e-3)


def train(
    run: dpfy.Run, plan: dpfy.Plan, stop: int = STEPS, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Train until `stop` steps are made, then leave: an unfinished run keeps a checkpoint."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with dpfy.PrivateTraining(
        model, optimizer, data(), plan, run=run, runtime=dpfy.Runtime(device=device)
    ) as training:
        if training.steps_done < stop:
            for x, y in training.batches():
                training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
                if training.steps_done >= stop:
                    break
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mechanism", [*MECHANISMS, "separated", "balls-in-bins"])
def test_every_mechanism_trains_and_resumes_bit_for_bit(mechanism, device, tmp_path):
    plan = plan_of(mechanism)
    whole = train(dpfy.Run(tmp_path / "whole", seed=7), plan, device=device)
    for stop in (1, 7, 12, STEPS):
        parts = train(dpfy.Run(tmp_path / "parts", seed=7, resume=stop > 1), plan, stop, device)
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.equal(whole[name], parts[name])
        assert torch.isfinite(whole[name]).all()


def test_the_loop_does_not_know_the_strategies():
    text = Path(loop.__file__).read_text().lower()
    for word in (
        "banded",
        "blt",
        "tree",
        "toeplitz",
        "dense",
        "cyclic",
        "bins",
        "isinstance(recipe",
    ):
        assert word not in text, word


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ftrl_is_sgd_at_a_constant_rate(momentum):
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    ftrl, sgd = (
        Ftrl([ours], lr=0.3, momentum=momentum),
        torch.optim.SGD([theirs], lr=0.3, momentum=momentum),
    )
    for _ in range(50):
        gradient = torch.randn(4, dtype=torch.float64)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        ftrl.step()
        sgd.step()
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_ftrl_rescales_the_whole_path_when_the_rate_changes():
    p = nn.Parameter(torch.zeros(1))
    ftrl = Ftrl([p], lr=1.0)
    for rate in (1.0, 0.5):
        ftrl.param_groups[0]["lr"] = rate
        p.grad = torch.ones(1)
        ftrl.step()
    assert p.item() == -1.0
    with pytest.raises(InvalidInput, match="momentum"):
        Ftrl([p], momentum=1.0)


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
    "8",
]


@pytest.mark.parametrize(
    "flags",
    [
        ["--mechanism", "auto"],
        ["--mechanism", "band-mf", "--set", "training.bands=2"],
        ["--mechanism", "tree", "--set", "training.optimizer=ftrl"],
    ],
)
def test_the_command_line_trains_and_verifies(flags, tmp_path, capsys):
    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        return int(stop.value.code or 0), capsys.readouterr().out

    status, out = call(
        "train", *FAST, "--epsilon", "3", *flags, "--out", str(tmp_path / "run"), "--json"
    )
    assert status == 0
    assert json.loads(out)["epsilon"] <= 3
    status, out = call("verify", str(tmp_path / "run"), "--json")
    assert status == 0, out


def test_bands_belong_to_band_mf(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *FAST, "--set", "training.bands=3", "--epsilon", "1"])
    assert stop.value.code == 2
    assert "band-mf" in capsys.readouterr().err
