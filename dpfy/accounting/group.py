"""Privacy of groups, of users who own several examples, and of releases on disjoint data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpfy.core import check
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency


def textbook(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """The textbook rule: a group of k is (k epsilon, k e^{k epsilon} delta)-private (Dwork & Roth 2014, Theorem 2.2, loosened)."""
    check.integer("size", size)
    return size * epsilon, min(1.0, size * math.exp(size * epsilon) * delta)


def from_curve(curve: Curve, epsilon: float, size: int) -> float:
    """The delta at `epsilon` of a group of `size`, from the curve of one member alone.

    Walking from one data set to the other through `size` neighbours multiplies by e^e and adds delta(e) at each step, with
    e = epsilon / size: delta = delta(e) (e^{k e} - 1) / (e^e - 1). Never above the textbook rule, which bounds the sum by its
    largest term times k.
    """
    each = check.nonnegative("epsilon", epsilon) / check.integer("size", size)
    factor = float(size) if each == 0 else math.expm1(min(size * each, 700.0)) / math.expm1(each)
    return min(1.0, curve.delta(each) * factor)


def of_group(event: Event, size: int) -> Event:
    """The event as a group of `size` members sees it: what a user pays who owns that many examples.

    Guarantees: exact for Gaussian releases (a group moves the sum `size` times as far; under Poisson sampling, by the number of
    its members that were drawn) under add-or-remove-one and zero-out of the whole group.
    """
    check.integer("size", size)
    if size == 1 or isinstance(event, (ev.Nothing, ev.NotPrivate)):
        return event
    if isinstance(event, ev.Gaussian):
        return ev.Gaussian(event.noise_multiplier / size)
    if isinstance(event, ev.Laplace):
        return ev.Laplace(event.noise_multiplier / size)
    if isinstance(event, ev.EpsilonDelta):
        total = size * event.epsilon
        factor = float(size) if event.epsilon == 0 else math.expm1(min(total, 700.0)) / math.expm1(event.epsilon)
        return ev.EpsilonDelta(total, min(1.0, event.delta * factor))
    if isinstance(event, ev.PoissonSampled) and isinstance(event.event, ev.Gaussian):
        chances = _binomial(size, event.rate)
        return ev.GaussianMixture(event.event.noise_multiplier, tuple(float(k) for k in range(size + 1)), chances)
    if isinstance(event, ev.Repeated):
        return ev.Repeated(of_group(event.event, size), event.count)
    if isinstance(event, ev.Composed):
        return ev.Composed(tuple(of_group(part, size) for part in event.events))
    raise Unsupported(f"group privacy of {type(event).__name__} by its event", "use group.from_curve on its curve")


def _binomial(size: int, rate: float) -> tuple[float, ...]:
    logs = [
        math.lgamma(size + 1)
        - math.lgamma(k + 1)
        - math.lgamma(size - k + 1)
        + k * math.log(rate)
        + (size - k) * math.log1p(-rate)
        if 0 < rate < 1
        else (0.0 if k == (size if rate else 0) else -math.inf)
        for k in range(size + 1)
    ]
    chances = [math.exp(v) for v in logs]
    return (max(0.0, 1 - sum(chances[1:])), *chances[1:])


class Parallel:
    """The curve of releases on disjoint parts of the data: a unit sits in one part, so the worst part decides."""

    def __init__(self, curves: Sequence[Curve], adjacency: Adjacency) -> None:
        if adjacency is Adjacency.REPLACE_ONE:
            raise Unsupported(
                "parallel composition under replace-one (a replaced unit may change part)",
                "compose the parts, or use add-or-remove-one",
            )
        self.curves = tuple(curves)

    def epsilon(self, delta: float) -> float:
        """The largest of the parts."""
        return max((curve.epsilon(delta) for curve in self.curves), default=0.0)

    def delta(self, epsilon: float) -> float:
        """The largest of the parts."""
        return max((curve.delta(epsilon) for curve in self.curves), default=0.0)

    def epsilon_lower(self, delta: float) -> float | None:
        """The largest of the parts' lower bounds, where all have one."""
        values = [curve.epsilon_lower(delta) for curve in self.curves]
        known = [value for value in values if value is not None]
        return max(known, default=0.0) if len(known) == len(values) else None
