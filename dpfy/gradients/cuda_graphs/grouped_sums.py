"""The end of a step: multipliers, then sums group by group, by a recording or as usual.

Sums need memory while all reports are still held. So they are made in groups, and after each group
the reports that it alone needed make room for the next one. Who does the work must not matter for
where tensors lie: all ways allocate and let go in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfy.core.errors import DpfyError
from dpfy.gradients.clip import Clip
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.cuda_graphs.recorded_step import End, HeldReports, Key, RecordedReports
from dpfy.gradients.engine import Grads
from dpfy.gradients.engines.bounded_sum import BoundedSum
from dpfy.gradients.per_example.clipped_sum import ClippedSum, Flag, scratch_bytes
from dpfy.gradients.per_example.joined import BufferLayout, Buffers
from dpfy.gradients.per_example.rounding import sum_dtype

GROUPS = 4
"""Sums are made in so many groups of about the same size: each is a launch, and the memory of the
first is beside all that is held.
"""

GROUPED_BYTES = 2**27
"""Sums that are smaller in all are made at once: steps of such models are short, and would feel the
launches.
"""

GROUPED_SHARE = 1.0
"""So are those of which what is held for them is a smaller part: there is little to let go of."""

PIECE_BYTES = 2**24
"""The sums of a group lie in pieces of at most this size, which fit where a layer's tensors
were.
"""


@dataclass(frozen=True)
class SumGroup:
    """Parameters whose sums are made together, and the scratch memory that this takes."""

    names: tuple[str, ...]
    scratch: int


def sum_groups(scaled: ClippedSum, order: Sequence[str], held: int) -> tuple[SumGroup, ...]:
    """The groups of all parameters of `scaled`; `order`: those that are used, by their last use;
    `held`: bytes that are held for them.

    Guarantees: every parameter is in one group. The groups follow from shapes, kinds of
    contributions and the order alone, never from values. Those without a contribution, and those
    that share a launch, are in the first group.
    """
    sizes = {name: p.numel() * sum_dtype(p.dtype).itemsize for name, p in scaled.params.items()}
    total, large = (
        sum(sizes.values()),
        {name: part for _, mine in scaled.rests for name, part in mine.items()},
    )
    groups: list[list[str]] = [list(sizes)]
    pays = total >= GROUPED_BYTES and held >= GROUPED_SHARE * total
    if pays and len(scaled.rests) == 1 and not scaled.clip.coordinates:
        later = [name for name in order if name in large]
        groups, before = [[] for _ in range(GROUPS)], 0
        for name in [*[name for name in sizes if name not in set(later)], *later]:
            groups[min(before * GROUPS // total, GROUPS - 1)].append(name)
            before += sizes[name]
    return tuple(
        SumGroup(tuple(g), scratch_bytes(large[name] for name in g if name in large))
        for g in groups
        if g
    )


def parted(scaled: ClippedSum, groups: Sequence[SumGroup]) -> list[ClippedSum]:
    """`scaled` group by group."""
    return [scaled] if len(groups) == 1 else [scaled.of(frozenset(group.names)) for group in groups]


ROUNDING = 1e-3
"""How far a recorded sum may be from the usual one, relative to its length and the bound: they
differ by the order of additions.
"""


@dataclass(frozen=True)
class Request:
    """What a bounded sum is asked for."""

    clip: Clip
    mask: Tensor | None
    losses: Tensor

    def key(self, sums: BoundedSum) -> Key:
        """What it depends on besides the reports."""
        device = self.losses.device
        return (
            self.clip,
            self.mask is None,
            len(self.losses),
            device,
            *graphs.settings(device),
            *sums.identity(),
        )


class UsualSums:
    """Without a recording. `scale`: multipliers of norms that are known to be finite, for a step
    that a recording began.

    Guarantees: of examples without a finite norm exactly nothing is added. That is known before the
    first group is let go of.
    """

    def __init__(
        self,
        held: HeldReports,
        request: Request,
        groups: tuple[SumGroup, ...] | None = None,
        scale: Tensor | None = None,
    ) -> None:
        if not held.parts:
            held.again()
        with graphs.private_pool():
            scaled = held.weigh(request.clip, request.mask)
            self.groups = groups or sum_groups(scaled, held.order(), held.nbytes)
            self._sums, self._flag, self._bad = (
                held.sums,
                None if scale is not None else Flag(scaled.sound.device),
                False,
            )
            if self._flag is not None:
                self._flag.put(scaled.sound)
                self._flag.mark()
            self._parts: list[ClippedSum | None] = [
                *parted(scaled if scale is None else replace(scaled, scale=scale), self.groups)
            ]

    def made(self, place: int, buffers: Buffers | None = None) -> Grads:
        """The sums of a group, as far as it is known that norms were finite."""
        part = self._parts[place]
        assert part is not None
        with graphs.private_pool():
            return self._sums.sum(part.cleaned() if self._bad else part, buffers=buffers).value

    def sum(self, place: int, buffers: Buffers) -> None:
        """The sums of a group."""
        self.made(place, buffers)
        if self._flag is not None and not self._flag.value():
            self._bad = True
            self.made(place, buffers)
        self._flag = None

    def let_go(self, place: int) -> None:
        """The sums of a group are made."""
        self._parts[place] = None


class RepeatedSums:
    """By a recording of an earlier step, as long as the memory of the sums lies where it lay."""

    new = False

    def __init__(self, recording: RecordedReports, request: Request) -> None:
        self.recording, self.request = recording, request
        self.groups = tuple([group for group, _ in recording.end])
        self.moved = False
        self.problem: Exception | None = None

    def begin(self) -> None:
        """Launch the multipliers: they are under way while the host goes on."""
        self.recording.weigh(self.request.mask)

    def sum(self, place: int, buffers: Buffers, where: Key) -> bool:
        """The sums of a group; False if they are to be made as usual, and so are those after
        them.
        """
        self.moved = self.recording.end[place][1] != where
        return not self.moved and self.made(place, buffers)

    def made(self, place: int, buffers: Buffers) -> bool:
        """The sums, in memory that lies where it lay; False if some norm was not finite."""
        return self.recording.add(place)

    def let_go(self, place: int) -> None:
        """A graph holds none of the tensors that it reads."""


class NewSums(RepeatedSums):
    """By graphs that are recorded now, each compared with the usual work before what that needs is
    let go of.
    """

    new = True

    def __init__(
        self,
        recording: RecordedReports,
        request: Request,
        held: HeldReports,
        pool: graphs.GraphPool,
    ) -> None:
        super().__init__(recording, request)
        self._held, self._pool = held, pool
        self._parts: list[ClippedSum | None] = []
        self.usual: UsualSums | None = None

    def begin(self) -> None:
        """Nothing is recorded unless the memory of the first group lies where it lay."""

    def made(self, place: int, buffers: Buffers) -> bool:
        """Record the work on a group, and do it. False if that cannot be, gives another sum, or
        some norm was not finite.
        """
        try:
            self._record(place, buffers)
        except Exception as problem:
            self.problem = problem
            return False
        if not place:
            self.recording.weigh(self.request.mask)
        if not self.recording.add(place):
            return False
        self.usual = self.usual or UsualSums(self._held, self.request, self.groups)
        if not self._agrees(self.usual.made(place), buffers):
            self.problem = DpfyError(
                "a recorded step gave another sum than the step it was recorded from"
            )
        return self.problem is None

    def _record(self, place: int, buffers: Buffers) -> None:
        def weighed(mask: Tensor | None) -> ClippedSum:
            scaled = self._held.weigh(self.request.clip, mask)
            self._parts = [*parted(scaled, self.groups)]
            return scaled

        if not place:
            self.recording.scale = self.recording.record(self._pool, weighed).scale
        part = self._parts[place]
        assert part is not None
        self.recording.record_sum(
            self._pool, lambda: self._held.sums.sum(part, last=True, buffers=buffers)
        )

    def _agrees(self, usual: Grads, buffers: Buffers) -> bool:
        """Whether the sums are those of the usual work on the same reports."""
        with graphs.private_pool():
            gaps = [
                torch.linalg.vector_norm(buffers.places[name] - sums)
                for name, sums in usual.items()
            ]
            sizes = [torch.linalg.vector_norm(sums) for sums in usual.values()]
            gap, size = (float(torch.stack(each).double().norm()) for each in (gaps, sizes))
        bound = self.request.clip.bound.l2
        return gap <= ROUNDING * (size + (bound if math.isfinite(bound) else 0.0))

    def let_go(self, place: int) -> None:
        """The sums of a group are made."""
        if self._parts:
            self._parts[place] = None
        if self.usual is not None:
            self.usual.let_go(place)


class GroupedSums:
    """The sums of one step, from its reports, by `source` if there is one and as far as it serves.

    Guarantees: a recording is repeated only into memory that lies where it lay. A report is let go
    of only when all that it contributes to is summed, and it is known that every norm was finite or
    that what was not is left out.
    """

    def __init__(self, held: HeldReports, request: Request, source: RepeatedSums | None) -> None:
        self.held, self.request, self.source = held, request, source
        self.served = source is not None
        self._usual: UsualSums | None = None
        self._end: list[tuple[SumGroup, Key]] = []

    @property
    def end(self) -> End:
        """The groups, and where their sums lie."""
        return tuple(self._end)

    def value(self, layout: Callable[[tuple[str, ...], Clip], BufferLayout]) -> Grads:
        """The sums in the order of the parameters, then the coordinates. `layout`: how those of
        some parameters lie in memory.
        """
        if self.source is not None:
            self.source.begin()
        groups, places = self.source.groups if self.source else self._as_usual(0).groups, Grads()
        for place, group in enumerate(groups):
            buffers, where = layout(group.names, self.request.clip).buffers(group.scratch)
            self._end.append((group, where))
            self.served = (
                self.served and self.source is not None and self.source.sum(place, buffers, where)
            )
            if not self.served:
                self._as_usual(place).sum(place, buffers)
            places |= buffers.places
            del buffers  # the scratch memory with it
            self._let_go(place, group)
        return {name: places.pop(name) for name in self.held.sums.params} | places

    def _as_usual(self, place: int) -> UsualSums:
        """The usual work from the group at `place` on, with the multipliers that there are if some
        sums were made with them.
        """
        if self._usual is None and isinstance(self.source, NewSums):
            self._usual = self.source.usual
        if self._usual is None:
            groups, scale = (
                (None, None)
                if self.source is None
                else (self.source.groups, self.source.recording.scale)
            )
            self._usual = UsualSums(self.held, self.request, groups, scale if place else None)
        return self._usual

    def _let_go(self, place: int, group: SumGroup) -> None:
        for each in (self._usual, self.source):
            if each is not None:
                each.let_go(place)
        self.held.release(group.names)
