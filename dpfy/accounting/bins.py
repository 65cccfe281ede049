"""Draws whose mean is the delta of balls-in-bins and which cannot exceed a small, known limit.

y = dP/dQ is the mean over bins k of Y_k = exp(t_k - G_kk / 2), t centred Gaussian with the
covariance G of the responses under Q. Removing the unit costs E (y - E)_+, adding it E (1 - E y)_+,
with E = e^epsilon. Draws from Q would almost always be zero. Instead:

Removing, with p picks: y^p is, up to its mean, the density of Q moved by m_k1 + ... + m_kp, the
bins picked one after the other, bin k with weight exp(G_k,k1 + G_k,k2 + ...); W, the product of the
mean weights, is what the picks leave over. Then X = W (y - E)_+ / y^p has the mean delta. The mean
weight is a convex function of how often each bin was picked, so it is largest if all picks were the
same bin: X has a limit, for the best p not far above the Rényi bound on delta. With one pick and
stretch s >= 1: Q moved by s m_k and X = (y - E)_+ / M, M the mean over k of exp(s t_k - s^2 G_kk /
2), which is at least y^s exp(-s (s - 1) max G_kk / 2) (power means).

Adding, with push c >= 0: Q moved by -c times the mean response a; X = (1 - E y)_+ exp(c u + c^2
|a|^2 / 2), u the mean of the t_k. The mean of exponentials is at least the exponential of the mean,
so u bounds y from below, and X has a limit again.

Balls-in-bins whose responses do not overlap: delta by convolution on a grid, an upper bound
without any chance.

With orthogonal responses the likelihood ratio of the release is S = mean over bins of independent
log-normal Y_k, each with mean one under Q. Removing the unit costs the call E (S - e^eps)_+, adding
it e^eps times the put E (e^-eps - S)_+; E S = 1 makes the call with strike K 1 - K more than the
put. They are convex in each Y_k, so that moving Y_k at random to one of the two grid points around
it, with its mean kept, can only raise them (Jensen's inequality).

Small strikes: Fourier transforms, on fine grids. What matters for the put are sums below m K. A Y_k
beyond that makes it zero and is left out; the sums that wrap around the grid only raise it.
Rounding is charged by the standard bound of a transform in the Euclidean norm. Large strikes: there
that charge is too much. Sums of non-negative products have no cancellation and so a relative error
only.

Balls-in-bins participation by Monte Carlo, with a confidence that is proven and charged to
delta.

A unit falls secretly and uniformly into one of m bins. With it the noisy release is a mixture over
bins j of Gaussians around m_j (the response to the steps of bin j), without it one Gaussian around
zero: P = mean of N(m_j, s^2 I) against Q = N(0, s^2 I). For strategies with non-negative entries
this pair dominates, adaptively (Chua et al. 2024; Choquette-Choo et al. 2024). Only the inner
products of the m_j matter. Where they are all zero, no chance is needed: see
:mod:`dpfy.accounting.bins`.

Delta is the mean of draws that lie between 0 and a known limit B
(:mod:`dpfy.accounting.bins`). That limit makes the confidence rigorous: for a true mean mu
and a fixed 0 <= lam <= 1/B the product of 1 + lam (mu - X_i) has expectation one, so it exceeds
1/beta with probability at most beta (Markov).

A calibration reads the epsilon of many curves and keeps the noise whose draws look best. So each of
these readings may fail with a part of FAILURE only: EVALUATIONS of them hold together with
probability 1 - FAILURE (union bound), whatever chooses among them, and a search that would need
more is refused. A delta at a given epsilon is read from draws of its own, which no search has seen.

Balls-in-bins in the languages in which releases are composed with others: Rényi divergences, and
a whole privacy profile.

The draws of one tilt serve for all epsilons. So a few tilts over the range of epsilons, with draws
of their own, give a profile. All points of EVALUATIONS such profiles hold together with probability
1 - FAILURE, which is added to every delta. What is certain without draws (the Rényi divergences
here, and the Gaussian around the longest response) takes over where it is better, and alone where
delta is below FAILURE.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from dpfy.accounting import gaussian, profiles
from dpfy.accounting.allocation import split
from dpfy.accounting.profiles import Points, Sides
from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.events import BallsInBins, flatten
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

Floats = NDArray[np.float64]
CHUNK = 2**12
"""Draws made at a time: the intermediate arrays stay in the cache."""
POWERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32)
STRETCHES = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
PUSHES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)


@dataclass(frozen=True)
class ResponsePair:
    """The two distributions, up to rotation: inner products of the bins' responses in units of the
    noise.
    """

    gram: Floats
    root: Floats = field(repr=False)
    diagonal: bool

    @classmethod
    def of(cls, event: BallsInBins) -> ResponsePair:
        """The pair of an event."""
        gram = np.asarray(event.gram, dtype=np.float64) / event.noise_multiplier**2
        if not (gram - np.diag(gram.diagonal())).any():
            return cls(gram, np.sqrt(gram), True)
        values, vectors = np.linalg.eigh(gram)
        return cls(gram, vectors * np.sqrt(np.maximum(values, 0)), False)

    def gaussian_delta(self, epsilon: float) -> float:
        """delta of the longest response alone: no bins would help less."""
        norm = math.sqrt(float(self.gram.diagonal().max()))
        upper = float(ndtr(norm / 2 - epsilon / norm))
        return upper - math.exp(epsilon + float(log_ndtr(-norm / 2 - epsilon / norm)))

    @cached_property
    def log_weights(self) -> Floats:
        """By how many bins are picked already, 0, 1, ...: the log of the largest mean weight of the
        next.
        """
        return np.array([float(_log_mean(a * self.gram).max()) for a in range(POWERS[-1])])

    def centred(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` draws of t under Q."""
        return rng.standard_normal((count, len(self.gram))) @ self.root.T


@dataclass(frozen=True)
class Removing:
    """A tilt towards large y: several bins stand out (`picks`), or one by more than its response
    (`stretch`).
    """

    picks: int = 1
    stretch: float = 1.0

    def limit(self, pair: ResponsePair, epsilon: float) -> float:
        """The most that a draw can be: for y^q, q = picks x stretch, the largest (y - E) / y^q is
        at y = E q / (q - 1).
        """
        order = self.picks * self.stretch
        loss = self.stretch * (self.stretch - 1) * float(pair.gram.diagonal().max()) / 2
        value = (1 - order) * epsilon - order * math.log(order)
        value += (order - 1) * math.log(order - 1) if order > 1 else 0.0
        return math.exp(min(float(pair.log_weights[: self.picks].sum()) + loss + value, 700.0))

    def draw(self, pair: ResponsePair, count: int, rng: np.random.Generator) -> TiltedDraws:
        """`count` independent draws, for every epsilon."""
        parts = [
            self._some(pair, min(CHUNK, count - start), rng) for start in range(0, count, CHUNK)
        ]
        log_weight, y = (np.concatenate(column) for column in zip(*parts, strict=True))
        return TiltedDraws(self, pair, log_weight, y)

    def _some(
        self, pair: ResponsePair, count: int, rng: np.random.Generator
    ) -> tuple[Floats, Floats]:
        bins, half = len(pair.gram), pair.gram.diagonal() / 2
        picked = pair.gram[rng.integers(bins, size=count)]
        log_weight = np.zeros(count)
        for _ in range(1, self.picks):
            top = picked.max(axis=1)
            running = np.exp(picked - top[:, None]).cumsum(axis=1)
            log_weight += top + np.log(running[:, -1] / bins)
            place = (running < rng.random((count, 1)) * running[:, -1:]).sum(axis=1)
            picked = picked + pair.gram[np.minimum(place, bins - 1)]
        t = pair.centred(count, rng) + self.stretch * picked
        log_y = _log_mean(t - half)
        log_m = log_y if self.stretch == 1 else _log_mean(self.stretch * t - self.stretch**2 * half)
        return log_weight - self.picks * log_m, np.exp(log_y)


@dataclass(frozen=True)
class Adding:
    """A tilt towards small y: against the mean response, `push` times."""

    push: float

    def limit(self, pair: ResponsePair, epsilon: float) -> float:
        """The most that a draw can be: with v = e^u the largest (1 - E v e^-h) v^c, h half the mean
        of the G_kk.
        """
        c, size = self.push, float(pair.gram.mean())
        value = (
            c**2 * size / 2
            - c * (epsilon - float(pair.gram.diagonal().mean()) / 2)
            - (1 + c) * math.log1p(c)
        )
        return math.exp(min(value + (c * math.log(c) if c else 0.0), 700.0))

    def draw(self, pair: ResponsePair, count: int, rng: np.random.Generator) -> TiltedDraws:
        """`count` independent draws, for every epsilon."""
        moved, half = self.push * pair.gram.mean(axis=0), pair.gram.diagonal() / 2
        weights, ys = [], []
        for start in range(0, count, CHUNK):
            t = pair.centred(min(CHUNK, count - start), rng) - moved
            weights.append(self.push * t.mean(axis=1) + self.push**2 * float(pair.gram.mean()) / 2)
            ys.append(np.exp(_log_mean(t - half)))
        return TiltedDraws(self, pair, np.concatenate(weights), np.concatenate(ys))


@dataclass(frozen=True)
class TiltedDraws:
    """Draws of a tilt. They do not depend on epsilon: the same ones serve for all."""

    tilt: Removing | Adding
    pair: ResponsePair
    log_weight: Floats = field(repr=False)
    y: Floats = field(repr=False)

    def values(self, epsilon: float) -> Floats:
        """X at `epsilon`: independent, with the mean delta, between 0 and `limit`."""
        gain = (
            self.y - math.exp(epsilon)
            if isinstance(self.tilt, Removing)
            else 1 - math.exp(epsilon) * self.y
        )
        inside = gain > 0
        found = np.zeros(len(gain))
        found[inside] = np.exp(self.log_weight[inside]) * gain[inside]
        return found

    def limit(self, epsilon: float) -> float:
        """The most that any draw can be at `epsilon`, rounding included."""
        return self.tilt.limit(self.pair, epsilon) * (1 + 1e-9)


def removing(pair: ResponsePair, epsilon: float) -> tuple[Removing, ...]:
    """The tilts worth trying at `epsilon`: those with the least limit, and their neighbours."""
    many = sorted((Removing(picks=p) for p in POWERS), key=lambda t: t.limit(pair, epsilon))
    one = sorted((Removing(stretch=s) for s in STRETCHES), key=lambda t: t.limit(pair, epsilon))
    return (*many[:3], one[0])


def adding(pair: ResponsePair, epsilon: float) -> tuple[Adding, ...]:
    """The tilts worth trying at `epsilon`: those with the least limit."""
    return tuple(sorted((Adding(c) for c in PUSHES), key=lambda t: t.limit(pair, epsilon))[:3])


def _log_mean(values: Floats) -> Floats:
    """log of the mean of exp along the last axis."""
    top = values.max(axis=-1)
    return np.asarray(top + np.log(np.exp(values - top[..., None]).mean(axis=-1)))


LEAST_CELLS, MOST_CELLS = 2**15, 2**20
DIRECT_CELLS = 2**12
ROOM = 4
"""The grid is this many times as long as the sums that matter."""
DAMPING = 20.0
"""What wraps around the grid is multiplied by e^-DAMPING."""
SPREAD = 0.02
"""Cells are at most this part of a bin's standard deviation, where the most cells allow it."""
TOO_MUCH = 0.01
"""A charge for rounding above this part of delta is worth the slower way."""
SHARED = 1.3
"""Strikes within this factor are read off one grid."""
UNIT = 2.0**-52
RELATIVE = 1e-9
"""More than the relative rounding error of all sums of non-negative products here: about terms x
levels x UNIT.
"""


@dataclass(frozen=True)
class Orthogonal:
    """The pair of a release whose bins have responses of these lengths, in units of the noise, at
    right angles to each other.
    """

    norms: tuple[float, ...]

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta at `epsilon` >= 0, the larger of both directions."""
        return min(1.0, max(self.removed(epsilon), self.added(epsilon)))

    def removed(self, epsilon: float) -> float:
        """The bound for removing the unit."""
        return float(self.removing(np.array([epsilon]))[0])

    def added(self, epsilon: float) -> float:
        """The bound for adding the unit."""
        return float(self.adding(np.array([epsilon]))[0])

    def removing(self, epsilons: Floats) -> Floats:
        """The bounds for removing the unit at many epsilons; strikes within a factor `SHARED` share
        a grid.
        """
        strikes, found = np.exp(epsilons), np.empty(len(epsilons))
        for group in _groups(strikes):
            put, rounding = self.puts(strikes[group])
            bound = np.maximum(1 - strikes[group] + put, 0.0) + rounding + 4 * UNIT * strikes[group]
            doubtful = rounding > TOO_MUCH * bound
            if doubtful.any():
                bound[doubtful] = np.minimum(bound[doubtful], self.calls(strikes[group][doubtful]))
            found[group] = bound
        return found

    def adding(self, epsilons: Floats) -> Floats:
        """The bounds for adding the unit at many epsilons."""
        strikes, found = np.exp(-epsilons), np.empty(len(epsilons))
        for group in _groups(strikes):
            put, rounding = self.puts(strikes[group])
            found[group] = np.exp(epsilons[group]) * (put + rounding)
        return found

    def puts(self, strikes: Floats) -> tuple[Floats, Floats]:
        """E (strike - S)_+ under Q, from above but for rounding, and bounds on what was lost by
        rounding; one grid for all strikes.
        """
        most = float(strikes.max())
        bins, cells = len(self.norms), self._cells(most)
        size, step = ROOM * cells, len(self.norms) * most / cells
        damped = np.exp(-DAMPING / size * np.arange(cells + 1))
        spectrum, error, mass = np.ones(size // 2 + 1, dtype=np.complex128), 0.0, 1.0
        for norm, count in Counter(self.norms).items():
            masses = np.zeros(size)
            masses[: cells + 1] = split(norm, step, cells) * damped
            spectrum *= np.fft.rfft(masses) ** count
            total = float(masses.sum())
            error += count * float(np.linalg.norm(masses)) / max(total, UNIT)
            mass *= total**count
        sums = np.fft.irfft(spectrum, size)[:cells]
        spread = 6 * UNIT * math.log2(size) * (error * mass + float(np.linalg.norm(sums)))
        found, lost = [], []
        for strike in map(float, strikes):
            worth = np.maximum(strike - np.arange(cells) * step / bins, 0.0) / damped[:cells]
            found.append(float(worth @ sums))
            lost.append(spread * float(np.linalg.norm(worth)) + 8 * bins * UNIT * strike)
        return np.array(found), np.array(lost)

    def calls(self, strikes: Floats) -> Floats:
        """E (S - strike)_+ under Q, from above: all bins are added up pair by pair, with what lies
        at or beyond the largest strike kept apart.
        """
        bins, most = len(self.norms), float(strikes.max())
        step = bins * most / DIRECT_CELLS
        total = CellSum(np.eye(1, DIRECT_CELLS)[0], 0.0, 0.0, 0.0)
        for norm, count in Counter(self.norms).items():
            total = total.plus(_beyond(norm, step).times(count))
        place, found = np.arange(DIRECT_CELLS) * step / bins, []
        for strike in map(float, strikes):
            within = place > strike
            gain = total.moment * step / bins + float((total.below * place)[within].sum())
            mass = total.beyond + float(total.below[within].sum())
            found.append(max(gain - strike * mass, 0.0) + RELATIVE * gain)
        return np.array(found)

    def _cells(self, strike: float) -> int:
        """A power of two: fine enough that moving to the grid adds little to the variance of the
        sum.
        """
        bins = len(self.norms)
        spread = min(math.sqrt(math.expm1(min(norm**2, 50.0))) for norm in self.norms)
        wanted = bins * strike / max(SPREAD * spread, 3e-4 * strike * math.sqrt(bins))
        return int(min(max(2 ** math.ceil(math.log2(wanted)), LEAST_CELLS), MOST_CELLS))


def _groups(strikes: Floats) -> list[NDArray[np.intp]]:
    """Indices of strikes that lie within a factor `SHARED` of each other."""
    left, groups = np.argsort(-strikes), []
    while len(left):
        near = strikes[left] * SHARED >= strikes[left[0]]
        groups.append(left[near])
        left = left[~near]
    return groups


@dataclass(frozen=True)
class CellSum:
    """A sum of independent grid values: masses below the strike, and mass, moment beyond it and
    mean in cells.
    """

    below: Floats
    beyond: float
    moment: float
    mean: float

    def plus(self, other: CellSum) -> CellSum:
        """The sum of two independent sums. Every term is non-negative."""
        cells = len(self.below)
        place = np.arange(cells)
        mass = np.concatenate(
            [[other.beyond], other.below[:0:-1]]
        ).cumsum()  # at or beyond cells, cells - 1, ..., 1
        moment = np.concatenate([[other.moment], (place * other.below)[:0:-1]]).cumsum()
        beyond = self.beyond + float(self.below @ mass)
        moments = (
            self.moment + self.beyond * other.mean + float(self.below @ (place * mass + moment))
        )
        return CellSum(
            np.convolve(self.below, other.below)[:cells], beyond, moments, self.mean + other.mean
        )

    def times(self, count: int) -> CellSum:
        """The sum of `count` such sums, by doubling."""
        half = self.times(count // 2) if count > 1 else None
        if half is None:
            return self
        return half.plus(half).plus(self) if count % 2 else half.plus(half)


def _beyond(norm: float, step: float) -> CellSum:
    masses = np.asarray(split(norm, step, DIRECT_CELLS), dtype=np.float64)
    cut = math.log(DIRECT_CELLS * step) / norm + norm / 2
    beyond = float(ndtr(-cut)) + float(masses[-1])
    return CellSum(
        masses[:-1],
        beyond,
        float(ndtr(norm - cut)) / step + float(masses[-1]) * DIRECT_CELLS,
        1 / step,
    )


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
class DeltaEstimate:
    """A Monte Carlo figure of delta: the mean, its standard error, and the bound that holds with
    the given confidence.
    """

    mean: float
    standard_error: float
    bound: float


@dataclass(frozen=True)
class Pilots:
    """Draws that choose the tilts and guess epsilon. They decide only how tight the bound
    will be.
    """

    drawn: tuple[TiltedDraws, ...]

    @classmethod
    def of(
        cls, pair: ResponsePair, tilts: tuple[Removing | Adding, ...], samples: int, seed: int
    ) -> Pilots:
        """A few draws of each tilt."""
        count = max(1000, samples // (PILOT * len(tilts)))
        return cls(
            tuple(
                t.draw(pair, count, np.random.default_rng([seed, 7, k]))
                for k, t in enumerate(tilts)
            )
        )

    def best(self, epsilon: float, samples: int) -> tuple[TiltedDraws, float]:
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
    `delta` in one. FAILURE is already added to delta: the release and its charge together satisfy
    what is given. Where no two bins overlap the bounds are certain.
    """

    event: BallsInBins
    samples: int = SAMPLES

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta at `epsilon`."""
        pair = ResponsePair.of(self.event)
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
        pair = ResponsePair.of(self.event)
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

    def estimates(self, epsilon: float, *, seed: int, failure: float) -> dict[str, DeltaEstimate]:
        """delta at `epsilon` in both directions, from fresh draws; the bounds hold together with
        the given failure.
        """
        pair = ResponsePair.of(self.event)
        found = {}
        for name, tilts in _tilts(pair, epsilon).items():
            pilot, _ = Pilots.of(pair, tilts, self.samples, seed).best(epsilon, self.samples)
            drawn = pilot.tilt.draw(
                pair, self.samples, np.random.default_rng([seed, len(name), self.samples])
            )
            values, limit = drawn.values(epsilon), drawn.limit(epsilon)
            bound = upper_bound(values, limit, float(pilot.values(epsilon).var()), failure / 2)
            found[name] = DeltaEstimate(
                float(values.mean()), float(values.std() / math.sqrt(len(values))), bound
            )
        return found

    def _certified(self, pair: ResponsePair, delta: float, most: float) -> float:
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


def _tilts(pair: ResponsePair, epsilon: float) -> dict[str, tuple[Removing | Adding, ...]]:
    return {"remove": removing(pair, epsilon), "add": adding(pair, epsilon)}


def _near(pair: ResponsePair, delta: float, most: float) -> float:
    """An epsilon for which the tilts are chosen: where the least limit of a draw is a few times
    delta.
    """
    return _root(lambda e: min(t.limit(pair, e) for t in removing(pair, e)) - 30 * delta, most)


def _cost(drawn: TiltedDraws, epsilon: float, samples: int) -> float:
    odds = math.log(4 * GRID / FAILURE)
    return (
        math.sqrt(2 * odds * float(drawn.values(epsilon).var()) / samples)
        + odds * drawn.limit(epsilon) / samples
    )


def _orthogonal(pair: ResponsePair) -> Orthogonal:
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


def _holds(
    pilot: TiltedDraws, fresh: TiltedDraws, epsilon: float, goal: float, failure: float
) -> bool:
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


POINTS, KNOTS = 128, 6
"""At how many epsilons a direction is bounded, and how many tilts serve for them."""
PROFILE_SAMPLES = {"remove": 2**15, "add": 2**13}
"""Draws for each tilt. Removing decides; adding costs little anyway."""
END = 1e-11
"""The profile ends about where delta is this small, far below FAILURE."""


def divergences(event: BallsInBins, orders: Floats) -> tuple[Floats, Floats]:
    """Upper bounds on the Rényi divergences of removing and of adding the unit, without any draws.

    With y = dP/dQ the mean of exp(t_k - G_kk / 2) over bins k. Removing: E_Q y^p at a whole order p
    is at most the product of the largest mean weights of p - 1 further bins
    (:mod:`dpfy.accounting.bins`); log E_Q y^a is convex in a and zero at 1, so that between
    whole orders the chord is a bound. Adding: y is at least the exponential of the mean of its
    exponents, u - h, so E_Q y^-s is at most exp(s h + s^2 var(u) / 2). Both are at most those of
    the longest response alone (joint convexity).
    """
    gram = ResponsePair.of(event).gram
    longest = orders * float(gram.diagonal().max()) / 2
    whole = np.arange(1, POWERS[-1] + 1)
    logs = np.concatenate([[0.0], np.cumsum(ResponsePair.of(event).log_weights[1:])])
    removed = np.interp(orders, whole, logs, right=math.inf) / (orders - 1)
    added = float(gram.diagonal().mean()) / 2 + (orders - 1) * float(gram.mean()) / 2
    return np.minimum(removed, longest) * (1 + 1e-9), np.minimum(added, longest) * (1 + 1e-9)


def certain(event: BallsInBins) -> Sides:
    """The profile of removing and of adding the unit as far as it is known without draws: the
    better of Rényi and Gaussian.
    """
    pair, orders = (
        ResponsePair.of(event),
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
    pair = ResponsePair.of(event)
    if _root(lambda e: pair.gaussian_delta(e) - END, None) > LOUD:
        return certain(event)
    if pair.diagonal:
        return _exact(pair)
    return _drawn(pair, "remove"), _drawn(pair, "add")


def _exact(pair: ResponsePair) -> Sides:
    """Bins that do not overlap: by convolution."""
    whole = _orthogonal(pair)
    most = _root(lambda e: pair.gaussian_delta(e) - END, None)
    end = _root(lambda e: whole.removed(e) - END, most)
    epsilons = np.linspace(0.0, end, POINTS)
    least = _gaussian(pair, epsilons)
    removed, added = whole.removing(epsilons), whole.adding(epsilons)
    return Points(epsilons, np.minimum(least, removed)), Points(epsilons, np.minimum(least, added))


def _drawn(pair: ResponsePair, name: str) -> Points:
    """One direction by Monte Carlo: tilts for a few epsilons, chosen by pilots, each point by the
    tilt that its pilots favour.
    """
    samples, direction = PROFILE_SAMPLES[name], 0 if name == "remove" else 1

    def tilts(epsilon: float) -> tuple[Removing | Adding, ...]:
        return removing(pair, epsilon) if name == "remove" else adding(pair, epsilon)

    most = _root(lambda e: pair.gaussian_delta(e) - END, None)
    end = _root(lambda e: min(t.limit(pair, e) for t in tilts(e)) - 30 * END, most)
    pilots: list[TiltedDraws] = []
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


def _gaussian(pair: ResponsePair, epsilons: Floats) -> Floats:
    """delta of the longest response alone, rounded up."""
    norm = math.sqrt(float(pair.gram.diagonal().max()))
    return np.array([gaussian.delta(norm, float(e)) for e in epsilons]) * (1 + 1e-9)
