"""Convolutions whose per-example weight gradients are smaller than the tensors they come from: made
once, and kept instead of these.

Depthwise and grouped convolutions are so, and on a GPU all those of large images. What is kept is
what was measured and what will be added, so the bound needs no allowance for rounding. By the
shapes of one image alone: what a bound allows for must not depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.kernels import conv2d, depthwise
from dpfy.gradients.per_example import routes
from dpfy.gradients.per_example.arithmetic import CACHE_ELEMENTS, row_chunks, wide
from dpfy.gradients.per_example.convolution import ConvolutionGradient, weight_gradient
from dpfy.gradients.per_example.direct import Direct

MOST_BELOW = 8
"""On a GPU: with more channels of the larger tensor in a group than this, products by tensor cores
are faster than tap by tap.
"""

MOST_ELEMENTS = 2**31
"""The kernel counts the numbers of an image in 32 bits."""

SINGLE_ELEMENTS = 2**14
"""On a CPU: images of fewer numbers are not worth a call each."""


def keeps(part: ConvolutionGradient) -> bool:
    """Whether the gradients are made once and kept."""
    elements = part.inputs[0].numel() + part.grads[0].numel() if len(part.grads) else MOST_ELEMENTS
    if elements >= MOST_ELEMENTS:
        return False
    tap_by_tap = part.geometry.groups > 1
    if kernels.usable(part.grads):
        tap_by_tap = tap_by_tap and part.weight.shape[1] <= MOST_BELOW
        if not tap_by_tap and part.by_kernels:
            return routes.kept_on_gpu(
                part.width, 2 * elements
            )  # as of two bytes: recordings hold what is kept
    return tap_by_tap and routes.grouped_kept(part.weight.shape[1], part.width, elements)


def kept(part: ConvolutionGradient, bias: bool) -> tuple[Direct, Direct | None]:
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
    if not kernels.usable(part.grads):
        return _on_cpu(part), None
    if part.geometry.groups == 1 or part.weight.shape[1] > MOST_BELOW:
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
