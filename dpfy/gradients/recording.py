"""What was recorded of a step: the work on its reports, section by section, on their multipliers and on their sums, as graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpfy.gradients import graphs
from dpfy.gradients.combine import Flag
from dpfy.gradients.contribution import Contribution, Direct, Outer, storages
from dpfy.gradients.room import SMALL, Room
from dpfy.gradients.tape import Report, Site

Key = tuple[object, ...]
Parts = dict[str, list[Contribution]]
Own = list[list[tuple[str, Contribution]] | None]
"""For each report its contributions, if they hold none of the tensors that were reported; else None."""


class Copies:
    """Some reports with their small tensors in places that stay: torch may give these another one at every step."""

    def __init__(self, reports: list[Report], shelf: graphs.Shelf) -> None:
        where = [(i, j) for i, r in enumerate(reports) for j, t in enumerate(r.tensors) if t.nbytes <= SMALL]
        places = dict(zip(where, shelf.like(*[reports[i].tensors[j] for i, j in where]), strict=True))
        self.reports: list[Report] = []
        for i, report in enumerate(reports):
            grad, *saved = [places.get((i, j), t) for j, t in enumerate(report.tensors)]
            self.reports.append(replace(report, grad=grad, saved=tuple(saved)))
        self._alike: dict[torch.dtype, tuple[list[tuple[int, int]], list[Tensor]]] = {}
        for at, place in places.items():
            alike = self._alike.setdefault(place.dtype, ([], []))
            alike[0].append(at)
            alike[1].append(place)

    def fill(self, reports: list[Report]) -> None:
        """Bring the small tensors of `reports` to their places."""
        for where, places in self._alike.values():
            torch._foreach_copy_(places, [reports[i].tensors[j] for i, j in where])


@dataclass
class Section:
    """The work on some reports. `own`: the contributions of a report where none of the reported tensors is needed any more.

    `idle`: nothing is computed.
    `copies`: what the work was recorded on, where that is not the reports themselves.
    """

    key: Key
    graph: graphs.Graph
    own: Own
    idle: bool
    copies: Copies | None

    def replay(self, reports: list[Report]) -> None:
        """Launch the work."""
        if self.copies is not None:
            self.copies.fill(reports)
        if not self.idle:
            self.graph.replay()


class Recording:
    """Graphs for all sections of a step, for the multipliers and for the sums. All tensors in it are overwritten at every use.

    `turn`: recordings that begin alike differ in it, and in the memory of their graphs: each is begun before it is known which one it is.
    """

    def __init__(self, sections: list[Section], end: Key, mask: Tensor | None, device: torch.device, turn: int) -> None:
        self.sections, self.end, self.mask, self.turn = sections, end, mask, turn
        self.sound, self._queue = Flag(device), graphs.queue(device)  # the key says that it is the current one
        self.scratch = int(end[0])  # type: ignore[call-overload]
        self.trusted, self.misses, self.used = False, 0, 0
        self._kept: dict[int, Tensor] = {}

    @property
    def keys(self) -> list[Key]:
        """Those of all sections, and the last."""
        return [*[section.key for section in self.sections], self.end]

    def writes_to(self, room: Room, rough: bool, shelf: graphs.Shelf) -> tuple[list[Tensor], Tensor]:
        """The memory for sums, and for what is needed on the way: that of `room`; if `rough`, places that stay for what is small."""
        assert room.scratch is not None
        if not rough:
            return list(room.memory), room.scratch
        self._kept = {i: shelf.like(t)[0] for i, t in enumerate(room.memory) if t.nbytes <= SMALL}
        scratch = shelf.like(room.scratch)[0] if room.scratch.nbytes <= SMALL else room.scratch
        return [self._kept.get(i, t) for i, t in enumerate(room.memory)], scratch

    def end_with(self, weigh: graphs.Graph, add: graphs.Graph) -> None:
        """The graphs for multipliers and sums; the first puts the flag :attr:`sound`."""
        self._weigh, self._add = weigh, add

    def weigh(self, mask: Tensor | None) -> None:
        """Multipliers for what the sections left."""
        if self.mask is not None and mask is not None:
            self.mask.copy_(mask)
        self._weigh.replay()
        self.sound.mark(self._queue)

    def add(self, room: Room) -> bool:
        """Sums with the multipliers of :meth:`weigh`, in `room`; False if some norm was not finite, and the sums are worthless."""
        self._add.replay()
        for i, kept in self._kept.items():
            room.memory[i].copy_(kept)
        return self.sound.value()


def roughly(keys: list[Key]) -> list[Key]:
    """Keys of sections without the places of small tensors, as :meth:`Report.lies` gives them."""
    return [
        tuple([_rough(item) if isinstance(item, tuple) and item and isinstance(item[0], Site) else item for item in key])
        for key in keys
    ]


def _rough(report: tuple[Any, ...]) -> Key:
    site, facts, *tensors = report
    places = [(shape.numel() * dtype.itemsize <= SMALL or at, shape, stride, dtype) for at, shape, stride, dtype in tensors]
    return (site, facts, *places)


def own_parts(report: Report, parts: Parts) -> list[tuple[str, Contribution]] | None:
    """The contributions of `report`, if they hold none of its tensors."""
    found = [(name, part) for name, uses in parts.items() for part in uses]
    return None if storages(*[part for _, part in found]) & storages(report.tensors) else found


def nothing_made(reports: list[Report], found: list[Parts]) -> bool:
    """Whether the contributions are but views of what was reported, so that repeating the work on them would do nothing."""
    parts = [part for parts in found for uses in parts.values() for part in uses]
    known = all(isinstance(part, Outer | Direct) for part in parts)
    return known and storages(*parts) <= storages(*[report.tensors for report in reports])
