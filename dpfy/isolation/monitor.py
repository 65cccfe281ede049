"""The monitor: sees which functions of torch a user's loop calls, at a cost of about two
microseconds a call.

Recording a step (dispatch.py) costs as much as the step, so only few steps are recorded. The
monitor says which others should be: those that call torch from places in the code that no checked
step called it from, and those that use what was computed from an earlier batch. It decides nothing:
what it reports is recorded and checked.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

CallSite = tuple[Any, int, int]
"""A call: which function of torch, and where in the user's code."""

NUMBERS = {"item", "tolist"}
"""Calls whose numbers can be followed through arithmetic: they are given as numbers that remember
where they come from.
"""

COPIES = {
    "__float__",
    "__int__",
    "__index__",
    "__bool__",
    "__complex__",
    "numpy",
    "__array__",
    "__dlpack__",
    "__format__",
    "__repr__",
}
"""Calls whose numbers cannot be followed."""

PASSED = {"detach", "detach_", "clone", "numpy"}
"""Calls by which a forward pass puts a value aside for later steps."""

USER, TORCH, OURS = range(3)
REGISTER_HOOK = Tensor.register_hook

_whose: dict[int, tuple[int, CodeType]] = {}


class FollowedFloat(float):
    """A float that was read from a tensor of an earlier batch. Arithmetic with it gives such a
    number again.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


class FollowedInt(int):
    """The same for a whole number."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


Followed = (FollowedFloat, FollowedInt)


def followed(value: Any) -> Any:
    """`value` with its numbers in the form that can be followed."""
    if type(value) is float:
        return FollowedFloat(value)
    if type(value) is int:
        return FollowedInt(value)
    return type(value)(followed(v) for v in value) if type(value) in (list, tuple) else value


def _arithmetic(kind: type, name: str) -> None:
    plain = getattr(kind.__mro__[1], name)

    def method(self: Any, *others: Any) -> Any:
        result = plain(self, *others)
        if (
            result is NotImplemented
            and kind is FollowedInt
            and others
            and isinstance(others[0], float)
        ):
            return getattr(FollowedFloat(self), name)(
                *others
            )  # as Python does: a whole number meets a float as a float
        return result if result is NotImplemented else followed(result)

    method.__name__ = name
    setattr(kind, name, method)


for _kind in Followed:
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"):
        _arithmetic(_kind, f"__{_name}__")
        _arithmetic(_kind, f"__r{_name}__")
    for _name in ("neg", "pos", "abs", "round"):
        _arithmetic(_kind, f"__{_name}__")


class Monitor:
    """Sees the calls of a loop between a batch and its `step` (`forward`), and from there to the
    next batch (`after`).

    `checked` are the places that checked steps called torch from, `new` those that they did not.
    `reused` are those where this step took what earlier batches left, `backward` those in the
    user's hooks and functions that ran while gradients were computed, and `copied` those where the
    loop read values of the last batch after its step in a way that cannot be followed. `calls` counts
    the calls it saw since the batch went out. `follows` says whether there is something to follow in
    this step: what earlier batches left, or functions of the user's whose backward passes are to be
    seen.

    Guarantees: changes no tensor and no generator; numbers that the loop reads between `after` and
    the next batch are equal to what they would be, of a type that inherits from float or int.
    """

    def __init__(self) -> None:
        self.checked: set[CallSite] = set()
        self.now: set[CallSite] = set()
        self.reused: set[CallSite] = set()
        self.copied: set[CallSite] = set()
        self.backward: set[CallSite] = set()
        self._functions: set[type] = set()
        self._nodes: set[int] = set()
        self.numbers = False
        self.follows = False
        self.calls = 0
        self._batch: Sequence[Tensor] = ()
        self.left, self.aside, self.clean = _Weak(), _Weak(), _Weak()
        self._forward, self._after = _Forward(self), _After(self)
        self._mode: _Calls | None = None

    def forward(self, batch: Sequence[Tensor], recorded: bool = False) -> None:
        """A batch goes out: note where torch is called from. Anyone who records the step as well tells
        of its calls by `seen`.
        """
        self.leave()
        if self.aside.refs:
            self.left.add(self.aside.alive())
            self.aside.clear()
        if self.left.refs:
            self.left.forget_dead()
        self._batch = batch
        self.calls = 0
        self.now.clear()
        self.reused.clear()
        self.backward.clear()
        self._nodes.clear()
        self.follows = bool(self.numbers or self.left.refs or self._functions)
        if not recorded:
            self._enter(self._forward)

    def after(self) -> None:
        """The step is made: note what is computed from its batch, and read."""
        self.leave()
        self.copied.clear()
        self.clean.clear()
        self._enter(self._after)

    def leave(self) -> None:
        """See no more. Calling it twice does no harm."""
        mode, self._mode = self._mode, None
        if mode is not None:
            leave(mode)

    def seen(
        self,
        site: tuple[CallSite, int],
        func: Any,
        args: Any,
        kwargs: Any,
        call: Callable[..., Any] | None = None,
    ) -> Any:
        """Note a call of `func` before the step, and make it (by `call`, if given)."""
        place, whose = site
        self.calls += 1
        self.now.add(place)
        if call is not None:
            self._find_functions(args)
        if self._functions:
            self._see_functions(args)
        if func is REGISTER_HOOK and len(args) == 2:
            args = args[0], self._followed_hook(args[1])
        used = (self.numbers or self.left.refs) and _any(
            (*args, *kwargs.values()) if kwargs else args, self.of_earlier
        )
        result = (call or func)(*args, **kwargs) if kwargs else (call or func)(*args)
        if used:
            self.reused.add(place)
            _pass_on(self.left, getattr(func, "__name__", ""), args, result)
        elif whose == USER and getattr(func, "__name__", "") in PASSED:
            self.aside.add(_tensors(result))
        return result

    def _followed_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A tensor's hook that is seen when it runs, in the backward pass."""

        @wraps(hook)
        def seen(grad: Tensor) -> Any:
            with _Backward(self):
                return hook(grad)

        return seen

    def _find_functions(self, values: Any) -> None:
        """Learn which of the user's own autograd functions are in use. Told of recorded steps
        alone, it costs other steps nothing.
        """
        for t in values:
            if isinstance(t, Tensor) and isinstance(node := t.grad_fn, BackwardCFunction):
                kind = node._forward_cls  # type: ignore[attr-defined]
                if kind.__module__.partition(".")[0] not in ("torch", "dpfy"):
                    self._functions.add(kind)

    def _see_functions(self, values: Any) -> None:
        """See their backward passes."""
        for t in values:
            if (
                isinstance(t, Tensor)
                and isinstance(node := t.grad_fn, BackwardCFunction)
                and id(node) not in self._nodes
            ):
                self._nodes.add(id(node))
                if node._forward_cls in self._functions:  # type: ignore[attr-defined]
                    mode = _Backward(self)
                    node.register_prehook(lambda grads, mode=mode: _enter(mode))
                    node.register_hook(lambda *grads, mode=mode: leave(mode))

    def close(self) -> None:
        """Forget the batch."""
        self.leave()
        self._batch = ()

    def kept(self) -> list[Tensor]:
        """Tensors with values of earlier batches that somebody still holds."""
        return self.left.alive()

    @property
    def new(self) -> set[CallSite]:
        """Where torch was called from in this step, and in no step that was checked."""
        return self.now - self.checked

    def _enter(self, mode: _Calls) -> None:
        self._mode = mode
        mode.__enter__()

    def of_earlier(self, value: Any) -> bool:
        """Whether it was made of earlier batches."""
        return isinstance(value, Followed) or value in self.left

    def of_batch(self, value: Any) -> bool:
        """Whether it was made of this batch or of earlier ones."""
        if isinstance(value, Tensor) and value.grad_fn is not None and value not in self.clean:
            return True
        return any(value is t for t in self._batch) or value in self.aside or self.of_earlier(value)


class _Calls(TorchFunctionMode):
    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self._monitor = monitor


class _Forward(_Calls):
    """Calls before the step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        monitor, site = self._monitor, site_of(func)
        if site[1] == USER or monitor.follows or func is REGISTER_HOOK:
            return monitor.seen(site, func, args, kwargs)
        monitor.calls += 1
        monitor.now.add(site[0])
        return func(*args, **kwargs) if kwargs else func(*args)


class _Backward(_Calls):
    """Calls in a user's hook or function, while gradients are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._monitor.backward.add(site_of(func)[0])
        return func(*args, **kwargs) if kwargs else func(*args)


class _After(_Calls):
    """Calls after the step: what is made of its batch is followed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        monitor, name = self._monitor, getattr(func, "__name__", "")
        monitor.calls += 1
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not _any((*args, *kwargs.values()) if kwargs else args, monitor.of_batch):
            monitor.clean.add(_tensors(result))
            return result
        if name in NUMBERS or name in COPIES:
            monitor.copied.add(site_of(func)[0])
        if name in NUMBERS:
            monitor.numbers = True
            return followed(result)
        _pass_on(monitor.left, name, args, result)
        return result


class _Weak:
    """Tensors, known by identity, as long as somebody else holds them."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self.refs)

    def clear(self) -> None:
        """Forget all."""
        if self.refs:
            self.refs = {}

    def __contains__(self, value: object) -> bool:
        ref = self.refs.get(id(value))
        return ref is not None and ref() is value

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Remember them."""
        for t in tensors:
            self.refs[id(t)] = weakref.ref(t)

    def alive(self) -> list[Tensor]:
        """Those that somebody still holds."""
        return [t for ref in self.refs.values() if (t := ref()) is not None]

    def forget_dead(self) -> None:
        """Keep what somebody still holds."""
        if self.refs:
            self.refs = {key: ref for key, ref in self.refs.items() if ref() is not None}


def _enter(mode: _Calls) -> None:
    mode.__enter__()


def _pass_on(kept: _Weak, name: str, args: Any, result: Any) -> None:
    """What a call gives, or writes in place, holds values of what it took."""
    kept.add(_tensors(result))
    if args and (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or name.startswith("__i")
    ):
        kept.add(_tensors(args[0]))


def _any(values: Iterable[Any], holds: Callable[[Any], bool]) -> bool:
    """Whether `holds` is true of a value, or of one in a list among them."""
    return any(_any(v, holds) if type(v) in (list, tuple) else holds(v) for v in values)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


def site_of(func: Any) -> tuple[CallSite, int]:
    """The function and the first caller that is neither torch nor this project; and whose code
    calls, next to torch.

    Code is known by its identity, and held: its hash is of all that it contains, which takes as
    long as the rest of this.
    """
    frame, whose = sys._getframe(2), TORCH
    while True:
        code = frame.f_code
        known = _whose.get(id(code))
        if known is None:
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            known = _whose[id(code)] = (
                (TORCH if package == "torch" else OURS if package == "dpfy" else USER),
                code,
            )
        owner = known[0]
        if whose == TORCH:
            whose = owner
        if owner == USER or frame.f_back is None:
            return (func, id(code), frame.f_lasti), whose
        frame = frame.f_back


def leave(mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Take `mode` off its stack, also from below modes that others entered meanwhile, which
    stay.
    """
    if isinstance(mode, TorchFunctionMode):
        depth = torch._C._len_torch_function_stack()
        if depth and torch._C._get_function_stack_at(depth - 1) is mode:
            mode.__exit__(None, None, None)
            return
    stack: Callable[[], list[Any]]
    pop: Callable[..., Any]
    if isinstance(mode, TorchDispatchMode):
        stack, pop, push = _get_current_dispatch_mode_stack, _pop_mode, _push_mode
    else:
        stack, pop, push = _get_current_function_mode_stack, _pop_function_mode, _push_function_mode
    above = []
    while stack() and stack()[-1] is not mode:
        above.append(pop())
    if stack():
        mode.__exit__(None, None, None)
    for other in reversed(above):
        push(other)
