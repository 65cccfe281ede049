"""Contributions to something made from a parameter: stacks of matrices, views, slices and other
functions of parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.arithmetic import (
    CHUNK_ELEMENTS,
    GPU_CHUNK_ELEMENTS,
    KEEP_ELEMENTS,
    along,
    few_roundings,
    kept,
    row_chunks,
    wide,
)
from dpfy.gradients.per_example.contribution import Contribution, Places
from dpfy.gradients.per_example.outer import Direct
from dpfy.gradients.per_example.rounding import NormEstimate, row_squares
from dpfy.gradients.per_example.shared import Shared

if TYPE_CHECKING:
    from dpfy.gradients.per_example.outer import Outer


@dataclass(frozen=True)
class Stacked(Contribution):
    """Contributions to the blocks of a stack, one for every entry of its first dimension. They
    touch nothing in common.
    """

    parts: Sequence[Contribution]

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def convolves(self) -> bool:
        return any(part.convolves for part in self.parts)

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)

    def measured(self) -> tuple[Tensor, Contribution]:
        norms, rests = zip(*[part.measured() for part in self.parts], strict=True)
        return torch.cat(norms), Stacked(rests)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.stack([part.weighted_sum(weights) for part in self.parts])

    def per_example(self, rows: slice) -> Tensor:
        return torch.stack([part.per_example(rows) for part in self.parts], 1)

    def rounding(self) -> Tensor:
        return torch.stack([part.rounding() for part in self.parts]).square().sum(0).sqrt()

    def cleaned(self, keep: Tensor) -> Stacked:
        return Stacked([part.cleaned(keep) for part in self.parts])

    def widened(self) -> Stacked:
        return Stacked([part.widened() for part in self.parts])

    def times(self, factor: Tensor | float, shape: torch.Size) -> Contribution | None:
        if along(factor, shape) != "all":
            return None
        each = [part.times(factor, shape[1:]) for part in self.parts]
        known = [part for part in each if part is not None]
        return Stacked(known) if len(known) == len(each) else None


@dataclass(frozen=True)
class ViewGradient(Contribution):
    """A contribution to a view, a slice or a transposition of the parameter: the same numbers at
    other places, and zeros elsewhere.

    `places` brings [many, *view] numbers to their places in [many, *parameter], `key` says which
    places those are.
    """

    part: Contribution
    places: Places
    view: torch.Size
    shape: torch.Size
    key: tuple[object, ...]

    @property
    def batch(self) -> int:
        return self.part.batch

    @property
    def width(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        norms, rest = self.part.measured()
        return norms, replace(self, part=rest)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.places(self.part.weighted_sum(weights).reshape(1, *self.view))[0]

    def per_example(self, rows: slice) -> Tensor:
        return self.places(self.part.per_example(rows).reshape(-1, *self.view))

    def rounding(self) -> Tensor:
        return self.part.rounding()

    def cleaned(self, keep: Tensor) -> ViewGradient:
        return replace(self, part=self.part.cleaned(keep))

    @property
    def convolves(self) -> bool:
        return self.part.convolves

    @property
    def view_shape(self) -> torch.Size:
        return self.shape

    def support(self, device: torch.device) -> Tensor:
        return self.places(torch.ones(1, *self.view, device=device))[0] != 0

    merge_rank = 2

    def merge_key(self) -> tuple[object, ...]:
        return (ViewGradient, *self.key)

    def merged(self, alike: Sequence[ViewGradient]) -> list[Contribution]:
        return [self if len(alike) == 1 else replace(self, part=Shared([a.part for a in alike]))]

    def widened(self) -> ViewGradient:
        return replace(self, part=self.part.widened())

    def times(self, factor: Tensor | float, shape: torch.Size) -> Contribution | None:
        if along(factor, shape) != "all":
            return None
        inner = self.part.times(factor, self.view)
        return None if inner is None else replace(self, part=inner)

    def through_view(
        self,
        places: Places,
        view: torch.Size,
        shape: torch.Size,
        key: Callable[[], tuple[object, ...]],
    ) -> ViewGradient:
        before = self.places
        chain = (*self.key, *key())
        return ViewGradient(self.part, lambda t: places(before(t)), self.view, shape, chain)


@dataclass(frozen=True)
class RowScaled(Contribution):
    """Example by example, every row of one fixed matrix times a number of its own."""

    factors: Tensor  # [batch, rows]
    matrix: Tensor  # [rows, *columns]

    @property
    def batch(self) -> int:
        return len(self.factors)

    @property
    def width(self) -> int:
        return self.matrix.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.factors.dtype

    def estimate(self) -> NormEstimate:
        """The norms and how wrong they can be."""
        rows = row_squares(self.matrix).sqrt().to(self.factors.device)
        squares = row_squares(self.factors.double() * rows)
        return NormEstimate(
            squares, squares * rounding.gamma(2 * rounding.BLOCK + 16, self.dtype), self.rounding()
        )

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.estimate().upper, self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        factors = wide(self.factors)
        total = torch.mv(factors.t(), weights.to(factors.dtype))
        return total.view(-1, *[1] * (self.matrix.dim() - 1)) * wide(self.matrix)

    def per_example(self, rows: slice) -> Tensor:
        factors = self.factors[rows]
        return factors.view(*factors.shape, *[1] * (self.matrix.dim() - 1)) * self.matrix

    def rounding(self) -> Tensor:
        size = (row_squares(self.factors) * row_squares(self.matrix.reshape(1, -1))[0]).sqrt()
        return size * few_roundings(self.factors)

    def cleaned(self, keep: Tensor) -> RowScaled:
        return replace(self, factors=kept(self.factors, keep))

    merge_rank = 1

    def merge_key(self) -> tuple[object, ...]:
        return (RowScaled,)

    def merged(self, alike: Sequence[RowScaled]) -> list[Contribution]:
        if len(alike) == 1 or not all(torch.equal(a.matrix, self.matrix) for a in alike[1:]):
            return list(alike)
        return [replace(self, factors=sum((a.factors for a in alike[1:]), start=self.factors))]

    def inner_products(self, outer: Outer) -> tuple[Tensor, Tensor]:
        """sum over o, t of f_o left[t, o] (right[t] . row_o).

        A sum over t is wrong by gamma(columns + positions) times the sum of the absolute terms, and
        sum over o of |f_o| |row_o| sum over t of |left[t, o]| |right[t]| is at most |f * rows|
        |left| |right|.
        """
        left, right, rows = wide(outer.left), wide(outer.right), wide(self.matrix).flatten(1)
        products = torch.cat(
            [
                (left[part] * (right[part] @ rows.t().to(right.dtype))).sum(1)
                for part in row_chunks(len(left), left[0].numel())
            ]
        )
        count, dtype = right.shape[2] + left.shape[1] + 16, outer.dtype
        each = rounding.gamma(count, dtype) + 2 * rounding.of_factors(dtype, right.device)
        size = (row_squares(left) * row_squares(right) * self.estimate().squares).sqrt()
        hidden = count * len(rows) * rounding.least(dtype)
        wrong = size * each * (1 + 2.0**-8) + hidden
        return (products.double() * self.factors.double()).sum(1), wrong


Push = Callable[[Tensor], list[Tensor | None]]
"""[examples, *tensor] gradients of a function of parameters to [examples, *parameter] gradients of
every parameter below it.
"""


@dataclass(eq=False)
class ParameterFunction:
    """A contribution to a function of parameters, and all parameters below it: what one of them
    costs, all of them cost together.

    Per-example gradients of the function are written out for some examples at a time and sent
    through it. Where they fit into memory for all examples they are kept; else they are made twice,
    once for the norms and once for the sum, by the same arithmetic.
    """

    part: Contribution
    push: Push
    shapes: list[torch.Size]
    norms: list[Tensor] = field(default_factory=list)
    sums: tuple[Tensor, list[Tensor]] | None = None

    def chunks(self) -> list[slice]:
        """Examples whose gradients exist at one time."""
        some = self.part.per_example(slice(0, 1))
        most = GPU_CHUNK_ELEMENTS if some.is_cuda else CHUNK_ELEMENTS
        return row_chunks(
            self.part.batch, some.numel() + sum(shape.numel() for shape in self.shapes), most
        )

    def grads(self, rows: slice) -> list[Tensor]:
        """The gradients of the examples in `rows` at every parameter."""
        each = self.part.per_example(rows)
        found = zip(self.push(each), self.shapes, strict=True)
        return [each.new_zeros(len(each), *shape) if g is None else g for g, shape in found]

    def everything(self, always: bool = False) -> list[Tensor] | None:
        """The gradients of all examples, where they fit."""
        if (
            not always
            and self.part.batch * sum(shape.numel() for shape in self.shapes) > KEEP_ELEMENTS
        ):
            return None
        return [
            torch.cat(pieces)
            for pieces in zip(*[self.grads(rows) for rows in self.chunks()], strict=True)
        ]

    def squares(self, place: int) -> Tensor:
        """[batch] squared norms at one parameter."""
        if not self.norms:
            pieces = [[row_squares(g) for g in self.grads(rows)] for rows in self.chunks()]
            self.norms = [torch.cat(each) for each in zip(*pieces, strict=True)]
        return self.norms[place]

    def weighted_sum(self, weights: Tensor, place: int) -> Tensor:
        """The weighted sum at one parameter, of the very gradients whose norms were taken."""
        if self.sums is None or self.sums[0] is not weights:
            total: list[Tensor] = []
            for rows in self.chunks():
                added = [Direct(g).weighted_sum(weights[rows]) for g in self.grads(rows)]
                total = [a + b for a, b in zip(total, added, strict=True)] if total else added
            self.sums = (weights, total)
        return self.sums[1][place]


@dataclass(frozen=True)
class FunctionGradient(Contribution):
    """What a parameter receives through a function of parameters that no rule explains."""

    below: ParameterFunction
    place: int

    @property
    def batch(self) -> int:
        return self.below.part.batch

    @property
    def width(self) -> int:
        return self.below.shapes[self.place].numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.below.part.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.below.squares(self.place)[None], self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.below.weighted_sum(weights, self.place)

    def per_example(self, rows: slice) -> Tensor:
        return self.below.grads(rows)[self.place]

    def rounding(self) -> Tensor:
        return self.below.squares(self.place).sqrt() * few_roundings(
            self.below.part.per_example(slice(0, 1))
        )

    def cleaned(self, keep: Tensor) -> FunctionGradient:
        below = self.below
        return FunctionGradient(
            ParameterFunction(below.part.cleaned(keep), below.push, below.shapes), self.place
        )

    @property
    def convolves(self) -> bool:
        return self.below.part.convolves
