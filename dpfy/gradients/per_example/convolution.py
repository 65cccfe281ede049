"""Per-example gradients of convolutions: by grouped or single calls, by patches read in place, or
by Gram matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.kernels import conv2d
from dpfy.gradients.per_example import arithmetic, rounding
from dpfy.gradients.per_example.arithmetic import (
    CHUNK_ELEMENTS,
    KEEP_ELEMENTS,
    along,
    kept,
    large_pages,
    norm_by_parts,
    row_chunks,
    scaled_wide,
    wide,
)
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.outer import Direct
from dpfy.gradients.per_example.patches import Patched, Remade, Window
from dpfy.gradients.per_example.rounding import NormEstimate, row_squares

GROUPED_WIDTH = 80_000
"""Convolutions with more weights than this run faster example by example than folded into groups
(measured on a CPU).
"""

PATCH_ELEMENTS = 2**19
"""Patches that are written out at a time on a CPU."""

COPY_BYTES = 2**24
"""On a GPU: how much of a layer's tensors may exist a second time, scaled, wider or as patches."""

GRAM_POSITIONS = 64
"""On a GPU, Gram matrices of at most so many positions are made without writing patches out."""

MOST_GROUPS = 64
"""On a GPU, groups are worked on one by one if there are at most so many."""


LIBRARY = 2
"""A library's convolution may be no plain sum but a transform with somewhat larger errors: it
counts as so many times its terms.
"""


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class ConvolutionGradient(Contribution):
    """Weights of a convolution. `images` inputs belong to each example (1 unless the model folds
    frames into the batch).
    """

    inputs: Tensor  # [batch * images, channels in, *space]
    grads: Tensor  # [batch * images, channels out, *space]
    weight: Tensor
    geometry: Geometry
    images: int = 1

    @property
    def batch(self) -> int:
        return len(self.inputs) // self.images

    @property
    def width(self) -> int:
        return self.weight.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        batch = len(self.inputs) // self.images
        if self.by_kernels and self.images == 1:
            return self._kernel_norms(), self
        # Whether gradients are kept depends on the batch, so the bound must not depend on it: other
        # examples choose the batch.
        keep = batch * self.width <= KEEP_ELEMENTS and self._positions >= arithmetic.KEPT_POSITIONS
        window = self._window()
        if window is not None:
            outs, columns = self.weight.shape[0], window.columns
            if arithmetic.convolution_by_gram(window.positions, outs, columns):
                return self._estimate(
                    self._by_gram(window), rounding.gram_terms(outs, columns)
                ).upper, self
            if not self._blocked:
                squares, rest = self._by_patches(window, keep)
                return (self._estimate(squares).upper if rest is self else squares[None]), rest
        if keep:
            grads = self.per_example(slice(0, batch))
            return self._estimate(row_squares(grads)).upper, Direct(grads)
        return self._estimate(
            norm_by_parts(batch, self.width * self.images, self.per_example)
        ).upper, self

    def _kernel_norms(self) -> Tensor:
        """Norms by the kernels. On tensor cores norms and sums come from the same products, to the
        bit, so that nothing can cancel.
        """
        problems = self.problems()
        if self._few:
            return torch.cat([conv2d.gram_upper(each) for each in problems])
        norms = torch.cat([conv2d.norms(each) for each in problems])
        squares = norms.sum(0, dtype=torch.float64).add_(self.width * rounding.least(self.dtype))
        return squares[None] if conv2d.reduced(self.grads) else self._estimate(squares).upper

    @property
    def _positions(self) -> int:
        """Terms of each weight's gradient."""
        return self.images * (self.inputs if self.geometry.transposed else self.grads)[0, 0].numel()

    def _estimate(self, squares: Tensor, gram: int = 0) -> NormEstimate:
        factor = 2 * rounding.of_factors(self.dtype, self.grads.device, convolved=True)
        return rounding.of_products(
            squares, self._sizes(), LIBRARY * self._positions, gram, factor, self.dtype
        )

    def _sizes(self) -> Tensor:
        """|patches| |gradient|: no sum of absolute terms is longer. A number stands in at most as
        many patches as a kernel has taps.
        """
        each = [
            t if self.images == 1 else t.unflatten(0, (-1, self.images))
            for t in (self.inputs, self.grads)
        ]
        inputs, grads = [row_squares(t).add_(rounding.hidden(t)) for t in each]
        return inputs.mul_(grads).mul_(math.prod(self.weight.shape[2:])).sqrt_()

    def rounding(self) -> Tensor:
        factor = 2 * rounding.of_factors(self.dtype, self.grads.device, convolved=True)
        return self._sizes() * (rounding.gamma(LIBRARY * self._positions + 4, self.dtype) + factor)

    def _window(self) -> Window | None:
        """The convolution as a product over positions, where it is one and the patches of one image
        are few enough.
        """
        how = self.geometry
        plain = (
            len(how.stride) == 2
            and how.groups == 1
            and not how.transposed
            and how.dilation == (1, 1)
            and self.images == 1
        )
        if not plain or self.grads.is_cuda:
            return None
        (h, w), (kh, kw), (oh, ow) = (
            self.inputs.shape[2:],
            self.weight.shape[2:],
            self.grads.shape[2:],
        )
        (sh, sw), (ph, pw) = how.stride, how.padding
        window = Window(self.inputs.shape[1], (h, w), (kh, kw), (sh, sw), (ph, pw), (oh, ow))
        return window if window.columns * window.positions <= CHUNK_ELEMENTS else None

    @property
    def _blocked(self) -> bool:
        """Whether the library's own kernels run well for single examples (measured: blocks of
        channels, and no stride).
        """
        (outs, ins), how = self.weight.shape[:2], self.geometry
        return (
            ins % 8 == 0
            and outs % 8 == 0
            and set(how.stride) == {1}
            and set(self.weight.shape[2:]) != {1}
        )

    def _by_patches(self, window: Window, keep: bool) -> tuple[Tensor, Contribution]:
        """Per-example products of patches: all of them kept, or made a second time for the sum, or
        (few positions) not needed for it.
        """
        batch, outs = self.grads.shape[:2]
        kept = large_pages(wide(self.inputs[:0]), batch, outs, window.columns) if keep else None
        norms = torch.cat([rounding.block_norms(each) for _, each in self.products(window, kept)])
        squares = rounding.joined_squares(
            norms, self.weight[None].to(rounding.sum_dtype(self.dtype))
        )
        if kept is not None:
            return squares, Patched(kept, window)
        return squares, self if self._positions < arithmetic.KEPT_POSITIONS else Remade(
            self, window
        )

    def products(
        self, window: Window, kept: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """The gradients of a few examples at a time, [examples, channels out, columns]: in `kept`,
        or valid until the next ones.

        The same to the bit whenever they are made.
        """
        batch, outs = self.grads.shape[:2]
        chunks = row_chunks(
            batch, max(window.columns * window.positions, outs * window.columns), PATCH_ELEMENTS
        )
        many, like = chunks[0].stop, wide(self.inputs[:0])
        write = window.writer(many, like)
        memory = like.new_empty(many, outs, window.columns) if kept is None else kept
        for rows in chunks:
            each = memory[: rows.stop - rows.start] if kept is None else memory[rows]
            torch.bmm(positions_last(wide(self.grads[rows])), write(self.inputs[rows]), out=each)
            yield rows, each

    def _by_gram(self, window: Window) -> Tensor:
        """Gram matrices over few positions, the patches written out for a few examples at a
        time.
        """
        chunks = row_chunks(len(self.inputs), window.columns * window.positions, PATCH_ELEMENTS)
        write = window.writer(chunks[0].stop, wide(self.inputs[:0]))
        parts = []
        for rows in chunks:
            grads = rounding.self_products(positions_last(wide(self.grads[rows])).mT)
            parts.append(
                rounding.block_sums(grads.mul_(rounding.self_products(write(self.inputs[rows]))))
            )
        return torch.cat(parts)

    @property
    def by_kernels(self) -> bool:
        """Whether the kernels for two-dimensional convolutions make the products of images, group
        by group.
        """
        how = self.geometry
        plain = len(how.stride) <= 2 and how.groups <= MOST_GROUPS
        here = kernels.usable(self.grads, "conv2d")
        return here and self.inputs.dtype == self.grads.dtype and plain

    def problems(self) -> list[conv2d.ConvProblem]:
        """What the kernels are asked for each group. A transposed convolution walks over its output
        gradient with its input.
        """
        how = self.geometry
        inputs, grads = (self.grads, self.inputs) if how.transposed else (self.inputs, self.grads)
        kernel, stride, padding, dilation = (
            tuple(self.weight.shape[2:]),
            how.stride,
            how.padding,
            how.dilation,
        )
        if len(kernel) == 1:
            inputs, grads = inputs.unsqueeze(2), grads.unsqueeze(2)
            kernel, stride, padding, dilation = (
                (1, *kernel),
                (1, *stride),
                (0, *padding),
                (1, *dilation),
            )
        walked = zip(inputs.chunk(how.groups, 1), grads.chunk(how.groups, 1), strict=True)
        return [conv2d.ConvProblem(a, g, kernel, stride, padding, dilation) for a, g in walked]

    @property
    def _few(self) -> bool:
        """Whether there are so few positions that their Gram matrices take fewer operations than a
        product.
        """
        outs, columns, positions = (
            self.weight.shape[0] // self.geometry.groups,
            self.weight[0].numel(),
            self._positions,
        )
        return positions <= GRAM_POSITIONS and positions * (outs + columns) <= outs * columns

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if (
            self.by_kernels and self.images == 1 and conv2d.reduced(self.grads)
        ):  # without tensor cores the library's convolution is faster
            made = [conv2d.weighted_sum(each, weights) for each in self.problems()]
            return (made[0] if len(made) == 1 else torch.cat(made)).view(self.weight.shape)
        each = weights.repeat_interleave(self.images) if self.images > 1 else weights
        weight, total = wide(self.weight), None
        for rows in self._copies():
            grads = scaled_wide(self.grads[rows], each[rows])
            part = weight_gradient(wide(self.inputs[rows]), grads, weight, self.geometry)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _copies(self) -> list[slice]:
        """Runs of images whose scaled and widened copies may exist at one time."""
        many = len(self.inputs)
        if not self.grads.is_cuda:
            return [slice(0, many)]
        widened = (
            0 if self.inputs.dtype in (torch.float32, torch.float64) else self.inputs[0].numel()
        )
        return row_chunks(many, 4 * (widened + self.grads[0].numel()), COPY_BYTES)

    def per_example(self, rows: slice) -> Tensor:
        rows = slice(rows.start * self.images, rows.stop * self.images)
        a, g, w = self.inputs[rows], self.grads[rows], self.weight
        if not a.is_cuda:  # not every convolution exists in a narrow type
            a, g, w = wide(a), wide(g), wide(w)
        many = len(a)
        if not a.is_cuda and self.width > GROUPED_WIDTH:
            each = [
                weight_gradient(a[i : i + 1], g[i : i + 1], w, self.geometry) for i in range(many)
            ]
            grads = torch.stack(each)
            return grads if self.images == 1 else grads.unflatten(0, (-1, self.images)).sum(1)
        wide_weight = w.expand(many, *w.shape).flatten(0, 1)
        geometry = replace(self.geometry, groups=self.geometry.groups * many)
        grads = weight_gradient(
            a.flatten(0, 1)[None], g.flatten(0, 1)[None], wide_weight, geometry
        ).unflatten(0, (many, w.shape[0]))
        return grads if self.images == 1 else grads.unflatten(0, (-1, self.images)).sum(1)

    def cleaned(self, keep: Tensor) -> ConvolutionGradient:
        each = keep.repeat_interleave(self.images) if self.images > 1 else keep
        return replace(self, inputs=kept(self.inputs, each), grads=kept(self.grads, each))

    @property
    def convolves(self) -> bool:
        return True

    def widened(self) -> ConvolutionGradient:
        inputs, grads, weight = wide(self.inputs), wide(self.grads), wide(self.weight)
        return replace(self, inputs=inputs, grads=grads, weight=weight)

    def times(self, factor: Tensor | float, shape: torch.Size) -> Contribution | None:
        way = along(factor, shape)
        if way != "all" and (way != "rows" or self.geometry.transposed):
            return None
        flat = factor.reshape(-1) if isinstance(factor, Tensor) and factor.dim() else factor
        if way == "rows" and isinstance(flat, Tensor):
            flat = flat.view(-1, *[1] * len(self.geometry.stride))
        return replace(self, grads=self.grads * flat)

    def row_products(self, matrix: Tensor) -> Tensor | None:
        how, grads = self.geometry, wide(self.grads)
        if how.transposed:
            return None
        run: Any = (F.conv1d, F.conv2d, F.conv3d)[len(how.stride) - 1]
        walk = (how.stride, how.padding, how.dilation, how.groups)
        out = run(wide(self.inputs), matrix.to(grads.dtype), None, *walk)
        sums = (grads * out).flatten(2).sum(2)
        return sums if self.images == 1 else sums.unflatten(0, (-1, self.images)).sum(1)


def positions_last(grads: Tensor) -> Tensor:
    """[images, channels, height, width] to [images, channels, positions], without a copy if the
    channels lie last in memory too.
    """
    if grads.is_contiguous(memory_format=torch.channels_last):
        return grads.permute(0, 2, 3, 1).flatten(1, 2).mT
    return grads.flatten(2)


def weight_gradient(inputs: Tensor, grads: Tensor, weight: Tensor, how: Geometry) -> Tensor:
    """The weight gradient of one convolution call, summed over its batch."""
    pad = list(how.output_padding) or [0] * len(how.stride)
    # Strides of dimensions of one may be taken for another memory format, and then refused.
    inputs, grads = (t.flatten().view(t.shape) if t.is_contiguous() else t for t in (inputs, grads))
    return torch.ops.aten.convolution_backward(
        grads,
        inputs,
        weight,
        None,
        how.stride,
        how.padding,
        how.dilation,
        how.transposed,
        pad,
        how.groups,
        [False, True, False],
    )[1]
