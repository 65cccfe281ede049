"""Contributions that share launches: norms of all layers of a shape, and gradients that are held as
they are, side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.kernels import grams, reductions
from dpfy.gradients.per_example.arithmetic import fitted, kept, put
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.direct import Direct
from dpfy.gradients.per_example.rounding import as_rows, sum_dtype

BLOCK_ROWS = 1024
"""More rows than this are added up by a product: the kernel goes through them one after another."""

JOIN_ELEMENTS = 2**22
"""Direct gradients up to this size are copied side by side; larger ones are worth their own
pass.
"""


def measure(parts: Sequence[Contribution]) -> list[tuple[Tensor, Contribution]]:
    """``measured()`` of every part, with one launch for all layers of a shape where kernels allow
    it.
    """
    if all(part.is_measured for part in parts):
        return [part.measured() for part in parts]
    blocks = [part.row_blocks() for part in parts]
    made = iter(_measure_each([block for each in blocks for block in each]))
    return [
        part.reassembled([next(made) for _ in each])
        for part, each in zip(parts, blocks, strict=True)
    ]


def _measure_each(parts: Sequence[Contribution]) -> list[tuple[Tensor, Contribution]]:
    made: dict[int, tuple[Tensor, Contribution]] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, part in enumerate(parts):
        if part.joins:
            alike.setdefault(part.norm_launch, []).append(i)
        else:
            made[i] = part.measured()
    for launch, members in alike.items():
        factors = [parts[i].norm_factors() for i in members]
        norms = _row_norms(factors) if len(launch) == 1 else _gram_norms(factors)
        made |= {i: (norm, parts[i]) for i, norm in zip(members, norms, strict=True)}
    return [made[i] for i in range(len(parts))]


def _gram_norms(factors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    left, right = zip(*factors, strict=True)
    return list(grams.gram_uppers(list(left), list(right)).unsqueeze(1).unbind(0))


def _row_norms(factors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Norms of parts with one position, all rows of all their tensors in one launch: [1, batch]
    each.
    """
    rows = [as_rows(t) for each in factors for t in each]
    squares = iter(reductions.row_squares(rows).unbind(0))
    return [
        (next(squares) * next(squares) if len(each) == 2 else next(squares))[None]
        for each in factors
    ]


class _Block:
    """Gradients that are held directly, as one launch of a kernel left them side by side."""

    def __init__(self, names: list[str], grads: Tensor) -> None:
        self.names, self.grads = names, grads  # [parameters, batch, width]

    def of(self, names: Collection[str]) -> _Block | None:
        """What belongs to `names`; itself, where that is all."""
        mine = [i for i, name in enumerate(self.names) if name in names]
        if len(mine) == len(self.names):
            return self
        return (
            _Block([self.names[i] for i in mine], torch.stack([self.grads[i] for i in mine]))
            if mine
            else None
        )

    def cleaned(self, keep: Tensor) -> _Block:
        """Rows that are not kept become zero."""
        return _Block(self.names, kept(self.grads.transpose(0, 1), keep).transpose(0, 1))


class _Small:
    """Gradients that are held directly, side by side in one matrix: one norm and one product for
    all of them.
    """

    def __init__(self, names: list[str], shapes: list[torch.Size], flat: Tensor) -> None:
        self.names, self.shapes, self.flat = names, shapes, flat

    def of(self, names: Collection[str]) -> _Small | None:
        """What belongs to `names`; itself, where that is all."""
        if all(name in names for name in self.names):
            return self
        pieces = self.flat.split([shape.numel() for shape in self.shapes], 1)
        mine = [i for i, name in enumerate(self.names) if name in names]
        own = [self.names[i] for i in mine], [self.shapes[i] for i in mine]
        return _Small(*own, torch.cat([pieces[i] for i in mine], 1)) if mine else None

    def norms(self) -> Tensor:
        """[1, batch] squared norms."""
        return Direct(self.flat).measured()[0]

    def cleaned(self, keep: Tensor) -> _Small:
        """Rows that are not kept become zero."""
        return _Small(self.names, self.shapes, Direct(self.flat).cleaned(keep).grads)

    def weighted_sum(self, weights: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One vector-matrix product, cut into the parameters."""
        total = Direct(self.flat).weighted_sum(weights)
        dtypes = {sum_dtype(params[name].dtype) for name in self.names}
        if len(dtypes) == 1:
            total = total.to(dtypes.pop())
        pieces = total.split([shape.numel() for shape in self.shapes])
        named = zip(self.names, pieces, strict=True)
        return {
            name: piece.to(sum_dtype(params[name].dtype)).view(params[name].shape)
            for name, piece in named
        }


@dataclass(frozen=True, repr=False)
class HeldGradients:
    """Gradients that are held directly, joined: `blocks` share a launch, and each of `small` is one
    matrix.
    """

    blocks: list[_Block] = field(default_factory=list)
    small: list[_Small] = field(default_factory=list)

    @classmethod
    def split(
        cls, found: Mapping[str, Contribution], members: Sequence[str]
    ) -> tuple[HeldGradients, dict[str, Contribution]]:
        """What is held directly of what `members` receive, and the other contributions."""
        blocks = _blocks(found, members)
        done = {name for block in blocks for name in block.names}
        direct: dict[str, Tensor] = {}
        for name in members:
            part = None if name in done else found[name].direct()
            if part is None:
                continue
            if _adds_well(part.grads):
                blocks.append(_Block([name], as_rows(part.grads)[None]))
                done.add(name)
            elif part.grads.numel() <= JOIN_ELEMENTS:
                direct[name] = part.grads
        others = {name: found[name] for name in members if name not in direct and name not in done}
        if not direct:
            return cls(blocks), others
        double = any(g.dtype == torch.float64 for g in direct.values())
        flat = [as_rows(g).to(torch.float64 if double else torch.float32) for g in direct.values()]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        small = _Small(list(direct), [g.shape[1:] for g in direct.values()], joined)
        return cls(blocks, [small]), others

    def __add__(self, other: HeldGradients) -> HeldGradients:
        return HeldGradients(self.blocks + other.blocks, self.small + other.small)

    def of(self, names: Collection[str]) -> HeldGradients:
        """What belongs to `names`."""
        blocks = [part for block in self.blocks if (part := block.of(names)) is not None]
        small = [own for each in self.small if (own := each.of(names)) is not None]
        return HeldGradients(blocks, small)

    def cleaned(self, keep: Tensor) -> HeldGradients:
        """Rows that are not kept become zero."""
        blocks = [block.cleaned(keep) for block in self.blocks]
        return HeldGradients(blocks, [small.cleaned(keep) for small in self.small])

    def norms(self) -> list[Tensor]:
        """[some, batch] squared norms; those of all blocks come from one launch."""
        rows = [grads for block in self.blocks for grads in block.grads.unbind(0)]
        return [small.norms() for small in self.small] + (
            [reductions.row_squares(rows)] if rows else []
        )

    def sums(
        self, weights: Tensor, params: Mapping[str, Tensor], into: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The weighted sum of every parameter, where it goes if there is a place for it."""
        sums = _block_sums(self.blocks, weights, params, into) if self.blocks else {}
        for small in self.small:
            sums |= {
                name: put(total, into.get(name))
                for name, total in small.weighted_sum(weights, params).items()
            }
        return sums


def _block_sums(
    blocks: list[_Block], weights: Tensor, params: Mapping[str, Tensor], into: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weighted sums of all blocks in one launch, where they go if they can be written there."""
    sums: dict[str, Tensor] = {}
    for name in (name for block in blocks for name in block.names):
        place = into.get(name)
        fits = place is not None and place.dtype is torch.float32 and place.is_contiguous()
        sums[name] = (
            place
            if fits and place is not None
            else params[name].new_empty(params[name].shape, dtype=torch.float32)
        )
    reductions.add_rows(
        [grads for block in blocks for grads in block.grads.unbind(0)], weights, list(sums.values())
    )
    return {
        name: made if made is into.get(name) else put(fitted(made, params[name]), into.get(name))
        for name, made in sums.items()
    }


def _adds_well(grads: Tensor) -> bool:
    """Whether the kernel that adds rows, column by column, is as fast as a product of the library's
    would be.
    """
    return grads.dtype == torch.float32 and len(grads) <= BLOCK_ROWS and kernels.usable(grads)


def _blocks(found: Mapping[str, Contribution], members: Sequence[str]) -> list[_Block]:
    """The launches of which every sum belongs to one of `members`: nothing need be copied
    together.
    """
    launches: dict[int, tuple[Tensor, dict[int, str]]] = {}
    for name in members:
        if (slot := found[name].sum_slot()) is not None:
            block, place = slot
            launches.setdefault(id(block), (block, {}))[1][place] = name
    whole = [
        (block.flatten(0, 1), names)
        for block, names in launches.values()
        if len(names) == len(block) * block.shape[1]
    ]
    return [_Block([names[i] for i in range(len(grads))], grads) for grads, names in whole]
