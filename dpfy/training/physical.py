"""How many examples fit in memory at once, measured on made-up records of the right shape: no data
is read for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.data.lazy import Source
from dpfy.training.runtime import Runtime

MOST = 1 << 16
SHARE = 0.4
"""Share of the free memory that activations and the engine's work may take: the backward pass needs
about as much again.
"""


def rows_at_once(
    model: nn.Module,
    records: Source,
    runtime: Runtime,
    expected: float,
    device: torch.device,
    held: int | None,
) -> int:
    """The most units in a physical batch, for logical ones of `expected`; a captured step has room
    for little more than those.

    What was found by measuring is measured once: a resumed run keeps what it `held`.
    """
    most = runtime.max_physical_batch
    if not isinstance(most, int):
        most = max(1, largest_batch(model, records.flat, device) // records.rows_each)
        if held is not None:
            return held
    return min(most, padded_size(expected)) if runtime.graph else most


def largest_batch(model: nn.Module, records: Sequence[Tensor], device: torch.device) -> int:
    """The largest power of two whose forward and backward pass fit on `device`, by what one more
    example makes autograd keep.

    Guarantees: depends on shapes, the model and the machine only; torch's generators are left as
    they were.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        two, four = (_kept_bytes(model, records, rows, device) for rows in (2, 4))
    each = max(1.0, (four - two) / 2)
    fits = SHARE * _free_bytes(device) / each
    return 1 << (max(1, int(min(fits, MOST))).bit_length() - 1)


def padded_size(expected: float) -> int:
    """Rows for a random batch of `expected` records on average: four standard deviations more, a
    multiple of eight.
    """
    return -8 * (-math.ceil(expected + 4 * math.sqrt(expected)) // 8)


def _kept_bytes(
    model: nn.Module, records: Sequence[Tensor], rows: int, device: torch.device
) -> int:
    """Bytes that a forward pass on `rows` made-up records keeps for its backward pass."""
    seen: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return t

    example = torch.zeros(rows, *records[0].shape[1:], dtype=records[0].dtype, device=device)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            output = model(example)
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        what = (
            f"max_physical_batch 'auto' with a model that does not take the first tensor of a "
            f"record alone ({problem})"
        )
        raise Unsupported(what, "give the number of examples") from None
    del output
    return sum(seen.values()) + example.numel() * example.element_size()


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
