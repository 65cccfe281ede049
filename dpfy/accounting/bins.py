"""Balls-in-bins participation by Monte Carlo, with a confidence that is proven and charged to delta.

A unit falls secretly and uniformly into one of m bins. With it the noisy release is a mixture over bins j of Gaussians around m_j (the
response to the steps of bin j), without it one Gaussian around zero: P = mean of N(m_j, s^2 I) against Q = N(0, s^2 I). For strategies
with non-negative entries this pair dominates, adaptively (Chua et al. 2024; Choquette-Choo et al. 2024). Only the inner products of
the m_j matter.

Variance reduction: given everything orthogonal to m_J, the region L = log P/Q >= epsilon is a half line t >= t* in the direction of m_J
(inner products are non-negative, so L increases along it), and its mass under P_J and Q is exact. The estimate of
delta = mean over J of P_J(L >= eps) - e^eps Q(L >= eps) is the mean of h(t*) over draws of the orthogonal part, and h never exceeds
the delta of the unamplified Gaussian. That upper limit B makes the confidence rigorous: for a true mean mu and a fixed
0 <= lam <= 1/B the product of 1 + lam (mu - X_i) has expectation one, so it exceeds 1/beta with probability at most beta (Markov).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.events import BallsInBins, flatten
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

Array = NDArray[np.float64]
SAMPLES = 2**18
FAILURE = 1e-9
"""Probability, over the Monte Carlo draws, that a bound of a curve does not hold; it is added to every delta."""
CHUNK = 2**13
SHARES = (1 / 3, 0.6, 0.85)
MOST_TILT = 4.0
MOST_FACTOR = 16
MARGIN = 0.93
"""The guess is made for a little less than delta, so that fresh draws are likely to certify it at once."""
TOGETHER = 0.7
"""How far the bins are moved together, as a part of epsilon. A choice of speed: the weights keep every estimate unbiased."""
ROUNDS = 60


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo figure of delta: the mean, its standard error, and the bound that holds with the stated confidence."""

    mean: float
    standard_error: float
    bound: float


@dataclass(frozen=True)
class Pair:
    """The two distributions, up to rotation: inner products of the bins' responses in units of the noise."""

    gram: Array
    root: Array = field(repr=False)
    diagonal: bool

    @classmethod
    def of(cls, event: BallsInBins) -> Pair:
        """The pair of an event."""
        gram = np.asarray(event.gram, dtype=np.float64) / event.noise_multiplier**2
        if not (gram - np.diag(gram.diagonal())).any():
            return cls(gram, np.sqrt(gram), True)
        values, vectors = np.linalg.eigh(gram)
        return cls(gram, vectors * np.sqrt(np.maximum(values, 0)), False)

    def gaussian_delta(self, epsilon: float) -> float:
        """delta of the longest response alone: no draw of h exceeds it."""
        norm = math.sqrt(float(self.gram.diagonal().max()))
        upper = float(ndtr(norm / 2 - epsilon / norm))
        return upper - math.exp(epsilon + float(log_ndtr(-norm / 2 - epsilon / norm)))

    def draws(self, epsilon: float, direction: int, count: int, share: float, rng: np.random.Generator) -> Array:
        """`count` independent draws of h, weighted: direction +1 removes the unit (P against Q), -1 adds it (Q against P).

        The orthogonal part comes from Q with probability `share`, else from Q moved along one response (one other bin stands out) or
        along the sum of all responses (all bins stand out a little); the weight, Q over this mixture, is at most 1 / share.
        """
        if len(self.gram) == 1:
            return np.full(count, self.gaussian_delta(epsilon))
        rest = (1 - share) / 2
        bins = len(self.gram)
        shift, tilt = self._shift(direction * epsilon), self._tilt(epsilon)
        pieces = []
        for j, many in enumerate(rng.multinomial(count, np.full(bins, 1 / bins))):
            for start in range(0, many, CHUNK):
                normals = rng.standard_normal((min(CHUNK, many - start), bins))
                component = rng.choice(3, size=len(normals), p=(share, rest, rest))
                normals[component == 1] += tilt * self.root[rng.integers(bins, size=int((component == 1).sum()))]
                normals[component == 2] += shift
                inner = normals * self.root.diagonal() if self.diagonal else normals @ self.root.T
                with np.errstate(over="ignore"):
                    loss = np.exp(tilt * inner - tilt**2 * self.gram.diagonal() / 2).mean(axis=1)
                    moved = np.exp(normals @ shift - shift @ shift / 2)
                weight = 1 / (share + rest * loss + rest * moved)
                pieces.append(weight * self._masses(j, inner, epsilon, direction))
        return np.concatenate(pieces)

    def _tilt(self, epsilon: float) -> float:
        """How far along one response the loss of its bin alone reaches epsilon for the whole mixture."""
        return min(0.5 + (epsilon + math.log(len(self.gram))) / float(self.gram.diagonal().mean()), MOST_TILT)

    def _shift(self, level: float) -> Array:
        """A move along the sum of the responses that brings the loss of a typical bin a good part of the way to `level`."""
        total = self.root.sum(axis=0)
        reach = float((self.root @ total).mean())
        size = max(-0.75, min(level, 1.0)) * TOGETHER / reach
        return np.asarray(size * total)

    def _masses(self, j: int, inner: Array, epsilon: float, direction: int) -> Array:
        norm = math.sqrt(float(self.gram[j, j]))
        along = self.gram[:, j] / norm
        across = inner - np.outer(inner[:, j] / norm, along) if not self.diagonal else inner
        if self.diagonal:
            across[:, j] = 0
        threshold = self._threshold(j, across, along, direction * epsilon)
        if direction > 0:
            return np.asarray(ndtr(norm - threshold) - np.exp(epsilon + log_ndtr(-threshold)))
        return np.asarray(ndtr(threshold) - np.exp(epsilon + log_ndtr(threshold - norm)))

    def _threshold(self, j: int, across: Array, along: Array, level: float) -> Array:
        """t with L(t) = level, L(t) = log mean over k of exp(across_k + along_k t - |m_k|^2 / 2), for each row.

        L is convex and increasing in t: Newton's steps from the right never pass t. Bins that do not overlap with j do not move.
        """
        bins, norm = len(along), along[j]
        moving = along > 0
        fixed = np.exp(across[:, ~moving] - self.gram.diagonal()[None, ~moving] / 2).sum(axis=1)
        offset = across[:, moving] - self.gram.diagonal()[None, moving] / 2
        slope = along[moving][None, :]
        total = bins * math.exp(level)
        t = np.full(len(across), (level + math.log(bins)) / norm + norm / 2)
        floor = -40.0
        for _ in range(ROUNDS):
            terms = np.exp(offset + slope * t[:, None])
            value = fixed + terms.sum(axis=1)
            step = value * np.log(value / total) / (terms * slope).sum(axis=1)
            moved = np.maximum(t - np.maximum(step, 0), floor)
            if np.abs(moved - t).max() < 1e-11:
                break
            t = moved
        return np.where(fixed >= total, -np.inf, t)


def upper_bound(draws: Array, most: float, variance: float, failure: float) -> float:
    """An upper confidence bound on the mean of independent draws that are at most `most`; see the head of this file.

    `variance` must come from other draws: it only chooses lam, so a bad value costs tightness, never validity.
    """
    count, log_odds = len(draws), math.log(1 / failure)
    if most <= 0:
        return 0.0
    lam = min(0.999 / most, math.sqrt(2 * log_odds / (count * max(variance, 1e-300))))
    low, high = max(0.0, float(draws.mean())), most  # a delta is never negative
    for _ in range(100):
        middle = (low + high) / 2
        if float(np.log1p(lam * (middle - draws)).sum()) >= log_odds:
            high = middle
        else:
            low = middle
    return min(high, most)


@dataclass(frozen=True)
class BinsCurve:
    """The privacy curve of one balls-in-bins release, both directions.

    Guarantees: with probability at least 1 - FAILURE over the Monte Carlo draws, `delta` and `epsilon` are upper bounds, and FAILURE is
    already added to delta: the release and its bill together satisfy what is stated.
    """

    event: BallsInBins
    samples: int = SAMPLES

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta at `epsilon`."""
        return min(1.0, max(e.bound for e in self.estimates(epsilon, seed=1, failure=FAILURE).values()) + FAILURE)

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon at `delta`: guessed from one set of draws, certified by another. Remembered."""
        return _epsilon(self, delta)

    def certified(self, delta: float) -> float:
        """As `epsilon`, computed now."""
        if delta <= 2 * FAILURE:
            return math.inf
        pair = Pair.of(self.event)
        if len(pair.gram) == 1:
            return self._unamplified(pair, delta)
        guess = _root(lambda e: self._quick(pair, e) - MARGIN * (delta - FAILURE), self._unamplified(pair, delta))
        if (factor := self._factor(pair, guess, delta)) > 1:
            return BinsCurve(self.event, self.samples * factor).certified(delta)
        for attempt in range(12):
            bounds = self.estimates(guess, seed=2 + attempt, failure=FAILURE / 2 ** (attempt + 1))
            if max(e.bound for e in bounds.values()) + FAILURE <= delta:
                return guess
            guess *= 1 + 0.004 * 2**attempt
        return self._unamplified(pair, delta)

    def epsilon_lower(self, delta: float) -> float | None:
        """None: the draws certify from above only."""
        return None

    def estimates(self, epsilon: float, *, seed: int, failure: float) -> dict[str, Estimate]:
        """delta at `epsilon` in both directions, from fresh draws; the bounds hold together with the stated failure."""
        pair = Pair.of(self.event)
        most = pair.gaussian_delta(epsilon)
        found = {}
        for name, direction in (("remove", 1), ("add", -1)):
            rng = np.random.default_rng([seed, direction % 3, self.samples])
            _, share, variance = _pilot(pair, epsilon, direction, self.samples, rng)
            draws = pair.draws(epsilon, direction, self.samples, share, rng)
            bound = upper_bound(draws, most / share, variance, failure / 2)
            found[name] = Estimate(float(draws.mean()), float(draws.std() / math.sqrt(len(draws))), bound)
        return found

    def _quick(self, pair: Pair, epsilon: float) -> float:
        """A first idea of the certified bound, from a part of the draws, always the same ones."""
        rngs = {direction: np.random.default_rng([0, direction % 3]) for direction in (1, -1)}
        return max(_pilot(pair, epsilon, direction, self.samples, rng)[0] for direction, rng in rngs.items())

    def _factor(self, pair: Pair, guess: float, delta: float) -> int:
        """More draws where the confidence would cost more than a tenth of delta."""
        cost = math.log(4 / FAILURE) * pair.gaussian_delta(guess) / self.samples
        return 4 if cost > 0.1 * delta and self.samples < MOST_FACTOR * SAMPLES else 1

    @staticmethod
    def _unamplified(pair: Pair, delta: float) -> float:
        return _root(lambda e: pair.gaussian_delta(e) - delta, None)


@lru_cache(maxsize=64)
def _epsilon(curve: BinsCurve, delta: float) -> float:
    return curve.certified(delta)


def _pilot(pair: Pair, epsilon: float, direction: int, samples: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """(likely bound, share, variance) of the best share for a run of `samples` draws, from an eighth as many draws."""
    odds, most = math.log(4 / FAILURE), pair.gaussian_delta(epsilon)
    options = []
    for share in SHARES:
        draws = pair.draws(epsilon, direction, max(1000, samples // (8 * len(SHARES))), share, rng)
        variance = float(draws.var())
        likely = float(draws.mean()) + math.sqrt(2 * odds * variance / samples) + odds * most / share / samples
        options.append((likely, share, variance))
    return min(options)


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

    def why_not(self, event: object, adjacency: Adjacency) -> str | None:
        """None for one balls-in-bins release under add-or-remove or zero-out."""
        leaves = flatten(event)  # type: ignore[arg-type]
        if len(leaves) != 1 or leaves[0][1] != 1 or not isinstance(leaves[0][0], BallsInBins):
            return (
                "the Monte Carlo accountant reads exactly one balls-in-bins release; use --accountant tight for everything else"
            )
        if adjacency is Adjacency.REPLACE_ONE:
            return "the dominating pair of balls-in-bins is proven for add-or-remove-one and zero-out"
        return None

    def curve(self, event: object, adjacency: Adjacency) -> Curve:
        """The curve of the release."""
        if (problem := self.why_not(event, adjacency)) is not None:
            raise Unsupported(f"this event by Monte Carlo under {adjacency.value}", problem)
        leaf = flatten(event)[0][0]  # type: ignore[arg-type]
        assert isinstance(leaf, BallsInBins)
        return BinsCurve(leaf, check.integer("samples", self.samples, least=1000))
