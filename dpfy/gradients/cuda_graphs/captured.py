"""The bounded sum of one batch shape as CUDA graphs: forward, backward, norms and weighted sums launched as two units.

A private step has about as much to compute as a plain one, but more and smaller pieces; on a fast GPU the time goes to launching
them. A graph is launched whole. Shapes are static, so batches are padded and masked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.contributions.clipped_sum import Flag
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.engine import Grads
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.kernels import addresses

LossesOf = Callable[..., Tensor]
"""A batch's tensors to one loss per unit, through the model."""

WARM = 3
"""Steps that run as usual first: layouts are measured, kernels compiled and workspaces made, none of which a graph can do."""


class CapturedSum:
    """`losses_of` and the engine's bounded sum for batches of one shape; other shapes, and the first few batches, run as usual.

    Guarantees: the same sum as ``engine.bounded_sum(losses_of(*batch), clip, mask)``: a batch with a NaN or an infinity in it is run
    again outside of the graph, and the graph's answer is dropped. The clip rule is part of the graph; with another rule a new
    graph is made. The returned tensors are overwritten by the next call.
    """

    def __init__(self, engine: object, losses_of: LossesOf) -> None:
        if not isinstance(engine, BookkeepingEngine):
            name = getattr(engine, "name", type(engine).__name__)
            raise Unsupported(f"a captured step with engine {name}", "use engine='bookkeeping' or graph=False")
        self._engine, self._losses_of = engine, losses_of
        self._runs = 0
        self._key: tuple[object, ...] | None = None
        self._graph: _CapturedGraphs | None = None

    def __call__(self, batch: tuple[Tensor, ...], clip: Clip, mask: Tensor | None) -> Bounded[Grads]:
        """The bounded sum of `batch` over the units kept by `mask`."""
        key = (clip, *[(t.shape, t.dtype) for t in batch], *self._engine.addresses())
        if key != self._key:
            self._key, self._runs, self._graph = key, 0, None
        self._runs += 1
        if self._runs > WARM and batch[0].is_cuda and self._engine.steady:
            mask = torch.ones(len(batch[0]), dtype=torch.bool, device=batch[0].device) if mask is None else mask
            if self._graph is None:
                self._graph = _CapturedGraphs(self._engine, self._losses_of, batch, clip, mask)
                graphs.release_private_pool()
            if (total := self._graph.replay(batch, mask)) is not None:
                return total
        return self._engine.bounded_sum(self._losses_of(*batch), clip, mask)


class _CapturedGraphs:
    """Two graphs that share their memory: up to the multipliers, and the weighted sums. Between them it is known if all is finite."""

    def __init__(
        self, engine: BookkeepingEngine, losses_of: LossesOf, batch: tuple[Tensor, ...], clip: Clip, mask: Tensor
    ) -> None:
        self._batch, self._mask = tuple(t.clone() for t in batch), mask.clone()
        self._first, self._second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._tables, self._sound = addresses.Tables(mask.device), Flag(mask.device)
        with addresses.writing(self._tables):
            with torch.cuda.graph(self._first, pool=pool, stream=stream, capture_error_mode="thread_local"):
                weighed = engine.weighed(losses_of(*self._batch), clip, self._mask)
                assert weighed is not None
                self._sound.put(weighed.sound)
            with torch.cuda.graph(self._second, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._total = engine.summed(weighed, last=True)
        self._tables.send()

    def replay(self, batch: tuple[Tensor, ...], mask: Tensor) -> Bounded[Grads] | None:
        """The bounded sum of `batch`; None if a norm was not finite."""
        for mine, new in zip((*self._batch, self._mask), (*batch, mask), strict=True):
            mine.copy_(new, non_blocking=True)
        self._first.replay()
        self._sound.mark()
        self._second.replay()
        return self._total if self._sound.value() else None
