"""Tensors inside nested tuples, lists and dicts: what models take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor inside `value`, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors_in(v)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its tuples, lists and plain dicts replaced by
    ``change(tensor)``.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(mapped(v, change) for v in value)
    if isinstance(value, list):
        return [mapped(v, change) for v in value]
    if type(value) is dict:
        return {k: mapped(v, change) for k, v in value.items()}
    return value
