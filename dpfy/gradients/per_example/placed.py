"""Contributions to something made from a parameter: stacks of matrices, views, slices and other
functions of parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.contribution import (
    CHUNK_ELEMENTS,
    GPU_CHUNK_ELEMENTS,
    KEEP_ELEMENTS,
    Contribution,
    Direct,
    few_roundings,
    kept,
    row_chunks,
    wide,
)
from dpfy.gradients.per_example.rounding import NormEstimate, row_squares


@dataclass(frozen=True)
class Several:
    """Contributions of the same examples in the same type."""

    parts: Sequence[Contribution]

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype


@dataclass(frozen=True)
class Stacked(Several):
    """Contributions to the blocks of a stack, one for every entry of its first dimension. They
    touch nothing in common.
    """

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


@dataclass(frozen=True)
class ViewGradient:
    """A contribution to a view, a slice or a transposition of the parameter: the same numbers at
    other places, and zeros elsewhere.

    `places` brings [many, *view] numbers to their places in [many, *parameter], `key` says which
    places those are.
    """

    part: Contribution
    places: Callable[[Tensor], Tensor]
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

    def support(self, device: torch.device) -> Tensor:
        """Which entries of the parameter it touches."""
        return self.places(torch.ones(1, *self.view, device=device))[0] != 0


def apart(parts: Sequence[Contribution]) -> bool:
    """Whether all of `parts` are placed, and no two of them touch the same entry of the
    parameter.
    """
    placed = [part for part in parts if isinstance(part, ViewGradient)]
    if len(placed) != len(parts) or len({part.shape for part in placed}) > 1:
        return False
    touched = torch.stack([part.support(torch.device("cpu")) for part in placed])
    return not bool((touched.sum(0) > 1).any())


@dataclass(frozen=True)
class RowScaled:
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
class FunctionGradient:
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
