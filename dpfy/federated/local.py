"""Local training of a whole cohort at once: each client takes some steps on its own records, from
the weights it was sent.

    Delta_u = theta - w_u after K steps w_u <- w_u - rate * (mean gradient of a minibatch of client
    u at w_u)

The clients' weights are stacked, and one pass of the model serves all of them; a loop over clients
computes the same, one by one.

A local step of many clients as a CUDA graph: forward, backward and move of all of them, launched
whole.

Small models leave a fast GPU waiting for launches. Shapes of a graph are static: cohorts are filled
up to a few sizes, and what the clients that fill them compute is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.data.users import UserRecords
from dpfy.federated.folded import chain, folded
from dpfy.federated.tiled import NewMemory, SameMemory, stages, tiled
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.cuda_graphs.recorder import bucket_size
from dpfy.gradients.engine import trainable
from dpfy.training.objective import Objective

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


FEDAVG, FEDSGD = METHODS = ("fedavg", "fedsgd")
"""Weights move between local steps; or they stand still, and the gradients of all minibatches are
added up.
"""
BATCHED, LOOP = WAYS = ("batched", "loop")
CPU_CLIENTS = 25
"""Clients computed at once on a CPU: more of them leave its caches."""
WORKERS = 8
"""Threads that compute clients side by side on a CPU: more of them would wait for each other's turn
in Python.
"""
GPU_ELEMENTS = 1 << 31
"""Numbers of the clients' weights at once on a GPU."""


@dataclass(frozen=True)
class LocalTraining:
    """What a client does with its records in a round: `steps` of SGD on minibatches of
    `batch_size`, all of its records by default.

    A client goes through its records in an order drawn again for each round, and again from the
    beginning if it has few; a minibatch never holds a record twice. "fedsgd" takes no local step:
    it adds up the gradients at the weights that were sent. `at_once` is how many clients are
    computed together; like `way`, it changes speed and memory alone.
    """

    steps: int = 1
    batch_size: int | None = None
    learning_rate: float = 1.0
    method: str = FEDAVG
    way: str = BATCHED
    at_once: int | None = None

    def __post_init__(self) -> None:
        check.integer("local.steps", self.steps)
        object.__setattr__(
            self, "learning_rate", check.positive("local.learning_rate", self.learning_rate)
        )
        for name in ("batch_size", "at_once"):
            if getattr(self, name) is not None:
                check.integer(f"local.{name}", getattr(self, name))
        check.one_of("local.method", self.method, METHODS)
        check.one_of("local.way", self.way, WAYS)
        if self.method == FEDSGD and self.learning_rate != 1:
            raise InvalidInput(
                "local.learning_rate",
                self.learning_rate,
                "must be 1 for fedsgd: the server's rate is the only one",
            )

    @property
    def is_gradient(self) -> bool:
        """Whether an update is the gradient of a client's whole data at the weights that were sent,
        times the rate.
        """
        return self.steps == 1 and self.batch_size is None


class LocalUpdates:
    """Computes the updates of cohorts from the clients' records.

    Guarantees: the update of a client is a function of the weights, its own records, the round and
    the run's secret, anyone who else is in the cohort.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: UserRecords,
        local: LocalTraining,
        aim: Objective,
        secret: Randomness,
    ) -> None:
        *fields, real = clients.tensors
        self._model, self._local, self._randomness = model, local, secret
        self._fields, self._device = tuple(fields), real.device
        self._sizes: NDArray[np.int64] = real.sum(1).cpu().numpy()
        self._width = (
            real.shape[1] if local.batch_size is None else min(local.batch_size, real.shape[1])
        )
        frozen = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        def one(weights: dict[str, Tensor], batch: tuple[Tensor, ...], counts: Tensor) -> Tensor:
            """The mean loss of one client's minibatch."""

            def call(*inputs: object, **named: object) -> object:
                return functional_call(model, {**frozen, **weights}, inputs, named)

            losses = aim.losses_of(call)(batch)  # type: ignore[arg-type]
            return torch.where(counts, losses, 0.0).sum() / counts.sum()

        self._one = one
        self._all: Callable[..., Tensor] = vmap(one, randomness="different")
        self._recorded: RecordedSteps | None = None
        self._memory, self._workers = NewMemory(), 1
        known = aim.whole is None and isinstance(
            aim.loss, str
        )  # a function of the caller's may do what only Python repeats
        fast = known and local.way == BATCHED
        memory = SameMemory() if fast and real.device.type == "cpu" else self._memory
        chained = one_pass(model, fields[0].dim() - 2, memory)
        if chained is not None and len(fields) == 2 and set(trainable(model)) == set(frozen):
            self._all, self._memory = partial(_through, chained, aim), memory
            if fast and real.device.type == "cpu":
                self._workers = WORKERS
            elif fast and real.is_cuda and graphs.problem(real.device) is None:
                self._recorded = RecordedSteps(self._step)

    def __call__(self, step: int, clients: NDArray[np.int64]) -> dict[str, Tensor]:
        """The updates of these clients in round `step`, stacked: tensors of shape [clients,
        *parameter].
        """
        sent = {name: p.detach() for name, p in trainable(self._model).items()}
        updates = {name: p.new_zeros(len(clients), *p.shape) for name, p in sent.items()}

        def fill(part: slice) -> None:
            self._fill(
                {name: rows[part] for name, rows in updates.items()}, sent, step, clients[part]
            )

        workers = min(torch.get_num_threads(), self._workers)
        most = self._at_once(len(clients), workers, sum(p.numel() for p in sent.values()))
        side_by_side(
            fill, [slice(start, start + most) for start in range(0, len(clients), most)], workers
        )
        return updates

    def _at_once(self, clients: int, workers: int, numbers: int) -> int:
        """How many of so many clients are computed together, with so many numbers each."""
        most = CPU_CLIENTS if self._device.type == "cpu" else max(1, GPU_ELEMENTS // numbers)
        return self._local.at_once or max(1, min(most, -(-clients // workers)))

    def _fill(
        self,
        updates: dict[str, Tensor],
        sent: dict[str, Tensor],
        step: int,
        clients: NDArray[np.int64],
    ) -> None:
        """Write the updates of as many clients as are computed at once, into zeros. The update
        itself is kept, not the weights: one step loses no digit.
        """
        places, counts = self._minibatches(step, clients)
        who = torch.from_numpy(clients).to(self._device)
        if self._recorded is not None:
            for name, found in self._recorded(sent, who, places, counts).items():
                updates[name].copy_(found)
            return
        for k in range(self._local.steps):
            self._step(sent, updates, who, places[:, k], counts[:, k])

    def _step(
        self,
        sent: dict[str, Tensor],
        updates: dict[str, Tensor],
        who: Tensor,
        places: Tensor,
        counts: Tensor,
    ) -> None:
        """One local step of these clients, from the updates they have come to."""
        memory = self._memory
        memory.begin()
        if self._local.method == FEDAVG:
            at = {
                n: torch.sub(p, updates[n], out=memory.empty(p, *updates[n].shape)).detach()
                for n, p in sent.items()
            }
        else:
            at = {n: p.expand_as(updates[n]).detach() for n, p in sent.items()}
        batch = tuple(field[who[:, None], places] for field in self._fields)
        for name, gradient in self._gradients(at, batch, counts).items():
            updates[name].add_(gradient, alpha=self._local.learning_rate)

    def _gradients(
        self, at: dict[str, Tensor], batch: tuple[Tensor, ...], counts: Tensor
    ) -> dict[str, Tensor]:
        """For each client the gradient of its minibatch at its own weights."""
        weights = {name: t.requires_grad_() for name, t in at.items()}
        if self._local.way == BATCHED:
            try:
                losses = self._all(weights, batch, counts)
            except RuntimeError as problem:
                if isinstance(problem, torch.OutOfMemoryError):
                    raise
                first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
                raise Unsupported(
                    f"one pass of this model for many clients ({first})",
                    'use LocalTraining(way="loop")',
                ) from problem
        else:
            alone = [
                pytree.tree_map(lambda t, i=i: t[i], (weights, batch, counts))
                for i in range(len(counts))
            ]
            losses = torch.stack([self._one(*arguments) for arguments in alone])
        found = torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True)
        return {name: g for name, g in zip(weights, found, strict=True) if g is not None}

    def _minibatches(self, step: int, clients: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Which of its records each client takes at each local step, [clients, steps, width], and
        which of these places count.
        """
        local, width = self._local, self._width
        places = np.arange(local.steps * width).reshape(local.steps, width)
        taken = np.empty((len(clients), *places.shape), np.int64)
        key = np.frombuffer(self._randomness.key("local", step), dtype=np.uint64)
        for row, client in enumerate(clients):
            size = self._sizes[client]
            if local.batch_size is None:
                taken[row] = np.minimum(np.arange(width), size - 1)
                continue
            own = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, int(client)]))
            taken[row] = own.permutation(size)[places % size]
        counts = np.broadcast_to(
            (np.arange(width) < self._sizes[clients][:, None])[:, None], taken.shape
        )
        return torch.from_numpy(taken).to(self._device), torch.from_numpy(counts.copy()).to(
            self._device
        )


def side_by_side(work: Callable[[slice], None], parts: Sequence[slice], workers: int) -> None:
    """Do the parts of some work by so many threads, which share the processors that torch may
    use.
    """
    threads, workers = torch.get_num_threads(), min(workers, len(parts))
    if workers < 2:
        for part in parts:
            work(part)
        return
    pool = ThreadPoolExecutor(
        workers, initializer=torch.set_num_threads, initargs=(max(1, threads // workers),)
    )
    try:
        for _ in pool.map(work, parts):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # a thread's own number is also that of threads to come


OnePass = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""From stacked weights and rows [clients, rows, ...] to what each client's model makes of its own
rows.
"""


def one_pass(model: nn.Module, dimensions: int, memory: NewMemory | None = None) -> OnePass | None:
    """One pass for many clients, if `model` is a chain of plain layers for records of so many
    `dimensions`; else None.

    `memory` is where it computes, if it can be told.

    Guarantees: it computes what the model does with the weights of each client.
    """
    if not (layers := chain(model, dimensions)):
        return None
    made = stages(layers)
    return partial(folded, layers) if made is None else partial(tiled, made, memory=memory)


def _through(
    chained: OnePass,
    aim: Objective,
    weights: dict[str, Tensor],
    batch: tuple[Tensor, ...],
    counts: Tensor,
) -> Tensor:
    """The mean losses of the clients' minibatches by one pass through a chain of layers."""

    def call(x: Tensor) -> Tensor:
        return chained(weights, x.unflatten(0, counts.shape)).flatten(0, 1)

    losses = aim.losses_of(call)(tuple(field.flatten(0, 1) for field in batch))  # type: ignore[arg-type]
    return torch.where(counts, losses.view(counts.shape), 0.0).sum(1) / counts.sum(1)
