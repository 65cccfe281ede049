"""Functions of torch inside of a loss for one record, computed for the whole batch at once.

Torch maps them over records by slower ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dpfy.gradients.one_record import Call, lowered


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
