"""Where a run may end early: points that are fixed with the plan. docs/early-stopping.md has the
proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpfy.core import check, events
from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise.strategy import Strategy
from dpfy.noise.toeplitz import Toeplitz
from dpfy.plan import pairs

MOST_POINTS = 20
"""Each costs its share of delta, and a report that is computed before the run."""
ROUNDED = 1 - 1e-12
"""Shares and ratios of noise are right up to this factor, and rounded down by it."""


@dataclass(frozen=True)
class Stopping:
    """A run may end after any of `points` steps, the last of which are all of its steps; `share` of
    delta is what each may use.

    Guarantees: the shares of all points add up to at most 1, so that the epsilon given where a run
    ends, at the plan's delta, is an ex-post guarantee whatever rule ended it, as long as the rule
    looks at what was released alone.
    """

    points: tuple[int, ...]
    share: float

    def __post_init__(self) -> None:
        if not isinstance(self.points, tuple) or not 1 <= len(self.points) <= MOST_POINTS:
            raise InvalidInput(
                "stopping",
                self.points,
                f"must be 1 to {MOST_POINTS} points, each a number of steps",
            )
        for point in self.points:
            check.integer("stopping", point, most=check.STEPS)
        if any(b <= a for a, b in zip(self.points, self.points[1:], strict=False)):
            raise InvalidInput("stopping", self.points, "must grow from point to point")
        if not 0 < check.fraction("stopping.share", self.share) * len(self.points) <= 1:
            raise InvalidInput(
                "stopping.share",
                self.share,
                f"must be at most one over the number of points ({len(self.points)})",
            )

    @property
    def early(self) -> tuple[int, ...]:
        """The points before the last."""
        return self.points[:-1]

    def next(self, steps: int) -> int:
        """The point at which a run that ended after `steps` is charged: never an earlier one."""
        return next(point for point in self.points if point >= steps)


def stopping(given: int | Sequence[float] | None, steps: int) -> Stopping | None:
    """Where a run of `steps` may end: at `given` equally spaced points, or at those given, as steps
    or as parts of the whole below 1.

    The end of the run is a point in any case; where it is the only one, there is nothing to choose.
    """
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | list | tuple):
        raise InvalidInput(
            "stopping",
            given,
            "must be a number of points, or a list of steps or of parts of the run below 1",
        )
    if isinstance(given, int):
        count = check.integer("stopping", given, most=min(steps, MOST_POINTS))
        points = {-(-steps * k // count) for k in range(1, count + 1)}
    else:
        points = {_point(value, steps) for value in given} | {steps}
    return None if points == {steps} else Stopping(tuple(sorted(points)), ROUNDED / len(points))


def _point(value: float, steps: int) -> int:
    real = check.positive("stopping", value)
    point = math.ceil(real * steps * ROUNDED) if real < 1 else real
    if point != int(point) or point > steps:
        raise InvalidInput(
            "stopping",
            value,
            f"must be a whole number of steps of at most {steps}, or a part of them below 1",
        )
    return int(point)


def first_steps(
    noise_multiplier: float,
    pattern: patterns.Participation,
    noise: Strategy,
    made: int,
    steps: int,
) -> events.Event:
    """What the first `made` steps of a run of `steps` release, if it was fixed in advance that
    there are no more.

    Guarantees: what is charged for fewer steps is proven for them as it is for all: fresh samples,
    rounds of cyclic samples and epochs of random allocation by their number, a stream with Toeplitz
    noise by the sensitivity of its beginning, which is the beginning of the matrix. Others raise.
    """
    if noise_multiplier == 0:
        return events.NotPrivate()
    if isinstance(
        pattern,
        patterns.Poisson
        | patterns.WithoutReplacement
        | patterns.CyclicPoisson
        | patterns.RandomAllocation,
    ):
        return pairs.event(noise_multiplier, pattern, noise, made)
    if not isinstance(noise, Toeplitz) or isinstance(pattern, patterns.SecretBins):
        what = (
            f"ending early with {type(noise).__name__} noise and {type(pattern).__name__} "
            f"participation"
        )
        raise Unsupported(
            what,
            "use banded or BLT noise in a fixed order, cyclic or fresh Poisson samples, or fix the "
            "steps in advance",
        )
    pairs.event(noise_multiplier, pattern, noise, made)
    ratio = noise.sensitivity(pattern, steps) / noise.sensitivity(pattern, made)
    return events.Gaussian(noise_multiplier * max(1.0, ratio * ROUNDED))
