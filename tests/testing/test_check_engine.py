"""The contract suite of engines catches wrong ones; ours are held to it in tests/contracts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfy.core.values import Bounded
from dpfy.gradients.engine import checked, clipped_sum, zeros
from dpfy.gradients.engines.loop import LoopEngine, attached, forget
from dpfy.testing import ContractBroken, check_engine
from dpfy.testing.engines import ModelSetting, cross_entropy


class Obvious(LoopEngine):
    """All gradients stacked, then clipped and added, for the wrong ones to inherit from."""

    name = "obvious"
    model = None

    def attach(self, model):
        super().attach(model)
        self.model = model

    def bounded_sum(self, losses, clip, mask=None):
        params = attached(self._params)
        mask = checked(losses, mask)
        if not len(losses):
            return Bounded(zeros(params, clip), clip.bound)
        total = self.summed(losses, clip, mask, params)
        forget(self._single)
        return Bounded(total, clip.bound)

    def summed(self, losses, clip, mask, params):
        rows = [self.gradient(losses, i, params) for i in range(len(losses))]
        stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
        return clipped_sum(stacked, list(params), clip, mask)

    def gradient(self, losses, i, params):
        return [g[0] for g in self._one(losses, i, list(params.values()))]


class ClipsTheMean(Obvious):
    """The sum of all gradients is clipped, and not each of them."""

    def summed(self, losses, clip, mask, params):
        grads = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
        whole = [
            torch.zeros_like(p)[None] if g is None else g[None]
            for g, p in zip(grads, params.values(), strict=True)
        ]
        return clipped_sum(whole, list(params), clip, None)


class ForgetsParameter(Obvious):
    """Parameters that belong to no layer have no gradient."""

    def gradient(self, losses, i, params):
        return [
            torch.zeros_like(g) if name == "scale" else g
            for name, g in zip(params, super().gradient(losses, i, params), strict=True)
        ]


class ForgetsUse(Obvious):
    """Of a weight that is used several times, one use is left out of the norm."""

    def summed(self, losses, clip, mask, params):
        rows = [self.gradient(losses, i, params) for i in range(len(losses))]
        stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
        without = [
            g * (0.5 if name == "twice.weight" else 1.0)
            for name, g in zip(params, stacked, strict=True)
        ]
        short = clipped_sum(without, list(params), clip, mask)
        return {n: v * (2.0 if n == "twice.weight" else 1.0) for n, v in short.items()}


class IgnoresMask(Obvious):
    def summed(self, losses, clip, mask, params):
        return super().summed(losses, clip, None, params)


class KeepsNan(Obvious):
    """A gradient that is not finite reaches the sum."""

    def summed(self, losses, clip, mask, params):
        found = super().summed(losses, clip, mask, params)
        bad = ~losses.isfinite().all()
        return {n: v + (float("nan") if bad else 0.0) for n, v in found.items()}


class WritesGrad(Obvious):
    def summed(self, losses, clip, mask, params):
        found = super().summed(losses, clip, mask, params)
        for name, p in params.items():
            p.grad = found[name]
        return found


class LeavesHook(Obvious):
    def attach(self, model):
        super().attach(model)
        model.register_forward_hook(lambda *_: None)


class ChangesClass(Obvious):
    def attach(self, model):
        super().attach(model)
        model.__class__ = type("Private" + type(model).__name__, (type(model),), {})


class NotTheBound(Obvious):
    def bounded_sum(self, losses, clip, mask=None):
        found = super().bounded_sum(losses, clip, mask)
        return Bounded({n: v * (1 + 1e-4) for n, v in found.value.items()}, found.bound)


class TakesMean(Obvious):
    """A reduced loss is taken, though it has no gradient of one example."""

    def bounded_sum(self, losses, clip, mask=None):
        return super().bounded_sum(losses.reshape(-1), clip, mask)


class EmptyFails(Obvious):
    def bounded_sum(self, losses, clip, mask=None):
        if self.model is not None and not len(losses):
            raise ZeroDivisionError
        return super().bounded_sum(losses, clip, mask)


class OldWeights(Obvious):
    """The first sum of an engine is given again for batches of the same size."""

    def attach(self, model):
        super().attach(model)
        self.kept = {}

    def summed(self, losses, clip, mask, params):
        if mask is not None:
            return super().summed(losses, clip, mask, params)
        if len(losses) not in self.kept:
            self.kept[len(losses)] = super().summed(losses, clip, mask, params)
        return self.kept[len(losses)]


class SharedTwice(Obvious):
    """A shared weight appears under both of its names."""

    def bounded_sum(self, losses, clip, mask=None):
        found = super().bounded_sum(losses, clip, mask)
        if "twice.weight" in found.value:
            found.value["head.weight"] = found.value["twice.weight"]
        return found


WRONG = {
    ClipsTheMean: "one example at a time",
    ForgetsParameter: "one example at a time",
    ForgetsUse: "one example at a time",
    IgnoresMask: "one example at a time|mask is False",
    KeepsNan: "not finite",
    WritesGrad: "as they were after",
    LeavesHook: "as they were after",
    ChangesClass: "as they were after",
    NotTheBound: "one example at a time",
    TakesMean: "are refused",
    EmptyFails: "empty batch",
    OldWeights: "step after step",
    SharedTwice: "trainable parameters",
}


@pytest.mark.parametrize("make", WRONG, ids=lambda kind: kind.__name__)
def test_wrong_engines_are_caught(make):
    with pytest.raises(ContractBroken, match=WRONG[make]) as caught:
        check_engine(make)
    assert make.__name__ in caught.value.setting


def test_the_obvious_engine_passes():
    check_engine(Obvious)


def test_your_own_models_are_checked_too():
    """A mistake that shows in one kind of model alone."""

    class NoBias(Obvious):
        def gradient(self, losses, i, params):
            return [
                torch.zeros_like(g) if name == "0.weight" else g
                for name, g in zip(params, super().gradient(losses, i, params), strict=True)
            ]

    check_engine(NoBias)
    torch.manual_seed(0)
    own = ModelSetting(
        "my model",
        lambda: nn.Sequential(nn.Linear(3, 2)).double(),
        torch.randn(4, 3, dtype=torch.float64),
        torch.tensor([0, 1, 1, 0]),
        cross_entropy,
    )
    with pytest.raises(ContractBroken, match="my model"):
        check_engine(NoBias, models=[own])
