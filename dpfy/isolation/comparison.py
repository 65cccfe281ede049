"""Whether examples mix: the recorded operations of a step are run again with some records replaced;
nobody else's part may change.

What counts as a part is what the engine will make a contribution of: the loss, and the gradients
that come back through the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.gradients.autograd.tape import Tape
from dpfy.isolation.equality import (
    ExampleParts,
    adds_up,
    differs,
    equal,
    equal_values,
    outside,
    unsteady,
)
from dpfy.isolation.operations import (
    AS_IT_WAS,
    BATCH,
    CARRIED,
    DATA,
    Contents,
    Ref,
    Reshaped,
    Unrecordable,
    Variation,
)
from dpfy.isolation.packed_sequences import MASK, PADDED, KeptLengths
from dpfy.isolation.program import Program, Replay, run_on_others

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


def check_flow(program: Program, losses: Ref, fixed: Collection[int]) -> None:
    """Refuse losses that depend on more than batch and weights, and changes from the batch of the
    tensors whose storages lie at the addresses `fixed`.

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
    for address in fixed:
        known = program.known.get(address)
        if known is not None and program.origin.get(known[0], 0) & BATCH:
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
        found = {}
        for t, new in zip(self.batch, self.fields, strict=True):
            storage = program.ref(t).storage
            # What the program writes into is copied: other runs start from the same fields.
            found[storage] = (new.clone() if storage in program.initial else new).untyped_storage()
        return found | _only(self.rows, weights)


def _only(rows: Tensor, weights: Ref | None) -> Contents:
    """What a run starts from in which the examples of `rows` have weight 0, and the batch is what
    it was.
    """
    if weights is None:
        return {}
    return {weights.storage: torch.where(rows, 0.0, 1.0).to(weights.dtype).untyped_storage()}


def check_apart(
    program: Program,
    seen: ExampleParts,
    losses: Tensor,
    changes: Sequence[Replacement],
    variation: Variation = AS_IT_WAS,
    plain: Replay | None = None,
) -> Replay:
    """Run the program as it was and with each of `changes`, all of the same rows; refuse it if a
    part of another example differs.

    `variation` holds in all runs; without one, the first run must give `losses` again. Returns that
    run, in which the rows to be replaced have weight 0. A caller that has one already gives it as
    `plain`.

    Guarantees: raises :class:`Unsupported` where they differ (on a CPU, in a single bit), where a
    value that Python read differs and where a shape does; :class:`Unrecordable` if the program does
    not give the losses that it was recorded with.
    """
    kept = KeptLengths.of(program)
    runs = _Runs(program, seen, kept, variation)
    original = _only(changes[0].rows, seen.weights)
    plain = plain or runs.run(original)
    if not variation and not equal(plain.at(seen.losses), losses.detach(), rounding=True):
        raise Unrecordable("operations that give other losses when they are run again")
    if program.padded and differs(
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
            other = run_on_others(program, change.contents(program, None), seen.refs)
            same = other.at(seen.losses) == losses.detach()
            if bool((same | change.rows).all()):
                return
    check_apart(program, seen, losses, [change])


@dataclass(frozen=True)
class _Runs:
    """Runs of one program in one variation."""

    program: Program
    seen: ExampleParts
    kept: KeptLengths
    variation: Variation

    def run(self, contents: Contents) -> Replay:
        """Run the program; what is kept of it is what must not change."""
        return run_on_others(
            self.program, contents, [*self.seen.refs, *self.kept.refs], self.variation
        )

    def check_same(
        self, plain: Replay, original: Contents, contents: Contents, rows: Tensor
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
        if any(not equal_values(a, b) for a, b in zip(plain.reads, other.reads, strict=True)):
            raise Unsupported(READ, UNREAD)
        if differs(plain, other, seen, rows) or kept.differ(plain, other, rows):
            numbers = [*seen.gradients, *(grad for grad, _ in seen.reports)]
            steps = {} if kept.refs else unsteady(self.program, original, numbers, plain)
            if steps and not differs(plain, other, seen, rows, steps):
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
        plain, other = (Replay.start(program, start, variation) for start in (original, contents))
        with program.aside():
            for operation in program.needed(self.seen.refs):
                plain.do(operation)
                other.do(operation)
                for ref in () if "empty" in operation.name else operation.outputs:
                    if (ref.shape or ref.dtype.is_floating_point) and outside(
                        plain.at(ref) != other.at(ref), rows
                    ):
                        return f", first seen after {operation.name}"
        return ""


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


def check_sum(
    program: Program, seen: ExampleParts, rows: Tensor, mine: Replay | None = None
) -> None:
    """Refuse a backward pass over the batch in which the gradients of some examples change with
    those of others.

    What arrives at a layer for all examples must be what arrives for the examples in `rows` plus
    what arrives for the others (`mine`: the run of the batch as it was in which the examples in
    `rows` have weight 0, from :func:`check_apart` if it was made). An engine that runs backward for one example
    at a time has nothing to check here.
    """
    if not seen.reports:
        return
    refs = [grad for grad, _ in seen.reports]
    mine = mine or program.run(_only(rows, seen.weights), refs)
    theirs = program.run(_only(~rows, seen.weights), refs)
    if all(
        adds_up(whole, mine.at(ref), theirs.at(ref))
        for ref, whole in zip(refs, seen.arrived, strict=True)
    ):
        return
    all_rows = _only(torch.zeros_like(rows), seen.weights)
    again = program.run(all_rows, refs)
    steps = unsteady(program, all_rows, refs, again)
    if not steps or not all(
        adds_up(again.at(ref), mine.at(ref), theirs.at(ref), steps.get(ref)) for ref in refs
    ):
        raise Unsupported(f"{MIXED}, in the backward pass", APART)
