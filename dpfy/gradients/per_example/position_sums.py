"""Sums over positions that many layers make in one launch, and the contributions that wait for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfy.gradients.kernels import reductions
from dpfy.gradients.per_example.contribution import Contribution, Piece
from dpfy.gradients.per_example.direct import Direct


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
class Deferred(Contribution):
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

    @property
    def sum_job(self) -> SumJob:
        return self.job

    def sum_slot(self) -> tuple[Tensor, int]:
        block = self.job.result()
        return block, self.job.place * block.shape[1] + self.which

    @property
    def waits(self) -> bool:
        return True

    def resolved(self) -> Direct:
        return self.direct()

    def row_pieces(self, shape: torch.Size) -> tuple[Piece, ...]:
        return ((0, shape[0], self),)

    def row_range(self, start: int, end: int) -> Direct:
        return self.direct().row_range(start, end)
