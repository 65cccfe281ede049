"""Convolutions of any dimension, plain and transposed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.rule import Found, RowsFirst, constant, total_space, wanted
from dpfy.gradients.per_example import kept_convolution
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.convolution import ConvolutionGradient, Geometry
from dpfy.gradients.per_example.direct import Direct


def run_convolution(module: Any, tape: Tape, site: Site, x: Tensor) -> Tensor:
    """Convolution of any dimension; padding that is not plain zeros is applied first, as the layer
    itself does.

    Per-example gradients, group by group k, from the gradient g of the output and the patches of
    the padded input, p positions of q numbers, in the order of the weight:
        weight: einsum("nkop,nkpq->nkoq", g, patches)
        bias: einsum("nkop->nko", g)
    """
    if x.dim() != len(module.kernel_size) + 2:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    a, padding = padded(module, x)
    return _convolved(
        module,
        a,
        tape,
        site,
        geometry(tuple(module.stride), padding, tuple(module.dilation), module.groups),
    )


@cache
def geometry(
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    extra: tuple[int, ...] | None = None,
) -> tuple[Geometry, tuple[Any, ...]]:
    """How a convolution walks, and the same as torch wants to hear it. Transposed where there is
    `extra` output padding, be it zero.
    """
    how = Geometry(stride, padding, dilation, groups, extra is not None, extra or ())
    return how, (stride, padding, dilation, how.transposed, extra or (0,) * len(padding), groups)


def _convolved(
    module: Any, x: Tensor, tape: Tape, site: Site, walk: tuple[Geometry, tuple[Any, ...]]
) -> Tensor:
    (how, given), parameters = walk, module._parameters
    weight, bias = parameters["weight"], parameters["bias"]

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        return convolution_parts(weight, bias, how, view(g), view(saved[0]))

    if fused.can_fuse():
        return fused.run(fused.convolution, x, tape, site, explain, (how,), (weight, bias, *given))
    return tape.tap(
        _convolution(x, weight.detach(), constant(bias), how), site, explain, (x,), facts=(how,)
    )


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, how: Geometry) -> Tensor:
    """By the function of its dimension: not every autocast knows the general one."""
    count = len(how.stride)
    if how.transposed:
        upward: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[count - 1]
        return upward(
            x, weight, bias, how.stride, how.padding, how.output_padding, how.groups, how.dilation
        )  # type: ignore[no-any-return]
    along: Any = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    return along(x, weight, bias, how.stride, how.padding, how.dilation, how.groups)  # type: ignore[no-any-return]


def convolution_parts(
    weight: Tensor, bias: Tensor | None, how: Geometry, g: Tensor, a: Tensor
) -> Found:
    """Contributions of a convolution whose tensors have the examples in front, and images of one
    example behind them.
    """
    images = 1
    if g.dim() > len(how.stride) + 2:
        images = g.shape[1]
        g, a = g.flatten(0, 1), a.flatten(0, 1)

    def shift() -> Contribution:
        sums = total_space(g)
        return Direct(sums if images == 1 else sums.unflatten(0, (-1, images)).sum(1))

    part = ConvolutionGradient(a.to(g.dtype), g, weight.detach().to(g.dtype), how, images)
    if weight.requires_grad and kept_convolution.keeps(part):
        own, sums = kept_convolution.kept(part, bias is not None and bias.requires_grad)
        return wanted([(weight, lambda: own), (bias, lambda: sums or shift())])
    return wanted([(weight, lambda: part), (bias, shift)])


def padded(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input after explicit padding, and the zero padding left to the convolution."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, tuple(module.padding)
    none = (0,) * len(module.kernel_size)
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), none
    return (
        x if module.padding == "valid" else F.pad(x, module._reversed_padding_repeated_twice)
    ), none


def run_transposed(
    module: Any, tape: Tape, site: Site, x: Tensor, output_size: list[int] | None = None
) -> Tensor:
    """Transposed convolution of any dimension: input and output gradient change places.

    Per-example gradients, group by group k, from the gradient g of the output, its patches, p
    positions of q numbers, in the order of the weight, and the input x:
        weight: einsum("nkip,nkpq->nkiq", x, patches)
        bias: einsum("nkop->nko", g)
    """
    count = len(module.kernel_size)
    if x.dim() != count + 2:
        return type(module).forward(module, x, output_size)  # type: ignore[no-any-return]
    extra = tuple(
        module._output_padding(
            x,
            output_size,
            module.stride,
            module.padding,
            module.kernel_size,
            count,
            module.dilation,
        )
    )
    walk = geometry(
        tuple(module.stride), tuple(module.padding), tuple(module.dilation), module.groups, extra
    )
    return _convolved(module, x, tape, site, walk)
