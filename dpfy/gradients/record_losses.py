"""The losses of a batch from a loss written for one record: mapped over the rows by torch, or
called for one after the other.

Some functions of torch are computed for the whole batch at once: torch maps them over records by
slower ways.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.func import vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.one_record import KEEP_NONE, ONE_BY_ONE, Apart, Call, current, lowered


def _attended(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of all records at once; torch maps its fast ways over
    records one by one.
    """
    inputs = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    size = max(t.dim() for t in inputs)
    fold = size > 3  # the first dimension of four and the batch are one
    own = max((t.shape[0] for t in inputs if t.dim() == size), default=1)

    def work(batch: int, *values: Tensor) -> Tensor:
        aligned = [t.reshape(batch, *[1] * (size + 1 - t.dim()), *t.shape[1:]) for t in values]
        if fold:
            aligned = [t.expand(-1, own, *[-1] * (size - 1)).flatten(0, 1) for t in aligned]
        q, k, v, *mask = aligned
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask[0] if mask else None,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return y.unflatten(0, (batch, own)) if fold else y

    return lowered(call, work, *inputs)  # type: ignore[no-any-return]


def _entropy(
    call: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of all records at once, where each has scores for one position or for a row
    of them.
    """
    usual = (
        weight is None
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum", "none")
    )
    if (
        not usual
        or input.dim() not in (1, 2)
        or target.shape != input.shape[:-1]
        or target.is_floating_point()
    ):
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )

    def work(batch: int, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(
            x.flatten(0, -2),
            y.flatten(),
            reduction="none",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        ).view(y.shape)
        if reduction == "none":
            return losses
        each = losses.view(batch, -1)
        total = each[:, 0] if each.shape[1] == 1 else each.sum(1)
        return total if reduction == "sum" else total / (y != ignore_index).view(batch, -1).sum(1)

    return lowered(call, work, input, target)  # type: ignore[no-any-return]


WHOLE: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: _attended,
    F.cross_entropy: _entropy,
}
"""Functions of torch that are computed for the whole batch at once.

Torch maps them over records by slower ways.
"""


OUTSIDE = ("an index", "must lie inside the table, the classes or the tensor that it is used for")

REFUSED_BY_TORCH = (
    "vmap",
    "atching rule",
    "doesn't have storage",
    "BatchedTensor",
    "functorch",
    "batched tensor",
    "broadcast shape",
    "register a hook",
)
"""Words by which an error of torch is recognised as a refusal to map a function over rows."""

RowLoss = Callable[[Any, Any], Tensor]
"""(model, record) to the loss of that record."""


def losses_of_rows(f: RowLoss, model: Any, batch: Any, held: Iterable[Tensor] = ()) -> Tensor:
    """``f(model, record)`` for every row of `batch`, vectorised.

    Guarantees: the loss of a row is a function of that row, of the model, and of what `f` was given
    before; no tensor of an earlier call, and no memory of `held`, enters it. A function that torch
    cannot map over rows is refused.
    """
    leaves, structure = pytree.tree_flatten(batch)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call = Call([*held, *[leaves[place] for place in places]], whole=WHOLE)

    def one(*fields: Tensor) -> Tensor:
        call.level = maybe_current_level() or 0
        filled = list(leaves)
        for place, field in zip(places, fields, strict=True):
            filled[place] = field
        call.mark(fields)
        with Apart(call):
            return _single(f(model, pytree.tree_unflatten(filled, structure)), call)

    call.batch = len(leaves[places[0]])
    try:
        with current(call), _eager():
            return vmap(one, randomness="different")(*[leaves[place] for place in places])
    except IndexError:
        raise InvalidInput("record", *OUTSIDE) from None
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "out of bounds" in str(error):  # which would show the index
            raise InvalidInput("record", *OUTSIDE) from None
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, torch.OutOfMemoryError) or not any(
            word in str(error) for word in REFUSED_BY_TORCH
        ):
            raise
        first = re.sub(
            r"\[[\d, ]+\]", "[...]", first
        )  # how many records there are is nobody's business
        raise Unsupported(
            f"a loss for one record that torch cannot map over records ({first})", ONE_BY_ONE
        ) from error


def losses_one_by_one(
    f: RowLoss, model: Any, batch: Any, held: Iterable[Tensor] = ()
) -> list[Tensor]:
    """``f(model, record)`` for one record after the other.

    Guarantees: `f` is given one record; no tensor of the call for another record, and no memory of
    `held`, enters its loss. Numbers that Python read from a tensor are not followed: one record,
    drawn again, is computed a second time after all others, and must have the same loss.
    """
    leaves, structure = pytree.tree_flatten(batch)
    places, losses = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)], []
    kept = set(held)

    def loss_of(row: int) -> Tensor:
        call, filled = Call(kept, vectorised=False), list(leaves)
        for place in places:
            filled[place] = leaves[place][
                row
            ].clone()  # memory of its own: from a view the batch could be reached
        call.mark(filled)
        try:
            with current(call), Apart(call):
                return _single(f(model, pytree.tree_unflatten(filled, structure)), call)
        except IndexError:
            raise InvalidInput("record", *OUTSIDE) from None

    count, device = len(leaves[places[0]]), leaves[places[0]].device
    again = secrets.randbelow(count)
    for row in range(count):
        if row == again:
            start = _random(device)
        losses.append(loss_of(row))
    after = _random(device)
    _set_random(device, start)
    twice = loss_of(again).detach()
    _set_random(device, after)
    if not torch.allclose(
        twice, losses[again].detach(), rtol=torch.finfo(twice.dtype).eps ** 0.5, equal_nan=True
    ):
        raise Unsupported("a loss of one record that changes with the records before it", KEEP_NONE)
    return losses


def _random(device: torch.device) -> tuple[Tensor, ...]:
    """The state of torch's generators, where random numbers for `device` come from."""
    own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *own)


def _set_random(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _single(loss: Any, call: Call) -> Tensor:
    """The loss of one record: one number."""
    if not isinstance(loss, Tensor):
        raise InvalidInput(
            "loss", type(loss).__name__, "of one record must be a tensor of one number"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        what = f"{loss.dtype} of shape {list(loss.shape)}"
        raise InvalidInput(
            "loss",
            what,
            "of one record must be one number: reduce it over the record's own positions",
        )
    call.admit(loss)
    return loss.reshape(())


def _eager() -> AbstractContextManager[Any]:
    """Compiled functions run as they were written: a compiled one cannot be mapped over rows."""
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else nullcontext()
    )
