"""Weight gradients of two-dimensional convolutions on a GPU, example by example, without writing
patches or gradients out.

The columns of a weight gradient are ordered tap by tap, channels last: for one tap the input is
read at a constant shift. Both kernels that make products, for norms and for weighted sums, make the
same ones. Nothing is added atomically: a step repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfy.gradients.kernels import grams
from dpfy.gradients.per_example.rounding import Gram, GramRounding, NormEstimate, gamma

try:
    import triton
except ImportError:  # a CPU-only installation
    triton = None
else:
    from dpfy.gradients.kernels.conv2d_programs import (
        border_kernel,
        patch_gram_kernel,
        product_kernel,
    )


STAGE_BYTES = 2**23
"""How much of a layer's input may exist a second time, padded and in another order."""

PARTIAL_BYTES = 2**23
"""How much memory the partial sums of one weighted sum may take."""

RUN_POSITIONS = 1024
"""Kept products are sums over so many positions (a multiple of every depth of a tiling), added
afterwards: images are few where they are large, and programs are many.
"""

MOST_EXAMPLES = 65_535
"""A launch has no more programs in its second dimension."""

PROGRAMS = 264
"""How many programs a GPU runs side by side, for cutting a sum: two on each of an H200's
multiprocessors.
"""


def reduced(t: Tensor) -> bool:
    """Whether products of `t` run on tensor cores: in TF32 where the user allows that for
    convolutions.
    """
    return t.dtype != torch.float32 or torch.backends.cudnn.allow_tf32


class Tiling(NamedTuple):
    """How the work is cut. The answer does not depend on it but for the order of additions."""

    outs: int
    columns: int
    depth: int
    warps: int
    stages: int
    # of the input: read where it lies, or copied with its borders: "channels last" or "channels
    # first"
    order: str = "given"
    # one loop over examples around one over positions, or one for both, whose loads overlap between
    # examples
    nested: bool = True


@dataclass(frozen=True)
class ConvProblem:
    """A two-dimensional convolution without groups: its input, its output gradient, and how the one
    is walked for the other.
    """

    inputs: Tensor
    grads: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Of the weight gradient as a matrix."""
        return self.inputs.shape[1] * self.kernel[0] * self.kernel[1]

    @property
    def length(self) -> int:
        """How many positions the kernel takes."""
        return self.grads.shape[2] * self.grads.shape[3]

    def simple(self) -> ConvProblem:
        """The same with a kernel of one tap as a product over positions in one row, where they lie
        so.
        """
        if self.kernel != (1, 1) or self.padding != (0, 0):
            return self
        (sh, sw), (height, width) = self.stride, self.grads.shape[2:]
        inputs = self.inputs[:, :, ::sh, ::sw][:, :, :height, :width]
        grads = self.grads
        if _rows_follow(inputs) and _rows_follow(grads):
            inputs, grads = _one_row(inputs), _one_row(grads)
        return replace(self, inputs=inputs, grads=grads, stride=(1, 1))

    def bordered(self, copy: Tensor) -> ConvProblem:
        """The same over `copy`, from :meth:`new_zeros`: the input with all the zeros around it that
        the kernel can reach.
        """
        many, channels, height, width = self.inputs.shape
        rows, columns = copy.shape[2:]
        copy, last = copy[:many], copy.stride(1) == 1
        tile_c, tile_p = (64, 64) if channels > 32 else (32, 128)
        border_kernel[(triton.cdiv(height * width, tile_p), triton.cdiv(channels, tile_c), many)](
            self.inputs, copy, channels, height, width, rows, columns, *self.padding, *self.inputs.stride(),
            LAST=last, FLAT=_rows_follow(self.inputs), TILE_C=tile_c, TILE_P=tile_p, num_warps=4,
        )  # fmt: skip
        return replace(self, inputs=copy, padding=(0, 0))

    def new_zeros(self, order: str, many: int) -> Tensor:
        """Zeros for `many` examples, of which :meth:`bordered` writes only the middle."""
        channels, (rows, columns) = self.inputs.shape[1], self._reach
        last = order == "channels last"
        shape = (many, rows, columns, channels) if last else (many, channels, rows, columns)
        zeros = torch.zeros(shape, dtype=self.inputs.dtype, device=self.inputs.device)
        return zeros.permute(0, 3, 1, 2) if last else zeros

    @property
    def _reach(self) -> tuple[int, int]:
        """Rows and columns of the input with the zeros before it and those after it that the kernel
        can reach.
        """
        walked = zip(self.grads.shape[2:], self.stride, self.kernel, self.dilation, strict=True)
        needed = [
            (count - 1) * stride + (taps - 1) * dilation + 1
            for count, stride, taps, dilation in walked
        ]
        rows, columns = (
            max(need, size + pad)
            for need, size, pad in zip(needed, self.inputs.shape[2:], self.padding, strict=True)
        )
        return rows, columns

    def parts(self, order: str, most: int = STAGE_BYTES) -> Iterator[tuple[slice, ConvProblem]]:
        """The same for runs of examples whose copies in `order` fit into so many bytes at `most`,
        the first run the longest.
        """
        batch, (rows, columns) = len(self.inputs), self._reach
        size = batch
        if order != "given":
            bytes_each = self.inputs.shape[1] * rows * columns * self.inputs.element_size()
            size = triton.cdiv(batch, min(triton.cdiv(batch * bytes_each, most), batch))
        memory = None if order == "given" else self.new_zeros(order, size)
        size = min(size, MOST_EXAMPLES)
        for start in range(0, batch, size):
            run = slice(start, min(start + size, batch))
            part = replace(self, inputs=self.inputs[run], grads=self.grads[run])
            yield run, part if memory is None else part.bordered(memory)

    def arguments(self) -> tuple[int, ...]:
        """What every kernel is told about the shapes."""
        _, channels, height, width = self.inputs.shape
        shape = (
            self.columns,
            channels,
            height,
            width,
            self.grads.shape[1],
            self.length,
            self.grads.shape[3],
            self.kernel[1],
        )
        steps = (*self.stride, *self.padding, *self.dilation)
        return *shape, *steps, *self.inputs.stride(), *self.grads.stride()

    def choices(self, block: int) -> dict[str, Any]:
        """What every kernel is compiled for, with `block` columns at a time."""
        flat = _rows_follow(self.grads)
        whole = self.inputs.shape[1] % block == 0
        return {
            "CHECK": self.padding != (0, 0),
            "WHOLE": whole,
            "FLAT": flat,
            "PRECISION": "tf32" if reduced(self.grads) else "ieee",
        }


def _rows_follow(t: Tensor) -> bool:
    """Whether the positions of an image have one distance in memory."""
    return t.shape[2] == 1 or t.stride(2) == t.shape[3] * t.stride(3)


def _one_row(t: Tensor) -> Tensor:
    many, channels, height, width = t.shape
    return t.as_strided(
        (many, channels, 1, height * width),
        (t.stride(0), t.stride(1), height * width * t.stride(3), t.stride(3)),
    )


def _launch(
    problem: ConvProblem,
    weights: Tensor,
    out: Tensor,
    again: bool,
    share: int,
    how: Tiling,
    total: bool,
    run: int = 0,
) -> None:
    """Products of all examples of `problem`, `share` of them in one program. `run`: kept, as sums
    over so many positions.
    """
    tiles = triton.cdiv(problem.grads.shape[1], how.outs) * triton.cdiv(
        problem.columns, how.columns
    )
    batch = len(problem.inputs)
    product_kernel[(tiles, triton.cdiv(batch, share), triton.cdiv(problem.length, run) if run else 1)](
        problem.inputs, problem.grads, weights, out, int(again), out.stride(0), batch, share,
        *problem.arguments(), **problem.choices(how.columns), SUM=total, RUN=run,
        NESTED=how.nested or run > 0, TILE_O=how.outs, TILE_D=how.columns,
        DEPTH=how.depth, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip


def norms(problem: ConvProblem, how: Tiling | None = None) -> Tensor:
    """Squared norms of the weight gradients, [tiles, batch] partial sums, from the products
    themselves.
    """
    problem = problem.simple()
    how = how or tiling(problem)
    tiles = triton.cdiv(problem.grads.shape[1], how.outs) * triton.cdiv(
        problem.columns, how.columns
    )
    out = torch.empty(tiles, len(problem.inputs), dtype=torch.float32, device=problem.inputs.device)
    for rows, part in problem.parts(how.order):
        share = 1 if how.nested else max(1, min(8, len(part.inputs) * tiles // (2 * PROGRAMS)))
        _launch(part, out, out[:, rows], False, share, how, False)
    return out


def products(problem: ConvProblem, out: Tensor, how: Tiling | None = None) -> None:
    """The weight gradients themselves into `out`, [batch, outs, channels, *kernel] in float32.

    Guarantees: the order of additions depends on the shapes of one example alone.
    """
    channels, (kh, kw) = problem.inputs.shape[1], problem.kernel
    problem = problem.simple()
    how, outs, columns = how or tiling(problem), problem.grads.shape[1], problem.columns
    runs = triton.cdiv(problem.length, RUN_POSITIONS)
    for rows, part in problem.parts(
        how.order, max(STAGE_BYTES, problem.inputs.nbytes // 2)
    ):  # few images are too little work
        many = len(part.inputs)
        if runs == 1 and (kh, kw) == (1, 1) and out.is_contiguous():
            _launch(part, out, out[rows], False, 1, how, False, RUN_POSITIONS)
            continue
        made = out.new_empty(runs, many, outs, columns)
        _launch(part, made, made, False, 1, how, False, RUN_POSITIONS)
        added = made[0] if runs == 1 else made.sum(0)
        out[rows].copy_(added.view(many, outs, kh, kw, channels).permute(0, 1, 4, 2, 3))


def gram_estimate(problem: ConvProblem, order: str = "given") -> NormEstimate:
    """Norms of the weight gradients of a convolution of at most 64 positions, from Gram matrices,
    and how wrong they can be.

    On tensor cores factors are rounded here as they are for the weighted sum, so that their
    rounding is no error.
    """
    problem = problem.simple()
    return _gram_rounding(problem).estimate(Gram(*gram_sums(problem, order).double().unbind(0)))


def gram_upper(problem: ConvProblem, order: str = "given") -> Tensor:
    """``gram_estimate(...).upper``, [1, batch], in one launch more than the sums."""
    problem = problem.simple()
    return grams.upper(_gram_rounding(problem), gram_sums(problem, order)[None, :, None])


def _gram_rounding(problem: ConvProblem) -> GramRounding:
    outs, columns, each = (
        problem.grads.shape[1],
        problem.columns,
        2 if reduced(problem.grads) else 1,
    )
    return GramRounding(
        problem.length,
        each * outs,
        each * columns,
        2 * 64 + 8,
        0.0,
        0.0,
        2 * gamma(problem.length + 8, torch.float32),
    )


def gram_sums(problem: ConvProblem, order: str) -> Tensor:
    """The sums of ``rounding.Gram``, [6, batch]."""
    out = torch.empty(6, len(problem.inputs), dtype=torch.float32, device=problem.inputs.device)
    tile = max(16, triton.next_power_of_2(problem.length))
    depth = 64 if problem.grads.element_size() < 4 else 32
    for rows, part in problem.parts(order):
        patch_gram_kernel[(len(part.inputs),)](
            part.inputs, part.grads, out[:, rows], out.stride(0), *part.arguments(), **part.choices(depth),
            TILE=tile, DEPTH=depth, num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


def weighted_sum(problem: ConvProblem, weights: Tensor, how: Tiling | None = None) -> Tensor:
    """The sum over examples of weight times weight gradient, [outs, channels, kernel], made and
    handed out in float32.

    Guarantees: an example whose weight is 0 adds nothing, also if it holds NaN or infinity; weights
    are not rounded.
    """
    channels, (kh, kw), weights = problem.inputs.shape[1], problem.kernel, weights.contiguous()
    problem = problem.simple()
    how = how or tiling_of_sum(problem)
    outs, columns = problem.grads.shape[1], problem.columns
    tiles = triton.cdiv(outs, how.outs) * triton.cdiv(columns, how.columns)
    most = max(1, min(PROGRAMS // tiles, PARTIAL_BYTES // (4 * outs * columns)))
    partial, share = weights.new_empty(0), 0
    for rows, part in problem.parts(how.order):
        if not rows.start:
            share = triton.cdiv(rows.stop, min(most, rows.stop))
            shape = (triton.cdiv(rows.stop, share), outs, columns)
            partial = torch.empty(shape, dtype=torch.float32, device=problem.inputs.device)
        _launch(part, weights[rows], partial, rows.start > 0, share, how, True)
    out = torch.empty(outs, channels, kh, kw, dtype=torch.float32, device=partial.device)
    return torch.sum(partial.view(-1, outs, kh, kw, channels).permute(0, 1, 4, 2, 3), 0, out=out)


def tiling(problem: ConvProblem) -> Tiling:
    """How to cut the products of a layer for their norms.

    Measured on an H200 with the convolutions of a WRN-16-4, launched as graphs: in bfloat16 a copy
    of the input with the channels last, which makes all loads wide, is worth its time (64 channels,
    32 x 32: 0.104 ms against 0.143 without, 0.32 with single loads).
    """
    outs, channels = problem.grads.shape[1], problem.inputs.shape[1]
    narrow = problem.grads.element_size() < 4
    tile_o = min(128, max(16, triton.next_power_of_2(outs)))
    tile_d = min(128, max(16, triton.next_power_of_2(problem.columns)))
    copied = (
        narrow and problem.kernel != (1, 1) and problem.inputs.stride(1) != 1 and channels % 8 == 0
    )
    order = "channels last" if copied else "given"
    depth = 64 if narrow else 32
    return Tiling(
        tile_o,
        tile_d,
        depth,
        8 if tile_o * tile_d > 8192 else 4,
        3,
        order,
        problem.length > 4 * depth,
    )


def tiling_of_sum(problem: ConvProblem) -> Tiling:
    """The same for the weighted sum, which keeps a second tile of numbers: smaller tiles, of which
    more run side by side.

    Measured as above: 128 channels, 16 x 16, bfloat16 0.134 ms against 0.164, float32 0.152 against
    0.211. Few positions in bfloat16 are better off with the copy.
    """
    how = tiling(problem)
    narrow = problem.grads.element_size() < 4
    if how.outs == 128 and how.columns == 128 and (problem.length >= 128 or not narrow):
        return Tiling(128, 64, how.depth, 4, 3)
    return how
