"""Work of the engine as CUDA graphs, and memory for it that is not taken from among the model's
tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch

from dpfy.core.errors import DpfyError, Unsupported
from dpfy.gradients.kernels.addresses import Tables, writing

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
        """Begin anew once all graphs are gone: their pool went with the last of them."""
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
