"""The reference engine: one example at a time. Slow, obvious, exact in float64; every other engine is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpfy.core.errors import DpfyError
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Grads, checked, clipped_sum, trainable, zeros


class LoopEngine:
    """One ``autograd.grad`` for each example, clipped and added. Works for any differentiable model."""

    name = "loop"

    def __init__(self) -> None:
        self._params: dict[str, nn.Parameter] | None = None

    def attach(self, model: nn.Module) -> None:
        """Remember the trainable parameters. Nothing is installed on the model."""
        self._params = trainable(model)

    def detach(self) -> None:
        """Forget the model."""
        self._params = None

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        params = attached(self._params)
        mask = checked(losses, mask)
        total = zeros(params)
        names, tensors = list(params), list(params.values())
        for i in range(len(losses) if tensors else 0):
            if mask is not None and not mask[i]:
                continue
            grads = torch.autograd.grad(losses[i], tensors, retain_graph=True, allow_unused=True)
            one = [(torch.zeros_like(p) if g is None else dense(g))[None] for p, g in zip(tensors, grads, strict=True)]
            for name, g in zip(names, clipped_sum(one, names, clip, None), strict=True):
                total[name].add_(g)
        return Bounded(total, clip.bound)


def dense(grad: Tensor) -> Tensor:
    """A dense tensor for a gradient that an embedding with ``sparse=True`` may hand out sparse."""
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()


def attached(params: dict[str, nn.Parameter] | None) -> dict[str, nn.Parameter]:
    """The parameters of an attached engine, or an error that says what to call first."""
    if params is None:
        raise DpfyError("engine: not attached to a model; call attach(model) before bounded_sum")
    return params
