"""All uses of one parameter, as one contribution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from dpfy.gradients.per_example.contribution import Contribution, Deferred, Direct
from dpfy.gradients.per_example.outer import Outer
from dpfy.gradients.per_example.shared import MeasuredContribution, Shared
from dpfy.gradients.per_example.sliced import Piece, Sliced


def combine_uses(uses: Sequence[Contribution]) -> Contribution:
    """All uses of one parameter as one contribution. The cross terms are exact."""
    if len(uses) == 1:
        return uses[0]
    flat = [_unwrapped(use) for use in uses]
    shape = next((use.shape for use in flat if isinstance(use, Sliced)), None)
    cut = None if shape is None else [_cut(use, shape) for use in flat]
    if shape is None or cut is None or None in cut:
        return Shared(list(uses))
    pieces = [piece for each in cut for piece in each or ()]
    edges = sorted({row for a, b, _ in pieces for row in (a, b)})
    joined: list[Piece] = []
    for a, b in pairwise(edges):
        found = [
            _narrowed(part, start, a, b, end)
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
    flat = [use.rest if isinstance(use, MeasuredContribution) else use for use in uses]
    rows = sorted((a, b) for use in flat if isinstance(use, Sliced) for a, b, _ in use.pieces)
    return not all(isinstance(use, Sliced) for use in flat) or any(
        b > c for (_, b), (c, _) in pairwise(rows)
    )


def _unwrapped(use: Contribution) -> Contribution:
    """Measured rows as rows that are measured."""
    if (
        isinstance(use, MeasuredContribution)
        and isinstance(use.rest, Sliced)
        and len(use.rest.pieces) == 1
    ):
        return use.rest.of([MeasuredContribution(use.norms, use.rest.parts[0])])
    return use


def _cut(use: Contribution, shape: torch.Size) -> tuple[Piece, ...] | None:
    """The pieces of `use`; None if it is of a kind that cannot be cut."""
    if isinstance(use, Sliced):
        return use.pieces
    inner = use.rest if isinstance(use, MeasuredContribution) else use
    return ((0, shape[0], use),) if isinstance(inner, Outer | Direct | Deferred) else None


def _narrowed(part: Contribution, start: int, a: int, b: int, end: int) -> Contribution:
    """Rows a to b of a part that holds the rows from `start` to `end`."""
    if (a, b) == (start, end):
        return part
    inner = (
        part.rest
        if isinstance(part, MeasuredContribution)
        else part.direct()
        if isinstance(part, Deferred)
        else part
    )
    if isinstance(inner, Outer):
        return Outer(inner.left[..., a - start : b - start].contiguous(), inner.right)
    assert isinstance(inner, Direct)
    return Direct(inner.grads[:, a - start : b - start])


def _as_one(pieces: list[Piece], shape: torch.Size) -> Contribution:
    """Small gradients that are held directly lie side by side, as if they had come in one."""
    direct = [part.grads for _, _, part in pieces if isinstance(part, Direct)]
    whole = sum(b - a for a, b, _ in pieces) == shape[0] and len(direct) == len(pieces)
    if whole and len(shape) == 1 and len({g.dtype for g in direct}) == 1:
        return Direct(torch.cat(direct, 1))
    return Sliced(tuple(pieces), shape)
