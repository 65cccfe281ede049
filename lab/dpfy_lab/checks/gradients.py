"""Checks of gradient engines on models that wrong norms fail on, and of models that no engine may
take.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dpfy.core.errors import DpfyError
from dpfy.gradients import checker
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Engine
from dpfy.gradients.engines import choice
from dpfy_lab.checks.loop import CLIP, Array
from dpfy_lab.selftest.mistake import Found, check

GAPS = (1e-5, 1e-4, 2e-4, 2.8e-4, 4e-4)
"""Squares of what is left of two float32 uses then sink below the rounding of the squares of the
uses themselves.
"""


class OppositeUses(nn.Module):
    """A layer used twice on the same input, the second time with nearly the opposite sign."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.layer, self.gap = nn.Linear(64, 64, bias=False), gap
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        """The difference of two uses, each with a gradient of length about 1."""
        x = x / (8 * x.norm())
        out: Tensor = self.layer(x) - (1 - self.gap) * self.layer(x)
        return out


class UsedTwice(nn.Module):
    """A layer after itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        """The layer, twice."""
        out: Tensor = self.layer(self.layer(x))
        return out


def _sum(engine: Engine, model: nn.Module, losses: Tensor) -> Array:
    """The clipped sum of an attached engine, as one vector."""
    total = engine.bounded_sum(losses, FlatClip(CLIP)).value
    names = [name for name, _ in model.named_parameters()]
    return np.concatenate([total[name].double().reshape(-1).numpy() for name in names])


def _contribution(model: nn.Module, x: Tensor, size: float) -> float:
    """What one example adds, in clipping norms."""
    engine = choice.choose(model)[0]
    engine.attach(model)
    try:
        return float(np.linalg.norm(_sum(engine, model, model(x).sum(1) * size))) / CLIP
    finally:
        engine.detach()


@check("not a number")
def NOT_A_NUMBER() -> Found:
    """A record whose gradient is NaN or infinite adds exactly nothing, in every engine."""
    model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 4)).double()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name in choice.ENGINES:
        alone = _root_mean_square(name, model, x, torch.ones(5))
        for what, factor in (("infinite", 1e200), ("NaN, of a finite loss", 0.0)):
            factors = torch.tensor([1.0] * 5 + [factor], dtype=torch.float64)
            together = _root_mean_square(name, model, torch.cat([x, x[:1]]), factors)
            if not np.allclose(alone, together, atol=1e-6):
                return f"{name}: a record with a gradient that is {what} changed the sum"
    return None


def _root_mean_square(name: str, model: nn.Module, x: Tensor, factors: Tensor) -> Array:
    """The sum of an engine for losses whose gradient is 0 / 0 where the factor is 0."""
    engine = choice.choose(model, name)[0]
    engine.attach(model)
    try:
        losses = (model(x) * factors.double()[:, None]).square().sum(1).sqrt()
        return _sum(engine, model, losses)
    finally:
        engine.detach()


@check("tied weights")
def TIED() -> Found:
    """A weight that is used twice has one gradient: the sum of both uses, and its norm is the norm
    of the sum.
    """
    x = torch.full((1, 6), 3.0, dtype=torch.float64)
    if (size := _contribution(UsedTwice().double(), x, 15.0)) <= 1 + 1e-3:
        return None
    return f"one example adds {size:.3f} clip norms to a model that uses a layer twice"


@check("cancelling uses")
def CANCELLING() -> Found:
    """Where two uses of a weight, 1e5 clipping norms each, nearly cancel, squares in float32 lose
    the digits of the difference: the norm must still be no less.
    """
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 64, generator=random) for _ in GAPS]
    models = [OppositeUses(gap) for gap in GAPS]
    found = [_contribution(m, x, 1e5 * CLIP) for m, x in zip(models, inputs, strict=True)]
    if (size := max(found)) <= 1:
        return None
    return f"one example adds {size:.3f} clip norms to a model whose uses of a layer nearly cancel"


@check("batch statistics")
def BATCH_STATISTICS() -> Found:
    """A model that normalises over the batch is refused, by its modules and by what its losses
    depend on.
    """
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    probe = checker.LossProbe(model)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    looks = {
        "the model checker": lambda: checker.check_model(model),
        "the probe of losses": lambda: probe.check(model(x).square().sum(1)),
    }
    for what, look in looks.items():
        try:
            look()
        except DpfyError:
            continue
        return f"{what} takes a model that normalises over the batch"
    return None


CHECKS = (NOT_A_NUMBER, TIED, CANCELLING, BATCH_STATISTICS)
