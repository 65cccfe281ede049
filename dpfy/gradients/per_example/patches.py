"""Two-dimensional convolutions as products over positions, on a CPU: the patches of a few images at
a time, in memory that is reused.

Writing patches out costs what the length of the pieces that are contiguous in both places makes it
cost, so the layout is chosen by that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.arithmetic import kept
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.outer import Direct, Held

if TYPE_CHECKING:
    from dpfy.gradients.per_example.convolution import ConvolutionGradient

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """The window of a convolution without groups and dilation, and the images it walks over: shapes
    only.
    """

    channels: int
    size: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    out: Pair

    @property
    def positions(self) -> int:
        return self.out[0] * self.out[1]

    @property
    def columns(self) -> int:
        """Weights of one output channel."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def divided(self) -> bool:
        """Whether images are divided into one small image for each remainder of the stride: then
        positions in a row are contiguous.

        The other layout has the channels last: then the inputs of a row of the kernel are
        contiguous. Measured: the longer piece wins.
        """
        whole = all(k % s == 0 for k, s in zip(self.kernel, self.stride, strict=True))
        return whole and 4 * self.out[1] >= 3 * self.kernel[1] * self.channels

    def writer(self, many: int, like: Tensor) -> Callable[[Tensor], Tensor]:
        """A function from up to `many` images to their patches, [images, positions, columns], valid
        until it is called again.
        """
        if self.kernel == (1, 1) and self.padding == (0, 0):
            (sh, sw) = self.stride
            return lambda x: x[:, :, ::sh, ::sw].flatten(2).to(like.dtype).mT
        return self._divided(many, like) if self.divided else self._channels_last(many, like)

    def _channels_last(self, many: int, like: Tensor) -> Callable[[Tensor], Tensor]:
        (h, w), (kh, kw), (sh, sw), (ph, pw), (oh, ow) = (
            self.size,
            self.kernel,
            self.stride,
            self.padding,
            self.out,
        )
        channels, wide = self.channels, (w + 2 * pw) * self.channels
        images = like.new_zeros(many, h + 2 * ph, w + 2 * pw, channels)
        inside = images[:, ph : ph + h, pw : pw + w].permute(0, 3, 1, 2)
        views = images.as_strided(
            (many, oh, ow, kh, kw * channels), (images.stride(0), sh * wide, sw * channels, wide, 1)
        )
        patches = like.new_empty(views.shape)
        flat = patches.view(many, oh * ow, -1)

        def write(x: Tensor) -> Tensor:
            inside[: len(x)].copy_(x)
            patches[: len(x)].copy_(views[: len(x)])
            return flat[: len(x)]

        return write

    def _divided(self, many: int, like: Tensor) -> Callable[[Tensor], Tensor]:
        (kh, kw), (sh, sw), (ph, pw), (oh, ow) = self.kernel, self.stride, self.padding, self.out
        qh, qw = kh // sh, kw // sw
        h, w = oh + qh - 1, ow + qw - 1
        rows, columns = min(self.size[0], h * sh - ph), min(self.size[1], w * sw - pw)
        images = like.new_zeros(many, self.channels, h, sh, w, sw)
        inside = images.view(many, self.channels, h * sh, w * sw)[
            :, :, ph : ph + rows, pw : pw + columns
        ]
        divided = (
            like.new_empty(many, self.channels * sh * sw, h, w)
            if sh * sw > 1
            else images.view(many, self.channels, h, w)
        )
        spread = divided.view(many, self.channels, sh, sw, h, w).permute(0, 1, 4, 2, 5, 3)
        shape = (many, self.channels * sh * sw, qh, qw, oh, ow)
        views = divided.as_strided(shape, (divided.stride(0), h * w, w, 1, w, 1))
        patches = like.new_empty(shape)
        flat = patches.view(many, -1, oh * ow).mT

        def write(x: Tensor) -> Tensor:
            inside[: len(x)].copy_(x[:, :, :rows, :columns])
            if sh * sw > 1:
                spread[: len(x)].copy_(images[: len(x)])
            patches[: len(x)].copy_(views[: len(x)])
            return flat[: len(x)]

        return write

    def ordered(self, grads: Tensor) -> Tensor:
        """[..., columns] in the order of the patches to [..., channels, *kernel]."""
        (kh, kw), (sh, sw), last = self.kernel, self.stride, grads.dim() - 1
        front = list(range(last))
        if self.kernel == (1, 1):
            return grads[..., None, None]
        if not self.divided:
            return grads.unflatten(last, (kh, kw, self.channels)).permute(
                *front, last + 2, last, last + 1
            )
        parts = grads.unflatten(last, (self.channels, sh, sw, kh // sh, kw // sw))
        order = parts.permute(*front, last, last + 3, last + 1, last + 4, last + 2)
        return order.reshape(*grads.shape[:-1], self.channels, kh, kw)


@dataclass(frozen=True, repr=False)
class Patched(Held):
    """Per-example gradients of a convolution in the order of its patches, [batch, channels out,
    columns].
    """

    window: Window

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.window.ordered(Direct(self.grads).weighted_sum(weights))

    def per_example(self, rows: slice) -> Tensor:
        return self.window.ordered(self.grads[rows])

    def cleaned(self, keep: Tensor) -> Patched:
        return Patched(kept(self.grads, keep), self.window)


@dataclass(frozen=True)
class Remade(Contribution):
    """A convolution with too many examples to keep their gradients: the sum is of the very products
    that were measured, made again.

    Whether gradients are kept depends on the batch. What an example adds must not, so neither way
    may need an allowance.
    """

    part: ConvolutionGradient
    window: Window

    @property
    def batch(self) -> int:
        return self.part.batch

    @property
    def width(self) -> int:
        return self.part.width

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.part.measured()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = torch.zeros((), dtype=rounding.sum_dtype(self.dtype))
        for rows, each in self.part.products(self.window):
            total = total + Direct(each).weighted_sum(weights[rows])
        return self.window.ordered(total)

    def per_example(self, rows: slice) -> Tensor:
        return self.part.per_example(rows)

    def rounding(self) -> Tensor:
        return self.part.rounding()

    def cleaned(self, keep: Tensor) -> Remade:
        return Remade(self.part.cleaned(keep), self.window)
