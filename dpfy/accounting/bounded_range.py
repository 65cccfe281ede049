"""Bounded range: what a mechanism reveals whose privacy losses lie in an interval of a given length (Dong, Durfee & Rogers 2020).

For two neighbours the losses lie between t - epsilon and t for some t in [0, epsilon]; the worst mechanism of such a t has these two
losses alone, with P(t) = (e^epsilon - e^t) / (e^epsilon - 1). Under adaptive composition t may be another one at every step, chosen with
sight of all outputs; a bound for one fixed t (their optimum for mechanisms fixed in advance) does not hold there, and is not used.
"""

from __future__ import annotations

import math

import numpy as np

from dpfy.accounting.losses import Atoms
from dpfy.accounting.moments import Array

POINTS = 64
"""Grid points in `epsilon`, in one direction."""


def two_losses(epsilon: float, t: float) -> Atoms:
    """The worst mechanism with losses between t - epsilon and t: an exponential mechanism with two outcomes attains it."""
    high = math.expm1(t - epsilon) / math.expm1(-epsilon)
    return Atoms((t, t - epsilon), (high, 1 - high))


def dominating(epsilon: float) -> Atoms:
    """The pair that dominates every mechanism of range `epsilon`, on a grid.

    At e^g the worst t gives delta = (e^(epsilon/2) - e^(g/2))^2 / (e^epsilon - 1). That is convex in e^g, so that it is the curve of a
    pair (Zhu, Dong & Wang 2022): its loss has density proportional to e^(g/2) between -epsilon and epsilon. Lines between the points
    of the curve at the grid lie above it: the pair with these atoms dominates.
    """
    h = epsilon / POINTS
    losses = h * np.arange(-POINTS, POINTS + 1)
    masses = np.exp((losses - epsilon) / 2) * 2 * math.tanh(h / 4) / -math.expm1(-epsilon)
    masses[[0, -1]] /= 2
    return Atoms(tuple(losses.tolist()), tuple(masses.tolist()))


def divergences(epsilon: float, alphas: Array) -> Array:
    """Rényi divergences: the largest over t, in closed form. With x = e^t the moment is (A x^(a-1) - B x^a) / (e^epsilon - 1)."""
    a = alphas
    fall = -np.expm1(-(a - 1) * epsilon)  # B
    # A over B and over e^epsilon, so that nothing overflows.
    ratio = -np.expm1(-a * epsilon) / fall
    t = np.clip(np.log((a - 1) / a) + epsilon + np.log(ratio), 0.0, epsilon)
    high, low = np.expm1(t - epsilon) / math.expm1(-epsilon), np.expm1(-t) * np.exp(t - epsilon) / math.expm1(-epsilon)
    with np.errstate(divide="ignore"):
        logs = np.logaddexp(np.log(high) + (a - 1) * t, np.log(np.maximum(low, 0.0)) + (a - 1) * (t - epsilon))
    return np.asarray(np.clip(logs / (a - 1) * (1 + 1e-12) + 1e-15 * a / (a - 1), 0.0, epsilon))
