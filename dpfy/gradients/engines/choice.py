"""Which engine runs: chosen from the model, said in one line, overridable by name."""

from __future__ import annotations

from torch import nn

from dpfy.core import check
from dpfy.gradients.engine import Engine
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import BatchedEngine, LoopEngine
from dpfy.gradients.layers.table import rule_for

ENGINES: dict[str, type] = {
    "loop": LoopEngine,
    "batched": BatchedEngine,
    "bookkeeping": BookkeepingEngine,
}


def choose(model: nn.Module, name: str = "auto", *, sparse: bool = False) -> tuple[Engine, str]:
    """The engine called `name`, or for "auto" the fastest that is exact for `model`, and one line
    that says why.

    Args:
        model: The model that is to be trained.
        name: "auto", or one of :data:`ENGINES`.
        sparse: Whether the sum of a table may be a sparse tensor, where the engine makes such.
    """
    check.one_of("engine", name, ["auto", *ENGINES])
    if name != "auto":
        found = BookkeepingEngine(sparse=sparse) if name == "bookkeeping" else ENGINES[name]()
        return found, f"engine {name}: asked for"
    own, covered, strange = 0, 0, []
    for path, module in model.named_modules():
        count = sum(p.numel() for p in module.parameters(recurse=False) if p.requires_grad)
        own += count
        if rule_for(module) is not None:
            covered += count
        elif count:
            strange.append(f"{path or 'the model'} ({type(module).__name__})")
    if not covered:
        return (
            BookkeepingEngine(sparse=sparse),
            "engine bookkeeping: no layer of the model has a rule; by rules of the operations "
            "where there are some",
        )
    if not strange:
        return BookkeepingEngine(
            sparse=sparse
        ), "engine bookkeeping: every layer of the model has a rule"
    shown = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
    return (
        BookkeepingEngine(sparse=sparse),
        f"engine bookkeeping: layer rules for {covered} of {own} parameters; by rules of the "
        f"operations for {shown}",
    )
