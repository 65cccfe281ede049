"""Propose, test, release: a value that hardly moves near the data at hand, though it may move far
elsewhere (Dwork & Lei 2009).

The test passes if the distance to data that move more than proposed, with two-sided geometric
noise, reaches a threshold t with P(noise >= t) <= delta. Where the distance is 0 the test passes
with probability at most delta. Where it is 1 or more the value moves by at most what was proposed,
test and value cost their parts of epsilon. So all of it is (epsilon, delta)-private, in both
directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.grid import Grid
from dpfy.mechanisms.mechanism import Stated
from dpfy.mechanisms.tails import laplace_threshold


@dataclass(frozen=True)
class Near:
    """A value, and how many units must change (in the sense of the adjacency) before one more can
    move it by more than proposed.
    """

    value: Any
    distance: int


@dataclass(frozen=True)
class ProposeTestRelease(Stated):
    """One number that neighbours near the data differ in by at most `proposed`; with 0, a value of
    any kind that they agree in.

    `share` of epsilon pays for the test, the rest for the noise on the number; with `proposed` 0
    all of it pays for the test.
    """

    delta: float
    proposed: float
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.delta("delta", self.delta)
        check.nonnegative("proposed", self.proposed)
        check.inside_unit("share", self.share)

    @property
    def event(self) -> events.Event:
        """Test and release."""
        return events.EpsilonDelta(self.epsilon, self.delta)

    @property
    def split(self) -> tuple[Fraction, Fraction]:
        """Epsilon of the test and of the noise: together epsilon."""
        total = Fraction(self.epsilon)
        test = total * Fraction(self.share) if self.proposed else total
        return test, total - test

    @property
    def threshold(self) -> int:
        """The noisy distance from which on the value is released."""
        return laplace_threshold(self.split[0], Fraction(self.delta))

    def release(
        self,
        found: Bounded[Near],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[Any]:
        """The value (with noise, where something was proposed), or None: the data are not far
        enough from data that move it.

        Guarantees: as the module says, if the distance is right: 0 where the value of a neighbour
        may differ by more than proposed, and changing by at most 1 between neighbours, which its
        bound (`linf`) must say.
        """
        if found.bound.finite("linf", "a test of distance") > 1:
            raise InvalidInput(
                "bound.linf",
                found.bound.linf,
                "must be 1: a unit changes the distance by at most 1",
            )
        distance = max(0, check.integer("distance", found.value.distance, least=-(1 << 62)))
        bits = self._source(permit, randomness, step)
        test, rest = self.split
        passed = distance + int(integers.laplace(1, 1 / test, bits)[0]) >= self.threshold
        if not self.proposed:
            return Private(found.value.value if passed else None)
        grid = Grid.of(self.proposed)
        noise = int(
            integers.laplace(1, (math.floor(grid.steps(self.proposed)) + 1) / rest, bits)[0]
        )
        count = int(
            grid.lay(Bounded(float(found.value.value), Bound.scalar(self.proposed))).value.counts
        )
        return Private(math.ldexp(count + noise, grid.exponent) if passed else None)
