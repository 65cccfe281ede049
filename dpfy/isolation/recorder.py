"""Writes a program down while the user's code runs: two modes of torch, one sees the operations,
one what Python reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpfy.isolation import packed_sequences
from dpfy.isolation.monitor import Followed, Monitor, leave, site_of
from dpfy.isolation.operations import (
    CARRIED,
    SCRATCH,
    Operation,
    Ref,
    Unrecordable,
    filled,
    outputs_in,
)
from dpfy.isolation.program import Program

NUMBERS = {"item", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
"""Calls that give Python one number of a tensor. Most ask the dispatcher for it; some of torch's
older constructors do not.
"""

COPIES = {
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "__repr__",
    "untyped_storage",
    "storage",
    "__reduce_ex__",
    "data_ptr",
}
"""Calls that give Python the contents of a tensor past the dispatcher."""

FROM_NUMPY = {"from_numpy", "frombuffer"}
"""Calls that make a tensor of what Python holds, past the dispatcher."""

MADE_OF = {"tensor", "as_tensor", "asarray", "new_tensor", "sparse_coo_tensor"}
"""Calls that make a tensor of Python's numbers, and read tensors that lie in a list past the
dispatcher.
"""

TRUSTED = {"transformers", "peft", "dpfy"}
"""Packages that read values to choose a faster way to the same result (such as no mask where
nothing is masked).
"""

SEEING = {__name__, Monitor.__module__}
"""Modules through which the user's calls go."""

GIVES_BACK = frozenset({torch.ops.aten._cudnn_rnn.default})
"""Operations that return, beside what they made, an input as it is: cuDNN its weights, which no
schema tells.
"""


class OperationRecorder:
    """Writes down a program while it is on. Two modes of torch: one sees the operations, one what
    Python reads.
    """

    def __init__(self, monitor: Monitor | None = None) -> None:
        """`monitor` is told of calls of torch's functions, from the first `start` to the first
        `stop`.
        """
        self.program, self.monitor = Program(), monitor
        self._operations, self._functions = _Operations(self), _Functions(self)
        self._eager: AbstractContextManager[Any] = nullcontext()
        self.outer: tuple[str, Any, Any] = ("", (), {})
        self.on = False

    def start(self) -> None:
        """Begin to write down. Compiled functions run as they were written until `stop`: a compiled
        one cannot be looked into.
        """
        self.on = True
        self._eager = (
            torch.compiler.set_stance("force_eager")
            if "torch._dynamo" in sys.modules
            else nullcontext()
        )
        self._eager.__enter__()
        self._functions.__enter__()
        self._operations.__enter__()

    def stop(self) -> None:
        """End. Calling it twice does no harm; modes that others entered meanwhile stay."""
        self.monitor = None
        if self.on:
            self.on = False
            leave(self._operations)
            leave(self._functions)
            self._eager.__exit__(None, None, None)

    def see(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation and write it down."""
        program = self.program
        if program.problem is not None or not self.on:
            return call(*args, **kwargs)
        try:
            with (
                torch._C.DisableTorchFunction()
            ):  # what is asked of tensors here is no call of the user's
                before = self._before(call, args, kwargs)
        except Unrecordable as problem:
            program.problem = str(problem)
            return call(*args, **kwargs)
        result = call(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():
                self._after(before, result)
        except Unrecordable as problem:
            program.problem = str(problem)
        return result

    def _before(self, call: Any, args: Any, kwargs: Any) -> Operation:
        program, inputs = self.program, []

        def put(t: Tensor) -> Ref:
            inputs.append(program.ref(t))
            return inputs[-1]

        facts = _facts(call)
        arguments = filled((args, kwargs), put, Tensor)
        if call is torch.ops.aten.lift_fresh.default:
            program.of_python |= {ref.storage for ref in inputs}
        written = [
            r for name, place in facts.written for r in _refs(_argument(name, place, *arguments))
        ]
        for ref in written:
            if (
                source := program.outside.get(ref.storage)
            ) is not None and ref.storage not in program.initial:
                program.initial[ref.storage] = source.clone()
        random = None
        if facts.random:
            device = next((r.device for r in inputs), None) or torch.device(
                kwargs.get("device") or "cpu"
            )
            random = _generator(kwargs.get("generator"), device)
        return Operation(
            call, arguments, inputs, [], written, graph=torch.is_grad_enabled(), random=random
        )

    def _after(self, operation: Operation, result: Any) -> None:
        program = self.program
        seen = {ref.storage for ref in operation.inputs}
        operation.outputs = [program.made(t) for t in outputs_in(result)]
        origin = 0
        for ref in operation.inputs:
            origin |= program.origin.get(ref.storage, 0)
        plain = not operation.outputs and result is not None
        if origin and (plain or _shaped_by_values(operation)) and not _trusted(sys._getframe()):
            operation.read = plain and not _only_checks(*self.outer)
            operation.shaped = not plain
        operation.view = (
            not plain
            and not operation.written
            and all(r.storage in seen for r in operation.outputs)
        )
        if origin and not operation.view:
            given = seen if operation.call in GIVES_BACK else set()
            for ref in (
                *[r for r in operation.outputs if r.storage not in given],
                *operation.written,
            ):
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

    def called(self, name: str, args: Any, func: Callable[[], Any]) -> Any:
        """Call a function of torch; write down what it reads without telling the dispatcher, and
        where numbers of earlier steps go.
        """
        if any(isinstance(value, Followed) for value in args):
            result = func()
            made = outputs_in(result) or [
                t for t in args[:1] if isinstance(t, Tensor) and name.endswith("_")
            ]
            self.program.mark([t for t in made if t.layout is torch.strided], CARRIED)
            return result
        if name in COPIES and args and isinstance(args[0], Tensor):
            self.copied(args[0])
        elif name in FROM_NUMPY:
            result = func()
            self.program.of_python |= {
                self.program.ref(t).storage for t in outputs_in(result) if t.layout is torch.strided
            }
            return result
        elif name in MADE_OF:
            for t in (t for arg in args if isinstance(arg, list | tuple) for t in outputs_in(arg)):
                self.copied(t)
        elif name == "tensor_split" and len(args) > 1 and isinstance(args[1], Tensor):
            self.copied(args[1])
        elif name in NUMBERS and args and isinstance(args[0], Tensor):
            before = len(self.program.operations)
            result = func()
            if self.program.problem is None and not any(
                o.read for o in self.program.operations[before:]
            ):
                self.copied(args[0])
            return result
        return func()


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation would import the compiler, which takes seconds

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.see(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, name, kwargs = self._recorder, getattr(func, "__name__", ""), kwargs or {}
        outer, recorder.outer = recorder.outer, (name, args, kwargs)
        try:
            if recorder.monitor is None:
                return self._call(func, name, args, kwargs)
            return recorder.monitor.seen(
                site_of(func), func, args, kwargs, lambda *a, **k: self._call(func, name, a, k)
            )
        finally:
            recorder.outer = outer

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        if not recorder.on or recorder.program.problem is not None:
            return func(*args, **kwargs)
        if name in (packed_sequences.PACK, packed_sequences.PAD):
            return packed_sequences.called(recorder.program, name, func, args, kwargs)
        return recorder.called(name, (*args, *kwargs.values()), lambda: func(*args, **kwargs))


def compiled() -> bool:
    """Whether something was given to the compiler in this process; torch itself gives it one
    function.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and len(frames.cached_backends) > 1


def _same(t: Tensor) -> Any:
    return t.clone()


def _shaped_by_values(operation: Operation) -> bool:
    """Whether the shapes of what it gives follow from values: the rows that a mask keeps, how many
    numbers are not zero.
    """
    if not _facts(operation.call).of_unknown_shape:
        return False
    if operation.call is torch.ops.aten.index.Tensor:
        return any(ref.dtype in (torch.bool, torch.uint8) for ref in operation.inputs[1:])
    return operation.call not in SCRATCH


def _only_checks(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function of torch reads values only to refuse wrong ones: `one_hot` with the number
    of classes given.
    """
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    return name == "one_hot" and isinstance(classes, int) and classes >= 0


def _trusted(frame: Any) -> bool:
    """Whether the code that asks, next to torch, belongs to a package that reads values for speed
    only.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package != "torch" and name not in SEEING:
            return package in TRUSTED
        frame = frame.f_back
    return False


def _refs(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    return [r for v in value for r in _refs(v)] if isinstance(value, list | tuple) else []


class OperatorFacts(NamedTuple):
    """What torch says about an operator: the arguments that it writes into, by name and place;
    whether it draws random numbers; and whether the shape of what it gives depends on values.
    """

    call: Any
    written: tuple[tuple[str, int], ...]
    random: bool
    of_unknown_shape: bool


_known_facts: dict[int, OperatorFacts] = {}
"""By identity: an operator computes its hash in Python."""


def _facts(call: Any) -> OperatorFacts:
    found = _known_facts.get(id(call))
    if found is None:
        if not isinstance(call, torch._ops.OpOverload):
            raise Unrecordable(f"the operation {call}")
        written = tuple(
            (argument.name, place)
            for place, argument in enumerate(call._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        random = torch.Tag.nondeterministic_seeded in call.tags
        of_unknown_shape = torch.Tag.dynamic_output_shape in call.tags
        found = _known_facts[id(call)] = OperatorFacts(call, written, random, of_unknown_shape)
    return found


def _argument(name: str, place: int, args: Any, kwargs: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[place] if place < len(args) else None


def _generator(
    given: torch.Generator | None, device: torch.device
) -> tuple[torch.Generator, Tensor]:
    if given is not None:
        generator = given
    elif device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    else:
        generator = torch.default_generator
    return generator, generator.get_state()
