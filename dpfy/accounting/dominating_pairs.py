"""From events to losses: what an event releases, as dominating pairs in both directions, under each
adjacency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpfy.accounting.leaves import plain_leaves
from dpfy.accounting.parallel import World
from dpfy.accounting.rows import Release, moves, releases, row_of
from dpfy.core import events as ev
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency

__all__ = ["Composition", "Release", "composition", "moves", "together"]


@dataclass(frozen=True)
class Composition:
    """Everything an event releases: `gaussian` is the sum of squared ratios of sensitivity to noise
    of its plain Gaussians.
    """

    gaussian: float
    releases: tuple[tuple[Release, int], ...]
    public: bool = False

    @property
    def swapped(self) -> Composition:
        """The same with removal and addition exchanged."""
        return replace(
            self, releases=tuple((release.swapped, count) for release, count in self.releases)
        )

    @property
    def touched(self) -> float:
        """A bound on the chance that anything depends on the unit: no larger delta can be reached,
        at any epsilon.
        """
        if self.gaussian or any(release.touched >= 1 for release, _ in self.releases):
            return 1.0
        return -math.expm1(
            sum(count * math.log1p(-release.touched) for release, count in self.releases)
        ) * (1 + 1e-12)


def composition(event: Event, adjacency: Adjacency) -> Composition:
    """The losses of `event`. An event or adjacency without a proven pair raises `Unsupported` and
    names the way out.
    """
    squared, public = 0.0, False
    found: list[tuple[Release, int]] = []
    for one, count in plain_leaves(event):
        noise = row_of(one).gaussian(one)
        if isinstance(one, ev.NotPrivate):
            public = True
        elif noise is not None:
            squared += count * (moves(adjacency) / noise) ** 2
        elif not isinstance(one, ev.Nothing):
            found.extend(releases(one, count, adjacency))
    return Composition(squared, tuple(found), public)


def together(world: World) -> Composition:
    """The losses of all that a unit touches in one world."""
    parts = [composition(piece.event, piece.adjacency) for piece in world]
    parts = [
        part.swapped if piece.swapped else part for part, piece in zip(parts, world, strict=True)
    ]
    found = tuple(row for part in parts for row in part.releases)
    return Composition(
        math.fsum(part.gaussian for part in parts), found, any(part.public for part in parts)
    )
