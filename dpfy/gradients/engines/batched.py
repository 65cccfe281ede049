"""The general engine: one vectorised backward through the vector of per-example losses, for any
differentiable model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import (
    Grads,
    added,
    attached,
    checked,
    clipped_sum,
    no_reentrant_checkpoints,
    zeros,
)
from dpfy.gradients.engines.loop import Watching, alone_where_needed, dense, forget

CHUNK_ELEMENTS = 2**26
"""How many per-example gradient elements may exist at once."""


class BatchedEngine(Watching):
    """Per-example gradients from one batched vector-Jacobian product a chunk of examples, then
    clipped and summed.

    Memory is bounded: at most `chunk_elements` gradient elements (but always one example) exist at
    a time.
    """

    name = "batched"

    def __init__(self, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        super().__init__()
        self._chunk_elements = chunk_elements

    def attach(self, model: nn.Module) -> None:
        """Remember the trainable parameters, and watch the model's calls."""
        self.detach()
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise Unsupported(
                    f"{name or type(module).__name__}: sparse=True in the batched engine",
                    "set sparse=False",
                )
        super().attach(model)

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        params = attached(self._params)
        mask = checked(losses, mask)
        total = zeros(params, clip)
        if not params or not len(losses):
            return Bounded(total, clip.bound)
        names, tensors = list(params), list(params.values())
        for rows in chunks(len(losses), sum(p.numel() for p in tensors), self._chunk_elements):
            per_unit = alone_where_needed(
                self._single, losses, rows, tensors, per_example(losses, tensors, rows)
            )
            added(total, clipped_sum(per_unit, names, clip, None if mask is None else mask[rows]))
        forget(self._single)
        return Bounded(total, clip.bound)


def chunks(batch: int, width: int, elements: int) -> list[slice]:
    """Slices of at most `elements // width` examples, at least one example each."""
    size = max(1, min(batch, elements // max(width, 1)))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def per_example(losses: Tensor, tensors: list[nn.Parameter], rows: slice) -> list[Tensor]:
    """Gradients of ``losses[rows]``, one by one, stacked: a list of [rows, *parameter]. The graph
    is kept.
    """
    count = rows.stop - rows.start
    picks = torch.zeros(count, len(losses), dtype=losses.dtype, device=losses.device)
    picks[torch.arange(count), torch.arange(rows.start, rows.stop)] = 1
    try:
        with no_reentrant_checkpoints():
            grads = torch.autograd.grad(
                losses, tensors, picks, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError | Unsupported):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unsupported(
            f"a vectorised backward through this model ({first})", "use engine='loop'"
        ) from error
    return [
        p.new_zeros(count, *p.shape) if g is None else dense(g)
        for p, g in zip(tensors, grads, strict=True)
    ]
