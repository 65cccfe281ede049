"""Operations as they were recorded: calls with a reference in the place of each tensor, and what a
run of them may do otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

BATCH, CARRIED, DATA = 1, 2, 4
"""Where a value comes from, as bits: the batch, a tensor that an earlier step left behind, or the
records beside the batch.
"""

Contents = dict[int, torch.UntypedStorage]
"""By storage, what a run of a program starts from."""


ATOMS = frozenset(
    {type(None), int, float, bool, str, complex, torch.dtype, torch.device, torch.layout}
    | {torch.memory_format, torch.Generator}
)
"""Types of arguments that hold no tensors."""

SCRATCH = frozenset({torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor})
"""Operations that give a row an example first; what else they give, for the backward pass alone, is
as long as the batch's longest.
"""


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
    """One call: `arguments` are (args, kwargs) with a Ref in the place of each tensor. A view has
    nothing to run again.

    `read`: Python, or C++ for it, learns a value. `shaped`: the shape of what it gives follows from
    values, which Python may ask for.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, Any]
    inputs: list[Ref]
    outputs: list[Ref]
    written: list[Ref]
    view: bool = False
    read: bool = False
    shaped: bool = False
    graph: bool = False
    random: tuple[torch.Generator, Tensor] | None = None

    @property
    def name(self) -> str:
        """What torch calls it, without the overload."""
        return str(self.call).removeprefix("aten.").partition(".")[0]


@dataclass(frozen=True)
class Variation:
    """What a run of a program does otherwise than the step that was recorded, beside the records
    that were replaced.

    `contents`: other contents of storages from outside (moved parameters). `arguments`: other
    constants of operations, by their id. `seed`: random operations draw other numbers, the same
    ones in all runs with this seed.
    """

    contents: Contents = field(default_factory=dict)
    arguments: dict[int, Any] = field(default_factory=dict)
    seed: int | None = None

    def __bool__(self) -> bool:
        return bool(self.contents or self.arguments or self.seed is not None)


AS_IT_WAS = Variation()


def behind_attention(operation: Operation) -> bool:
    """Whether this is the backward pass of one of torch's kernels for attention."""
    return _behind_attention(operation.call)


@cache
def _behind_attention(call: Callable[..., Any]) -> bool:
    return str(call).partition(".default")[0].endswith("attention_backward")


def filled(value: Any, put: Callable[[Any], Any], kind: type = Ref) -> Any:
    """`value` with everything of `kind` in its tuples, lists and dicts replaced."""
    found = type(value)  # comparing types takes a fraction of what `isinstance` of a tensor does
    if found in ATOMS:
        return value
    if found is tuple:
        return tuple([filled(v, put, kind) for v in value])
    if found is list:
        return [filled(v, put, kind) for v in value]
    if found is dict:
        return {k: filled(v, put, kind) for k, v in value.items()} if value else value
    if found is kind or isinstance(value, kind):
        return put(value)
    if isinstance(value, tuple):
        return tuple([filled(v, put, kind) for v in value])
    return [filled(v, put, kind) for v in value] if isinstance(value, list) else value


def outputs_in(value: Any) -> list[Tensor]:
    """The tensors in a value that an operation gave."""
    if type(value) is Tensor or isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in outputs_in(v)] if isinstance(value, list | tuple) else []
