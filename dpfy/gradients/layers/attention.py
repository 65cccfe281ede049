"""`nn.MultiheadAttention`: its projections are linear layers, and between them nothing has
parameters but two bare rows.

In torch the module's own function multiplies with the weights; no linear layer is ever called. Here
every projection is a product of the linear rule. What this file does not compute, or torch would
refuse, runs as the module itself does, outside of this rule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.layers.linear import outer_parts, product, run_linear
from dpfy.gradients.layers.rule import Found, RowsFirst, plain_parameters, total
from dpfy.gradients.per_example.outer import Direct
from dpfy.gradients.per_example.shared import rows_of

PARAMETERS = (
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
)
"""All parameters of the module itself; those of the last projection belong to its child
`out_proj`.
"""

Projected = tuple[Tensor, Tensor, Tensor]


def fits_attention(module: nn.MultiheadAttention) -> bool:
    """Whether the last projection is a plain linear layer, and the two bare rows come together."""
    last = module.out_proj
    same = type(last).forward is nn.Linear.forward and "forward" not in vars(last)
    return same and plain_parameters(last) and (module.bias_k is None) == (module.bias_v is None)


def run_attention(
    module: nn.MultiheadAttention,
    tape: Tape,
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the module computes, random numbers and the order of the result in memory included.

    Per-example gradients, from the gradients at the projected queries, keys and values, side by
    side (g) or alone, the inputs of these projections (x, or each its own), the heads' joint output
    (mixed) and the gradient of the output (last):
        in_proj_weight: einsum("nto,nti->noi", g, x)
        in_proj_bias: einsum("nto->no", g)
        q_proj_weight: einsum("nto,nti->noi", g_query, query)
        k_proj_weight: einsum("nto,nti->noi", g_key, key)
        v_proj_weight: einsum("nto,nti->noi", g_value, value)
        bias_k: einsum("no->no", g_bias_k)
        bias_v: einsum("no->no", g_bias_v)
        out_proj.weight: einsum("nto,nti->noi", last, mixed)
        out_proj.bias: einsum("nto->no", last)
    """
    if not torch.is_grad_enabled() or not _known(
        module, (query, key, value), key_padding_mask, attn_mask, is_causal
    ):
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return type(module).forward(module, query, key, value, *options)
    q, k, v = _projected(module, tape, site, query, key, value)
    if module.bias_k is not None:
        k, v = (
            _with_row(module, tape, site, name, t) for name, t in (("bias_k", k), ("bias_v", v))
        )
    q, k, v = (_heads(t, module.num_heads, module.batch_first) for t in (q, k, v))
    if module.add_zero_attn:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        mask = _mask(attn_mask, key_padding_mask, q, k, query.dtype)
        is_causal = is_causal and key_padding_mask is None
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        mixed, weights = _mixed(q, k, v, mask, dropout)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    x = (mixed.transpose(1, 2) if module.batch_first else mixed.permute(2, 0, 1, 3)).flatten(2)
    y = _last(module, tape, site, x)
    # as torch leaves it, for what depends on it: views, and the order of a dropout's random numbers
    if module.batch_first:
        y = y.transpose(0, 1).contiguous().transpose(0, 1)
    return y, weights.mean(1) if weights is not None and average_attn_weights else weights


def _known(
    module: nn.MultiheadAttention,
    inputs: Projected,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> bool:
    """Whether the call is one that torch accepts, with a batch."""
    if any(t.is_nested or t.dim() != 3 for t in inputs):
        return False
    query, key, value = (t.shape if module.batch_first else t.transpose(0, 1).shape for t in inputs)
    batch, length = query[:2]
    widths = (module.embed_dim, module.kdim, module.vdim)
    if (query[2], key[2], value[2]) != widths or key[:2] != value[:2] or key[0] != batch:
        return False
    whole, each = (length, key[1]), (batch * module.num_heads, length, key[1])
    fits = attn_mask is None or (attn_mask.shape in (whole, each) and _is_mask(attn_mask))
    fits = fits and (
        key_padding_mask is None
        or (key_padding_mask.shape == key[:2] and _is_mask(key_padding_mask))
    )
    return fits and not (is_causal and attn_mask is None)


def _is_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or mask.is_floating_point()


def _projected(
    module: Any, tape: Tape, site: Site, query: Tensor, key: Tensor, value: Tensor
) -> Projected:
    """Queries, keys and values after their projections: one product for all that read the same
    input with one weight.
    """
    width, bias = module.embed_dim, module._parameters["in_proj_bias"]
    if not module._qkv_same_embed_dim:
        weights = [module._parameters[f"{name}_proj_weight"] for name in "qkv"]
        inputs = zip("qkv", (query, key, value), weights, strict=True)
        q, k, v = (
            _rows(tape, site.part(name, weight, bias), x, (weight, 0, width), (bias, i * width))
            for i, (name, x, weight) in enumerate(inputs)
        )
        return q, k, v
    weight = module._parameters["in_proj_weight"]

    def made(name: str, x: Tensor, first: int, count: int) -> Tensor:
        packed = _rows(
            tape,
            site.part(name, weight, bias),
            x,
            (weight, first * width, count * width),
            (bias, first * width),
        )
        return packed.unflatten(-1, (count, width))

    if key is not value:
        q, k, v = (
            made(name, x, i, 1).squeeze(-2)
            for i, (name, x) in enumerate(zip("qkv", (query, key, value), strict=True))
        )
    elif query is not key:
        q = made("q", query, 0, 1).squeeze(-2)
        k, v = made("kv", key, 1, 2).unbind(-2)
    else:
        q, k, v = made("qkv", query, 0, 3).unbind(-2)
    return q, k, v


def _rows(
    tape: Tape,
    site: Site,
    x: Tensor,
    of_weight: tuple[Tensor, int, int],
    of_bias: tuple[Tensor | None, int],
) -> Tensor:
    """The product of `x` with some rows of a weight: first row, how many; and as many values of a
    bias.
    """
    (weight, start, count), (bias, offset) = of_weight, of_bias
    part = weight if count == len(weight) else weight.detach()[start : start + count]
    shift = bias if bias is None or count == len(bias) else bias.detach()[offset : offset + count]
    if not weight.requires_grad and (bias is None or not bias.requires_grad):
        return F.linear(x, part, shift)

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        found = outer_parts(weight, bias, view(g), view(saved[0]), jobs=shift is bias)
        starts = {id(weight): start, id(bias): offset}
        return [(p, rows_of(each, p, starts[id(p)])) for p, each in found]

    return product(x, tape, site, explain, part, shift)


def _with_row(module: Any, tape: Tape, site: Site, name: str, t: Tensor) -> Tensor:
    """`t` with the bare parameter `name` as one more position of every example."""
    parameter = module._parameters[name]
    rows = parameter.detach().expand(
        *((t.shape[0], 1) if module.batch_first else (1, t.shape[1])), -1
    )

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        sums = total(view(g), 1)
        return [(parameter, Direct(sums.view(len(sums), *parameter.shape)))]

    if parameter.requires_grad:
        rows = tape.tap(rows, site.part(name, parameter), explain, ())
    return torch.cat([t, rows], 1 if module.batch_first else 0)


def _heads(t: Tensor, heads: int, batch_first: bool) -> Tensor:
    """[batch, heads, positions, width of a head]."""
    split = t.unflatten(-1, (heads, -1))
    return split.transpose(1, 2) if batch_first else split.permute(1, 2, 0, 3)


def _mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    dtype: torch.dtype,
) -> Tensor | None:
    """Both masks as one to be added, [batch or 1, heads or 1, queries or 1, keys]; positions that
    were appended stay visible.
    """
    found: Tensor | None = None
    for mask in (attn_mask, key_padding_mask):
        if mask is None:
            continue
        more = k.shape[2] - mask.shape[-1]
        added = (
            mask
            if mask.is_floating_point()
            else torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
        )
        added = F.pad(added, (0, more)) if more else added
        if mask is key_padding_mask:
            added = added[:, None, None]
        else:
            added = added[None, None] if mask.dim() == 2 else added.unflatten(0, (len(q), -1))
        found = added if found is None else found + added
    return found


def _mixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Values mixed, and the weights with which they were."""
    batch, heads = q.shape[:2]
    a, b, c = (t.flatten(0, 1) for t in (q * math.sqrt(1.0 / q.shape[-1]), k, v))
    if mask is None:
        scores = torch.bmm(a, b.mT)
    else:
        scores = torch.baddbmm(mask.expand(batch, heads, -1, -1).flatten(0, 1), a, b.mT)
    weights = F.softmax(scores, dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    each = (batch, heads)
    return torch.bmm(weights, c).unflatten(0, each), weights.unflatten(0, each)


def _last(module: Any, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """The last projection. Not by calling the child: torch does not either, and hooks on it must
    not begin to run.
    """
    last = module.out_proj
    if not any(p.requires_grad for p in last.parameters()):
        return F.linear(x, last.weight, last.bias)
    return run_linear(last, tape, site.part("out_proj", last.weight, last.bias), x)
