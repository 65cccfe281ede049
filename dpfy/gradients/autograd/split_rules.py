"""What operations at a split point do to the parameter that they meet the batch with: contributions
at once for all examples.

Where a parameter, or anything computed from parameters, is multiplied, added, convolved or looked
up with data, the gradient that arrives has one part per example, and so has the part of every
example at the parameter's side: rows of the saved input times rows of the gradient. A rule reads
the node of the autograd graph before the backward pass and answers with a function of the gradient,
or None if this node is none of its kind; then the example's parts are sent down one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.autograd.graph_nodes import Maker, Rule, input_shape, saved
from dpfy.gradients.autograd.tape import BatchAxis
from dpfy.gradients.layers.rule import as_positions, total_space
from dpfy.gradients.per_example.arithmetic import wide
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.convolution import ConvolutionGradient, Geometry
from dpfy.gradients.per_example.embedding import EmbeddingGradient, RaggedEmbeddingGradient
from dpfy.gradients.per_example.outer import Direct, Outer
from dpfy.gradients.per_example.placed import Stacked, ViewGradient


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


def _embedding(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    if node._saved_scale_grad_by_freq or (read := saved(node, "indices")) is None:
        return None
    padding = node._saved_padding_idx
    return _lookup(
        read[0], axis, node._saved_weight_sym_argsize_0, padding if 0 <= padding < 2**62 else -1
    )


def _index(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """table[index], by whole numbers in the first dimension."""
    if any(getattr(raw, "unpack_hook", True) is not None for raw in node._raw_saved_indices):
        return None
    first, *others = node._saved_indices
    if first is None or first.dtype == torch.bool or any(t is not None for t in others):
        return None
    return _lookup(first, axis, node._saved_self_sym_sizes[0])


def _index_select(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    read = saved(node, "index")
    return (
        None
        if read is None or node._saved_dim != 0
        else _lookup(read[0], axis, node._saved_self_sym_sizes[0])
    )


def _bag(node: Any, i: int, axis: BatchAxis) -> Maker | None:
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


MOST_BLOCKS = 128
"""Products of so many blocks (heads, experts) are taken block by block."""


def maker(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """How input `i` of `node` gets its contribution; None if no rule here explains it."""
    rule = RULES.get(node.name())
    return None if rule is None or not _real(node, i) else rule(node, i, axis)


def _real(node: Any, i: int) -> bool:
    child, number = node.next_functions[i]
    return not any(
        meta.dtype.is_complex for meta in (node._input_metadata[0], child._input_metadata[number])
    )


def _outer(left: Tensor, right: Tensor, axis: BatchAxis, batch: int, factor: float = 1.0) -> Outer:
    """Sum over the examples' positions of left[t] (x) right[t]: two matrices whose first dimension
    holds the batch like `axis`.
    """
    first, second = (as_positions(axis.at(0).rows_first(t, batch)) for t in (left, right))
    if factor != 1:
        first = first * factor
    dtype = torch.promote_types(first.dtype, second.dtype)
    return Outer(first.to(dtype), second.to(dtype))


def _mm(
    node: Any,
    i: int,
    axis: BatchAxis,
    names: tuple[str, str] = ("self", "mat2"),
    factor: float = 1.0,
) -> Maker | None:
    """y = a b. Rows of y are rows of a, columns of y are columns of b."""
    if axis.dim != 1 - i or (other := saved(node, names[1 - i])) is None:
        return None
    data = other[0]
    if i == 1:
        return lambda g, batch: _outer(data, g, axis, batch, factor)
    return lambda g, batch: _outer(g.t(), data.t(), axis, batch, factor)


def _addmm(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """y = beta c + alpha a b."""
    if i == 0:
        return _spread(
            lambda g: g if node._saved_beta == 1 else g * node._saved_beta, node, i, axis
        )
    return _mm(node, i - 1, axis, ("mat1", "mat2"), node._saved_alpha)


def _bmm(
    node: Any,
    i: int,
    axis: BatchAxis,
    names: tuple[str, str] = ("self", "mat2"),
    factor: float = 1.0,
) -> Maker | None:
    """The same for a stack of matrices, as einsum makes it."""
    blocks = node._input_metadata[0].shape[0]
    if axis.dim != 2 - i or blocks > MOST_BLOCKS or (other := saved(node, names[1 - i])) is None:
        return None
    data = other[0]

    def make(g: Tensor, batch: int) -> Contribution:
        pairs = zip(data, g, strict=True) if i == 1 else zip(g.mT, data.mT, strict=True)
        parts = [_outer(left, right, axis, batch, factor) for left, right in pairs]
        return parts[0] if blocks == 1 else Stacked(parts)

    return make


def _baddbmm(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    if i == 0:
        return _spread(
            lambda g: g if node._saved_beta == 1 else g * node._saved_beta, node, i, axis
        )
    return _bmm(node, i - 1, axis, ("batch1", "batch2"), node._saved_alpha)


def _mv(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """y = a v."""
    if i != 1 or (other := saved(node, "self")) is None:
        return None
    data = other[0]

    def make(g: Tensor, batch: int) -> Contribution:
        rows, grads = (axis.rows_first(t, batch) for t in (data, g))
        return Direct(
            torch.bmm(wide(grads).reshape(batch, 1, -1), wide(as_positions(rows))).squeeze(1)
        )

    return make


def _convolution(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """Input 1 is the weight, input 2 the bias."""
    if axis.dim != 0 or i == 0:
        return None
    read = saved(node, "input", "weight") if i == 1 else ()
    if read is None:
        return None
    extra = tuple(node._saved_output_padding) if node._saved_transposed else ()
    stride, padding, dilation = (
        tuple(getattr(node, f"_saved_{name}")) for name in ("stride", "padding", "dilation")
    )
    how = Geometry(
        stride, padding, dilation, node._saved_groups, bool(node._saved_transposed), extra
    )

    def make(g: Tensor, batch: int) -> Contribution:
        images = len(g) // batch
        if i == 2:
            sums = axis.rows_first(total_space(g), batch)
            return Direct(sums if images == 1 else sums.sum(1))
        inputs, grads = (axis.rows_first(t, batch) for t in (read[0], g))
        if images > 1:
            inputs, grads = inputs.flatten(0, 1), grads.flatten(0, 1)
        return ConvolutionGradient(
            inputs.to(g.dtype), grads, read[1].detach().to(g.dtype), how, images
        )

    return make


def _bilinear(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """y = x' W z, for every output: sums of products of three."""
    plan = tuple(
        list(getattr(node, f"_saved_{name}"))
        for name in ("expand1", "expand2", "expand3", "sumdim")
    )
    if (
        i != 1
        or plan != ([1, 3], [0], [1, 2], [2, 3])
        or axis.dim != 0
        or (read := saved(node, "i1", "i3")) is None
    ):
        return None
    first, second = read
    return lambda g, batch: _outer(
        (g[:, :, None] * first[:, None, :]).flatten(1), second, axis, batch
    )


def _spread(local: Callable[[Tensor], Tensor], node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """An input that broadcasts over the batch: `local` gives its gradient before that is summed to
    the input's shape.
    """
    shape, out = input_shape(node, i), len(node._input_metadata[0].shape)
    missing = out - len(shape)
    if missing < 0 or (axis.dim >= missing and shape[axis.dim - missing] != 1):
        return None
    kept = (*[1] * missing, *shape)

    def make(g: Tensor, batch: int) -> Contribution:
        t = local(g)
        wider = torch.float64 if t.dtype == torch.float64 else torch.float32
        summed = [j for j in range(t.dim()) if j != axis.dim and kept[j] == 1 and t.shape[j] > 1]
        each = axis.rows_first(t.sum(summed, keepdim=True, dtype=wider) if summed else t, batch)
        if axis.folded:  # positions of an example lie where the batch lay
            each = each.sum(axis.dim + 1, dtype=wider)
        return Direct(each.reshape(batch, *shape))

    return make


def _add(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    alpha = node._saved_alpha if i else 1
    return _spread(lambda g: g if alpha == 1 else g * alpha, node, i, axis)


def _subtract(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    alpha = -node._saved_alpha if i else 1
    return _spread(lambda g: g if alpha == 1 else g * alpha, node, i, axis)


def _multiply(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    read = saved(node, "other" if i == 0 else "self")
    return None if read is None else _spread(lambda g: g * read[0], node, i, axis)


def _divide(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """x / y by x: 1 / y; by y: - x / y^2."""
    read = saved(node, "other") if i == 0 else saved(node, "self", "other")
    if read is None:
        return None
    return _spread(
        (lambda g: g / read[0]) if i == 0 else (lambda g: -g * ((read[0] / read[1]) / read[1])),
        node,
        i,
        axis,
    )


def _prelu(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    read = saved(node, "self") if i == 1 else None
    return None if read is None else _spread(lambda g: g * read[0].clamp(max=0), node, i, axis)


def _layer_norm(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """Input 1 is the scale, input 2 the shift."""
    if i == 2:
        return _spread(lambda g: g, node, i, axis)
    read = saved(node, "input", "result1", "result2") if i == 1 else None
    return (
        None
        if read is None
        else _spread(lambda g: g * ((read[0] - read[1]) * read[2]), node, i, axis)
    )


def _group_norm(node: Any, i: int, axis: BatchAxis) -> Maker | None:
    """The same, with the channels in the second dimension."""
    read = () if i == 2 else saved(node, "input", "result1", "result2") if i == 1 else None
    if read is None or axis.dim != 0:
        return None

    def make(g: Tensor, batch: int) -> Contribution:
        if i == 1:
            x, mean, rstd = (t.reshape(len(g), node._saved_group, -1) for t in read)
            g = g * ((x - mean) * rstd).view_as(g)
        sums = axis.rows_first(total_space(g), batch)
        return Direct(sums.sum(1) if axis.folded else sums)

    return make


RULES: dict[str, Rule] = {
    "MmBackward0": _mm,
    "AddmmBackward0": _addmm,
    "BmmBackward0": _bmm,
    "BaddbmmBackward0": _baddbmm,
    "MvBackward0": _mv,
    "TrilinearBackward0": _bilinear,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "EmbeddingBagBackward0": _bag,
    "IndexBackward0": _index,
    "IndexSelectBackward0": _index_select,
    "ExpandBackward0": lambda node, i, axis: _spread(lambda g: g, node, i, axis),
    "AddBackward0": _add,
    "SubBackward0": _subtract,
    "MulBackward0": _multiply,
    "DivBackward0": _divide,
    "PreluKernelBackward0": _prelu,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
}
"""Operations that a parameter meets the batch in."""
