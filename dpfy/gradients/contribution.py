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

from dpfy.gradients import kernels

CHUNK_ELEMENTS = 2**22
"""How many elements of per-example gradients may exist at once while a norm is computed."""

GPU_CHUNK_ELEMENTS = 2**26
"""The same on a GPU, where small chunks cost launches."""

PASS_COST = 48
"""What writing and reading a kept gradient element costs, in multiply-adds of a matrix product (measured on a CPU)."""

KEEP_ELEMENTS = 2**23
"""On a CPU, per-example gradients of one parameter up to this size are kept: their weighted sum is then one pass over memory."""


class Contribution(Protocol):
    """The per-example gradients of one parameter from one use of it."""

    @property
    def width(self) -> int:
        """Elements of the parameter."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the weighted sum is made."""
        ...

    def measured(self) -> tuple[Tensor, Contribution]:
        """Squared norms as [parts, batch] partial sums, in float32 or wider, and what to keep for the weighted sum."""
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


def norm_by_parts(batch: int, width: int, part: Callable[[slice], Tensor], elements: int = CHUNK_ELEMENTS) -> Tensor:
    """Squared norms from materialised gradients, a bounded chunk at a time: [1, batch]."""
    return torch.cat([row_squares(part(rows)) for rows in row_chunks(batch, width, elements)])[None]


def kept_whole(part: Contribution, batch: int) -> tuple[Tensor, Contribution]:
    """Materialise once, for the norm and for the weighted sum."""
    grads = part.per_example(slice(0, batch))
    return row_squares(grads)[None], Direct(grads)


@dataclass(frozen=True)
class Direct:
    """Per-example gradients that are small enough to hold: biases, scales of normalisation layers, bare parameters."""

    grads: Tensor  # [batch, *parameter]

    @property
    def width(self) -> int:
        return self.grads[0].numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        return row_squares(self.grads)[None], self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = self.grads.flatten(1)
        return torch.mv(flat.t(), weights.to(flat.dtype)).view(self.grads.shape[1:])

    def per_example(self, rows: slice) -> Tensor:
        return self.grads[rows]

    def cleaned(self, keep: Tensor) -> Direct:
        return Direct(kept(self.grads, keep))


@dataclass(eq=False)
class SumJob:
    """Sums over positions that are not made yet, so that many layers can share one launch. See ``kernels.position_sums``."""

    layer: tuple[Tensor, ...] | None
    made: tuple[Tensor, ...] = ()

    def result(self) -> tuple[Tensor, ...]:
        """The sums, made now if they were not."""
        if self.layer is not None:
            run_jobs([self])
        return self.made


def run_jobs(jobs: Sequence[SumJob]) -> None:
    """Make the sums of all jobs that wait, one launch for each shape, and let go of their tensors."""
    alike: dict[tuple[object, ...], list[SumJob]] = {}
    for job in jobs:
        if job.layer is not None:
            alike.setdefault((job.layer[0].shape, job.layer[0].dtype, job.layer[-1].dtype, len(job.layer)), []).append(job)
    for group in alike.values():
        for job, made in zip(group, kernels.position_sums([job.layer for job in group if job.layer is not None]), strict=True):
            job.made, job.layer = made, None


@dataclass(frozen=True)
class Late:
    """A direct contribution whose sums wait in a job. `which`: 0 for a shift (bias), 1 for a scale."""

    job: SumJob
    which: int
    shape: torch.Size

    @property
    def width(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def direct(self) -> Direct:
        """The gradients themselves."""
        grads = self.job.result()[self.which]
        return Direct(grads.view(len(grads), *self.shape))

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.direct().measured()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.direct().weighted_sum(weights)

    def per_example(self, rows: slice) -> Tensor:
        return self.direct().per_example(rows)

    def cleaned(self, keep: Tensor) -> Direct:
        return self.direct().cleaned(keep)


@dataclass(frozen=True)
class Outer:
    """Sums of outer products over positions: gradient = sum over t of left[t] (x) right[t]. Linear layers and their kin."""

    left: Tensor  # [batch, positions, rows of the parameter]
    right: Tensor  # [batch, positions, columns of the parameter]

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
            return (row_squares(self.left) * row_squares(self.right))[None], self
        if kernels.usable(self.left):
            if self.by_gram:
                return kernels.gram_norm(self.left, self.right), self
            return norm_by_parts(batch, p * d, self.per_example, GPU_CHUNK_ELEMENTS), self
        gram, product = positions**2 * (p + d), positions * p * d
        if batch * p * d <= KEEP_ELEMENTS and PASS_COST * p * d <= 2 * gram:
            return kept_whole(self, batch)
        return (self._gram() if 2 * gram <= product else norm_by_parts(batch, p * d, self.per_example)), self

    @property
    def by_gram(self) -> bool:
        """On a GPU: Gram matrices tile by tile, unless there are many positions for the width.

        Measured on an H200: products run at 0.9 (float32 as TF32) or 1.45 (bfloat16) times the speed of the symmetric Gram kernel,
        but the kernel serves all layers of a shape in one launch, which decides in bfloat16.
        """
        _, positions, p = self.left.shape
        d = self.right.shape[-1]
        return positions * (p + d) <= 2.2 * p * d

    def _gram(self) -> Tensor:
        """sum over t, s of (left[t] . left[s]) (right[t] . right[s])."""
        parts = []
        for rows in row_chunks(self.left.shape[0], 2 * self.left.shape[1] ** 2):
            left, right = self.left[rows], self.right[rows]
            parts.append((wide(left @ left.mT) * wide(right @ right.mT)).sum((1, 2)))
        return torch.cat(parts)[None]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        left, right = self.left, self.right
        if left.shape[-1] <= right.shape[-1]:
            left = scaled(left, weights)
        else:
            right = scaled(right, weights)
        return left.flatten(0, 1).t() @ right.flatten(0, 1)

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

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        if kernels.usable(self.grads):
            return kernels.gram_norm(self.grads, self.index), self
        parts = []
        for rows in row_chunks(self.index.shape[0], 2 * self.index.shape[1] ** 2):
            same = self.index[rows, :, None] == self.index[rows, None, :]
            g = self.grads[rows]
            if g.stride(1) == 0:
                # every position has the same gradient (mean or sum of embeddings): only the coincidences count
                parts.append(row_squares(g[:, :1]) * same.sum((1, 2)))
            else:
                parts.append((wide(g @ g.mT) * same).sum((1, 2)))
        return torch.cat(parts)[None], self

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


GROUPED_WIDTH = 80_000
"""Convolutions with more weights than this run faster example by example than folded into groups (measured on a CPU)."""


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

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        batch, how = len(self.inputs) // self.images, self.geometry
        if kernels.usable(self.grads) and len(how.stride) == 2 and how.groups == 1 and self.images == 1 and not how.transposed:
            return self._on_gpu(), self
        if batch * self.width <= KEEP_ELEMENTS:
            return kept_whole(self, batch)
        if self.images == 1 and len(how.stride) == 2 and how.groups == 1 and not how.transposed:
            positions, outs = self.grads[0, 0].numel(), self.weight.shape[0]
            columns = self.width // outs
            if 2 * positions * (outs + columns) <= outs * columns:
                return self._by_gram(positions * columns), self
        return norm_by_parts(batch, self.width * self.images, self.per_example), self

    def _by_gram(self, patch: int) -> Tensor:
        """Gram matrices over few positions, the patches written out for a few examples at a time."""
        parts = []
        for rows in row_chunks(len(self.inputs), patch):
            part = replace(self, inputs=self.inputs[rows], grads=self.grads[rows])
            parts.append(Outer(part.grads.flatten(2).mT, part._patches())._gram())
        return torch.cat(parts, 1)

    def _on_gpu(self) -> Tensor:
        """Patches read in place, or Gram matrices over the positions where there are few of them (measured on an H200)."""
        how, positions = self.geometry, self.grads[0, 0].numel()
        if positions > 64 or self.weight[0].numel() < 256:
            return kernels.conv_norm(self.inputs, self.grads, self.weight, how.stride, how.padding, how.dilation)
        return kernels.gram_norm(self.grads.flatten(2).mT.contiguous(), self._patches())

    def _patches(self) -> Tensor:
        """[batch, positions, channels * kernel] inputs of every position of a two-dimensional convolution."""
        (ph, pw), (sh, sw), (dh, dw), (kh, kw) = (
            self.geometry.padding,
            self.geometry.stride,
            self.geometry.dilation,
            self.weight.shape[2:],
        )
        x = torch.nn.functional.pad(self.inputs, (pw, pw, ph, ph)) if ph or pw else self.inputs
        views = x.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)[..., ::dh, ::dw]
        return views.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        grads = scaled(self.grads, weights.repeat_interleave(self.images) if self.images > 1 else weights)
        return weight_gradient(self.inputs, grads, self.weight, self.geometry)

    def per_example(self, rows: slice) -> Tensor:
        rows = slice(rows.start * self.images, rows.stop * self.images)
        a, g, w = self.inputs[rows], self.grads[rows], self.weight
        many = len(a)
        if not a.is_cuda and self.width > GROUPED_WIDTH:
            each = [weight_gradient(a[i : i + 1], g[i : i + 1], w, self.geometry) for i in range(many)]
            grads = torch.stack(each)
            return grads if self.images == 1 else grads.unflatten(0, (-1, self.images)).sum(1)
        wide_weight = w.expand(many, *w.shape).flatten(0, 1)
        geometry = replace(self.geometry, groups=self.geometry.groups * many)
        grads = weight_gradient(a.flatten(0, 1)[None], g.flatten(0, 1)[None], wide_weight, geometry).unflatten(
            0, (many, w.shape[0])
        )
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
class Measured:
    """A contribution whose norms are known already, and what was kept of it."""

    norms: Tensor  # [parts, batch]
    rest: Contribution

    @classmethod
    def of(cls, part: Contribution) -> Measured:
        """Measure `part` now."""
        norms, rest = part.measured()
        return cls(norms, rest)

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

    def cleaned(self, keep: Tensor) -> Measured:
        return Measured(self.norms, self.rest.cleaned(keep))


@dataclass(frozen=True)
class Shared:
    """Several uses of one parameter. The cross terms are exact."""

    parts: Sequence[Contribution]

    @property
    def width(self) -> int:
        return self.parts[0].width

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def measured(self) -> tuple[Tensor, Contribution]:
        merged = merge(self.parts)
        if len(merged) == 1:
            return merged[0].measured()
        kinds = {type(m): m for m in merged}
        outer, rows = kinds.get(Outer), kinds.get(Rows)
        if len(merged) == 2 and isinstance(outer, Outer) and isinstance(rows, Rows):
            norms = [outer.measured()[0], rows.measured()[0], 2 * tied_product(outer, rows)[None]]
            return torch.cat(norms), self
        return norm_by_parts(batch_of(merged[0]), self.width * len(merged), self.per_example), self

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
    parts = [p.rest if isinstance(p, Measured) else p.direct() if isinstance(p, Late) else p for p in parts]
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
