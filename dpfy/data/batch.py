"""A batch: any nesting of dicts, tuples and lists whose leaves are tensors with one row for each
record.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput

Batch = Any
"""What training hands out and a collate function makes."""


class Look(IntEnum):
    """Whether a batch is checked for records that mix before they reach the model: never, if
    something in it is new, or always.
    """

    NEVER = 0
    IF_NEW = 1
    ALWAYS = 2


class Draw(NamedTuple):
    """Which records a physical batch holds, in the order of its rows, the `place`-th of a step;
    `key` is the step's, for augmentation.
    """

    indices: NDArray[np.int64]
    place: int
    key: bytes
    look: Look = Look.NEVER


def leaves(batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a batch, in the order of its structure."""
    return tuple(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


def placed(batch: Batch, device: torch.device | str) -> Batch:
    """The batch on `device`; from pinned memory the copy does not wait."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(device, non_blocking=t.device.type == "cpu" and t.is_pinned()), batch
    )


def plain(name: str, value: object, rows: int) -> Batch:
    """`value` in dicts, tuples, lists and tensors, each tensor with `rows` rows and memory of its
    own.

    Guarantees: what passes has no leaf but tensors and None, so that nothing enters a loss that the
    isolation check cannot replace; a message names the place of a leaf, never its value.
    """
    if isinstance(value, Mapping):
        return {key: plain(f"{name}[{key!r}]", part, rows) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *[
                plain(f"{name}.{key}", part, rows)
                for key, part in zip(value._fields, value, strict=True)
            ]
        )
    if isinstance(value, tuple | list):
        return type(value)(
            plain(f"{name}[{place}]", part, rows) for place, part in enumerate(value)
        )
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if not isinstance(value, Tensor):
        rule = "a batch holds tensors alone: convert it, or leave it out, in the collate function"
        raise InvalidInput(name, type(value).__name__, rule)
    if value.layout is not torch.strided or value.is_quantized:
        raise InvalidInput(
            name,
            f"a tensor of layout {value.layout}",
            "must be dense: make it so in the collate function",
        )
    if value.dim() == 0 or len(value) != rows:
        rule = (
            f"must have a row for each of the {rows} records of the batch: collate must keep "
            f"examples apart"
        )
        raise InvalidInput(name, f"shape {list(value.shape)}", rule)
    return _own(value)


def _own(value: Tensor) -> Tensor:
    """The tensor, dense and alone in its memory."""
    value = value.detach()
    whole = (
        value.is_contiguous()
        and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    )
    return value if whole else value.clone(memory_format=torch.contiguous_format)
