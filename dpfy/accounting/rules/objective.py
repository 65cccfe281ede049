"""The row of objective perturbation: the minimum of convex losses with a random linear term, and
Gaussian releases beside it.

The minimum w of sum_i f_i(x_i w) + lambda/2 |w|^2 + b w determines b: it is minus the gradient of
the rest at w. So the density of w is that of the Gaussian b at this point, times the determinant of
H = sum_i f_i'' x_i x_i' + lambda (Chaudhuri, Monteleoni & Sarwate 2011; Kifer, Smith & Thakurta
2012). Where slopes have corners the map is Lipschitz both ways, and the determinant is taken almost
everywhere.

One record more, (f, x), moves the point by g = f' x, of norm at most L, and multiplies the
determinant by 1 + f'' x H^-1 x, which lies between 1 and 1 + curvature. With s the deviation of b,
and b the point of the data set that w is drawn from, the privacy loss is, in either direction, at
most

    kappa + (|g|^2 + 2 b g) / (2 s^2)  up to the sign of g,    kappa = log(1 + curvature).

The slope depends on w and thus on b, but b g is the slope times b x, and b x is normal: for fixed b
the loss is convex in the slope, and largest at an end of its range. Each end is, as a random
variable, the loss of a Gaussian mechanism with mu = L / s (or no loss at all, where the end is 0).
Slopes between -L and L have two such ends (Redberg, Koskela & Wang 2023, Theorem 3.1, who have
kappa = -log(1 - curvature)); where the sign is known from the record one end is 0. A replaced
record has two slopes, and the ends are corners: at most 2 mu.

The loss of Gaussian releases beside it adds up with each end to that of one Gaussian mechanism.
With d(mu, epsilon) the delta of a Gaussian mechanism, the delta of a maximum is at most the sum
over its ends, so that from kappa on

    delta(epsilon) <= sum over ends of d(sqrt(end^2 + beside^2), epsilon - kappa),

and below kappa, where (1 - ab)+ <= 1 - a + a (1 - b)+ for a <= 1,  delta(epsilon) <= 1 - a + a
delta(kappa) with a = exp(epsilon - kappa).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

from dpfy.accounting import numeric_limits, profiles
from dpfy.accounting.gaussian import log_delta
from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Points, Profile, Sides
from dpfy.accounting.rules.rule import Divergences, EventRule, group_size_of
from dpfy.core import check
from dpfy.core import events as ev
from dpfy.core.unit import Adjacency

UP = 1 + 1e-12
"""Above what a few roundings of a delta can have lost."""


@dataclass(frozen=True)
class ObjectiveCurve:
    """The curve by its ends: each is (mu, how many of them)."""

    ends: tuple[tuple[float, int], ...]
    beside: float
    kappa: float

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        check.nonnegative("epsilon", epsilon)
        if epsilon >= self.kappa:
            return self._far(epsilon - self.kappa)
        near = math.exp(epsilon - self.kappa)
        return min(1.0, (-math.expm1(epsilon - self.kappa) + near * self._far(0.0)) * UP)

    def _far(self, epsilon: float) -> float:
        together = ((math.hypot(mu, self.beside), many) for mu, many in self.ends)
        total = sum(many * math.exp(log_delta(mu, epsilon)) for mu, many in together if mu > 0)
        return min(1.0, total * UP)

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`, by bisection."""
        check.inside_unit("delta", delta)
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = 0.0, 1.0
        while self.delta(high) > delta:
            low, high = high, 2 * high
        while high - low > 1e-13 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def epsilon_lower(self, delta: float) -> float | None:
        """None: the bound is not known to be attained."""
        return None


def ends(event: ev.ObjectivePerturbation, adjacency: Adjacency) -> tuple[tuple[float, int], ...]:
    """The ends of the range of slopes, as ratios of what they move to the noise."""
    mu = 1 / event.noise_multiplier
    if adjacency is Adjacency.REPLACE_ONE:
        return ((2 * mu, 1), (mu, 2), (0.0, 1)) if event.one_sided else ((2 * mu, 4),)
    return ((mu, 1), (0.0, 1)) if event.one_sided else ((mu, 2),)


def curve(event: ev.ObjectivePerturbation, adjacency: Adjacency) -> ObjectiveCurve:
    """The closed form."""
    return ObjectiveCurve(
        ends(event, adjacency),
        group_size_of(adjacency) * event.beside,
        math.log1p(event.curvature) * UP,
    )


@lru_cache(maxsize=32)
def _sides(event: ev.ObjectivePerturbation, adjacency: Adjacency) -> Sides:
    shape = curve(event, adjacency)
    side: Points = profiles.points(
        lambda epsilons: np.array([shape.delta(float(e)) for e in epsilons])
    )
    return side, side


def _profile(event: ev.ObjectivePerturbation, adjacency: Adjacency) -> Profile:
    return Profile(
        lambda: curve(event, adjacency),
        lambda: _sides(event, adjacency),
        lambda: _sides(event, adjacency),
    )


def _divergences(
    event: ev.ObjectivePerturbation, adjacency: Adjacency, alphas: Array
) -> Divergences:
    """The moment of a maximum is at most the sum of those of its ends; that of an end at 0 is that
    of what is beside.
    """
    order, beside = alphas - 1, group_size_of(adjacency) * event.beside
    logs = []
    for mu, many in ends(event, adjacency):
        if (
            event.one_sided and adjacency is not Adjacency.REPLACE_ONE and mu > 0
        ):  # where the loss is above 0
            logs.append(order * (order + 1) * mu**2 / 2 + log_ndtr(mu / 2 + order * mu))
        elif event.one_sided and adjacency is not Adjacency.REPLACE_ONE:  # where it is below
            logs.append(np.full(len(alphas), float(log_ndtr(-1 / event.noise_multiplier / 2))))
        else:
            logs.append(order * (order + 1) * mu**2 / 2 + math.log(many))
    total = np.logaddexp.reduce(np.array(logs), axis=0)
    if (
        not event.one_sided and adjacency is not Adjacency.REPLACE_ONE
    ):  # of the two ends the one on the side of b x counts
        mu = 1 / event.noise_multiplier
        total = order * (order + 1) * mu**2 / 2 + math.log(2) + log_ndtr(order * mu)
    kappa = math.log1p(event.curvature) * UP
    return np.asarray(kappa + np.maximum(total, 0.0) / order * UP + alphas * beside**2 / 2), 0.0


def _words(event: ev.ObjectivePerturbation) -> str:
    beside = f", with Gaussian releases of mu {event.beside:.4g} beside it" if event.beside else ""
    return (
        f"the minimum of a convex objective with a random linear term of "
        f"{event.noise_multiplier:.6g} times the steepest loss "
        f"(curvature over regularisation {event.curvature:.4g}){beside}"
    )


ROWS = (
    EventRule(
        ev.ObjectivePerturbation,
        words=_words,
        profile=_profile,
        divergences=_divergences,
        within=lambda e: numeric_limits.noise("noise_multiplier", e.noise_multiplier),
    ),
)
