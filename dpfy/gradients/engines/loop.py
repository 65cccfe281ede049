"""The reference engine: one example at a time. Slow, obvious, exact in float64; every other engine
is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpfy.core.values import Bounded
from dpfy.gradients.autograd.single_example import SingleExample
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import (
    Engine,
    Grads,
    added,
    attached,
    checked,
    clipped_sum,
    no_reentrant_checkpoints,
    trainable,
    zeros,
)
from dpfy.gradients.per_example.rounding import as_rows


class Watching(Engine):
    """An engine that needs nothing of a model but its parameters, and its calls to run an example
    again by itself.
    """

    def __init__(self) -> None:
        self._params: dict[str, nn.Parameter] | None = None
        self._single: SingleExample | None = None

    def attach(self, model: nn.Module) -> None:
        """Remember the trainable parameters, and watch the model's calls."""
        self.detach()
        self._params, self._single = trainable(model), SingleExample(model)

    def detach(self) -> None:
        """Remove the hooks and forget the model."""
        if self._single is not None:
            self._single.close()
        self._params = self._single = None


class LoopEngine(Watching):
    """One ``autograd.grad`` for each example, clipped and added. Works for any differentiable
    model.
    """

    name = "loop"

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        params = attached(self._params)
        mask = checked(losses, mask)
        total = zeros(params, clip)
        names = list(params)
        for i in range(len(losses) if params else 0):
            if mask is None or mask[i]:
                added(
                    total,
                    clipped_sum(self._one(losses, i, list(params.values())), names, clip, None),
                )
        forget(self._single)
        return Bounded(total, clip.bound)

    def _one(self, losses: Tensor, i: int, params: list[nn.Parameter]) -> list[Tensor]:
        """The gradient of one loss, as lists of one row."""
        if (apart := getattr(losses, "apart", None)) is not None:  # each has a graph of its own
            if not apart[i].requires_grad:
                return [torch.zeros_like(p)[None] for p in params]
            with no_reentrant_checkpoints():
                own = torch.autograd.grad(apart[i], params, allow_unused=True)
            return [
                (torch.zeros_like(p) if g is None else dense(g))[None]
                for p, g in zip(params, own, strict=True)
            ]
        with no_reentrant_checkpoints():
            grads = torch.autograd.grad(losses[i], params, retain_graph=True, allow_unused=True)
        rows = [
            (torch.zeros_like(p) if g is None else dense(g))[None]
            for p, g in zip(params, grads, strict=True)
        ]
        return alone_where_needed(self._single, losses, slice(i, i + 1), params, rows)


def alone_where_needed(
    single: SingleExample | None,
    losses: Tensor,
    rows: slice,
    params: list[nn.Parameter],
    grads: list[Tensor],
) -> list[Tensor]:
    """`grads` ([rows, *parameter] each), where the examples that are not finite were run again by
    themselves.
    """
    finite = torch.stack([as_rows(g).isfinite().all(1) for g in grads]).all(0)
    if bool(finite.all()) or len(losses) == 1 or single is None:
        return grads
    for k in torch.nonzero(~finite).flatten().tolist():
        for g, again in zip(grads, single.alone(losses, rows.start + k, params), strict=True):
            g[k] = again
    return grads


def forget(single: SingleExample | None) -> None:
    """The calls before a bounded sum do not belong to the next one."""
    if single is not None:
        single.calls.clear()


def dense(grad: Tensor) -> Tensor:
    """A dense tensor for a gradient that an embedding with ``sparse=True`` may hand out sparse."""
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()
