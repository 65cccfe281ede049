"""Standard Gaussian tensors by address: the same (secret, stream, step) gives the same tensors, on any number of calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dpfy.core.random import Randomness


def draw(like: Mapping[str, Tensor], randomness: Randomness, stream: str, step: int) -> dict[str, Tensor]:
    """Independent N(0, 1) values in the shapes, dtypes and on the devices of `like`, for one step of one stream.

    Guarantees: each step and stream has its own 128-bit key; inside a step the parameters take consecutive, disjoint parts of one
    sequence, so no two values of a run are ever the same draw. Half-precision tensors get noise drawn in float32.
    """
    device = next(iter(like.values())).device if like else torch.device("cpu")
    if device.type == "cpu":
        return _draw_cpu(like, randomness.generator(stream, step))
    return _draw_device(like, randomness.key(stream, step), device)


def _draw_cpu(like: Mapping[str, Tensor], generator: np.random.Generator) -> dict[str, Tensor]:
    double = any(t.dtype == torch.float64 for t in like.values())
    total = sum(t.numel() for t in like.values())
    flat = torch.from_numpy(generator.standard_normal(total, dtype=np.float64 if double else np.float32))
    return _split(flat, like)


def _draw_device(like: Mapping[str, Tensor], key: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device=device)
    generator.manual_seed(key & (2**63 - 1))
    double = any(t.dtype == torch.float64 for t in like.values())
    total = sum(t.numel() for t in like.values())
    flat = torch.empty(total, device=device, dtype=torch.float64 if double else torch.float32).normal_(generator=generator)
    return _split(flat, like)


def _split(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([t.numel() for t in like.values()]) if like else ()
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}
