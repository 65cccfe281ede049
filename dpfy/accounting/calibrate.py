"""The least noise that reaches a target, found by bisection and always returned from the private
side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from dpfy.accounting import table
from dpfy.accounting.interpretation import AttackTarget
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

LEAST, MOST = 1e-3, 1e9
READINGS = 128
"""How many curves one calibration reads at most; about ten are usual. A Monte Carlo bound is
charged for as many.
"""
TOLERANCE = 4e-5
BELOW = 1e-3
"""A part of the target below which a coarse upper bound is enough: where next to nothing is spent,
a close one can take long.
"""
STEP = 0.2
"""The least log of a step towards the other side of the target; the first one, from a guess that is
near, may be less.
"""
FAR = 4.0
"""A log of epsilons beyond which the search for less noise leaps: epsilon grows hardly faster than
the third power of 1/noise.
"""


def noise(
    make_event: Callable[[float], Event],
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    accountant: str = table.DEFAULT,
) -> float:
    """The least noise multiplier, to a relative 4e-5, for which ``make_event(noise)`` is (epsilon,
    delta)-private.

    An accountant whose figures are coarser than that names a `tolerance` of its own.

    Guarantees: the epsilon that `accountant` computes at the value returned is at most `epsilon`.
    An unreachable target raises `InvalidInput` and names the least epsilon that was reached.
    """
    route, made = table.accountant(accountant), itertools.count(1)
    most = getattr(route, "most_readings", READINGS)

    def curve(multiplier: float) -> Curve:
        if next(made) > most:  # bounds by draws are charged for so many readings
            raise Unsupported(
                f"a calibration by more than {most} readings of a curve",
                "ask for another epsilon, or give the noise",
            )
        return route.curve(make_event(multiplier), adjacency)

    return noise_by(curve, epsilon, delta, tolerance=tolerance(accountant))


def noise_for_risk(
    make_event: Callable[[float], Event],
    target: AttackTarget,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    accountant: str = table.DEFAULT,
) -> float:
    """The least noise multiplier, to a relative 1e-4, at which no attack exceeds `target`.

    Guarantees: the bound on the attack at the value returned was computed from the accountant's
    upper bound on delta, and keeps the limit.
    """
    route = table.accountant(accountant)

    def reached(multiplier: float) -> float:
        return target.reached(route.curve(make_event(multiplier), adjacency))

    return least(reached, target.limit, start=1.0, tolerance=max(1e-4, tolerance(accountant)))


def tolerance(accountant: str) -> float:
    """How close to the least noise a search by `accountant` comes, relatively."""
    return float(getattr(table.accountant(accountant), "tolerance", TOLERANCE))


def noise_by(
    curve: Callable[[float], Curve],
    epsilon: float,
    delta: float,
    *,
    start: float = 1.0,
    tolerance: float = TOLERANCE,
) -> float:
    """`noise` for who has curves already; `start` is a guess, and a good one saves time."""
    target = check.epsilon("epsilon", epsilon)
    check.delta("delta", delta)

    def reached(multiplier: float) -> float:
        found = curve(multiplier)
        rough = getattr(found, "quick", None)
        if rough is not None and (bound := float(rough(delta))) < BELOW * target:
            return bound
        return found.epsilon(delta)

    return least(reached, target, start=start, tolerance=tolerance)


def least(
    reached: Callable[[float], float], target: float, *, start: float, tolerance: float = TOLERANCE
) -> float:
    """The least x, to a relative tolerance, with ``reached(x) <= target``, for a function that
    falls as x grows.

    Guarantees: the value returned was evaluated and is on the private side. Secant steps in
    logarithms, aimed just below the target and kept inside a bracket, take few evaluations; where
    they stall, bisection takes over.
    """
    (low, above), (high, below) = _bracket(reached, target, start)
    points = [(math.log(low), above), (math.log(high), below)]
    for attempt in range(200):
        if high / low <= 1 + tolerance or below >= -tolerance:
            break
        (x0, y0), (x1, y1) = points
        middle = math.sqrt(low * high)
        if math.isfinite(y0) and math.isfinite(y1) and y0 != y1 and attempt % 4 != 3:
            guess = x1 + (-tolerance / 2 - y1) * (x1 - x0) / (y1 - y0)
            if math.log(low) < guess < math.log(high):
                middle = math.exp(guess)
        value = _gap(reached(middle), target)
        points = [points[1], (math.log(middle), value)]
        if value <= 0:
            high, below = middle, value
        else:
            low, above = middle, value
    return high


def _gap(value: float, target: float) -> float:
    """log(value / target), minus infinity for a value of zero."""
    return math.log(value / target) if value > 0 else -math.inf


def _bracket(
    reached: Callable[[float], float], target: float, start: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Two points with the target between their values: (x, log value/target) above it and below
    it.
    """
    x, gap = start, _gap(reached(start), target)
    first_side, least_step = gap > 0, min(2 * abs(gap), STEP)
    while True:
        # Epsilon falls roughly as 1/noise, faster at the low end: a step a little beyond that guess
        # brackets soon.
        factor = math.exp(min(max(abs(gap), least_step), 2.5)) if math.isfinite(gap) else 4.0
        factor = (
            1.05 * factor
            if first_side
            else math.exp(-gap / 3)
            if FAR < -gap < math.inf
            else min(1.05 * factor, 1.6)
        )
        other = x * factor if first_side else max(x / factor, LEAST / 2)
        value = _gap(reached(other), target)
        if (value > 0) != first_side:
            return ((x, gap), (other, value)) if first_side else ((other, value), (x, gap))
        if other > MOST:
            raise InvalidInput(
                "epsilon",
                target,
                f"cannot be reached: noise {other:g} still gives epsilon "
                f"{target * math.exp(min(value, 700)):.4g}; "
                "ask for more epsilon or delta",
            )
        if other < LEAST and value == -math.inf:
            raise InvalidInput(
                "epsilon",
                target,
                f"is reached with noise {other:g} already: at this delta hardly any is needed",
            )
        if other < LEAST:
            raise Unsupported(
                f"a target as large as epsilon {target:g}",
                "almost no noise reaches it; ask for a smaller epsilon",
            )
        x, gap, least_step = other, value, STEP
