"""Linear layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients import kernels
from dpfy.gradients.autograd.tape import Explain, Site, Tape
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.rule import Found, RowsFirst, as_positions, constant, total, wanted
from dpfy.gradients.per_example.joined import Deferred, SumJob
from dpfy.gradients.per_example.outer import Direct, Outer, outer
from dpfy.gradients.per_example.rounding import row_squares
from dpfy.gradients.per_example.shared import MeasuredContribution


def run_linear(module: nn.Linear, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """y = x W' + b, for example n at its positions t.

    Per-example gradients, from the gradient g of y and the input x:
        weight: einsum("nto,nti->noi", g, x)
        bias: einsum("nto->no", g)
    """
    parameters = module._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    assert weight is not None

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        return outer_parts(weight, bias, view(g), view(saved[0]))

    if fused.can_fuse():
        return fused.run(fused.linear, x, tape, site, explain, (), (weight, bias))
    return product(x, tape, site, explain, weight, bias)


def product(
    x: Tensor, tape: Tape, site: Site, explain: Explain, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """y = x W' + b; a user's in-place operation on y stays legal."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight.detach(), constant(bias))
    if not fused.saved_tensor_hooks_active():
        if (
            fused.autocast_active()
        ):  # what autocast makes of a parameter here it must not remember for other uses of it
            weight, bias = weight.detach(), constant(bias)
        return fused.run(fused.linear, x, tape, site, explain, (), (weight, bias))
    y = F.linear(x.reshape(-1, x.shape[-1]), weight.detach(), constant(bias))
    shape = torch.Size((*x.shape[:-1], y.shape[-1]))
    return tape.tap(y, site, explain, (x,), shape).view(shape)


def outer_parts(
    weight: Tensor, bias: Tensor | None, g: Tensor, a: Tensor, jobs: bool = True
) -> Found:
    """Contributions of y = a W' + b. With `jobs` the sums of a bias may wait for a common
    launch.
    """
    if g.dim() == 2 and not g.is_cuda:
        return _one_position(weight, bias, g, a.to(g.dtype))
    g, a = as_positions(g), as_positions(a)
    if jobs and kernels.usable(g) and g.shape[1] > 1:
        job = SumJob((g,))
        return wanted(
            [(weight, lambda: outer(g, a)), (bias, lambda: Deferred(job, 0, g.shape[2:]))]
        )
    return wanted([(weight, lambda: outer(g, a)), (bias, lambda: Direct(total(g, 1)))])


def _one_position(weight: Tensor, bias: Tensor | None, g: Tensor, a: Tensor) -> Found:
    """The same for one position an example: the norm of the output gradient serves weight and
    bias.
    """
    squares, found = row_squares(g)[None], Found()
    if weight.requires_grad:
        products = Outer(g.unsqueeze(1), a.unsqueeze(1))
        found.append((weight, MeasuredContribution(squares * row_squares(a), products)))
    if bias is not None and bias.requires_grad:
        found.append((bias, MeasuredContribution(squares, Direct(g))))
    return found


def run_transformers_linear(module: Any, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """The `Conv1D` of transformers: a linear layer whose weight is stored transposed.

    Per-example gradients, from the gradient g of the output and the input x:
        weight: einsum("nti,nto->nio", x, g)
        bias: einsum("nto->no", g)
    """
    weight, bias = module._parameters["weight"], module._parameters["bias"]

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        outs, ins = as_positions(view(g)), as_positions(view(saved[0]))
        return wanted(
            [
                (weight, lambda: outer(ins.to(outs.dtype), outs)),
                (bias, lambda: Direct(total(outs, 1))),
            ]
        )

    return product(x, tape, site, explain, weight.detach().t(), bias)
