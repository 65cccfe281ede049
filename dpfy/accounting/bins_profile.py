"""Balls-in-bins in the languages in which releases are composed with others: Rényi divergences, and
a whole privacy profile.

The draws of one tilt serve for all epsilons. So a few tilts over the range of epsilons, with draws
of their own, give a profile. All points of EVALUATIONS such profiles hold together with probability
1 - FAILURE, which is added to every delta. What is certain without draws (the Rényi divergences
here, and the Gaussian around the longest response) takes over where it is better, and alone where
delta is below FAILURE.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpfy.accounting import gaussian, profiles
from dpfy.accounting.bins import (
    EVALUATIONS,
    FAILURE,
    LOUD,
    Pilots,
    _cost,
    _orthogonal,
    _root,
    upper_bound,
)
from dpfy.accounting.bins_tilted import (
    POWERS,
    Adding,
    Drawn,
    Floats,
    Pair,
    Removing,
    adding,
    removing,
)
from dpfy.accounting.profiles import Points, Sides
from dpfy.core.events import BallsInBins

POINTS, KNOTS = 128, 6
"""At how many epsilons a direction is bounded, and how many tilts serve for them."""
SAMPLES = {"remove": 2**15, "add": 2**13}
"""Draws for each tilt. Removing decides; adding costs little anyway."""
END = 1e-11
"""The profile ends about where delta is this small, far below FAILURE."""


def divergences(event: BallsInBins, orders: Floats) -> tuple[Floats, Floats]:
    """Upper bounds on the Rényi divergences of removing and of adding the unit, without any draws.

    With y = dP/dQ the mean of exp(t_k - G_kk / 2) over bins k. Removing: E_Q y^p at a whole order p
    is at most the product of the largest mean weights of p - 1 further bins
    (:mod:`dpfy.accounting.bins_tilted`); log E_Q y^a is convex in a and zero at 1, so that between
    whole orders the chord is a bound. Adding: y is at least the exponential of the mean of its
    exponents, u - h, so E_Q y^-s is at most exp(s h + s^2 var(u) / 2). Both are at most those of
    the longest response alone (joint convexity).
    """
    gram = Pair.of(event).gram
    longest = orders * float(gram.diagonal().max()) / 2
    whole = np.arange(1, POWERS[-1] + 1)
    logs = np.concatenate([[0.0], np.cumsum(Pair.of(event).log_weights[1:])])
    removed = np.interp(orders, whole, logs, right=math.inf) / (orders - 1)
    added = float(gram.diagonal().mean()) / 2 + (orders - 1) * float(gram.mean()) / 2
    return np.minimum(removed, longest) * (1 + 1e-9), np.minimum(added, longest) * (1 + 1e-9)


def certain(event: BallsInBins) -> Sides:
    """The profile of removing and of adding the unit as far as it is known without draws: the
    better of Rényi and Gaussian.
    """
    pair, orders = (
        Pair.of(event),
        np.concatenate(
            [1 + np.geomspace(0.01, 1.0, 30), np.arange(3.0, 33.0), np.geomspace(36, 4000, 40)]
        ),
    )
    sides = []
    for values in divergences(event, orders):
        renyi = profiles.of_renyi(orders, values)
        sides.append(
            profiles.points(lambda e, renyi=renyi: np.minimum(renyi(e), _gaussian(pair, e)))  # type: ignore[misc]
        )
    return sides[0], sides[1]


@lru_cache(maxsize=16)
def profile(event: BallsInBins) -> Sides:
    """The profile of removing and of adding the unit, in that order. Remembered.

    Guarantees: with probability at least 1 - FAILURE over the draws every point is an upper bound,
    and FAILURE is already added to each. Where no two bins overlap, or noise is so low that bins
    hardly help, there are no draws and the points are certain.
    """
    pair = Pair.of(event)
    if _root(lambda e: pair.gaussian_delta(e) - END, None) > LOUD:
        return certain(event)
    if pair.diagonal:
        return _exact(pair)
    return _drawn(pair, "remove"), _drawn(pair, "add")


def _exact(pair: Pair) -> Sides:
    """Bins that do not overlap: by convolution."""
    whole = _orthogonal(pair)
    most = _root(lambda e: pair.gaussian_delta(e) - END, None)
    end = _root(lambda e: whole.removed(e) - END, most)
    epsilons = np.linspace(0.0, end, POINTS)
    least = _gaussian(pair, epsilons)
    removed, added = whole.removing(epsilons), whole.adding(epsilons)
    return Points(epsilons, np.minimum(least, removed)), Points(epsilons, np.minimum(least, added))


def _drawn(pair: Pair, name: str) -> Points:
    """One direction by Monte Carlo: tilts for a few epsilons, chosen by pilots, each point by the
    tilt that its pilots favour.
    """
    samples, direction = SAMPLES[name], 0 if name == "remove" else 1

    def tilts(epsilon: float) -> tuple[Removing | Adding, ...]:
        return removing(pair, epsilon) if name == "remove" else adding(pair, epsilon)

    most = _root(lambda e: pair.gaussian_delta(e) - END, None)
    end = _root(lambda e: min(t.limit(pair, e) for t in tilts(e)) - 30 * END, most)
    pilots: list[Drawn] = []
    for k, knot in enumerate(np.linspace(0.0, end, KNOTS)):
        best, _ = Pilots.of(pair, tilts(float(knot)), samples, 100 + 10 * k + direction).best(
            float(knot), samples
        )
        if best.tilt not in [p.tilt for p in pilots]:
            pilots.append(best)
    fresh = [
        p.tilt.draw(pair, samples, np.random.default_rng([300, k, direction, samples]))
        for k, p in enumerate(pilots)
    ]
    epsilons = np.linspace(0.0, end, POINTS)
    bounds = []
    for epsilon in map(float, epsilons):
        at = min(range(len(pilots)), key=lambda k: _cost(pilots[k], epsilon, samples))
        values, limit = fresh[at].values(epsilon), fresh[at].limit(epsilon)
        failure = FAILURE / EVALUATIONS / (2 * POINTS)
        bounds.append(
            upper_bound(values, limit, float(pilots[at].values(epsilon).var()), failure) + FAILURE
        )
    return Points(epsilons, np.minimum(_gaussian(pair, epsilons), bounds))


def _gaussian(pair: Pair, epsilons: Floats) -> Floats:
    """delta of the longest response alone, rounded up."""
    norm = math.sqrt(float(pair.gram.diagonal().max()))
    return np.array([gaussian.delta(norm, float(e)) for e in epsilons]) * (1 + 1e-9)
