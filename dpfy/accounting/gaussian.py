"""The Gaussian mechanism, exactly, and the rules for choosing its noise: classic, the blog's,
Pei's, analytic.

mu is sensitivity over standard deviation. Composition adds squares: T releases of mu are one of mu
* sqrt(T) (Dong, Roth & Su 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dpfy.core import check
from dpfy.core.errors import InvalidInput

_UP = 1 + 1e-13


def log_delta(mu: float, epsilon: float) -> float:
    """log of Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), the exact delta (Balle & Wang 2018,
    Theorem 8).
    """
    from scipy.special import log_ndtr

    if mu == 0:
        return -math.inf
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    if second >= first - 1e-4:  # nearly equal: integrate the slope instead of subtracting
        return _log_delta_by_series(mu, epsilon)
    return first + math.log(-math.expm1(second - first))


@lru_cache(maxsize=1)
def _legendre() -> tuple[Any, Any]:
    """Nodes and weights of the quadrature, found once."""
    from numpy.polynomial.legendre import leggauss

    return leggauss(200)


def _log_delta_by_series(mu: float, epsilon: float) -> float:
    """The same by quadrature of E[(1 - exp(eps - L))+], L ~ N(mu^2/2, mu^2): a sum of positive
    terms, so nothing cancels.
    """
    import numpy as np

    nodes, weights = _legendre()
    low = (epsilon - mu**2 / 2) / mu
    span = 40.0 / max(1.0, low) if low > 0 else 40.0 - min(low, 0.0)
    z = low + span * (nodes + 1) / 2
    log_terms = (
        np.log(-np.expm1(-mu * (z - low)))
        - z**2 / 2
        + np.log(weights * span / 2)
        - 0.5 * math.log(2 * math.pi)
    )
    top = float(log_terms.max())
    return top + math.log(float(np.exp(log_terms - top).sum()))


def delta(mu: float, epsilon: float) -> float:
    """Exact delta of a Gaussian mechanism at `epsilon`."""
    return min(1.0, math.exp(log_delta(mu, epsilon)))


def epsilon(mu: float, delta: float) -> float:
    """Exact epsilon at `delta`, rounded up. Zero where delta(0) is already below."""
    check.inside_unit("delta", delta)
    target = math.log(delta)
    if mu == 0 or log_delta(mu, 0.0) <= target:
        return 0.0
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(-2 * target) + 1e-9
    while log_delta(mu, high) > target:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if log_delta(mu, middle) > target else (low, middle)
    return high * _UP


@dataclass(frozen=True)
class GaussianCurve:
    """The exact curve of a Gaussian mechanism with ratio `mu` of sensitivity to noise."""

    mu: float

    def epsilon(self, delta: float) -> float:
        """Exact, rounded up."""
        return epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        """Exact, rounded up."""
        return min(1.0, delta(self.mu, check.nonnegative("epsilon", epsilon)) * (1 + 1e-9))

    def epsilon_lower(self, delta: float) -> float | None:
        """Exact, rounded down."""
        return epsilon(self.mu, delta) / _UP * (1 - 1e-12)


def sigma_classic(target: float, delta: float) -> float:
    """Dwork & Roth 2014, Theorem A.1: sqrt(2 ln(1.25/delta)) / epsilon, proven for epsilon below 1
    only.
    """
    if check.positive("epsilon", target) >= 1:
        raise InvalidInput(
            "epsilon", target, "the classic rule is proven below 1 only; use the analytic rule"
        )
    return math.sqrt(2 * math.log(1.25 / check.inside_unit("delta", delta))) / target


def sigma_blog(target: float, delta: float) -> float:
    """The rule of the building-blocks text: sqrt(2 ln(1/delta) + 2 epsilon) / epsilon, any epsilon
    (by zCDP, Bun & Steinke 2016).
    """
    return math.sqrt(
        2 * math.log(1 / check.inside_unit("delta", delta)) + 2 * target
    ) / check.positive("epsilon", target)


def sigma_pei(target: float, delta: float) -> float:
    """Pei's refinement: the smallest of the four sufficient bounds of the building-blocks text."""
    check.positive("epsilon", target)
    check.inside_unit("delta", delta)
    return min(_pei_terms(target, delta))


def _pei_terms(target: float, delta: float) -> tuple[float, ...]:
    """The four bounds, each sufficient by itself."""
    log_two_pi = -math.log(2 * math.pi) - 2 * math.log(delta)
    return (
        math.sqrt(2 * math.log(1 / delta)) / target + 2 * target**-1.5,
        (max(1.0, math.sqrt(max(log_two_pi, 0.0))) + 2 * target**-0.5) / target,
        math.sqrt(target - 2 * math.log(delta)) / target,
        max(math.sqrt(1 + target), math.sqrt(max(target + log_two_pi, 0.0))) / target,
    )


def sigma_analytic(target: float, delta: float) -> float:
    """The least noise: the analytic rule of Balle & Wang 2018, rounded up."""
    check.positive("epsilon", target)
    goal = math.log(check.inside_unit("delta", delta))
    low, high = 1e-6, 1e-6
    while log_delta(1 / high, target) > goal:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if log_delta(1 / middle, target) > goal else (low, middle)
    return high * _UP


def least_coordinates(target: float, delta: float) -> int:
    """From how many coordinates on Gaussian noise has less variance than Laplace noise at `target`
    (and `delta`).

    A unit adds at most 1 to each of d coordinates, so d in the L1 norm and sqrt(d) in the L2 norm:
    Laplace noise has the variance 2 (d / epsilon)^2 in each, Gaussian noise d sigma^2.
    """
    return (
        math.floor((check.positive("epsilon", target) * sigma_analytic(target, delta)) ** 2 / 2) + 1
    )
