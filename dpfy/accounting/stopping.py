"""Runs that end when their own outputs say so: the ex-post guarantee of docs/early-stopping.md.

A run may end at one of K points that were fixed before it. What is given at the point where it
ended, epsilon_k, is the epsilon of a plan of that length at `share` times delta. Then for any rule
that looks at what was released, and for every set S of outcomes,

    P(S) <= sum over k of e^(epsilon_k) Q(S, ended at k) + delta,

because what ends at k is decided by the first k outputs and so is an outcome of a plan of that
length (share 1/K: the K deltas add up). The same holds for several such releases, and for others
made before and after: their shares multiply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core.events import Composed, Event, Repeated, Stopped
from dpfy.core.guarantee import Accountant, Curve
from dpfy.core.unit import Adjacency

EX_POST = (
    "This holds after the fact (ex post), for a run that chose its end by its own outputs: it is "
    "not (epsilon, delta)-differential privacy "
    "at this epsilon, only at that of the whole plan."
)
"""What must stand beside every epsilon of a run that may end early."""
LEAST = 1e-300
"""A share of delta below which nothing is certified."""


def unwrapped(event: Event) -> tuple[Event, float]:
    """`event` as if its ends had been fixed in advance, and the share of delta at which that may be
    given.

    A run that ends early inside of another release (a sample, the best of several) stays as it is,
    and accountants refuse it.
    """
    if isinstance(event, Stopped):
        inner, share = unwrapped(event.event)
        return inner, share * event.share
    if isinstance(event, Repeated):
        inner, share = unwrapped(event.event)
        return (
            (event, 1.0)
            if share == 1 and inner is event.event
            else (Repeated(inner, event.count), share**event.count)
        )
    if isinstance(event, Composed):
        parts = [unwrapped(part) for part in event.events]
        if all(inner is part for (inner, _), part in zip(parts, event.events, strict=True)):
            return event, 1.0
        return Composed(tuple(inner for inner, _ in parts)), math.prod(share for _, share in parts)
    return event, 1.0


@dataclass(frozen=True)
class ExPost:
    """The curve of the run as it ended, read at a share of delta.

    Guarantees: with `share` at most one over the number of points at which the run could have
    ended, `epsilon` at each of them, at the same delta, is an ex-post guarantee of the run,
    whatever rule ended it.
    """

    curve: Curve
    share: float
    note: ClassVar[str] = EX_POST

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`."""
        return (
            math.inf
            if 0 < delta * self.share < LEAST or self.share < LEAST
            else self.curve.epsilon(delta * self.share)
        )

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        return 1.0 if self.share < LEAST else min(1.0, self.curve.delta(epsilon) / self.share)

    def epsilon_lower(self, delta: float) -> float | None:
        """Lower bound: one rule is to end there in any case."""
        return self.curve.epsilon_lower(delta)


class Adaptive:
    """An accountant that also knows runs which end early: it reads their curves at their share of
    delta.
    """

    def __init__(self, plain: Accountant) -> None:
        self._plain, self.name = plain, plain.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """As the accountant does for the run as it ended."""
        return self._plain.why_not(unwrapped(event)[0], Adjacency.parse(adjacency))

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """That of the run as it ended, at its share of delta. An adjacency may be given by its
        name.
        """
        inner, share = unwrapped(event)
        found = self._plain.curve(inner, Adjacency.parse(adjacency))
        return found if share == 1 else ExPost(found, share)
