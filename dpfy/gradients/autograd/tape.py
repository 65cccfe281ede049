"""The tape: what every use of every supported layer reports during one backward pass, and how the
batch lies in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core.errors import DpfyError, Unsupported
from dpfy.gradients.per_example.contribution import Contribution

Explain = Callable[
    [Tensor, tuple[Tensor, ...], Callable[[Tensor], Tensor]], list[tuple[Tensor, Contribution]]
]
"""(output gradient, saved tensors, rows-first view) to the contributions of the layer's parameters.

Of the saved tensors those that are reported come first; a node may have saved more for itself.
"""

Where = tuple[Any, ...]
"""What a node of the graph knows about the layer it stands for: tape, site, explanation, shape of
the gradient (or None), facts.
"""


SAME_PLACE = (
    "keep the batch in the same dimension of this tensor at every step; slower, for models that "
    "change: engine='loop'"
)
"""The way out where the batch moves from one dimension to another."""

EXAMPLE_BY_EXAMPLE, POSITION_BY_POSITION = "example by example", "position by position"


@dataclass(frozen=True)
class BatchAxis:
    """Where the examples are in a tensor: in dimension `dim`, alone, or `folded` into it together
    with positions.
    """

    dim: int
    folded: str = ""

    @property
    def name(self) -> str:
        """In words."""
        where = f"dimension {self.dim}"
        return f"folded into the {where}, {self.folded}" if self.folded else where

    def fits(self, t: Tensor, batch: int) -> bool:
        """Whether `t` could hold `batch` examples in this way."""
        if t.dim() <= self.dim:
            return False
        rows = t.shape[self.dim]
        return rows > 0 and rows % batch == 0 if self.folded else rows == batch

    def rows_first(self, t: Tensor, batch: int) -> Tensor:
        """`t` with the examples in front; positions that were folded with them stay at their
        place.
        """
        if not self.folded:
            return t if self.dim == 0 else t.movedim(self.dim, 0)
        if self.folded == EXAMPLE_BY_EXAMPLE:
            return t.unflatten(self.dim, (batch, -1)).movedim(self.dim, 0)
        return t.unflatten(self.dim, (-1, batch)).movedim(self.dim + 1, 0)

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """[many, batch] values to values that broadcast against `like`, which has this axis, with
        `many` in front.
        """
        times = like.shape[self.dim] // values.shape[1]
        if times > 1:
            values = (
                values.repeat_interleave(times, 1)
                if self.folded == EXAMPLE_BY_EXAMPLE
                else values.repeat(1, times)
            )
        return values.view(
            len(values), *[1] * self.dim, values.shape[1], *[1] * (like.dim() - 1 - self.dim)
        )

    def at(self, dim: int) -> BatchAxis:
        """The same in dimension `dim`."""
        return BatchAxis(dim, self.folded)


batch_axis = cache(BatchAxis)
"""The axis, the same object for the same place."""

FIRST = batch_axis(0, "")
"""The most usual place."""


@dataclass(eq=False)
class Site:
    """One patched module: its name, its parameters, and where the batch lies in its tensors as far
    as it is known.
    """

    name: str
    params: tuple[nn.Parameter, ...]
    axis: BatchAxis | None = None
    settled: bool = False
    batch_dims: int = 0
    """How many of the first dimensions of its output may hold the batch; 0: all but the last."""
    without_batch: bool = False
    """It runs without a batch: its gradients are split further up."""
    parts: dict[str, Site] = field(default_factory=dict)
    origins: dict[str, Any] = field(default_factory=dict)
    """What is known of the bare parameters of the module, by name."""
    routed: bool = False

    def without_batch_before(self) -> bool:
        """`without_batch` as it was when the forward pass ran: what is computed again on the way
        back must be computed the same way.
        """
        if torch._C._current_graph_task_id() < 0:
            self.routed = self.without_batch
        return self.routed

    def part(self, name: str, *params: nn.Parameter | None) -> Site:
        """The site of one product of a module that makes several. The batch must lie in the same
        dimension of all of them.
        """
        if name not in self.parts:
            own = tuple(p for p in params if p is not None)
            self.parts[name] = Site(f"{self.name}.{name}", own)
        return self.parts[name]

    def settle(self, axis: BatchAxis | None, shape: tuple[int, ...], batch: int) -> None:
        """Take `axis` for that of its gradients, of this shape. One example alone settles nothing:
        all that arrives is its own.
        """
        if batch == 1:
            self.axis = axis or batch_axis(0, EXAMPLE_BY_EXAMPLE if shape[0] > 1 else "")
            return
        most = self.batch_dims or max(len(shape) - 1, 1)
        self.without_batch = axis is None or axis.dim >= most
        self.axis, self.settled = axis, True


@dataclass(slots=True)
class LayerReport:
    """One use of a site in one backward pass."""

    site: Site
    grad: Tensor
    saved: tuple[Tensor, ...]
    explain: Explain
    facts: tuple[object, ...] = ()
    """Whatever the answer of `explain` depends on besides the tensors and the site."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The gradient and what was saved."""
        return (self.grad, *self.saved)

    def lies(self) -> tuple[object, ...]:
        """Who reported what, and where every tensor lies."""
        return (
            self.site,
            self.facts,
            *[(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in self.tensors],
        )


@dataclass
class Tape:
    """Collects reports while `recording`. The anchor is a leaf that every tap hangs on, so that one
    backward reaches all of them.
    """

    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    recording: bool = False
    passive: bool = False
    unsettled: bool = False
    receive: Callable[[LayerReport], None] = lambda report: None
    kept: dict[str, Any] = field(default_factory=dict)
    """What layers keep from step to step for their own use, as long as the engine is attached."""

    @contextmanager
    def into(self, receive: Callable[[LayerReport], None]) -> Iterator[None]:
        """Send every report of the backward passes inside to `receive`."""
        self.recording, self.receive = True, receive
        try:
            yield
        finally:
            self.recording, self.receive = False, lambda report: None

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Let gradients pass without reports."""
        before, self.passive = self.passive, True
        try:
            yield
        finally:
            self.passive = before

    def tap(
        self,
        output: Tensor,
        site: Site,
        explain: Explain,
        saved: tuple[Tensor, ...],
        shape: torch.Size | None = None,
        facts: tuple[object, ...] = (),
    ) -> Tensor:
        """`output`, with its gradient reported in the backward pass, in `shape` where given, with
        the `facts` of the use.

        Saved tensors go through autograd, so that activation checkpointing works and an in-place
        change of them is noticed.
        """
        if not torch.is_grad_enabled():
            return output
        self.unsettled = self.unsettled or not site.settled
        fresh = (
            output.clone()
            if output._is_view() or (output.is_leaf and output.requires_grad)
            else output
        )
        return _apply(
            fresh, self.anchor, (self, site, explain, shape, facts), *[t.detach() for t in saved]
        )  # type: ignore[no-any-return]


_LOOKING: list[bool] = []


@contextmanager
def looking() -> Iterator[None]:
    """Let gradients of the user's graph be looked at, by a checker, while an engine is attached."""
    _LOOKING.append(True)
    try:
        yield
    finally:
        _LOOKING.pop()


def reads(where: Where) -> bool:
    """Whether the report will need the saved tensors.

    Under activation checkpointing they may be read only once; those of a site without a batch axis
    were, further up.
    """
    tape, site = where[:2]
    return tape.recording and not tape.passive and not site.without_batch


def report(where: Where, grad: Tensor, saved: tuple[Tensor, ...]) -> None:
    """Report the gradient that arrived at a layer's output; raise if nobody asked for it."""
    tape = where[0]
    if tape.passive:
        return
    if tape.recording:
        tape.receive(LayerReport(where[1], grad, saved, where[2], where[4]))
    elif torch.is_grad_enabled():
        raise Unsupported(
            f"{where[1].name}: a loss made of gradients (a backward pass with create_graph=True)",
            "use engine='loop', which runs such a model as it is: Runtime(engine='loop')",
        )
    elif not _LOOKING:
        raise DpfyError(
            "backward: called on a model with a private engine attached; hand the losses to the "
            "engine instead"
        )


class _Tap(torch.autograd.Function):
    """The identity, in place, whose backward tells the tape."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, where: Where, *saved: Tensor) -> Tensor:
        ctx.where = where
        ctx.save_for_backward(*saved)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        where = ctx.where
        report(
            where,
            grad if where[3] is None else grad.reshape(where[3]),
            ctx.saved_tensors if reads(where) else (),
        )
        return (grad, None, None, *[None] * (len(ctx.needs_input_grad) - 3))


_apply: Any = super(torch.autograd.Function, _Tap).apply
"""``_Tap.apply`` without its look at function transforms, which a tap never runs under."""


def _as_it_is(t: Tensor) -> Tensor:
    return t


def rows_first(site: Site, batch: int, grad: Tensor) -> Callable[[Tensor], Tensor]:
    """The view of this site's tensors with the examples in front."""
    axis = site.axis
    assert axis is not None
    if axis is FIRST and grad.shape[0] == batch:
        return _as_it_is
    fits, front = axis.fits, axis.rows_first

    def view(t: Tensor) -> Tensor:
        if not fits(t, batch):
            raise Unsupported(
                f"{site.name}: a batch that lies in the {axis.name} at first and elsewhere later "
                f"(shape {list(t.shape)})",
                SAME_PLACE,
            )
        return front(t, batch)

    return view
