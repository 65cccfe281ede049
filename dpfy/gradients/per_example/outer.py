"""Per-example gradients that are held as they are, and the weights of linear layers, whose gradients
are sums of outer products over positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.kernels import grams
from dpfy.gradients.per_example import arithmetic, rounding
from dpfy.gradients.per_example.arithmetic import (
    CACHE_ELEMENTS,
    GPU_CHUNK_ELEMENTS,
    KEEP_ELEMENTS,
    along,
    along_positions,
    few_roundings,
    kept,
    large_pages,
    norm_by_parts,
    row_chunks,
    scaled,
    wide,
    wide_product,
)
from dpfy.gradients.per_example.contribution import Contribution, Piece, Places
from dpfy.gradients.per_example.rounding import NormEstimate, as_rows, row_squares


@dataclass(frozen=True, repr=False)
class Held(Contribution):
    """Per-example gradients that are held as they are."""

    grads: Tensor  # [batch, ...]

    @property
    def batch(self) -> int:
        return len(self.grads)

    @property
    def width(self) -> int:
        return self.grads[0].numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        return row_squares(self.grads)[None], self

    def rounding(self) -> Tensor:
        return row_squares(self.grads).sqrt() * few_roundings(self.grads)


@dataclass(frozen=True, repr=False)
class Direct(Held):
    """Those that are small enough, [batch, *parameter]: biases, scales of normalisation layers,
    bare parameters.
    """

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = as_rows(self.grads)
        if flat.is_cuda and flat.dtype == torch.bfloat16:
            return wide_product(weights.to(flat.dtype)[None], flat).view(self.grads.shape[1:])
        flat = wide(flat)
        return torch.mv(flat.t(), weights.to(flat.dtype)).view(self.grads.shape[1:])

    def per_example(self, rows: slice) -> Tensor:
        return self.grads[rows]

    def cleaned(self, keep: Tensor) -> Direct:
        return Direct(kept(self.grads, keep))

    @property
    def stored_grads(self) -> Tensor:
        return self.grads

    def direct(self) -> Direct:
        return self

    @property
    def joins(self) -> bool:
        return kernels.usable(self.grads)

    @property
    def waits(self) -> bool:
        return True

    def norm_factors(self) -> list[Tensor]:
        return [self.grads]

    @property
    def holds_reports_alone(self) -> bool:
        return True

    def row_pieces(self, shape: torch.Size) -> tuple[Piece, ...]:
        return ((0, shape[0], self),)

    def row_range(self, start: int, end: int) -> Direct:
        return Direct(self.grads[:, start:end])

    merge_rank = 5

    def merge_key(self) -> tuple[object, ...]:
        return (Direct,)

    def merged(self, alike: Sequence[Direct]) -> list[Contribution]:
        return [Direct(sum((each.grads for each in alike[1:]), start=alike[0].grads))]

    def widened(self) -> Direct:
        return Direct(wide(self.grads))

    def times(self, factor: Tensor | float, shape: torch.Size) -> Direct:
        return Direct(self.grads.reshape(-1, *shape) * factor)

    def row_products(self, matrix: Tensor) -> Tensor:
        if matrix.dim() < 2:
            return self.grads * matrix
        return (self.grads.reshape(-1, *matrix.shape) * matrix).flatten(2).sum(2)

    def folded(self, out: torch.Size, shape: torch.Size, factor: Tensor | float = 1.0) -> Direct:
        each = self.grads.reshape(-1, *out) * factor
        if len(out) > len(shape):
            each = each.sum(list(range(1, 1 + len(out) - len(shape))))
        ones = [j + 1 for j, side in enumerate(shape) if side == 1 and each.shape[j + 1] > 1]
        return Direct(each.sum(ones, keepdim=True) if ones else each)

    def through_view(
        self,
        places: Places,
        view: torch.Size,
        shape: torch.Size,
        key: Callable[[], tuple[object, ...]],
    ) -> Direct:
        return Direct(places(self.grads.reshape(-1, *view)))


@dataclass(frozen=True, repr=False)
class Outer(Contribution):
    """Sums of outer products over positions: gradient = sum over t of left[t] (x) right[t]. Linear
    layers and their kin.
    """

    left: Tensor  # [batch, positions, rows of the parameter]
    right: Tensor  # [batch, positions, columns of the parameter]
    left_gram: Callable[[slice], Tensor] | None = (
        None  # of some examples, where several parameters share it: never to be changed
    )

    @property
    def batch(self) -> int:
        return len(self.left)

    @property
    def width(self) -> int:
        return self.left.shape[-1] * self.right.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        batch, positions, p = self.left.shape
        d = self.right.shape[-1]
        if positions == 1:
            return self._one_position()[None], self
        if kernels.usable(self.left):
            return self.estimate().upper, self
        if batch * p * d <= KEEP_ELEMENTS and arithmetic.keeping_pays(positions, p, d):
            grads = torch.bmm(self.left.mT, self.right, out=large_pages(self.left, batch, p, d))
            return self._estimate(row_squares(grads), self._sizes()).upper, Direct(grads)
        return self.estimate().upper, self

    def estimate(self) -> NormEstimate:
        """The norms and how wrong they can be, with nothing kept."""
        batch, positions, p = self.left.shape
        d = self.right.shape[-1]
        if positions == 1:
            squares = self._one_position()
            return NormEstimate(
                squares,
                squares * rounding.gamma(2 * rounding.BLOCK + 16, self.dtype),
                self.rounding(),
            )
        if kernels.usable(self.left):
            if self.by_gram:
                return grams.gram_estimates([self.left], [self.right])[0]
            return self._estimate(
                norm_by_parts(batch, p * d, self.per_example, GPU_CHUNK_ELEMENTS),
                self._sizes_by_position(),
            )
        return (
            self._estimate(*self.gram())
            if self._by_gram
            else self._estimate(self._products(), self._sizes())
        )

    @property
    def keeps(self) -> bool:
        """Whether a GPU makes the products of the examples once, and keeps them: those of a narrow
        layer with many positions.
        """
        positions, p, d = *self.left.shape[1:], self.right.shape[-1]
        return not self.by_gram and arithmetic.kept_on_gpu(
            p * d, positions * (p + d) * self.left.element_size()
        )

    def kept(self) -> Direct:
        """The products, in float32 or wider: what is kept is what was measured and what will be
        added.
        """
        return Direct(wide_product(self.left.mT, self.right))

    def _one_position(self) -> Tensor:
        return row_squares(self.left) * row_squares(self.right)

    def _estimate(self, squares: Tensor, sizes: Tensor) -> NormEstimate:
        positions, p, d = *self.left.shape[1:], self.right.shape[-1]
        gram = rounding.gram_terms(p, d) if self._by_gram else 0

        def estimate(sizes: Tensor) -> NormEstimate:
            return rounding.of_products(squares, sizes, positions, gram, self._factor(), self.dtype)

        found = estimate(sizes)
        if self.left.is_cuda or not bool((loose := found.dominated).any()):
            return found
        return estimate(torch.where(loose, torch.minimum(sizes, self._sizes_by_position()), sizes))

    @property
    def _by_gram(self) -> bool:
        _, positions, p = self.left.shape
        return arithmetic.by_gram_on_cpu(positions, p, self.right.shape[-1])

    def _sizes(self) -> Tensor:
        """|L| |R|: no sum of absolute terms is longer."""
        return self._size(row_squares(self.left), row_squares(self.right))

    def _sizes_by_position(self) -> Tensor:
        """sum over t of |l_t| |r_t|, which is never above |L| |R|, and far below it where positions
        with large output gradients have small inputs (padding that is normalised, say).
        """
        left, right = (
            row_squares(t.flatten(0, 1)).add_(rounding.hidden(t)).view(t.shape[:2])
            for t in (self.left, self.right)
        )
        return left.mul_(right).sqrt_().sum(1)

    def _size(self, left: Tensor, right: Tensor) -> Tensor:
        return (
            left.add(rounding.hidden(self.left))
            .mul_(right.add(rounding.hidden(self.right)))
            .sqrt_()
        )

    def _factor(self) -> float:
        """How far factors are rounded before the product that is the weighted sum."""
        narrow = (
            rounding.unit(self.dtype) if self.dtype == torch.bfloat16 and self.left.is_cuda else 0.0
        )
        return narrow + 2 * rounding.of_factors(self.dtype, self.left.device)

    def rounding(self) -> Tensor:
        sizes = self._sizes() if self.left.shape[1] == 1 else self._sizes_by_position()
        return sizes * (rounding.gamma(self.left.shape[1] + 4, self.dtype) + self._factor())

    @property
    def by_gram(self) -> bool:
        """Whether a GPU measures it by Gram matrices."""
        _, positions, p = self.left.shape
        return arithmetic.by_gram_on_gpu(positions, p, self.right.shape[-1])

    def _products(self) -> Tensor:
        """Per-example products a few at a time, in memory that is reused."""
        batch, _, p = self.left.shape
        chunks, parts = row_chunks(batch, p * self.right.shape[-1], 4 * CACHE_ELEMENTS), []
        memory = self.left.new_empty(chunks[0].stop, p, self.right.shape[-1])
        for rows in chunks:
            each = memory[: rows.stop - rows.start]
            torch.bmm(self.left[rows].mT, self.right[rows], out=each)
            parts.append(row_squares(each))
        return torch.cat(parts)

    def gram(self) -> tuple[Tensor, Tensor]:
        """sum over t, s of (left[t] . left[s]) (right[t] . right[s]), and the sizes, of which the
        diagonals tell.
        """
        parts, sizes = [], []
        for rows in row_chunks(self.left.shape[0], 2 * self.left.shape[1] ** 2):
            first = (
                rounding.self_products(self.left[rows])
                if self.left_gram is None
                else self.left_gram(rows)
            )
            second = rounding.self_products(self.right[rows])
            left, right = (
                t.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64) for t in (first, second)
            )
            sizes.append(self._size(left, right))
            parts.append(rounding.block_sums(second.mul_(first)))
        return torch.cat(parts), torch.cat(sizes)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return wide_product(*self._factors(weights))

    writes_in_place = True

    def sum_into(self, weights: Tensor, place: Tensor, scratch: Tensor | None = None) -> Tensor:
        """:meth:`weighted_sum` in the memory of `place`, where its dtype allows it; `scratch`
        serves if it is large enough.
        """
        enough = scratch is not None and scratch.numel() >= self.scratch_bytes
        a, b = self._factors(weights, scratch if enough else None)
        wide_enough = place.dtype == (torch.float64 if a.dtype == torch.float64 else torch.float32)
        if not wide_enough or not place.is_contiguous():
            return place.copy_(wide_product(a, b).view(place.shape))
        wide_product(a, b, place.view(a.shape[0], b.shape[1]))
        return place

    @property
    def scratch_bytes(self) -> int:
        return min(self.left.nbytes, self.right.nbytes)

    def _factors(self, weights: Tensor, scratch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the weighted sum. Only a GPU scales in bfloat16: elsewhere
        the product is made wide anyway.
        """
        left, right = self.left, self.right
        if left.dtype == torch.float16 or (left.dtype == torch.bfloat16 and not left.is_cuda):
            left, right, weights, scratch = left.float(), right.float(), weights.float(), None
        if _positions_first(left) and _positions_first(
            right
        ):  # the sum may go in the order of memory
            left, right, weights = (
                left.transpose(0, 1),
                right.transpose(0, 1),
                weights.view(1, -1, 1),
            )
        if (
            left.shape[-1] < right.shape[-1]
        ):  # of two alike the inputs: output gradients are less alike, see GramRounding
            left = scaled(left, weights, scratch)
        else:
            right = scaled(right, weights, scratch)
        return left.flatten(0, 1).t(), right.flatten(0, 1)

    def per_example(self, rows: slice) -> Tensor:
        return self.left[rows].mT @ self.right[rows]

    def cleaned(self, keep: Tensor) -> Outer:
        return Outer(kept(self.left, keep), kept(self.right, keep))

    @property
    def joins(self) -> bool:
        return kernels.usable(self.left) and (self.left.shape[1] == 1 or self.by_gram)

    def norm_factors(self) -> list[Tensor]:
        return [self.left, self.right]

    @property
    def norm_launch(self) -> tuple[object, ...]:
        if self.left.shape[1] == 1:
            return (self.dtype,)
        return (self.dtype, self.left.shape, self.right.shape)

    @property
    def holds_reports_alone(self) -> bool:
        return True

    def row_pieces(self, shape: torch.Size) -> tuple[Piece, ...]:
        return ((0, shape[0], self),)

    def row_range(self, start: int, end: int) -> Outer:
        return Outer(self.left[..., start:end].contiguous(), self.right)

    merge_rank = 3

    def merge_key(self) -> tuple[object, ...]:
        return (Outer,)

    def merged(self, alike: Sequence[Outer]) -> list[Contribution]:
        left, right = [each.left for each in alike], [each.right for each in alike]
        return [Outer(along_positions(left), along_positions(right))]

    def widened(self) -> Outer:
        return Outer(wide(self.left), wide(self.right))

    def estimate_with(self, other: Contribution) -> NormEstimate | None:
        products = other.inner_products(self)
        if products is None:
            return None
        return self.estimate().plus(other.estimate(), *products)

    @property
    def matrix_shape(self) -> torch.Size:
        return torch.Size((self.left.shape[2], self.right.shape[2]))

    def transposed(self) -> Outer:
        return Outer(self.right, self.left)

    def times(self, factor: Tensor | float, shape: torch.Size) -> Contribution | None:
        way = along(factor, shape)
        if len(shape) != 2 or not way:
            return None
        # A number without dimensions, of whatever type and device, leaves others theirs.
        flat = factor.reshape(-1) if isinstance(factor, Tensor) and factor.dim() else factor
        if way == "columns":
            return in_one_type(self.left, self.right * flat)
        return in_one_type(self.left * flat, self.right)

    def row_products(self, matrix: Tensor) -> Tensor | None:
        if matrix.dim() != 2:
            return None
        left, right, fixed = wide(self.left), wide(self.right), wide(matrix)
        return (left * (right @ fixed.t().to(right.dtype))).sum(1)

    def through_product(self, i: int, other: Tensor) -> Outer:
        """y = a b: a gradient L' R of y is (L)' (R b') for a and (L a)' (R) for b."""
        other = other.to(self.dtype)
        if i == 0:
            return Outer(self.left, self.right @ other.mT)
        return Outer(self.left @ other, self.right)


def in_one_type(left: Tensor, right: Tensor) -> Outer:
    """Sums of outer products of factors that may have different types."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    return Outer(left.to(dtype), right.to(dtype))


def outer(left: Tensor, right: Tensor) -> Outer | Direct:
    """The contribution of a product over positions, by the route for its shapes."""
    part = Outer(left, right.to(left.dtype))
    return part.kept() if kernels.usable(left) and left.shape[1] > 1 and part.keeps else part


def _positions_first(t: Tensor) -> bool:
    """Whether [batch, positions, width], or some columns of that, lies in memory as [positions,
    batch, width].
    """
    return t.stride(0) < t.stride(1) == t.stride(0) * t.shape[0] and t.stride(2) == 1
