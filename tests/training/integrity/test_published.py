"""Numbers that a loop publishes: declared by the caller, and refused where they are recognised as
computed from a batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpfy
from dpfy.core.errors import InvalidInput

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

PRIVATE = {
    "mean": lambda losses, x, y, out: losses.mean(),
    "sum": lambda losses, x, y, out: losses.sum(),
    "maximum": lambda losses, x, y, out: losses.max(),
    "minimum": lambda losses, x, y, out: losses.min(),
    "median": lambda losses, x, y, out: losses.median(),
    "quantile": lambda losses, x, y, out: losses.quantile(0.9),
    "deviation": lambda losses, x, y, out: losses.std(),
    "variance": lambda losses, x, y, out: losses.var(unbiased=False),
    "maximum in numpy": lambda losses, x, y, out: torch.tensor(np.max(losses.double().numpy())),
    "one loss": lambda losses, x, y, out: losses[min(3, len(losses) - 1)],
    "one feature": lambda losses, x, y, out: x[min(2, len(x) - 1), 5],
    "accuracy": lambda losses, x, y, out: (out.argmax(1) == y).float().mean(),
    "error": lambda losses, x, y, out: (out.argmax(1) != y).double().mean(),
    "percent": lambda losses, x, y, out: 100 * (out.argmax(1) == y).double().mean(),
}


def plan(steps=6):
    return dpfy.dpsgd(small.RECORDS, 97, steps=steps, clip_norm=0.5).with_noise(2.0, delta=1e-3)


def trained(path, after):
    torch.manual_seed(0)
    net = nn.Linear(small.FEATURES, small.CLASSES)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    runtime = dpfy.Runtime(max_physical_batch=small.RECORDS)
    with dpfy.PrivateTraining(
        net, sgd, small.data(), plan(), dpfy.Run(path, seed=2), runtime=runtime
    ) as training:
        for x, y in training.batches():
            out = net(x)
            losses = nn.functional.cross_entropy(out, y, reduction="none")
            training.step(losses)
            if training.boundary:
                after(training, losses.detach(), x, y, out.detach())
    return training


@pytest.mark.parametrize("name", PRIVATE)
def test_a_number_computed_from_the_batch_is_refused_whatever_is_declared(tmp_path, name):
    tried = []

    def after(training, losses, x, y, out):
        value = float(PRIVATE[name](losses, x, y, out))
        if (
            name in ("accuracy", "error", "percent")
            and len(y) // np.gcd(int((out.argmax(1) == y).sum()), len(y)) < 32
        ):
            return  # a simple fraction
        for publish in (
            lambda: training.record(source="public", value=value),
            lambda: training.record(source="released", value=value),
            lambda: training.finish({"value": value}, test="public"),
        ):
            with pytest.raises(InvalidInput, match="a value computed from the data") as refused:
                publish()
            assert f"{value:.4g}" not in str(refused.value)
        tried.append(value)

    trained(tmp_path / "run", after)
    assert len(tried) >= 3


def test_a_statistic_of_the_step_before_is_refused_too(tmp_path):
    kept = []

    def after(training, losses, x, y, out):
        for value in kept[-2:]:
            with pytest.raises(InvalidInput, match="a statistic of recent losses"):
                training.record(source="public", value=value)
        kept.append(float(losses.max()))

    trained(tmp_path / "run", after)


def test_a_source_must_be_declared_and_is_named_in_the_report(tmp_path):
    def after(training, losses, x, y, out):
        for wrong in ({}, {"source": None}, {"source": "training"}, {"source": "private"}):
            with pytest.raises(InvalidInput, match="record source"):
                training.record(accuracy=0.5, **wrong)
        training.record(source="public", accuracy=0.5, loss=0.1234567)
        training.record(source="released", norm=1.25)

    training = trained(tmp_path / "run", after)
    assert (
        small.card_of(training.folder.path)["recorded"]
        == "accuracy, loss, norm (computed from what was released)"
    )
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))


def test_figures_at_the_end_need_a_declaration(tmp_path):
    def after(training, losses, x, y, out):
        if training.steps_done == 3:
            for given in (({"accuracy": 0.9},), ({}, [[1, 0], [0, 1]])):
                with pytest.raises(InvalidInput, match="figures of data that nothing is said of"):
                    training.finish(*given)

    trained(tmp_path / "run", after)


def test_public_figures_are_not_taken_for_private_ones(tmp_path):
    """Figures of public data that is like the records, of every size, at every step."""
    x, y = small.held_out()

    def after(training, losses, *batch):
        net = training.model
        with torch.no_grad():
            for size in (10, 50, 97, 100, 200):
                out = net(x[:size])
                found = nn.functional.cross_entropy(out, y[:size])
                right = (out.argmax(1) == y[:size]).float().mean()
                training.record(
                    source="public",
                    loss=float(found),
                    epoch=training.steps_done,
                    best=0.91,
                    size=size,
                )
                training.record(
                    source="public", accuracy=round(float(right), 3), ratio=1.0, none=0.0
                )

    trained(tmp_path / "run", after)


READ_AFTER_A_STEP = {
    "a loss of one class": lambda losses, x, y, out: [losses[y == 0].sum().item() / 3],
    "mean of an epoch": lambda losses, x, y, out: losses.mul(1.7).tolist(),
    "a rounded score": lambda losses, x, y, out: [round(out.sigmoid().amax().item(), 4)],
    "a count": lambda losses, x, y, out: [(y == 1).sum().item()],
    "a feature": lambda losses, x, y, out: [-(x[0, 0].item() ** 2)],
}
OVER_AN_EPOCH = {
    "mean": lambda values: sum(values) / len(values),
    "maximum": max,
    "rounded": lambda values: round(sum(values) / 7, 2),
    "whole": lambda values: 100 * values[-1] // 3 + 1,
    "scaled": lambda values: values[-1] * 0.37 / 3.0 + sum(values[1:], values[0]) / 1e3,
    "remainder": lambda values: divmod(values[0], 0.3)[1] + 1,
}


@pytest.mark.parametrize("over", OVER_AN_EPOCH)
@pytest.mark.parametrize("name", READ_AFTER_A_STEP)
def test_numbers_read_after_a_step_are_refused_also_when_python_has_computed_with_them(
    tmp_path, name, over
):
    numbers, tried = [], []

    def after(training, losses, x, y, out):
        numbers.extend(READ_AFTER_A_STEP[name](losses, x, y, out))
        value = OVER_AN_EPOCH[over](numbers)
        if training.steps_done < 5:
            return
        for publish in (
            lambda: training.record(source="public", value=value),
            lambda: training.record(source="released", value=value),
            lambda: training.schedule(source="public", value=value),
            lambda: training.finish({"value": value}, test="public"),
            lambda: training.finish({"value": 0.5}, [[1, value], [0, 1]], test="public"),
        ):
            with pytest.raises(InvalidInput, match="a value computed from the data") as refused:
                publish()
            assert repr(float(value)) not in str(refused.value)
        tried.append(value)

    trained(tmp_path / "run", after)
    assert tried


class Squashed(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class Squash(nn.Module):
    def forward(self, x):
        return Squashed.apply(x)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "graph", "graph in eval mode"])
@pytest.mark.parametrize("kind", ["mlp", "own function", "recurrent", "attention", "checkpointed"])
def test_public_figures_may_be_read_by_item_and_recorded(tmp_path, kind, mode):
    """With the bookkeeping of the run attached to the model, with and without a graph."""
    torch.manual_seed(0)
    features, classes = small.FEATURES, small.CLASSES

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(features, 8)
            self.squash = Squash() if kind == "own function" else nn.GELU()
            self.rnn = nn.LSTM(8, 8, batch_first=True) if kind == "recurrent" else None
            self.attend = (
                nn.MultiheadAttention(8, 2, batch_first=True) if kind == "attention" else None
            )
            self.drop, self.norm, self.last = (
                nn.Dropout(0.1),
                nn.LayerNorm(8),
                nn.Linear(8, classes),
            )

        def forward(self, x):
            h = self.squash(self.first(x))
            if self.rnn is not None:
                h = self.rnn(h[:, None])[0][:, 0]
            if self.attend is not None:
                h = self.attend(h[:, None], h[:, None], h[:, None], need_weights=False)[0][:, 0]
            if kind == "checkpointed":
                h = torch.utils.checkpoint.checkpoint(self.norm, h, use_reentrant=False)
            return self.last(self.drop(self.norm(h)))

    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    recipe = dpfy.dpsgd(small.RECORDS, 20, steps=6, clip_norm=0.5).with_noise(2.0, delta=1e-3)
    held, target = small.held_out()
    total, done = torch.zeros(()), 0

    def evaluate():
        nonlocal done
        found, right = 0.0, 0
        for part in torch.arange(len(held)).split(60):
            out = net(held[part])
            loss = nn.functional.cross_entropy(out, target[part])
            total.add_(loss.detach())
            found += loss.item() * len(part)
            right += (out.argmax(1) == target[part]).sum().item()
            done += 1
        return {
            "loss": found / len(held),
            "accuracy": right / len(held),
            "all": total.item() / done,
            "top": max(out[0].tolist()),
        }

    kinds = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with dpfy.PrivateTraining(
        net, sgd, small.data(), recipe, dpfy.Run(tmp_path / "run", seed=2)
    ) as training:
        for x, y in training.batches():
            training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))
            net.train(mode != "graph in eval mode")
            with kinds.get(mode, torch.enable_grad)():
                if training.steps_done < 6:
                    figures = evaluate()
            training.record(source="public", **figures)
            norm = sum(p.norm().item() for p in net.parameters())
            training.record(source="released", norm=norm)
            net.train()
        training.finish({k: v for k, v in figures.items() if k != "top"}, test="public")
