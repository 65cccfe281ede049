"""Work as CUDA graphs, and memory for it that is not taken from among the model's tensors.

A step of a recurrence is a few small kernels, and a fast GPU waits for their launches. What some
steps do is recorded once, on memory of its own; :class:`RepeatedLoop` then copies into that memory
what these steps read, launches the graph, and copies out what they made. So the loop may read and
write anywhere, and layers of one shape share a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from dpfy.core.errors import DpfyError, Unsupported
from dpfy.gradients.kernels import Tables, writing

T = TypeVar("T")

_POOLS: dict[tuple[str, int], torch.cuda.MemPool] = {}
"""Memory by purpose and device, held here so that no garbage collection can end a pool: that is
allowed only between allocations.
"""


def private_pool() -> AbstractContextManager[None]:
    """Take memory from a place of its own, as graphs do: where the model's tensors lie then does
    not depend on who does the work.
    """
    return _from_pool("work")


def release_private_pool() -> None:
    """Give the memory of work that graphs do from now on back to the device."""
    _POOLS.pop(("work", torch.cuda.current_device()), None)


def on(device: torch.device) -> AbstractContextManager[object]:
    """`device` as the current one; nothing is done where it is."""
    return (
        nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)
    )


def queue(device: torch.device) -> torch.cuda.Stream | None:
    """The current queue of `device`, where it has queues."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def settings(device: torch.device) -> tuple[object, ...]:
    """What a graph depends on besides its tensors: how products are computed, and the queue."""
    matmul = torch.backends.cuda.matmul
    reduced = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    return (
        matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        *reduced,
        torch._C._cuda_getCurrentRawStream(device.index),
    )


def _from_pool(purpose: str) -> AbstractContextManager[None]:
    key = (purpose, torch.cuda.current_device())
    if key not in _POOLS:
        _POOLS[key] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(_POOLS[key])


def unowned(t: torch.Tensor) -> torch.Tensor:
    """What lies where `t` lies, without keeping the memory: for memory of a graph, which its pool
    keeps.
    """
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    size = (last + 1) * t.element_size() if t.numel() else 0
    storage = torch._C._construct_storage_from_data_pointer(t.data_ptr(), t.device, size)  # type: ignore[attr-defined]
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


class CudaGraph:
    """Work that is launched whole, on the tensors it was recorded with: their memory must hold what
    the work is to read.
    """

    def __init__(
        self, device: torch.device, addresses: int, memory: AbstractContextManager[object]
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with memory:
            self._tables = Tables(device, addresses)

    def capture(self, work: Callable[[], T], pool: Any, stream: torch.cuda.Stream) -> T:
        """Record `work`. What it returns is written when the graph is replayed, not before."""
        here, collecting = torch.cuda.current_stream(), gc.isenabled()
        stream.wait_stream(here)
        # what a collection frees could be something that must not be freed during a capture
        gc.disable()
        try:
            with writing(self._tables), torch.cuda.stream(stream):
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    torch.zeros(1, device=here.device)  # a graph of nothing would be warned of
                    made = work()
                finally:
                    self._graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        here.wait_stream(stream)
        self._tables.send()
        return made

    def replay(self) -> None:
        """Launch the work."""
        self._graph.replay()


class GraphPool:
    """Graphs that belong together: one pool of memory for all of them, so that they take turns in
    it.

    `apart`: what they keep besides is not taken from among the model's tensors, so that those lie
    where they would lie without it.
    """

    def __init__(self, apart: bool = True) -> None:
        self._apart = apart
        self._pool: Any = None

    def record(
        self, work: Callable[[], T], device: torch.device, addresses: int
    ) -> tuple[CudaGraph, T]:
        """`work` as a graph, and what it returns. `addresses`: how many its kernels may need."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = CudaGraph(device, addresses, self._memory())
        return graph, graph.capture(work, self._pool, _recording_queue(torch.cuda.current_device()))

    def clear(self) -> None:
        """Begin again once all graphs are gone: their pool went with the last of them."""
        self._pool = None

    def like(self, t: torch.Tensor) -> torch.Tensor:
        """Memory of the shape of `t` that stays, for what graphs read."""
        with self._memory():
            return torch.empty_like(t)

    def _memory(self) -> AbstractContextManager[object]:
        return _from_pool("kept") if self._apart else nullcontext()


@lru_cache(maxsize=16)
def _recording_queue(device: int) -> torch.cuda.Stream:
    """The queue on which graphs are recorded. One for all: products ask for up to 32 MiB of memory
    for each queue they were on.
    """
    return torch.cuda.Stream(device)


@lru_cache(maxsize=16)
def problem(device: torch.device) -> Exception | None:
    """What keeps graphs and memory apart from working on `device`, tried once: some ways of
    allocating memory do not allow them.
    """
    try:
        if torch.cuda.get_allocator_backend() != "native":
            raise Unsupported(
                f"graphs with the allocator {torch.cuda.get_allocator_backend()}", "use torch's own"
            )
        with private_pool():
            given = torch.full((3,), 2.0, device=device)
        graph, made = GraphPool().record(lambda: given + 1, device, 64)
        graph.replay()
        if made.tolist() != [3.0, 3.0, 3.0]:
            raise DpfyError("a graph did not do its work")
    except (RuntimeError, DpfyError, AttributeError) as found:
        return found
    return None


TOGETHER = 4
"""Steps of a sequence in one graph: launches are few from here on, and the memory is small beside
that of a sequence.
"""

USUALLY = 2
"""How many times a loop of one shape runs as usual before it is recorded."""

ALIGNED = 512
"""Bytes: where a tensor may begin, as torch's allocator has it."""

MOST, PAYS = 4, 8
"""Shapes of which graphs are held; for another one, made once in so many loops, the one that was
not used for longest makes room.
"""

Tensors: TypeAlias = Sequence[Tensor]
Work: TypeAlias = Callable[
    [list[int], Tensors, Tensors, Tensors], tuple[Sequence[Tensors], Tensors]
]
"""(times in their order, what the steps read [step, ...], what passes from step to step, what
stays) to what is made, for each kind one tensor a step in the order of time, and what passes on.
"""


class RepeatedLoop:
    """A loop over the steps of sequences.

    Guarantees: what is made is what `work` makes, called for the same steps in the same order, if
    that depends on only the tensors it is given. While somebody else records or watches the
    single operations, graphs are not used.
    """

    def __init__(self, work: Work, pool: GraphPool | None = None) -> None:
        self._work, self._pool = work, pool or GraphPool()
        self._seen: dict[tuple[object, ...], int] = {}
        self._made: dict[tuple[object, ...], _SomeSteps] = {}
        self.made = self.loops = 0
        self.problem: Exception | None = None

    def __call__(
        self, backwards: bool, given: Tensors, carried: Tensors, fixed: Tensors, into: Tensors
    ) -> Tensors:
        """Run over all steps of `given`, the last one first if `backwards`; what is made is written
        into `into`, what passes on is returned.
        """
        length = len(given[0])
        starts = range(0, length, TOGETHER)
        recorded = (
            self._recorded(backwards, given, carried, fixed, into) if length >= TOGETHER else None
        )
        if recorded is not None:
            recorded.begin(carried, fixed)
        for start in reversed(starts) if backwards else starts:
            rows = slice(start, min(start + TOGETHER, length))
            read, write = [t[rows] for t in given], [t[rows] for t in into]
            if recorded is not None and len(write[0]) == TOGETHER:
                recorded.run(read, write)
                continue
            made, passed = self._work(
                _times(len(write[0]), backwards),
                read,
                carried if recorded is None else recorded.carried,
                fixed,
            )
            for parts, place in zip(made, write, strict=True):
                torch.stack(list(parts), out=place)
            if recorded is None:
                carried = passed
            else:
                recorded.begin(passed, fixed)
        return carried if recorded is None else [t.clone() for t in recorded.carried]

    def _recorded(self, backwards: bool, *tensors: Tensors) -> _SomeSteps | None:
        """The graph for such tensors, if there is one or it is time to make it."""
        device = tensors[0][0].device
        if self.problem is not None or not _recordable(device):
            return None
        given, carried, fixed, _ = tensors
        shapes = [
            tuple([(t.shape[1:] if steps else t.shape, t.dtype) for t in some])
            for some, steps in zip(tensors, _STEPS, strict=True)
        ]
        key = (backwards, device, *settings(device), *shapes)
        self.loops += 1
        if (found := self._made.pop(key, None)) is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= USUALLY or self.made >= MOST + self.loops // PAYS:
                return None
            try:
                found = _SomeSteps(
                    self._work, self._pool, backwards, [t[:TOGETHER] for t in given], carried, fixed
                )
            except (RuntimeError, DpfyError) as problem:
                problem.__traceback__ = problem.__context__ = problem.__cause__ = (
                    None  # their frames hold tensors of the step
                )
                self.problem = problem
                return None
            self.made += 1
            if len(self._made) >= MOST:
                self._made.pop(next(iter(self._made)))
        self._made[key] = found  # the latest used comes last
        return found


_STEPS = (True, False, False, True)
"""Which of (given, carried, fixed, into) have a step in front."""


class _SomeSteps:
    """The work of a few steps as a graph."""

    def __init__(
        self,
        work: Work,
        pool: GraphPool,
        backwards: bool,
        given: Tensors,
        carried: Tensors,
        fixed: Tensors,
    ) -> None:
        room = iter(_room(pool, [*given, *carried, *fixed]))
        self._given, self.carried, self._fixed = (
            [next(room) for _ in some] for some in (given, carried, fixed)
        )

        def steps() -> list[Tensor]:
            made, passed = work(_times(TOGETHER, backwards), self._given, self.carried, self._fixed)
            _copy(self.carried, passed)
            return [t for parts in made for t in parts]

        with on(given[0].device):
            self._graph, self._made = pool.record(steps, given[0].device, 0)

    def begin(self, carried: Tensors, fixed: Tensors) -> None:
        """What passes on from before, and what stays."""
        _copy([*self.carried, *self._fixed], [*carried, *fixed])

    def run(self, read: Tensors, write: Tensors) -> None:
        """The next steps."""
        _copy(self._given, read)
        self._graph.replay()
        _copy([t for place in write for t in place.unbind(0)], self._made)


def _room(pool: GraphPool, tensors: Tensors) -> list[Tensor]:
    """Memory of the shapes of `tensors` that stays, in one piece: of small pieces the allocator
    would hold more than is asked for.
    """
    starts = list(accumulate([-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors], initial=0))
    whole = pool.like(tensors[0].new_empty((), dtype=torch.uint8).expand(starts[-1]))
    return [
        whole[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for start, t in zip(starts[:-1], tensors, strict=True)
    ]


def _copy(into: Tensors, values: Tensors) -> None:
    torch._foreach_copy_(list(into), list(values))


def _times(count: int, backwards: bool) -> list[int]:
    return list(reversed(range(count))) if backwards else list(range(count))


def _recordable(device: torch.device) -> bool:
    """Whether what runs now may be a graph: nobody records already, or looks at single
    operations.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    watched = (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
    return not watched and problem(device) is None
