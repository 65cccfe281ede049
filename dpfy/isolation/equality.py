"""Whether what belongs to the examples that were not replaced is the same in two runs of a program:
to the last bit, or as far as the same work gives the same numbers on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.per_example.rounding import of_factors
from dpfy.isolation.operations import Contents, Ref, behind_attention
from dpfy.isolation.program import Program, Replay, run_on_others

UNORDERED = {
    "_embedding_bag_backward",
    "embedding_dense_backward",
    "_index_put_impl_",
    "_unsafe_index_put",
} | {
    name + end
    for name in ("index_put", "index_add", "scatter_add", "scatter_reduce", "put")
    for end in ("", "_")
}
"""Operations whose sums go by the order of indices, so that gradients of weight zero in between may
change the rounding.
"""

EXACT = ("cpu",)
"""Devices on which the same work gives the same bits. Elsewhere kernels may add in any order."""
REPEATS, UNSTEADY = 3, 16.0
"""Elsewhere: runs of the same work that show how far its numbers move by themselves, and how many
times as far is still taken for that.
"""


@dataclass(frozen=True)
class ExampleParts:
    """What must not change: losses, gradients of parameters, and what arrived at layers (gradient,
    saved tensors).

    The gradients are those of the losses weighted by `weights`, all of them 1 when the program was
    recorded; `arrived` is what the layers got then.
    """

    weights: Ref | None
    losses: Ref
    gradients: list[Ref]
    reports: list[tuple[Ref, list[Ref]]]
    arrived: list[Tensor]

    @property
    def refs(self) -> list[Ref]:
        """All of it."""
        saved = [r for grad, saved in self.reports for r in (grad, *saved)]
        return [
            *([] if self.weights is None else [self.weights]),
            self.losses,
            *self.gradients,
            *saved,
        ]

    @classmethod
    def forward(cls, program: Program, losses: Tensor) -> ExampleParts:
        """The losses alone, without a backward pass."""
        return cls(None, program.ref(losses), [], [], [])


def unsteady(
    program: Program, contents: Contents, refs: Sequence[Ref], plain: Replay
) -> dict[Ref, Tensor]:
    """How far the numbers at `refs` move by themselves, row by row, where a GPU adds in any order;
    nothing if equal runs are equal.

    Mixing as small as that cannot be distinguished from it: only numbers that do move by themselves,
    measured here, are given that room. Behind attention a tile moves by its last bits once in many
    runs: numbers of a program with its backward pass have the room of these bits.
    """
    if any(ref.device.type in EXACT for ref in refs):
        return {}
    found = {ref: torch.zeros_like(plain.at(ref)) for ref in refs if ref.dtype.is_floating_point}
    for _ in range(REPEATS):
        again = run_on_others(program, contents, list(refs))
        for ref, most in found.items():
            torch.maximum(
                most, (again.at(ref) - plain.at(ref)).abs().nan_to_num(0.0, 0.0, 0.0), out=most
            )
    rare = any(map(behind_attention, program.operations))
    return {
        ref: _room(most, plain.at(ref)) for ref, most in found.items() if rare or bool(most.any())
    }


def _room(most: Tensor, values: Tensor) -> Tensor:
    """For every number, by the row it lies in: some times what was seen to move there, and the last
    bits of its largest.

    Where products may round their factors to TF32, the last bit of a number can move what is made
    of it by a bit of that.
    """
    size = values.abs().nan_to_num(0.0, 0.0, 0.0)
    along = (lambda t: t.amax(-1, keepdim=True)) if most.dim() else (lambda t: t)
    bits = 64 * torch.finfo(values.dtype).eps + 2 * of_factors(values.dtype, values.device)
    return (UNSTEADY * along(most) + bits * along(size)).expand_as(values)


def adds_up(whole: Tensor, a: Tensor, b: Tensor, room: Tensor | None = None) -> bool:
    """Exactly where one part is zero, as where examples lie in rows; else, where they were summed
    already, up to rounding.

    With `room`, up to that everywhere.
    """
    finite = whole.isfinite() & a.isfinite() & b.isfinite()
    apart = (a == 0) | (b == 0)
    size = torch.where(finite, whole, 0.0).abs().amax() if whole.numel() else whole.new_zeros(())
    near = (a + b - whole).abs() <= 64 * torch.finfo(whole.dtype).eps * size
    exact = torch.where(apart, a + b == whole, near)
    return bool(
        (~finite | (exact if room is None else exact | ((a + b - whole).abs() <= room))).all()
    )


def differs(
    plain: Replay,
    other: Replay,
    seen: ExampleParts,
    rows: Tensor,
    room: dict[Ref, Tensor] | None = None,
) -> bool:
    """Whether anything that belongs to the rows that were not replaced changed; gradients by more
    than their `room`, if they have one.
    """
    room = room or {}
    if not equal(plain.at(seen.losses)[~rows], other.at(seen.losses)[~rows]):
        return True
    for g in seen.gradients:
        near = g.device.type != "cpu" or _unordered(plain)
        if not equal(plain.at(g), other.at(g), rounding=near, finite=True, room=room.get(g)):
            return True
    return any(
        _report_differs(plain, other, grad, saved, room.get(grad)) for grad, saved in seen.reports
    )


def _unordered(memory: Replay) -> bool:
    return any(operation.name in UNORDERED for operation in memory.program.operations)


def _report_differs(
    plain: Replay, other: Replay, grad: Ref, saved: Sequence[Ref], room: Tensor | None
) -> bool:
    """What arrives at a layer must be the same everywhere, and meet a changed input nowhere."""
    mine, theirs = plain.at(grad), other.at(grad)
    if not equal(mine, theirs, finite=True, room=room):
        return True
    mine = mine.nan_to_num(0.0, 0.0, 0.0)
    for ref in saved:
        common = 0
        for a, b in zip(ref.shape, grad.shape, strict=False):
            if a != b:
                break
            common += 1
        if common:
            arrived = _any_after(mine != 0, common)
            moved = _any_after(plain.at(ref) != other.at(ref), common)
            if bool((arrived & moved).any()):
                return True
    return False


def _any_after(t: Tensor, dims: int) -> Tensor:
    return t if t.dim() == dims else t.flatten(dims).any(-1)


def equal(
    a: Tensor, b: Tensor, rounding: bool = False, finite: bool = False, room: Tensor | None = None
) -> bool:
    """Equal, NaN to NaN; with `rounding`, up to what another order of summation may do, with
    `room`, up to that; with `finite`, where both are finite.

    Weight zero times an infinite gradient is NaN, which spoils sums and says nothing about who
    depends on whom.
    """
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    same = (a == b) | (a.isnan() & b.isnan())
    if finite:
        same |= ~(a.isfinite() & b.isfinite())
    if room is not None:
        same |= (a - b).abs() <= room
    if not rounding:
        return bool(same.all())
    size = a.abs().masked_fill(~a.isfinite(), 0.0).amax()
    return bool((same | ((a - b).abs() <= 64 * torch.finfo(a.dtype).eps * size)).all())


def equal_values(a: Any, b: Any) -> bool:
    return equal(a, b) if isinstance(a, Tensor) else bool(a == b or (a != a and b != b))


def outside(differs: Tensor, rows: Tensor) -> bool:
    """Whether elements differ that lie in the replaced rows of no dimension."""
    if not bool(differs.any()):
        return False
    batch = len(rows)
    for dim, size in enumerate(differs.shape):
        if size % batch == 0:
            flat = differs.movedim(dim, 0).reshape(size, -1).any(1)
            for folded in (rows.repeat_interleave(size // batch), rows.repeat(size // batch)):
                if not bool((flat & ~folded).any()):
                    return False
    return True
