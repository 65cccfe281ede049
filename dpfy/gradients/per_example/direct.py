"""Per-example gradients that are held as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.per_example.arithmetic import (
    few_roundings,
    kept,
    wide,
    wide_product,
)
from dpfy.gradients.per_example.contribution import Contribution, Piece, Places
from dpfy.gradients.per_example.rounding import as_rows, row_squares


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
