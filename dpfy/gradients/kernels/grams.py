# mypy: disable-error-code="no-untyped-def"
"""Norms of sums of outer products, from Gram matrices of the positions, and how wrong they can
be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.per_example.rounding import (
    Gram,
    GramRounding,
    NormEstimate,
    gamma,
    least,
    of_factors,
    unit,
)

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None
from dpfy.gradients.kernels import KINDS, aligned, precision, table

LONG = 512
"""From so many positions on tensors are rounded before the Gram kernel. On an H200 that pays with
1,024 and not with 256.
"""

ROUNDED_BYTES = 2**28
"""Rounded copies that may exist at once."""


TENSOR_RUN, PLAIN_RUN = 4096, 512
"""Sums of so many products are added in Gram kernels: short ones lose fewer digits, but need a
second tile of registers, which costs tensor cores more than it costs the others.
"""


if triton is not None:

    @triton.jit
    def _dots(
        base, step, rows, columns, row_ok, column_ok, begin, end, total,
        DEPTH: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    ):  # fmt: skip
        """`total` and the products of rows with columns of one example's matrix, over its elements
        from `begin` to `end`.
        """
        depth = tl.arange(0, DEPTH)
        for k in range(begin, end, DEPTH):
            ok = (k + depth) < end
            x = tl.load(
                base + rows[:, None] * step + (k + depth)[None, :],
                mask=row_ok[:, None] & ok[None, :],
                other=0.0,
            )
            y = tl.load(
                base + columns[None, :] * step + (k + depth)[:, None],
                mask=column_ok[None, :] & ok[:, None],
                other=0.0,
            )
            if NARROW:
                x, y = x.to(tl.bfloat16), y.to(tl.bfloat16)
            total = tl.dot(x, y, total, input_precision=PRECISION)
        return total

    @triton.jit
    def _gram(
        base, step, rows, columns, row_ok, column_ok, width,
        RUN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    ):  # fmt: skip
        """One tile of a Gram matrix. With RUN, sums of that many products are added: shorter sums
        lose fewer digits.
        """
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        if RUN > 0:
            for begin in range(0, width, RUN):
                part = tl.zeros((TILE, TILE), dtype=tl.float32)
                end = tl.minimum(begin + RUN, width)
                total += _dots(
                    base,
                    step,
                    rows,
                    columns,
                    row_ok,
                    column_ok,
                    begin,
                    end,
                    part,
                    DEPTH,
                    PRECISION,
                    NARROW,
                )
        else:
            total = _dots(
                base,
                step,
                rows,
                columns,
                row_ok,
                column_ok,
                0,
                width,
                total,
                DEPTH,
                PRECISION,
                NARROW,
            )
        return total

    @triton.jit
    def store_gram(out, pitch, first, second, rows, columns, row_ok, DIAGONAL: tl.constexpr):
        """The six sums of ``rounding.Gram`` over one tile, `pitch` apart; tiles above the diagonal
        count twice.
        """
        twice = 1.0 if DIAGONAL else 2.0
        tl.store(out, twice * tl.sum(tl.sum(first * second, axis=1), axis=0))
        tl.store(out + 3 * pitch, twice * tl.sum(tl.sum(first * first, axis=1), axis=0))
        tl.store(out + 4 * pitch, twice * tl.sum(tl.sum(second * second, axis=1), axis=0))
        if DIAGONAL:
            own = (rows[:, None] == columns[None, :]) & row_ok[:, None]
            left = tl.sum(tl.where(own, first, 0.0), axis=1)
            right = tl.sum(tl.where(own, second, 0.0), axis=1)
            tl.store(out + pitch, tl.sum(left, axis=0))
            tl.store(out + 2 * pitch, tl.sum(right, axis=0))
            tl.store(out + 5 * pitch, tl.sum(tl.sqrt(left) * tl.sqrt(right), axis=0))
        else:
            tl.store(out + pitch, 0.0)
            tl.store(out + 2 * pitch, 0.0)
            tl.store(out + 5 * pitch, 0.0)

    @triton.jit
    def _gram_kernel(
        table, out, length, p, d, left_row, left_step, right_row, right_step,
        KIND: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
        NARROW: tl.constexpr, LEFT_RUN: tl.constexpr, RIGHT_RUN: tl.constexpr,
    ):  # fmt: skip
        """One tile (i <= j) of sum over t, s of (left_t . left_s)(right_t . right_s), of one
        example and layer, and what bounds its error.

        `table` holds the addresses of the layers' two tensors. With ROWS the second factor is 1
        where two positions hold the same index, else 0. With NARROW the factors (never the sums)
        are rounded to bfloat16, which the estimate allows for.
        """
        pair, example, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        left = tl.multiple_of(tl.load(table + 2 * layer).to(tl.pointer_type(KIND)), 16)
        if ROWS:
            right = tl.load(table + 2 * layer + 1).to(tl.pointer_type(tl.int64))
        else:
            right = tl.multiple_of(tl.load(table + 2 * layer + 1).to(tl.pointer_type(KIND)), 16)
        j = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) / 2.0).to(tl.int32)
        j = tl.where((j + 1) * (j + 2) // 2 <= pair, j + 1, j)
        j = tl.where(j * (j + 1) // 2 > pair, j - 1, j)
        i = pair - j * (j + 1) // 2
        rows = i * TILE + tl.arange(0, TILE)
        columns = j * TILE + tl.arange(0, TILE)
        row_ok, column_ok = rows < length, columns < length
        base = left + example.to(tl.int64) * left_row
        first = _gram(
            base,
            left_step,
            rows,
            columns,
            row_ok,
            column_ok,
            p,
            LEFT_RUN,
            TILE,
            DEPTH,
            PRECISION,
            NARROW,
        )
        base = right + example.to(tl.int64) * right_row
        if ROWS:
            x = tl.load(base + rows * right_step, mask=row_ok, other=-1)
            y = tl.load(base + columns * right_step, mask=column_ok, other=-2)
            second = (x[:, None] == y[None, :]).to(tl.float32)
        else:
            second = _gram(
                base,
                right_step,
                rows,
                columns,
                row_ok,
                column_ok,
                d,
                RIGHT_RUN,
                TILE,
                DEPTH,
                PRECISION,
                NARROW,
            )
        pitch = tl.num_programs(0) * tl.num_programs(1)
        to = out + layer.to(tl.int64) * 6 * pitch + pair * tl.num_programs(1) + example
        if i == j:
            store_gram(to, pitch, first, second, rows, columns, row_ok, True)
        else:
            store_gram(to, pitch, first, second, rows, columns, row_ok, False)

    @triton.jit
    def _upper_kernel(
        sums, out, layer_stride, sum_stride, parts, batch, n_root, n_n_eta, left_least, right_least,
        left_gamma, right_gamma, terms_gamma, left_factor, right_factor, added,
        TILE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """``GramRounding.estimate(...).upper`` of one layer and some examples, from partial sums;
        see there for what is computed.
        """
        layer = tl.program_id(1)
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        base = sums + layer * layer_stride + row[None, :]
        products = tl.zeros((BLOCK,), dtype=tl.float64)
        left_trace = tl.zeros((BLOCK,), dtype=tl.float64)
        right_trace = tl.zeros((BLOCK,), dtype=tl.float64)
        left_square = tl.zeros((BLOCK,), dtype=tl.float64)
        right_square = tl.zeros((BLOCK,), dtype=tl.float64)
        by_position = tl.zeros((BLOCK,), dtype=tl.float64)
        for start in range(0, parts, TILE):
            part = start + tl.arange(0, TILE)
            mask = (part < parts)[:, None] & (row < batch)[None, :]
            where = base + part[:, None] * batch
            products += tl.sum(tl.load(where, mask=mask, other=0.0).to(tl.float64), axis=0)
            left_trace += tl.sum(
                tl.load(where + sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0
            )
            right_trace += tl.sum(
                tl.load(where + 2 * sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0
            )
            left_square += tl.sum(
                tl.load(where + 3 * sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0
            )
            right_square += tl.sum(
                tl.load(where + 4 * sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0
            )
            by_position += tl.sum(
                tl.load(where + 5 * sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0
            )
        loose = 1.03125
        left_size = left_trace * loose + left_least
        right_size = right_trace * loose + right_least
        left_wrong = left_size * left_gamma + left_least
        right_wrong = right_size * right_gamma + right_least
        left_gram = (
            tl.where(left_square < float("inf"), tl.sqrt(left_square), left_trace) * loose
            + n_root
            + left_wrong
        )
        right_gram = (
            tl.where(right_square < float("inf"), tl.sqrt(right_square), right_trace) * loose
            + n_root
            + right_wrong
        )
        error = (
            left_wrong * right_gram
            + right_wrong * left_gram
            + left_gram * right_gram * terms_gamma
            + n_n_eta
        )
        rounding = tl.sqrt(left_size * right_size) * (added * loose)
        if left_factor > 0:  # not 0 times infinity
            rounding += tl.sqrt(left_size * right_gram) * (left_factor * loose)
        if right_factor > 0:
            rounding += tl.sqrt(right_size * left_gram) * (right_factor * loose)
        size = by_position * loose + tl.sqrt(left_least * right_size)
        size += tl.sqrt(right_least * left_size) + left_least + right_least
        least = left_least * right_size + right_least * left_size
        tight = size * size * ((left_gamma + right_gamma + terms_gamma) * loose)
        error = tl.minimum(error, tight + least * loose + n_n_eta)
        rounding = tl.minimum(rounding, size * ((left_factor + right_factor + added) * loose))
        norm = tl.sqrt(tl.where(products < 0, 0.0, products) + error) + rounding  # NaN stays NaN
        tl.store(out + layer * batch + row, norm * norm, mask=row < batch)


def gram_estimate(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> NormEstimate:
    """Norms of sums of outer products and how wrong they and the weighted sums can be, [layers,
    batch], for layers of one shape.

    left [batch, positions, p], right [batch, positions, d], or an integer index [batch, positions]:
    rows of an embedding.
    """
    return _gram_rounding(lefts[0], rights[0]).estimate(
        Gram(*gram_sums(lefts, rights, tile).sum(2, dtype=torch.float64).unbind(1))
    )


def gram_uppers(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> Tensor:
    """``gram_estimate(...).upper`` without its first dimension: [layers, batch], in one launch more
    than the sums.
    """
    return upper(_gram_rounding(lefts[0], rights[0]), gram_sums(lefts, rights, tile))


def upper(how: GramRounding, sums: Tensor) -> Tensor:
    """``how.estimate(sums).upper`` of [layers, 6, parts, batch] partial sums in float32: [layers,
    batch] in float64, in one launch.
    """
    layers, _, parts, batch = sums.shape
    out = torch.empty(layers, batch, dtype=torch.float64, device=sums.device)
    eta, n, up = (
        least(torch.float32),
        how.positions,
        1 + 2.0**-20,
    )  # the kernel takes its numbers rounded to float32
    gammas = (gamma(terms, torch.float32) * up for terms in (how.left, how.right, how.terms))
    _upper_kernel[(triton.cdiv(batch, 16), layers)](
        sums, out, sums.stride(0), sums.stride(1), parts, batch, n * eta**0.5 * up, n * n * eta * up, n * how.left * eta * up,  # noqa: E501
        n * how.right * eta * up, *gammas, how.left_factor * up, how.right_factor * up, how.added * up,
        TILE=min(64, triton.next_power_of_2(parts)), BLOCK=16, num_warps=4,
    )  # fmt: skip
    return out


def _gram_rounding(left: Tensor, right: Tensor) -> GramRounding:
    """How the Gram kernel and the weighted sum round."""
    rows = right.dim() == 2
    tensor_cores = left.dtype != torch.float32 or precision(left) == "tf32"
    run, each = (
        _run(left),
        2 if tensor_cores else 1,
    )  # tensor cores cut digits off where they do not round

    def terms(width: int) -> int:
        return each * (min(width, run) + -(-width // run)) + 2

    positions, p, d = left.shape[1], left.shape[2], 1 if rows else right.shape[2]
    narrow = unit(torch.bfloat16)
    before = (
        narrow if left.dtype == torch.float32 and tensor_cores else 0.0
    )  # for the Gram matrices
    product = 0.0 if rows else of_factors(left.dtype, left.device)  # for the weighted sum
    scaled = narrow if left.dtype == torch.bfloat16 else 0.0
    return GramRounding(
        positions, terms(p), 0 if rows else terms(d), 2 * 128 + 8,
        before + product + (scaled if rows or p < d else 0.0), 0.0 if rows else before + product + (scaled if p >= d else 0.0),  # noqa: E501
        gamma(positions + 8, torch.float32),
    )  # fmt: skip


def gram_estimates(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> list[NormEstimate]:
    """:func:`gram_estimate`, layer by layer."""
    found = gram_estimate(lefts, rights, tile)
    return [
        NormEstimate(*each) for each in zip(found.squares, found.error, found.rounding, strict=True)
    ]


def gram_sums(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> Tensor:
    """The sums of ``rounding.Gram`` for each of many layers of one shape, in one launch: [layers,
    6, parts, batch] in float32.
    """
    rows = rights[0].dim() == 2
    if some := 0 if rows else _rounded_first(lefts[0], rights[0]):
        parts = [slice(start, start + some) for start in range(0, len(lefts), some)]
        return torch.cat(
            [
                gram_sums([t.bfloat16() for t in lefts[i]], [t.bfloat16() for t in rights[i]], tile)
                for i in parts
            ]
        )
    lefts = [aligned(t) for t in lefts]
    rights = [t.to(torch.int64) if rows else aligned(t) for t in rights]
    left, right = lefts[0], rights[0]
    if any(
        a.stride() != left.stride() or b.stride() != right.stride()
        for a, b in zip(lefts, rights, strict=True)
    ):
        lefts, rights = [t.contiguous() for t in lefts], [t.contiguous() for t in rights]
        left, right = lefts[0], rights[0]
    batch, length, p = left.shape
    wide, d, run = left.dtype == torch.float32, 1 if rows else right.shape[2], _run(left)
    tile = tile or (32 if length <= 32 else 128 if length > 64 and not rows else 64)
    count = triton.cdiv(length, tile)
    pairs = count * (count + 1) // 2
    out = torch.empty(len(lefts), 6, pairs, batch, dtype=torch.float32, device=left.device)
    options: dict[str, Any] = {"num_warps": 8 if tile == 128 else 4, "num_stages": 4}
    _gram_kernel[(pairs, batch, len(lefts))](
        table([list(pair) for pair in zip(lefts, rights, strict=True)]), out, length, p, d,
        left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        KIND=KINDS[left.dtype], TILE=tile, DEPTH=32 if wide and tile < 128 else 64, ROWS=rows, PRECISION=precision(left),  # noqa: E501
        NARROW=wide and precision(left) == "tf32", LEFT_RUN=run if p > run else 0, RIGHT_RUN=run if d > run else 0, **options,  # noqa: E501
    )  # fmt: skip
    return out


def _run(left: Tensor) -> int:
    """How many products the Gram kernel adds to one another."""
    return TENSOR_RUN if left.dtype != torch.float32 or precision(left) == "tf32" else PLAIN_RUN


def _rounded_first(left: Tensor, right: Tensor) -> int:
    """How many layers at a time have their tensors rounded to bfloat16 before the kernel, which
    would round each at every use.
    """
    if left.dtype != torch.float32 or precision(left) != "tf32" or left.shape[1] < LONG:
        return 0
    return ROUNDED_BYTES // ((left.nbytes + right.nbytes) // 2)
