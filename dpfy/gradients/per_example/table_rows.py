"""Rows of a table that examples use: which, how often, and sums of what they receive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.arithmetic import wide
from dpfy.gradients.per_example.rounding import row_squares

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by size in bytes, to compare floating-point numbers to the bit."""


@dataclass(frozen=True, repr=False)
class RowCounts:
    """Which examples use which rows of a table, and how often: sorted by row, then by example."""

    rows: Tensor  # every row in use, once
    begins: Tensor  # where the uses of each row begin
    owners: Tensor  # the example of each use
    times: Tensor  # how often that example uses that row


def zero_table(rows: int, like: Tensor) -> Tensor:
    """Zeros for the sum of a table. NumPy asks the system for large pages, which every later pass
    over the table gains from.
    """
    return torch.from_numpy(
        np.zeros(
            (rows, like.shape[-1]),
            np.float64 if rounding.sum_dtype(like.dtype) is torch.float64 else np.float32,
        )
    )


def count_rows(index: Tensor) -> RowCounts:
    """How often each example uses each row of [batch, positions] rows. Sorted by digits of 16 bits:
    NumPy is three times as fast so.
    """
    flat = index.numpy().reshape(-1)
    order = np.argsort(flat.astype(np.uint16), kind="stable")
    for shift in range(16, int(flat.max()).bit_length(), 16):
        order = order[np.argsort((flat[order] >> shift).astype(np.uint16), kind="stable")]
    rows, owners = flat[order], order // index.shape[1]
    new_row, new_use = np.ones(flat.size, bool), np.ones(flat.size, bool)
    np.not_equal(rows[1:], rows[:-1], out=new_row[1:])
    np.not_equal(owners[1:], owners[:-1], out=new_use[1:])
    starts = np.flatnonzero(new_use | new_row)
    begins = np.flatnonzero(new_row[starts])
    times = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=times[:-1])
    times[-1:] = flat.size - starts[-1:]
    return RowCounts(
        *(
            torch.from_numpy(a.astype(np.int64, copy=False))
            for a in (rows[starts[begins]], begins, owners[starts], times)
        )
    )


def same_at_all_positions(grads: Tensor) -> bool:
    """Whether every position of an example has the same gradient, to the bit. NumPy compares many
    times faster than torch does.
    """
    if grads.stride(1) == 0 or grads.shape[1] == 1:
        return True
    flat, columns = grads.flatten(1).view(BITS[grads.dtype.itemsize]), grads.shape[2]
    here, before = flat[:, columns:].numpy(), flat[:, :-columns].numpy()
    return bool((here[0] == before[0]).all() and (here == before).all())


def distinct_squares(index: Tensor, grads: Tensor) -> Tensor:
    """[batch] squared norms of the gradients of a table: positions with the same row are added
    before they are squared.
    """
    ordered, order = index.sort(1)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[:, 1:], ordered[:, :-1], out=first[:, 1:])
    many, positions = index.shape
    where = (order + torch.arange(0, many * positions, positions)[:, None]).flatten()
    starts = first.flatten().nonzero().flatten()
    sums = torch.nn.functional.embedding_bag(where, wide(grads.flatten(0, 1)), starts, mode="sum")
    squares = torch.zeros(first.numel(), dtype=torch.float64)
    squares[starts] = row_squares(sums)
    return squares.view(index.shape).sum(1)
