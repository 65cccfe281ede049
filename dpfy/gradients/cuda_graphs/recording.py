"""What was recorded of a step: the work on its reports, section by section, on their multipliers and on their sums, as graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpfy.gradients.contributions.clipped_sum import Flag
from dpfy.gradients.contributions.contribution import Contribution, Direct, storages
from dpfy.gradients.contributions.outer import Outer
from dpfy.gradients.contributions.sliced import pieces_of
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.tracing.tape import Report

Key = tuple[object, ...]
Parts = dict[str, list[Contribution]]
Own = list[list[tuple[str, Contribution]] | None]
"""For each report its contributions, if they hold none of the tensors that were reported; else None."""


@dataclass
class Section:
    """The work on some reports. `own`: the contributions of a report where none of the reported tensors is needed any more.

    `idle`: nothing is computed. The graph is held all the same: the memory of all graphs goes with the first of them.
    """

    key: Key
    graph: graphs.CudaGraph
    own: Own
    idle: bool

    def replay(self) -> None:
        """Launch the work."""
        if not self.idle:
            self.graph.replay()


class Recording:
    """Graphs for all sections of a step, for the multipliers and for the sums. All tensors in it are overwritten at every use."""

    def __init__(self, sections: list[Section], end: Key, mask: Tensor | None, device: torch.device) -> None:
        self.sections, self.end, self.mask = sections, end, mask
        self.sound, self._queue = Flag(device), graphs.queue(device)  # the key says that it is the current one
        self.scratch = int(end[0])  # type: ignore[call-overload]
        self.trusted, self.misses = False, 0

    def end_with(self, weigh: graphs.CudaGraph, add: graphs.CudaGraph) -> None:
        """The graphs for multipliers and sums; the first puts the flag :attr:`sound`."""
        self._weigh, self._add = weigh, add

    def weigh(self, mask: Tensor | None) -> None:
        """Multipliers for what the sections left."""
        if self.mask is not None and mask is not None:
            self.mask.copy_(mask)
        self._weigh.replay()
        self.sound.mark(self._queue)

    def add(self) -> bool:
        """Sums with the multipliers of :meth:`weigh`; False if some norm was not finite, and the sums are worthless."""
        self._add.replay()
        return self.sound.value()


def own_parts(report: Report, parts: Parts) -> list[tuple[str, Contribution]] | None:
    """The contributions of `report`, if they hold none of its tensors."""
    found = [(name, part) for name, uses in parts.items() for part in uses]
    return None if storages(*[part for _, part in found]) & storages(report.tensors) else found


def nothing_made(reports: list[Report], found: list[Parts]) -> bool:
    """Whether the contributions are but views of what was reported, so that repeating the work on them would do nothing."""
    parts = [part for parts in found for uses in parts.values() for part in uses]
    known = all(isinstance(piece, Outer | Direct) for part in parts for piece in pieces_of(part))
    return known and storages(*parts) <= storages(*[report.tensors for report in reports])
