"""The whole law of what a mechanism releases: its own code, run once for every outcome of every
draw that it asks for.

Samplers are replaced by branches; a path through all branches of a release has a probability, a
product of fixed-point numbers of 160 bits whose exponentials are certified enclosures. What lies
beyond the reach of a branch (tails of infinite laws) is counted as missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction
from functools import cache

import numpy as np

from dpfy import accounting
from dpfy.core import events
from dpfy.mechanisms.exact import exp_enclosure

DIGITS = 160
ONE = 1 << DIGITS
DELTAS = np.logspace(-7, -0.05, 50)


def weight(gamma: Fraction) -> int:
    """exp(-gamma) in fixed point."""
    return exp_enclosure(gamma, DIGITS)[0]


def shares(weights: list[int]) -> list[int]:
    """Weights that add up to one."""
    total = sum(weights)
    return [w * ONE // total for w in weights]


class Again(Exception):
    """A draw by rejection begins again: what follows has the law of the first trial."""


class Branches:
    """Stands for the samplers: each draw takes the next branch, until all were taken."""

    def __init__(self, reach: float = 25.0) -> None:
        self.reach, self.path, self.sizes, self.depth, self.chance = reach, [], [], 0, ONE
        self.tables = {}

    def branch(self, options):
        """One of (value, share)."""
        if self.depth == len(self.path):
            self.path.append(0)
            self.sizes.append(len(options))
        value, share = options[self.path[self.depth]]
        self.depth += 1
        self.chance = self.chance * share >> DIGITS
        return value

    def law(self, run) -> dict:
        """Every outcome with its probability, given that no trial was thrown away."""
        found, again = defaultdict(int), 0
        while True:
            self.depth, self.chance, self.trials = 0, ONE, 0
            try:
                outcome = run()
                found[outcome] += self.chance
            except Again:
                again += self.chance
            while self.path and self.path[-1] + 1 == self.sizes[-1]:
                self.path.pop()
                self.sizes.pop()
            if not self.path:
                return {outcome: chance * ONE // (ONE - again) for outcome, chance in found.items()}
            self.path[-1] += 1

    def integers(self, scale, square: bool):
        """Values and shares of an integer law, far out."""
        key = (Fraction(scale), square)
        if key not in self.tables:
            rate = 1 / (2 * key[0] ** 2) if square else 1 / key[0]
            most = math.ceil(float(key[0]) * (math.sqrt(2 * self.reach) if square else self.reach))
            far = 4 * most + 4
            weights = [weight(rate * (k * k if square else abs(k))) for k in range(-far, far + 1)]
            options = list(zip(range(-far, far + 1), shares(weights), strict=True))
            self.tables[key] = options[far - most : far + most + 1]
        return self.tables[key]

    def laplace(self, count, scale, bits):
        return np.array([self.branch(self.integers(scale, False)) for _ in range(count)], np.int64)

    def gaussian(self, count, sigma, bits):
        return np.array([self.branch(self.integers(sigma, True)) for _ in range(count)], np.int64)

    def choose(self, exponents, bits, denominator=1):
        least = min(int(e) for e in exponents)
        weights = [weight(Fraction(int(e) - least, denominator)) for e in exponents]
        return self.branch(list(enumerate(shares(weights))))

    def permute_and_flip(self, exponents, bits, denominator=1):
        """By its definition: candidates in a random order, each with a coin."""
        least, left = min(int(e) for e in exponents), list(range(len(exponents)))
        heads = {i: weight(Fraction(int(exponents[i]) - least, denominator)) for i in left}
        while True:
            i = self.branch([(i, ONE // len(left)) for i in left])
            if heads[i] == ONE or self.branch([(True, heads[i]), (False, ONE - heads[i])]):
                return i
            left.remove(i)

    def coins(self, count, p, bits):
        one = int(p * ONE)
        return np.array(
            [self.branch([(True, one), (False, ONE - one)]) for _ in range(count)], bool
        )

    def uniform(self, count, n, bits):
        return np.array(
            [self.branch([(v, ONE // n) for v in range(n)]) for _ in range(count)], np.int64
        )

    def below(self, n, bits):
        return self.branch([(v, ONE // n) for v in range(n)])

    def bernoulli(self, p, bits):
        return self.branch([(True, int(p * ONE)), (False, ONE - int(p * ONE))]) if p < 1 else True

    def geometric(self, gamma, bits):
        """A whole number by its rate, up to the reach; once in a run: it begins a trial."""
        self.trials += 1
        if self.trials > 1:
            raise Again
        key = (gamma, "geometric")
        if key not in self.tables:
            first, ratio = ONE - weight(gamma), weight(gamma)
            options = []
            for k in range(math.ceil(self.reach / float(gamma)) + 1):
                options.append((k, first))
                first = first * ratio >> DIGITS
            self.tables[key] = options
        return self.branch(self.tables[key])


class LaplaceCurve:
    """The exact curve of real Laplace noise, delta = 1 - exp((epsilon - 1/b) / 2): what accounting
    bounds from above, and much faster.
    """

    def __init__(self, event) -> None:
        self.pure = 1 / event.noise_multiplier

    def epsilon(self, delta: float) -> float:
        return max(0.0, self.pure + 2 * math.log1p(-delta))


def hockey_stick(p: dict, q: dict, epsilon: float) -> float:
    """The sum of (P - e^epsilon Q) where it is positive, rounded up; outcomes that are missing from
    Q count whole.
    """
    low = ONE * ONE // exp_enclosure(Fraction(epsilon), DIGITS)[1]  # e^epsilon, rounded down
    total = sum(
        max(0, chance - (low * q.get(outcome, 0) >> DIGITS)) for outcome, chance in p.items()
    )
    return total / ONE


@cache
def billed(event, adjacency, accountant) -> list[float]:
    """The epsilons of an event at the deltas."""
    if isinstance(event, events.Laplace):
        return [LaplaceCurve(event).epsilon(float(delta)) for delta in DELTAS]
    curve = accounting.curve(event, adjacency=adjacency, accountant=accountant)
    return [curve.epsilon(float(delta)) for delta in DELTAS]


def check(laws: list[dict], event, adjacency, accountant="tight") -> float:
    """Every pair of laws, in both directions, at 50 deltas against the curve that is billed.
    Returns the largest delta at epsilon 0.

    Where one law ends, the other, moved by a few places, still has somewhat more than what is
    missing of both.
    """
    missing = 100 * max(1 - sum(law.values()) / ONE for law in laws) + 1e-12
    assert missing < 1e-7, missing
    pairs = [(p, q) for p in laws for q in laws if p is not q]
    for delta, epsilon in zip(DELTAS, billed(event, adjacency, accountant), strict=True):
        for p, q in pairs if math.isfinite(epsilon) else ():
            found = hockey_stick(p, q, epsilon)
            assert found <= delta + missing, (event, epsilon, delta, found)
    return max(hockey_stick(p, q, 0.0) for p, q in pairs)
