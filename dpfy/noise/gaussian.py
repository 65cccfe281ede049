"""Standard Gaussian tensors by address: the same (secret, stream, step) gives the same tensors, on any number of calls.

On a CPU the bits are a ChaCha20 keystream and the transform is that of Box & Muller (1958), vectorised: cryptographic noise at the
price of torch's own. Other devices use their own counter generator, seeded by the address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dpfy.core.random import Randomness

CHUNK = 1 << 17
"""Values made at a time: the intermediate tensors stay in the cache."""


def draw(like: Mapping[str, Tensor], randomness: Randomness, stream: str, step: int) -> dict[str, Tensor]:
    """Independent N(0, 1) values in the shapes and on the device of `like`, for one step of one stream.

    Guarantees: each step and stream has its own key; inside a step the parameters take consecutive, disjoint parts of one sequence,
    so no two values of a run are ever the same draw. Values are float64 if any parameter is, else float32. In float32 a pair of
    values has at most radius 6.66 (beyond lies a probability of 2.3e-10), in float64 9.4.
    """
    device = next(iter(like.values())).device if like else torch.device("cpu")
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in like.values()) else torch.float32
    total = sum(t.numel() for t in like.values())
    if device.type == "cpu":
        flat = _box_muller(total, dtype, randomness.keystream(stream, step))
    else:
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(randomness.key(stream, step, 8), "little") >> 1)
        flat = torch.empty(total, device=device, dtype=dtype).normal_(generator=generator)
    parts = flat.split([t.numel() for t in like.values()]) if like else ()
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def _box_muller(count: int, dtype: torch.dtype, fill: Callable[[memoryview], None]) -> Tensor:
    """`count` values from a keystream: pairs r cos(theta), r sin(theta) with r = sqrt(-2 log u).

    u is (k + 1/2) / 2^b for a whole number k of b = 31 or 63 bits: small u, which make the tail, keep their full precision.
    """
    whole, bits = (torch.int64, 63) if dtype == torch.float64 else (torch.int32, 31)
    flat = torch.empty(count, dtype=dtype)
    most = (min(count, CHUNK) + 1) // 2
    buffer = bytearray(2 * most * (bits + 1) // 8)
    radii, angles = torch.empty(most, dtype=dtype), torch.empty(most, dtype=dtype)
    for out in flat.split(2 * most) if count else ():
        half = (len(out) + 1) // 2
        part = memoryview(buffer)[: 2 * half * (bits + 1) // 8]
        fill(part)
        integers = torch.frombuffer(part, dtype=whole)
        radius, angle = radii[:half], angles[:half]
        radius.copy_(integers[:half].bitwise_and_(2**bits - 1)).add_(0.5).mul_(2.0**-bits).log_().mul_(-2).sqrt_()
        angle.copy_(integers[half:]).mul_(math.pi * 2.0**-bits)
        second = len(out) - half
        torch.cos(angle, out=out[:half]).mul_(radius)
        torch.sin(angle[:second], out=out[half:]).mul_(radius[:second])
    return flat
