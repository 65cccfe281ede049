"""A program: every operation that ran between two points, as torch's dispatcher saw it, to be run again on other inputs.

Tensors are known by where they lie: storage, offset, shape and strides. Views, detached tensors and changes in place then need no
rules of their own: running the program again is running its operations on another piece of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from dpfy.gradients.engine import no_autocast

READS = {
    "item", "__bool__", "__float__", "__int__", "__index__", "__complex__", "equal", "allclose", "is_nonzero", "__contains__"
}  # fmt: skip
"""Calls by which Python learns a value of a tensor, through the dispatcher."""

COPIES = {"tolist", "numpy", "__array__", "__dlpack__"}
"""The same, past the dispatcher."""

TRUSTED = {"transformers", "peft", "dpfy"}
"""Packages that read values to choose a faster way to the same result (such as no mask where nothing is masked)."""

BATCH, CARRIED, DATA = 1, 2, 4
"""Where a value comes from, as bits: the batch, a tensor that an earlier step left behind, or the records beside the batch."""


class Unrecordable(Exception):
    """The operations cannot be run again from what was seen of them."""


class Reshaped(Exception):
    """Run again on other inputs, an operation gave another shape."""


class Ref(NamedTuple):
    """Where a tensor lies."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def layout(self) -> tuple[object, ...]:
        """All but the storage."""
        return self.offset, self.shape, self.stride, self.dtype


@dataclass(slots=True)
class Operation:
    """One call: `arguments` are (args, kwargs) with a Ref in the place of each tensor. A view has nothing to run again."""

    call: Callable[..., Any]
    arguments: tuple[Any, Any]
    inputs: list[Ref]
    outputs: list[Ref]
    written: list[Ref]
    view: bool = False
    read: bool = False
    graph: bool = False
    random: tuple[torch.Generator, Tensor] | None = None


@dataclass
class Program:
    """Operations in order. `outside` are the storages that existed before, `initial` what those that were changed held."""

    operations: list[Operation] = field(default_factory=list)
    outside: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    initial: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    origin: dict[int, int] = field(default_factory=dict)
    known: dict[int, tuple[int, StorageWeakRef]] = field(default_factory=dict)
    carried: dict[int, StorageWeakRef] = field(default_factory=dict)
    problem: str | None = None
    _work: dict[object, tuple[list[Operation], dict[int, list[int]]]] = field(default_factory=dict)
    _around: tuple[int, list[torch.Generator], set[str]] = (0, [], set())

    def ref(self, t: Tensor) -> Ref:
        """Where `t` lies; a storage that was never seen is one from outside."""
        storage = _storage_of(t)
        index = self._index(storage)
        if index is None:
            index = self._add(storage)
            self.outside[index] = storage
            if storage._cdata in self.carried:
                self.origin[index] = CARRIED
            if t.grad_fn is not None:
                raise Unrecordable(f"a tensor with a graph that was not seen ({t.grad_fn.name()})")
        return Ref(index, int(t.storage_offset()), t.shape, t.stride(), t.dtype, t.device)

    def made(self, t: Tensor) -> Ref:
        """Where a tensor lies that an operation has just returned."""
        storage = _storage_of(t)
        index = self._index(storage)
        index = self._add(storage) if index is None else index
        return Ref(index, int(t.storage_offset()), t.shape, t.stride(), t.dtype, t.device)

    def mark(self, tensors: Sequence[Tensor], origin: int) -> None:
        """Say where the values of `tensors` come from."""
        for t in tensors:
            index = self.ref(t).storage
            self.origin[index] = self.origin.get(index, 0) | origin

    def _index(self, storage: torch.UntypedStorage) -> int | None:
        entry = self.known.get(storage._cdata)
        return None if entry is None else entry[0]

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

    def run(self, replaced: dict[int, torch.UntypedStorage], keep: Sequence[Ref]) -> Memory:
        """Run the operations again with other contents in some of the storages from outside.

        Guarantees: nothing that the program was recorded from is changed, torch's generators included. Random operations draw what
        they drew.
        """
        kept = frozenset([ref.storage for ref in keep])
        key = kept, len(self.operations)
        if key not in self._work:
            needed = self.needed(keep)
            self._work[key] = needed, _last_uses(needed, kept)
        memory, (work, last) = Memory(self, dict(replaced)), self._work[key]
        with self.aside():
            for position, operation in enumerate(work):
                memory.do(operation)
                memory.forget(last.get(position, ()))
        return memory

    def needed(self, keep: Sequence[Ref]) -> list[Operation]:
        """The operations, in order, that the content of `keep` or a value read by Python comes from."""
        wanted, found = {ref.storage for ref in keep}, []
        for operation in reversed(self.operations):
            if operation.view:
                continue
            if operation.read or any(r.storage in wanted for r in (*operation.outputs, *operation.written)):
                wanted.update(r.storage for r in operation.inputs)
                found.append(operation)
        return found[::-1]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a run of the operations: no graph, no autocast, and the generators they use are put back."""
        if self._around[0] != len(self.operations):
            generators = {id(o.random[0]): o.random[0] for o in self.operations if o.random is not None}
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
class Memory:
    """The storages of one run of a program, and what Python would have read on the way."""

    program: Program
    storages: dict[int, torch.UntypedStorage]
    tensors: dict[int, dict[Ref, Tensor]] = field(default_factory=dict)
    reads: list[Any] = field(default_factory=list)

    def at(self, ref: Ref) -> Tensor:
        """The tensor that lies at `ref`."""
        views = self.tensors.setdefault(ref.storage, {})
        found = views.get(ref)
        if found is None:
            empty = torch.empty(0, dtype=ref.dtype, device=ref.device)
            found = views[ref] = empty.set_(self._storage(ref.storage), ref.offset, ref.shape, ref.stride)  # type: ignore[arg-type]
        return found

    def _storage(self, index: int) -> torch.UntypedStorage:
        storage = self.storages.get(index)
        if storage is None:
            first = self.program.initial.get(index)
            source = self.program.outside.get(index)
            if first is None and source is None:
                raise Unrecordable("a tensor whose content was not seen")
            storage = self.storages[index] = cast(torch.UntypedStorage, source if first is None else first.clone())
        return storage

    def do(self, operation: Operation) -> None:
        """Run one operation here."""
        args, kwargs = _filled(operation.arguments, self.at)
        if operation.random is not None:
            generator, state = operation.random
            generator.set_state(state)
        torch._C._set_grad_enabled(operation.graph)  # nothing here wants a gradient, but some operations keep more with it
        result = operation.call(*args, **kwargs)
        if operation.read:
            self.reads.append(result)
            return
        for ref, t in zip(operation.outputs, _tensors(result), strict=True):
            if ref.storage in self.storages:
                continue
            if (t.storage_offset(), t.shape, t.stride(), t.dtype) != ref.layout:
                raise Reshaped(f"{operation.call}: {list(ref.shape)} became {list(t.shape)}")
            self.storages[ref.storage] = t.untyped_storage()
            self.tensors.setdefault(ref.storage, {})[ref] = t

    def forget(self, storages: Sequence[int]) -> None:
        """Free what is not needed any more."""
        for index in storages:
            self.storages.pop(index, None)
            self.tensors.pop(index, None)


class Recorder:
    """Writes down a program while it is on. Two modes of torch: one sees the operations, one what Python reads."""

    def __init__(self) -> None:
        self.program = Program()
        self._operations, self._functions = _Operations(self), _Functions(self)
        self._eager: AbstractContextManager[Any] = nullcontext()
        self.outer: str | None = None
        self.on = False

    def start(self) -> None:
        """Begin to write down. Compiled functions run as they were written until `stop`: a compiled one cannot be looked into."""
        self.on = True
        self._eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        self._eager.__enter__()
        self._functions.__enter__()
        self._operations.__enter__()

    def stop(self) -> None:
        """End. Calling it twice does no harm; modes that others entered meanwhile stay."""
        if self.on:
            self.on = False
            _leave(self._operations, _get_current_dispatch_mode_stack, _pop_mode, _push_mode)
            _leave(self._functions, _get_current_function_mode_stack, pop_function_mode, push_function_mode)
            self._eager.__exit__(None, None, None)

    def see(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation and write it down."""
        program = self.program
        if program.problem is not None or not self.on:
            return call(*args, **kwargs)
        try:
            before = self._before(call, args, kwargs)
        except Unrecordable as problem:
            program.problem = str(problem)
            return call(*args, **kwargs)
        result = call(*args, **kwargs)
        try:
            self._after(before, result)
        except Unrecordable as problem:
            program.problem = str(problem)
        return result

    def _before(self, call: Any, args: Any, kwargs: Any) -> Operation:
        program, inputs = self.program, []

        def put(t: Tensor) -> Ref:
            inputs.append(program.ref(t))
            return inputs[-1]

        if not isinstance(call, torch._ops.OpOverload):
            raise Unrecordable(f"the operation {call}")
        arguments = _filled((args, kwargs), put, Tensor)
        written = [r for name in _written(call) for r in _refs(_argument(call, name, *arguments))]
        for ref in written:
            if (source := program.outside.get(ref.storage)) is not None and ref.storage not in program.initial:
                program.initial[ref.storage] = source.clone()
        random = None
        if torch.Tag.nondeterministic_seeded in call.tags:
            device = next((r.device for r in inputs), None) or torch.device(kwargs.get("device") or "cpu")
            random = _generator(kwargs.get("generator"), device)
        return Operation(call, arguments, inputs, [], written, graph=torch.is_grad_enabled(), random=random)

    def _after(self, operation: Operation, result: Any) -> None:
        program = self.program
        seen = {ref.storage for ref in operation.inputs}
        operation.outputs = [program.made(t) for t in _tensors(result)]
        origin = 0
        for ref in operation.inputs:
            origin |= program.origin.get(ref.storage, 0)
        plain = not operation.outputs and result is not None
        operation.read = plain and bool(origin) and self.outer in READS and not _trusted(sys._getframe())
        operation.view = not plain and not operation.written and all(r.storage in seen for r in operation.outputs)
        if origin and not operation.view:
            for ref in (*operation.outputs, *operation.written):
                program.origin[ref.storage] = program.origin.get(ref.storage, 0) | origin
        if operation.outputs or operation.read or operation.written:
            program.operations.append(operation)

    def copied(self, t: Tensor) -> None:
        """Python takes the values of `t` past the dispatcher."""
        try:
            ref = self.program.ref(t)
        except Unrecordable as problem:
            self.program.problem = str(problem)
            return
        if self.program.origin.get(ref.storage, 0) and not _trusted(sys._getframe()):
            self.program.operations.append(Operation(_same, ((ref,), {}), [ref], [], [], read=True))


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation would import the compiler, which takes seconds

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.see(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, name = self._recorder, getattr(func, "__name__", "")
        outer, recorder.outer = recorder.outer, name
        try:
            if name in COPIES and args and isinstance(args[0], Tensor) and recorder.on and recorder.program.problem is None:
                recorder.copied(args[0])
            return func(*args, **(kwargs or {}))
        finally:
            recorder.outer = outer


def compiled() -> bool:
    """Whether something was given to the compiler in this process; torch itself gives it one function."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and len(frames.cached_backends) > 1


def _storage_of(t: Tensor) -> torch.UntypedStorage:
    if t.layout is not torch.strided or type(t) not in (Tensor, torch.nn.Parameter) or t.is_conj() or t.is_neg():
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


def _same(t: Tensor) -> Any:
    return t.clone()


def _leave(mode: Any, stack: Callable[[], list[Any]], pop: Callable[[], Any], push: Callable[[Any], Any]) -> None:
    """Take `mode` off its stack, also from below others."""
    above = []
    while stack() and stack()[-1] is not mode:
        above.append(pop())
    if stack():
        mode.__exit__(None, None, None)
    for other in reversed(above):
        push(other)


def _trusted(frame: Any) -> bool:
    """Whether the code that asks, next to torch, belongs to a package that reads values for speed only."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch" and frame.f_globals.get("__name__") != __name__:
            return package in TRUSTED
        frame = frame.f_back
    return False


def _filled(value: Any, put: Callable[[Any], Any], kind: type = Ref) -> Any:
    """`value` with everything of `kind` in its tuples, lists and dicts replaced."""
    if isinstance(value, kind):
        return put(value)
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, tuple):
        return tuple([put(v) if isinstance(v, kind) else _filled(v, put, kind) for v in value])
    if isinstance(value, list):
        return [_filled(v, put, kind) for v in value]
    if isinstance(value, dict):
        return {k: _filled(v, put, kind) for k, v in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _refs(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    return [r for v in value for r in _refs(v)] if isinstance(value, list | tuple) else []


@lru_cache(maxsize=4096)
def _written(call: Any) -> tuple[str, ...]:
    return tuple(a.name for a in call._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _argument(call: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    names = [a.name for a in call._schema.arguments]
    position = names.index(name)
    return args[position] if position < len(args) else None


def _generator(given: torch.Generator | None, device: torch.device) -> tuple[torch.Generator, Tensor]:
    if given is not None:
        generator = given
    elif device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    else:
        generator = torch.default_generator
    return generator, generator.get_state()
