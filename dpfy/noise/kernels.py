"""Triton kernels for correlated noise on a GPU: each remembered row is read once and written at most once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU build of PyTorch comes without it
    triton = None

BLOCK = 1024


def usable(noise: Tensor) -> bool:
    """Whether the kernels can take this tensor; the plain formula gives the same numbers otherwise, slower."""
    return triton is not None and noise.is_cuda and noise.dtype in (torch.float32, torch.float64) and noise.is_contiguous()


def plus_weighted(noise: Tensor, past: Tensor, weights: Sequence[float], keep: int | None) -> Tensor:
    """noise + sum of weights[i] * past[i], in row `keep` of the past or in a new tensor. Each place is read before it is written."""
    out = torch.empty_like(noise) if keep is None else past[keep]
    table = _table(tuple(weights), noise.dtype, noise.device)
    _weighted[_grid(noise)](noise, past, table, out, noise.numel(), past.stride(0), ROWS=len(weights), BLOCK=BLOCK)
    return out


def feed_back(noise: Tensor, past: Tensor, theta: Sequence[float], omega: Sequence[float]) -> Tensor:
    """y = noise - sum of omega_j past_j, in the place of `noise`; past_j = theta_j past_j + y in place."""
    table = _table((*theta, *omega), noise.dtype, noise.device)
    _feed_back[_grid(noise)](noise, past, table, noise.numel(), past.stride(0), ROWS=len(theta), BLOCK=BLOCK)
    return noise


@lru_cache(maxsize=1024)
def _table(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights on the device; kept, because a copy would wait for the device."""
    return torch.tensor(weights, dtype=dtype, device=device)


def _grid(noise: Tensor) -> tuple[int]:
    return (-(-noise.numel() // BLOCK),)


_weighted: Any = None
_feed_back: Any = None

if triton is not None:

    @triton.jit
    def _weighted(noise, past, table, out, n, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < n
        total = tl.load(noise + place, mask=inside)
        row = past + place  # moved row by row: a row's number times its length can pass 2^31
        for i in tl.static_range(ROWS):
            total += tl.load(table + i) * tl.load(row, mask=inside)
            row += stride
        tl.store(out + place, total, mask=inside)

    @triton.jit
    def _feed_back(noise, past, table, n, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < n
        y = tl.load(noise + place, mask=inside)
        row = past + place
        for j in tl.static_range(ROWS):
            y -= tl.load(table + ROWS + j) * tl.load(row, mask=inside)
            row += stride
        row = past + place
        for j in tl.static_range(ROWS):
            # The second read of the row comes from the cache.
            tl.store(row, tl.load(table + j) * tl.load(row, mask=inside) + y, mask=inside)
            row += stride
        tl.store(noise + place, y, mask=inside)
