# mypy: disable-error-code="no-untyped-def"
"""Sums over positions, rows and space, for many layers in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None
from dpfy.gradients.kernels import KINDS, sent, table

if triton is not None:

    @triton.jit
    def _scale_kernel(
        table, out, length, width, splits, blocks,
        KIND: tl.constexpr, STATISTICS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
        CENTRED: tl.constexpr,
    ):  # fmt: skip
        """Sums over positions of g and (SCALE) of g * (a - mean) * rstd: one layer, one example,
        some columns, some positions.

        `table` holds the addresses of g, a, mean, rstd of every layer.
        """
        example, rest, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        block, split = rest % blocks, rest // blocks
        grads = tl.multiple_of(tl.load(table + 4 * layer).to(tl.pointer_type(KIND)), 16)
        inputs = tl.multiple_of(tl.load(table + 4 * layer + 1).to(tl.pointer_type(KIND)), 16)
        mean = tl.load(table + 4 * layer + 2).to(tl.pointer_type(STATISTICS))
        rstd = tl.load(table + 4 * layer + 3).to(tl.pointer_type(STATISTICS))
        columns = block * BLOCK + tl.arange(0, BLOCK)
        ok = columns < width
        share = (length + splits - 1) // splits
        begin = split * share
        end = tl.minimum(begin + share, length)
        scale = tl.zeros(
            (TILE, BLOCK), dtype=tl.float32
        )  # reduced once, at the end: a reduction makes all warps wait
        shift = tl.zeros((TILE, BLOCK), dtype=tl.float32)
        for t in range(begin, end, TILE):
            rows = t + tl.arange(0, TILE)
            row_ok = rows < end
            at = example.to(tl.int64) * length + rows
            where = at[:, None] * width + columns[None, :]
            mask = row_ok[:, None] & ok[None, :]
            g = tl.load(grads + where, mask=mask, other=0.0).to(tl.float32)
            shift += g
            if SCALE:
                a = tl.load(inputs + where, mask=mask, other=0.0).to(tl.float32)
                r = tl.load(rstd + at, mask=row_ok, other=0.0).to(tl.float32)
                if CENTRED:
                    m = tl.load(mean + at, mask=row_ok, other=0.0).to(tl.float32)
                    a = a - m[:, None]
                scale += g * (a * r[:, None])
        kinds = 2 if SCALE else 1
        to = ((layer * splits + split) * kinds * tl.num_programs(0) + example).to(
            tl.int64
        ) * width + columns
        tl.store(out + to, tl.sum(shift, axis=0), mask=ok)
        if SCALE:
            tl.store(out + to + tl.num_programs(0) * width, tl.sum(scale, axis=0), mask=ok)

    @triton.jit
    def _square_kernel(table, out, KIND: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
        """The sum of squares of one row of one tensor, RUN of them in float32 at a time; `table`:
        address, width, row stride of each, and where its sums go.
        """
        row, which = tl.program_id(0), tl.program_id(1)
        base = tl.load(table + 4 * which).to(tl.pointer_type(KIND)) + row.to(tl.int64) * tl.load(
            table + 4 * which + 2
        )
        width, place = tl.load(table + 4 * which + 1), tl.load(table + 4 * which + 3)
        total = tl.zeros((BLOCK,), dtype=tl.float64)
        for begin in range(0, width, BLOCK * RUN):
            part = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(begin, tl.minimum(begin + BLOCK * RUN, width), BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(base + column, mask=column < width, other=0.0).to(tl.float32)
                part += x * x
            total += part.to(tl.float64)
        # Squares that underflow count as the largest they can be: 2^-126.
        tl.store(
            out + place * tl.num_programs(0) + row,
            tl.sum(total) + (width + 2).to(tl.float64) * 1.1754943508222875e-38,
        )

    @triton.jit
    def _add_rows_kernel(table, weights, rows, TILE: tl.constexpr, BLOCK: tl.constexpr):
        """Some columns of the weighted sum of the rows of one matrix; `table` holds address, width
        and row stride of every matrix, and where its sum goes.
        """
        block, which = tl.program_id(0), tl.program_id(1)
        base = tl.load(table + 4 * which).to(tl.pointer_type(tl.float32))
        width, stride = tl.load(table + 4 * which + 1), tl.load(table + 4 * which + 2)
        out = tl.load(table + 4 * which + 3).to(tl.pointer_type(tl.float32))
        column = block * BLOCK + tl.arange(0, BLOCK)
        if block * BLOCK < width:
            total = tl.zeros((TILE, BLOCK), dtype=tl.float32)
            for start in range(0, rows, TILE):
                row = start + tl.arange(0, TILE)
                mask = (row < rows)[:, None] & (column < width)[None, :]
                x = tl.load(
                    base + row.to(tl.int64)[:, None] * stride + column[None, :],
                    mask=mask,
                    other=0.0,
                )
                total += x * tl.load(weights + row, mask=row < rows, other=0.0)[:, None]
            tl.store(out + column, tl.sum(total, axis=0), mask=column < width)

    @triton.jit
    def _scale_rows_kernel(t, weights, out, width, BLOCK: tl.constexpr):
        """A part of one row times its weight."""
        row = tl.program_id(1)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        where = row.to(tl.int64) * width + column
        x = tl.load(t + where, mask=column < width).to(tl.float32)
        tl.store(out + where, x * tl.load(weights + row).to(tl.float32), mask=column < width)

    @triton.jit
    def _pair_kernel(grads, inputs, out, rows, space, TILE: tl.constexpr, BLOCK: tl.constexpr):
        """For every row: the sum of g and the sum of g * a."""
        row = tl.program_id(0) * TILE + tl.arange(0, TILE)
        row_ok = row < rows
        plain = tl.zeros((TILE,), dtype=tl.float32)
        product = tl.zeros((TILE,), dtype=tl.float32)
        for start in range(0, space, BLOCK):
            column = start + tl.arange(0, BLOCK)
            where = row.to(tl.int64)[:, None] * space + column[None, :]
            mask = row_ok[:, None] & (column < space)[None, :]
            g = tl.load(grads + where, mask=mask, other=0.0).to(tl.float32)
            a = tl.load(inputs + where, mask=mask, other=0.0).to(tl.float32)
            plain += tl.sum(g, axis=1)
            product += tl.sum(g * a, axis=1)
        tl.store(out + row, plain, mask=row_ok)
        tl.store(out + rows + row, product, mask=row_ok)


def position_sums(layers: list[tuple[Tensor, ...]]) -> Tensor:
    """Per-example sums over positions for many layers of one shape, in one launch: [layers, 1 or 2,
    batch, width] in float32.

    A layer is (g,), giving the sums of g; or (g, a, rstd) or (g, a, rstd, mean), giving also those
    of g * (a - mean) * rstd. g, a [batch, positions, width]; rstd, mean [batch, positions].
    """
    kept = [tuple(t.contiguous() for t in layer) for layer in layers]
    grads = kept[0][0]
    scale, centred = len(kept[0]) > 1, len(kept[0]) > 3
    batch, length, width = grads.shape
    block, many = 128, len(kept)
    blocks = triton.cdiv(width, block)
    splits = max(1, min(triton.cdiv(512, batch * blocks * many), triton.cdiv(length, 32)))
    out = torch.empty(
        many, splits, 2 if scale else 1, batch, width, dtype=torch.float32, device=grads.device
    )
    order = [
        [layer[0], layer[1 if scale else 0], layer[-1], layer[2 if scale else 0]] for layer in kept
    ]
    _scale_kernel[(batch, blocks * splits, many)](
        table(order), out, length, width, splits, blocks, KIND=KINDS[grads.dtype],
        STATISTICS=KINDS[kept[0][-1].dtype], TILE=32, BLOCK=block, SCALE=scale, CENTRED=centred, num_warps=4,
    )  # fmt: skip
    return out.sum(1) if splits > 1 else out[:, 0]


def row_squares(tensors: list[Tensor]) -> Tensor:
    """Sums of squares of the rows of many matrices of one dtype and height, in a launch or two:
    [tensors, rows], as ``rounding.row_squares``.
    """
    kept = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]
    out = torch.empty(len(kept), len(kept[0]), dtype=torch.float64, device=kept[0].device)
    for narrow, group in _by_width(kept, 256):
        where = [[kept[i].data_ptr(), kept[i].shape[1], kept[i].stride(0), i] for i in group]
        _square_kernel[(out.shape[1], len(group))](
            sent(where, out.device), out, KIND=KINDS[kept[0].dtype], BLOCK=256 if narrow else 1024, RUN=64,
            num_warps=1 if narrow else 4,
        )  # fmt: skip
    return out


def _by_width(matrices: list[Tensor], most: int) -> list[tuple[bool, list[int]]]:
    """The numbers of the matrices that are at most `most` wide, and of the others: a launch is as
    wide as its widest.
    """
    narrow = [i for i, t in enumerate(matrices) if t.shape[1] <= most]
    others = [i for i, t in enumerate(matrices) if t.shape[1] > most]
    return [(few, group) for few, group in ((True, narrow), (False, others)) if group]


def add_rows(matrices: list[Tensor], weights: Tensor, into: list[Tensor]) -> None:
    """The weighted sums of the rows of many float32 matrices of one height, in a launch or two,
    each into its own dense float32 tensor.
    """
    kept = [t if t.stride(-1) == 1 else t.contiguous() for t in matrices]
    block, weights = 64, weights.float().contiguous()
    for _, group in _by_width(kept, 2048):
        where = [
            [kept[i].data_ptr(), kept[i].shape[1], kept[i].stride(0), into[i].data_ptr()]
            for i in group
        ]
        grid = (triton.cdiv(max(kept[i].shape[1] for i in group), block), len(group))
        _add_rows_kernel[grid](
            sent(where, weights.device), weights, len(weights), TILE=32, BLOCK=block, num_warps=4
        )


def scale_rows(t: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """[batch, ...] times [batch], all of one dtype and dense, rounded as torch rounds it, at the
    speed of memory.
    """
    width = t[0].numel()
    _scale_rows_kernel[(triton.cdiv(width, 2048), len(t))](
        t, weights.contiguous(), out, width, BLOCK=2048, num_warps=4
    )
    return out


def pair_sums(grads: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """[many, channels, *space] twice to the sums over space of g and of g * a, both [many,
    channels] in float32.
    """
    many, channels = grads.shape[:2]
    grads, inputs = grads.contiguous(), inputs.contiguous()
    rows, space = many * channels, grads[0, 0].numel()
    out = torch.empty(2, many, channels, dtype=torch.float32, device=grads.device)
    block = min(1024, triton.next_power_of_2(space))
    tile = max(1, 2048 // block)
    _pair_kernel[(triton.cdiv(rows, tile),)](
        grads, inputs, out, rows, space, TILE=tile, BLOCK=block, num_warps=4
    )
    return out[0], out[1]
