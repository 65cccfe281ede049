"""What is refused before anything is reserved: an optimizer that could not take a private step,
data that the plan is not for.

And, before anything is released, losses that cannot be trained on privately.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import EXAMPLE, WithoutReplacement, user_unit
from dpfy.data.owners import KeptRecords, Owned, Users
from dpfy.data.split import part_of
from dpfy.data.users import UserRecords
from dpfy.gradients.engine import reentrant
from dpfy.noise.shares import WAY_OUT, Shares
from dpfy.plan.recipe import RECORD, UNIT, Plan, Recipe


def check_parts(model: object, optimizer: object, plan: object) -> None:
    """Refuse what is no model, no optimizer or no plan."""
    check_trained(model, optimizer)
    if isinstance(plan, Recipe):
        raise InvalidInput(
            "plan", "a recipe", "fix its noise first: recipe.calibrate(epsilon, delta) gives a plan"
        )
    if not isinstance(plan, Plan):
        raise InvalidInput(
            "plan",
            type(plan).__name__,
            "must be a plan, as dpfy.dpsgd(...).calibrate(epsilon, delta) gives",
        )


def check_trained(model: object, optimizer: object) -> None:
    """Refuse what is no model or no optimizer."""
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", type(model).__name__, "must be a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        shown = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
        raise InvalidInput(
            "optimizer",
            shown,
            "must be an optimizer of the model: torch.optim.Adam(model.parameters(), lr=...), say",
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, empty: bool) -> None:
    """Refuse, before anything is reserved, an optimizer that does not fit the model or could not
    take a private step.

    With `empty`, also one that holds a state already: gradients of the data may be in it.
    """
    if any(p.requires_grad and p.dtype is torch.float16 for p in model.parameters()):
        what = ", ".join(
            name
            for name, p in model.named_parameters()
            if p.requires_grad and p.dtype is torch.float16
        )
        raise Unsupported(f"training parameters in float16 ({what})", NARROW)
    mine = {id(p) for p in model.parameters() if p.requires_grad}
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := mine - theirs:
        raise InvalidInput(
            "optimizer",
            f"{len(missing)} parameters missing",
            "must hold every trainable parameter of the model",
        )
    if foreign := theirs - {id(p) for p in model.parameters()}:
        raise InvalidInput(
            "optimizer",
            f"{len(foreign)} foreign parameters",
            "must hold parameters of this model only",
        )
    name, closure = (
        type(optimizer).__name__,
        inspect.signature(type(optimizer).step).parameters.get("closure"),
    )
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(
            f"{name}, which evaluates the loss again inside a step,",
            "use an optimizer that steps once a gradient; for second derivatives with noise use the "
            "solver newton of linear models (dpfy-lab), or a Hessian of public data",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(
            f"{name}: noise makes every gradient dense, which it refuses; it", "use Adam"
        )
    _check_settings(optimizer)
    if empty and not _new(optimizer):
        rule = (
            "its state must be empty; make a new optimizer, or state by Update(public_state=True) "
            "that it tells nothing about the data"
        )
        raise InvalidInput("optimizer", f"{name} with a state", rule)


def _check_settings(optimizer: torch.optim.Optimizer) -> None:
    """Refuse tensors among the settings that a checkpoint or a report cannot hold, before the run
    is charged.
    """
    for group in optimizer.param_groups:
        if isinstance(group.get("initial_lr"), Tensor):
            raise InvalidInput(
                "optimizer.lr",
                "a tensor that a scheduler starts from",
                "make the optimizer with a float: lr=0.1",
            )
        for name, value in group.items():
            parts = (
                [value]
                if isinstance(value, Tensor)
                else value
                if isinstance(value, tuple | list) and name != "params"
                else ()
            )
            if any(isinstance(v, Tensor) and (v is not value or v.numel() != 1) for v in parts):
                raise InvalidInput(f"optimizer.{name}", "tensors", "give plain numbers")


def _new(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer holds no state, or, as Adagrad makes it, the state that a new one has by
    its settings alone.
    """
    if not any(state for state in optimizer.state.values()):
        return True
    if type(optimizer) is not torch.optim.Adagrad:
        return False
    begun = {
        p: group["initial_accumulator_value"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return optimizer.state.keys() <= begun.keys() and all(
        state.keys() == {"step", "sum"}
        and bool((state["step"] == 0).all())
        and bool((state["sum"] == _filled(begun[p], p)).all())
        for p, state in optimizer.state.items()
    )


def _filled(value: float, like: Tensor) -> Tensor | complex:
    return (
        complex(value, value)
        if like.is_complex()
        else torch.tensor(value, dtype=like.dtype, device=like.device)
    )


def check_owners(recipe: Recipe, train: object) -> None:
    """Refuse records whose owners are another unit than the plan protects: a user's day is no user,
    and single records are no users.

    And records whose owners add no noise, where it is theirs to add.
    """
    if isinstance(recipe.strategy, Shares) and not getattr(train, "adds_shares", False):
        raise Unsupported("a plan with distributed noise around records of one's own", WAY_OUT)
    if recipe.draw == RECORD and not (
        isinstance(train, Owned | KeptRecords) and train.most == recipe.unit.most_records
    ):
        rule = (
            f"the plan draws records of which one {recipe.unit.name} has at most "
            f"{recipe.unit.most_records}: say whose they are (user=)"
        )
        raise InvalidInput("train", "records without owners", rule)
    if isinstance(train, Owned):
        if train.single != (recipe.draw == RECORD):
            raise InvalidInput(
                "train",
                "users" if recipe.draw == RECORD else "single records",
                "the plan draws the other of them",
            )
        stated, held = recipe.unit.protects, train.unit.protects
        differ = stated != held and {stated, held} & {"window", "content"}
        if differ or not recipe.unit.name.endswith(train.users.window or ""):
            rule = f"the records are by {train.unit.name}: give the recipe unit={train.unit!r}"
            raise InvalidInput("plan", f"for one {recipe.unit.name}", rule)


def with_owners(train: object, user: object, recipe: Recipe) -> object:
    """`train` with its owners, where `user` says whose each record is; the recipe's unit says how
    many of one user's are used.
    """
    if user is None:
        return train
    if isinstance(train, Owned | UserRecords):
        raise InvalidInput("user", "given", "the records are grouped by user already: leave it out")
    users = user if isinstance(user, Users) else Users(user)
    if recipe.unit == EXAMPLE:
        due = user_unit(8, users.window, users.shared)
        raise InvalidInput(
            "plan",
            "for one example",
            f"records have owners: give the recipe unit={due!r}, or as many as are to be used",
        )
    return Owned(train, users, recipe.unit.most_records, single=recipe.draw == RECORD)


def check_records(recipe: Recipe, held: int, found: int | None) -> None:
    """Refuse data with another number of records in a row than the plan's unit owns, or of another
    size than it was made for.
    """
    most, expected = recipe.unit.most_records if recipe.draw == UNIT else 1, recipe.records
    if most != held:
        rule = (
            f"the plan's unit owns up to {most}; group the data with dpfy.by_user and give its "
            f"unit to the recipe"
        )
        raise InvalidInput("train", f"{held} records in a row", rule)
    fixed = isinstance(
        recipe.sampler.participation, WithoutReplacement
    )  # then how often a record is drawn depends on their number
    if found is not None and abs(found - expected) > (0 if fixed else max(1, expected // 100)):
        raise InvalidInput(
            "train",
            f"{found} records",
            f"the plan was made for {expected}; make a plan for this data",
        )


def check_part(part: str | None, records: object) -> None:
    """Refuse other records than the part of the data that a run must train on, however many they
    are.
    """
    if part is not None and part_of(records) != part:
        rule = (
            f"the trial must train on its {part}: give trial.train(data) as it is (transform the "
            f"data before, not after)"
        )
        raise InvalidInput("train", "other records", rule)


SCALED = 2.0**10
"""A factor of the losses, held in a tensor, from which on it is taken for that of a gradient
scaler: they begin at 2^16.
"""

WIDE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128})
"""Types that gradients may pass through."""

NARROW = (
    "use torch.autocast(..., dtype=torch.bfloat16), whose gradients need no scaling, or "
    "model.bfloat16()"
)

REENTRANT = "CheckpointFunctionBackward"
"""The node of torch's reentrant checkpoints: it runs a backward pass of its own, out of sight of
the pass around it.
"""


def check_first(losses: Tensor) -> None:
    """Refuse, by the first losses, what could not be trained in privately.

    That is losses that went through float16, where small gradients are zero, or through another
    type without a bound (float8), losses scaled against that, and layers inside of reentrant
    activation checkpoints, which no gradient of a single example reaches.

    Guarantees: losses that a GradScaler multiplied (by a tensor, as the last thing done) and graphs
    through float16 are refused at the first step of a run. A factor that comes later, or is hidden
    deeper, is not seen: it scales what is clipped, and so costs accuracy, never privacy.
    """
    last = losses.grad_fn
    factor = (
        getattr(last, "_saved_other", None)
        if last is not None and last.name() == "MulBackward0"
        else None
    )
    if (
        not isinstance(factor, Tensor)
        or factor.dim()
        or factor.dtype is not torch.float32
        or factor.requires_grad
    ):
        factor = torch.ones(())  # a number of Python's own is held in float64
    if abs(float(factor)) >= SCALED:
        raise Unsupported(
            f"losses multiplied by {float(factor):g}, as by a GradScaler,",
            f"hand them over unscaled; {NARROW}",
        )
    seen, todo = {last}, [last]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        for dtype in {each.dtype for each in node._input_metadata} - WIDE:  # type: ignore[attr-defined]
            if (
                dtype.is_floating_point or dtype.is_complex
            ):  # whole numbers, as the places of a maximum, carry no gradient
                name = str(dtype).removeprefix("torch.")
                raise Unsupported(f"{name} on the way from the parameters to the losses", NARROW)
        if node.name() == REENTRANT:
            raise reentrant()
        todo += [
            child for child, _ in node.next_functions if child is not None and child not in seen
        ]
        seen.update(child for child, _ in node.next_functions)
