"""Arithmetic on tensors of examples that the kinds of contributions share, and which route measures a
layer.

A weight of `rows` x `columns` is used at `positions` of an example. Its gradient's norm comes from
Gram matrices of the positions, or from the product itself, made in parts or kept for the weighted
sum. The route follows from the shapes of one example, never from the size of the batch: where terms
cancel two routes give different norms, and one more example must not change those of all the
others. (Whether products are kept goes by the batch: kept or made again, they are the same.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.kernels import reductions
from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.rounding import row_squares

CHUNK_ELEMENTS = 2**22
"""How many elements of per-example gradients may exist at once while a norm is computed."""

GPU_CHUNK_ELEMENTS = 2**26
"""The same on a GPU, where small chunks cost launches."""

CACHE_ELEMENTS = 2**18
"""On a CPU, passes over large tensors are cut into parts of this size where their temporary tensors
then stay in the cache.
"""

KEEP_ELEMENTS = 2**23
"""On a CPU, per-example gradients of one parameter up to this size are kept: their weighted sum is
then one pass over memory.
"""

LARGE_BYTES = 2**22
"""From this size on NumPy asks the system for large pages."""


def wide(t: Tensor) -> Tensor:
    """At least float32."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The matrix product of `a` and `b`, or of many, in float32 for narrower factors: accumulated
    wide, and not rounded afterwards.
    """
    product: Any = torch.mm if a.dim() == 2 else torch.bmm
    if a.dtype in (torch.float32, torch.float64):
        return product(a, b, out=out)  # type: ignore[no-any-return]
    if a.is_cuda:
        with suppress(TypeError, RuntimeError):  # builds without a wide result take the longer way
            return product(a, b, out_dtype=torch.float32, out=out)  # type: ignore[no-any-return]
    return product(a.float(), b.float(), out=out)  # type: ignore[no-any-return]


def scaled(t: Tensor, weights: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Rows of `t` times `weights`, in the dtype of `t`; in the memory of `scratch`, bytes, where
    that is given.
    """
    factors = weights if weights.dtype is t.dtype else weights.to(t.dtype)
    place = None if scratch is None else scratch[: t.nbytes].view(t.dtype).view(t.shape)
    if factors.dim() == 1 and t.is_contiguous() and t.numel() and kernels.usable(t):
        return reductions.scale_rows(t, factors, torch.empty_like(t) if place is None else place)
    if factors.dim() != t.dim():
        factors = factors.view(-1, *[1] * (t.dim() - 1))
    return t * factors if place is None else torch.mul(t, factors, out=place)


def few_roundings(t: Tensor) -> float:
    """The relative error of scaling a gradient that exists in the type of `t`."""
    narrow = rounding.unit(t.dtype) if t.dtype in (torch.bfloat16, torch.float16) else 0.0
    return rounding.gamma(4, t.dtype) + 2 * narrow + 2 * rounding.of_factors(t.dtype, t.device)


def scaled_wide(t: Tensor, weights: Tensor) -> Tensor:
    """Rows of `t` times `weights`, in float32 or wider, in one pass."""
    return t * wide(weights).view(-1, *[1] * (t.dim() - 1))


def kept(t: Tensor, keep: Tensor) -> Tensor:
    """`t` with the rows where `keep` is False set to zero (also NaN and infinite ones)."""
    return torch.where(
        keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device)
    )


def row_chunks(batch: int, width: int, elements: int = CHUNK_ELEMENTS) -> list[slice]:
    """Slices of at most `elements // width` examples, at least one each."""
    size = max(1, min(batch, elements // max(width, 1)))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def large_pages(like: Tensor, *shape: int) -> Tensor:
    """Memory of the type and device of `like`. On a CPU large pieces come from NumPy, which asks
    the system for large pages: the page faults of small ones were a quarter of the time of some
    products that are put there.
    """
    real = {torch.float32: np.float32, torch.float64: np.float64}.get(like.dtype)
    if like.device.type != "cpu" or real is None or math.prod(shape) * like.itemsize < LARGE_BYTES:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, real))


def norm_by_parts(
    batch: int, width: int, part: Callable[[slice], Tensor], elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Squared norms from materialised gradients, a bounded chunk at a time: [batch]."""
    return torch.cat([row_squares(part(rows)) for rows in row_chunks(batch, width, elements)])


def fitted(total: Tensor, like: Tensor) -> Tensor:
    """`total` in the shape of `like`, in float32 or wider."""
    dtype = rounding.sum_dtype(like.dtype)
    total = total if total.dtype is dtype else total.to(dtype)
    return total if total.shape == like.shape else total.view(like.shape)


def put(value: Tensor, place: Tensor | None) -> Tensor:
    """`value`, in the memory of `place` if there is one."""
    return value if place is None else place.copy_(value)


def along(factor: Tensor | float, shape: torch.Size) -> str:
    """Whether one number scales "all" of a tensor of `shape`, one each of its "rows", or one each
    of its "columns"; empty for anything else.
    """
    if not isinstance(factor, Tensor) or factor.numel() == 1:
        return "all"
    aligned = (*[1] * (len(shape) - factor.dim()), *factor.shape)
    if len(aligned) != len(shape):
        return ""
    if aligned[0] == shape[0] and all(side == 1 for side in aligned[1:]):
        return "rows"
    return "columns" if len(shape) == 2 and aligned == (1, shape[1]) else ""


def along_positions(parts: list[Tensor]) -> Tensor:
    """All positions of the parts. One alone need not be copied: the gradient of a language model's
    head is as large as all else.
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


PASS_COST = 48
"""What writing and reading a kept gradient element costs, in multiply-adds of a matrix product
(measured on a CPU).
"""

KEPT_POSITIONS = 64
"""With fewer positions than this, a second product of a convolution costs less than keeping the
gradients (measured on a CPU).
"""

KEPT_WIDTH = 2**19
"""On a CPU, products of more elements are never kept: those of few batches would fit
(``contribution.KEEP_ELEMENTS`` in all).
"""

KEPT_BYTES = 8
"""On a GPU the product of a convolution is kept if its tensors have so many bytes for each of its
numbers: to write and read those is then faster than to make the product a second time. Recordings
hold what is kept, so it should be small against the tensors.
"""


def kept_on_gpu(width: int, size: int) -> bool:
    """Whether the gradient of a convolution of `width` weights is kept instead of input and output
    gradient, of `size` bytes.
    """
    return KEPT_BYTES * width <= size


def grouped_kept(below: int, width: int, elements: int) -> bool:
    """The same for a convolution in groups, `below` channels of its larger tensor in each, whose
    tensors have so many `elements`.
    """
    return width <= elements * (4 if below == 1 else 1)


def keeping_pays(positions: int, rows: int, columns: int) -> bool:
    """On a CPU: whether products cost less than Gram matrices even when each is written and read
    again, and fit into memory.
    """
    return rows * columns <= KEPT_WIDTH and PASS_COST * rows * columns <= 2 * positions**2 * (
        rows + columns
    )


def by_gram_on_cpu(positions: int, rows: int, columns: int) -> bool:
    """On a CPU: whether Gram matrices take fewer operations than products, and these are never
    kept.
    """
    return positions * (rows + columns) <= 0.9 * rows * columns and not keeping_pays(
        positions, rows, columns
    )


def by_gram_on_gpu(positions: int, rows: int, columns: int) -> bool:
    """On a GPU: Gram matrices tile by tile, unless there are many positions for the width.

    Products need no more operations than Gram matrices from 2.0 on, but the kernel serves all
    layers of a shape in one launch and writes nothing. On an H200 GPT-2 at 1,024 positions, whose
    square layers have 2.7, takes as long with either in bfloat16.
    """
    return positions * (rows + columns) <= 2.7 * rows * columns


def convolution_by_gram(positions: int, rows: int, columns: int) -> bool:
    """On a CPU: whether the Gram matrices of a convolution's patches take half the operations of
    its products.
    """
    return 2 * positions * (rows + columns) <= rows * columns
