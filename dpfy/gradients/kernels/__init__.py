"""Fused GPU kernels in Triton, each with a portable twin elsewhere that gives the same answer. Sums
are kept in float32.

Nothing here uses atomic additions: partial sums are written out and added in a fixed order, so a
step repeats bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
except ImportError:  # a CPU-only installation
    triton = None


def usable(t: Tensor) -> bool:
    """Whether the kernels can run on `t`."""
    return (
        triton is not None
        and t.is_cuda
        and t.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )
