"""Embedding tables: what the tokens of a batch add to their rows. Cost grows with the tokens, never with the table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.contribution import CACHE_ELEMENTS, Contribution, kept, norm_dtype, row_chunks, row_squares, scaled, wide

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by size in bytes, to compare floating-point numbers to the bit."""


@dataclass(frozen=True)
class Rows:
    """Embedding tables: position t adds grads[t] to row index[t] of the parameter. Cost grows with tokens, not with rows."""

    index: Tensor  # [batch, positions]
    grads: Tensor  # [batch, positions, columns of the parameter]
    count: int  # rows of the parameter

    @property
    def width(self) -> int:
        return self.count * self.grads.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        if kernels.usable(self.grads):
            return kernels.gram_norm(self.grads, self.index), self
        if self.grads.device.type != "cpu" or not self.index.shape[1]:
            return self._by_gram(), self
        chunks = row_chunks(len(self.grads), self.grads[0].numel(), CACHE_ELEMENTS)
        if same_at_all_positions(self.grads):
            return Pooled(self.index, self.grads[:, :1].expand_as(self.grads), self.count, runs_of(self.index)).measured()
        return torch.cat([distinct_squares(self.index[rows], self.grads[rows]) for rows in chunks])[None], self

    def _by_gram(self) -> Tensor:
        """sum over t, s with the same row of grads[t] . grads[s]: on any device."""
        parts = []
        for rows in row_chunks(self.index.shape[0], 2 * self.index.shape[1] ** 2):
            same, g = self.index[rows, :, None] == self.index[rows, None, :], self.grads[rows]
            parts.append((wide(g @ g.mT) * same).sum((1, 2)))
        return torch.cat(parts)[None]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.grads.device.type != "cpu":
            parts = wide(scaled(self.grads, weights).flatten(0, 1))
            return parts.new_zeros(self.count, parts.shape[-1]).index_add_(0, self.index.flatten(), parts)
        total = self.grads.new_zeros(self.count, self.grads.shape[-1], dtype=norm_dtype(self.grads))
        for rows in row_chunks(len(self.grads), self.grads[0].numel(), CACHE_ELEMENTS):
            parts = wide(scaled(self.grads[rows], weights[rows]).flatten(0, 1))
            total.index_add_(0, self.index[rows].flatten(), parts)
        return total

    def per_example(self, rows: slice) -> Tensor:
        index, grads = self.index[rows], self.grads[rows]
        batch, _, columns = grads.shape
        total = grads.new_zeros(batch * self.count, columns)
        offset = torch.arange(batch, device=index.device)[:, None] * self.count
        return total.index_add_(0, (index + offset).flatten(), grads.flatten(0, 1)).view(batch, self.count, columns)

    def cleaned(self, keep: Tensor) -> Rows:
        return replace(self, grads=kept(self.grads, keep))


@dataclass(frozen=True)
class Runs:
    """Which examples use which rows of a table, and how often: sorted by row, then by example."""

    rows: Tensor  # every row in use, once
    begins: Tensor  # where the uses of each row begin
    owners: Tensor  # the example of each use
    times: Tensor  # how often that example uses that row


@dataclass(frozen=True)
class Pooled(Rows):
    """Rows whose gradient is the same at all positions of an example: a mean or sum of embeddings. Only the frequencies count."""

    runs: Runs

    def measured(self) -> tuple[Tensor, Contribution]:
        once, runs = self.grads[:, 0], self.runs
        squares = once.new_zeros(len(once), dtype=norm_dtype(once))
        squares.index_add_(0, runs.owners, runs.times.to(squares.dtype).square())
        return (squares * row_squares(once))[None], self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        once, runs = wide(scaled(self.grads[:, 0], weights)), self.runs
        times = runs.times.to(once.dtype)
        sums = torch.nn.functional.embedding_bag(runs.owners, once, runs.begins, mode="sum", per_sample_weights=times)
        return once.new_zeros(self.count, once.shape[-1]).index_copy_(0, runs.rows, sums)

    def cleaned(self, keep: Tensor) -> Pooled:
        return replace(self, grads=kept(self.grads[:, :1], keep).expand_as(self.grads))


def runs_of(index: Tensor) -> Runs:
    """[batch, positions] rows of a table to their runs. NumPy sorts faster than torch."""
    batch = len(index)
    keys = index.numpy().astype(np.int64, copy=False) * batch + np.arange(batch)[:, None]
    if keys.max() < 2**16 * batch:  # NumPy sorts numbers of 16 bits by their digits, three times as fast
        keys = keys.reshape(-1)[np.argsort(index.numpy().astype(np.uint16).reshape(-1), kind="stable")]
    else:
        keys = np.sort(keys if keys.max() >= 2**31 else keys.astype(np.int32), axis=None)
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    rows, owners = np.divmod(keys[starts], np.array(batch, keys.dtype))
    begins = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    times = np.diff(starts, append=keys.size)
    return Runs(*(torch.from_numpy(a.astype(np.int64, copy=False)) for a in (rows[begins], begins, owners, times)))


def same_at_all_positions(grads: Tensor) -> bool:
    """Whether every position of an example has the same gradient, to the bit. NumPy compares many times faster than torch does."""
    if grads.stride(1) == 0 or grads.shape[1] == 1:
        return True
    flat, columns = grads.flatten(1).view(BITS[grads.dtype.itemsize]), grads.shape[2]
    here, before = flat[:, columns:].numpy(), flat[:, :-columns].numpy()
    return bool((here[0] == before[0]).all() and (here == before).all())


def distinct_squares(index: Tensor, grads: Tensor) -> Tensor:
    """[batch] squared norms of the gradients of a table: positions with the same row are added before they are squared."""
    ordered, order = index.sort(1)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[:, 1:], ordered[:, :-1], out=first[:, 1:])
    many, positions = index.shape
    where = (order + torch.arange(0, many * positions, positions)[:, None]).flatten()
    starts = first.flatten().nonzero().flatten()
    sums = torch.nn.functional.embedding_bag(where, wide(grads.flatten(0, 1)), starts, mode="sum")
    squares = torch.zeros(first.numel(), dtype=sums.dtype)
    squares[starts] = row_squares(sums)
    return squares.view(index.shape).sum(1)
