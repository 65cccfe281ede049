"""Memory for sums: where they go, and what is needed on the way to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfy.gradients.engine import Grads
from dpfy.gradients.per_example.rounding import sum_dtype


@dataclass(frozen=True)
class Buffers:
    """Memory for the sums by name, and for what is needed on the way to them."""

    places: Mapping[str, Tensor]
    scratch: Tensor | None = None
    sparse: bool = False  # whether the sum of a table may be the rows that are in use


class PackedShapes:
    """Tensors of some shapes side by side in one piece of memory, each at a multiple of eight
    elements.
    """

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.total = 0
        self._views: list[tuple[torch.Size, tuple[int, ...], int]] = []
        for shape in shapes:
            self._views.append((shape, torch.empty(shape, device="meta").stride(), self.total))
            self.total += shape.numel() + -shape.numel() % 8

    def of(self, flat: Tensor) -> list[Tensor]:
        """The tensors in `flat`, which has `total` elements."""
        return [flat.as_strided(*view) for view in self._views]


class BufferLayout:
    """How the sums of some parameters, and the clip rule's coordinates beside them, lie in memory:
    side by side, in pieces of one dtype.

    A piece has at most `most` bytes, or one parameter: small pieces find room where tensors of a
    layer were let go of.
    """

    def __init__(
        self, params: Mapping[str, Tensor], coordinates: Sequence[str] = (), most: float = math.inf
    ) -> None:
        shapes = {name: (sum_dtype(p.dtype), p.shape) for name, p in params.items()}
        first = next(iter(shapes.values()))[0]
        shapes |= {name: (first, torch.Size(())) for name in coordinates}
        self.device = next(iter(params.values())).device
        self.order = list(shapes)
        self.rows: list[tuple[torch.dtype, list[str], PackedShapes]] = []
        for dtype in dict.fromkeys(dtype for dtype, _ in shapes.values()):
            mine = {name: shape for name, (own, shape) in shapes.items() if own == dtype}
            for names in cut(
                [shape.numel() * dtype.itemsize for shape in mine.values()], list(mine), most
            ):
                self.rows.append((dtype, names, PackedShapes([mine[name] for name in names])))

    def buffers(self, scratch: int) -> tuple[Buffers, tuple[int, ...]]:
        """Buffers from among the model's tensors, for it is handed out, and where it lies."""
        places: Grads = {}
        memory = [taken(pieces.total, dtype, self.device) for dtype, _, pieces in self.rows]
        for flat, (_, mine, pieces) in zip(memory, self.rows, strict=True):
            places |= zip(mine, pieces.of(flat), strict=True)
        more = taken(scratch, torch.uint8, self.device)
        where = (scratch, more.data_ptr(), *[flat.data_ptr() for flat in memory])
        return Buffers(
            places if len(self.rows) == 1 else {name: places[name] for name in self.order}, more
        ), where


def taken(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for so many elements."""
    return torch.empty(count, dtype=dtype, device=device)


def cut(sizes: Sequence[int], names: Sequence[str], most: float) -> list[list[str]]:
    """`names` in their order, as runs of at most `most` bytes or one name."""
    runs: list[list[str]] = []
    filled = 0
    for name, size in zip(names, sizes, strict=True):
        if not runs or filled + size > most:
            runs.append([])
            filled = 0
        runs[-1].append(name)
        filled += size
    return runs
