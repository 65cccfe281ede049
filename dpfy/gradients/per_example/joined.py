"""What contributions share: launches for sums over positions and for norms of all layers of a shape,
and memory in which gradients and sums lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.engine import Grads
from dpfy.gradients.kernels import grams, reductions
from dpfy.gradients.per_example.arithmetic import fitted, kept, put
from dpfy.gradients.per_example.contribution import Contribution, Piece
from dpfy.gradients.per_example.outer import Direct
from dpfy.gradients.per_example.rounding import as_rows, sum_dtype


@dataclass(eq=False)
class SumJob:
    """Sums over positions that are not made yet, so that many layers can share one launch. See
    ``reductions.position_sums``.
    """

    layer: tuple[Tensor, ...] | None
    block: Tensor | None = (
        None  # [layers, kinds of sums, batch, width], for all layers of the launch
    )
    place: int = 0

    def result(self) -> Tensor:
        """The block of sums, made now if it was not."""
        if self.block is None:
            run_jobs([self])
        assert self.block is not None
        return self.block


def run_jobs(jobs: Sequence[SumJob]) -> None:
    """Make the sums of all jobs that wait, one launch for each shape, and let go of their
    tensors.
    """
    alike: dict[tuple[object, ...], list[SumJob]] = {}
    for job in jobs:
        if job.layer is not None:
            alike.setdefault(
                (job.layer[0].shape, job.layer[0].dtype, job.layer[-1].dtype, len(job.layer)), []
            ).append(job)
    for group in alike.values():
        block = reductions.position_sums([job.layer for job in group if job.layer is not None])
        for place, job in enumerate(group):
            job.block, job.place, job.layer = block, place, None


@dataclass(frozen=True)
class Deferred(Contribution):
    """A direct contribution whose sums wait in a job. `which`: 0 for a shift (bias), 1 for a
    scale.
    """

    job: SumJob
    which: int
    shape: torch.Size

    @property
    def batch(self) -> int:
        return self.direct().batch

    @property
    def width(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def direct(self) -> Direct:
        """The gradients themselves."""
        grads = self.job.result()[self.job.place, self.which]
        return Direct(grads.view(len(grads), *self.shape))

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.direct().measured()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.direct().weighted_sum(weights)

    def per_example(self, rows: slice) -> Tensor:
        return self.direct().per_example(rows)

    def rounding(self) -> Tensor:
        return self.direct().rounding()

    def cleaned(self, keep: Tensor) -> Direct:
        return self.direct().cleaned(keep)

    @property
    def sum_job(self) -> SumJob:
        return self.job

    def sum_slot(self) -> tuple[Tensor, int]:
        block = self.job.result()
        return block, self.job.place * block.shape[1] + self.which

    @property
    def waits(self) -> bool:
        return True

    def resolved(self) -> Direct:
        return self.direct()

    def row_pieces(self, shape: torch.Size) -> tuple[Piece, ...]:
        return ((0, shape[0], self),)

    def row_range(self, start: int, end: int) -> Direct:
        return self.direct().row_range(start, end)


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
