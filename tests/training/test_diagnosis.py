"""A dry run says which of the model, the clipping and the noise keeps a training from learning."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.training.diagnosis import Diagnosis, _gradients, diagnose, generated

X, Y = generated((8,), 2, 500)
TRAIN, TEST = (X[:200], Y[:200]), (X[200:], Y[200:])


def judged(noise: float, rate: float = 0.5, clip: float = 1.0) -> Diagnosis:
    torch.manual_seed(0)
    recipe = dpfy.dpsgd(records=200, batch_size=100, steps=8, clip_norm=clip)
    plan = recipe.with_noise(noise, delta=1e-3)
    return diagnose(torch.nn.Linear(8, 2), TRAIN, TEST, plan, learning_rate=rate)


def failing(found: Diagnosis) -> set[str]:
    return {verdict.check for verdict in found.verdicts() if not verdict.fine}


def test_little_noise_is_fine() -> None:
    found = judged(0.1)
    assert not {"plain training learns", "updates are more than noise"} & failing(found)
    assert found.private > 0.7
    json.dumps(found.as_dict())


@pytest.mark.slow
def test_much_noise_is_named() -> None:
    found = judged(60.0)
    assert "updates are more than noise" in failing(found)
    assert "plain training learns" not in failing(found)


@pytest.mark.slow
def test_a_learning_rate_that_learns_nothing_is_named() -> None:
    assert "plain training learns" in failing(judged(0.1, rate=1e-9))


@pytest.mark.slow
def test_a_clipping_norm_above_all_gradients_is_named() -> None:
    found = judged(0.001, clip=100.0)
    assert "the clipping norm fits" in failing(found)
    assert found.share_clipped == 0


@pytest.mark.slow
def test_signal_and_noise_are_those_of_the_formula() -> None:
    model = torch.nn.Linear(8, 2)
    mean, clipped, norms = _gradients(model, (X[:64], Y[:64]), 0.5)
    loss = torch.nn.functional.cross_entropy(model(X[:64]), Y[:64])
    whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(mean, whole)
    assert clipped.norm() <= 0.5 + 1e-6
    assert len(norms) == 64
    found = judged(2.0)
    assert found.noise == pytest.approx(2.0 / 100 * 18**0.5)
    assert found.ratio == pytest.approx(found.signal / found.noise)


@pytest.mark.slow
def test_the_model_is_not_changed() -> None:
    model = torch.nn.Linear(8, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = dpfy.dpsgd(records=200, batch_size=100, steps=2).with_noise(1.0, delta=1e-3)
    diagnose(model, TRAIN, TEST, plan, learning_rate=0.5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_another_number_of_records_is_refused() -> None:
    plan = dpfy.dpsgd(records=300, batch_size=100, steps=2).with_noise(1.0, delta=1e-3)
    with pytest.raises(InvalidInput, match="records"):
        diagnose(torch.nn.Linear(8, 2), TRAIN, TEST, plan, learning_rate=0.5)


@pytest.mark.slow
def test_the_command_prints_a_checklist(capsys: pytest.CaptureFixture[str]) -> None:
    from dpfy.cli import app

    words = "inspect --diagnose --model linear --shape 8 --classes 2 --batch-size 100 --records 200"
    with pytest.raises(SystemExit) as ended:
        app.main([*words.split(), "--steps", "8", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (ended.value.code in (0, None)) == all(each["fine"] for each in said["checklist"])
    assert len(said["checklist"]) == 5


FINE = Diagnosis(
    chance=0.5, plain=0.9, clipped=0.88, private=0.86, signal=0.5, noise=0.5, parameters=18,
    share_clipped=0.5, median_norm=1.0, alignment=0.99, steps=4, clip_norm=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, set()),
        ({"plain": 0.6, "clipped": 0.6, "private": 0.6}, {"plain training learns"}),
        ({"clipped": 0.8, "private": 0.8}, {"clipping costs little"}),
        ({"private": 0.7}, {"noise costs little"}),
        ({"noise": 2.0}, {"updates are more than noise"}),
        ({"share_clipped": 0.01}, {"the clipping norm fits"}),
        ({"share_clipped": 0.99, "alignment": 0.5}, {"the clipping norm fits"}),
        ({"share_clipped": 0.99}, set()),
    ],
)
def test_each_line_has_its_reason(changed: dict[str, float], named: set[str]) -> None:
    found = replace(FINE, **changed)
    assert failing(found) == named
    assert [line.startswith("LOOK") for line in str(found).splitlines()].count(True) == len(named)
