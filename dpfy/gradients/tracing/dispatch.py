"""Writes a program down while the user's code runs: two modes of torch, one sees the operations, one what Python reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from dpfy.gradients.tracing import packing
from dpfy.gradients.tracing.program import Operation, Program, Ref, Unrecordable, filled, outputs_in

READS = {
    "item", "__bool__", "__float__", "__int__", "__index__", "__complex__", "equal", "allclose", "is_nonzero", "__contains__"
}  # fmt: skip
"""Calls by which Python learns a value of a tensor, through the dispatcher."""

COPIES = {"tolist", "numpy", "__array__", "__dlpack__"}
"""The same, past the dispatcher."""

TRUSTED = {"transformers", "peft", "dpfy"}
"""Packages that read values to choose a faster way to the same result (such as no mask where nothing is masked)."""

GIVES_BACK = frozenset({torch.ops.aten._cudnn_rnn.default})
"""Operations that return, beside what they made, an input as it is: cuDNN its weights, which no schema tells."""


class OperationRecorder:
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
        arguments = filled((args, kwargs), put, Tensor)
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
        operation.outputs = [program.made(t) for t in outputs_in(result)]
        origin = 0
        for ref in operation.inputs:
            origin |= program.origin.get(ref.storage, 0)
        plain = not operation.outputs and result is not None
        operation.read = plain and bool(origin) and self.outer in READS and not _trusted(sys._getframe())
        operation.view = not plain and not operation.written and all(r.storage in seen for r in operation.outputs)
        if origin and not operation.view:
            given = seen if operation.call in GIVES_BACK else set()
            for ref in (*[r for r in operation.outputs if r.storage not in given], *operation.written):
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
        recorder, name = self._recorder, getattr(func, "__name__", "")
        outer, recorder.outer = recorder.outer, name
        try:
            if name in COPIES and args and isinstance(args[0], Tensor) and recorder.on and recorder.program.problem is None:
                recorder.copied(args[0])
            if name in (packing.PACK, packing.PAD) and recorder.on and recorder.program.problem is None:
                return packing.called(recorder.program, name, func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        finally:
            recorder.outer = outer


def compiled() -> bool:
    """Whether something was given to the compiler in this process; torch itself gives it one function."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and len(frames.cached_backends) > 1


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
