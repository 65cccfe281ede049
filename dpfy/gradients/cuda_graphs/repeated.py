"""A loop over the steps of a sequence, some steps at a time as a CUDA graph.

A step of a recurrence is a few small kernels, and a fast GPU waits for their launches. What some
steps do is recorded once, on memory of its own; the loop then copies into that memory what these
steps read, launches the graph, and copies out what they made. So the loop may read and write
anywhere, and layers of one shape share a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from dpfy.core.errors import DpfyError
from dpfy.gradients.cuda_graphs import graphs

TOGETHER = 4
"""Steps of a sequence in one graph: launches are few from here on, and the memory is small beside
that of a sequence.
"""

USUALLY = 2
"""How many times a loop of one shape runs as usual before it is recorded."""

ALIGNED = 512
"""Bytes: where a tensor may begin, as torch's allocator has it."""

MOST, PAYS = 4, 8
"""Shapes of which graphs are held; for another one, made once in so many loops, the one that was
not used for longest makes room.
"""

Tensors: TypeAlias = Sequence[Tensor]
Work: TypeAlias = Callable[
    [list[int], Tensors, Tensors, Tensors], tuple[Sequence[Tensors], Tensors]
]
"""(times in their order, what the steps read [step, ...], what passes from step to step, what
stays) to what is made, for each kind one tensor a step in the order of time, and what passes on.
"""


class RepeatedLoop:
    """A loop over the steps of sequences.

    Guarantees: what is made is what `work` makes, called for the same steps in the same order, if
    that depends on nothing but the tensors it is given. While somebody else records or watches the
    single operations, graphs are not used.
    """

    def __init__(self, work: Work, pool: graphs.GraphPool | None = None) -> None:
        self._work, self._pool = work, pool or graphs.GraphPool()
        self._seen: dict[tuple[object, ...], int] = {}
        self._made: dict[tuple[object, ...], _SomeSteps] = {}
        self.made = self.loops = 0
        self.problem: Exception | None = None

    def __call__(
        self, backwards: bool, given: Tensors, carried: Tensors, fixed: Tensors, into: Tensors
    ) -> Tensors:
        """Run over all steps of `given`, the last one first if `backwards`; what is made is written
        into `into`, what passes on is returned.
        """
        length = len(given[0])
        starts = range(0, length, TOGETHER)
        recorded = (
            self._recorded(backwards, given, carried, fixed, into) if length >= TOGETHER else None
        )
        if recorded is not None:
            recorded.begin(carried, fixed)
        for start in reversed(starts) if backwards else starts:
            rows = slice(start, min(start + TOGETHER, length))
            read, write = [t[rows] for t in given], [t[rows] for t in into]
            if recorded is not None and len(write[0]) == TOGETHER:
                recorded.run(read, write)
                continue
            made, passed = self._work(
                _times(len(write[0]), backwards),
                read,
                carried if recorded is None else recorded.carried,
                fixed,
            )
            for parts, place in zip(made, write, strict=True):
                torch.stack(list(parts), out=place)
            if recorded is None:
                carried = passed
            else:
                recorded.begin(passed, fixed)
        return carried if recorded is None else [t.clone() for t in recorded.carried]

    def _recorded(self, backwards: bool, *tensors: Tensors) -> _SomeSteps | None:
        """The graph for such tensors, if there is one or it is time to make it."""
        device = tensors[0][0].device
        if self.problem is not None or not _recordable(device):
            return None
        given, carried, fixed, _ = tensors
        shapes = [
            tuple([(t.shape[1:] if steps else t.shape, t.dtype) for t in some])
            for some, steps in zip(tensors, _STEPS, strict=True)
        ]
        key = (backwards, device, *graphs.settings(device), *shapes)
        self.loops += 1
        if (found := self._made.pop(key, None)) is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= USUALLY or self.made >= MOST + self.loops // PAYS:
                return None
            try:
                found = _SomeSteps(
                    self._work, self._pool, backwards, [t[:TOGETHER] for t in given], carried, fixed
                )
            except (RuntimeError, DpfyError) as problem:
                problem.__traceback__ = problem.__context__ = problem.__cause__ = (
                    None  # their frames hold tensors of the step
                )
                self.problem = problem
                return None
            self.made += 1
            if len(self._made) >= MOST:
                self._made.pop(next(iter(self._made)))
        self._made[key] = found  # the latest used comes last
        return found


_STEPS = (True, False, False, True)
"""Which of (given, carried, fixed, into) have a step in front."""


class _SomeSteps:
    """The work of a few steps as a graph."""

    def __init__(
        self,
        work: Work,
        pool: graphs.GraphPool,
        backwards: bool,
        given: Tensors,
        carried: Tensors,
        fixed: Tensors,
    ) -> None:
        room = iter(_room(pool, [*given, *carried, *fixed]))
        self._given, self.carried, self._fixed = (
            [next(room) for _ in some] for some in (given, carried, fixed)
        )

        def steps() -> list[Tensor]:
            made, passed = work(_times(TOGETHER, backwards), self._given, self.carried, self._fixed)
            _copy(self.carried, passed)
            return [t for parts in made for t in parts]

        with graphs.on(given[0].device):
            self._graph, self._made = pool.record(steps, given[0].device, 0)

    def begin(self, carried: Tensors, fixed: Tensors) -> None:
        """What passes on from before, and what stays."""
        _copy([*self.carried, *self._fixed], [*carried, *fixed])

    def run(self, read: Tensors, write: Tensors) -> None:
        """The next steps."""
        _copy(self._given, read)
        self._graph.replay()
        _copy([t for place in write for t in place.unbind(0)], self._made)


def _room(pool: graphs.GraphPool, tensors: Tensors) -> list[Tensor]:
    """Memory of the shapes of `tensors` that stays, in one piece: of small pieces the allocator
    would hold more than is asked for.
    """
    starts = list(accumulate([-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors], initial=0))
    whole = pool.like(tensors[0].new_empty((), dtype=torch.uint8).expand(starts[-1]))
    return [
        whole[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for start, t in zip(starts[:-1], tensors, strict=True)
    ]


def _copy(into: Tensors, values: Tensors) -> None:
    torch._foreach_copy_(list(into), list(values))


def _times(count: int, backwards: bool) -> list[int]:
    return list(reversed(range(count))) if backwards else list(range(count))


def _recordable(device: torch.device) -> bool:
    """Whether what runs now may be a graph: nobody records already, or looks at single
    operations.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    watched = (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
    return not watched and graphs.problem(device) is None
