"""What one use of one parameter adds to every example's gradient, without writing that gradient out.

Each kind answers three questions: the squared norm of every example's part, the sum of the parts weighted example by example, and,
for a few examples at a time, the parts themselves. A bounded number of elements exists at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""How many elements of per-example gradients may exist at once while a norm is computed."""


class Contribution(Protocol):
    """The per-example gradients of one parameter from one use of it."""

    @property
    def width(self) -> int:
        """Elements of the parameter."""
        ...

    def squared_norm(self) -> Tensor:
        """[batch] squared norms, in float32 or wider."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over examples of weight times gradient, in the parameter's shape."""
        ...

    def per_example(self, rows: slice) -> Tensor:
        """The gradients of the examples in `rows`: [rows, *parameter]."""
        ...

    def cleaned(self, keep: Tensor) -> Contribution:
        """The same with the examples where `keep` is False replaced by exact zeros, whatever they held."""
        ...


def wide(t: Tensor) -> Tensor:
    """At least float32."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def row_squares(t: Tensor) -> Tensor:
    """[batch, ...] to [batch] sums of squares, accumulated in float32 or wider."""
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=dtype).square()


def scaled(t: Tensor, weights: Tensor) -> Tensor:
    """Rows of `t` times `weights`, in the dtype of `t`."""
    return t * weights.to(t.dtype).view(-1, *[1] * (t.dim() - 1))


def kept(t: Tensor, keep: Tensor) -> Tensor:
    """`t` with the rows where `keep` is False set to zero (also NaN and infinite ones)."""
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device))


def row_chunks(batch: int, width: int, elements: int = CHUNK_ELEMENTS) -> list[slice]:
    """Slices of at most `elements // width` examples, at least one each."""
    size = max(1, min(batch, elements // max(width, 1)))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def norm_by_parts(batch: int, width: int, part: Callable[[slice], Tensor]) -> Tensor:
    """Squared norms from materialised gradients, a bounded chunk at a time."""
    return torch.cat([row_squares(part(rows)) for rows in row_chunks(batch, width)])


@dataclass(frozen=True)
class Direct:
    """Per-example gradients that are small enough to hold: biases, scales of normalisation layers, bare parameters."""

    grads: Tensor  # [batch, *parameter]

    @property
    def width(self) -> int:
        return self.grads[0].numel()

    def squared_norm(self) -> Tensor:
        return row_squares(self.grads)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = self.grads.flatten(1)
        return torch.mv(flat.t(), weights.to(flat.dtype)).view(self.grads.shape[1:])

    def per_example(self, rows: slice) -> Tensor:
        return self.grads[rows]

    def cleaned(self, keep: Tensor) -> Direct:
        return Direct(kept(self.grads, keep))


@dataclass(frozen=True)
class Outer:
    """Sums of outer products over positions: gradient = sum over t of left[t] (x) right[t]. Linear layers and their kin."""

    left: Tensor  # [batch, positions, rows of the parameter]
    right: Tensor  # [batch, positions, columns of the parameter]

    @property
    def width(self) -> int:
        return self.left.shape[-1] * self.right.shape[-1]

    def squared_norm(self) -> Tensor:
        batch, positions, p = self.left.shape
        if positions == 1:
            return row_squares(self.left) * row_squares(self.right)
        d = self.right.shape[-1]
        if positions * (p + d) <= p * d:
            return self._gram()
        return norm_by_parts(batch, self.width, self.per_example)

    def _gram(self) -> Tensor:
        """sum over t, s of (left[t] . left[s]) (right[t] . right[s])."""
        parts = []
        for rows in row_chunks(self.left.shape[0], 2 * self.left.shape[1] ** 2):
            left, right = self.left[rows], self.right[rows]
            parts.append((wide(left @ left.mT) * wide(right @ right.mT)).sum((1, 2)))
        return torch.cat(parts)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return scaled(self.left, weights).flatten(0, 1).t() @ self.right.flatten(0, 1)

    def per_example(self, rows: slice) -> Tensor:
        return self.left[rows].mT @ self.right[rows]

    def cleaned(self, keep: Tensor) -> Outer:
        return Outer(kept(self.left, keep), kept(self.right, keep))


@dataclass(frozen=True)
class Rows:
    """Embedding tables: position t adds grads[t] to row index[t] of the parameter. Cost grows with tokens, not with rows."""

    index: Tensor  # [batch, positions]
    grads: Tensor  # [batch, positions, columns of the parameter]
    count: int  # rows of the parameter

    @property
    def width(self) -> int:
        return self.count * self.grads.shape[-1]

    def squared_norm(self) -> Tensor:
        parts = []
        for rows in row_chunks(self.index.shape[0], 2 * self.index.shape[1] ** 2):
            same = self.index[rows, :, None] == self.index[rows, None, :]
            g = self.grads[rows]
            parts.append((wide(g @ g.mT) * same).sum((1, 2)))
        return torch.cat(parts)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.grads.new_zeros(self.count, self.grads.shape[-1])
        return total.index_add_(0, self.index.flatten(), scaled(self.grads, weights).flatten(0, 1))

    def per_example(self, rows: slice) -> Tensor:
        index, grads = self.index[rows], self.grads[rows]
        batch, _, columns = grads.shape
        total = grads.new_zeros(batch * self.count, columns)
        offset = torch.arange(batch, device=index.device)[:, None] * self.count
        return total.index_add_(0, (index + offset).flatten(), grads.flatten(0, 1)).view(batch, self.count, columns)

    def cleaned(self, keep: Tensor) -> Rows:
        return replace(self, grads=kept(self.grads, keep))


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Convolution:
    """Weights of a convolution. `images` inputs belong to each example (1 unless the model folds frames into the batch)."""

    inputs: Tensor  # [batch * images, channels in, *space]
    grads: Tensor  # [batch * images, channels out, *space]
    weight: Tensor
    geometry: Geometry
    images: int = 1

    @property
    def width(self) -> int:
        return self.weight.numel()

    def squared_norm(self) -> Tensor:
        return norm_by_parts(len(self.inputs) // self.images, self.width * self.images, self.per_example)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        grads = scaled(self.grads, weights.repeat_interleave(self.images) if self.images > 1 else weights)
        return weight_gradient(self.inputs, grads, self.weight, self.geometry)

    def per_example(self, rows: slice) -> Tensor:
        rows = slice(rows.start * self.images, rows.stop * self.images)
        a, g, w = self.inputs[rows], self.grads[rows], self.weight
        many = len(a)
        wide_weight = w.expand(many, *w.shape).flatten(0, 1)
        geometry = replace(self.geometry, groups=self.geometry.groups * many)
        grads = weight_gradient(a.flatten(0, 1)[None], g.flatten(0, 1)[None], wide_weight, geometry).unflatten(0, (many, w.shape[0]))
        return grads if self.images == 1 else grads.unflatten(0, (-1, self.images)).sum(1)

    def cleaned(self, keep: Tensor) -> Convolution:
        each = keep.repeat_interleave(self.images) if self.images > 1 else keep
        return replace(self, inputs=kept(self.inputs, each), grads=kept(self.grads, each))


def weight_gradient(inputs: Tensor, grads: Tensor, weight: Tensor, how: Geometry) -> Tensor:
    """The weight gradient of one convolution call, summed over its batch."""
    pad = list(how.output_padding) or [0] * len(how.stride)
    return torch.ops.aten.convolution_backward(
        grads, inputs, weight, None, how.stride, how.padding, how.dilation, how.transposed, pad, how.groups, [False, True, False]
    )[1]


@dataclass(frozen=True)
class Shared:
    """Several uses of one parameter. The cross terms are exact."""

    parts: Sequence[Contribution]

    @property
    def width(self) -> int:
        return self.parts[0].width

    def squared_norm(self) -> Tensor:
        merged = merge(self.parts)
        if len(merged) == 1:
            return merged[0].squared_norm()
        kinds = {type(m): m for m in merged}
        if len(merged) == 2 and isinstance(kinds.get(Outer), Outer) and isinstance(kinds.get(Rows), Rows):
            outer, rows = kinds[Outer], kinds[Rows]
            return outer.squared_norm() + rows.squared_norm() + 2 * tied_product(outer, rows)  # type: ignore[arg-type]
        batch = batch_of(merged[0])
        return norm_by_parts(batch, self.width * len(merged), self.per_example)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.parts[0].weighted_sum(weights)
        for part in self.parts[1:]:
            total = total + part.weighted_sum(weights)
        return total

    def per_example(self, rows: slice) -> Tensor:
        total = self.parts[0].per_example(rows)
        for part in self.parts[1:]:
            total = total + part.per_example(rows)
        return total

    def cleaned(self, keep: Tensor) -> Shared:
        return Shared([part.cleaned(keep) for part in self.parts])


def batch_of(part: Contribution) -> int:
    """How many examples a contribution holds."""
    if isinstance(part, Convolution):
        return len(part.inputs) // part.images
    tensor = part.left if isinstance(part, Outer) else part.grads  # type: ignore[attr-defined]
    return len(tensor)


def merge(parts: Sequence[Contribution]) -> list[Contribution]:
    """Join uses of the same kind: sums of outer products and of rows are longer sums, direct gradients add."""
    outers = [p for p in parts if isinstance(p, Outer)]
    rows = [p for p in parts if isinstance(p, Rows)]
    direct = [p for p in parts if isinstance(p, Direct)]
    merged: list[Contribution] = [p for p in parts if not isinstance(p, Outer | Rows | Direct)]
    if outers:
        merged.append(Outer(torch.cat([p.left for p in outers], 1), torch.cat([p.right for p in outers], 1)))
    if rows:
        merged.append(Rows(torch.cat([p.index for p in rows], 1), torch.cat([p.grads for p in rows], 1), rows[0].count))
    if direct:
        merged.append(Direct(sum((p.grads for p in direct[1:]), start=direct[0].grads)))
    return merged


def tied_product(outer: Outer, rows: Rows) -> Tensor:
    """Inner products, example by example, of a linear head's gradient with that of the embedding it is tied to.

    sum over t, s of left[t][index[s]] (right[t] . grads[s]): nothing of the size of the table is made for an example.
    """
    products = []
    for part in row_chunks(len(outer.left), 2 * outer.left.shape[1] * rows.index.shape[1]):
        left, index = outer.left[part], rows.index[part]
        picked = left.gather(2, index[:, None, :].expand(-1, left.shape[1], -1))
        products.append((wide(picked) * wide(outer.right[part] @ rows.grads[part].mT)).sum((1, 2)))
    return torch.cat(products)
