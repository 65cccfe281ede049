"""What engines answer, and how far two answers are apart."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Engine, Grads


def answer(engine: Engine, model: nn.Module, losses: Callable[[], Tensor], clip: Clip, steps: int = 1) -> Grads:
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
