"""A loss written for one record, computed for a whole batch: torch maps it over the rows, so that no row can reach another.

Inside the function every tensor made from the record has the shape of one record, and torch refuses to read its values. What torch
does not refuse is refused here: to print them, to keep a tensor for the next call, to read the data set past the record, and code that
is handed the whole batch (a batching rule of the caller's own, hooks on saved tensors).
"""

from __future__ import annotations

import functools
import re
import secrets
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _unwrap_batched, is_functorch_wrapped_tensor, maybe_current_level
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput, Unsupported

ONE_BY_ONE = "give dpfy.per_record(f, vectorised=False), which calls f for one record after the other"
KEEP_NONE = "keep no tensors of a record: neither in a list, a closure or a module, nor for the next step"
OUTSIDE = ("an index", "must lie inside the table, the classes or the tensor that it is used for")
PRINTS = {"__repr__", "__format__", "__str__"}
"""Calls that torch allows, and that write the values of all records out."""

MARK = "_dpfy_call"
"""Under this name a tensor carries the call that made it."""

BUILT_IN = {"aten", "prims", "prim"}

REFUSED_BY_TORCH = (
    "vmap",
    "atching rule",
    "doesn't have storage",
    "BatchedTensor",
    "functorch",
    "batched tensor",
    "broadcast shape",
    "register a hook",
)
"""Words by which an error of torch is recognised as a refusal to map a function over rows."""

RowLoss = Callable[[Any, Any], Tensor]
"""(model, record) to the loss of that record."""


class Call:
    """One call of a function of one record. While it runs, `active` gives it."""

    def __init__(self, held: Iterable[Tensor] = (), vectorised: bool = True) -> None:
        self.held = {t.untyped_storage().data_ptr() for t in held if t.layout is torch.strided} - {0}
        self.vectorised = vectorised
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
        """Refuse tensors of `value` that another call made, and those that hold the data set. Whether any belongs to this call."""
        if isinstance(value, Tensor):
            found = vars(value).get(MARK)
            if found is self:
                return True
            wrapped = self.vectorised and is_functorch_wrapped_tensor(value)
            if found is not None:
                raise Unsupported("a loss for one record that uses a tensor kept from another record or step", KEEP_NONE)
            if wrapped and not self._wrapped_anew():
                what = "a loss for one record that uses a tensor made out of sight (kept from another step, or by a scripted function)"
                raise Unsupported(what, f"{KEEP_NONE}; for scripted functions {ONE_BY_ONE}")
            if wrapped:
                vars(value)[MARK] = self
            elif self.held and value.layout is torch.strided and self._of_data(value):
                raise Unsupported("a loss for one record that reads the data set itself", "use the record that it is given alone")
            return wrapped
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
        return any([self.admit(part) for part in parts])

    def _wrapped_anew(self) -> bool:
        """Whether tensors that nobody marked may be of this call: a transform of the caller's own wraps what it is given, and unwraps."""
        self.lenient += maybe_current_level() != self.level
        return self.lenient > 0

    def _of_data(self, value: Tensor) -> bool:
        try:
            return value.untyped_storage().data_ptr() in self.held
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
            return False


_ACTIVE: list[Call] = []


def active() -> Call | None:
    """The call that runs, if its function is mapped over the rows of a batch, and by nothing else besides."""
    return _ACTIVE[-1] if _ACTIVE and _ACTIVE[-1].vectorised and maybe_current_level() == _ACTIVE[-1].level else None


def transformed() -> bool:
    """Whether a call runs under another transform of the caller's own: there layers are functions like any other."""
    return bool(_ACTIVE) and maybe_current_level() not in (None, _ACTIVE[-1].level)


def running() -> bool:
    """Whether any function of one record runs."""
    return bool(_ACTIVE)


class _Apart(TorchFunctionMode):
    """Sees every operation of a call, and refuses what would let it see another record."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call, kwargs = self._call, kwargs or {}
        own = call.admit(args)
        if kwargs:
            own = call.admit(kwargs) or own
        if call.vectorised:
            args = self._unescaped(func, args)
            if func is F.scaled_dot_product_attention:
                func, args = _attended, (call, *args)
        made = func(*args, **kwargs)
        if own:  # all else is a constant, which may be kept
            call.mark(args[0] if made is None and args else made)  # nothing comes back where something was written into
        elif call.vectorised:
            call.mark(made)  # random numbers differ from record to record
        return made

    def _unescaped(self, func: Any, args: Any) -> Any:
        """Refuse what is handed the whole batch."""
        name = getattr(func, "__name__", "")
        if name in PRINTS and args and isinstance(args[0], Tensor) and is_functorch_wrapped_tensor(args[0]):
            raise Unsupported("a loss for one record that prints a tensor of the record", "print nothing there")
        _require_no_hooks()
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            _require_no_rule_of_its_own(func)
        elif name == "custom_function_call":
            if not getattr(args[0], "generate_vmap_rule", False):
                raise Unsupported(
                    f"{args[0].__name__}: a torch.autograd.Function that torch does not map over records itself",
                    f"set generate_vmap_rule = True on it, or {ONE_BY_ONE}",
                )
            return (_followed(args[0], self._call), *args[1:])
        return args


def _require_no_hooks() -> None:
    """What is below the map sees the whole batch: hooks on what is saved for the backward pass, and modes that see every operation."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        what = "hooks on saved tensors (activation checkpointing) in a loss for one record"
        raise Unsupported(what, f"leave them out, or {ONE_BY_ONE}")
    if torch._C._len_torch_dispatch_stack():
        raise Unsupported("a dispatch mode of torch in a loss for one record", "leave it out")


def _require_no_rule_of_its_own(func: Any) -> None:
    """A registered operation with a batching rule of its author's is handed the whole batch."""
    overloads = [func] if isinstance(func, torch._ops.OpOverload) else [getattr(func, name) for name in func.overloads()]
    for one in overloads:
        name = one.name()
        if name.partition("::")[0] not in BUILT_IN and torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched"):
            raise Unsupported(f"{name}: an operation with a batching rule of its own in a loss for one record", ONE_BY_ONE)


def _followed(function: Any, call: Call) -> Any:
    """The same torch.autograd.Function, whose own operations are seen as well."""

    def seen(work: Callable[..., Any]) -> Any:
        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            call.lenient += 1  # what torch hands over there is wrapped anew, and unmarked
            try:
                with _Apart(call):
                    return work(*args, **kwargs)
            finally:
                call.lenient -= 1

        return staticmethod(run)

    return type(function.__name__, (function,), {"forward": seen(function.forward), "backward": seen(function.backward)})


def lowered(call: Call, work: Callable[..., Any], *values: Tensor) -> Any:
    """``work(batch, *values)`` outside of the map: each value with the batch in front, also where all records share it.

    What `work` returns, a tensor or a tuple of tensors, is mapped again over its first dimension.

    Guarantees: for layers of dpfy alone; `work` must keep rows apart.
    """
    _require_no_hooks()
    interpreter, batch = retrieve_current_functorch_interpreter(), call.batch
    level, fronted = interpreter.level(), []
    for value in values:
        call.admit(value)
        t, dim = _unwrap_batched(value, level)
        fronted.append(t.unsqueeze(0).expand(batch, *t.shape) if dim is None else t if dim == 0 else t.movedim(dim, 0))
    with interpreter.lower(), torch._C.DisableTorchFunction():
        made = work(batch, *fronted)
    back = tuple([_add_batch_dim(t, 0, level) for t in made]) if isinstance(made, tuple) else _add_batch_dim(made, 0, level)
    call.mark(back)
    return back


def _attended(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of all records at once; torch maps its fast ways over records one by one."""
    inputs = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    size = max(t.dim() for t in inputs)
    fold = size > 3  # the first dimension of four and the batch are one
    own = max((t.shape[0] for t in inputs if t.dim() == size), default=1)

    def work(batch: int, *values: Tensor) -> Tensor:
        aligned = [t.reshape(batch, *[1] * (size + 1 - t.dim()), *t.shape[1:]) for t in values]
        if fold:
            aligned = [t.expand(-1, own, *[-1] * (size - 1)).flatten(0, 1) for t in aligned]
        q, k, v, *mask = aligned
        y = F.scaled_dot_product_attention(
            q, k, v, mask[0] if mask else None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return y.unflatten(0, (batch, own)) if fold else y

    return lowered(call, work, *inputs)  # type: ignore[no-any-return]


def losses_of_rows(f: RowLoss, model: Any, batch: Any, held: Iterable[Tensor] = ()) -> Tensor:
    """``f(model, record)`` for every row of `batch`, vectorised.

    Guarantees: the loss of a row is a function of that row, of the model, and of what `f` was given before; no tensor of an earlier
    call, and no memory of `held`, enters it. A function that torch cannot map over rows is refused.
    """
    leaves, structure = pytree.tree_flatten(batch)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call = Call([*held, *[leaves[place] for place in places]])

    def one(*fields: Tensor) -> Tensor:
        call.level = maybe_current_level() or 0
        filled = list(leaves)
        for place, field in zip(places, fields, strict=True):
            filled[place] = field
        call.mark(fields)
        with _Apart(call):
            return _single(f(model, pytree.tree_unflatten(filled, structure)), call)

    call.batch = len(leaves[places[0]])
    _ACTIVE.append(call)
    try:
        with _eager():
            return vmap(one, randomness="different")(*[leaves[place] for place in places])
    except IndexError:
        raise InvalidInput("record", *OUTSIDE) from None
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "out of bounds" in str(error):  # which would show the index
            raise InvalidInput("record", *OUTSIDE) from None
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error) for word in REFUSED_BY_TORCH):
            raise
        first = re.sub(r"\[[\d, ]+\]", "[...]", first)  # how many records there are is nobody's business
        raise Unsupported(f"a loss for one record that torch cannot map over records ({first})", ONE_BY_ONE) from error
    finally:
        _ACTIVE.pop()


def losses_one_by_one(f: RowLoss, model: Any, batch: Any, held: Iterable[Tensor] = ()) -> list[Tensor]:
    """``f(model, record)`` for one record after the other.

    Guarantees: `f` is given one record; no tensor of the call for another record, and no memory of `held`, enters its loss. Numbers that
    Python read from a tensor are not followed: one record, drawn anew, is computed a second time after all others, and must have the
    same loss.
    """
    leaves, structure = pytree.tree_flatten(batch)
    places, losses = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)], []
    kept = set(held)

    def loss_of(row: int) -> Tensor:
        call, filled = Call(kept, vectorised=False), list(leaves)
        for place in places:
            filled[place] = leaves[place][row].clone()  # memory of its own: from a view the batch could be reached
        call.mark(filled)
        _ACTIVE.append(call)
        try:
            with _Apart(call):
                return _single(f(model, pytree.tree_unflatten(filled, structure)), call)
        except IndexError:
            raise InvalidInput("record", *OUTSIDE) from None
        finally:
            _ACTIVE.pop()

    count, device = len(leaves[places[0]]), leaves[places[0]].device
    again = secrets.randbelow(count)
    for row in range(count):
        if row == again:
            start = _random(device)
        losses.append(loss_of(row))
    after = _random(device)
    _set_random(device, start)
    twice = loss_of(again).detach()
    _set_random(device, after)
    if not torch.allclose(twice, losses[again].detach(), rtol=torch.finfo(twice.dtype).eps ** 0.5, equal_nan=True):
        raise Unsupported("a loss of one record that changes with the records before it", KEEP_NONE)
    return losses


def _random(device: torch.device) -> tuple[Tensor, ...]:
    """The state of torch's generators, where random numbers for `device` come from."""
    own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *own)


def _set_random(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _single(loss: Any, call: Call) -> Tensor:
    """The loss of one record: one number."""
    if not isinstance(loss, Tensor):
        raise InvalidInput("loss", type(loss).__name__, "of one record must be a tensor of one number")
    if loss.numel() != 1 or not loss.is_floating_point():
        what = f"{loss.dtype} of shape {list(loss.shape)}"
        raise InvalidInput("loss", what, "of one record must be one number: reduce it over the record's own positions")
    call.admit(loss)
    return loss.reshape(())


def _eager() -> AbstractContextManager[Any]:
    """Compiled functions run as they were written: a compiled one cannot be mapped over rows."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
