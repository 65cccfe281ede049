"""Convolutions of any dimension, plain and transposed.

Some have per-example weight gradients smaller than the tensors they come from: depthwise and
grouped ones, and on a GPU all those of large images. These gradients are made once, and kept
instead of the tensors. What is kept is what was measured and what will be added, so the bound needs
no allowance for rounding. The shapes of one image alone decide: what a bound allows for must not
depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.kernels import conv2d, depthwise
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.rule import Found, RowsFirst, constant, total_space, wanted
from dpfy.gradients.per_example import arithmetic
from dpfy.gradients.per_example.arithmetic import CACHE_ELEMENTS, row_chunks, wide
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.convolution import ConvolutionGradient, Geometry, weight_gradient
from dpfy.gradients.per_example.outer import Direct


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
    if weight.requires_grad and keeps_gradients(part):
        own, sums = kept_gradients(part, bias is not None and bias.requires_grad)
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


MOST_BELOW = 8
"""On a GPU: with more channels of the larger tensor in a group than this, products by tensor cores
are faster than tap by tap.
"""

MOST_ELEMENTS = 2**31
"""The kernel counts the numbers of an image in 32 bits."""

SINGLE_ELEMENTS = 2**14
"""On a CPU: images of fewer numbers are not worth a call each."""


def keeps_gradients(part: ConvolutionGradient) -> bool:
    """Whether the gradients are made once and kept."""
    elements = part.inputs[0].numel() + part.grads[0].numel() if len(part.grads) else MOST_ELEMENTS
    if elements >= MOST_ELEMENTS:
        return False
    tap_by_tap = part.geometry.groups > 1
    if kernels.usable(part.grads):
        tap_by_tap = tap_by_tap and part.weight.shape[1] <= MOST_BELOW
        if not tap_by_tap and part.by_kernels:
            return arithmetic.kept_on_gpu(
                part.width, 2 * elements
            )  # as of two bytes: recordings hold what is kept
    return tap_by_tap and arithmetic.grouped_kept(part.weight.shape[1], part.width, elements)


def kept_gradients(part: ConvolutionGradient, bias: bool) -> tuple[Direct, Direct | None]:
    """The gradients of weight and (`bias`, where they cost nothing more) bias, of a part that
    :func:`keeps`.
    """
    if part.images == 1:
        grads, sums = _of_images(part, bias)
        return Direct(grads), None if sums is None else Direct(sums)
    found = []
    for rows in row_chunks(
        part.batch, part.width * part.images
    ):  # the images of some examples at a time
        images = slice(rows.start * part.images, rows.stop * part.images)
        each = _of_images(
            replace(part, inputs=part.inputs[images], grads=part.grads[images], images=1), False
        )[0]
        found.append(torch.sum(each.unflatten(0, (-1, part.images)), 1))
    return Direct(torch.cat(found)), None


def _of_images(part: ConvolutionGradient, bias: bool) -> tuple[Tensor, Tensor | None]:
    """[images, *weight], and the sums of the output gradient where they cost nothing more."""
    by_tap = part.geometry.groups > 1 and part.weight.shape[1] <= MOST_BELOW
    if not kernels.usable(part.grads, "depthwise" if by_tap else "conv2d"):
        return _on_cpu(part), None
    if not by_tap:
        return _products(part), None
    near, far, taps = _walk(part)
    free = bias and not part.geometry.transposed and part.weight.shape[1] == 1
    grads, sums = depthwise.tap_sums(near, far, taps, sums=free)
    return grads.view(len(grads), *part.weight.shape), sums if free else None


def _walk(part: ConvolutionGradient) -> tuple[Tensor, Tensor, depthwise.Taps]:
    """Which tensor walks over which, and how."""
    how = part.geometry
    near, far = (part.inputs, part.grads) if how.transposed else (part.grads, part.inputs)
    return (
        near,
        far,
        depthwise.Taps(
            tuple(part.weight.shape[2:]), how.stride, how.padding, how.dilation, how.groups
        ),
    )


def _products(part: ConvolutionGradient) -> Tensor:
    """[images, *weight] by the kernel that measures products, group by group."""
    shape = part.weight.shape
    out = torch.empty(len(part.grads), *shape, dtype=torch.float32, device=part.grads.device)
    flat = out if len(shape) == 4 else out.unsqueeze(3)
    for problem, rows in zip(part.problems(), flat.chunk(part.geometry.groups, 1), strict=True):
        conv2d.products(problem, rows)
    return out


def _on_cpu(part: ConvolutionGradient) -> Tensor:
    """[images, *weight] by the fastest of three ways (measured at one thread).

    The library folds images into groups well where kernels are small, and walks over single images
    well whose channels lie last. For larger kernels patches are written out, some channels at a
    time.
    """
    (near, far, taps), weight = _walk(part), part.weight
    count, positions = weight[0, 0].numel(), near[0, 0].numel()
    large = len(taps.kernel) == 3 or max(taps.kernel) > 3
    if weight.shape[1] == 1 and large and positions >= 2 * count:
        return _by_patches(near, far, taps).view(len(near), *weight.shape)
    last = part.inputs.dim() == 4 and part.inputs.stride(1) == 1 and part.grads.stride(1) == 1
    if last and part.inputs[0].numel() >= SINGLE_ELEMENTS:
        alone = [
            (wide(part.inputs[i : i + 1]), wide(part.grads[i : i + 1])) for i in range(len(near))
        ]
        return torch.stack([weight_gradient(a, g, wide(weight), part.geometry) for a, g in alone])
    return part.per_example(slice(0, len(near)))


def _by_patches(near: Tensor, far: Tensor, taps: depthwise.Taps) -> Tensor:
    """[images, channels of near, taps] for one channel of `far` in each group, in float32 or
    wider.
    """
    space, rows, length = near.shape[2:], len(far) * taps.groups, near[0, 0].numel()
    bordered = F.pad(
        wide(far), [p for pad in reversed(taps.padding) for p in (pad, pad)]
    ).contiguous()
    steps = bordered.stride()[2:]
    moves = [step * gap for step, gap in zip(steps, taps.dilation, strict=True)]
    walks = [step * stride for step, stride in zip(steps, taps.stride, strict=True)]
    views = bordered.as_strided((rows, *taps.kernel, *space), (bordered.stride(1), *moves, *walks))
    left = wide(near).reshape(rows, -1, length)
    count = math.prod(taps.kernel)
    chunks = row_chunks(rows, count * length, CACHE_ELEMENTS)
    patches, out = (
        left.new_empty(chunks[0].stop, *views.shape[1:]),
        left.new_empty(rows, left.shape[1], count),
    )
    for some in chunks:
        written = patches[: some.stop - some.start].copy_(views[some])
        torch.bmm(left[some], written.view(len(written), count, length).mT, out=out[some])
    return out
