"""Releases on disjoint parts of the data: every way in which one unit can touch them.

A unit lies in one part. Adding, removing or zeroing it touches that part alone, so the worst part
decides. A unit that is replaced may also move: it is then removed from one part and added to
another.

From events to losses: what an event releases, as dominating pairs in both directions, under each
adjacency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from dpfy.accounting.flatten import leaves, plain_leaves
from dpfy.accounting.rules import DominatingPair, group_size_of, releases, require_removal, rule_of
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Composed, Event, Parallel, Repeated
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

MOST_WORLDS = 256
"""Ways in which a unit can touch the parts: each is a curve of its own."""


class TooManyWorlds(Unsupported):
    """Disjoint parts can be met in more ways than there is time for."""


@dataclass(frozen=True)
class TouchedReleases:
    """Releases that one unit touches; `swapped` where it is added when it is removed elsewhere."""

    event: Event
    adjacency: Adjacency
    swapped: bool = False


World = tuple[TouchedReleases, ...]


def worlds(event: Event, adjacency: Adjacency) -> list[World]:
    """Every way in which a unit can touch `event`, each as the pieces it touches together; one way
    where nothing is in parts.

    Guarantees: whatever unit changes, and however, its loss is that of one of the worlds.
    """
    rest: list[Event] = []
    choices: list[list[World]] = []
    for leaf, count in leaves(event):
        one = _plain(leaf)
        if isinstance(one, Parallel):
            choices.append(_choices(one, count, adjacency))
        else:
            rest.append(Repeated(one, count))
    if not choices:
        return [(TouchedReleases(event, adjacency),)]
    number = 1
    for found in choices:
        number *= len(found)
    if number > MOST_WORLDS:
        raise TooManyWorlds(
            f"{number} ways to lie in disjoint parts of the data",
            "use --accountant rdp, or name fewer parts",
        )
    whole = (TouchedReleases(Composed(tuple(rest)), adjacency),) if rest else ()
    return [whole + sum(picked, ()) for picked in product(*choices)]


def every_world(event: Event, adjacency: Adjacency) -> list[World]:
    """`worlds`; where there are too many of them the event as it is, whose parts are then compared
    by their Rényi divergences.
    """
    try:
        return worlds(event, adjacency)
    except TooManyWorlds:
        return [(TouchedReleases(event, adjacency),)]


def _plain(leaf: Event) -> Event:
    """A leaf without its trivial cases, or as it is where it has no simple form."""
    try:
        return rule_of(leaf).plain(leaf)
    except Unsupported:
        return leaf


def _choices(event: Parallel, count: int, adjacency: Adjacency) -> list[World]:
    """The parts that a unit can lie in, and those that it can move between; equal ones once."""
    parts = [Repeated(part, count) for _, part in event.parts]
    found = [world for part in dict.fromkeys(parts) for world in worlds(part, adjacency)]
    if adjacency is Adjacency.REPLACE_ONE:
        for left, right in dict.fromkeys(combinations(parts, 2)):
            found += [_moved(a, b) for a in _alone(left) for b in _alone(right)]
    return found


def _alone(event: Event) -> list[World]:
    """The event as a unit sees it that is added to it, or removed from it."""
    return worlds(require_removal(event), Adjacency.ADD_OR_REMOVE_ONE)


def _moved(left: World, right: World) -> World:
    return left + tuple(
        TouchedReleases(piece.event, piece.adjacency, not piece.swapped) for piece in right
    )


def worst(curves: Sequence[Curve]) -> Curve:
    """The curve of the worst world."""
    return curves[0] if len(curves) == 1 else Worst(tuple(curves))


@dataclass(frozen=True)
class Worst:
    """The largest of several curves, at every point."""

    curves: tuple[Curve, ...]

    def epsilon(self, delta: float) -> float:
        """The largest epsilon."""
        return max(curve.epsilon(delta) for curve in self.curves)

    def delta(self, epsilon: float) -> float:
        """The largest delta."""
        return max(curve.delta(epsilon) for curve in self.curves)

    def epsilon_lower(self, delta: float) -> float | None:
        """The largest of the lower bounds: each world can be met."""
        return max(
            (lower for curve in self.curves if (lower := curve.epsilon_lower(delta)) is not None),
            default=None,
        )


__all__ = ["Composition", "DominatingPair", "composition", "group_size_of", "together"]


@dataclass(frozen=True)
class Composition:
    """Everything an event releases: `gaussian` is the sum of squared ratios of sensitivity to noise
    of its plain Gaussians.
    """

    gaussian: float
    releases: tuple[tuple[DominatingPair, int], ...]
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
    found: list[tuple[DominatingPair, int]] = []
    for one, count in plain_leaves(event):
        noise = rule_of(one).gaussian(one)
        if isinstance(one, ev.NotPrivate):
            public = True
        elif noise is not None:
            squared += count * (group_size_of(adjacency) / noise) ** 2
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
