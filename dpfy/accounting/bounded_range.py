"""Bounded range: what mechanisms reveal whose privacy losses lie in an interval of a given length
(Dong, Durfee & Rogers 2020).

For two neighbours the losses lie between t - epsilon and t for some t in [0, epsilon]; the worst
mechanism of such a t has these two losses alone, with P(t) = (e^epsilon - e^t) / (e^epsilon - 1).
Under adaptive composition t may be another one at every step, chosen with sight of all outputs.
With H_0(g) = (1 - g)+ the most that j steps can reach is, with x = e^t and E = e^epsilon,

    H_j(g) = max over t of  P(t) H_{j-1}(g / x) + (1 - P(t)) H_{j-1}(g E / x),

delta at epsilon log g. (The optimum for mechanisms fixed in advance has one t for all steps; it is
smaller, and is not used.) The maximum is computed here for up to BLOCK steps, on a grid of g, from
above: between the grid's points both losses are split between neighbouring points so that their
masses stay, which dominates. More steps are blocks, each the pair of its own H.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpfy.accounting.moments import ROUNDING, Array
from dpfy.accounting.profiles import Points, dominating
from dpfy.accounting.tight.losses import Atoms

BLOCK = 32
"""Steps of one block. Larger ones would gain 1% of epsilon after hundreds of steps."""
POINTS = 1024
"""Grid points of one direction; H of few steps has more of them in `epsilon`."""
LEAST, MOST = 1e-5, 50.0
"""Ranges of which H is computed, and the largest sum of those in a block. Others are charged as what
they are too, epsilon-private: rounding would show, or nothing be gained.
"""


def block(epsilon: float) -> int:
    """How many steps of this range make a block: a power of two, 0 where none is computed."""
    if not LEAST <= epsilon <= MOST:
        return 0
    return 1 << (min(BLOCK, int(MOST / epsilon)).bit_length() - 1)


def attained(epsilon: float, steps: int = 1) -> Atoms:
    """Exponential mechanisms with two outcomes and losses of half the range either way, so many of
    them: a binomial loss.
    """
    high, low = 1 / (1 + math.exp(-epsilon / 2)), 1 / (1 + math.exp(min(epsilon / 2, 700.0)))
    chances = [math.comb(steps, k) * high ** (steps - k) * low**k for k in range(steps + 1)]
    return Atoms(tuple(epsilon * (steps / 2 - k) for k in range(steps + 1)), tuple(chances))


@lru_cache(maxsize=64)
def composed(epsilon: float, steps: int) -> Atoms:
    """The loss of a pair that dominates every adaptive composition of `steps` mechanisms of range
    `epsilon`, at most a block.
    """
    most = 1 << (steps - 1).bit_length()
    known = _reached(epsilon, most)[steps - 1]
    curve = Points(epsilon * most / POINTS * np.arange(len(known)), known)
    return dominating(curve, curve)


@lru_cache(maxsize=64)
def _reached(epsilon: float, steps: int) -> tuple[Array, ...]:
    """H_1, H_2, ... at epsilons 0, h, 2 h, ... up to where it ends, rounded up."""
    grid = POINTS // steps
    h, down, found = epsilon / grid, np.arange(grid, 0, -1), [_first(epsilon, grid)]
    for _ in range(1, steps):
        before = np.concatenate([found[-1], np.zeros(grid)])
        left = (
            -np.expm1(-h * down) + np.exp(-h * down) * before[down]
        )  # H(1/g) = 1 - 1/g + H(g) / g: both directions are alike
        found.append(_step(epsilon, grid, np.concatenate([left, before, np.zeros(grid + 1)])))
    return tuple(found)


def _first(epsilon: float, grid: int) -> Array:
    """H_1 on the grid, rounded up: for g in [1, E] the maximum is at x = sqrt(g E), and is (sqrt(E)
    - sqrt(g))^2 / (E - 1).
    """
    at = epsilon / grid * np.arange(grid + 1)
    found = np.exp(at) * np.expm1(np.maximum(epsilon - at, 0.0) / 2) ** 2 / math.expm1(epsilon)
    return np.append(np.minimum(found[:-1] * (1 + 2.0**-40), 1.0), 0.0)


def _step(epsilon: float, grid: int, before: Array) -> Array:
    """H_j from H_{j-1}, given from one range below 0 on.

    In a cell of the grid H is a line, the P-mass above the cell minus g times the Q-mass above it.
    With (p, q) those of the cell of g / x and (p', q') those of g E / x, the value to be maximised
    is p - g q' - ((x - 1) (p - p') + (E / x - 1) g (q - q')) / (E - 1).
    """
    h, big = epsilon / grid, math.exp(epsilon)
    above = (before[:-1] - before[1:]) / math.expm1(
        h
    )  # Q-mass above the cell, times the cell's left end
    mass = before[:-1] + above
    error = 8 * ROUNDING * (mass + before[:-1] / math.expm1(h))
    here = np.arange(len(before) - 2 * grid - 1)  # the grid points of H_j, from epsilon 0
    best = np.zeros(len(here))
    for i in range(grid):
        low, high = math.exp(h * i), math.exp(h * (i + 1))
        at = here - i - 1 + grid
        far = at + grid
        rest = high / big * above[far]
        p, q = np.maximum(mass[at] - mass[far], 0.0), np.maximum(high * above[at] - rest, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.clip(np.where(p > 0, np.sqrt(big * q / p), high), low, high)
        value = mass[at] - rest - (x - 1) / (big - 1) * p - (big / x - 1) / (big - 1) * q
        best = np.maximum(best, value + error[at])
    return np.minimum(best, 1.0)


def divergences(epsilon: float, alphas: Array) -> Array:
    """Rényi divergences: the largest over t, in closed form. With x = e^t the moment is (A x^(a-1)
    - B x^a) / (e^epsilon - 1).
    """
    a = alphas
    # A / B, divided by e^epsilon so that nothing overflows.
    ratio = np.expm1(-a * epsilon) / np.expm1(-(a - 1) * epsilon)
    t = np.clip(np.log((a - 1) / a) + epsilon + np.log(ratio), 0.0, epsilon)
    high, low = (
        np.expm1(t - epsilon) / math.expm1(-epsilon),
        np.expm1(-t) * np.exp(t - epsilon) / math.expm1(-epsilon),
    )
    with np.errstate(divide="ignore"):
        logs = np.logaddexp(
            np.log(high) + (a - 1) * t, np.log(np.maximum(low, 0.0)) + (a - 1) * (t - epsilon)
        )
    return np.asarray(np.clip(logs / (a - 1) * (1 + 1e-12) + 1e-15 * a / (a - 1), 0.0, epsilon))
