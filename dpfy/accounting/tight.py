"""The tight accountant: upper and lower bounds on epsilon that agree to four digits, from one event."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dpfy.accounting.gaussian import GaussianCurve
from dpfy.accounting.pairs import Composition, composition
from dpfy.accounting.pld import (
    DOWN,
    TOLERANCE,
    UP,
    Reading,
    Saddle,
    Sum,
    compose_sum,
    final_spacing,
    log_peak,
    minimise,
    saddle,
    sharpest,
)
from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

COARSE = 5e-3
"""Relative accuracy of the first pass, which finds where to look closely."""
CUT = 1e-4
"""The part of delta that pays for capping outliers."""
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
        self._directions = _directions(parts)
        self._exact = all(release.exact for release, _ in parts.releases)
        self._found: dict[tuple[int, float], tuple[Sum, Saddle]] = {}

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`; where delta is below what can be certified, an error that says so."""
        check.inside_unit("delta", delta)
        rough = [self._rough(k, delta) for k in range(len(self._directions))]
        worst = max(rough)
        answers = [0.0]
        for k, value in enumerate(rough):
            # A direction whose coarse upper bound is below what the worst one surely reaches cannot decide.
            answers.append(value if value < 0.9 * worst else self._bound(k, delta, UP_SIDE))
        return max(answers)

    def epsilon_lower(self, delta: float) -> float | None:
        """Lower bound on the exact epsilon at `delta`; None for pairs that are only known to dominate."""
        if not self._exact:
            return None
        rough = [self._rough(k, delta) for k in range(len(self._directions))]
        best = max(range(len(rough)), key=lambda k: rough[k])
        return max(0.0, self._bound(best, delta, DOWN_SIDE))

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        check.nonnegative("epsilon", epsilon)
        return min(1.0, max(self._delta(total, epsilon) for total in self._directions))

    def _rough(self, k: int, delta: float) -> float:
        """A coarse upper bound in direction k; remembers where to look closely."""
        if (k, delta) in self._found:
            return self._found[k, delta][1].epsilon
        whole = self._directions[k]
        if delta <= whole.infinity:
            return math.inf
        room = delta - whole.infinity
        total = whole.capped(CUT * room)
        room -= total.cut
        high = sharpest(total, room)
        found = saddle(total, room, high)
        # The Chernoff bound, which gave the first tilt, holds whatever becomes of the numeric one.
        value = found.epsilon + 1e-9
        for _ in range(8):
            spacing = final_spacing(total, found, COARSE)
            reading = Reading(compose_sum(total, found, spacing, UP, rough=True), total.infinity + total.cut, 1)
            value = min(value, reading.epsilon(delta))
            slope = max(math.exp(high), reading.slope(value, 2 * spacing))
            found = replace(saddle(total, room, high, value), slope=slope)
            if final_spacing(total, found, COARSE) > 0.6 * spacing:
                break
        self._found[k, delta] = total, found
        return value

    def _bound(self, k: int, delta: float, side: tuple[Any, int]) -> float:
        if delta <= self._directions[k].infinity:
            return math.inf
        (total, found), (rounding, sign) = self._found[k, delta], side
        lattice = compose_sum(total, found, final_spacing(total, found, TOLERANCE), rounding)
        if sign > 0:
            return min(Reading(lattice, total.infinity + total.cut, 1).epsilon(delta), found.epsilon, total.top)
        return Reading(lattice, total.infinity, -1).epsilon(delta)

    def _delta(self, whole: Sum, epsilon: float) -> float:
        if whole.infinity >= 1:
            return 1.0
        if epsilon >= whole.top:
            return whole.infinity * (1 + 1e-9)
        best, log_bound = chernoff(whole, epsilon)
        answer = min(1.0, whole.infinity + math.exp(min(0.0, log_bound)) * (1 + 1e-6))
        if log_bound < NEGLIGIBLE:
            return answer
        for _ in range(4):
            room = answer - whole.infinity
            total = whole.capped(0.01 * CUT * room) if room > 0 else whole
            best, log_bound = chernoff(total, epsilon)
            found = saddle(total, math.exp(min(log_bound, -1e-9)), best, epsilon)
            spacing = final_spacing(total, found, TOLERANCE)
            reading = Reading(compose_sum(total, found, spacing, UP), total.infinity + total.cut, 1)
            before, answer = answer, min(answer, reading.delta(epsilon))
            if answer > 0.1 * before or answer <= whole.infinity:
                break
        return answer


UP_SIDE, DOWN_SIDE = (UP, 1), (DOWN, -1)


def chernoff(total: Sum, epsilon: float) -> tuple[float, float]:
    """The log of the tilt at which the Chernoff bound on delta at `epsilon` is smallest, and the log of the bound."""

    def bound(log_s: float) -> float:
        s = math.exp(log_s)
        return total.log_mgf(s)[0] + log_peak(s) - s * epsilon

    best = minimise(bound, math.log(1e-2), math.log(1e2))
    return best, bound(best)


def _directions(parts: Composition) -> list[Sum]:
    """The composition as seen by a removed and by an added unit; one of them where both are the same."""
    from dpfy.accounting.gaussian_losses import GaussianPair

    plain = [(GaussianPair(1 / math.sqrt(parts.gaussian), ((1.0, 1.0),), ((1.0, 0.0),)), 1)] if parts.gaussian else []
    removed = Sum((*((r.removed, n) for r, n in parts.releases), *plain))
    added = Sum((*((r.added, n) for r, n in parts.releases), *plain))
    return [removed] if removed == added else [removed, added]


class Tight:
    """The default accountant. Stateless; supports every event of which a dominating pair is known."""

    name = "tight"

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """None if `curve` would answer, else why not and which route would."""
        try:
            composition(event, adjacency)
        except Unsupported as error:
            return str(error)
        return None

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The curve of `event`.

        Guarantees: `epsilon` and `delta` are upper bounds, `epsilon_lower` a lower bound, on the exact curve of the dominating
        pairs of the event; discretisation, truncation and rounding are charged to the private side.
        """
        parts = composition(event, adjacency)
        if parts.public:
            return Infinite()
        if not parts.releases:
            return GaussianCurve(math.sqrt(parts.gaussian))
        return TightCurve(parts)
