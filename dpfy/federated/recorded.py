"""A local step of many clients as a CUDA graph: forward, backward and move of all of them, launched
whole.

Small models leave a fast GPU waiting for launches. Shapes of a graph are static: cohorts are filled
up to a few sizes, and what the clients that fill them compute is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.cuda_graphs.recorder import bucket_size

Named = dict[str, Tensor]
LocalStep = Callable[[Named, Named, Tensor, Tensor, Tensor], None]
"""(weights sent, updates so far, clients, places of their records, which places count): adds one
local step to the updates.
"""


class RecordedSteps:
    """Local training by graphs of one step, one graph for each size of a cohort.

    Guarantees: the updates are those of `step`, called for one local step after another from
    updates of zero, if what it computes depends on the tensors it is given and on memory that stays
    as it is. The first call for a size also gives the graph's answer: a round that is made again
    gives the same numbers. What is returned is not overwritten.
    """

    def __init__(self, step: LocalStep, pool: graphs.GraphPool | None = None) -> None:
        self._step, self._pool = step, pool or graphs.GraphPool(apart=False)
        self._made: dict[tuple[object, ...], _Recorded] = {}

    def __call__(self, sent: Named, clients: Tensor, places: Tensor, counts: Tensor) -> Named:
        """Updates of `clients` after the steps of `places` and `counts`, both [clients, steps,
        width].
        """
        wanted = len(clients)
        missing = -wanted % bucket_size(wanted)
        clients, places, counts = (
            torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in (clients, places, counts)
        )
        key = (
            len(clients),
            places.shape[2],
            *((p.shape, p.dtype) for p in sent.values()),
            *_settings(),
        )
        with graphs.on(clients.device) if clients.is_cuda else nullcontext():
            if key not in self._made:
                self._made[key] = _Recorded(
                    self._step, self._pool, sent, (clients, places[:, 0], counts[:, 0])
                )
            updates = self._made[key].run(
                sent, clients, places.transpose(0, 1), counts.transpose(0, 1)
            )
            return {name: t[:wanted].clone() for name, t in updates.items()}


class _Recorded:
    """One step for so many clients, on memory of its own."""

    def __init__(
        self,
        step: LocalStep,
        pool: graphs.GraphPool,
        sent: Named,
        batch: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        self._sent = {name: p.clone() for name, p in sent.items()}
        self._updates = {name: p.new_zeros(len(batch[0]), *p.shape) for name, p in sent.items()}
        clients, places, counts = self._batch = tuple(t.clone() for t in batch)

        def work() -> None:
            step(self._sent, self._updates, clients, places, counts)

        work()  # kernels are loaded, and constants and workspaces made, which a graph cannot do
        self._graph, _ = pool.record(work, clients.device, 0)

    def run(self, sent: Named, clients: Tensor, places: Tensor, counts: Tensor) -> Named:
        """The updates after all steps. The next run overwrites them."""
        for mine, new in zip(self._sent.values(), sent.values(), strict=True):
            mine.copy_(new)
        for update in self._updates.values():
            update.zero_()
        self._batch[0].copy_(clients)
        for some, counted in zip(places, counts, strict=True):
            self._batch[1].copy_(some)
            self._batch[2].copy_(counted)
            self._graph.replay()
        return self._updates


def _settings() -> tuple[object, ...]:
    """How products are computed: part of a graph."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
