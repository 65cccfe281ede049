"""Contributions that are known already, and parameters that are used several times: the cross terms
are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.contribution import (
    Contribution,
    Deferred,
    Direct,
    norm_by_parts,
    row_chunks,
    wide,
)
from dpfy.gradients.per_example.convolution import ConvolutionGradient
from dpfy.gradients.per_example.embedding import EmbeddingGradient, RaggedEmbeddingGradient
from dpfy.gradients.per_example.outer import Outer
from dpfy.gradients.per_example.placed import RowScaled, Several, Stacked, ViewGradient, apart
from dpfy.gradients.per_example.rounding import NormEstimate, row_squares


@dataclass(frozen=True, repr=False)
class MeasuredContribution:
    """A contribution whose norms are known already, and what was kept of it."""

    norms: Tensor  # [parts, batch]
    rest: Contribution

    @classmethod
    def of(cls, part: Contribution) -> MeasuredContribution:
        """Measure `part` now."""
        norms, rest = part.measured()
        return cls(norms, rest)

    @property
    def batch(self) -> int:
        return self.rest.batch

    @property
    def width(self) -> int:
        return self.rest.width

    @property
    def dtype(self) -> torch.dtype:
        return self.rest.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.norms, self.rest

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.rest.weighted_sum(weights)

    def per_example(self, rows: slice) -> Tensor:
        return self.rest.per_example(rows)

    def rounding(self) -> Tensor:
        return self.rest.rounding()

    def cleaned(self, keep: Tensor) -> MeasuredContribution:
        return MeasuredContribution(self.norms, self.rest.cleaned(keep))


@dataclass(frozen=True)
class Shared(Several):
    """Several uses of one parameter. The cross terms are exact."""

    @property
    def width(self) -> int:
        return self.parts[0].width

    def measured(self) -> tuple[Tensor, Contribution]:
        merged = merge(self.parts)
        if len(merged) == 1:
            return merged[0].measured()
        if apart(merged):
            return torch.cat([part.measured()[0] for part in merged]), self
        kinds = {type(m): m for m in merged}
        outer, rows = kinds.get(Outer), kinds.get(EmbeddingGradient)
        if len(merged) == 2 and isinstance(outer, Outer) and isinstance(rows, EmbeddingGradient):
            return outer.estimate().plus(rows.estimate(), *tied_product(outer, rows)).upper, self
        fixed = kinds.get(RowScaled)
        if len(merged) == 2 and isinstance(outer, Outer) and isinstance(fixed, RowScaled):
            return outer.estimate().plus(fixed.estimate(), *rows_product(outer, fixed)).upper, self
        # Uses may cancel: their sum is wrong by what each of them is, once in the norm and once in
        # the weighted sum.
        squares = norm_by_parts(
            self.batch,
            self.width * len(merged),
            Shared([widened(part) for part in merged]).per_example,
        )
        return NormEstimate(squares, torch.zeros_like(squares), 2 * self.rounding()).upper, self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.parts[0].weighted_sum(_no_wider(weights, self.parts[0]))
        for part in self.parts[1:]:
            total = total + part.weighted_sum(_no_wider(weights, part))
        return total

    def per_example(self, rows: slice) -> Tensor:
        total = self.parts[0].per_example(rows)
        for part in self.parts[1:]:
            total = total + part.per_example(rows)
        return total

    def rounding(self) -> Tensor:
        return torch.stack([part.rounding() for part in self.parts]).sum(0)

    def cleaned(self, keep: Tensor) -> Shared:
        return Shared([part.cleaned(keep) for part in self.parts])


def _no_wider(weights: Tensor, part: Contribution) -> Tensor:
    """Weights in float64 for gradients in float64 alone: a parameter in float32 may have been used
    in both.
    """
    return (
        weights.float()
        if weights.dtype is torch.float64 and part.dtype is not torch.float64
        else weights
    )


def merge(parts: Sequence[Contribution]) -> list[Contribution]:
    """Join uses of the same kind: sums of outer products and of rows are longer sums, direct
    gradients add.
    """
    parts = [
        p.rest
        if isinstance(p, MeasuredContribution)
        else p.direct()
        if isinstance(p, Deferred)
        else p
        for p in parts
    ]
    outers = [p for p in parts if isinstance(p, Outer)]
    rows = [p for p in parts if isinstance(p, EmbeddingGradient)]
    direct = [p for p in parts if isinstance(p, Direct)]
    placed: dict[tuple[object, ...], list[ViewGradient]] = {}
    for part in parts:
        if isinstance(part, ViewGradient):
            placed.setdefault(part.key, []).append(part)
    merged: list[Contribution] = [
        p
        for p in parts
        if not isinstance(p, Outer | EmbeddingGradient | Direct | ViewGradient | RowScaled)
    ]
    fixed = [p for p in parts if isinstance(p, RowScaled)]
    if len(fixed) > 1 and all(torch.equal(p.matrix, fixed[0].matrix) for p in fixed[1:]):
        fixed = [
            replace(fixed[0], factors=sum((p.factors for p in fixed[1:]), start=fixed[0].factors))
        ]
    merged += fixed
    merged += [
        same[0] if len(same) == 1 else replace(same[0], part=Shared([p.part for p in same]))
        for same in placed.values()
    ]
    if outers:
        merged.append(Outer(_along([p.left for p in outers]), _along([p.right for p in outers])))
    if rows:
        joined = EmbeddingGradient(
            _along([p.index for p in rows]), _along([p.grads for p in rows]), rows[0].count
        )
        if any(isinstance(p, RaggedEmbeddingGradient) for p in rows):
            own = [
                p.lengths
                if isinstance(p, RaggedEmbeddingGradient)
                else p.index.new_tensor(p.index.shape[1])
                for p in rows
            ]
            lengths = torch.stack([each.expand(len(joined.index)) for each in own]).sum(0)
            joined = RaggedEmbeddingGradient(joined.index, joined.grads, joined.count, lengths)
        merged.append(joined)
    if direct:
        merged.append(Direct(sum((p.grads for p in direct[1:]), start=direct[0].grads)))
    return merged


def _along(parts: list[Tensor]) -> Tensor:
    """All positions of the parts. One alone need not be copied: the gradient of a language model's
    head is as large as all else.
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def widened(part: Contribution) -> Contribution:
    """`part` with its factors in float32 or wider: products that are written out in a narrow type
    hide what may not cancel.
    """
    if isinstance(part, Outer):
        return Outer(wide(part.left), wide(part.right))
    if isinstance(part, Direct | EmbeddingGradient):
        return replace(part, grads=wide(part.grads))
    if isinstance(part, ConvolutionGradient):
        return replace(
            part, inputs=wide(part.inputs), grads=wide(part.grads), weight=wide(part.weight)
        )
    if isinstance(part, ViewGradient):
        return replace(part, part=widened(part.part))
    return (
        replace(part, parts=[widened(each) for each in part.parts])
        if isinstance(part, Stacked | Shared)
        else part
    )


def rows_product(outer: Outer, fixed: RowScaled) -> tuple[Tensor, Tensor]:
    """Inner products, example by example, of a sum of outer products with the scaled rows of a
    fixed matrix; how wrong they can be.

    sum over o, t of f_o left[t, o] (right[t] . row_o). A sum over t is wrong by gamma(columns +
    positions) times the sum of the absolute terms, and sum over o of |f_o| |row_o| sum over t of
    |left[t, o]| |right[t]| is at most |f * rows| |left| |right|.
    """
    left, right, rows = wide(outer.left), wide(outer.right), wide(fixed.matrix).flatten(1)
    products = torch.cat(
        [
            (left[part] * (right[part] @ rows.t().to(right.dtype))).sum(1)
            for part in row_chunks(len(left), left[0].numel())
        ]
    )
    count, dtype = right.shape[2] + left.shape[1] + 16, outer.dtype
    each = rounding.gamma(count, dtype) + 2 * rounding.of_factors(dtype, right.device)
    size = (row_squares(left) * row_squares(right) * fixed.estimate().squares).sqrt()
    hidden = count * len(rows) * rounding.least(dtype)
    return (products.double() * fixed.factors.double()).sum(1), size * each * (1 + 2.0**-8) + hidden


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
