"""Parameters that are used piece by piece: rows of one matrix that project queries, keys and
values.

Each use explains some rows. Uses of different rows do not overlap, so their norms add and each
writes its own rows of the sum; only where uses overlap are there cross terms, between those rows
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dpfy.gradients.per_example.contribution import Contribution, Piece
from dpfy.gradients.per_example.rounding import unit


@dataclass(frozen=True)
class Sliced(Contribution):
    """What some rows of a parameter receive, each from its own contribution; the other rows receive
    nothing.

    Guarantees: no two pieces share a row.
    """

    pieces: tuple[Piece, ...]
    shape: torch.Size  # of the parameter

    @property
    def parts(self) -> list[Contribution]:
        """The contributions of the pieces."""
        return [part for _, _, part in self.pieces]

    def of(self, parts: Sequence[Contribution]) -> Sliced:
        """The same rows with other contributions."""
        return Sliced(
            tuple((a, b, part) for (a, b, _), part in zip(self.pieces, parts, strict=True)),
            self.shape,
        )

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    @property
    def width(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return max((part.dtype for part in self.parts), key=unit)

    def row_blocks(self) -> list[Contribution]:
        return self.parts

    def reassembled(
        self, measured: Sequence[tuple[Tensor, Contribution]]
    ) -> tuple[Tensor, Contribution]:
        norms, rests = zip(*measured, strict=True)
        return torch.cat(norms), self.of(rests)

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.reassembled([part.measured() for part in self.parts])

    @property
    def sliced_shape(self) -> torch.Size:
        return self.shape

    def used_rows(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b, _ in self.pieces]

    def row_pieces(self, shape: torch.Size) -> tuple[Piece, ...]:
        return self.pieces

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums = [part.weighted_sum(weights) for part in self.parts]
        return self._filled(self.shape, sums)

    writes_in_place = True

    @property
    def scratch_bytes(self) -> int:
        return max(part.scratch_bytes for part in self.parts)

    def sum_into(self, weights: Tensor, place: Tensor, scratch: Tensor | None = None) -> Tensor:
        if sum(b - a for a, b, _ in self.pieces) < self.shape[0]:
            place.zero_()
        for a, b, part in self.pieces:
            part.sum_into(weights, place[a:b], scratch)
        return place

    def per_example(self, rows: slice) -> Tensor:
        grads = [part.per_example(rows) for part in self.parts]
        return self._filled((len(grads[0]), *self.shape), grads, 1)

    def _filled(self, shape: Sequence[int], found: Sequence[Tensor], dim: int = 0) -> Tensor:
        total = found[0].new_zeros(
            shape, dtype=reduce(torch.promote_types, [each.dtype for each in found])
        )
        for (a, b, _), each in zip(self.pieces, found, strict=True):
            place = total.narrow(dim, a, b - a)
            place.copy_(each.view(place.shape))
        return total

    def rounding(self) -> Tensor:
        return torch.stack([part.rounding() for part in self.parts]).square().sum(0).sqrt()

    def cleaned(self, keep: Tensor) -> Sliced:
        return self.of([part.cleaned(keep) for part in self.parts])


def rows_of(part: Contribution, parameter: Tensor, start: int) -> Contribution:
    """`part` as rows from `start` on of `parameter`; `part` itself if these are all rows."""
    rows = part.width // parameter[0].numel() if parameter.dim() > 1 else part.width
    return (
        part if rows == len(parameter) else Sliced(((start, start + rows, part),), parameter.shape)
    )
