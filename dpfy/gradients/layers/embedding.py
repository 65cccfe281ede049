"""Embedding tables, and bags of their rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.autograd.descent import small_table
from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.bare import rows_alias
from dpfy.gradients.layers.rule import Found, RowsFirst, wanted
from dpfy.gradients.per_example.embedding import EmbeddingGradient


def run_embedding(module: nn.Embedding, tape: Tape, site: Site, index: Tensor) -> Tensor:
    """Rows of the table; the padding row gets no gradient.

    Per-example gradients, from the gradient g of the output and the index, one-hot, with zeros for
    the padding row:
        weight: einsum("ntr,ntc->nrc", onehot, g)
    """
    weight, padding = module._parameters["weight"], module.padding_idx
    assert weight is not None
    if not torch.is_grad_enabled():
        return F.embedding(index, weight.detach())

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        grads, where = view(g), view(saved[0])
        where = where.reshape(len(where), -1)
        grads = grads.reshape(*where.shape, -1)
        if padding is not None:
            grads = grads.masked_fill((where == padding)[..., None], 0.0)
        return wanted([(weight, lambda: EmbeddingGradient(where, grads, len(weight)))])

    y = fused.run(fused.lookup, index, tape, site, explain, (padding,), (weight,))
    if not site.without_batch_before():
        return y

    def of_all(each: Tensor, saved: tuple[Tensor, ...]) -> Found:
        found = explain(each, saved, lambda t: t if t is each else t.expand(len(each), *t.shape))
        return [(p, small_table(part)) for p, part in found]

    return rows_alias(y, tape, site, weight, of_all, index)


def fits_embedding(module: nn.Embedding) -> bool:
    """`max_norm` rewrites the table in forward; frequencies mix examples."""
    return module.max_norm is None and not module.scale_grad_by_freq


def run_bag(
    module: nn.EmbeddingBag, tape: Tape, site: Site, index: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Sum or mean of table rows, for bags of equal size; other calls run as the module does,
    outside of this rule.

    Per-example gradients, from the gradient g of the output and the index, one-hot, divided by the
    size of the bag for means:
        weight: einsum("ntr,nc->nrc", onehot, g)
    """
    if index.dim() != 2 or any(v is not None for v in (*rest, *options.values())):
        return type(module).forward(module, index, *rest, **options)
    y = F.embedding_bag(index, module.weight.detach(), mode=module.mode)

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        grads, where = view(g), view(saved[0])
        grads = (
            (grads / where.shape[-1] if module.mode == "mean" else grads)
            .unsqueeze(-2)
            .expand(*where.shape, -1)
        )
        flat = where.reshape(len(where), -1)
        return wanted(
            [
                (
                    module.weight,
                    lambda: EmbeddingGradient(
                        flat, grads.reshape(*flat.shape, -1), module.num_embeddings
                    ),
                )
            ]
        )

    return tape.tap(y, site, explain, (index,), facts=(module.mode,))


def fits_bag(module: nn.EmbeddingBag) -> bool:
    """Sums and means only, without a padding row."""
    plain = module.max_norm is None and not module.scale_grad_by_freq and module.padding_idx is None
    return plain and module.mode in ("sum", "mean")
