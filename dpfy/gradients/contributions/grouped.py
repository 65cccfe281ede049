"""Depthwise and grouped convolutions: per-example weight gradients that are smaller than the tensors they come from, made once and kept."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.contributions.contribution import Direct
from dpfy.gradients.contributions.convolution import Convolution, Geometry
from dpfy.gradients.kernels import depthwise

DEPTHWISE, GROUPED = 4, 1
"""How many times as many numbers as input and output gradient of an example its kept weight gradient may have."""

MOST_BELOW = 8
"""On a GPU: with more channels of the larger tensor in a group than this, products by tensor cores are faster."""


def keeps(weight: Tensor, inputs: Tensor, grads: Tensor, how: Geometry) -> bool:
    """Whether the gradients are made once and kept. By the shapes of one image: what is kept is what was measured, so a bound that
    needs no allowance for rounding, and whether it needs one must not depend on the batch."""
    if how.groups == 1:
        return False
    below = weight.shape[1]
    few = (DEPTHWISE if below == 1 else GROUPED) * (inputs[0].numel() + grads[0].numel()) if len(grads) else 0
    return weight.numel() <= few and not (kernels.usable(grads) and below > MOST_BELOW)


def kept(part: Convolution, bias: bool) -> tuple[Direct, Direct | None]:
    """The gradients of weight and (`bias`, where they cost nothing more) bias."""
    how, many = part.geometry, len(part.grads)
    if not kernels.usable(part.grads):
        return Direct(part.per_example(slice(0, many // part.images))), None
    near, far = (part.inputs, part.grads) if how.transposed else (part.grads, part.inputs)
    free = bias and not how.transposed and part.weight.shape[1] == 1
    taps = depthwise.Taps(tuple(part.weight.shape[2:]), how.stride, how.padding, how.dilation, how.groups)
    grads, sums = depthwise.tap_sums(near, far, taps, sums=free)
    grads = _joined(grads.view(many, *part.weight.shape), part.images)
    return Direct(grads), Direct(_joined(sums, part.images)) if free else None


def _joined(each: Tensor, images: int) -> Tensor:
    """[batch * images, ...] to the sums over the images of every example."""
    return each if images == 1 else torch.sum(each.unflatten(0, (-1, images)), 1)
