"""Packed sequences in a recorded step: shapes follow from the lengths of a whole batch, so it is
run again with the lengths it had.

Packing itself keeps examples apart: the rows of a packed sequence are rows of its examples, and a
recurrent layer goes through each by its own length. So what packing sees of lengths stays, and all
else that depends on them sees other lengths for the examples that are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpfy.isolation.operations import Contents, Operation, Ref, Unrecordable
from dpfy.isolation.program import Program, Replay

PACK, PAD = "_pack_padded_sequence", "_pad_packed_sequence"
"""The functions of torch that are seen here: one depends on the lengths by its shapes, one writes
lengths where no mode sees it.
"""

COPIES, PICKS, SORTS = ("_to_copy", "clone"), ("index", "index_select", "gather"), ("sort",)

OTHER = 1.5
"""A value that nobody pads with."""

PADDED = "losses that see what lies behind the end of a sequence (after pad_packed_sequence)"
MASK = "mask it before it is summed, averaged or compared: torch.where(mask, outputs, 0.0)"


@dataclass(frozen=True)
class Packed:
    """One call that packs: the lengths it was given, where the numbers of sequences at each step
    lie, all steps and the longest.
    """

    lengths: Ref
    sizes: Ref
    steps: int
    longest: int


@dataclass(frozen=True)
class Padded:
    """One call that pads: which numbers of sequences, the lengths that it gave back, and what it
    filled up with.
    """

    sizes: Ref
    lengths: Ref
    filling: Ref


def called(program: Program, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """What torch's function of this name gives, in operations that can be run again. Call it while
    `program` is recorded.
    """
    try:
        return (_pack if name == PACK else _pad)(program, func, *args, **kwargs)
    except Unrecordable as problem:
        program.problem = str(problem)
        return func(*args, **kwargs)


def _pack(
    program: Program, func: Any, data: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    mine = lengths.clone()  # a place of its own, which keeps what it holds
    rows, sizes = func(data, mine, batch_first)
    program.packed.append(Packed(program.ref(mine), program.ref(sizes), len(rows), len(sizes)))
    return rows, sizes


def _pad(
    program: Program,
    func: Any,
    data: Tensor,
    sizes: Tensor,
    batch_first: bool,
    filling: float,
    length: int,
) -> tuple[Tensor, Tensor]:
    counts = sizes.tolist()
    batch = counts[0]
    exists = torch.arange(batch) < torch.tensor([*counts, *[0] * (length - len(counts))])[:, None]
    places = exists.flatten().nonzero().squeeze(1).to(data.device)
    around = torch.full((), filling, dtype=data.dtype, device=data.device)
    whole = (
        around.expand(length * batch, *data.shape[1:])
        .index_copy(0, places, data)
        .unflatten(0, (length, batch))
    )
    lengths = exists.sum(0)
    program.padded.append(Padded(program.ref(sizes), program.ref(lengths), program.ref(around)))
    return (whole.transpose(0, 1) if batch_first else whole), lengths


@dataclass(frozen=True)
class Lengths:
    """What a call that packs sees of lengths, and where it comes from as far as that can be
    followed: the lengths of examples in their own order (`given`), in that of packing (`ordered`,
    by `order`), and the tensor that they were copied from (`field`).
    """

    packed: Packed
    given: Ref
    ordered: Ref | None = None
    order: Ref | None = None
    field: Ref | None = None

    @classmethod
    def of(cls, packed: Packed, makers: dict[int, Operation]) -> Lengths:
        """Those of one call."""
        found = cls(packed, packed.lengths)
        for operation, name in _upwards(packed.lengths.storage, makers):
            source = operation.inputs[0]
            if name in SORTS + PICKS and found.order is None:
                order = operation.outputs[1] if name in SORTS else operation.inputs[-1]
                found = replace(
                    found, given=source, ordered=operation.outputs[0], order=order, field=source
                )
            elif name in COPIES:
                found = replace(
                    found, given=source if found.order is None else found.given, field=source
                )
            else:
                return replace(found, field=None)
        return found


@dataclass(frozen=True)
class KeptLengths:
    """What packing saw of the lengths in one run of a program, to be seen by it again."""

    program: Program
    lengths: list[Lengths]

    @classmethod
    def of(cls, program: Program) -> KeptLengths:
        """For each call that packs."""
        makers = {r.storage: op for op in program.operations if not op.view for r in op.outputs}
        return cls(program, [Lengths.of(packed, makers) for packed in program.packed])

    @property
    def refs(self) -> list[Ref]:
        """What has to be kept of a run for `contents` and `differ`."""
        found = [
            r
            for one in self.lengths
            for r in (one.packed.lengths, one.given, one.ordered, one.order)
            if r is not None
        ]
        return found + [p.lengths for p in self.program.padded]

    def contents(self, plain: Replay, rows: Tensor, replaced: Contents) -> Iterator[Contents]:
        """By storage, what runs start from in which the examples of `rows` are replaced, beside
        what was `replaced`: one with lengths of those put in their place, and where there are any
        one in which they are short, so that the longest is another.
        """
        yield self._contents(plain, rows, replaced, short=False)
        if self.lengths:
            yield self._contents(plain, rows, replaced, short=True)

    def _contents(self, plain: Replay, rows: Tensor, replaced: Contents, short: bool) -> Contents:
        """Guarantees: packing sees the lengths of the run `plain`; every other use of them sees
        others in the place of those replaced.
        """
        found: Contents = {}
        for one in self.lengths:
            lengths, order = plain.at(one.packed.lengths), None
            found[one.packed.lengths.storage] = _storage(lengths)
            if one.order is not None and one.ordered is not None:
                order = plain.at(one.order)
                found[one.order.storage] = _storage(order)
                found[one.ordered.storage] = _storage(_others(plain.at(one.ordered), rows, order))
            if (
                one.field is not None
                and one.field.storage in replaced
                and _whole(one.field, replaced[one.field.storage])
            ):
                given = Replay(self.program, {one.field.storage: replaced[one.field.storage]}).at(
                    one.field
                )
                given = torch.where(rows, 1, given) if short and len(given) == len(rows) else given
                found[one.field.storage] = _storage(given.clamp(max=int(lengths.max())))
            for padded in self.program.padded:
                if padded.sizes.storage == one.packed.sizes.storage:
                    found[padded.lengths.storage] = _storage(
                        _others(plain.at(padded.lengths), rows, order)
                    )
        return found

    def differ(self, plain: Replay, other: Replay, rows: Tensor) -> bool:
        """Whether the run `other` would have packed an example that was not replaced by another
        length.
        """
        for one in self.lengths:
            mine, theirs = plain.at(one.given), other.at(one.given)
            each = rows.repeat_interleave(len(mine) // len(rows)).to(mine.device)
            if len(each) != len(mine) or not torch.equal(mine[~each], theirs[~each]):
                return True
        return False

    def filled(self) -> Contents:
        """Something else behind the ends of sequences that were padded."""
        fillings = [p.filling for p in self.program.padded]
        return {
            r.storage: torch.full((), OTHER, dtype=r.dtype, device=r.device).untyped_storage()
            for r in fillings
        }


def _upwards(storage: int, makers: dict[int, Operation]) -> Iterator[tuple[Operation, str]]:
    while (operation := makers.get(storage)) is not None:
        yield operation, str(operation.call).removeprefix("aten.").partition(".")[0]
        storage = operation.inputs[0].storage if operation.inputs else -1


def _others(lengths: Tensor, rows: Tensor, order: Tensor | None) -> Tensor:
    """`lengths`, with others from 1 to the longest for the examples of `rows`; `order` says which
    example stands where.
    """
    if len(lengths) % len(rows):
        return lengths
    each = rows.repeat_interleave(len(lengths) // len(rows)).to(lengths.device)
    moved = each if order is None else each[order.to(lengths.device)]
    return torch.where(moved, lengths % lengths.max() + 1, lengths)


def _whole(ref: Ref, storage: torch.UntypedStorage) -> bool:
    """Whether `ref` is a row of numbers and all of its storage."""
    return (
        len(ref.shape) == 1
        and ref.stride == (1,)
        and storage.nbytes() == ref.shape[0] * ref.dtype.itemsize
    )


def _storage(t: Tensor) -> torch.UntypedStorage:
    return t.contiguous().clone().untyped_storage()
