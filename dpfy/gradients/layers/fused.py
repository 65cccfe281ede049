"""A layer and its tap as one node of the autograd graph.

A tap of its own costs the host as much as the layer it listens to. Here the layer runs inside the
node, out of autograd's sight, and the backward of the node reports to the tape what the layer saw
before it hands the gradient on. Weights come in beside the inputs that autograd follows, so they
are constants: any gradient that autograd still finds for a parameter is a use that no layer rule
explains. They are saved like any tensor that backward needs, so that a weight changed in between is
noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dpfy.gradients.autograd.tape import Explain, Site, Tape, Where, reads, report

InputGrads = tuple[Tensor | None, None, None, None]

_wanted = torch.is_grad_enabled
_autocast = torch._C._is_any_autocast_enabled
_packing = torch._C._autograd._top_saved_tensors_default_hooks
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_VIEWS = torch._C.DispatchKey.ADInplaceOrView
_ONLY_INPUT = (True, False, False)


def autocast_active() -> bool:
    """Whether autocast may change the tensors that a layer works on."""
    return _autocast()  # type: ignore[no-any-return]


def as_cast(x: Tensor) -> Tensor:
    """`x` as autocast hands it to a product: that is then kept, and not what it was made from as
    well.
    """
    if not _autocast():
        return x
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def saved_tensor_hooks_active() -> bool:
    """Whether what is saved for backward goes through hooks, which may hand it out only once
    (activation checkpointing).
    """
    return _packing(False) is not None


def saved_tensor_hooks() -> object:
    """What saved tensors go through now, to be compared: inside of a checkpointed part of a
    function it is another than before.
    """
    return _packing(False)


def can_fuse() -> bool:
    """Whether a layer and its tap may be one node: a gradient is wanted, nobody casts its tensors
    or packs what it saves.
    """
    return _wanted() and not _autocast() and _packing(False) is None


def run(
    apply: Callable[..., Tensor],
    x: Tensor,
    tape: Tape,
    site: Site,
    explain: Explain,
    facts: tuple[object, ...],
    constants: tuple[Any, ...],
) -> Tensor:
    """The layer `apply` of this module on `x`. Its output gradient is reported with the `facts` of
    this use.
    """
    if not site.settled:
        tape.unsettled = True
    return apply(x, tape.anchor, (tape, site, explain, None, facts), constants)


class _Linear(Function):
    """y = x W' + b, in the shape of x. Constants: weight, bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, where: Where, constants: tuple[Any, ...]
    ) -> Tensor:
        ctx.where = where
        x = as_cast(x)
        ctx.save_for_backward(x, constants[0])
        # For torch the result is a view of its two-dimensional form, and of a view that a node
        # returns no in-place change is legal.
        before = _excluded(_VIEWS)
        _exclude(_VIEWS, True)
        try:
            return torch._C._nn.linear(x, *constants)
        finally:
            _exclude(_VIEWS, before)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> InputGrads:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if grad.dim() > 2:
            grad = grad.contiguous()  # for one product over all positions
        report(ctx.where, grad, (x,))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if weight.dtype is not grad.dtype:  # autocast
            weight = weight.to(grad.dtype)
        return grad.mm(weight) if grad.dim() == 2 else grad.matmul(weight), None, None, None


class _Scale(Function):
    """x times something that is broadcast to its shape. Constants: that."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, where: Where, constants: tuple[Any, ...]
    ) -> Tensor:
        ctx.where = where
        ctx.save_for_backward(x, *constants)
        return x * constants[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> InputGrads:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        report(ctx.where, grad, (x,))
        return (grad * weight).to(x.dtype) if ctx.needs_input_grad[0] else None, None, None, None


class _Lookup(Function):
    """Rows of a table. Constants: weight."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, anchor: Tensor, where: Where, constants: tuple[Any, ...]
    ) -> Tensor:
        ctx.where = where
        ctx.save_for_backward(index)
        return torch.embedding(constants[0], index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> InputGrads:  # type: ignore[override]
        report(ctx.where, grad, ctx.saved_tensors if reads(ctx.where) else ())
        return None, None, None, None


class _Normalised(Function):
    """A normalisation that keeps its statistics. `ctx.below` takes the gradient on, given what was
    saved and `ctx.given`.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> InputGrads:  # type: ignore[override]
        x, mean, rstd, weight = ctx.saved_tensors
        report(ctx.where, grad, (x, mean, rstd))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return ctx.below(ctx.given, grad, x, mean, rstd, weight)[0], None, None, None


class _LayerNorm(_Normalised):
    """LayerNorm. Constants: normalised shape, weight, bias, eps."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, where: Where, constants: tuple[Any, ...]
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, *constants)
        ctx.where, ctx.below, ctx.given = where, _below_layer_norm, constants[0]
        ctx.save_for_backward(x, mean, rstd, constants[1])
        return y


class _GroupNorm(_Normalised):
    """GroupNorm of a contiguous tensor. Constants: weight, bias, how many, channels, space, groups,
    eps.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, where: Where, constants: tuple[Any, ...]
    ) -> Tensor:
        x = x.contiguous()
        y, mean, rstd = torch.native_group_norm(x, *constants)
        ctx.where, ctx.below, ctx.given = where, _below_group_norm, constants[2:6]
        ctx.save_for_backward(x, mean, rstd, constants[0])
        return y


def _below_layer_norm(
    shape: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> Any:
    return _layer_norm_backward(grad, x, shape, mean, rstd, weight, None, _ONLY_INPUT)


def _below_group_norm(
    sizes: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> Any:
    return _group_norm_backward(grad.contiguous(), x, mean, rstd, weight, *sizes, _ONLY_INPUT)


class _Convolution(Function):
    """Any convolution. Constants: weight, bias, stride, padding, dilation, transposed, output
    padding, groups.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, where: Where, constants: tuple[Any, ...]
    ) -> Tensor:
        ctx.where, ctx.how = where, constants[2:]
        ctx.save_for_backward(x, constants[0])
        return torch.convolution(x, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> InputGrads:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        report(ctx.where, grad, (x,))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return (
            _convolution_backward(grad, x, weight, None, *ctx.how, _ONLY_INPUT)[0],
            None,
            None,
            None,
        )


_layer_norm_backward: Any = torch.ops.aten.native_layer_norm_backward.default
_group_norm_backward: Any = torch.ops.aten.native_group_norm_backward.default
_convolution_backward: Any = torch.ops.aten.convolution_backward.default


def _applied(node: Any) -> Callable[..., Tensor]:
    """``node.apply`` without its look at function transforms, which a tapped layer never runs
    under; and a shorter way back.
    """
    node._backward_cls.apply = node.backward
    return super(Function, node).apply  # type: ignore[misc, no-any-return]


linear, lookup, layer_norm = _applied(_Linear), _applied(_Lookup), _applied(_LayerNorm)
scale, group_norm, convolution = _applied(_Scale), _applied(_GroupNorm), _applied(_Convolution)
