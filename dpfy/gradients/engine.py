"""The contract of every engine: losses per unit in, bounded sum of gradients out.

The answer is fixed by the clip rule; an engine changes only speed and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.per_example import rounding

T = TypeVar("T")

Grads = dict[str, Tensor]
"""Parameter name to tensor, trainable parameters only, names as in ``model.named_parameters()``,
shared parameters once.
"""


class Engine(Protocol):
    """Turns a vector of per-unit losses into a sum of clipped per-unit gradients.

    Guarantees, backed by ``tests/contracts/test_engines.py``:
        each unit adds at most ``clip.bound`` to the sum; a unit whose gradient is not finite, or
        whose mask is False, adds exactly zero; the ``.grad`` fields, the class and the
        ``state_dict`` of the user's model are never touched.
    """

    name: str

    def attach(self, model: nn.Module) -> None:
        """Prepare `model`; raise :class:`Unsupported` with the way out if it has what the engine
        cannot do.
        """
        ...

    def detach(self) -> None:
        """Remove every hook and every trace from the model. Calling it twice does no harm."""
        ...

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """Sum of clipped gradients of `losses` (shape [batch], one per unit, graph attached) over
        the units kept by `mask`.
        """
        ...

    def row_multiple(self, expected: float, device: torch.device) -> int:
        """What the rows of a random batch of `expected` on average are best filled up to a multiple
        of, on `device`: 1, nothing.
        """
        return 1


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name to parameter for the parameters that want a gradient; a shared parameter appears once,
    under its first name.
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def attached(held: T | None) -> T:
    """What an attached engine holds of its model, or an error that says what to call first."""
    if held is None:
        raise DpfyError("engine: not attached to a model; call attach(model) before bounded_sum")
    return held


def checked(losses: Tensor, mask: Tensor | None) -> Tensor | None:
    """Refuse what is not one loss per unit; return the mask as bool on the losses' device.

    A reduced (scalar) loss has no per-unit gradients any more, so there is no bound to give it.
    """
    if losses.dim() != 1:
        rule = (
            "must hold one loss per unit, shape [batch]: use reduction='none' and average over the "
            "other dimensions"
        )
        raise InvalidInput("losses", f"shape {list(losses.shape)}", rule)
    if not losses.is_floating_point():
        raise InvalidInput("losses", losses.dtype, "must be floating point")
    check.device_kind("losses", losses.device.type)
    if len(losses) and not losses.requires_grad:
        raise InvalidInput(
            "losses", "a tensor without a graph", "must come from the model with gradients enabled"
        )
    if mask is None:
        return None
    if mask.shape != losses.shape:
        raise InvalidInput(
            "mask",
            f"shape {list(mask.shape)}",
            f"must have one entry per loss, shape {list(losses.shape)}",
        )
    return mask.to(device=losses.device, dtype=torch.bool)


@contextmanager
def no_reentrant_checkpoints() -> Iterator[None]:
    """Around a backward pass: torch's error about a reentrant checkpoint becomes a refusal with the
    way out.
    """
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise reentrant() from None


def reentrant() -> Unsupported:
    """Reentrant checkpoints run a backward pass of their own, which no pass around it sees."""
    return Unsupported(
        "reentrant activation checkpointing",
        "call torch.utils.checkpoint.checkpoint with use_reentrant=False",
    )


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context without autocast, which costs nothing where there is none."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def group_rows(clip: Clip, names: list[str]) -> list[list[int]]:
    """The positions in `names` of each clip group, one list a group."""
    indices = clip.groups(names)
    rows: list[list[int]] = [[] for _ in range(max(indices, default=0) + 1)]
    for position, group in enumerate(indices):
        rows[group].append(position)
    return rows


def inflate_norms(squared_norms: Tensor, dtype: torch.dtype, convolved: bool = False) -> Tensor:
    """Squared norms inflated by what arithmetic in `dtype` may do, relatively, to norms and
    contributions.

    Products in float32 may run in TF32 on a GPU. For those of convolutions (`convolved`) there is a
    switch of its own, on by default.
    """
    device = squared_norms.device
    factor = (
        max(rounding.of_factors(dtype, device, kind) for kind in {False, convolved})
        if dtype == torch.float32
        else 0.0
    )
    known = check.number_type("a gradient", dtype)
    margin = max(known.gradient_margin, 16 * factor)
    return squared_norms * (1.0 + margin) ** 2 if margin else squared_norms


def multipliers(
    clip: Clip, squared_norms: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[groups, batch] multipliers in `dtype`: 0 for units that are masked out or have any norm that
    is not finite.
    """
    return zero_invalid(clip.scale(squared_norms), squared_norms, mask).to(dtype)


def clipped_sum(per_unit: list[Tensor], names: list[str], clip: Clip, mask: Tensor | None) -> Grads:
    """Clip materialised per-unit gradients (each of shape [units, *parameter]) and sum them over
    the units.

    Guarantees: units that are masked out or not finite add exactly zero, whatever their tensors
    hold. Norms are those of the very tensors that are summed, so that nothing can cancel between
    the two.
    """
    rows = group_rows(clip, names)
    squares = [rounding.row_squares(g) for g in per_unit]
    squared_norms = torch.stack(
        [sum((squares[i] for i in members), start=torch.zeros_like(squares[0])) for members in rows]
    )
    squared_norms = inflate_norms(
        squared_norms, max((g.dtype for g in per_unit), key=rounding.unit)
    )
    scale = multipliers(clip, squared_norms, mask, rounding.sum_dtype(per_unit[0].dtype))
    sums: Grads = {}
    for members, multiplier in zip(rows, scale, strict=True):
        keep = multiplier > 0
        for i in members:
            clean = torch.where(keep.view(-1, *[1] * (per_unit[i].dim() - 1)), per_unit[i], 0.0).to(
                rounding.sum_dtype(per_unit[i].dtype)
            )
            sums[names[i]] = torch.tensordot(multiplier.to(clean.dtype), clean, dims=1)
    return sums | clip.beside(scale)


def added(total: Grads, part: Grads) -> None:
    """Add `part` to `total` in place; a name that `total` does not have yet is taken over."""
    for name, value in part.items():
        total[name] = total[name].add_(value) if name in total else value


def zero_invalid(scale: Tensor, squared_norms: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the multipliers of masked units, and in every group those of a unit with any non-finite
    group.
    """
    if mask is None and len(scale) == 1:
        return scale  # a rule gives 0 itself where its own group is not finite
    dead = ~squared_norms.isfinite().all(0)
    if mask is not None:
        dead = dead | ~mask
    return scale.masked_fill(dead, 0.0)


def zeros(params: dict[str, nn.Parameter], clip: Clip) -> Grads:
    """The sum over no units."""
    none = {
        name: torch.zeros_like(p, dtype=rounding.sum_dtype(p.dtype)) for name, p in params.items()
    }
    some = next(iter(none.values()), torch.zeros(()))
    return none | clip.beside(some.new_zeros(1, 0))


def per_user(losses: Tensor, real: Tensor, *, reduction: str = "sum") -> Tensor:
    """One loss per user, [users], from one loss per record.

    Give the result to any engine, or to `PrivateTraining.step`. The user's gradient is then clipped
    as a whole, however many records it comes from.

    Args:
        losses: One loss per record, [users * most] or [users, most], user by user.
        real: Which places have a record, [users, most].
        reduction: "sum" gives the gradient of the user's whole data, "mean" that of an average
            record of the user.

    Returns:
        The losses of the users.

    Raises:
        InvalidInput: The shapes do not fit, or `reduction` is neither "sum" nor "mean".

    Guarantees: places that are not real add exactly zero to the loss and to its gradient (as long
    as the losses there are finite), and the loss of a user depends on that user's records alone if
    each record's loss does.

    Example:
        >>> import torch
        >>> import dpfy
        >>> losses = torch.tensor([1.0, 2.0, 4.0, 8.0])
        >>> real = torch.tensor([[True, True], [True, False]])
        >>> dpfy.per_user(losses, real).tolist()
        [3.0, 4.0]
    """
    check.one_of("reduction", reduction, ["sum", "mean"])
    if real.dim() != 2 or real.dtype != torch.bool:
        raise InvalidInput(
            "real",
            f"{real.dtype} of shape {list(real.shape)}",
            "must be true or false for [users, most]",
        )
    if losses.numel() != real.numel() or losses.shape not in (real.shape, (real.numel(),)):
        rule = (
            f"must hold one loss for each of the {real.numel()} records of the batch: use "
            f"reduction='none'"
        )
        raise InvalidInput("losses", f"shape {list(losses.shape)}", rule)
    kept = torch.where(
        real, losses.view(real.shape), torch.zeros((), dtype=losses.dtype, device=losses.device)
    )
    return kept.sum(1) if reduction == "sum" else kept.sum(1) / real.sum(1).clamp(min=1)


def per_view(losses: Tensor, views: int) -> Tensor:
    """One loss per example, [examples], the mean over its `views`, from one loss per view,
    [examples * views] (or [examples, views]).

    Augmentation multiplicity (De et al. 2022): the gradient of an example is the mean over its
    views, clipped once, so that more views cost time but no privacy. `dpfy.lazy(..., views=k)`
    gives such batches; flatten their first two dimensions for the model.

    Guarantees: the loss of an example depends on its own views alone if each view's loss does.
    """
    check.integer("views", views)
    if (
        losses.dim() not in (1, 2)
        or losses.numel() % views
        or (losses.dim() == 2 and losses.shape[1] != views)
    ):
        rule = (
            f"must hold one loss for each of the {views} views of each example: use "
            f"reduction='none'"
        )
        raise InvalidInput("losses", f"shape {list(losses.shape)}", rule)
    return losses.reshape(-1, views).mean(1)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor inside `value`, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors_in(v)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its tuples, lists and plain dicts replaced by
    ``change(tensor)``.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(mapped(v, change) for v in value)
    if isinstance(value, list):
        return [mapped(v, change) for v in value]
    if type(value) is dict:
        return {k: mapped(v, change) for k, v in value.items()}
    return value
