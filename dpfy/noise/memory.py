"""Past noise in tensors: weighted sums over a stack of past values, in the precision of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpfy.noise.series import single

if TYPE_CHECKING:
    from torch import Tensor

    from dpfy.noise.strategy import Grads, State


def stacks(like: Grads, depth: int) -> State:
    """A stack of `depth` zero tensors for each parameter, in the dtype in which noise is drawn.

    That is float64 if any parameter is, else float32: half-precision parameters too, for noise kept in half precision would not be
    the noise that was billed.
    """
    import torch

    dtype = torch.float64 if any(t.dtype == torch.float64 for t in like.values()) else torch.float32
    return {name: torch.zeros((depth, *t.shape), dtype=dtype, device=t.device) for name, t in like.items()}


def doubled(stack: Tensor) -> Tensor:
    """The stack with room for twice as many values."""
    import torch

    return torch.cat([stack, torch.zeros_like(stack)])


def rounded(weights: Sequence[float], noise: Tensor) -> list[float]:
    """The weights as `noise`'s precision holds them, rounded toward zero."""
    import torch

    return list(weights) if noise.dtype == torch.float64 else [single(w) for w in weights]


def vector(weights: Sequence[float], noise: Tensor) -> Tensor:
    """The rounded weights as a tensor beside `noise`."""
    import torch

    return torch.tensor(rounded(weights, noise), dtype=noise.dtype, device=noise.device)


def weighted(stack: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights[i] * stack[i]. A matrix-vector product: it never runs in a reduced (TF32) precision, unlike a matrix product."""
    import torch

    return torch.mv(stack.reshape(len(stack), -1).t(), weights).view(stack.shape[1:])
