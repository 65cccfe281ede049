"""The bounded sum of one batch shape as CUDA graphs: forward, backward, norms and weighted sums
launched as two units.

A private step has about as much to compute as a plain one, but more and smaller pieces; on a fast
GPU the time goes to launching them. A graph is launched whole. Shapes are static, so batches are
padded and masked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.cuda_graphs.recorded_step import RecordedStep
from dpfy.gradients.engine import Grads, checked, no_autocast
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.bounded_sum import BoundedSum, Parts
from dpfy.gradients.per_example.clipped_sum import ClippedSum

LossesOf = Callable[..., Tensor]
"""A batch's tensors to one loss per unit, through the model."""

WARM = 3
"""Steps that run as usual first: batch axes are found, kernels compiled and workspaces made, none
of which a graph can do.
"""


class CapturedSum:
    """`losses_of` and the engine's bounded sum for batches of one shape; other shapes, and the
    first few batches, run as usual.

    Guarantees: the same sum as ``engine.bounded_sum(losses_of(*batch), clip, mask)``: a batch with
    a NaN or an infinity in it is run again outside of the graph, and the graph's answer is dropped.
    The clip rule is part of the graph; with another rule a new graph is made. The returned tensors
    are overwritten by the next call.
    """

    def __init__(self, engine: object, losses_of: LossesOf) -> None:
        if not isinstance(engine, BookkeepingEngine):
            name = getattr(engine, "name", type(engine).__name__)
            raise Unsupported(
                f"a captured step with engine {name}", "use engine='bookkeeping' or graph=False"
            )
        self._engine, self._losses_of = engine, losses_of
        self._runs = 0
        self._key: tuple[object, ...] | None = None
        self._step: _CapturedStep | None = None

    def __call__(
        self, batch: tuple[Tensor, ...], clip: Clip, mask: Tensor | None
    ) -> Bounded[Grads]:
        """The bounded sum of `batch` over the units kept by `mask`."""
        sums = self._engine.sums
        key = (clip, *[(t.shape, t.dtype) for t in batch], *sums.addresses())
        if key != self._key:
            self._key, self._runs, self._step = key, 0, None
        self._runs += 1
        if self._runs > WARM and self._can(batch):
            mask = (
                torch.ones(len(batch[0]), dtype=torch.bool, device=batch[0].device)
                if mask is None
                else mask
            )
            with graphs.on(batch[0].device):
                if self._step is None:
                    self._step = _CapturedStep(sums, self._losses_of, batch, clip, mask)
                    graphs.release_private_pool()
                if (total := self._step.run(batch, mask)) is not None:
                    return total
        return self._engine.bounded_sum(self._losses_of(*batch), clip, mask)

    def _can(self, batch: tuple[Tensor, ...]) -> bool:
        """Whether the whole step is this device's own and stays as it is."""
        sums = self._engine.sums
        return batch[0].is_cuda and bool(sums.params) and sums.steady and self._engine.alone


class _CapturedStep:
    """A recorded step with forward and backward in it, on a copy of the batch."""

    def __init__(
        self,
        sums: BoundedSum,
        losses_of: LossesOf,
        batch: tuple[Tensor, ...],
        clip: Clip,
        mask: Tensor,
    ) -> None:
        self._batch = tuple(t.clone() for t in batch)
        self._step = RecordedStep(mask.device, mask.clone())

        def weigh(mask: Tensor | None) -> ClippedSum:
            losses, parts = losses_of(*self._batch), Parts()
            mask = checked(losses, mask)
            with torch.no_grad(), no_autocast(losses.device.type):
                sums.gather(losses, parts)
                return sums.weigh(parts, clip, mask)

        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # the graphs take what the steps before them held
        pool = graphs.GraphPool(apart=False)
        scaled = self._step.record(pool, weigh)
        self._total = self._step.record_sum(pool, lambda: sums.sum(scaled, last=True), 1 << 17)

    def run(self, batch: tuple[Tensor, ...], mask: Tensor) -> Bounded[Grads] | None:
        """The bounded sum of `batch`; None if a norm was not finite."""
        for mine, new in zip(self._batch, batch, strict=True):
            mine.copy_(new, non_blocking=True)
        self._step.weigh(mask)
        return self._total if self._step.add() else None
