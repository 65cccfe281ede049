# mypy: disable-error-code="no-untyped-def"
"""Gaussian noise on a GPU, made where it is added: counters in, noisy sums out, one launch for all parameters.

The bits are a ChaCha keystream of 12 rounds (Bernstein 2008) under a secret key of 256 bits: a cipher, so that whoever sees some of the
noise learns nothing about the rest. The transform is that of Box & Muller (1958). Nothing of the size of the model is written but the
sums themselves.
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

ROUNDS = 12
LANES = 256
TILE = 16 * LANES
"""Values of one tile: value 256 i + j comes from word i of the keystream block 256 * tile + j. A tensor begins a new tile."""

KEY_BYTES = 32


def usable(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can add to these tensors."""
    return triton is not None and all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def add_(tensors: Sequence[Tensor], scale: float, key: bytes, divisor: float = 1.0) -> None:
    """Add `scale` times standard Gaussian values to all `tensors` and divide by `divisor`, in place.

    The values are a function of the 32 bytes of `key` and of the sizes of the tensors.

    Guarantees: no two values use the same word of the keystream, but for the two of a pair, which share two words; u = (k + 1/2) / 2^32
    for a whole number k of 32 bits, so that small u, which make the tail, keep their full precision; a pair has at most radius 6.77.
    """
    parts = [t for t in tensors if t.numel()]
    if not parts:
        return
    table, first = [int.from_bytes(key[i : i + 8], "little", signed=True) for i in range(0, KEY_BYTES, 8)], 0
    for t in parts:
        table += [t.data_ptr(), first, t.numel()]
        first += -(-t.numel() // TILE)
    table += [0, first, 0]
    here, device = torch.tensor(table, dtype=torch.int64), parts[0].device
    sent = here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
    halvings = max(1, len(parts).bit_length())
    aligned = all(t.data_ptr() % 16 == 0 for t in parts)
    _add[(first,)](sent, len(parts), scale, divisor, HALVINGS=halvings, LANES=LANES, ROUNDS=ROUNDS, ALIGNED=aligned, num_warps=4)


_add: Any = None

if triton is not None:

    @triton.jit
    def _quarter(a, b, c, d):
        """The quarter round of ChaCha."""
        a += b
        d ^= a
        d = (d << 16) | (d >> 16)
        c += d
        b ^= c
        b = (b << 12) | (b >> 20)
        a += b
        d ^= a
        d = (d << 8) | (d >> 24)
        c += d
        b ^= c
        b = (b << 7) | (b >> 25)
        return a, b, c, d

    @triton.jit
    def _pair(a, b):
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
    def _plus(target, place, numel, scale, divisor, a, b, LANES: tl.constexpr):
        """Add the pair of two words to two runs of LANES values."""
        first, second = _pair(a, b)
        inside = place < numel
        tl.store(target + place, (tl.load(target + place, mask=inside) + scale * first) / divisor, mask=inside)
        place += LANES
        inside = place < numel
        tl.store(target + place, (tl.load(target + place, mask=inside) + scale * second) / divisor, mask=inside)

    @triton.jit(do_not_specialize=["count"])
    def _add(
        table, count, scale, divisor,
        HALVINGS: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr,
    ):  # fmt: skip
        """One tile of one tensor. `table`: the key, then (address, first tile, size) of every tensor."""
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
        place = (tile - tl.load(table + 4 + 3 * low + 1)) * (16 * LANES) + tl.arange(0, LANES)
        numel = tl.load(table + 4 + 3 * low + 2)
        block = tile * LANES + tl.arange(0, LANES)
        zero = tl.zeros((LANES,), dtype=tl.uint32)
        k0, k1, k2, k3 = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
        x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
        x4, x5 = zero + k0.to(tl.uint32), zero + (k0 >> 32).to(tl.uint32)
        x6, x7 = zero + k1.to(tl.uint32), zero + (k1 >> 32).to(tl.uint32)
        x8, x9 = zero + k2.to(tl.uint32), zero + (k2 >> 32).to(tl.uint32)
        x10, x11 = zero + k3.to(tl.uint32), zero + (k3 >> 32).to(tl.uint32)
        x12, x13, x14, x15 = block.to(tl.uint32), (block >> 32).to(tl.uint32), zero, zero
        for _ in tl.static_range(ROUNDS // 2):
            x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
            x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
            x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
            x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
            x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
            x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
            x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
            x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
        _plus(target, place, numel, scale, divisor, x0 + 0x61707865, x1 + 0x3320646E, LANES)
        _plus(target, place + 2 * LANES, numel, scale, divisor, x2 + 0x79622D32, x3 + 0x6B206574, LANES)
        _plus(target, place + 4 * LANES, numel, scale, divisor, x4 + k0.to(tl.uint32), x5 + (k0 >> 32).to(tl.uint32), LANES)
        _plus(target, place + 6 * LANES, numel, scale, divisor, x6 + k1.to(tl.uint32), x7 + (k1 >> 32).to(tl.uint32), LANES)
        _plus(target, place + 8 * LANES, numel, scale, divisor, x8 + k2.to(tl.uint32), x9 + (k2 >> 32).to(tl.uint32), LANES)
        _plus(target, place + 10 * LANES, numel, scale, divisor, x10 + k3.to(tl.uint32), x11 + (k3 >> 32).to(tl.uint32), LANES)
        _plus(
            target, place + 12 * LANES, numel, scale, divisor, x12 + block.to(tl.uint32), x13 + (block >> 32).to(tl.uint32), LANES
        )
        _plus(target, place + 14 * LANES, numel, scale, divisor, x14, x15, LANES)
