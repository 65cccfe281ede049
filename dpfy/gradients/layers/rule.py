"""What a layer rule is, and what the rules share.

A rule computes what the layer computes, but with its parameters detached, and puts a tap on the
result. Whatever gradient still reaches a parameter through autograd was therefore not explained by
any rule, and the engine handles it by another route.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.gradients.per_example.contribution import Contribution

Found = list[tuple[Tensor, Contribution]]
RowsFirst = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerRule:
    """How one layer type runs under the tape. `fits` says whether this very module can be
    explained.
    """

    run: Callable[..., Any]
    fits: Callable[[Any], bool] = lambda module: True
    own: tuple[str, ...] | None = ("weight", "bias")
    """The names under which a module of this type may hold parameters of its own; None: any."""
    batch_dims: int = 0
    """How many of the first dimensions of its output may hold the batch; 0: all but the last."""


def plain_parameters(module: nn.Module, own: tuple[str, ...] | None = ("weight", "bias")) -> bool:
    """Whether `own` are the module's own parameters: not computed by a parametrization, and nothing
    beside them.
    """
    if own is None:
        return True
    names = {name for name, p in module._parameters.items() if p is not None}
    listed = getattr(module, "_flat_weights_names", own)  # recurrent layers have a list of theirs
    read = {name for name in listed if getattr(module, name, None) is not None}
    return names == read


def constant(p: Tensor | None) -> Tensor | None:
    """The parameter's value, outside of autograd."""
    return None if p is None else p.detach()


def wanted(found: list[tuple[Tensor | None, Callable[[], Contribution]]]) -> Found:
    """The contributions of the parameters that exist and are trainable, computed only for them."""
    return [(p, make()) for p, make in found if p is not None and p.requires_grad]


def as_positions(t: Tensor) -> Tensor:
    """[batch, ..., features] to [batch, positions, features]."""
    return t.unsqueeze(1) if t.dim() == 2 else t.flatten(1, -2)


def total(t: Tensor, keep: int) -> Tensor:
    """Sum [batch, ..., *last `keep` dimensions] over everything between, in float32 or wider."""
    middle = list(range(1, t.dim() - keep))
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    if all(t.shape[i] == 1 for i in middle):
        return t.flatten(0, len(middle))
    return t.sum(middle, dtype=dtype)


def total_space(t: Tensor) -> Tensor:
    """[many, channels, *space] to [many, channels] sums, in float32 or wider."""
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    return t.sum(list(range(2, t.dim())), dtype=dtype) if t.dim() > 2 else t.to(dtype)
