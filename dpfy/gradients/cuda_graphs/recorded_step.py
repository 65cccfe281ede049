"""What was recorded of a step, as graphs: the work on its reports, section by section, then
multipliers and sums.

The two routes differ in where a step begins. The recorder takes the reports of a backward pass that
ran as always; a captured step runs forward and backward itself, on the way to its multipliers. From
there on they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dpfy.gradients.autograd.tape import LayerReport
from dpfy.gradients.clip import Clip
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.engines.bounded_sum import BoundedSum, Parts
from dpfy.gradients.per_example.clipped_sum import ClippedSum, Flag
from dpfy.gradients.per_example.contribution import Contribution

if TYPE_CHECKING:
    from dpfy.gradients.cuda_graphs.grouped_sums import SumGroup


Key = tuple[object, ...]
End = tuple[tuple["SumGroup", Key], ...]
"""The groups of the sums of a step, and where the memory of each lies."""

Weigh = Callable[[Tensor | None], ClippedSum]
"""From the mask of a step to the multipliers of its examples."""

T = TypeVar("T")
Own = list[list[tuple[str, Contribution]] | None]
"""For each report its contributions, if they hold none of the tensors that were reported; else
None.
"""


@dataclass
class ReportSection:
    """The work on some reports. `own`: the contributions of a report where none of the reported
    tensors is needed any more.

    `names`: the parameters of each report. `idle`: nothing is computed. The graph is held all the
    same: the memory of all graphs goes with the first of them.
    """

    key: Key
    graph: graphs.CudaGraph
    own: Own
    names: list[tuple[str, ...]]
    idle: bool

    def replay(self) -> None:
        """Launch the work."""
        if not self.idle:
            self.graph.replay()


class RecordedStep:
    """Graphs for the multipliers of a step and for its sums, in as many parts as are recorded. All
    tensors in it are overwritten at every use.
    """

    def __init__(
        self, device: torch.device, mask: Tensor | None, queue: torch.cuda.Stream | None = None
    ) -> None:
        self.device, self.mask = device, mask
        self.sound, self._queue = Flag(device), queue  # the current one, if it is not given
        self._sums: list[graphs.CudaGraph] = []

    def record(self, pool: graphs.GraphPool, weigh: Weigh) -> ClippedSum:
        """Record the multipliers: `weigh` with the mask of this step, and what that gives."""

        def multipliers() -> ClippedSum:
            scaled = weigh(self.mask)
            self.sound.put(scaled.sound)
            return scaled

        self._weigh, scaled = pool.record(multipliers, self.device, 1 << 17)
        return scaled

    def record_sum(
        self, pool: graphs.GraphPool, add: Callable[[], T], addresses: int = 1 << 14
    ) -> T:
        """Record the next part of the sums, whose tensors are returned. `addresses`: how many their
        kernels may need.
        """
        graph, total = pool.record(add, self.device, addresses)
        self._sums.append(graph)
        return total

    def weigh(self, mask: Tensor | None) -> None:
        """Launch the multipliers."""
        if self.mask is not None and mask is not None:
            self.mask.copy_(mask)
        self._weigh.replay()
        self.sound.mark(self._queue)

    def add(self, part: int = 0) -> bool:
        """A part of the sums, with the multipliers of :meth:`weigh`.

        With the first part, False if some norm was not finite: then all sums are worthless.
        """
        self._sums[part].replay()
        return part > 0 or self.sound.value()


class RecordedReports(RecordedStep):
    """The same with the work on the reports of a step, section by section, before it, and the
    groups of its sums: where they lie.
    """

    def __init__(
        self, sections: list[ReportSection], end: End, mask: Tensor | None, device: torch.device
    ) -> None:
        super().__init__(
            device, mask, graphs.queue(device)
        )  # the key says that it is the current one
        self.sections, self.end = sections, end
        self.misses, self.scale = 0, torch.empty(0)

    def share(self) -> None:
        """Let recordings that take turns have the same memory: every use of one writes its own
        contributions and multipliers again.

        They are still read where a step goes on otherwise than it began, before another recording
        is used.
        """
        seen: dict[int, tuple[object, object]] = {}
        for section in self.sections:
            section.own = _unowned(section.own, seen)
        self.scale = graphs.unowned(self.scale)


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


def own_parts(report: LayerReport, parts: Parts) -> list[tuple[str, Contribution]] | None:
    """The contributions of `report`, if they hold none of its tensors."""
    found = [(name, part) for name, uses in parts.items() for part in uses]
    return None if storages(*[part for _, part in found]) & storages(report.tensors) else found


def nothing_made(reports: list[LayerReport], found: list[Parts]) -> bool:
    """Whether the contributions are but views of what was reported, so that repeating the work on
    them would do nothing.
    """
    parts = [part for parts in found for uses in parts.values() for part in uses]
    known = all(block.holds_reports_alone for part in parts for block in part.row_blocks())
    return known and storages(*parts) <= storages(*[report.tensors for report in reports])


def _unowned(part: Any, seen: dict[int, tuple[object, object]]) -> Any:
    """The same contribution, whose tensors do not keep their memory. What is one thing stays one
    thing.
    """
    if id(part) in seen:
        return seen[id(part)][1]
    made = part
    if isinstance(part, Tensor):
        made = graphs.unowned(part)
    elif isinstance(part, list | tuple):
        made = type(part)([_unowned(each, seen) for each in part])
    elif is_dataclass(part) and not isinstance(part, type):
        made = copy(part)
        for each in fields(part):
            object.__setattr__(made, each.name, _unowned(getattr(part, each.name), seen))
    seen[id(part)] = part, made
    return made


class Worked(NamedTuple):
    """What was made of some reports: see :class:`ReportSection`."""

    own: Own
    names: list[tuple[str, ...]]
    idle: bool


class HeldReports:
    """The reports of one step, section by section.

    Guarantees: a report is held as long as some parameter that it contributes to is not done, and
    not longer, anyone who does the work: the model's tensors then lie at the same places whether a
    step is repeated, recorded or done as usual.
    """

    def __init__(self, sums: BoundedSum, batch: int) -> None:
        self.sums, self.parts, self._batch = sums, Parts(), batch
        self._sections: list[tuple[list[LayerReport | None], Own, list[tuple[str, ...]]]] = []
        self._done: set[str] = set()

    def hold(self, reports: list[LayerReport], own: Own, names: list[tuple[str, ...]]) -> None:
        """Take up reports that were worked on: those whose contributions hold their tensors, and
        the contributions of the others.
        """
        kept = [report if mine is None else None for report, mine in zip(reports, own, strict=True)]
        self._sections.append((kept, own, names))

    def work(self, reports: list[LayerReport]) -> Worked:
        """Add what `reports` contribute to `parts`."""
        found = self.sums.explain(reports, self._batch)
        for name, part in (
            (name, part) for parts in found for name, uses in parts.items() for part in uses
        ):
            self.parts.setdefault(name, []).append(part)
        own = [own_parts(report, parts) for report, parts in zip(reports, found, strict=True)]
        return Worked(own, [tuple(parts) for parts in found], nothing_made(reports, found))

    def again(self) -> None:
        """What all reports that are held contribute to parameters that are not done: made again, or
        what was left of them.
        """
        self.parts = {}
        with graphs.private_pool():
            kept = [
                report
                for reports, _, _ in self._sections
                for report in reports
                if report is not None
            ]
            made = iter(self.sums.explain(kept, self._batch))
        for mine in (mine for _, own, _ in self._sections for mine in own):
            found = (
                [(name, part) for name, uses in next(made).items() for part in uses]
                if mine is None
                else mine
            )
            for name, part in found:
                if name not in self._done:
                    self.parts.setdefault(name, []).append(part)

    def weigh(self, clip: Clip, mask: Tensor | None) -> ClippedSum:
        """Multipliers from the contributions, which are let go of but for what the sums need."""
        parts, self.parts = self.parts, {}
        return self.sums.weigh(parts, clip, mask)

    def order(self) -> list[str]:
        """The parameters by their last report."""
        uses = [name for _, _, names in self._sections for theirs in names for name in theirs]
        return list(dict.fromkeys(reversed(uses)))[::-1]

    @property
    def nbytes(self) -> int:
        """Of the tensors in all reports that are held."""
        reports = [report for kept, _, _ in self._sections for report in kept if report is not None]
        return sum({t.data_ptr(): t.nbytes for report in reports for t in report.tensors}.values())

    def release(self, names: tuple[str, ...]) -> None:
        """The sums of these parameters are made: let go of the reports that nothing else needs."""
        self._done.update(names)
        if len(self._done) == len(self.sums.params):
            self._sections.clear()
        for place, (reports, own, theirs) in enumerate(self._sections):
            left = [i for i, each in enumerate(theirs) if not self._done.issuperset(each)]
            if len(left) < len(theirs):
                self._sections[place] = (
                    [reports[i] for i in left],
                    [own[i] for i in left],
                    [theirs[i] for i in left],
                )
