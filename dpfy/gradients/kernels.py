# mypy: disable-error-code="no-untyped-def"
"""Fused GPU kernels in Triton, each with a portable twin elsewhere that gives the same answer. Sums are kept in float32.

Nothing here uses atomic additions: partial sums are written out and added in a fixed order, so a step repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpfy.core.errors import Unsupported
from dpfy.gradients.rounding import Estimate, Gram, GramRounding, gamma, least, of_factors, unit

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None


_KINDS: dict[torch.dtype, Any] = (
    {}
    if triton is None
    else {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}
)


LONG = 512
"""From so many positions on tensors are rounded before the Gram kernel. On an H200 that pays with 1,024 and not with 256."""

ROUNDED_BYTES = 2**28
"""Rounded copies that may exist at once."""


TENSOR_RUN, PLAIN_RUN = 4096, 512
"""Sums of so many products are added in Gram kernels: short ones lose fewer digits, but need a second tile of registers, which costs
tensor cores more than it costs the others."""


def usable(t: Tensor) -> bool:
    """Whether the kernels can run on `t`."""
    return triton is not None and t.is_cuda and t.dtype in (torch.float32, torch.bfloat16, torch.float16)


if triton is not None:

    @triton.jit
    def _dots(
        base, step, rows, columns, row_ok, column_ok, begin, end, total,
        DEPTH: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    ):  # fmt: skip
        """`total` and the products of rows with columns of one example's matrix, over its elements from `begin` to `end`."""
        depth = tl.arange(0, DEPTH)
        for k in range(begin, end, DEPTH):
            ok = (k + depth) < end
            x = tl.load(base + rows[:, None] * step + (k + depth)[None, :], mask=row_ok[:, None] & ok[None, :], other=0.0)
            y = tl.load(base + columns[None, :] * step + (k + depth)[:, None], mask=column_ok[None, :] & ok[:, None], other=0.0)
            if NARROW:
                x, y = x.to(tl.bfloat16), y.to(tl.bfloat16)
            total = tl.dot(x, y, total, input_precision=PRECISION)
        return total

    @triton.jit
    def _gram(
        base, step, rows, columns, row_ok, column_ok, width,
        RUN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    ):  # fmt: skip
        """One tile of a Gram matrix. With RUN, sums of that many products are added: shorter sums lose fewer digits."""
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        if RUN > 0:
            for begin in range(0, width, RUN):
                part = tl.zeros((TILE, TILE), dtype=tl.float32)
                end = tl.minimum(begin + RUN, width)
                total += _dots(base, step, rows, columns, row_ok, column_ok, begin, end, part, DEPTH, PRECISION, NARROW)
        else:
            total = _dots(base, step, rows, columns, row_ok, column_ok, 0, width, total, DEPTH, PRECISION, NARROW)
        return total

    @triton.jit
    def _store_gram(out, pitch, first, second, rows, columns, row_ok, DIAGONAL: tl.constexpr):
        """The five sums of ``rounding.Gram`` over one tile, `pitch` apart; tiles above the diagonal count twice."""
        twice = 1.0 if DIAGONAL else 2.0
        tl.store(out, twice * tl.sum(tl.sum(first * second, axis=1), axis=0))
        tl.store(out + 3 * pitch, twice * tl.sum(tl.sum(first * first, axis=1), axis=0))
        tl.store(out + 4 * pitch, twice * tl.sum(tl.sum(second * second, axis=1), axis=0))
        if DIAGONAL:
            own = (rows[:, None] == columns[None, :]) & row_ok[:, None]
            tl.store(out + pitch, tl.sum(tl.sum(tl.where(own, first, 0.0), axis=1), axis=0))
            tl.store(out + 2 * pitch, tl.sum(tl.sum(tl.where(own, second, 0.0), axis=1), axis=0))
        else:
            tl.store(out + pitch, 0.0)
            tl.store(out + 2 * pitch, 0.0)

    @triton.jit
    def _gram_kernel(
        table, out, length, p, d, left_row, left_step, right_row, right_step,
        KIND: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
        NARROW: tl.constexpr, LEFT_RUN: tl.constexpr, RIGHT_RUN: tl.constexpr,
    ):  # fmt: skip
        """One tile (i <= j) of sum over t, s of (left_t . left_s)(right_t . right_s), of one example and layer, and what bounds its error.

        `table` holds the addresses of the layers' two tensors. With ROWS the second factor is 1 where two positions hold the same
        index, else 0. With NARROW the factors (never the sums) are rounded to bfloat16, which the estimate allows for.
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
        first = _gram(base, left_step, rows, columns, row_ok, column_ok, p, LEFT_RUN, TILE, DEPTH, PRECISION, NARROW)
        base = right + example.to(tl.int64) * right_row
        if ROWS:
            x = tl.load(base + rows * right_step, mask=row_ok, other=-1)
            y = tl.load(base + columns * right_step, mask=column_ok, other=-2)
            second = (x[:, None] == y[None, :]).to(tl.float32)
        else:
            second = _gram(base, right_step, rows, columns, row_ok, column_ok, d, RIGHT_RUN, TILE, DEPTH, PRECISION, NARROW)
        pitch = tl.num_programs(0) * tl.num_programs(1)
        to = out + layer.to(tl.int64) * 5 * pitch + pair * tl.num_programs(1) + example
        if i == j:
            _store_gram(to, pitch, first, second, rows, columns, row_ok, True)
        else:
            _store_gram(to, pitch, first, second, rows, columns, row_ok, False)

    @triton.jit
    def _scale_kernel(
        table, out, length, width, splits, blocks,
        KIND: tl.constexpr, STATISTICS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
        CENTRED: tl.constexpr,
    ):  # fmt: skip
        """Sums over positions of g and (SCALE) of g * (a - mean) * rstd: one layer, one example, some columns, some positions.

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
        scale = tl.zeros((TILE, BLOCK), dtype=tl.float32)  # reduced once, at the end: a reduction makes all warps wait
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
        to = ((layer * splits + split) * kinds * tl.num_programs(0) + example).to(tl.int64) * width + columns
        tl.store(out + to, tl.sum(shift, axis=0), mask=ok)
        if SCALE:
            tl.store(out + to + tl.num_programs(0) * width, tl.sum(scale, axis=0), mask=ok)

    @triton.jit
    def _square_kernel(table, out, KIND: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
        """The sum of squares of one row of one tensor, RUN of them in float32 at a time; `table`: address, width, row stride of each."""
        row, which = tl.program_id(0), tl.program_id(1)
        base = tl.load(table + 3 * which).to(tl.pointer_type(KIND)) + row.to(tl.int64) * tl.load(table + 3 * which + 2)
        width = tl.load(table + 3 * which + 1)
        total = tl.zeros((BLOCK,), dtype=tl.float64)
        for begin in range(0, width, BLOCK * RUN):
            part = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(begin, tl.minimum(begin + BLOCK * RUN, width), BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(base + column, mask=column < width, other=0.0).to(tl.float32)
                part += x * x
            total += part.to(tl.float64)
        # Squares that underflow count as the largest they can be: 2^-126.
        tl.store(out + which * tl.num_programs(0) + row, tl.sum(total) + (width + 2).to(tl.float64) * 1.1754943508222875e-38)

    @triton.jit
    def _add_rows_kernel(table, weights, rows, TILE: tl.constexpr, BLOCK: tl.constexpr):
        """Some columns of the weighted sum of the rows of one matrix; `table` holds address, width and row stride of every matrix,
        and where its sum goes."""
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
                x = tl.load(base + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
                total += x * tl.load(weights + row, mask=row < rows, other=0.0)[:, None]
            tl.store(out + column, tl.sum(total, axis=0), mask=column < width)

    @triton.jit
    def _upper_kernel(
        sums, out, layer_stride, sum_stride, parts, batch, n_root, n_n_eta, left_least, right_least,
        left_gamma, right_gamma, terms_gamma, left_factor, right_factor, added,
        TILE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """``GramRounding.estimate(...).upper`` of one layer and some examples, from partial sums; see there for what is computed."""
        layer = tl.program_id(1)
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        base = sums + layer * layer_stride + row[None, :]
        products = tl.zeros((BLOCK,), dtype=tl.float64)
        left_trace = tl.zeros((BLOCK,), dtype=tl.float64)
        right_trace = tl.zeros((BLOCK,), dtype=tl.float64)
        left_square = tl.zeros((BLOCK,), dtype=tl.float64)
        right_square = tl.zeros((BLOCK,), dtype=tl.float64)
        for start in range(0, parts, TILE):
            part = start + tl.arange(0, TILE)
            mask = (part < parts)[:, None] & (row < batch)[None, :]
            where = base + part[:, None] * batch
            products += tl.sum(tl.load(where, mask=mask, other=0.0).to(tl.float64), axis=0)
            left_trace += tl.sum(tl.load(where + sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0)
            right_trace += tl.sum(tl.load(where + 2 * sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0)
            left_square += tl.sum(tl.load(where + 3 * sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0)
            right_square += tl.sum(tl.load(where + 4 * sum_stride, mask=mask, other=0.0).to(tl.float64), axis=0)
        loose = 1.03125
        left_size = left_trace * loose + left_least
        right_size = right_trace * loose + right_least
        left_wrong = left_size * left_gamma + left_least
        right_wrong = right_size * right_gamma + right_least
        left_gram = tl.where(left_square < float("inf"), tl.sqrt(left_square), left_trace) * loose + n_root + left_wrong
        right_gram = tl.where(right_square < float("inf"), tl.sqrt(right_square), right_trace) * loose + n_root + right_wrong
        error = left_wrong * right_gram + right_wrong * left_gram + left_gram * right_gram * terms_gamma + n_n_eta
        rounding = tl.sqrt(left_size * right_size) * (added * loose)
        if left_factor > 0:  # not 0 times infinity
            rounding += tl.sqrt(left_size * right_gram) * (left_factor * loose)
        if right_factor > 0:
            rounding += tl.sqrt(right_size * left_gram) * (right_factor * loose)
        norm = tl.sqrt(tl.where(products < 0, 0.0, products) + error) + rounding  # NaN stays NaN
        tl.store(out + layer * batch + row, norm * norm, mask=row < batch)

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


def _precision(t: Tensor) -> str:
    """TF32 only where the user allowed it for ordinary products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or t.dtype != torch.float32 else "ieee"


def _table(tensors: list[list[Tensor]]) -> Tensor:
    """The addresses of tensors, for a kernel that serves many layers at once."""
    return _sent([[t.data_ptr() for t in each] for each in tensors], tensors[0][0].device)


class Tables:
    """Addresses for the kernels of a CUDA graph. They never change, so they are sent once, before the first replay.

    The memory is taken before the capture: what a capture allocates may have served, and will serve at every replay, another tensor
    earlier in the graph. Keep the tables as long as the graph.
    """

    def __init__(self, device: torch.device, room: int = 1 << 17) -> None:
        self._there = torch.empty(room, dtype=torch.int64, device=device)
        self._here: list[int] = []

    def put(self, numbers: Tensor) -> Tensor:
        """A place on the device that will hold `numbers`."""
        start = len(self._here)
        self._here += numbers.flatten().tolist() + [0] * (-numbers.numel() % 32)
        if len(self._here) > len(self._there):
            raise Unsupported(f"a captured step with more than {len(self._there)} addresses", "use graph=False")
        return self._there[start : start + numbers.numel()].view(numbers.shape)

    def send(self) -> None:
        """Fill the places."""
        self._there[: len(self._here)].copy_(torch.tensor(self._here, dtype=torch.int64))


_tables: Tables | None = None


@contextmanager
def writing(tables: Tables) -> Iterator[None]:
    """While a CUDA graph is captured: put addresses into `tables` instead of copying them."""
    global _tables
    _tables = tables
    try:
        yield
    finally:
        _tables = None


def _sent(numbers: list[list[int]], device: torch.device) -> Tensor:
    """Integers on the device, without waiting for it: only pinned memory is copied behind the back of the host."""
    here = torch.tensor(numbers, dtype=torch.int64)
    if _tables is not None:
        return _tables.put(here)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _aligned(t: Tensor) -> Tensor:
    """Dense in its last dimension and on an address that the kernels may take for a multiple of sixteen bytes."""
    return t if t.stride(-1) == 1 and t.data_ptr() % 16 == 0 else t.contiguous().clone()


def gram_estimate(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> Estimate:
    """Norms of sums of outer products and how wrong they and the weighted sums can be, [layers, batch], for layers of one shape.

    left [batch, positions, p], right [batch, positions, d], or an integer index [batch, positions]: rows of an embedding.
    """
    return _gram_rounding(lefts[0], rights[0]).estimate(
        Gram(*gram_sums(lefts, rights, tile).sum(2, dtype=torch.float64).unbind(1))
    )


def gram_uppers(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> Tensor:
    """``gram_estimate(...).upper`` without its first dimension: [layers, batch], in one launch more than the sums."""
    return upper(_gram_rounding(lefts[0], rights[0]), gram_sums(lefts, rights, tile))


def upper(how: GramRounding, sums: Tensor) -> Tensor:
    """``how.estimate(sums).upper`` of [layers, 5, parts, batch] partial sums in float32: [layers, batch] in float64, in one launch."""
    layers, _, parts, batch = sums.shape
    out = torch.empty(layers, batch, dtype=torch.float64, device=sums.device)
    eta, n, up = least(torch.float32), how.positions, 1 + 2.0**-20  # the kernel takes its numbers rounded to float32
    gammas = (gamma(terms, torch.float32) * up for terms in (how.left, how.right, how.terms))
    _upper_kernel[(triton.cdiv(batch, 16), layers)](
        sums, out, sums.stride(0), sums.stride(1), parts, batch, n * eta**0.5 * up, n * n * eta * up, n * how.left * eta * up,
        n * how.right * eta * up, *gammas, how.left_factor * up, how.right_factor * up, how.added * up,
        TILE=min(64, triton.next_power_of_2(parts)), BLOCK=16, num_warps=4,
    )  # fmt: skip
    return out


def _gram_rounding(left: Tensor, right: Tensor) -> GramRounding:
    """How the Gram kernel and the weighted sum round."""
    rows = right.dim() == 2
    tensor_cores = left.dtype != torch.float32 or _precision(left) == "tf32"
    run, each = _run(left), 2 if tensor_cores else 1  # tensor cores cut digits off where they do not round

    def terms(width: int) -> int:
        return each * (min(width, run) + -(-width // run)) + 2

    positions, p, d = left.shape[1], left.shape[2], 1 if rows else right.shape[2]
    narrow = unit(torch.bfloat16)
    before = narrow if left.dtype == torch.float32 and tensor_cores else 0.0  # for the Gram matrices
    product = 0.0 if rows else of_factors(left.dtype, left.device)  # for the weighted sum
    scaled = narrow if left.dtype == torch.bfloat16 else 0.0
    return GramRounding(
        positions, terms(p), 0 if rows else terms(d), 2 * 128 + 8,
        before + product + (scaled if rows or p < d else 0.0), 0.0 if rows else before + product + (scaled if p >= d else 0.0),
        gamma(positions + 8, torch.float32),
    )  # fmt: skip


def gram_estimates(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> list[Estimate]:
    """:func:`gram_estimate`, layer by layer."""
    found = gram_estimate(lefts, rights, tile)
    return [Estimate(*each) for each in zip(found.squares, found.error, found.rounding, strict=True)]


def gram_sums(lefts: list[Tensor], rights: list[Tensor], tile: int = 0) -> Tensor:
    """The sums of ``rounding.Gram`` for each of many layers of one shape, in one launch: [layers, 5, parts, batch] in float32."""
    rows = rights[0].dim() == 2
    if some := 0 if rows else _rounded_first(lefts[0], rights[0]):
        parts = [slice(start, start + some) for start in range(0, len(lefts), some)]
        return torch.cat([gram_sums([t.bfloat16() for t in lefts[i]], [t.bfloat16() for t in rights[i]], tile) for i in parts])
    lefts = [_aligned(t) for t in lefts]
    rights = [t.to(torch.int64) if rows else _aligned(t) for t in rights]
    left, right = lefts[0], rights[0]
    if any(a.stride() != left.stride() or b.stride() != right.stride() for a, b in zip(lefts, rights, strict=True)):
        lefts, rights = [t.contiguous() for t in lefts], [t.contiguous() for t in rights]
        left, right = lefts[0], rights[0]
    batch, length, p = left.shape
    wide, d, run = left.dtype == torch.float32, 1 if rows else right.shape[2], _run(left)
    tile = tile or (32 if length <= 32 else 128 if length > 64 and not rows else 64)
    count = triton.cdiv(length, tile)
    pairs = count * (count + 1) // 2
    out = torch.empty(len(lefts), 5, pairs, batch, dtype=torch.float32, device=left.device)
    options: dict[str, Any] = {"num_warps": 8 if tile == 128 else 4, "num_stages": 4}
    _gram_kernel[(pairs, batch, len(lefts))](
        _table([list(pair) for pair in zip(lefts, rights, strict=True)]), out, length, p, d,
        left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        KIND=_KINDS[left.dtype], TILE=tile, DEPTH=32 if wide and tile < 128 else 64, ROWS=rows, PRECISION=_precision(left),
        NARROW=wide and _precision(left) == "tf32", LEFT_RUN=run if p > run else 0, RIGHT_RUN=run if d > run else 0, **options,
    )  # fmt: skip
    return out


def _run(left: Tensor) -> int:
    """How many products the Gram kernel adds to one another."""
    return TENSOR_RUN if left.dtype != torch.float32 or _precision(left) == "tf32" else PLAIN_RUN


def _rounded_first(left: Tensor, right: Tensor) -> int:
    """How many layers at a time have their tensors rounded to bfloat16 before the kernel, which would round each at every use."""
    if left.dtype != torch.float32 or _precision(left) != "tf32" or left.shape[1] < LONG:
        return 0
    return ROUNDED_BYTES // ((left.nbytes + right.nbytes) // 2)


def position_sums(layers: list[tuple[Tensor, ...]]) -> Tensor:
    """Per-example sums over positions for many layers of one shape, in one launch: [layers, 1 or 2, batch, width] in float32.

    A layer is (g,), giving the sums of g; or (g, a, rstd) or (g, a, rstd, mean), giving also those of g * (a - mean) * rstd.
    g, a [batch, positions, width]; rstd, mean [batch, positions].
    """
    kept = [tuple(t.contiguous() for t in layer) for layer in layers]
    grads = kept[0][0]
    scale, centred = len(kept[0]) > 1, len(kept[0]) > 3
    batch, length, width = grads.shape
    block, many = 128, len(kept)
    blocks = triton.cdiv(width, block)
    splits = max(1, min(triton.cdiv(512, batch * blocks * many), triton.cdiv(length, 32)))
    out = torch.empty(many, splits, 2 if scale else 1, batch, width, dtype=torch.float32, device=grads.device)
    order = [[layer[0], layer[1 if scale else 0], layer[-1], layer[2 if scale else 0]] for layer in kept]
    _scale_kernel[(batch, blocks * splits, many)](
        _table(order), out, length, width, splits, blocks, KIND=_KINDS[grads.dtype],
        STATISTICS=_KINDS[kept[0][-1].dtype], TILE=32, BLOCK=block, SCALE=scale, CENTRED=centred, num_warps=4,
    )  # fmt: skip
    return out.sum(1) if splits > 1 else out[:, 0]


def row_squares(tensors: list[Tensor]) -> Tensor:
    """Sums of squares of the rows of many matrices of one dtype and height, in one launch: [tensors, rows] as ``rounding.row_squares``."""
    kept = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]
    table = [[t.data_ptr(), t.shape[1], t.stride(0)] for t in kept]
    out = torch.empty(len(kept), len(kept[0]), dtype=torch.float64, device=kept[0].device)
    where = _sent(table, out.device)
    _square_kernel[(out.shape[1], len(kept))](where, out, KIND=_KINDS[kept[0].dtype], BLOCK=1024, RUN=64, num_warps=4)
    return out


def add_rows(matrices: list[Tensor], weights: Tensor, into: list[Tensor]) -> None:
    """The weighted sums of the rows of many float32 matrices of one height, in one launch, each into its own dense float32 tensor."""
    kept = [t if t.stride(-1) == 1 else t.contiguous() for t in matrices]
    table = [[t.data_ptr(), t.shape[1], t.stride(0), out.data_ptr()] for t, out in zip(kept, into, strict=True)]
    block = 64
    grid = (triton.cdiv(max(t.shape[1] for t in kept), block), len(kept))
    _add_rows_kernel[grid](
        _sent(table, weights.device), weights.float().contiguous(), len(weights), TILE=32, BLOCK=block, num_warps=4
    )


def scale_rows(t: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """[batch, ...] times [batch], all of one dtype and dense, rounded as torch rounds it, at the speed of memory."""
    width = t[0].numel()
    _scale_rows_kernel[(triton.cdiv(width, 2048), len(t))](t, weights.contiguous(), out, width, BLOCK=2048, num_warps=4)
    return out


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
