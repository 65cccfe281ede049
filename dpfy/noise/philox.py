# mypy: disable-error-code="no-untyped-def"
"""Gaussian noise on a GPU, made where it is added: counters in, noisy sums out, one launch for all parameters.

The bits are Philox 4x32-10 (Salmon et al. 2011) under a secret of 128 bits: 64 are the key, 64 the upper half of the counter. The
transform is that of Box & Muller (1958). Nothing of the size of the model is written but the sums themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None

LANES = 1024
TILE = 4 * LANES
"""Values of one tile: value 1024 i + j comes from word i of the counter with lower half 1024 * tile + j. A tensor begins a new tile."""


def usable(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can add to these tensors."""
    return triton is not None and all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def add_(tensors: Sequence[Tensor], scale: float, secret: bytes, divisor: float = 1.0) -> None:
    """Add `scale` times standard Gaussian values to all `tensors` and divide by `divisor`, in place.

    The values are a function of the 16 bytes of `secret` and of the sizes of the tensors.

    Guarantees: no two values use the same word of the sequence; u = (k + 1/2) / 2^32 for a whole number k of 32 bits, so that small u,
    which make the tail, keep their full precision; a pair of values has at most radius 6.77.
    """
    parts = [t for t in tensors if t.numel()]
    if not parts:
        return
    table, first = [0] * 4, 0
    table[:2] = [int.from_bytes(secret[i : i + 8], "little", signed=True) for i in (0, 8)]
    for t in parts:
        table += [t.data_ptr(), first, t.numel()]
        first += -(-t.numel() // TILE)
    table += [0, first, 0]
    here, device = torch.tensor(table, dtype=torch.int64), parts[0].device
    sent = here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
    halvings = max(1, len(parts).bit_length())
    aligned = all(t.data_ptr() % 16 == 0 for t in parts)
    _add[(first,)](sent, len(parts), scale, divisor, HALVINGS=halvings, LANES=LANES, ALIGNED=aligned, num_warps=4)


_add: Any = None

if triton is not None:

    @triton.jit
    def _normal(a, b):
        """Two standard Gaussian values from two random words.

        The angle: two bits of `b` choose a quarter of the circle, the other thirty an angle x between -pi/4 and pi/4 in it, where a
        few terms of the series of sine and cosine are exact to the last digit.
        """
        u = (a.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        radius = tl.sqrt(-2.0 * tl.log(tl.minimum(u, 1.0)))
        x = (b << 2).to(tl.int32, bitcast=True).to(tl.float32) * 3.6572951981678995e-10
        s = x * x
        sine = x + x * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880))))
        cosine = 1.0 + s * (-0.5 + s * (1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320))))
        swap = (b & 0x40000000) != 0
        radius = tl.where((b & 0x80000000) != 0, -radius, radius)
        return radius * tl.where(swap, sine, cosine), radius * tl.where(swap, cosine, sine)

    @triton.jit
    def _plus(target, place, numel, scale, divisor, values):
        inside = place < numel
        tl.store(target + place, (tl.load(target + place, mask=inside) + scale * values) / divisor, mask=inside)

    @triton.jit(do_not_specialize=["count"])
    def _add(table, count, scale, divisor, HALVINGS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr):
        """One tile of one tensor. `table`: key, upper counter, two spare, then (address, first tile, size) of every tensor."""
        tile = tl.program_id(0).to(tl.int64)
        low, high = 0, count  # the tensor whose tiles begin at or before this one
        for _ in tl.static_range(HALVINGS + 1):
            middle = (low + high) // 2
            before = tl.load(table + 4 + 3 * middle + 1) <= tile
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        target = tl.load(table + 4 + 3 * low).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            target = tl.multiple_of(target, 16)
        start = (tile - tl.load(table + 4 + 3 * low + 1)) * (4 * LANES)
        numel = tl.load(table + 4 + 3 * low + 2)
        key, upper = tl.load(table), tl.load(table + 1)
        lane = tl.arange(0, LANES)
        counter = tile * LANES + lane
        zero = lane.to(tl.uint32) * 0
        a, b, c, d = tl.philox(
            key,
            counter.to(tl.uint32),
            (counter >> 32).to(tl.uint32),
            zero + upper.to(tl.uint32),
            zero + (upper >> 32).to(tl.uint32),
        )
        first, second = _normal(a, b)
        third, fourth = _normal(c, d)
        place = start + lane
        _plus(target, place, numel, scale, divisor, first)
        _plus(target, place + LANES, numel, scale, divisor, second)
        _plus(target, place + 2 * LANES, numel, scale, divisor, third)
        _plus(target, place + 3 * LANES, numel, scale, divisor, fourth)
