"""Fused GPU kernels in Triton, each with a portable twin elsewhere that gives the same answer. Sums
are kept in float32.

Nothing here uses atomic additions: partial sums are written out and added in a fixed order, so a
step repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfy.core.errors import DpfyError, Unsupported, warn

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None


T = TypeVar("T")

FAILED: dict[tuple[str, torch.dtype], str] = {}
"""Families of kernels (files of this folder; "": all) that failed in this process on a type, with
the reason; they are not asked again.
"""

_kind: list[torch.dtype] = []
"""The type that kernels were last asked for."""


def usable(t: Tensor, family: str = "") -> bool:
    """Whether the kernels, those of `family`, can run on `t`."""
    if FAILED and (("", t.dtype) in FAILED or (family, t.dtype) in FAILED):
        return False
    _kind[:] = [t.dtype]
    return _possible(t)


def with_portable_way(work: Callable[[], T]) -> T:
    """What `work` gives. If a kernel fails in it, it is done again without those kernels, with one
    warning.

    Only for work that leaves nothing behind when it fails.
    """
    try:
        return work()
    except (DpfyError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        mine = Path(__file__).parent
        codes = [frame.f_code for frame, _ in walk_tb(problem.__traceback__)]
        files = [Path(c.co_filename) for c in codes if c is not with_portable_way.__code__]
        stems = [file.stem for file in files if file.parent == mine]
        if not stems:
            raise
        family, kind = stems[0] if stems[0] in ALONE else "", *_kind
        if (family, kind) in FAILED:
            raise
        why = FAILED[family, kind] = f"{type(problem).__name__}: {str(problem)[:200]}"
        warn(
            f"the GPU kernels {family or 'of norms and sums'} failed in {str(kind)[6:]} ({why}); the same "
            f"sums are made without them from now on, slower; please report it with the model's layers"
        )
    return with_portable_way(work)


ALONE = ("conv2d", "depthwise")
"""Families that only their own layers need."""


def _possible(t: Tensor) -> bool:
    return (
        triton is not None
        and t.is_cuda
        and t.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


KINDS: dict[torch.dtype, Any] = (
    {}
    if triton is None
    else {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float64: tl.float64,
    }
)


def precision(t: Tensor) -> str:
    """TF32 only where the user allowed it for ordinary products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or t.dtype != torch.float32 else "ieee"


def table(tensors: list[list[Tensor]]) -> Tensor:
    """The addresses of tensors, for a kernel that serves many layers at once."""
    return sent([[t.data_ptr() for t in each] for each in tensors], tensors[0][0].device)


class Tables:
    """Addresses for the kernels of a CUDA graph. They never change, so they are sent once, before
    the first replay.

    The memory is taken before the capture: what a capture allocates may have served, and will serve
    at every replay, another tensor earlier in the graph. Keep the tables as long as the graph.
    """

    def __init__(self, device: torch.device, places: int = 1 << 17) -> None:
        self._there = torch.empty(places, dtype=torch.int64, device=device)
        self._here: list[int] = []

    def put(self, numbers: Tensor) -> Tensor:
        """A place on the device that will hold `numbers`."""
        start = len(self._here)
        self._here += numbers.flatten().tolist() + [0] * (-numbers.numel() % 32)
        if len(self._here) > len(self._there):
            raise Unsupported(
                f"a captured step with more than {len(self._there)} addresses", "use graph=False"
            )
        return self._there[start : start + numbers.numel()].view(numbers.shape)

    def send(self) -> None:
        """Fill the places."""
        self._there[: len(self._here)].copy_(torch.tensor(self._here, dtype=torch.int64))


_tables: Tables | None = None


@contextmanager
def writing(tables: Tables) -> Iterator[None]:
    """While a CUDA graph is captured: put addresses into `tables` instead of copying them."""
    global _tables
    _tables = tables
    try:
        yield
    finally:
        _tables = None


def sent(numbers: list[list[int]], device: torch.device) -> Tensor:
    """Integers on the device, without waiting for it: only pinned memory is copied behind the back
    of the host.
    """
    here = torch.tensor(numbers, dtype=torch.int64)
    if _tables is not None:
        return _tables.put(here)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


REACH = 2**31
"""Within an example kernels count elements in 32 bits: where positions come before examples in
memory its last one may lie far away.
"""


def aligned(t: Tensor) -> Tensor:
    """Dense in its last dimension, on an address that the kernels may take for a multiple of
    sixteen bytes, each example within reach.
    """
    near = t.stride(1) * t.shape[1] < REACH
    return t if near and t.stride(-1) == 1 and t.data_ptr() % 16 == 0 else t.contiguous().clone()
