"""Which engine runs: chosen from the model, said in one line, overridable by name."""

from __future__ import annotations

from torch import nn

from dpfy.core import check
from dpfy.gradients.batched import BatchedEngine
from dpfy.gradients.engine import Engine
from dpfy.gradients.loop import LoopEngine

ENGINES: dict[str, type] = {"loop": LoopEngine, "batched": BatchedEngine}


def choose(model: nn.Module, name: str = "auto") -> tuple[Engine, str]:
    """The engine called `name`, or for "auto" the fastest that is exact for `model`, and one line that says why."""
    check.one_of("engine", name, ["auto", *ENGINES])
    if name != "auto":
        return ENGINES[name](), f"engine {name}: asked for"
    return BatchedEngine(), "engine batched: works for any differentiable model"
