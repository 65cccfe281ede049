"""What one use of one parameter adds to every example's gradient, without writing that gradient
out.

Each kind answers three questions: the squared norm of every example's part, the sum of the parts
weighted example by example, and, for a few examples at a time, the parts themselves. A bounded
number of elements exists at any moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.kernels import reductions
from dpfy.gradients.per_example import rounding
from dpfy.gradients.per_example.rounding import as_rows, row_squares

CHUNK_ELEMENTS = 2**22
"""How many elements of per-example gradients may exist at once while a norm is computed."""

GPU_CHUNK_ELEMENTS = 2**26
"""The same on a GPU, where small chunks cost launches."""

CACHE_ELEMENTS = 2**18
"""On a CPU, passes over large tensors are cut into parts of this size where their temporary tensors
then stay in the cache.
"""

KEEP_ELEMENTS = 2**23
"""On a CPU, per-example gradients of one parameter up to this size are kept: their weighted sum is
then one pass over memory.
"""

LARGE_BYTES = 2**22
"""From this size on NumPy asks the system for large pages."""


class Contribution(Protocol):
    """The per-example gradients of one parameter from one use of it."""

    @property
    def batch(self) -> int:
        """How many examples there are."""
        ...

    @property
    def width(self) -> int:
        """Elements of the parameter."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the weighted sum is made."""
        ...

    def measured(self) -> tuple[Tensor, Contribution]:
        """Squares of upper bounds of the norms as [parts, batch] partial sums in float64, and what
        to keep for the weighted sum.

        An upper bound for what the weighted sum will really add, up to a relative margin: see
        :class:`NormEstimate`.
        """
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over examples of weight times gradient, in the parameter's shape."""
        ...

    def per_example(self, rows: slice) -> Tensor:
        """The gradients of the examples in `rows`: [rows, *parameter]."""
        ...

    def rounding(self) -> Tensor:
        """[batch] in float64: how far, in length, a weighted sum with weight 1 may be from the
        example's exact gradient.
        """
        ...

    def cleaned(self, keep: Tensor) -> Contribution:
        """The same with the examples where `keep` is False replaced by exact zeros, whatever they
        held.
        """
        ...


def wide(t: Tensor) -> Tensor:
    """At least float32."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The matrix product of `a` and `b`, or of many, in float32 for narrower factors: accumulated
    wide, and not rounded afterwards.
    """
    product: Any = torch.mm if a.dim() == 2 else torch.bmm
    if a.dtype in (torch.float32, torch.float64):
        return product(a, b, out=out)  # type: ignore[no-any-return]
    if a.is_cuda:
        with suppress(TypeError, RuntimeError):  # builds without a wide result take the longer way
            return product(a, b, out_dtype=torch.float32, out=out)  # type: ignore[no-any-return]
    return product(a.float(), b.float(), out=out)  # type: ignore[no-any-return]


def scaled(t: Tensor, weights: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Rows of `t` times `weights`, in the dtype of `t`; in the memory of `scratch`, bytes, where
    that is given.
    """
    factors = weights if weights.dtype is t.dtype else weights.to(t.dtype)
    place = None if scratch is None else scratch[: t.nbytes].view(t.dtype).view(t.shape)
    if factors.dim() == 1 and t.is_contiguous() and t.numel() and kernels.usable(t):
        return reductions.scale_rows(t, factors, torch.empty_like(t) if place is None else place)
    if factors.dim() != t.dim():
        factors = factors.view(-1, *[1] * (t.dim() - 1))
    return t * factors if place is None else torch.mul(t, factors, out=place)


def few_roundings(t: Tensor) -> float:
    """The relative error of scaling a gradient that exists in the type of `t`."""
    narrow = rounding.unit(t.dtype) if t.dtype in (torch.bfloat16, torch.float16) else 0.0
    return rounding.gamma(4, t.dtype) + 2 * narrow + 2 * rounding.of_factors(t.dtype, t.device)


def scaled_wide(t: Tensor, weights: Tensor) -> Tensor:
    """Rows of `t` times `weights`, in float32 or wider, in one pass."""
    return t * wide(weights).view(-1, *[1] * (t.dim() - 1))


def kept(t: Tensor, keep: Tensor) -> Tensor:
    """`t` with the rows where `keep` is False set to zero (also NaN and infinite ones)."""
    return torch.where(
        keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device)
    )


def row_chunks(batch: int, width: int, elements: int = CHUNK_ELEMENTS) -> list[slice]:
    """Slices of at most `elements // width` examples, at least one each."""
    size = max(1, min(batch, elements // max(width, 1)))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def large_pages(like: Tensor, *shape: int) -> Tensor:
    """Memory of the type and device of `like`. On a CPU large pieces come from NumPy, which asks
    the system for large pages: the page faults of small ones were a quarter of the time of some
    products that are put there.
    """
    real = {torch.float32: np.float32, torch.float64: np.float64}.get(like.dtype)
    if like.device.type != "cpu" or real is None or math.prod(shape) * like.itemsize < LARGE_BYTES:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, real))


def norm_by_parts(
    batch: int, width: int, part: Callable[[slice], Tensor], elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Squared norms from materialised gradients, a bounded chunk at a time: [batch]."""
    return torch.cat([row_squares(part(rows)) for rows in row_chunks(batch, width, elements)])


@dataclass(frozen=True, repr=False)
class Held:
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
        return row_squares(self.grads)[None], cast(Contribution, self)

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


@dataclass(eq=False)
class SumJob:
    """Sums over positions that are not made yet, so that many layers can share one launch. See
    ``reductions.position_sums``.
    """

    layer: tuple[Tensor, ...] | None
    block: Tensor | None = (
        None  # [layers, kinds of sums, batch, width], for all layers of the launch
    )
    place: int = 0

    def result(self) -> Tensor:
        """The block of sums, made now if it was not."""
        if self.block is None:
            run_jobs([self])
        assert self.block is not None
        return self.block


def run_jobs(jobs: Sequence[SumJob]) -> None:
    """Make the sums of all jobs that wait, one launch for each shape, and let go of their
    tensors.
    """
    alike: dict[tuple[object, ...], list[SumJob]] = {}
    for job in jobs:
        if job.layer is not None:
            alike.setdefault(
                (job.layer[0].shape, job.layer[0].dtype, job.layer[-1].dtype, len(job.layer)), []
            ).append(job)
    for group in alike.values():
        block = reductions.position_sums([job.layer for job in group if job.layer is not None])
        for place, job in enumerate(group):
            job.block, job.place, job.layer = block, place, None


@dataclass(frozen=True)
class Deferred:
    """A direct contribution whose sums wait in a job. `which`: 0 for a shift (bias), 1 for a
    scale.
    """

    job: SumJob
    which: int
    shape: torch.Size

    @property
    def batch(self) -> int:
        return self.direct().batch

    @property
    def width(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def direct(self) -> Direct:
        """The gradients themselves."""
        grads = self.job.result()[self.job.place, self.which]
        return Direct(grads.view(len(grads), *self.shape))

    def measured(self) -> tuple[Tensor, Contribution]:
        return self.direct().measured()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.direct().weighted_sum(weights)

    def per_example(self, rows: slice) -> Tensor:
        return self.direct().per_example(rows)

    def rounding(self) -> Tensor:
        return self.direct().rounding()

    def cleaned(self, keep: Tensor) -> Direct:
        return self.direct().cleaned(keep)


def storages(*parts: object) -> set[int]:
    """Where the memory of every tensor in some contributions begins.

    By arithmetic: a storage that Python was asked for is let go of at another time than one that it
    was not, and the tensors of a step would lie elsewhere when its work is recorded than when it is
    repeated.
    """
    return {
        t.data_ptr() - int(t.storage_offset()) * t.element_size()
        for part in parts
        for t in _tensors(part)
    }


def _tensors(part: object) -> Iterator[Tensor]:
    """Every tensor in a contribution."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from _tensors(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
