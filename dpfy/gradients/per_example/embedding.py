"""Embedding tables: what the tokens of a batch add to their rows. Cost grows with the tokens, never
with the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.kernels import grams
from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.arithmetic import (
    CACHE_ELEMENTS,
    along,
    along_positions,
    fitted,
    kept,
    put,
    row_chunks,
    scaled,
    scaled_wide,
    wide,
)
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.rounding import NormEstimate, row_squares

if TYPE_CHECKING:
    from dpfy.gradients.per_example.joined import Buffers
    from dpfy.gradients.per_example.outer import Outer


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


NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, repr=False)
class EmbeddingGradient(Contribution):
    """Embedding tables: position t adds grads[t] to row index[t] of the parameter. Cost grows with
    tokens, not with rows.
    """

    index: Tensor  # [batch, positions]
    grads: Tensor  # [batch, positions, columns of the parameter]
    count: int  # rows of the parameter

    @property
    def batch(self) -> int:
        return len(self.grads)

    @property
    def width(self) -> int:
        return self.count * self.grads.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        if self._pools():
            return Pooled(
                self.index,
                self.grads[:, :1].expand_as(self.grads),
                self.count,
                count_rows(self.index),
            ).measured()
        return self.estimate().upper, self

    def _pools(self) -> bool:
        plain = (
            not kernels.usable(self.grads)
            and self.grads.device.type == "cpu"
            and self.index.shape[1]
        )
        return bool(plain) and same_at_all_positions(self.grads)

    def estimate(self) -> NormEstimate:
        """The norms and how wrong they can be, with nothing kept."""
        if kernels.usable(self.grads):
            return grams.gram_estimates([self.grads], [self.index])[0]
        if self.grads.device.type != "cpu" or not self.index.shape[1]:
            return self._estimate(self._by_gram(), rounding.gram_terms(self.grads.shape[2], 1))
        chunks = row_chunks(len(self.grads), self.grads[0].numel(), CACHE_ELEMENTS)
        return self._estimate(
            torch.cat([distinct_squares(self.index[rows], self.grads[rows]) for rows in chunks])
        )

    def _estimate(self, squares: Tensor, gram: int = 0) -> NormEstimate:
        """All positions may meet in one row, where they may cancel: sqrt(positions) |G| bounds the
        absolute terms.
        """
        factor = (
            rounding.of_factors(self.dtype, self.grads.device)
            if self.grads.device.type != "cpu"
            else 0.0
        )
        return rounding.of_products(
            squares, self._sizes(), self.grads.shape[1], gram, factor + self._factor(), self.dtype
        )

    def _sizes(self) -> Tensor:
        """Not by how often rows really repeat: a route that sees the batch at once must give what
        one that does not gives.
        """
        return (
            row_squares(self.grads)
            .add_(rounding.hidden(self.grads))
            .mul_(max(self.grads.shape[1], 1))
            .sqrt_()
        )

    def _factor(self) -> float:
        return (
            rounding.unit(self.dtype)
            if self.dtype in NARROW and self.grads.device.type != "cpu"
            else 0.0
        )

    def rounding(self) -> Tensor:
        return self._sizes() * (
            rounding.gamma(self.grads.shape[1] + 4, self.dtype) + self._factor()
        )

    def _by_gram(self) -> Tensor:
        """sum over t, s with the same row of grads[t] . grads[s]: on any device."""
        parts = []
        for rows in row_chunks(self.index.shape[0], 2 * self.index.shape[1] ** 2):
            same = self.index[rows, :, None] == self.index[rows, None, :]
            parts.append(rounding.block_sums(rounding.self_products(self.grads[rows]).mul_(same)))
        return torch.cat(parts)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.grads.device.type != "cpu":
            half = self.grads.dtype == torch.float16  # in which a small multiple would underflow
            parts = (
                scaled_wide(self.grads, weights) if half else wide(scaled(self.grads, weights))
            ).flatten(0, 1)
            return parts.new_zeros(self.count, parts.shape[-1]).index_add_(
                0, self.index.flatten(), parts
            )
        total = zero_table(self.count, self.grads)
        for rows in row_chunks(len(self.grads), self.grads[0].numel(), CACHE_ELEMENTS):
            parts = scaled_wide(self.grads[rows], weights[rows]).flatten(0, 1)
            total.index_add_(0, self.index[rows].flatten(), parts)
        return total

    def per_example(self, rows: slice) -> Tensor:
        index, grads = self.index[rows], self.grads[rows]
        batch, _, columns = grads.shape
        total = grads.new_zeros(batch * self.count, columns)
        offset = torch.arange(batch, device=index.device)[:, None] * self.count
        return total.index_add_(0, (index + offset).flatten(), grads.flatten(0, 1)).view(
            batch, self.count, columns
        )

    def squares_of(self, example: int) -> Tensor:
        rows = slice(example, example + 1)
        return EmbeddingGradient(self.index[rows], self.grads[rows], self.count).estimate().squares

    def cleaned(self, keep: Tensor) -> EmbeddingGradient:
        return replace(self, grads=kept(self.grads, keep))

    @property
    def matrix_shape(self) -> torch.Size:
        return torch.Size((self.count, self.grads.shape[2]))

    def times(self, factor: Tensor | float, shape: torch.Size) -> Contribution | None:
        if len(shape) != 2 or along(factor, shape) not in ("all", "columns"):
            return None
        # A number without dimensions, of whatever type and device, leaves others theirs.
        flat = factor.reshape(-1) if isinstance(factor, Tensor) and factor.dim() else factor
        return EmbeddingGradient(self.index, self.grads * flat, self.count)

    merge_rank = 4

    def merge_key(self) -> tuple[object, ...]:
        return (EmbeddingGradient,)

    def merged(self, alike: Sequence[EmbeddingGradient]) -> list[Contribution]:
        index = along_positions([each.index for each in alike])
        grads = along_positions([each.grads for each in alike])
        lengths = [a.own_lengths() for a in alike]
        if all(each is None for each in lengths):
            return [EmbeddingGradient(index, grads, self.count)]
        own = [
            index.new_tensor(part.index.shape[1]) if each is None else each
            for part, each in zip(alike, lengths, strict=True)
        ]
        total = torch.stack([each.expand(len(index)) for each in own]).sum(0)
        return [RaggedEmbeddingGradient(index, grads, self.count, total)]

    def own_lengths(self) -> Tensor | None:
        """[batch] positions of each example, if they differ."""
        return None

    def widened(self) -> EmbeddingGradient:
        return replace(self, grads=wide(self.grads))

    def inner_products(self, outer: Outer) -> tuple[Tensor, Tensor] | None:
        return tied_product(outer, self)


@dataclass(frozen=True, repr=False)
class Pooled(EmbeddingGradient):
    """The same where the gradient is the same at all positions of an example: a mean or sum of
    embeddings. Only the frequencies count.
    """

    counts: RowCounts

    def measured(self) -> tuple[Tensor, Contribution]:
        """By the formula of :meth:`EmbeddingGradient._estimate`: sizes are sqrt(positions) |G| =
        positions |g| where all are alike.
        """
        positions, counts, once = self.grads.shape[1], self.counts, row_squares(self.grads[:, 0])
        times = np.bincount(
            counts.owners.numpy(), np.square(counts.times.numpy(), dtype=np.float64), len(once)
        )
        grown = np.sqrt(times * (1 + rounding.gamma(rounding.BLOCK + 8, self.dtype)))
        grown += positions * 2 * (rounding.gamma(positions + 8, self.dtype) + self._factor())
        return torch.from_numpy(np.square(grown, grown)).mul_(once)[None], self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums = self._row_sums(weights)
        total = zero_table(self.count, sums)
        total.numpy()[self.counts.rows.numpy()] = (
            sums.numpy()
        )  # half the time of torch's index_copy_
        return total

    def sparse_sum(self, weights: Tensor) -> Tensor:
        """:meth:`weighted_sum` as a sparse tensor: the rows in use, in order and once each."""
        sums, size = self._row_sums(weights), (self.count, self.grads.shape[-1])
        return torch.sparse_coo_tensor(
            self.counts.rows[None], sums, size, is_coalesced=True, check_invariants=False
        )

    def _row_sums(self, weights: Tensor) -> Tensor:
        once, counts = scaled_wide(self.grads[:, 0], weights), self.counts
        times = counts.times.to(once.dtype)
        return torch.nn.functional.embedding_bag(
            counts.owners, once, counts.begins, mode="sum", per_sample_weights=times
        )

    def cleaned(self, keep: Tensor) -> Pooled:
        return replace(self, grads=kept(self.grads[:, :1], keep).expand_as(self.grads))

    def add_up(
        self, weights: Tensor, like: Tensor, place: Tensor | None, buffers: Buffers
    ) -> Tensor:
        made = self.sparse_sum(weights) if buffers.sparse else self.weighted_sum(weights)
        return put(fitted(made, like), place)


@dataclass(frozen=True, repr=False)
class RaggedEmbeddingGradient(EmbeddingGradient):
    """Examples with different numbers of positions, filled up to the longest of the batch with
    gradients of zero.

    Guarantees: the bound of an example depends on its own number of positions, `lengths`, not on
    how far it was filled up.
    """

    lengths: Tensor  # [batch]

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.estimate().upper, self

    def estimate(self) -> NormEstimate:
        """The norms and how wrong they can be: the formula of :func:`rounding.of_products` with
        each example's own length.
        """
        on_cpu = self.grads.device.type == "cpu" and self.index.shape[1]
        chunks = row_chunks(len(self.grads), self.grads[0].numel(), CACHE_ELEMENTS)
        squares = (
            torch.cat([distinct_squares(self.index[r], self.grads[r]) for r in chunks])
            if on_cpu
            else self._by_gram()
        )
        gram = 0 if on_cpu else rounding.gram_terms(self.grads.shape[2], 1)
        sizes, error = self._sizes(), squares.abs() * rounding.gamma(rounding.BLOCK + 8, self.dtype)
        if gram:
            error = (
                error
                + sizes.square() * rounding.gamma(gram, self.dtype)
                + self._lengths.square() * rounding.least(self.dtype)
            )
        factor = self._factor() + (
            0.0 if on_cpu else rounding.of_factors(self.dtype, self.grads.device)
        )
        return NormEstimate(squares, error, sizes * (2 * self._gamma(8) + 2 * factor))

    @property
    def _lengths(self) -> Tensor:
        return self.lengths.double().clamp(min=1)

    def _gamma(self, more: int) -> Tensor:
        share = (self._lengths + more) * rounding.unit(rounding.sum_dtype(self.dtype))
        return torch.where(share < 0.5, share / (1 - share), torch.inf)

    def own_lengths(self) -> Tensor:
        return self.lengths

    def inner_products(self, outer: Outer) -> tuple[Tensor, Tensor] | None:
        return None  # its error would need the lengths

    def _sizes(self) -> Tensor:
        return row_squares(self.grads).mul_(self._lengths).sqrt_()

    def rounding(self) -> Tensor:
        return self._sizes() * (self._gamma(4) + self._factor())


def tied_product(outer: Outer, rows: EmbeddingGradient) -> tuple[Tensor, Tensor]:
    """Inner products, example by example, of a linear head's gradient with that of the embedding it
    is tied to; how wrong they can be.

    sum over t, s of left[t][index[s]] (right[t] . grads[s]): nothing of the size of the table is
    made for an example. With M the first factors and N the second ones, an entry of N is wrong by
    gamma(width) |right[t]| |grads[s]|, so the sum by that times |M| |right| |grads|, and by
    gamma(`SHORT`) |M| |N|.
    """
    products, errors = [], []
    width, dtype = rows.grads.shape[2], torch.promote_types(outer.dtype, rows.dtype)
    entries = outer.left.shape[1] * rows.index.shape[1]
    each = rounding.gamma(width + 4, dtype) + 2 * rounding.of_factors(dtype, outer.right.device)
    for part in row_chunks(len(outer.left), 2 * entries):
        left, index, right, grads = (
            outer.left[part],
            rows.index[part],
            wide(outer.right[part]),
            wide(rows.grads[part]),
        )
        first = wide(left.gather(2, index[:, None, :].expand(-1, left.shape[1], -1)))
        common = torch.promote_types(right.dtype, grads.dtype)
        second = right.to(common) @ grads.to(common).mT
        size = (row_squares(right) * row_squares(grads)).sqrt_()
        wrong = each * size + entries * width * rounding.least(dtype)
        wrong = wrong + rounding.gamma(rounding.SHORT + 4, dtype) * (
            row_squares(second).sqrt() + wrong
        )
        errors.append(
            wrong * row_squares(first).sqrt() * (1 + 2.0**-8) + entries * rounding.least(dtype)
        )
        products.append(rounding.block_sums(first * second))
    return torch.cat(products), torch.cat(errors)
