"""Memory for sums: where they go, and what is needed on the way to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfy.gradients.clip import COUNT
from dpfy.gradients.engine import Grads, norm_dtype


@dataclass(frozen=True)
class Room:
    """Memory for the sums by name, and for what is needed on the way to them."""

    places: Mapping[str, Tensor]
    scratch: Tensor | None = None


class Layout:
    """How the sums of all parameters lie in one piece of memory for each dtype."""

    def __init__(self, params: dict[str, nn.Parameter], counted: bool) -> None:
        shapes = {name: (norm_dtype(p.dtype), p.shape) for name, p in params.items()}
        if counted:
            shapes[COUNT] = (next(iter(shapes.values()))[0], torch.Size(()))
        self.device = next(iter(params.values())).device
        self.order = list(shapes)
        self.rows: list[tuple[torch.dtype, list[tuple[str, torch.Size]], list[int]]] = []
        for dtype in dict.fromkeys(dtype for dtype, _ in shapes.values()):
            mine = [(name, shape) for name, (own, shape) in shapes.items() if own == dtype]
            self.rows.append((dtype, mine, [-8 * (-shape.numel() // 8) for _, shape in mine]))

    def room(self, scratch: int) -> tuple[Room, tuple[int, ...]]:
        """Room from among the model's tensors, for it is handed out, and where it lies."""
        places: Grads = {}
        memory = [torch.empty(sum(sizes), dtype=dtype, device=self.device) for dtype, _, sizes in self.rows]
        for flat, (_, mine, sizes) in zip(memory, self.rows, strict=True):
            for (name, shape), piece in zip(mine, flat.split(sizes), strict=True):
                places[name] = piece[: shape.numel()].view(shape)
        more = torch.empty(scratch, dtype=torch.uint8, device=self.device)
        where = (scratch, more.data_ptr(), *[flat.data_ptr() for flat in memory])
        return Room(places if len(self.rows) == 1 else {name: places[name] for name in self.order}, more), where
