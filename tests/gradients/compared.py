"""What engines answer, and how far two answers are apart."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Engine, Grads


def answer(
    engine: Engine, model: nn.Module, losses: Callable[[], Tensor], clip: Clip, steps: int = 1
) -> Grads:
    """The sum of the last of some steps, with the engine attached meanwhile."""
    engine.attach(model)
    try:
        for _ in range(steps):
            found = engine.bounded_sum(losses(), clip).value
    finally:
        engine.detach()
    return found


def distance(a: Grads, b: Grads) -> float:
    """The length of the difference over that of `b`."""
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a))
    return gap / max(math.sqrt(sum(float(b[k].square().sum()) for k in b)), 1e-300)


class Holding(nn.Module):
    """A function of an input, and the modules and bare parameters that it runs with."""

    def __init__(self, run: Callable[..., Tensor], **held: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))


class NoVmap(torch.autograd.Function):
    """A product by a function of the user's own, whose backward looks at values: torch cannot
    vectorise it.
    """

    @staticmethod
    def forward(ctx, x, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, scale = ctx.saved_tensors
        if float(grad.abs().sum()) == 0.0:
            return torch.zeros_like(x), torch.zeros_like(scale)
        return grad * scale, (grad * x).flatten(0, -2).sum(0)
