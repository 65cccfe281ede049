"""What is refused before anything is reserved: an optimizer that could not take a private step, data that the plan is not for.

And, before anything is released, losses that cannot be trained on privately.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.participation import WithoutReplacement
from dpfy.plan.recipe import Plan, Recipe


def check_parts(model: object, optimizer: object, plan: object) -> None:
    """Refuse what is no model, no optimizer or no plan."""
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", type(model).__name__, "must be a torch.nn.Module")
    if isinstance(plan, Recipe):
        raise InvalidInput("plan", "a recipe", "fix its noise first: recipe.calibrate(epsilon, delta) gives a plan")
    if not isinstance(plan, Plan):
        raise InvalidInput("plan", type(plan).__name__, "must be a plan, as dpfy.dpsgd(...).calibrate(epsilon, delta) gives")
    if not isinstance(optimizer, torch.optim.Optimizer):
        shown = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
        raise InvalidInput(
            "optimizer", shown, "must be an optimizer of the model: torch.optim.Adam(model.parameters(), lr=...), say"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, empty: bool) -> None:
    """Refuse, before anything is reserved, an optimizer that does not fit the model or could not take a private step.

    With `empty`, also one that holds a state already: gradients of the data may be in it.
    """
    mine = {id(p) for p in model.parameters() if p.requires_grad}
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := mine - theirs:
        raise InvalidInput("optimizer", f"{len(missing)} parameters missing", "must hold every trainable parameter of the model")
    if foreign := theirs - {id(p) for p in model.parameters()}:
        raise InvalidInput("optimizer", f"{len(foreign)} foreign parameters", "must hold parameters of this model only")
    name, closure = type(optimizer).__name__, inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(f"{name}, which evaluates the loss again inside a step,", "use an optimizer that steps once a gradient")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(f"{name}: noise makes every gradient dense, which it refuses; it", "use Adam")
    if empty and any(state for state in optimizer.state.values()):
        rule = "its state must be empty; make a new optimizer, or state by Update(public_state=True) that it tells nothing about the data"
        raise InvalidInput("optimizer", f"{name} with a state", rule)


def check_records(recipe: Recipe, held: int, found: int | None) -> None:
    """Refuse data with another number of records in a row than the plan's unit owns, or of another size than it was made for."""
    most, expected = recipe.unit.most_records, recipe.records
    if most != held:
        rule = f"the plan's unit owns up to {most}; group the data with dpfy.by_user and give its unit to the recipe"
        raise InvalidInput("train", f"{held} records in a row", rule)
    fixed = isinstance(
        recipe.sampler.participation, WithoutReplacement
    )  # then how often a record is drawn depends on their number
    if found is not None and abs(found - expected) > (0 if fixed else max(1, expected // 100)):
        raise InvalidInput("train", f"{found} records", f"the plan was made for {expected}; make a plan for this data")


SCALED = 2.0**10
"""A factor of the losses, held in a tensor, from which on it is taken for that of a gradient scaler: they begin at 2^16."""

NARROW = "use torch.autocast(..., dtype=torch.bfloat16), whose gradients need no scaling, or model.bfloat16()"

REENTRANT = "CheckpointFunctionBackward"
"""The node of torch's reentrant checkpoints: it runs a backward pass of its own, out of sight of the pass around it."""


def check_first(losses: Tensor) -> None:
    """Refuse, by the first losses, what could not be trained in privately.

    That is losses that went through float16, where small gradients are zero, losses scaled against that, and layers inside of reentrant
    activation checkpoints, which no gradient of a single example reaches.

    Guarantees: losses that a GradScaler multiplied (by a tensor, as the last thing done) and graphs through float16 are refused at the
    first step of a run. A factor that comes later, or is hidden deeper, is not seen: it scales what is clipped, and so costs accuracy,
    never privacy.
    """
    last = losses.grad_fn
    factor = getattr(last, "_saved_other", None) if last is not None and last.name() == "MulBackward0" else None
    if not isinstance(factor, Tensor) or factor.dim() or factor.dtype is not torch.float32 or factor.requires_grad:
        factor = torch.ones(())  # a number of Python's own is held in float64
    if abs(float(factor)) >= SCALED:
        raise Unsupported(f"losses multiplied by {float(factor):g}, as by a GradScaler,", f"hand them over unscaled; {NARROW}")
    seen, todo = {last}, [last]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if any(each.dtype is torch.float16 for each in node._input_metadata):  # type: ignore[attr-defined]
            raise Unsupported("float16 on the way from the parameters to the losses", NARROW)
        if node.name() == REENTRANT:
            raise Unsupported(
                "reentrant activation checkpointing", "call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        todo += [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(child for child, _ in node.next_functions)
