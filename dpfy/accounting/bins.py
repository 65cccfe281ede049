"""Balls-in-bins participation by Monte Carlo, with a confidence that is proven and charged to
delta.

A unit falls secretly and uniformly into one of m bins. With it the noisy release is a mixture over
bins j of Gaussians around m_j (the response to the steps of bin j), without it one Gaussian around
zero: P = mean of N(m_j, s^2 I) against Q = N(0, s^2 I). For strategies with non-negative entries
this pair dominates, adaptively (Chua et al. 2024; Choquette-Choo et al. 2024). Only the inner
products of the m_j matter. Where they are all zero, no chance is needed: see
:mod:`dpfy.accounting.bins_orthogonal`.

Delta is the mean of draws that lie between 0 and a known limit B
(:mod:`dpfy.accounting.bins_tilted`). That limit makes the confidence rigorous: for a true mean mu
and a fixed 0 <= lam <= 1/B the product of 1 + lam (mu - X_i) has expectation one, so it exceeds
1/beta with probability at most beta (Markov).

A calibration reads the epsilon of many curves and keeps the noise whose draws look best. So each of
these readings may fail with a part of FAILURE only: EVALUATIONS of them hold together with
probability 1 - FAILURE (union bound), whatever chooses among them, and a search that would need
more is refused. A delta at a given epsilon is read from draws of its own, which no search has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpfy.accounting.bins_orthogonal import Orthogonal
from dpfy.accounting.bins_tilted import Adding, Drawn, Floats, Pair, Removing, adding, removing
from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.events import BallsInBins, flatten
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

SAMPLES = 2**17
MOST_SAMPLES = 2**19
FAILURE = 1e-9
"""Probability, over the Monte Carlo draws, that a bound of a curve does not hold; it is added to
every delta.
"""
EVALUATIONS = 256
"""How many readings of an epsilon FAILURE is charged for: those of one calibration and of the
report on the plan that it found.
"""
PILOT = 8
"""The tilt is chosen with draws of their own, in all about one for this many."""
GRID, SPACING = 32, 0.003
"""How many epsilons around the guess are tried, and how far apart they are."""
LOUD = 300.0
"""Beyond this epsilon likelihood ratios overflow, and bins, worth at most the log of their number,
hardly help: the Gaussian counts.
"""
WIDE = 0.08
"""More draws are made where confidence would cost more than this part of delta."""


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo figure of delta: the mean, its standard error, and the bound that holds with
    the stated confidence.
    """

    mean: float
    standard_error: float
    bound: float


@dataclass(frozen=True)
class Pilots:
    """Draws that choose the tilts and guess epsilon. They decide nothing but how tight the bound
    will be.
    """

    drawn: tuple[Drawn, ...]

    @classmethod
    def of(
        cls, pair: Pair, tilts: tuple[Removing | Adding, ...], samples: int, seed: int
    ) -> Pilots:
        """A few draws of each tilt."""
        count = max(1000, samples // (PILOT * len(tilts)))
        return cls(
            tuple(
                t.draw(pair, count, np.random.default_rng([seed, 7, k]))
                for k, t in enumerate(tilts)
            )
        )

    def best(self, epsilon: float, samples: int) -> tuple[Drawn, float]:
        """The draws of the tilt that would bound delta best, and what confidence would cost it with
        `samples` draws.
        """
        costs = [(_cost(drawn, epsilon, samples), k) for k, drawn in enumerate(self.drawn)]
        cost, k = min(costs)
        return self.drawn[k], cost

    def likely(self, epsilon: float, samples: int) -> float:
        """The bound to be expected."""
        drawn, cost = self.best(epsilon, samples)
        return float(drawn.values(epsilon).mean()) + cost


@dataclass(frozen=True)
class BinsCurve:
    """The privacy curve of one balls-in-bins release, both directions.

    Guarantees: with probability at least 1 - FAILURE over the Monte Carlo draws, `epsilon` is an
    upper bound in EVALUATIONS readings of curves together, however they were chosen, and so is
    `delta` in one. FAILURE is already added to delta: the release and its bill together satisfy
    what is stated. Where no two bins overlap the bounds are certain.
    """

    event: BallsInBins
    samples: int = SAMPLES

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta at `epsilon`."""
        pair = Pair.of(self.event)
        if epsilon > LOUD:
            return min(1.0, pair.gaussian_delta(epsilon) * (1 + 1e-9) + 1e-15)
        if pair.diagonal:
            return _orthogonal(pair).delta(epsilon)
        return min(
            1.0,
            max(e.bound for e in self.estimates(epsilon, seed=1, failure=FAILURE).values())
            + FAILURE,
        )

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon at `delta`: guessed from one set of draws, certified by
        another. Remembered.
        """
        return _epsilon(self, delta)

    def certified(self, delta: float) -> float:
        """As `epsilon`, computed now."""
        pair = Pair.of(self.event)
        most = _root(lambda e: pair.gaussian_delta(e) - delta, None)
        if most > LOUD:
            return most
        if pair.diagonal:
            orthogonal = _orthogonal(pair)
            return _root(lambda e: orthogonal.delta(e) - delta, most)
        return self._certified(pair, delta, most) if delta > 2 * FAILURE else most

    def epsilon_lower(self, delta: float) -> float | None:
        """None: the draws certify from above only."""
        return None

    def estimates(self, epsilon: float, *, seed: int, failure: float) -> dict[str, Estimate]:
        """delta at `epsilon` in both directions, from fresh draws; the bounds hold together with
        the stated failure.
        """
        pair = Pair.of(self.event)
        found = {}
        for name, tilts in _tilts(pair, epsilon).items():
            pilot, _ = Pilots.of(pair, tilts, self.samples, seed).best(epsilon, self.samples)
            drawn = pilot.tilt.draw(
                pair, self.samples, np.random.default_rng([seed, len(name), self.samples])
            )
            values, limit = drawn.values(epsilon), drawn.limit(epsilon)
            bound = upper_bound(values, limit, float(pilot.values(epsilon).var()), failure / 2)
            found[name] = Estimate(
                float(values.mean()), float(values.std() / math.sqrt(len(values))), bound
            )
        return found

    def _certified(self, pair: Pair, delta: float, most: float) -> float:
        """Guess epsilon with the pilots' draws, then take the least epsilon around the guess that
        fresh draws certify.

        The epsilons to choose from are fixed before the fresh draws are made, and each may fail
        with its part of what this reading may fail with.
        """
        goal, guess = delta - FAILURE, _near(pair, delta, most)
        for _ in range(2):  # the tilts are chosen for an epsilon, so with a better guess again
            pilots = [
                Pilots.of(pair, tilts, self.samples, 0) for tilts in _tilts(pair, guess).values()
            ]
            guess, samples = self._guess(pilots, goal, most)
        for attempt in range(8):
            chosen = [p.best(guess, samples)[0] for p in pilots]
            fresh = [
                c.tilt.draw(pair, samples, np.random.default_rng([2 + attempt, k, samples]))
                for k, c in enumerate(chosen)
            ]
            failure = FAILURE / EVALUATIONS / 2 ** (attempt + 1) / GRID / len(fresh)
            grid = [guess * (1 + SPACING * (k - GRID // 4)) for k in range(GRID)]
            if found := _least(
                grid,
                lambda e: all(
                    _holds(*two, e, goal, failure)  # noqa: B023
                    for two in zip(chosen, fresh, strict=True)  # noqa: B023
                ),
            ):
                return min(found, most)
            guess = grid[-1]
        return most

    def _guess(self, pilots: list[Pilots], goal: float, most: float) -> tuple[float, int]:
        """The epsilon to be expected, and how many draws keep the price of confidence small."""
        samples = self.samples
        while True:
            guess = _root(lambda e: max(p.likely(e, samples) for p in pilots) - goal, most)  # noqa: B023
            cost = max(p.best(guess, samples)[1] for p in pilots)
            if cost <= WIDE * goal or samples >= MOST_SAMPLES:
                return guess, samples
            samples *= 2


def _tilts(pair: Pair, epsilon: float) -> dict[str, tuple[Removing | Adding, ...]]:
    return {"remove": removing(pair, epsilon), "add": adding(pair, epsilon)}


def _near(pair: Pair, delta: float, most: float) -> float:
    """An epsilon for which the tilts are chosen: where the least limit of a draw is a few times
    delta.
    """
    return _root(lambda e: min(t.limit(pair, e) for t in removing(pair, e)) - 30 * delta, most)


def _cost(drawn: Drawn, epsilon: float, samples: int) -> float:
    odds = math.log(4 * GRID / FAILURE)
    return (
        math.sqrt(2 * odds * float(drawn.values(epsilon).var()) / samples)
        + odds * drawn.limit(epsilon) / samples
    )


def _orthogonal(pair: Pair) -> Orthogonal:
    return Orthogonal(tuple(math.sqrt(g) for g in pair.gram.diagonal()))


def _least(grid: list[float], holds: Callable[[float], bool]) -> float | None:
    """The least value of an ascending grid that holds, found by bisection; None if the last does
    not.
    """
    if not holds(grid[-1]):
        return None
    low, high = -1, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(grid[middle]) else (middle, high)
    return grid[high]


def _holds(pilot: Drawn, fresh: Drawn, epsilon: float, goal: float, failure: float) -> bool:
    """Whether the fresh draws certify that delta at `epsilon` is at most `goal`."""
    values, limit = fresh.values(epsilon), fresh.limit(epsilon)
    lam = _stake(len(values), limit, float(pilot.values(epsilon).var()), failure)
    return goal >= limit or float(np.log1p(lam * (goal - values)).sum()) >= math.log(1 / failure)


def _stake(count: int, limit: float, variance: float, failure: float) -> float:
    """lam: about the best for draws of this variance."""
    return min(
        0.999 / limit, math.sqrt(2 * math.log(1 / failure) / (count * max(variance, 1e-300)))
    )


def upper_bound(draws: Floats, most: float, variance: float, failure: float) -> float:
    """An upper confidence bound on the mean of independent draws that are at most `most`; see the
    head of this file.

    `variance` must come from other draws: it only chooses lam, so a bad value costs tightness,
    never validity.
    """
    count, log_odds = len(draws), math.log(1 / failure)
    if most <= 0:
        return 0.0
    lam = _stake(count, most, variance, failure)
    low = mean = max(0.0, float(draws.mean()))  # a delta is never negative
    seen = draws[draws > 0]

    def certified(value: float) -> bool:
        return (count - len(seen)) * math.log1p(lam * value) + float(
            np.log1p(lam * (value - seen)).sum()
        ) >= log_odds

    high = mean + 2 * math.sqrt(2 * log_odds * variance / count) + 2 * log_odds * most / count
    while high < most and not certified(high):
        low, high = high, mean + 2 * (high - mean)
    while high - low > 1e-6 * (high - mean):  # cards of earlier versions state it to six digits
        middle = (low + high) / 2
        low, high = (low, middle) if certified(middle) else (middle, high)
    return min(high, most)


@lru_cache(maxsize=64)
def _epsilon(curve: BinsCurve, delta: float) -> float:
    return curve.certified(delta)


def _root(function: Callable[[float], float], high: float | None) -> float:
    """A point just right of where a decreasing function crosses zero."""
    if high is None:
        high = 1.0
        while function(high) > 0:
            high *= 2
    low = 0.0
    while high - low > 1e-4 * high + 1e-9:
        middle = (low + high) / 2
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return high


@dataclass
class MonteCarlo:
    """The accountant of balls-in-bins."""

    samples: int = SAMPLES
    name: str = "monte-carlo"
    tolerance: float = 2e-3  # of calibration: certified epsilons are this far apart
    most_readings: int = (
        EVALUATIONS // 2
    )  # of one calibration: the rest is for the report on what it found

    def why_not(self, event: object, adjacency: Adjacency) -> str | None:
        """None for one balls-in-bins release under add-or-remove or zero-out."""
        leaves = flatten(event)  # type: ignore[arg-type]
        if len(leaves) != 1 or leaves[0][1] != 1 or not isinstance(leaves[0][0], BallsInBins):
            return (
                "the Monte Carlo accountant reads exactly one balls-in-bins release; use "
                "--accountant tight for everything else"
            )
        if adjacency is Adjacency.REPLACE_ONE:
            return (
                "the dominating pair of balls-in-bins is proven for add-or-remove-one and zero-out"
            )
        return None

    def curve(self, event: object, adjacency: Adjacency) -> Curve:
        """The curve of the release."""
        if (problem := self.why_not(event, adjacency)) is not None:
            raise Unsupported(f"this event by Monte Carlo under {adjacency.value}", problem)
        leaf = flatten(event)[0][0]  # type: ignore[arg-type]
        assert isinstance(leaf, BallsInBins)
        return BinsCurve(leaf, check.integer("samples", self.samples, least=1000))
