"""A loss written for one record, computed for a whole batch: torch maps it over the rows, so that
no row can reach another.

Inside the function every tensor made from the record has the shape of one record, and torch refuses
to read its values. What torch does not refuse is refused here: to print them, to keep a tensor for
the next call, to read the data set past the record, and code that is handed the whole batch (a
batching rule of the caller's own, hooks on saved tensors).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _unwrap_batched,
    is_functorch_wrapped_tensor,
    maybe_current_level,
)
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.overrides import TorchFunctionMode

from dpfy.core.errors import Unsupported

ONE_BY_ONE = (
    "give dpfy.per_record(f, vectorised=False), which calls f for one record after the other"
)
KEEP_NONE = (
    "keep no tensors of a record: neither in a list, a closure or a module, nor for the next step"
)
PRINTS = {Tensor.__repr__, Tensor.__format__}
"""Calls that torch allows, and that write the values of all records out."""

MEMORY = ("resize", "reshape_alias")
"""Beginnings of the names of functions that change which memory a tensor is a view of: torch does
not keep them within a record.
"""

OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

MARK = "_dpfy_call"
"""Under this name a tensor carries the call that made it."""

BUILT_IN = {"aten", "prims", "prim"}


class Call:
    """One call of a function of one record. While it runs, `active` gives it.

    `held` is memory that it must not read; `whole` are functions of torch, and what computes them
    for the whole batch at once.
    """

    def __init__(
        self,
        held: Iterable[Tensor] = (),
        vectorised: bool = True,
        whole: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        self.held = {t.untyped_storage().data_ptr() for t in held if t.layout is torch.strided} - {
            0
        }
        self.vectorised, self.whole = vectorised, whole
        self.level = self.batch = 0
        self.lenient = 0

    def mark(self, value: Any) -> None:
        """Note that the tensors of `value` belong to this call."""
        if isinstance(value, Tensor):
            if not self.vectorised or is_functorch_wrapped_tensor(value):
                vars(value)[MARK] = self
        elif isinstance(value, tuple | list):
            for part in value:
                self.mark(part)
        elif isinstance(value, dict):
            for part in value.values():
                self.mark(part)

    def admit(self, value: Any) -> bool:
        """Refuse tensors of `value` that another call made, and those that hold the data set.
        Whether any belongs to this call.
        """
        if isinstance(value, Tensor):
            found = vars(value).get(MARK)
            if found is self:
                return True
            wrapped = self.vectorised and is_functorch_wrapped_tensor(value)
            if found is not None:
                raise Unsupported(
                    "a loss for one record that uses a tensor kept from another record or step",
                    KEEP_NONE,
                )
            if wrapped and not self._wrapped_anew():
                what = (
                    "a loss for one record that uses a tensor made out of sight (kept from another "
                    "step, or by a scripted function)"
                )
                raise Unsupported(what, f"{KEEP_NONE}; for scripted functions {ONE_BY_ONE}")
            if wrapped:
                vars(value)[MARK] = self
            elif self.held and value.layout is torch.strided and self._of_data(value):
                raise Unsupported(
                    "a loss for one record that reads the data set itself",
                    "use the record that it is given alone",
                )
            return wrapped
        parts = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, tuple | list)
            else ()
        )
        return max([self.admit(part) for part in parts], default=False)  # of all parts

    def _wrapped_anew(self) -> bool:
        """Whether tensors that nobody marked may be of this call: a transform of the caller's own
        wraps what it is given, and unwraps.
        """
        self.lenient += maybe_current_level() != self.level
        return self.lenient > 0

    def _of_data(self, value: Tensor) -> bool:
        try:
            return value.untyped_storage().data_ptr() in self.held
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
            return False


_ACTIVE: list[Call] = []


@contextmanager
def current(call: Call) -> Iterator[None]:
    """Inside the block `call` is what runs."""
    _ACTIVE.append(call)
    try:
        yield
    finally:
        _ACTIVE.pop()


def active() -> Call | None:
    """The call that runs, if its function is mapped over the rows of a batch, and by nothing else
    besides.
    """
    return (
        _ACTIVE[-1]
        if _ACTIVE and _ACTIVE[-1].vectorised and maybe_current_level() == _ACTIVE[-1].level
        else None
    )


def transformed() -> bool:
    """Whether a call runs under another transform of the caller's own: there layers are functions
    like any other.
    """
    return bool(_ACTIVE) and maybe_current_level() not in (None, _ACTIVE[-1].level)


def running() -> bool:
    """Whether any function of one record runs."""
    return bool(_ACTIVE)


class Apart(TorchFunctionMode):
    """Sees every operation of a call, and refuses what would let it see another record."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call, own, kwargs = self._call, False, kwargs or {}
        for value in args:
            if isinstance(value, Tensor | tuple | list):
                own = call.admit(value) or own
        if kwargs:
            own = call.admit(kwargs) or own
        if not call.vectorised:
            made = func(*args, **kwargs)
            if own:  # all else is a constant, which may be kept
                call.mark(
                    args[0] if made is None else made
                )  # nothing comes back where something was written into
            return made
        func, args = self._unescaped(func, args, kwargs)
        made = func(*args, **kwargs)
        call.mark(made)
        return made

    def _unescaped(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The function to be run and its arguments. What is handed the whole batch, and is none of
        ours, is refused.
        """
        _require_no_hooks()
        if (ours := self._call.whole.get(func)) is not None and not transformed():
            return ours, (self._call, *args)
        if func in PRINTS and is_functorch_wrapped_tensor(args[0]):
            raise Unsupported(
                "a loss for one record that prints a tensor of the record", "print nothing there"
            )
        name = getattr(func, "__name__", "").partition(".")[0]
        if (
            name.strip("_").startswith(MEMORY)
            and args
            and isinstance(args[0], Tensor)
            and is_functorch_wrapped_tensor(args[0])
        ):
            raise Unsupported(
                f"{name} on a tensor of the record in a loss for one record",
                "make a new tensor instead",
            )
        if isinstance(func, OPERATIONS):
            _require_built_in(func)
        elif func is custom_function_call:
            if not getattr(args[0], "generate_vmap_rule", False):
                raise Unsupported(
                    f"{args[0].__name__}: a torch.autograd.Function that torch does not map over "
                    f"records itself",
                    f"set generate_vmap_rule = True on it, or {ONE_BY_ONE}",
                )
            return func, (_followed(args[0], self._call), *args[1:])
        return func, args


def _require_no_hooks() -> None:
    """What is below the map sees the whole batch: hooks on what is saved for the backward pass, and
    modes that see every operation.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        what = "hooks on saved tensors (activation checkpointing) in a loss for one record"
        raise Unsupported(what, f"leave them out, or {ONE_BY_ONE}")
    if torch._C._len_torch_dispatch_stack():
        raise Unsupported("a dispatch mode of torch in a loss for one record", "leave it out")


def _require_built_in(func: Any) -> None:
    """An operation that is not torch's own may have a batching rule of its author's, or is given
    views of the whole batch.
    """
    name = func.name() if isinstance(func, torch._ops.OpOverload) else func._qualified_op_name
    if name.partition("::")[0] not in BUILT_IN:
        raise Unsupported(
            f"{name}: an operation that is not torch's own in a loss for one record", ONE_BY_ONE
        )


def _followed(function: Any, call: Call) -> Any:
    """The same torch.autograd.Function, whose own operations are seen as well."""

    def seen(work: Callable[..., Any]) -> Any:
        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            call.lenient += 1  # what torch hands over there is wrapped anew, and unmarked
            try:
                with Apart(call):
                    return work(*args, **kwargs)
            finally:
                call.lenient -= 1

        return staticmethod(run)

    return type(
        function.__name__,
        (function,),
        {"forward": seen(function.forward), "backward": seen(function.backward)},
    )


def lowered(call: Call, work: Callable[..., Any], *values: Tensor) -> Any:
    """``work(batch, *values)`` outside of the map: each value with the batch in front, also where
    all records share it.

    What `work` returns, a tensor or a tuple of tensors, is mapped again over its first dimension.

    Guarantees: for layers of dpfy alone; `work` must keep rows apart.
    """
    _require_no_hooks()
    interpreter, batch = retrieve_current_functorch_interpreter(), call.batch
    level, fronted = interpreter.level(), []
    for value in values:
        call.admit(value)
        t, dim = _unwrap_batched(value, level)
        fronted.append(
            t.unsqueeze(0).expand(batch, *t.shape)
            if dim is None
            else t
            if dim == 0
            else t.movedim(dim, 0)
        )
    with interpreter.lower(), torch._C.DisableTorchFunction():
        made = work(batch, *fronted)
    back = (
        tuple([_add_batch_dim(t, 0, level) for t in made])
        if isinstance(made, tuple)
        else _add_batch_dim(made, 0, level)
    )
    call.mark(back)
    return back
