"""A program: every operation that ran between two points, as torch's dispatcher saw it, to be run
again on other inputs.

Tensors are known by where they lie: storage, offset, shape and strides. Views, detached tensors and
changes in place then need no rules of their own: running the program again is running its
operations on another piece of memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpfy.gradients.engine import no_autocast
from dpfy.isolation.operations import (
    AS_IT_WAS,
    CARRIED,
    SCRATCH,
    Contents,
    Operation,
    Ref,
    Reshaped,
    Unrecordable,
    Variation,
    behind_attention,
    filled,
    outputs_in,
)


@dataclass
class Program:
    """Operations in order. `outside` are the storages that existed before, `initial` what those
    that were changed held.

    `of_python` are those that hold numbers of Python or NumPy. `packed` and `padded` are the calls
    that pack sequences and that pad packed ones (packed_sequences.py).
    """

    operations: list[Operation] = field(default_factory=list)
    outside: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    initial: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    origin: dict[int, int] = field(default_factory=dict)
    known: dict[int, tuple[int, StorageWeakRef]] = field(default_factory=dict)
    carried: dict[int, StorageWeakRef] = field(default_factory=dict)
    of_python: set[int] = field(default_factory=set)
    problem: str | None = None
    packed: list[Any] = field(default_factory=list)
    padded: list[Any] = field(default_factory=list)
    _work: dict[object, tuple[list[Operation], dict[int, list[int]]]] = field(default_factory=dict)
    _around: tuple[int, list[torch.Generator], set[str]] = (0, [], set())

    def ref(self, t: Tensor) -> Ref:
        """Where `t` lies; a storage that was never seen is one from outside."""
        storage = _storage_of(t)
        entry = self.known.get(storage._cdata)
        if entry is None:
            index = self._add(storage)
            self.outside[index] = storage
            if storage._cdata in self.carried:
                self.origin[index] = CARRIED
            if t.grad_fn is not None:
                raise Unrecordable(f"a tensor with a graph that was not seen ({t.grad_fn.name()})")
        else:
            index = entry[0]
        return _ref(index, t)

    def made(self, t: Tensor) -> Ref:
        """Where a tensor lies that an operation has just returned."""
        storage = _storage_of(t)
        entry = self.known.get(storage._cdata)
        return _ref(self._add(storage) if entry is None else entry[0], t)

    def mark(self, tensors: Sequence[Tensor], origin: int) -> None:
        """Say where the values of `tensors` come from."""
        for t in tensors:
            index = self.ref(t).storage
            self.origin[index] = self.origin.get(index, 0) | origin

    def _add(self, storage: torch.UntypedStorage) -> int:
        # While the weak reference is held no other storage can have this address.
        index = len(self.known)
        self.known[storage._cdata] = (index, StorageWeakRef(storage))
        return index

    def alive(self, origin: int) -> dict[int, StorageWeakRef]:
        """By address, the storages with values from `origin` that somebody still holds."""
        return {
            address: weak
            for address, (index, weak) in self.known.items()
            if self.origin.get(index, 0) & origin and not weak.expired()
        }

    @property
    def held_bytes(self) -> int:
        """How much memory the storages take that its operations made and somebody still holds."""
        made = (
            torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            for index, weak in self.known.values()
            if index not in self.outside
        )
        return sum(storage.nbytes() for storage in made if storage is not None)

    def from_elsewhere(self, losses: Ref, known: Collection[int]) -> dict[int, StorageWeakRef]:
        """By address, the storages that the losses come from and no operation here made; not those
        that are `known`, by address.

        What Python's numbers were put into is not among them.
        """
        needed = {r.storage for o in self.needed([losses]) for r in o.inputs} - self.of_python
        return {
            address: weak
            for address, (index, weak) in self.known.items()
            if index in self.outside
            and index in needed
            and address not in known
            and not self.origin.get(index, 0)
        }

    def run(
        self, replaced: Contents, keep: Sequence[Ref], variation: Variation = AS_IT_WAS
    ) -> Replay:
        """Run the operations again with other contents in some of the storages from outside, and in
        a `variation` of the step.

        Guarantees: nothing that the program was recorded from is changed, torch's generators
        included. Random operations draw what they drew.
        """
        kept = frozenset([ref.storage for ref in keep])
        key = kept, len(self.operations)
        if key not in self._work:
            needed = self.needed(keep)
            self._work[key] = needed, _last_uses(needed, kept)
        memory, (work, last) = Replay.start(self, replaced, variation), self._work[key]
        with self.aside():
            for position, operation in enumerate(work):
                memory.do(operation)
                memory.forget(last.get(position, ()))
        return memory

    def needed(self, keep: Sequence[Ref]) -> list[Operation]:
        """The operations, in order, that the content of `keep`, a value that was read or a shape
        made by values comes from.
        """
        wanted, found = {ref.storage for ref in keep}, []
        for operation in reversed(self.operations):
            if operation.view:
                continue
            if (
                operation.read
                or operation.shaped
                or any(r.storage in wanted for r in (*operation.outputs, *operation.written))
            ):
                wanted.update(r.storage for r in operation.inputs)
                found.append(operation)
        return found[::-1]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a run of the operations: no graph, no autocast, and the generators they use are
        put back.
        """
        if self._around[0] != len(self.operations):
            generators = {
                id(o.random[0]): o.random[0] for o in self.operations if o.random is not None
            }
            devices = {ref.device.type for o in self.operations for ref in o.outputs[:1]}
            self._around = len(self.operations), list(generators.values()), devices
        _, used, devices = self._around
        states = [(g, g.get_state()) for g in used]
        try:
            with torch.no_grad(), ExitStack() as stack:
                for device in devices:
                    stack.enter_context(no_autocast(device))
                yield
        finally:
            for generator, state in states:
                generator.set_state(state)


@dataclass
class Replay:
    """The storages of one run of a program, and what Python would have read on the way."""

    program: Program
    storages: Contents
    variation: Variation = AS_IT_WAS
    tensors: dict[int, dict[Ref, Tensor]] = field(default_factory=dict)
    reads: list[Any] = field(default_factory=list)
    draws: int = 0

    @classmethod
    def start(cls, program: Program, replaced: Contents, variation: Variation) -> Replay:
        """What a run in a `variation` starts from. What operations write in place is its own."""
        moved = {
            index: s.clone() if index in program.initial else s
            for index, s in variation.contents.items()
        }
        return cls(program, moved | replaced, variation)

    def at(self, ref: Ref) -> Tensor:
        """The tensor that lies at `ref`."""
        views = self.tensors.setdefault(ref.storage, {})
        found = views.get(ref)
        if found is None:
            empty = torch.empty(0, dtype=ref.dtype, device=ref.device)
            found = views[ref] = empty.set_(
                self._storage(ref.storage), ref.offset, ref.shape, ref.stride
            )  # type: ignore[arg-type]
        return found

    def _storage(self, index: int) -> torch.UntypedStorage:
        storage = self.storages.get(index)
        if storage is None:
            first = self.program.initial.get(index)
            source = self.program.outside.get(index)
            if first is None and source is None:
                raise Unrecordable("a tensor whose content was not seen")
            storage = self.storages[index] = cast(
                torch.UntypedStorage, source if first is None else first.clone()
            )
        return storage

    def do(self, operation: Operation) -> None:
        """Run one operation here."""
        args, kwargs = filled(
            self.variation.arguments.get(id(operation), operation.arguments), self.at
        )
        if operation.random is not None:
            generator, state = operation.random
            if self.variation.seed is None:
                generator.set_state(state)
            else:
                self.draws += 1
                generator.manual_seed(self.variation.seed + self.draws)
        torch._C._set_grad_enabled(
            operation.graph
        )  # nothing here wants a gradient, but some operations keep more with it
        result = _called(operation, args, kwargs)
        if operation.read:
            self.reads.append(result)
            return
        free = operation.call in SCRATCH
        for ref, t in zip(operation.outputs, outputs_in(result), strict=True):
            if ref.storage in self.storages:
                continue
            if (
                not (free and ref is not operation.outputs[0])
                and (t.storage_offset(), t.shape, t.stride(), t.dtype) != ref.layout
            ):
                raise Reshaped(str(operation.call))  # not the sizes: they count records
            self.storages[ref.storage] = t.untyped_storage()
            self.tensors.setdefault(ref.storage, {})[ref] = t

    def forget(self, storages: Sequence[int]) -> None:
        """Free what is not needed any more."""
        for index in storages:
            self.storages.pop(index, None)
            self.tensors.pop(index, None)


def _called(operation: Operation, args: Any, kwargs: Any) -> Any:
    """What the operation gives. The backward pass of attention adds in a fixed order, where torch
    can.
    """
    if behind_attention(operation) and not torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return operation.call(*args, **kwargs)
        except RuntimeError:
            pass  # not this kernel
        finally:
            torch.use_deterministic_algorithms(False, warn_only=warns)
    return operation.call(*args, **kwargs)


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where the storages of tensors lie, of those that have one."""
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}


def run_on_others(
    program: Program, contents: Contents, keep: Sequence[Ref], variation: Variation = AS_IT_WAS
) -> Replay:
    """Run the program on other records; an operation that fails, which tells nothing about mixing, makes it one that
    cannot be run again.
    """
    try:
        return program.run(contents, keep, variation)
    except (RuntimeError, IndexError, ValueError, TypeError) as problem:
        # Its message may hold values of records.
        raise Unrecordable(
            f"operations that fail on other records, {type(problem).__name__}"
        ) from None


def _ref(index: int, t: Tensor) -> Ref:
    # Not by its own constructor, which takes as long as the rest: recording makes hundreds of these.
    place = index, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device
    return tuple.__new__(Ref, place)


def _storage_of(t: Tensor) -> torch.UntypedStorage:
    if (
        type(t) not in (Tensor, torch.nn.Parameter)
        or t.layout is not torch.strided
        or t.is_conj()
        or t.is_neg()
    ):
        raise Unrecordable(f"a tensor of type {type(t).__name__}, {t.layout}")
    return t.untyped_storage()


def _last_uses(work: Sequence[Operation], kept: frozenset[int]) -> dict[int, list[int]]:
    """By position, the storages that no later operation touches."""
    last: dict[int, int] = {}
    for position, operation in enumerate(work):
        for ref in (*operation.inputs, *operation.outputs):
            last[ref.storage] = position
    uses: dict[int, list[int]] = {}
    for storage, position in last.items():
        if storage not in kept:
            uses.setdefault(position, []).append(storage)
    return uses
