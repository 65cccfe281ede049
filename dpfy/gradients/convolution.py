"""Per-example gradients of convolutions: by grouped or single calls, by patches read in place, or by Gram matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.contribution import (
    KEEP_ELEMENTS,
    Contribution,
    Outer,
    kept,
    kept_whole,
    norm_by_parts,
    row_chunks,
    scaled,
    wide,
)

GROUPED_WIDTH = 80_000
"""Convolutions with more weights than this run faster example by example than folded into groups (measured on a CPU)."""


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Convolution:
    """Weights of a convolution. `images` inputs belong to each example (1 unless the model folds frames into the batch)."""

    inputs: Tensor  # [batch * images, channels in, *space]
    grads: Tensor  # [batch * images, channels out, *space]
    weight: Tensor
    geometry: Geometry
    images: int = 1

    @property
    def width(self) -> int:
        return self.weight.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        batch, how = len(self.inputs) // self.images, self.geometry
        if kernels.usable(self.grads) and len(how.stride) == 2 and how.groups == 1 and self.images == 1 and not how.transposed:
            return self._on_gpu(), self
        if batch * self.width <= KEEP_ELEMENTS:
            return kept_whole(self, batch)
        if self.images == 1 and len(how.stride) == 2 and how.groups == 1 and not how.transposed:
            positions, outs = self.grads[0, 0].numel(), self.weight.shape[0]
            columns = self.width // outs
            if 2 * positions * (outs + columns) <= outs * columns:
                return self._by_gram(positions * columns), self
        return norm_by_parts(batch, self.width * self.images, self.per_example), self

    def _by_gram(self, patch: int) -> Tensor:
        """Gram matrices over few positions, the patches written out for a few examples at a time."""
        parts = []
        for rows in row_chunks(len(self.inputs), patch):
            part = replace(self, inputs=self.inputs[rows], grads=self.grads[rows])
            parts.append(Outer(part.grads.flatten(2).mT, part._patches())._gram())
        return torch.cat(parts, 1)

    def _on_gpu(self) -> Tensor:
        """Patches read in place, or Gram matrices over the positions where there are few of them (measured on an H200)."""
        how, positions = self.geometry, self.grads[0, 0].numel()
        if positions > 64 or self.weight[0].numel() < 256:
            return kernels.conv_norm(self.inputs, self.grads, self.weight, how.stride, how.padding, how.dilation)
        return kernels.gram_norm(self.grads.flatten(2).mT.contiguous(), self._patches())

    def _patches(self) -> Tensor:
        """[batch, positions, channels * kernel] inputs of every position of a two-dimensional convolution."""
        (ph, pw), (sh, sw), (dh, dw), (kh, kw) = (
            self.geometry.padding,
            self.geometry.stride,
            self.geometry.dilation,
            self.weight.shape[2:],
        )
        x = torch.nn.functional.pad(self.inputs, (pw, pw, ph, ph)) if ph or pw else self.inputs
        views = x.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)[..., ::dh, ::dw]
        return views.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        grads = scaled(self.grads, weights.repeat_interleave(self.images) if self.images > 1 else weights)
        return weight_gradient(wide(self.inputs), wide(grads), wide(self.weight), self.geometry)

    def per_example(self, rows: slice) -> Tensor:
        rows = slice(rows.start * self.images, rows.stop * self.images)
        a, g, w = self.inputs[rows], self.grads[rows], self.weight
        many = len(a)
        if not a.is_cuda and self.width > GROUPED_WIDTH:
            each = [weight_gradient(a[i : i + 1], g[i : i + 1], w, self.geometry) for i in range(many)]
            grads = torch.stack(each)
            return grads if self.images == 1 else grads.unflatten(0, (-1, self.images)).sum(1)
        wide_weight = w.expand(many, *w.shape).flatten(0, 1)
        geometry = replace(self.geometry, groups=self.geometry.groups * many)
        grads = weight_gradient(a.flatten(0, 1)[None], g.flatten(0, 1)[None], wide_weight, geometry).unflatten(
            0, (many, w.shape[0])
        )
        return grads if self.images == 1 else grads.unflatten(0, (-1, self.images)).sum(1)

    def cleaned(self, keep: Tensor) -> Convolution:
        each = keep.repeat_interleave(self.images) if self.images > 1 else keep
        return replace(self, inputs=kept(self.inputs, each), grads=kept(self.grads, each))


def weight_gradient(inputs: Tensor, grads: Tensor, weight: Tensor, how: Geometry) -> Tensor:
    """The weight gradient of one convolution call, summed over its batch."""
    pad = list(how.output_padding) or [0] * len(how.stride)
    return torch.ops.aten.convolution_backward(
        grads, inputs, weight, None, how.stride, how.padding, how.dilation, how.transposed, pad, how.groups, [False, True, False]
    )[1]
