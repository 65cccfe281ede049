"""What nodes of the autograd graph tell: the tensors that they saved, shapes, and the rules that read
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpfy.gradients.autograd.tape import BatchAxis
from dpfy.gradients.per_example.contribution import Contribution

Maker = Callable[[Tensor, int], Contribution]
"""The gradient that arrives at a node, and the number of examples, to the contribution at one input
of the node.
"""

Rule = Callable[[Any, int, BatchAxis], Maker | None]
"""A node, the number of its input, and where the batch lies in its gradient, to the maker of
contributions there.
"""


def saved(node: Any, *names: str) -> tuple[Any, ...] | None:
    """Tensors that `node` saved; None if a hook guards them: under activation checkpointing only
    the node itself may unpack them.
    """
    for name in names:
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None or getattr(raw, "unpack_hook", True) is not None:
            return None
    found = tuple(getattr(node, f"_saved_{name}") for name in names)
    return None if any(t is None for t in found) else found


def saved_again(node: Any, name: str) -> Any:
    """A tensor that `node` saved, also under activation checkpointing: read in a backward pass of
    its own, for which the part of the model around it is computed once more. The pass that is under
    way will find it unread.
    """
    if (found := saved(node, name)) is not None:
        return found[0]
    read: list[Any] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        end = start * 1
    end.register_hook(lambda grad: read.append(getattr(node, f"_saved_{name}")))
    torch.autograd.grad(end, start)
    return read[0]


def input_shape(node: Any, i: int) -> torch.Size:
    """The shape of input `i` of `node`."""
    child, number = node.next_functions[i]
    return torch.Size(child._input_metadata[number].shape)
