# mypy: disable-error-code="no-untyped-def"
"""Weight gradients of two-dimensional convolutions on a GPU, example by example, without writing patches or gradients out.

The columns of a weight gradient are ordered tap by tap, channels last: for one tap the input is read at a constant shift. Both kernels
that make products, for norms and for weighted sums, make the same ones. Nothing is added atomically: a step repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.rounding import Estimate, Gram, GramRounding, gamma

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None
else:
    from dpfy.gradients.kernels import _store_gram

STAGE_BYTES = 2**23
"""How much of a layer's input may exist a second time, padded and in another order."""

PARTIAL_BYTES = 3 * 2**22
"""How much memory the partial sums of one weighted sum may take."""

PROGRAMS = 264
"""How many programs a GPU runs side by side, for cutting a sum: two on each of an H200's multiprocessors."""


def reduced(t: Tensor) -> bool:
    """Whether products of `t` run on tensor cores: in TF32 where the user allows that for convolutions."""
    return t.dtype != torch.float32 or torch.backends.cudnn.allow_tf32


class Tiling(NamedTuple):
    """How the work is cut. The answer does not depend on it but for the order of additions."""

    outs: int
    columns: int
    depth: int
    warps: int
    stages: int
    order: str = "given"  # of the input: read where it lies, or copied with its borders: "channels last" or "channels first"
    nested: bool = True  # one loop over examples around one over positions, or one for both, whose loads overlap between examples


if triton is not None:

    @triton.jit
    def _border_kernel(
        inputs, out, channels, height, width, rows, columns, pad_h, pad_w, in_n, in_c, in_h, in_w,
        LAST: tl.constexpr, FLAT: tl.constexpr, TILE_C: tl.constexpr, TILE_P: tl.constexpr,
    ):  # fmt: skip
        """One example's input into the middle of rows * columns positions, channels last or first. FLAT: its rows are joined."""
        block, tile, example = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        position, c = block * TILE_P + tl.arange(0, TILE_P), tile * TILE_C + tl.arange(0, TILE_C)
        y, x = position // width, position % width
        mask = (c < channels)[:, None] & (position < height * width)[None, :]
        if FLAT:
            where = position * in_w
        else:
            where = y * in_h + x * in_w
        a = tl.load(inputs + example * in_n + c[:, None] * in_c + where[None, :], mask=mask, other=0.0)
        place = (y + pad_h) * columns + x + pad_w
        if LAST:
            to = c[:, None] + place[None, :] * channels
        else:
            to = c[:, None] * (rows * columns) + place[None, :]
        tl.store(out + example * channels * rows * columns + to, a, mask=mask)

    @triton.jit
    def _shifts(
        column, start, channels, kernel_w, pad_h, pad_w, dilate_h, dilate_w, WHOLE: tl.constexpr
    ):  # fmt: skip
        """Channel, rows down and columns across of columns of the gradient. WHOLE: they begin at `start` and share a tap."""
        if WHOLE:
            tap = start // channels
            c = (column - tap * channels)[None, :]
        else:
            tap = (column // channels)[None, :]
            c = (column % channels)[None, :]
        return c, (tap // kernel_w) * dilate_h - pad_h, (tap % kernel_w) * dilate_w - pad_w

    @triton.jit
    def _patch(
        base, position, ok, column_ok, c, down, across, height, width, out_width, stride_h, stride_w, in_c, in_h, in_w,
        CHECK: tl.constexpr,
    ):  # fmt: skip
        """[positions, columns] of one example's patches. CHECK: the shifts may lead out of the input, where it is zero."""
        y = ((position // out_width) * stride_h)[:, None] + down
        x = ((position % out_width) * stride_w)[:, None] + across
        mask = ok[:, None] & column_ok[None, :]
        if CHECK:
            mask = mask & ((y >= 0) & (y < height) & (x >= 0) & (x < width))
        return tl.load(base + (y * in_h + x * in_w + c * in_c), mask=mask, other=0.0)

    @triton.jit
    def _grad(base, position, ok, o, o_ok, out_width, g_c, g_h, g_w, FLAT: tl.constexpr):
        """[outs, positions] of one example's output gradient. FLAT: its rows follow one another."""
        if FLAT:
            where = position * g_w
        else:
            where = (position // out_width) * g_h + (position % out_width) * g_w
        return tl.load(base + (o[:, None] * g_c + where[None, :]), mask=o_ok[:, None] & ok[None, :], other=0.0)

    @triton.jit(do_not_specialize=["again", "batch", "share", "pitch"])
    def _product_kernel(
        inputs, grads, weights, out, again, pitch, batch, share, width_total, channels, height, width, outs, length, out_width, kernel_w,
        stride_h, stride_w, pad_h, pad_w, dilate_h, dilate_w, in_n, in_c, in_h, in_w, g_n, g_c, g_h, g_w,
        SUM: tl.constexpr, CHECK: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr, NESTED: tl.constexpr,
        TILE_O: tl.constexpr, TILE_D: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One tile of the weight gradients of `share` examples: their squared norms, [tiles, batch], or (SUM) their weighted sum.

        The sum is made of finished products, in float32: a weight is never rounded into a factor, and an example whose weight is 0
        adds nothing, whatever it holds. `again`: add to what `out` holds. `pitch`: from one tile's norms to the next one's.
        """
        tile, split = tl.program_id(0), tl.program_id(1)
        far = split.to(tl.int64) * 0  # distances between examples may need more than 32 bits
        tiles_d = (width_total + TILE_D - 1) // TILE_D
        o = (tile // tiles_d) * TILE_O + tl.arange(0, TILE_O)
        first = (tile % tiles_d) * TILE_D
        column = first + tl.arange(0, TILE_D)
        o_ok, column_ok = o < outs, column < width_total
        c, down, across = _shifts(column, first, channels, kernel_w, pad_h, pad_w, dilate_h, dilate_w, WHOLE)
        begin = split * share
        end = tl.minimum(begin + share, batch)
        steps = (length + DEPTH - 1) // DEPTH
        total = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
        if NESTED:
            for n in range(begin, end):
                product = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
                base_a, base_g = inputs + (far + n) * in_n, grads + (far + n) * g_n
                for start in range(0, length, DEPTH):
                    position = start + tl.arange(0, DEPTH)
                    ok = position < length
                    g = _grad(base_g, position, ok, o, o_ok, out_width, g_c, g_h, g_w, FLAT)
                    a = _patch(
                        base_a, position, ok, column_ok, c, down, across, height, width, out_width, stride_h, stride_w,
                        in_c, in_h, in_w, CHECK,
                    )  # fmt: skip
                    product = tl.dot(g, a, product, input_precision=PRECISION)
                if SUM:
                    weight = tl.load(weights + n).to(tl.float32)
                    if weight != 0.0:
                        total += weight * product
                else:
                    tl.store(out + tile * pitch + n, tl.sum(tl.sum(product * product, axis=1), axis=0))
        else:
            product = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
            for step in range(begin * steps, end * steps):
                n, position = step // steps, (step % steps) * DEPTH + tl.arange(0, DEPTH)
                ok = position < length
                g = _grad(grads + (far + n) * g_n, position, ok, o, o_ok, out_width, g_c, g_h, g_w, FLAT)
                a = _patch(
                    inputs + (far + n) * in_n, position, ok, column_ok, c, down, across, height, width, out_width,
                    stride_h, stride_w, in_c, in_h, in_w, CHECK,
                )  # fmt: skip
                product = tl.dot(g, a, product, input_precision=PRECISION)
                if step % steps == steps - 1:
                    if SUM:
                        weight = tl.load(weights + n).to(tl.float32)
                        if weight != 0.0:
                            total += weight * product
                    else:
                        tl.store(out + tile * pitch + n, tl.sum(tl.sum(product * product, axis=1), axis=0))
                    product = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
        if SUM:
            at = out + (split.to(tl.int64) * outs + o[:, None]) * width_total + column[None, :]
            mask = o_ok[:, None] & column_ok[None, :]
            if again != 0:
                total += tl.load(at, mask=mask, other=0.0)
            tl.store(at, total, mask=mask)

    @triton.jit(do_not_specialize=["pitch"])
    def _patch_gram_kernel(
        inputs, grads, out, pitch, width_total, channels, height, width, outs, length, out_width, kernel_w,
        stride_h, stride_w, pad_h, pad_w, dilate_h, dilate_w, in_n, in_c, in_h, in_w, g_n, g_c, g_h, g_w,
        CHECK: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """The five sums of ``rounding.Gram`` for one example's weight gradient, from the Gram matrices of its at most TILE positions."""
        example = tl.program_id(0).to(tl.int64)
        base_a, base_g = inputs + example * in_n, grads + example * g_n
        position = tl.arange(0, TILE)
        ok = position < length
        first = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(0, outs, DEPTH):
            o = k + tl.arange(0, DEPTH)
            g = _grad(base_g, position, ok, o, o < outs, out_width, g_c, g_h, g_w, FLAT)
            first = tl.dot(tl.trans(g), g, first, input_precision=PRECISION)
        second = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(0, width_total, DEPTH):
            column = k + tl.arange(0, DEPTH)
            c, down, across = _shifts(column, k, channels, kernel_w, pad_h, pad_w, dilate_h, dilate_w, WHOLE)
            a = _patch(
                base_a, position, ok, column < width_total, c, down, across, height, width, out_width, stride_h, stride_w,
                in_c, in_h, in_w, CHECK,
            )  # fmt: skip
            second = tl.dot(a, tl.trans(a), second, input_precision=PRECISION)
        _store_gram(out + tl.program_id(0), pitch, first, second, position, position, ok, True)


@dataclass(frozen=True)
class Walk:
    """A two-dimensional convolution without groups: its input, its output gradient, and how the one is walked for the other."""

    inputs: Tensor
    grads: Tensor
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def columns(self) -> int:
        """Of the weight gradient as a matrix."""
        return self.inputs.shape[1] * self.kernel[0] * self.kernel[1]

    @property
    def length(self) -> int:
        """How many positions the kernel takes."""
        return self.grads.shape[2] * self.grads.shape[3]

    def simple(self) -> Walk:
        """The same with a kernel of one tap as a product over positions in one row, where they lie so."""
        if self.kernel != (1, 1) or self.padding != (0, 0):
            return self
        (sh, sw), (height, width) = self.stride, self.grads.shape[2:]
        inputs = self.inputs[:, :, ::sh, ::sw][:, :, :height, :width]
        grads = self.grads
        if _rows_follow(inputs) and _rows_follow(grads):
            inputs, grads = _one_row(inputs), _one_row(grads)
        return replace(self, inputs=inputs, grads=grads, stride=(1, 1))

    def bordered(self, copy: Tensor) -> Walk:
        """The same over `copy`, from :meth:`room`: the input with all the zeros around it that the kernel can reach."""
        many, channels, height, width = self.inputs.shape
        rows, columns = copy.shape[2:]
        copy, last = copy[:many], copy.stride(1) == 1
        tile_c, tile_p = (64, 64) if channels > 32 else (32, 128)
        _border_kernel[(triton.cdiv(height * width, tile_p), triton.cdiv(channels, tile_c), many)](
            self.inputs, copy, channels, height, width, rows, columns, *self.padding, *self.inputs.stride(),
            LAST=last, FLAT=_rows_follow(self.inputs), TILE_C=tile_c, TILE_P=tile_p, num_warps=4,
        )  # fmt: skip
        return replace(self, inputs=copy, padding=(0, 0))

    def room(self, order: str, many: int) -> Tensor:
        """Zeros for `many` examples, of which :meth:`bordered` writes only the middle."""
        channels, (rows, columns) = self.inputs.shape[1], self._reach
        last = order == "channels last"
        shape = (many, rows, columns, channels) if last else (many, channels, rows, columns)
        zeros = torch.zeros(shape, dtype=self.inputs.dtype, device=self.inputs.device)
        return zeros.permute(0, 3, 1, 2) if last else zeros

    @property
    def _reach(self) -> tuple[int, int]:
        """Rows and columns of the input with the zeros before it and those after it that the kernel can reach."""
        walked = zip(self.grads.shape[2:], self.stride, self.kernel, self.dilation, strict=True)
        needed = [(count - 1) * stride + (taps - 1) * dilation + 1 for count, stride, taps, dilation in walked]
        rows, columns = (
            max(need, size + pad) for need, size, pad in zip(needed, self.inputs.shape[2:], self.padding, strict=True)
        )
        return rows, columns

    def parts(self, order: str) -> Iterator[tuple[slice, Walk]]:
        """The same for runs of examples whose copies in `order` fit into ``STAGE_BYTES``, the first run the longest."""
        batch, (rows, columns) = len(self.inputs), self._reach
        size = batch
        if order != "given":
            bytes_each = self.inputs.shape[1] * rows * columns * self.inputs.element_size()
            size = triton.cdiv(batch, min(triton.cdiv(batch * bytes_each, STAGE_BYTES), batch))
        room = None if order == "given" else self.room(order, size)
        for start in range(0, batch, size):
            run = slice(start, min(start + size, batch))
            part = replace(self, inputs=self.inputs[run], grads=self.grads[run])
            yield run, part if room is None else part.bordered(room)

    def arguments(self) -> tuple[int, ...]:
        """What every kernel is told about the shapes."""
        _, channels, height, width = self.inputs.shape
        shape = (self.columns, channels, height, width, self.grads.shape[1], self.length, self.grads.shape[3], self.kernel[1])
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
        (many, channels, 1, height * width), (t.stride(0), t.stride(1), height * width * t.stride(3), t.stride(3))
    )


def _launch(walk: Walk, weights: Tensor, out: Tensor, again: bool, share: int, how: Tiling, total: bool) -> None:
    """Products of all examples of `walk`, `share` of them in one program."""
    tiles = triton.cdiv(walk.grads.shape[1], how.outs) * triton.cdiv(walk.columns, how.columns)
    batch = len(walk.inputs)
    _product_kernel[(tiles, triton.cdiv(batch, share))](
        walk.inputs, walk.grads, weights, out, int(again), out.stride(0), batch, share, *walk.arguments(), **walk.choices(how.columns),
        SUM=total, NESTED=how.nested, TILE_O=how.outs, TILE_D=how.columns, DEPTH=how.depth,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip


def norms(walk: Walk, how: Tiling | None = None) -> Tensor:
    """Squared norms of the weight gradients, [tiles, batch] partial sums, from the products themselves."""
    walk = walk.simple()
    how = how or tiling(walk)
    tiles = triton.cdiv(walk.grads.shape[1], how.outs) * triton.cdiv(walk.columns, how.columns)
    out = torch.empty(tiles, len(walk.inputs), dtype=torch.float32, device=walk.inputs.device)
    for rows, part in walk.parts(how.order):
        share = 1 if how.nested else max(1, min(8, len(part.inputs) * tiles // (2 * PROGRAMS)))
        _launch(part, out, out[:, rows], False, share, how, False)
    return out


def gram_estimate(walk: Walk, order: str = "given") -> Estimate:
    """Norms of the weight gradients of a convolution of at most 64 positions, from Gram matrices, and how wrong they can be.

    On tensor cores factors are rounded here as they are for the weighted sum, so that their rounding is no error.
    """
    walk = walk.simple()
    return _gram_rounding(walk).estimate(Gram(*gram_sums(walk, order).double().unbind(0)))


def gram_upper(walk: Walk, order: str = "given") -> Tensor:
    """``gram_estimate(...).upper``, [1, batch], in one launch more than the sums."""
    walk = walk.simple()
    return kernels.upper(_gram_rounding(walk), gram_sums(walk, order)[None, :, None])


def _gram_rounding(walk: Walk) -> GramRounding:
    outs, columns, each = walk.grads.shape[1], walk.columns, 2 if reduced(walk.grads) else 1
    return GramRounding(walk.length, each * outs, each * columns, 2 * 64 + 8, 0.0, 0.0, 2 * gamma(walk.length + 8, torch.float32))


def gram_sums(walk: Walk, order: str) -> Tensor:
    """The sums of ``rounding.Gram``, [5, batch]."""
    out = torch.empty(5, len(walk.inputs), dtype=torch.float32, device=walk.inputs.device)
    tile = max(16, triton.next_power_of_2(walk.length))
    depth = 64 if walk.grads.element_size() < 4 else 32
    for rows, part in walk.parts(order):
        _patch_gram_kernel[(len(part.inputs),)](
            part.inputs, part.grads, out[:, rows], out.stride(0), *part.arguments(), **part.choices(depth),
            TILE=tile, DEPTH=depth, num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


def weighted_sum(walk: Walk, weights: Tensor, how: Tiling | None = None) -> Tensor:
    """The sum over examples of weight times weight gradient, [outs, channels, kernel], made and handed out in float32.

    Guarantees: an example whose weight is 0 adds nothing, also if it holds NaN or infinity; weights are not rounded.
    """
    channels, (kh, kw), weights = walk.inputs.shape[1], walk.kernel, weights.contiguous()
    walk = walk.simple()
    how = how or tiling_of_sum(walk)
    outs, columns = walk.grads.shape[1], walk.columns
    tiles = triton.cdiv(outs, how.outs) * triton.cdiv(columns, how.columns)
    most = max(1, min(PROGRAMS // tiles, PARTIAL_BYTES // (4 * outs * columns)))
    partial, share = weights.new_empty(0), 0
    for rows, part in walk.parts(how.order):
        if not rows.start:
            share = triton.cdiv(rows.stop, min(most, rows.stop))
            shape = (triton.cdiv(rows.stop, share), outs, columns)
            partial = torch.empty(shape, dtype=torch.float32, device=walk.inputs.device)
        _launch(part, weights[rows], partial, rows.start > 0, share, how, True)
    out = torch.empty(outs, channels, kh, kw, dtype=torch.float32, device=partial.device)
    return torch.sum(partial.view(-1, outs, kh, kw, channels).permute(0, 1, 4, 2, 3), 0, out=out)


def tiling(walk: Walk) -> Tiling:
    """How to cut the products of a layer for their norms.

    Measured on an H200 with the convolutions of a WRN-16-4, launched as graphs: in bfloat16 a copy of the input with the channels
    last, which makes all loads wide, is worth its time (64 channels, 32 x 32: 0.104 ms against 0.143 without, 0.32 with single loads).
    """
    outs, channels = walk.grads.shape[1], walk.inputs.shape[1]
    narrow = walk.grads.element_size() < 4
    tile_o = min(128, max(16, triton.next_power_of_2(outs)))
    tile_d = min(128, max(16, triton.next_power_of_2(walk.columns)))
    copied = narrow and walk.kernel != (1, 1) and walk.inputs.stride(1) != 1 and channels % 8 == 0
    order = "channels last" if copied else "given"
    depth = 64 if narrow else 32
    return Tiling(tile_o, tile_d, depth, 8 if tile_o * tile_d > 8192 else 4, 3, order, walk.length > 4 * depth)


def tiling_of_sum(walk: Walk) -> Tiling:
    """The same for the weighted sum, which keeps a second tile of numbers: smaller tiles, of which more run side by side.

    Measured as above: 128 channels, 16 x 16, bfloat16 0.134 ms against 0.164, float32 0.152 against 0.211. Few positions in bfloat16 are
    better off with the copy.
    """
    how = tiling(walk)
    narrow = walk.grads.element_size() < 4
    if how.outs == 128 and how.columns == 128 and (walk.length >= 128 or not narrow):
        return Tiling(128, 64, how.depth, 4, 3)
    return how
