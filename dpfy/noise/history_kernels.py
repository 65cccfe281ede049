"""Noise plus a weighted sum of remembered rows on a GPU: for strategies that keep all of the past,
where each step has another one.
"""

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


def usable(noise: Tensor, past: Tensor) -> bool:
    """Whether the kernel can take these tensors; the plain formula gives the same numbers
    otherwise, slower.
    """
    whole = (
        noise.dtype in (torch.float32, torch.float64)
        and noise.is_contiguous()
        and past.is_contiguous()
    )
    return triton is not None and noise.is_cuda and whole


def plus_weighted(
    noise: Tensor, past: Tensor, weights: Sequence[float], keep: int | None
) -> Tensor:
    """noise + sum of weights[i] * past[i], in row `keep` of the past or in a new tensor. Each place
    is read before it is written.
    """
    out = torch.empty_like(noise) if keep is None else past[keep]
    table = _table(tuple(weights), noise.dtype, noise.device)
    grid = (-(-noise.numel() // BLOCK),)
    _weighted[grid](
        noise, past, table, out, noise.numel(), past.stride(0), len(weights), BLOCK=BLOCK
    )
    return out


@lru_cache(maxsize=1024)
def _table(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights on the device; kept, because a copy would wait for the device."""
    return torch.tensor(weights, dtype=dtype, device=device)


_weighted: Any = None

if triton is not None:

    @triton.jit(do_not_specialize=["rows"])  # it grows with every step
    def _weighted(noise, past, table, out, n, stride, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < n
        total = tl.load(noise + place, mask=inside)
        row = past + place  # moved row by row: a row's number times its length can pass 2^31
        for i in range(rows):
            total += tl.load(table + i) * tl.load(row, mask=inside)
            row += stride
        tl.store(out + place, total, mask=inside)
