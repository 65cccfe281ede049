"""The tight accountant: upper and lower bounds on epsilon that agree to four digits, from one
event.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.accounting.flatten import delta_within, leaves
from dpfy.accounting.gaussian import GaussianCurve
from dpfy.accounting.moments import Array
from dpfy.accounting.tight.convolution import (
    DOWN,
    TOLERANCE,
    UP,
    LossSum,
    Reading,
    Saddle,
    compose_sum,
    final_spacing,
    log_peak,
    minimise,
    saddle,
    sharpest,
    steepest,
)
from dpfy.accounting.tight.dominating_pairs import Composition, every_world, worst
from dpfy.accounting.tight.losses import verified
from dpfy.core import check
from dpfy.core.errors import Internal, Unsupported
from dpfy.core.events import Event, OneOf
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

COARSE = 5e-3
"""Relative accuracy of the first pass, which finds where to look closely."""
CUT = 1e-4
"""The part of delta that pays for capping outliers."""
UNTILTED, CERTAIN = 1e-9, 40.0
"""A tilt that changes nothing, and how many standard deviations above epsilon the mean loss may lie
before delta counts as 1.
"""
NEGLIGIBLE = -80.0
"""Below this log of delta the Chernoff bound itself is reported."""


class Infinite:
    """The curve of a release without protection."""

    def epsilon(self, delta: float) -> float:
        """Infinity."""
        return math.inf

    def delta(self, epsilon: float) -> float:
        """One."""
        return 1.0

    def epsilon_lower(self, delta: float) -> float | None:
        """Infinity."""
        return math.inf


class TightCurve:
    """Bounds on the privacy curve of a composition, computed where they are asked for."""

    def __init__(self, parts: Composition) -> None:
        self._parts, self._touched = parts, parts.touched
        self._directions = _directions(parts)
        self._found: dict[tuple[LossSum, float], tuple[LossSum, Saddle]] = {}
        self._tilts: dict[tuple[LossSum, float], tuple[LossSum, float, float]] = {}
        self._upper: dict[float, float] = {}
        self._chernoff: dict[tuple[LossSum, float], tuple[float, float]] = {}

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`; where delta is below what can be certified, an error
        that says so.
        """
        delta_within(check.inside_unit("delta", delta))
        if delta >= self._touched:
            return 0.0
        if delta not in self._upper:
            self._upper[delta] = self._worst(delta)
        return self._upper[delta]

    def quick(self, delta: float) -> float:
        """A coarse upper bound on epsilon at `delta` that is computed at once, by Chernoff's
        inequality.
        """
        delta_within(check.inside_unit("delta", delta))
        return (
            0.0
            if delta >= self._touched
            else max(self._quick(total, delta) for total in self._directions)
        )

    def quick_log_delta(self, epsilon: float) -> float:
        """A coarse upper bound on the log of delta at `epsilon`, as `quick` is on epsilon."""
        found = 0.0
        for total in self._directions:
            finite = total.infinity < 1 and epsilon < total.top
            found = max(
                found,
                total.infinity
                + (math.exp(min(0.0, self._sharpest(total, epsilon)[1])) if finite else 0.0),
            )
        return math.log(min(found, 1.0)) if found > 0 else -math.inf

    def _sharpest(self, total: LossSum, epsilon: float) -> tuple[float, float]:
        """`chernoff` of one direction, kept: a coarse bound and a close one begin with it."""
        if (total, epsilon) not in self._chernoff:
            self._chernoff[total, epsilon] = chernoff(total, epsilon)
        return self._chernoff[total, epsilon]

    def _worst(self, delta: float) -> float:
        """The upper bound of the direction that decides."""
        quick = [self._quick(total, delta) for total in self._directions]
        worst, answers = 0.0, [0.0]
        for total, value in sorted(
            zip(self._directions, quick, strict=True), key=lambda pair: -pair[1]
        ):
            # A direction whose upper bound is below what the worst one surely reaches cannot
            # decide.
            if value >= 0.9 * worst:
                value = self._rough(total, delta)
                worst = max(worst, value)
            answers.append(value if value < 0.9 * worst else self._bound(total, delta, UP_SIDE))
        return max(answers)

    def epsilon_lower(self, delta: float) -> float | None:
        """Lower bound on the exact epsilon at `delta`.

        Guarantees: at most `epsilon` of the same delta; a bound on the wrong side of it raises
        `Internal`.
        """
        delta_within(check.inside_unit("delta", delta))
        if delta >= self._touched:
            return 0.0
        attained = (
            _directions(_attained(self._parts))
            if any(r.attained for r, _ in self._parts.releases)
            else self._directions
        )
        best = max(attained, key=lambda total: self._quick(total, delta))
        self._rough(best, delta)
        lower, upper = max(0.0, self._bound(best, delta, DOWN_SIDE)), self.epsilon(delta)
        if lower > upper:
            raise Internal(
                "an upper bound on epsilon lies above the lower bound",
                f"{upper:.9g} is below {lower:.9g}",
            )
        return lower

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        check.nonnegative("epsilon", epsilon)
        return min(
            1.0, self._touched, max(self._delta(total, epsilon) for total in self._directions)
        )

    def deltas(self, epsilons: Array, least: float = 0.0) -> Array:
        """Upper bounds on delta at many epsilons, read off a few lattices: close where delta is
        between the first and the last of `ANCHORS`, and not far below `least`.
        """
        found = np.zeros(len(epsilons))
        for whole in self._directions:
            best = np.ones(len(epsilons))
            for anchor in ANCHORS:
                if anchor < least or anchor <= whole.infinity or anchor >= self._touched:
                    continue
                self._rough(whole, anchor)
                total, at = self._found[whole, anchor]
                try:
                    lattice = compose_sum(total, at, final_spacing(total, at, TOLERANCE), UP)
                except Unsupported:
                    continue
                reading = Reading(lattice, total.infinity + total.cut, 1)
                best = np.minimum(best, [reading.delta(float(e)) for e in epsilons])
            found = np.maximum(found, best)
        return np.asarray(np.minimum(found, self._touched))

    def _quick(self, whole: LossSum, delta: float) -> float:
        """The Chernoff bound in one direction, or the largest loss; remembers the tilt at which it
        is sharpest.
        """
        if delta <= whole.infinity:
            return math.inf
        if (whole, delta) not in self._tilts:
            room = delta - whole.infinity
            total = whole.capped(CUT * room)
            room -= total.cut - whole.cut  # what an attained pair lacks from the start is no charge
            self._tilts[whole, delta] = total, room, sharpest(total, room)
        total, room, high = self._tilts[whole, delta]
        return max(0.0, min(saddle(total, room, high).epsilon, total.top))

    def _rough(self, whole: LossSum, delta: float) -> float:
        """A coarse upper bound in one direction; remembers where to look closely."""
        if (whole, delta) in self._found:
            return self._found[whole, delta][1].epsilon
        if delta <= whole.infinity:
            return math.inf
        # The Chernoff bound, which gives the first tilt, holds whatever becomes of the numeric one.
        value = self._quick(whole, delta)
        total, room, high = self._tilts[whole, delta]
        found = saddle(total, room, high)
        for _ in range(8):
            spacing = final_spacing(total, found, COARSE)
            try:
                reading = Reading(
                    compose_sum(total, found, spacing, UP, rough=True),
                    total.infinity + total.cut,
                    1,
                )
            except Unsupported:
                break
            value = min(value, reading.epsilon(delta))
            slope = max(math.exp(high), reading.slope(value, 2 * spacing))
            found = replace(saddle(total, room, high, value), slope=slope)
            if final_spacing(total, found, COARSE) > 0.6 * spacing:
                break
        self._found[whole, delta] = total, found
        return value

    def _bound(self, whole: LossSum, delta: float, side: tuple[Any, int]) -> float:
        if delta <= whole.infinity:
            return math.inf
        (total, found), (rounding, sign) = self._found[whole, delta], side
        try:
            lattice = compose_sum(total, found, final_spacing(total, found, TOLERANCE), rounding)
        except Unsupported:  # no lattice serves: what is known without one stands
            return found.epsilon if sign > 0 else -math.inf
        if sign > 0:
            return min(
                Reading(lattice, total.infinity + total.cut, 1).epsilon(delta),
                found.epsilon,
                total.top,
            )
        return Reading(lattice, total.infinity, -1).epsilon(delta)

    def _delta(self, whole: LossSum, epsilon: float) -> float:
        if whole.infinity >= 1:
            return 1.0
        if epsilon >= whole.top:
            return whole.infinity * (1 + 1e-9)
        usual = whole.log_mgf(UNTILTED)
        if usual.mean - epsilon > CERTAIN * math.sqrt(max(usual.variance, 0.0)):
            # nearly every loss is larger: delta is 1 to three digits, and no lattice needs to say
            # so
            return 1.0
        best, log_bound = self._sharpest(whole, epsilon)
        answer = min(1.0, whole.infinity + math.exp(min(0.0, log_bound)) * (1 + 1e-6))
        if log_bound < NEGLIGIBLE:
            return answer
        for _ in range(4):
            room = answer - whole.infinity
            total = whole.capped(max(0.01 * CUT * room, 1e-250)) if room > 0 else whole
            best, log_bound = chernoff(total, epsilon)
            found = saddle(total, math.exp(min(max(log_bound, -700.0), -1e-9)), best, epsilon)
            spacing = final_spacing(total, found, TOLERANCE)
            try:
                reading = Reading(
                    compose_sum(total, found, spacing, UP), total.infinity + total.cut, 1
                )
            except Unsupported:
                break
            before, answer = answer, min(answer, reading.delta(epsilon))
            if answer > 0.1 * before or answer <= whole.infinity:
                break
        return answer


ANCHORS = (1e-2, 1e-5, 1e-9, 1e-13)
"""Deltas around which lattices for many epsilons are made."""
UP_SIDE, DOWN_SIDE = (UP, 1), (DOWN, -1)


def chernoff(total: LossSum, epsilon: float) -> tuple[float, float]:
    """The log of the tilt at which the Chernoff bound on delta at `epsilon` is smallest, and the
    log of the bound.
    """

    def bound(log_s: float) -> float:
        s = math.exp(log_s)
        return total.upper(s) + log_peak(s) - s * epsilon

    best = minimise(bound, math.log(1e-2), math.log(1e2), steepest(total))
    return best, bound(best)


def _directions(parts: Composition) -> list[LossSum]:
    """The composition as seen by a removed and by an added unit; one of them where both are the
    same.
    """
    from dpfy.accounting.tight.gaussian_losses import GaussianPair

    plain = (
        [(GaussianPair(1 / math.sqrt(parts.gaussian), ((1.0, 1.0),), ((1.0, 0.0),)), 1)]
        if parts.gaussian
        else []
    )
    removed = LossSum((*((verified(r.removed), n) for r, n in parts.releases), *plain))
    added = LossSum((*((verified(r.added), n) for r, n in parts.releases), *plain))
    return [removed] if removed == added else [removed, added]


def _attained(parts: Composition) -> Composition:
    """The losses of data sets that exist. Steps may look at different properties of the same
    records, so all can occur together.
    """
    lower = [
        (replace(r, removed=r.attained[0], added=r.attained[1]) if r.attained else r, n)
        for r, n in parts.releases
    ]
    return replace(parts, releases=tuple(lower))


def curve_of(parts: Composition) -> Curve:
    """The curve of a composition of pairs."""
    if parts.public:
        return Infinite()
    return TightCurve(parts) if parts.releases else GaussianCurve(math.sqrt(parts.gaussian))


def only_leaf(event: Event) -> Event | None:
    """The one release that an event is, made once; None where it is more or nothing."""
    found = leaves(event)
    return found[0][0] if len(found) == 1 and found[0][1] == 1 else None


class Tight:
    """The default accountant. Stateless; supports every event that some language of accounting
    knows, and every mixture of them.
    """

    name = "tight"

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """None if `curve` would answer, else why not and which route would."""
        try:
            self.curve(event, adjacency)
        except Unsupported as error:
            return str(error)
        return None

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The curve of `event`: of a unit that lies, or moves, where it costs most.

        Guarantees: `epsilon` and `delta` are upper bounds on the exact curve of the dominating
        pairs of the event, `epsilon_lower` a lower bound (None where no release has an exact pair);
        discretisation, truncation and rounding are charged to the private side.
        """
        from dpfy.accounting.tight.mixtures import curve

        if isinstance(
            choice := only_leaf(event), OneOf
        ):  # alone: delta is the mean over the choices, which are seen
            return worst([self.curve(part, adjacency) for part in choice.events])
        return worst([curve(world) for world in every_world(event, adjacency)])
