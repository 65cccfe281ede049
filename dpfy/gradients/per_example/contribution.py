"""What one use of one parameter adds to every example's gradient, without writing that gradient
out.

Each kind answers three questions: the squared norm of every example's part, the sum of the parts
weighted example by example, and, for a few examples at a time, the parts themselves. A bounded
number of elements exists at any moment. What else is asked of a kind has an answer here that is
right for all of them, and a better one in the kinds that know more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dpfy.gradients.per_example.arithmetic import (
    fitted,
    put,
)
from dpfy.gradients.per_example.rounding import NormEstimate, row_squares

if TYPE_CHECKING:
    from dpfy.gradients.per_example.joined import Buffers, SumJob
    from dpfy.gradients.per_example.outer import Direct, Outer

Piece = tuple[int, int, "Contribution"]
"""First row, row after the last one, and what these rows of a parameter receive."""

Places = Callable[[Tensor], Tensor]
"""[many, *view] numbers to their places in [many, *tensor], with zeros elsewhere."""


class Contribution(ABC):
    """The per-example gradients of one parameter from one use of it."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """How many examples there are."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Elements of the parameter."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type in which the weighted sum is made."""

    @abstractmethod
    def measured(self) -> tuple[Tensor, Contribution]:
        """Squares of upper bounds of the norms as [parts, batch] partial sums in float64, and what
        to keep for the weighted sum.

        An upper bound for what the weighted sum will really add, up to a relative margin: see
        :class:`NormEstimate`.
        """

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over examples of weight times gradient, in the parameter's shape."""

    @abstractmethod
    def per_example(self, rows: slice) -> Tensor:
        """The gradients of the examples in `rows`: [rows, *parameter]."""

    @abstractmethod
    def rounding(self) -> Tensor:
        """[batch] in float64: how far, in length, a weighted sum with weight 1 may be from the
        example's exact gradient.
        """

    @abstractmethod
    def cleaned(self, keep: Tensor) -> Contribution:
        """The same with the examples where `keep` is False replaced by exact zeros, whatever they
        held.
        """

    def squares_of(self, example: int) -> Tensor:
        """The squared norm of one example's gradient as it is, [1], whatever rounding may do."""
        return row_squares(self.per_example(slice(example, example + 1)))

    # When its norm is taken.

    is_measured: ClassVar[bool] = False
    """Whether its norms are known already."""

    @property
    def sum_job(self) -> SumJob | None:
        """The launch that it waits for, if it waits for one."""
        return None

    def sum_slot(self) -> tuple[Tensor, int] | None:
        """Of one that waits for a launch: the sums of that launch, and which of them are its
        own.
        """
        return None

    @property
    def joins(self) -> bool:
        """Whether its norm is better taken together with others like it, in one launch."""
        return False

    @property
    def waits(self) -> bool:
        """Whether its norm is better taken later than its layer reports."""
        return self.joins

    def norm_factors(self) -> list[Tensor]:
        """Of a contribution that :attr:`joins`: the tensors whose norms, or Gram matrices, multiply
        to its norm.
        """
        raise NotImplementedError

    @property
    def norm_launch(self) -> tuple[object, ...]:
        """Of a contribution that :attr:`joins`: those with the same one share a launch."""
        return (self.dtype,)

    @property
    def convolves(self) -> bool:
        """Whether its weighted sum is a convolution of the library's."""
        return False

    @property
    def holds_reports_alone(self) -> bool:
        """Whether its tensors may be views of what a layer reported, and nothing else."""
        return False

    # Where its sum goes.

    writes_in_place: ClassVar[bool] = False
    """Whether :meth:`sum_into` saves a copy."""

    @property
    def scratch_bytes(self) -> int:
        """Memory that its weighted sum takes on the way."""
        return 0

    def sum_into(self, weights: Tensor, place: Tensor, scratch: Tensor | None = None) -> Tensor:
        """:meth:`weighted_sum` in the memory of `place`; `scratch` serves if it is large enough."""
        return place.copy_(self.weighted_sum(weights).view(place.shape))

    def add_up(
        self, weights: Tensor, like: Tensor, place: Tensor | None, buffers: Buffers
    ) -> Tensor:
        """:meth:`weighted_sum` in the shape of `like`, in float32 or wider; in the memory of
        `place` if there is one.
        """
        if place is not None and self.writes_in_place:
            return self.sum_into(weights, place, buffers.scratch)
        return put(fitted(self.weighted_sum(weights), like), place)

    # Gradients that are held as they are.

    @property
    def stored_grads(self) -> Tensor | None:
        """[batch, *parameter], if the gradients are held as they are."""
        return None

    def direct(self) -> Direct | None:
        """Itself as gradients that are held as they are, if it is made of such."""
        return None

    # Rows of a parameter, each used by itself.

    def row_blocks(self) -> Sequence[Contribution]:
        """What blocks of rows of the parameter receive, if it is made of such; else itself."""
        return (self,)

    def reassembled(
        self, measured: Sequence[tuple[Tensor, Contribution]]
    ) -> tuple[Tensor, Contribution]:
        """:meth:`measured`, from that of its :meth:`row_blocks`."""
        return measured[0]

    @property
    def sliced_shape(self) -> torch.Size | None:
        """The shape of the parameter, if it is made of blocks of rows."""
        return None

    def used_rows(self) -> list[tuple[int, int]] | None:
        """First row and row after the last one of its blocks; None if all rows are used."""
        return None

    def row_pieces(self, shape: torch.Size) -> tuple[Piece, ...] | None:
        """Itself as pieces of a parameter of `shape`; None if it cannot be cut into rows."""
        return None

    def row_range(self, start: int, end: int) -> Contribution:
        """What some of its rows receive, of a kind that :meth:`row_pieces` cuts."""
        raise NotImplementedError

    def unwrapped(self) -> Contribution:
        """Measured rows as rows that are measured."""
        return self

    # Several uses of one parameter.

    merge_rank: ClassVar[int] = 0
    """Kinds are merged, and their sums added, in this order."""

    def merge_key(self) -> tuple[object, ...]:
        """Uses with the same key are merged."""
        return (id(self),)

    def merged(self, alike: Sequence[Any]) -> list[Contribution]:
        """All of `alike`, itself the first of them, as fewer contributions."""
        return list(alike)

    def resolved(self) -> Contribution:
        """Itself without what is known of its norms, or waits."""
        return self

    def widened(self) -> Contribution:
        """Itself with its factors in float32 or wider: products that are written out in a narrow
        type hide what may not cancel.
        """
        return self

    def estimate(self) -> NormEstimate:
        """The norms and how wrong they can be, of a kind that knows :meth:`inner_products`."""
        raise NotImplementedError

    def estimate_with(self, other: Contribution) -> NormEstimate | None:
        """The norms of its sum with `other`, from their inner products; None if those are not
        known.
        """
        return None

    def inner_products(self, outer: Outer) -> tuple[Tensor, Tensor] | None:
        """Its inner products with `outer`, example by example, and how wrong they can be; None if
        unknown.
        """
        return None

    @property
    def view_shape(self) -> torch.Size | None:
        """The shape of the parameter of which it touches some entries, each once."""
        return None

    def support(self, device: torch.device) -> Tensor:
        """Which entries of the parameter it touches, if it has a :attr:`view_shape`."""
        raise NotImplementedError

    # On the way down to a parameter, through functions of parameters alone.

    @property
    def summands(self) -> Sequence[Contribution]:
        """The contributions that it is the sum of."""
        return ()

    @property
    def matrix_shape(self) -> torch.Size | None:
        """The shape of its gradients, of a kind that always makes matrices."""
        return None

    def transposed(self) -> Contribution | None:
        """The same to the transposed matrix; None if unknown."""
        return None

    def times(self, factor: Tensor | float, shape: torch.Size) -> Contribution | None:
        """Itself, a contribution to a tensor of `shape`, times a number or a tensor that broadcasts
        against `shape`; None if unknown.
        """
        return None

    def row_products(self, matrix: Tensor) -> Tensor | None:
        """[batch, rows] inner products of the rows of every example's gradient with those of
        `matrix`; None if unknown.
        """
        return None

    def folded(
        self, out: torch.Size, shape: torch.Size, factor: Tensor | float = 1.0
    ) -> Contribution | None:
        """Gradients of a tensor of shape `out` times a factor, summed to the `shape` that was
        broadcast to it; None if unknown.
        """
        return None

    def through_product(self, i: int, other: Tensor) -> Contribution | None:
        """What factor `i` of a product of two matrices receives, given the `other` one; None if
        unknown.
        """
        return None

    def through_view(
        self,
        places: Places,
        view: torch.Size,
        shape: torch.Size,
        key: Callable[[], tuple[object, ...]],
    ) -> Contribution | None:
        """What a tensor of `shape` receives of which the `view` was taken; None: the same numbers
        at other places. `key`: what tells `places` from others.
        """
        return None
