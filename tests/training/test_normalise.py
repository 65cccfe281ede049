"""Private statistics of batch normalisation: bounded, noised, billed and frozen; the same again
after a crash.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dpfy
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.values import Private
from dpfy.models import Normalisation
from dpfy.noise.stream import NoiseStream
from dpfy.training import TrainingRun, normalise, private_batchnorm

sys.path.insert(0, str(Path(__file__).parent))
import small

IMAGES = 2 * torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(3)) + 1
LABELS = torch.arange(60) % 3
RECIPE = dpfy.dpsgd(60, 15, steps=3, clip_norm=1.0)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    body = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
    ]
    return nn.Sequential(*body, nn.Linear(8, 3))


def run(
    path: Path,
    images: torch.Tensor = IMAGES,
    noise: float = 5.0,
    model: nn.Module | None = None,
    **claim: float,
) -> nn.Module:
    asked = Normalisation(noise, **({"layers": 2, "bound": 10.0, "delta": 1e-3} | claim))
    plan = RECIPE.with_noise(1.0, delta=1e-3)
    with TrainingRun(dpfy.Run(path, seed=5, resume=True), plan, beside=(asked,)) as folder:
        made = private_batchnorm(net() if model is None else model, (images, LABELS), folder)
        sgd = torch.optim.SGD(made.parameters(), lr=0.1)
        dpfy.fit(made, (images, LABELS), plan=plan, optimizer=sgd, run=folder)
    return made


def test_without_noise_the_statistics_are_those_of_the_data(tmp_path, monkeypatch):
    """What a whole batch gives, with the first layer's statistics in the second."""
    monkeypatch.setattr(
        NoiseStream,
        "release",
        lambda self, total, step, state, permit: (Private(total.value), state),
    )
    asked = Normalisation(1.0, layers=2, bound=100.0, delta=1e-3)
    monkeypatch.setattr(normalise, "NOISES", 0.0)
    with TrainingRun(
        dpfy.Run(tmp_path / "run"), RECIPE.with_noise(1.0, delta=1e-3), beside=(asked,)
    ) as folder:
        made = private_batchnorm(net(), (IMAGES, LABELS), folder)
    due = net()
    with torch.no_grad():
        assert torch.allclose(made(IMAGES), due(IMAGES), atol=1e-4)
        first = due[0](IMAGES)
    assert torch.allclose(made[1].running_mean, first.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(made[1].running_var, first.var((0, 2, 3), unbiased=False), atol=1e-4)


def test_training_and_statistics_are_billed_together(tmp_path):
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    made = run(tmp_path / "run", model=model)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    card = small.card_of(tmp_path / "run")
    assert [part["kind"] for part in card["sections"]] == ["training", "normalisation"]
    assert "released with noise (section normalisation)" in card["components"]["replaced"][0]
    plan = RECIPE.with_noise(1.0, delta=1e-3)
    both = events.Composed((plan.event, events.Repeated(events.Gaussian(5.0), 2)))
    due = dpfy.accounting.epsilon(
        both, 1e-3, accountant=plan.accountant, adjacency=plan.recipe.adjacency
    )
    assert card["guarantee"]["epsilon"] == pytest.approx(due, rel=1e-9)
    assert due > plan.epsilon
    assert not made[1].running_mean.isnan().any()
    assert torch.equal(dpfy.load(tmp_path / "run", dpfy.repair(made).model)(IMAGES), made(IMAGES))


def test_the_noise_has_the_scale_of_the_bill(tmp_path, monkeypatch):
    """960 coordinates: accepts the stated scale, rejects two thirds and three halves of it (off by
    2.3%).
    """
    seen = []
    real = NoiseStream.release

    def release(self, total, *others):
        released = real(self, total, *others)
        if self.name == normalise.NAME:
            gap = released[0].value["sums"] - total.value["sums"]
            seen.append(gap / (self.scale * total.bound.l2))
        return released

    monkeypatch.setattr(NoiseStream, "release", release)
    plan = RECIPE.with_noise(1.0, delta=1e-3)
    wide = nn.Sequential(
        nn.Flatten(),
        nn.Linear(36, 240),
        nn.BatchNorm1d(240),
        nn.ReLU(),
        nn.Linear(240, 240),
        nn.BatchNorm1d(240),
    )
    with TrainingRun(
        dpfy.Run(tmp_path / "run", seed=1),
        plan,
        beside=(Normalisation(7.0, layers=2, delta=1e-3),),
    ) as folder:
        private_batchnorm(wide, (IMAGES, LABELS), folder)
    spread = float(torch.cat(seen).std())
    assert len(torch.cat(seen)) == 960
    assert (
        abs(float(torch.corrcoef(torch.stack(seen))[0, 1])) < 0.3
    )  # each layer has noise of its own
    assert 0.9 < spread < 1.1


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e30, float("inf"), float("nan")])
def test_one_record_adds_at_most_the_bound(factor):
    for shape in ((1, 4, 3, 3), (1, 8), (1, 2, 5)):
        added = normalise.cut(factor * torch.randn(shape), 1.5)
        assert float(added.norm()) <= 1.5
        if factor != factor or factor == float("inf"):
            assert not added.any()
    with pytest.raises(Unsupported, match="2 rows of one record"):
        normalise.cut(torch.randn(2, 4), 1.0)


def test_a_record_goes_through_the_model_alone(tmp_path, monkeypatch):
    """A layer that mixes examples, in evaluation too, mixes nothing: the sums of two data sets
    differ by one record's part.
    """

    class Mixing(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    sums = []
    real = NoiseStream.release

    def release(self, total, *others):
        sums.append(total)
        return real(self, total, *others)

    monkeypatch.setattr(NoiseStream, "release", release)
    plan = RECIPE.with_noise(1.0, delta=1e-3)
    model = nn.Sequential(Mixing(), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    for name, many in (("all", 60), ("less", 59)):
        asked = Normalisation(7.0, layers=1, delta=1e-3)
        with TrainingRun(dpfy.Run(tmp_path / name, seed=1), plan, beside=(asked,)) as folder:
            private_batchnorm(model, (IMAGES[:many], LABELS[:many]), folder)
    assert float((sums[0].value["sums"] - sums[1].value["sums"]).norm()) <= sums[0].bound.l2


def test_a_resumed_run_has_the_same_statistics_and_refuses_other_data(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*arguments, **options):
        raise Killed

    run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("dpfy.training.fit.measure", killed)
        with pytest.raises(Killed):
            run(tmp_path / "cut")
    with pytest.raises(InvalidInput, match="resume normalisation 0"):
        run(tmp_path / "cut", images=IMAGES + 0.01)
    run(tmp_path / "cut")
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_what_was_not_reserved_is_not_released(tmp_path):
    plan = RECIPE.with_noise(1.0, delta=1e-3)
    with TrainingRun(dpfy.Run(tmp_path / "run"), plan) as folder:
        with pytest.raises(InvalidInput, match=r"beside=\(Normalisation"):
            private_batchnorm(net(), (IMAGES, LABELS), folder)
        with pytest.raises(InvalidInput, match=r"must be an opened dpfy.training.TrainingRun"):
            private_batchnorm(net(), (IMAGES, LABELS), "runs/x")
    with pytest.raises(
        InvalidInput,
        match="layers: got 3; must be the number of batch normalisations that the model runs: 2",
    ):
        run(tmp_path / "three", layers=3)
    assert not (tmp_path / "three").exists()
    with pytest.raises(InvalidInput, match="bound"):
        Normalisation(1.0, layers=1, bound=0.0)
    twice = nn.Sequential(nn.Conv2d(1, 4, 3), norm := nn.BatchNorm2d(4), norm)
    with pytest.raises(Unsupported, match="runs twice"):
        run(tmp_path / "twice", model=twice, layers=1)
