"""Fused GPU kernels in Triton, each with a portable twin elsewhere that gives the same answer. Sums are kept in float32.

Nothing here uses atomic additions: partial sums are written out and added in a fixed order, so a step repeats bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None


def usable(t: Tensor) -> bool:
    """Whether the kernels can run on `t`."""
    return triton is not None and t.is_cuda and t.dtype in (torch.float32, torch.bfloat16, torch.float16)


if triton is not None:

    @triton.jit
    def _gram_kernel(
        left, right, out, length, p, d, left_row, left_step, right_row, right_step,
        TILE: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One tile (i <= j) of sum over t, s of (left_t . left_s)(right_t . right_s), for one example.

        With ROWS the second factor is 1 where two positions hold the same index, else 0.
        """
        pair, example = tl.program_id(0), tl.program_id(1)
        j = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) / 2.0).to(tl.int32)
        j = tl.where((j + 1) * (j + 2) // 2 <= pair, j + 1, j)
        j = tl.where(j * (j + 1) // 2 > pair, j - 1, j)
        i = pair - j * (j + 1) // 2
        rows = i * TILE + tl.arange(0, TILE)
        columns = j * TILE + tl.arange(0, TILE)
        row_ok, column_ok = rows < length, columns < length
        depth = tl.arange(0, DEPTH)
        base = left + example.to(tl.int64) * left_row
        first = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(0, p, DEPTH):
            ok = (k + depth) < p
            x = tl.load(base + rows[:, None] * left_step + (k + depth)[None, :], mask=row_ok[:, None] & ok[None, :], other=0.0)
            y = tl.load(base + columns[None, :] * left_step + (k + depth)[:, None], mask=column_ok[None, :] & ok[:, None], other=0.0)
            first = tl.dot(x, y, first, input_precision=PRECISION)
        base = right + example.to(tl.int64) * right_row
        if ROWS:
            x = tl.load(base + rows * right_step, mask=row_ok, other=-1)
            y = tl.load(base + columns * right_step, mask=column_ok, other=-2)
            second = (x[:, None] == y[None, :]).to(tl.float32)
        else:
            second = tl.zeros((TILE, TILE), dtype=tl.float32)
            for k in range(0, d, DEPTH):
                ok = (k + depth) < d
                x = tl.load(base + rows[:, None] * right_step + (k + depth)[None, :], mask=row_ok[:, None] & ok[None, :], other=0.0)
                y = tl.load(
                    base + columns[None, :] * right_step + (k + depth)[:, None], mask=column_ok[None, :] & ok[:, None], other=0.0
                )
                second = tl.dot(x, y, second, input_precision=PRECISION)
        total = tl.sum(first * second)
        tl.store(out + pair * tl.num_programs(1) + example, tl.where(i == j, total, 2.0 * total))

    @triton.jit
    def _scale_kernel(
        grads, inputs, mean, rstd, weight_out, bias_out, length, width, splits,
        TILE: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
    ):  # fmt: skip
        """Sums over positions of g * (a - mean) * rstd and of g, for one example, a block of columns and a share of the positions."""
        example, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        ok = columns < width
        share = (length + splits - 1) // splits
        begin = split * share
        end = tl.minimum(begin + share, length)
        scale = tl.zeros((BLOCK,), dtype=tl.float32)
        shift = tl.zeros((BLOCK,), dtype=tl.float32)
        for t in range(begin, end, TILE):
            rows = t + tl.arange(0, TILE)
            row_ok = rows < end
            at = example.to(tl.int64) * length + rows
            where = at[:, None] * width + columns[None, :]
            mask = row_ok[:, None] & ok[None, :]
            g = tl.load(grads + where, mask=mask, other=0.0).to(tl.float32)
            a = tl.load(inputs + where, mask=mask, other=0.0).to(tl.float32)
            r = tl.load(rstd + at, mask=row_ok, other=0.0).to(tl.float32)
            if CENTRED:
                m = tl.load(mean + at, mask=row_ok, other=0.0).to(tl.float32)
                a = a - m[:, None]
            scale += tl.sum(g * (a * r[:, None]), axis=0)
            shift += tl.sum(g, axis=0)
        to = (split * tl.num_programs(0) + example).to(tl.int64) * width + columns
        tl.store(weight_out + to, scale, mask=ok)
        tl.store(bias_out + to, shift, mask=ok)

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

    @triton.jit
    def _conv_kernel(
        inputs, grads, out, channels, height, width, outs, out_height, out_width, columns_total, kernel_h, kernel_w,
        stride_h, stride_w, pad_h, pad_w, dilate_h, dilate_w, in_n, in_c, in_h, in_w, g_n, g_c, g_h, g_w,
        TILE_O: tl.constexpr, TILE_D: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Squared norm of one tile of one example's weight gradient, the patches read in place."""
        tile, example = tl.program_id(0), tl.program_id(1)
        tiles_d = (columns_total + TILE_D - 1) // TILE_D
        o = (tile // tiles_d) * TILE_O + tl.arange(0, TILE_O)
        col = (tile % tiles_d) * TILE_D + tl.arange(0, TILE_D)
        o_ok, col_ok = o < outs, col < columns_total
        c = col // (kernel_h * kernel_w)
        kh = (col // kernel_w) % kernel_h
        kw = col % kernel_w
        length = out_height * out_width
        base_a = inputs + example.to(tl.int64) * in_n
        base_g = grads + example.to(tl.int64) * g_n
        total = tl.zeros((TILE_O, TILE_D), dtype=tl.float32)
        for start in range(0, length, DEPTH):
            position = start + tl.arange(0, DEPTH)
            ok = position < length
            y, x = position // out_width, position % out_width
            g = tl.load(
                base_g + o[:, None] * g_c + y[None, :] * g_h + x[None, :] * g_w, mask=o_ok[:, None] & ok[None, :], other=0.0
            )
            ih = y[:, None] * stride_h - pad_h + kh[None, :] * dilate_h
            iw = x[:, None] * stride_w - pad_w + kw[None, :] * dilate_w
            inside = ok[:, None] & col_ok[None, :] & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
            a = tl.load(base_a + c[None, :] * in_c + ih * in_h + iw * in_w, mask=inside, other=0.0)
            total = tl.dot(g, a, total, input_precision=PRECISION)
        tl.store(out + tile * tl.num_programs(1) + example, tl.sum(total * total))


def _precision(t: Tensor) -> str:
    """TF32 only where the user allowed it for ordinary products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or t.dtype != torch.float32 else "ieee"


def _unit_last(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def gram_norm(left: Tensor, right: Tensor, tile: int = 0) -> Tensor:
    """Squared norms of sums of outer products, [tiles, batch] partial sums. `right` may be an integer index: embedding rows.

    left [batch, positions, p], right [batch, positions, d] or [batch, positions].
    """
    batch, length, p = left.shape
    rows = right.dim() == 2
    left, right = _unit_last(left), right if rows else _unit_last(right)
    wide = left.dtype == torch.float32
    tile = tile or (32 if length <= 32 else 128 if wide and length > 64 and not rows else 64)
    count = triton.cdiv(length, tile)
    pairs = count * (count + 1) // 2
    out = torch.empty(pairs, batch, dtype=torch.float32, device=left.device)
    options: dict[str, Any] = {"num_warps": 8 if tile == 128 else 4, "num_stages": 3 if tile == 128 else 4}
    _gram_kernel[(pairs, batch)](
        left, right, out, length, p, 1 if rows else right.shape[2], left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        TILE=tile, DEPTH=32 if wide and tile < 128 else 64, ROWS=rows, PRECISION=_precision(left), **options,
    )  # fmt: skip
    return out


def scale_sums(grads: Tensor, inputs: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Per-example gradients of scale and shift of a normalisation over the last dimension, both [batch, width] in float32.

    grads, inputs [batch, positions, width]; mean, rstd [batch, positions] (mean None: not centred).
    """
    batch, length, width = grads.shape
    grads, inputs = grads.contiguous(), inputs.contiguous()
    block = 128
    splits = max(1, min(triton.cdiv(512, batch * triton.cdiv(width, block)), triton.cdiv(length, 32)))
    made = torch.empty(2, splits, batch, width, dtype=torch.float32, device=grads.device)
    _scale_kernel[(batch, triton.cdiv(width, block), splits)](
        grads, inputs, rstd if mean is None else mean.contiguous(), rstd.contiguous(), made[0], made[1], length, width, splits,
        TILE=32, BLOCK=block, CENTRED=mean is not None, num_warps=4,
    )  # fmt: skip
    summed = made.sum(1) if splits > 1 else made[:, 0]
    return summed[0], summed[1]


def pair_sums(grads: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """[many, channels, *space] twice to the sums over space of g and of g * a, both [many, channels] in float32."""
    many, channels = grads.shape[:2]
    grads, inputs = grads.contiguous(), inputs.contiguous()
    rows, space = many * channels, grads[0, 0].numel()
    out = torch.empty(2, many, channels, dtype=torch.float32, device=grads.device)
    block = min(1024, triton.next_power_of_2(space))
    tile = max(1, 2048 // block)
    _pair_kernel[(triton.cdiv(rows, tile),)](grads, inputs, out, rows, space, TILE=tile, BLOCK=block, num_warps=4)
    return out[0], out[1]


def conv_norm(inputs: Tensor, grads: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Squared norms of the weight gradients of a two-dimensional convolution without groups, [tiles, batch] partial sums."""
    batch, channels, height, width = inputs.shape
    _, outs, out_height, out_width = grads.shape
    kernel_h, kernel_w = weight.shape[2:]
    columns = channels * kernel_h * kernel_w
    tile_o = 128 if outs >= 128 else max(16, triton.next_power_of_2(outs))
    tile_d = 128 if columns >= 128 and tile_o <= 128 else max(16, triton.next_power_of_2(columns))
    tiles = triton.cdiv(outs, tile_o) * triton.cdiv(columns, tile_d)
    out = torch.empty(tiles, batch, dtype=torch.float32, device=inputs.device)
    _conv_kernel[(tiles, batch)](
        inputs, grads, out, channels, height, width, outs, out_height, out_width, columns, kernel_h, kernel_w,
        *stride, *padding, *dilation, *inputs.stride(), *grads.stride(),
        TILE_O=tile_o, TILE_D=tile_d, DEPTH=32, PRECISION=_precision(inputs), num_warps=8 if tile_o * tile_d >= 8192 else 4,
    )  # fmt: skip
    return out
