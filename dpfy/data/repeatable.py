"""Whether lazily read records can be read again, and are the ones a run was started with: by a secret
sample, not by reading everything.

Caught at entry: a dataset whose records differ when they are read twice with the same seed, a
collate function that lets one record reach another's row, a value that is not finite in a sampled
record.

Caught at a resume: another number of records, another record at one of `SAMPLE` places that only
the run's secret knows (if a share p of the records was changed, this happens with probability 1 -
(1 - p)^SAMPLE), and any change that moves the sum of a step that is made again
(:mod:`dpfy.training.integrity.journal`). Not caught: other values of few records that were not drawn since
the last checkpoint. No noise is made twice then: the later steps read the data as they find it.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.data.batch import Batch, Draw, leaves

if TYPE_CHECKING:
    from dpfy.data.lazy import LazyRecords

SAMPLE = 32
"""Records read at entry, the first and the last among them."""

TWICE = 4
"""Of these are read twice."""

APART, PLACES = 6, 4
"""Records that a collate function is tried on, with as many others beside them, and how often, each
time with other random numbers.
"""

AGAIN = (
    "draw from the global generators of torch, NumPy or Python, which are seeded for each draw, or "
    "seed your own by a number that "
    "torch.randint draws in __getitem__"
)
MIXED = "collate each record by itself and keep their order; padding to the longest is fine"
CPU = torch.device("cpu")


def fingerprint(records: LazyRecords, randomness: Randomness) -> str:
    """A keyed tag of the number of records and of a secret sample of them, read in the way that
    training reads them.

    Guarantees: reads at most SAMPLE records, a few of them more than once; refuses what cannot be
    read again with the same bits.
    """
    key, chosen = randomness.key("sample", 0, 32), _sample(len(records), randomness)
    alone = [Draw(np.array([index]), 0, key) for index in (*chosen, *chosen[:TWICE])]
    beside = [
        draw._replace(place=place)
        for place in range(PLACES)
        for draw in _beside_others(chosen, key)
    ]
    found = list(records.read([*alone, *beside], CPU))
    singles, again, pairs = (
        found[: len(chosen)],
        found[len(chosen) : len(alone)],
        found[len(alone) :],
    )
    for index, single in zip(chosen, singles, strict=True):
        _require_finite(index, single)
    for index, first, second in zip(chosen, singles, again, strict=False):
        if _bytes(first) != _bytes(second):
            raise InvalidInput(
                "train",
                f"a record that is another one when it is read again (number {index})",
                AGAIN,
            )
    _require_apart(pairs[::2], pairs[1::2], min(APART, len(chosen) // 2))
    content = b"".join([f"lazy {len(records)} {records.views};".encode(), *map(_bytes, singles)])
    return randomness.tag("records", content)


def _beside_others(chosen: list[int], key: bytes) -> list[Draw]:
    """Two batches that begin with the same records and go on with others; none if there are too
    few.
    """
    shared = min(APART, len(chosen) // 2)
    others = [chosen[shared * part : shared * (part + 1)] for part in (1, 2)]
    return (
        [Draw(np.array([*chosen[:shared], *part]), 0, key) for part in others]
        if len(chosen) > 2
        else []
    )


def _sample(size: int, randomness: Randomness) -> list[int]:
    rng = randomness.generator("sample", 0)
    some = dict.fromkeys([0, size - 1, *(int(i) for i in rng.integers(size, size=4 * SAMPLE))])
    return list(some)[:SAMPLE]


def _bytes(batch: Batch) -> bytes:
    """Structure, types, shapes and contents."""
    parts = [str(pytree.tree_structure(batch)).encode()]
    for t in leaves(batch):
        parts += [
            f"{t.dtype}{tuple(t.shape)};".encode(),
            t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        ]
    return b"".join(parts)


def _require_finite(index: int, batch: Batch) -> None:
    if not all(
        bool(torch.isfinite(t).all())
        for t in leaves(batch)
        if t.is_floating_point() or t.is_complex()
    ):
        raise InvalidInput(
            "train", f"NaN or infinity in record {index}", "every value must be finite"
        )


def _require_apart(ones: list[Batch], others: list[Batch], rows: int) -> None:
    """Refuse a collate function by which the first `rows` records look otherwise beside other
    records, with the same random numbers.

    Where padding to the longest gave another shape, the part that both have is compared, unless the
    collate function draws at random.
    """
    random = len({_bytes(batch) for batch in ones}) > 1
    for one, other in zip(ones, others, strict=True):
        for mine, new in zip_longest(leaves(one), leaves(other)):
            if mine is None or new is None or mine.dim() != new.dim():
                raise Unsupported(
                    "a collate function whose structure depends on the records", MIXED
                )
            if mine.shape[1:] != new.shape[1:] and random:
                continue
            if not _same_corner(mine[:rows], new[:rows]):
                raise Unsupported(
                    "a collate function by which one record changes the row of another", MIXED
                )


def _same_corner(one: Tensor, other: Tensor) -> bool:
    corner = tuple(slice(0, min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    return one.dtype == other.dtype and torch.equal(one[corner], other[corner])
