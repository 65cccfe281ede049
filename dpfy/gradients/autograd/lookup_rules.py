"""What lookups at a split point do to the table that they meet the batch with: rows by index, and
bags of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.autograd.graph_nodes import Maker, saved
from dpfy.gradients.autograd.tape import BatchAxis
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.embedding import EmbeddingGradient, RaggedEmbeddingGradient
from dpfy.gradients.per_example.placed import ViewGradient


def _lookup(index: Tensor, axis: BatchAxis, count: int, padding: int = -1) -> Maker | None:
    """Rows of a table at `index`, of whose dimensions one holds the batch."""
    if axis.dim >= index.dim():
        return None

    def make(g: Tensor, batch: int) -> Contribution:
        where = axis.rows_first(index, batch).reshape(batch, -1) % count
        grads = axis.rows_first(g, batch).reshape(*where.shape, -1)
        if padding >= 0:
            grads = grads.masked_fill((where == padding)[..., None], 0.0)
        return EmbeddingGradient(where, grads, count)

    return make


def embedding(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    if node._saved_scale_grad_by_freq or (read := saved(node, "indices")) is None:
        return None
    padding = node._saved_padding_idx
    return _lookup(
        read[0], axis, node._saved_weight_sym_argsize_0, padding if 0 <= padding < 2**62 else -1
    )


def index(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """table[index], by whole numbers in the first dimension."""
    if any(getattr(raw, "unpack_hook", True) is not None for raw in node._raw_saved_indices):
        return None
    first, *others = node._saved_indices
    if first is None or first.dtype == torch.bool or any(t is not None for t in others):
        return None
    return _lookup(first, axis, node._saved_self_sym_sizes[0])


def index_select(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    read = saved(node, "index")
    return (
        None
        if read is None or node._saved_dim != 0
        else _lookup(read[0], axis, node._saved_self_sym_sizes[0])
    )


def bag(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """Sums, means or maxima of rows of a table. Modes 0, 1 and 2; bags may have any number of
    rows.
    """
    names = ("indices", "offsets", "result3") if node._saved_mode == 2 else ("indices", "offsets")
    if (
        i != 0
        or axis.dim != 0
        or node._saved_scale_grad_by_freq
        or (read := saved(node, *names)) is None
    ):
        return None
    weights = saved(node, "per_sample_weights")
    if weights is None and node._saved_per_sample_weights is not None:
        return None
    count, mode, padding = (
        node._saved_weight_sym_argsize_0,
        node._saved_mode,
        node._saved_padding_idx,
    )
    index, offsets = read[0].flatten(), read[1]

    def make(g: Tensor, batch: int) -> Contribution:
        bags = (
            torch.searchsorted(
                offsets[: len(g)].contiguous(),
                torch.arange(len(index), device=g.device),
                right=True,
            )
            - 1
        )
        real = index != (padding if 0 <= padding < 2**62 else -1)
        sizes = torch.zeros(len(g), dtype=torch.long, device=g.device).index_add_(
            0, bags, real.long()
        )
        if mode == 2:
            return _maxima(
                read[2], torch.where(sizes[:, None] > 0, g, torch.zeros_like(g)), axis, batch, count
            )
        factors = real.to(g.dtype) if weights is None else weights[0].flatten().to(g.dtype) * real
        if mode == 1:
            factors = factors / sizes[bags].clamp(min=1)
        rows = axis.rows_first(torch.arange(len(g), device=g.device), batch).reshape(batch, -1)
        owners = torch.empty_like(sizes).index_put_(
            (rows.flatten(),), torch.arange(batch, device=g.device).repeat_interleave(rows.shape[1])
        )
        return _ragged(index, g[bags] * factors[:, None], owners[bags], batch, count)

    return make


def _maxima(best: Tensor, g: Tensor, axis: BatchAxis, batch: int, count: int) -> Contribution:
    """Every column of a bag has a row of its own: entries of the table instead of rows."""
    columns = g.shape[1]
    where = best.clamp(min=0) * columns + torch.arange(columns, device=g.device)
    index, grads = (axis.rows_first(t, batch).reshape(batch, -1) for t in (where, g))
    part = EmbeddingGradient(index, grads[..., None], count * columns)
    shape = torch.Size((count, columns))
    return ViewGradient(
        part,
        lambda t: t.reshape(-1, *shape),
        torch.Size((count * columns, 1)),
        shape,
        ("entries", shape),
    )


def _ragged(index: Tensor, grads: Tensor, owners: Tensor, batch: int, count: int) -> Contribution:
    """Rows that belong to examples, in any order and number, as a rectangle."""
    lengths = torch.zeros(batch, dtype=torch.long, device=index.device).index_add_(
        0, owners, torch.ones_like(owners)
    )
    order = owners.argsort(stable=True)
    sorted_owners = owners[order]
    slots = (
        torch.arange(len(order), device=index.device) - (lengths.cumsum(0) - lengths)[sorted_owners]
    )
    most = max(int(lengths.max()), 1)
    where = index.new_zeros(batch, most).index_put_((sorted_owners, slots), index[order])
    filled = grads.new_zeros(batch, most, grads.shape[1]).index_put_(
        (sorted_owners, slots), grads[order]
    )
    return RaggedEmbeddingGradient(where.long(), filled, count, lengths)
