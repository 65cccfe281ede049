"""Convolutions whose per-example weight gradients are smaller than the tensors they come from: made once, and kept instead of these.

Depthwise and grouped convolutions are so, and on a GPU all those of large images. What is kept is what was measured and what will be
added, so the bound needs no allowance for rounding. By the shapes of one image alone: what a bound allows for must not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.contributions import routes
from dpfy.gradients.contributions.contribution import Direct
from dpfy.gradients.contributions.convolution import Convolution
from dpfy.gradients.kernels import conv2d, depthwise

MOST_BELOW = 8
"""On a GPU: with more channels of the larger tensor in a group than this, products by tensor cores are faster than tap by tap."""


def keeps(part: Convolution) -> bool:
    """Whether the gradients are made once and kept."""
    if not len(part.grads):
        return False
    tap_by_tap, elements = part.geometry.groups > 1, part.inputs[0].numel() + part.grads[0].numel()
    if kernels.usable(part.grads):
        tap_by_tap = tap_by_tap and part.weight.shape[1] <= MOST_BELOW
        if not tap_by_tap and part.by_kernels:
            return routes.convolution_kept_on_gpu(part.width, elements * part.grads.element_size())
    return tap_by_tap and routes.grouped_kept(part.weight.shape[1], part.width, elements)


def kept(part: Convolution, bias: bool) -> tuple[Direct, Direct | None]:
    """The gradients of weight and (`bias`, where they cost nothing more) bias, of a part that :func:`keeps`."""
    how, many = part.geometry, len(part.grads)
    if not kernels.usable(part.grads):
        return Direct(part.per_example(slice(0, many // part.images))), None
    if how.groups == 1 or part.weight.shape[1] > MOST_BELOW:
        return Direct(_joined(_products(part), part.images)), None
    near, far = (part.inputs, part.grads) if how.transposed else (part.grads, part.inputs)
    free = bias and not how.transposed and part.weight.shape[1] == 1
    taps = depthwise.Taps(tuple(part.weight.shape[2:]), how.stride, how.padding, how.dilation, how.groups)
    grads, sums = depthwise.tap_sums(near, far, taps, sums=free)
    grads = _joined(grads.view(many, *part.weight.shape), part.images)
    return Direct(grads), Direct(_joined(sums, part.images)) if free else None


def _products(part: Convolution) -> Tensor:
    """[images, *weight] by the kernel that measures products, group by group."""
    shape = part.weight.shape
    out = torch.empty(len(part.grads), *shape, dtype=torch.float32, device=part.grads.device)
    flat = out if len(shape) == 4 else out.unsqueeze(3)
    for problem, rows in zip(part.problems(), flat.chunk(part.geometry.groups, 1), strict=True):
        conv2d.products(problem, rows)
    return out


def _joined(each: Tensor, images: int) -> Tensor:
    """[batch * images, ...] to the sums over the images of every example."""
    return each if images == 1 else torch.sum(each.unflatten(0, (-1, images)), 1)
