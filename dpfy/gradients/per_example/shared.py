"""Parameters that are used several times, or piece by piece: the cross terms are exact.

Uses of different rows do not overlap, so their norms add and each writes its own rows of the sum.
Where uses overlap there are cross terms, between those rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from dpfy.gradients.per_example.arithmetic import norm_by_parts
from dpfy.gradients.per_example.contribution import Contribution, Piece
from dpfy.gradients.per_example.outer import Direct
from dpfy.gradients.per_example.rounding import NormEstimate, unit


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


@dataclass(frozen=True, repr=False)
class MeasuredContribution(Contribution):
    """A contribution whose norms are known already, and what was kept of it."""

    norms: Tensor  # [parts, batch]
    rest: Contribution

    @classmethod
    def of(cls, part: Contribution) -> MeasuredContribution:
        """Measure `part` now."""
        norms, rest = part.measured()
        return cls(norms, rest)

    @property
    def batch(self) -> int:
        return self.rest.batch

    @property
    def width(self) -> int:
        return self.rest.width

    @property
    def dtype(self) -> torch.dtype:
        return self.rest.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.norms, self.rest

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.rest.weighted_sum(weights)

    def per_example(self, rows: slice) -> Tensor:
        return self.rest.per_example(rows)

    def squares_of(self, example: int) -> Tensor:
        return self.rest.squares_of(example)

    def rounding(self) -> Tensor:
        return self.rest.rounding()

    def cleaned(self, keep: Tensor) -> MeasuredContribution:
        return MeasuredContribution(self.norms, self.rest.cleaned(keep))

    is_measured = True

    @property
    def convolves(self) -> bool:
        return self.rest.convolves

    @property
    def scratch_bytes(self) -> int:
        return self.rest.scratch_bytes

    def resolved(self) -> Contribution:
        return self.rest

    def used_rows(self) -> list[tuple[int, int]] | None:
        return self.rest.used_rows()

    def row_pieces(self, shape: torch.Size) -> tuple[Piece, ...] | None:
        sliced = self.rest.sliced_shape is not None or self.rest.row_pieces(shape) is None
        return None if sliced else ((0, shape[0], self),)

    def row_range(self, start: int, end: int) -> Contribution:
        return self.rest.row_range(start, end)

    def unwrapped(self) -> Contribution:
        rest = self.rest
        if isinstance(rest, Sliced) and len(rest.pieces) == 1:
            return rest.of([MeasuredContribution(self.norms, rest.parts[0])])
        return self


@dataclass(frozen=True)
class Shared(Contribution):
    """Several uses of one parameter. The cross terms are exact."""

    parts: Sequence[Contribution]

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    @property
    def width(self) -> int:
        return self.parts[0].width

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def convolves(self) -> bool:
        return any(part.convolves for part in self.parts)

    @property
    def summands(self) -> Sequence[Contribution]:
        return self.parts

    def measured(self) -> tuple[Tensor, Contribution]:
        merged = merge(self.parts)
        if len(merged) == 1:
            return merged[0].measured()
        if disjoint(merged):
            return torch.cat([part.measured()[0] for part in merged]), self
        if len(merged) == 2:
            first, second = merged
            found = first.estimate_with(second) or second.estimate_with(first)
            if found is not None:
                return found.upper, self
        # Uses may cancel: their sum is wrong by what each of them is, once in the norm and once in
        # the weighted sum.
        squares = norm_by_parts(
            self.batch,
            self.width * len(merged),
            Shared([part.widened() for part in merged]).per_example,
        )
        return NormEstimate(squares, torch.zeros_like(squares), 2 * self.rounding()).upper, self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.parts[0].weighted_sum(_no_wider(weights, self.parts[0]))
        for part in self.parts[1:]:
            total = total + part.weighted_sum(_no_wider(weights, part))
        return total

    def per_example(self, rows: slice) -> Tensor:
        total = self.parts[0].per_example(rows)
        for part in self.parts[1:]:
            total = total + part.per_example(rows)
        return total

    def rounding(self) -> Tensor:
        return torch.stack([part.rounding() for part in self.parts]).sum(0)

    def cleaned(self, keep: Tensor) -> Shared:
        return Shared([part.cleaned(keep) for part in self.parts])

    def widened(self) -> Shared:
        return Shared([part.widened() for part in self.parts])


def _no_wider(weights: Tensor, part: Contribution) -> Tensor:
    """Weights in float64 for gradients in float64 alone: a parameter in float32 may have been used
    in both.
    """
    return (
        weights.float()
        if weights.dtype is torch.float64 and part.dtype is not torch.float64
        else weights
    )


def merge(parts: Sequence[Contribution]) -> list[Contribution]:
    """Join uses of the same kind: sums of outer products and of rows are longer sums, direct
    gradients add.
    """
    alike: dict[tuple[object, ...], list[Contribution]] = {}
    for part in (part.resolved() for part in parts):
        alike.setdefault(part.merge_key(), []).append(part)
    groups = sorted(alike.values(), key=lambda same: same[0].merge_rank)
    return [each for same in groups for each in same[0].merged(same)]


def disjoint(parts: Sequence[Contribution]) -> bool:
    """Whether all of `parts` are views of one parameter, and no two of them touch the same entry of
    it.
    """
    if len({part.view_shape for part in parts}) > 1 or parts[0].view_shape is None:
        return False
    touched = torch.stack([part.support(torch.device("cpu")) for part in parts])
    return not bool((touched.sum(0) > 1).any())


def combine_uses(uses: Sequence[Contribution]) -> Contribution:
    """All uses of one parameter as one contribution. The cross terms are exact."""
    if len(uses) == 1:
        return uses[0]
    flat = [use.unwrapped() for use in uses]
    shape = next((use.sliced_shape for use in flat if use.sliced_shape is not None), None)
    cut = None if shape is None else [use.row_pieces(shape) for use in flat]
    if shape is None or cut is None or None in cut:
        return Shared(list(uses))
    pieces = [piece for each in cut for piece in each or ()]
    edges = sorted({row for a, b, _ in pieces for row in (a, b)})
    joined: list[Piece] = []
    for a, b in pairwise(edges):
        found = [
            part if (a, b) == (start, end) else part.row_range(a - start, b - start)
            for start, end, part in pieces
            if start <= a and b <= end
        ]
        if found:
            joined.append((a, b, found[0] if len(found) == 1 else Shared(found)))
    return _as_one(joined, shape)


def overlapping(uses: Sequence[Contribution]) -> bool:
    """Whether some row of the parameter may be used more than once."""
    if len(uses) < 2:
        return False
    used = [use.used_rows() for use in uses]
    rows = sorted(row for each in used for row in each or ())
    return None in used or any(b > c for (_, b), (c, _) in pairwise(rows))


def _as_one(pieces: list[Piece], shape: torch.Size) -> Contribution:
    """Small gradients that are held directly lie side by side, as if they had come in one."""
    stored = [part.stored_grads for _, _, part in pieces]
    direct = [grads for grads in stored if grads is not None]
    whole = sum(b - a for a, b, _ in pieces) == shape[0] and len(direct) == len(pieces)
    if whole and len(shape) == 1 and len({g.dtype for g in direct}) == 1:
        return Direct(torch.cat(direct, 1))
    return Sliced(tuple(pieces), shape)
