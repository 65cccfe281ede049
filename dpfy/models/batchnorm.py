"""Batch normalisation that keeps examples apart: with statistics that are public, or that were
released with noise before training.

Ordinary batch normalisation makes every example of a batch depend on the others, and keeps
statistics of the data without noise. Its scale and shift are weights like others. The guide's ways
out (Ponomareva et al. 2023, Table 5): statistics of public data, or statistics with noise.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput


class FrozenBatchNorm(nn.Module):
    """Batch normalisation by statistics that never change, whatever mode the model is in; scale and
    shift are weights as before.

    `statistics` says where they come from. Names in the state_dict are those of the layer that it
    replaces.

    Guarantees: a row of the result depends on that row of the input alone.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm, statistics: str) -> None:
        super().__init__()
        self.eps, self.statistics, self.replaces = norm.eps, statistics, type(norm).__name__
        self.weight, self.bias = norm.weight, norm.bias
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.register_buffer("running_mean", norm.running_mean.detach().clone())
        self.register_buffer("running_var", norm.running_var.detach().clone())
        if norm.num_batches_tracked is not None:
            self.register_buffer("num_batches_tracked", norm.num_batches_tracked.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """The input less its mean, by its spread, scaled and shifted, channel by channel."""
        return normalised(x, self.running_mean, self.running_var, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What it replaces, and whose statistics it has."""
        return f"{len(self.running_mean)}, eps={self.eps}, statistics={self.statistics!r}"


class PublicBatchNorm(nn.Module):
    """Batch normalisation by statistics of public records at this place of the model, with the
    weights as they are now.

    It works inside of :class:`WithPublicRecords`, which measures them.
    """

    def __init__(self, norm: _BatchNorm, statistics: str) -> None:
        super().__init__()
        self.eps, self.statistics, self.replaces = norm.eps, statistics, type(norm).__name__
        self.weight, self.bias = norm.weight, norm.bias
        self.measures = False
        self._found: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The input, normalised by the statistics that were measured last; where it measures, by
        its own.
        """
        if self.measures:
            across = [0, *range(2, x.dim())]
            self._found = x.mean(across), x.var(across, unbiased=False)
        if self._found is None:
            raise InvalidInput(
                "model", "called inside of its wrapper", "call the model that dpfy.repair returned"
            )
        return normalised(x, *self._found, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What it replaces, and whose statistics it has."""
        return f"eps={self.eps}, statistics={self.statistics!r}"


class WithPublicRecords(nn.Module):
    """A model with :class:`PublicBatchNorm`: before every batch the public records run through it,
    and tell each layer its statistics.

    In training and afterwards alike, so the public records are kept as buffers, and are published
    with the weights. Gradients take the statistics as given numbers: those of an example are its
    own, and what moves the statistics moves them from the next step on.

    Guarantees: statistics are a function of the weights and of public records, so that a row of the
    result depends on that row of the input alone.
    """

    def __init__(self, model: nn.Module, public: Any) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = pytree.tree_flatten(public)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) < 2:
                shown = (
                    f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                )
                raise InvalidInput(
                    "public",
                    shown,
                    "must be tensors of at least 2 public records, as the model takes them",
                )
            self.register_buffer(f"public_{place}", leaf.detach().clone())
        self._leaves = len(leaves)
        measured = copy.deepcopy(model).eval().to("meta")
        for layer in _layers(measured):
            layer.measures = True
        self._measured = (measured,)  # in a tuple: no part of the model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model gives, normalised by public statistics."""
        self._measure()
        return self.model(*inputs, **named)

    @torch.no_grad()
    def _measure(self) -> None:
        held = {
            name: t.detach()
            for name, t in (*self.model.named_parameters(), *self.model.named_buffers())
        }
        public = pytree.tree_unflatten(
            [self.get_buffer(f"public_{n}") for n in range(self._leaves)], self._structure
        )
        if isinstance(public, dict):
            functional_call(self._measured[0], held, (), public, tie_weights=True)
        else:
            functional_call(
                self._measured[0],
                held,
                public if isinstance(public, tuple | list) else (public,),
                tie_weights=True,
            )
        for mine, seen in zip(_layers(self.model), _layers(self._measured[0]), strict=True):
            mine._found, seen._found = seen._found, None


def normalised(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps), scaled and shifted, where channels are the second
    dimension.
    """
    shape = (-1, *[1] * (x.dim() - 2))
    scale = (variance + eps).rsqrt()
    y = torch.addcmul((-mean * scale).to(x.dtype).view(shape), x, scale.to(x.dtype).view(shape))
    if weight is None and bias is None:
        return y
    y = y.movedim(1, -1)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).movedim(-1, 1)


def _layers(model: nn.Module) -> list[PublicBatchNorm]:
    return [module for module in model.modules() if isinstance(module, PublicBatchNorm)]
