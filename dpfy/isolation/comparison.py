"""Whether examples mix: the recorded operations of a step are run again with some records replaced;
nobody else's part may change.

What counts as a part is what the engine will make a contribution of: the loss, and the gradients
that come back through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.gradients.autograd.tape import Tape
from dpfy.gradients.per_example.rounding import of_factors
from dpfy.isolation.packed_sequences import MASK, PADDED, KeptLengths
from dpfy.isolation.program import (
    AS_IT_WAS,
    BATCH,
    CARRIED,
    DATA,
    Contents,
    Memory,
    Program,
    Ref,
    Reshaped,
    Unrecordable,
    Variation,
    behind_attention,
)

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

RESHAPED = (
    "keep every row and mask what does not count (torch.where); experts of transformers do with "
    'model.set_experts_implementation("batched_mm")'
)
APART = (
    "return one loss per unit computed from that unit alone; no batch statistics, no contrast "
    "between examples"
)
MIXED = "losses that mix examples (the loss of one example depends on another example)"
READ = "values of the batch that Python reads before step (item, tolist, numpy, a truth test)"
UNREAD = (
    "use tensor operations, example by example; read values after step, and publish none of them"
)


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


def observe(
    program: Program, losses: Tensor, weights: Tensor, engine: Any, params: Sequence[nn.Parameter]
) -> ExampleParts:
    """Run backward as the engine will, with `weights` for the losses; the graph is kept. Call it
    while `program` is recorded.
    """
    sums = getattr(engine, "sums", None)
    tape = getattr(sums, "tape", None)
    reports: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    targets: list[Tensor] = list(params)
    if isinstance(tape, Tape):
        targets.append(tape.anchor)
        with tape.into(lambda report: reports.append((report.grad, report.saved))):
            grads = _gradients(losses, targets, weights)
    else:
        grads = _gradients(losses, targets, weights)
    dense = [g.to_dense() if g.is_sparse else g for g in grads if g is not None]
    return ExampleParts(
        program.ref(weights),
        program.ref(losses),
        [program.ref(g) for g in dense],
        [(program.ref(g), [program.ref(t) for t in saved]) for g, saved in reports],
        [g for g, _ in reports],
    )


def _gradients(losses: Tensor, targets: list[Tensor], weights: Tensor) -> tuple[Tensor | None, ...]:
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(losses, targets, weights, retain_graph=True, allow_unused=True)


def check_flow(program: Program, losses: Ref, fixed: Sequence[Tensor]) -> None:
    """Refuse losses that depend on more than batch and weights, and changes of the `fixed` tensors
    from the batch.

    Guarantees: raises :class:`Unsupported` if a value that an earlier recorded step left behind, or
    the training records beside the batch, reach the losses by any operation; or if a parameter or
    buffer was written from the batch.
    """
    reached = program.origin.get(losses.storage, 0)
    if reached & CARRIED:
        what = (
            "losses that depend on tensors which an earlier step left behind (running statistics, "
            "queues, caches)"
        )
        raise Unsupported(what, "compute every loss from its example and the weights alone")
    if reached & DATA:
        raise Unsupported(
            "losses that read the training records beside the batch",
            "use the rows of the batch only",
        )
    mine = {t.untyped_storage()._cdata for t in fixed}
    for storage, address in ((index, key) for key, (index, _) in program.known.items()):
        if address in mine and program.origin.get(storage, 0) & BATCH:
            what = "a parameter or buffer that the forward pass changes from the batch"
            raise Unsupported(what, "it would carry data without noise: remove or freeze it")
    if not reached & BATCH:
        raise Unrecordable("losses that do not come from the batch by operations that were seen")


@dataclass(frozen=True)
class Replacement:
    """The batch's fields with the rows where `rows` is True replaced by other records."""

    batch: Sequence[Tensor]
    fields: Sequence[Tensor]
    rows: Tensor

    def contents(self, program: Program, weights: Ref | None) -> Contents:
        """By storage, what a run of the program with the replaced records starts from; the replaced
        have weight 0.
        """
        found = {
            program.ref(t).storage: new.clone()
            for t, new in zip(self.batch, self.fields, strict=True)
        }
        if weights is not None:
            found[weights.storage] = torch.where(self.rows, 0.0, 1.0).to(weights.dtype)
        return {storage: t.untyped_storage() for storage, t in found.items()}

    def original(self, program: Program, weights: Ref | None) -> Contents:
        """The same without the replacement."""
        return Replacement(self.batch, self.batch, self.rows).contents(program, weights)


def check_apart(
    program: Program,
    seen: ExampleParts,
    losses: Tensor,
    changes: Sequence[Replacement],
    variation: Variation = AS_IT_WAS,
) -> Memory:
    """Run the program as it was and with each of `changes`, all of the same rows; refuse it if a
    part of another example differs.

    `variation` holds in all runs; without one, the first run must give `losses` again. Returns that
    run, in which the rows to be replaced have weight 0.

    Guarantees: raises :class:`Unsupported` where they differ (on a CPU, in a single bit), where a
    value that Python read differs and where a shape does; :class:`Unrecordable` if the program does
    not give the losses that it was recorded with.
    """
    kept = KeptLengths.of(program)
    runs = _Runs(program, seen, kept, variation)
    original = changes[0].original(program, seen.weights)
    plain = runs.run(original)
    if not variation and not _equal(plain.at(seen.losses), losses.detach(), rounding=True):
        raise Unrecordable("operations that give other losses when they are run again")
    if program.padded and _differs(
        plain, runs.run(original | kept.filled()), seen, torch.zeros_like(changes[0].rows)
    ):
        raise Unsupported(PADDED, MASK)
    for changed in changes:
        contents = changed.contents(program, seen.weights)
        for packed in kept.contents(plain, changed.rows, contents):
            runs.check_same(plain, original, contents | packed, changed.rows)
    return plain


def check_losses(program: Program, seen: ExampleParts, losses: Tensor, change: Replacement) -> None:
    """The same for the losses alone, in one run: what was recorded is what they must be. Only if
    they are not is the step run again too.
    """
    simple = (
        not program.packed
        and not program.padded
        and not any(o.read or o.shaped for o in program.operations)
    )
    if simple:
        with suppress(Reshaped):
            other = _run(program, change.contents(program, None), seen.refs)
            if torch.equal(other.at(seen.losses)[~change.rows], losses.detach()[~change.rows]):
                return
    check_apart(program, seen, losses, [change])


@dataclass(frozen=True)
class _Runs:
    """Runs of one program in one variation."""

    program: Program
    seen: ExampleParts
    kept: KeptLengths
    variation: Variation

    def run(self, contents: Contents) -> Memory:
        """Run the program; what is kept of it is what must not change."""
        return _run(self.program, contents, [*self.seen.refs, *self.kept.refs], self.variation)

    def check_same(
        self, plain: Memory, original: Contents, contents: Contents, rows: Tensor
    ) -> None:
        """Run the program from `contents`; refuse it where a part of an example that is not in
        `rows` differs from `plain`.
        """
        seen, kept = self.seen, self.kept
        try:
            other = self.run(contents)
        except Reshaped as problem:
            what = f"a step whose shapes depend on the values of the batch ({problem})"
            raise Unsupported(what, RESHAPED) from None
        if any(not _equal_values(a, b) for a, b in zip(plain.reads, other.reads, strict=True)):
            raise Unsupported(READ, UNREAD)
        if _differs(plain, other, seen, rows) or kept.differ(plain, other, rows):
            numbers = [*seen.gradients, *(grad for grad, _ in seen.reports)]
            steps = {} if kept.refs else _unsteady(self.program, original, numbers, plain)
            if steps and not _differs(plain, other, seen, rows, steps):
                return
            raise Unsupported(f"{MIXED}{self._culprit(original, contents, rows)}", APART)

    def _culprit(self, original: Contents, contents: Contents, rows: Tensor) -> str:
        """The first operation after which rows that were not replaced differ, in words; nothing if
        there is none to be found.

        Packed sequences lie in an order of their own, in which rows cannot be told.
        """
        program, variation = self.program, self.variation
        if program.packed:
            return ""
        plain, other = (Memory.start(program, start, variation) for start in (original, contents))
        with program.aside():
            for operation in program.needed(self.seen.refs):
                plain.do(operation)
                other.do(operation)
                for ref in () if "empty" in operation.name else operation.outputs:
                    if (ref.shape or ref.dtype.is_floating_point) and _outside(
                        plain.at(ref) != other.at(ref), rows
                    ):
                        return f", first seen after {operation.name}"
        return ""


def _run(
    program: Program, contents: Contents, keep: list[Ref], variation: Variation = AS_IT_WAS
) -> Memory:
    """Run the program; an operation that fails, which tells nothing about mixing, makes it one that
    cannot be run again.
    """
    try:
        return program.run(contents, keep, variation)
    except (RuntimeError, IndexError, ValueError, TypeError) as problem:
        # Its message may hold values of records.
        raise Unrecordable(
            f"operations that fail on other records, {type(problem).__name__}"
        ) from None


def codes(program: Program) -> bool:
    """Whether real numbers of the batch are turned into whole ones, which may be places in a
    table.
    """
    return any(
        operation.name == "_to_copy"
        and operation.inputs[0].dtype.is_floating_point
        and not operation.outputs[0].dtype.is_floating_point
        and program.origin.get(operation.inputs[0].storage, 0) & BATCH
        for operation in program.operations
    )


def check_sum(program: Program, seen: ExampleParts, changed: Replacement, mine: Memory) -> None:
    """Refuse a backward pass over the batch in which the gradients of some examples change with
    those of others.

    What arrives at a layer for all examples must be what arrives for the examples of `changed` plus
    what arrives for the others (`mine`: the run of the batch as it was in which the examples of
    `changed` have weight 0, from :func:`check_apart`). An engine that runs backward for one example
    at a time has nothing to check here.
    """
    if not seen.reports:
        return
    refs = [grad for grad, _ in seen.reports]
    others = Replacement(changed.batch, changed.batch, ~changed.rows)
    theirs = program.run(others.contents(program, seen.weights), refs)
    if all(
        _adds_up(whole, mine.at(ref), theirs.at(ref))
        for ref, whole in zip(refs, seen.arrived, strict=True)
    ):
        return
    combine_uses = Replacement(
        changed.batch, changed.batch, torch.zeros_like(changed.rows)
    ).contents(program, seen.weights)
    again = program.run(combine_uses, refs)
    steps = _unsteady(program, combine_uses, refs, again)
    if not steps or not all(
        _adds_up(again.at(ref), mine.at(ref), theirs.at(ref), steps.get(ref)) for ref in refs
    ):
        raise Unsupported(f"{MIXED}, in the backward pass", APART)


def _unsteady(
    program: Program, contents: Contents, refs: Sequence[Ref], plain: Memory
) -> dict[Ref, Tensor]:
    """How far the numbers at `refs` move by themselves, row by row, where a GPU adds in any order;
    nothing if equal runs are equal.

    Mixing as small as that cannot be told from it: only numbers that do move by themselves,
    measured here, are given that room. Behind attention a tile moves by its last bits once in many
    runs: numbers of a program with its backward pass have the room of these bits.
    """
    if any(ref.device.type in EXACT for ref in refs):
        return {}
    found = {ref: torch.zeros_like(plain.at(ref)) for ref in refs if ref.dtype.is_floating_point}
    for _ in range(REPEATS):
        again = _run(program, contents, list(refs))
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


def _adds_up(whole: Tensor, a: Tensor, b: Tensor, room: Tensor | None = None) -> bool:
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


def _differs(
    plain: Memory,
    other: Memory,
    seen: ExampleParts,
    rows: Tensor,
    room: dict[Ref, Tensor] | None = None,
) -> bool:
    """Whether anything that belongs to the rows that were not replaced changed; gradients by more
    than their `room`, if they have one.
    """
    room = room or {}
    if not _equal(plain.at(seen.losses)[~rows], other.at(seen.losses)[~rows]):
        return True
    for g in seen.gradients:
        near = g.device.type != "cpu" or _unordered(plain)
        if not _equal(plain.at(g), other.at(g), rounding=near, finite=True, room=room.get(g)):
            return True
    return any(
        _report_differs(plain, other, grad, saved, room.get(grad)) for grad, saved in seen.reports
    )


def _unordered(memory: Memory) -> bool:
    return any(operation.name in UNORDERED for operation in memory.program.operations)


def _report_differs(
    plain: Memory, other: Memory, grad: Ref, saved: Sequence[Ref], room: Tensor | None
) -> bool:
    """What arrives at a layer must be the same everywhere, and meet a changed input nowhere."""
    mine, theirs = plain.at(grad), other.at(grad)
    if not _equal(mine, theirs, finite=True, room=room):
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


def _equal(
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


def _equal_values(a: Any, b: Any) -> bool:
    return _equal(a, b) if isinstance(a, Tensor) else bool(a == b or (a != a and b != b))


def _outside(differs: Tensor, rows: Tensor) -> bool:
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
