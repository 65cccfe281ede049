"""One-parameter families of trade-off curves: what an attacker's success rate says about epsilon,
if the leak has a known shape.

`strength` orders a family: more strength is less privacy. An attacker's rates exclude weak members;
the weakest member that is left gives the lower bound on epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from dpfy.core import guarantee
from dpfy.core.errors import DpfyError
from dpfy.core.guarantee import Curve

Tradeoff = Callable[[float], float]
"""False-positive rate to the smallest false-negative rate that any attacker can have."""


class TradeoffFamily(Protocol):
    """Trade-off curves ordered by strength."""

    @property
    def name(self) -> str:
        """In words, for reports."""

    @property
    def claim(self) -> float:
        """The strength that was claimed."""

    @property
    def precision(self) -> float:
        """How finely strengths are searched, relative: a lower bound loses at most so much."""

    def tradeoff(self, strength: float) -> Tradeoff:
        """A curve that no attacker on this member can get below."""

    def advantage(self, strength: float) -> float:
        """The largest true-positive minus false-positive rate: the total variation distance."""

    def epsilon(self, strength: float, delta: float) -> float:
        """Epsilon of this member at `delta`."""


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of a Gaussian mechanism with ratio `mu` of sensitivity to noise (Balle & Wang 2018)."""
    from scipy.special import log_ndtr

    if mu <= 0:
        return 0.0
    first, second = (
        float(log_ndtr(mu / 2 - epsilon / mu)),
        epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)),
    )
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism at `delta`, rounded down: it is used in lower bounds."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return low


@dataclass(frozen=True)
class GaussianFamily:
    """Gaussian differential privacy (Dong, Roth & Su 2022): strength is mu; `claim` is the mu that
    was claimed.
    """

    claim: float = 1.0
    name: str = "gaussian"
    precision: float = 1e-3

    def tradeoff(self, strength: float) -> Tradeoff:
        """Phi(Phi^-1(1 - fpr) - mu)."""
        from scipy.special import ndtr, ndtri

        return lambda fpr: (
            float(ndtr(ndtri(1 - fpr) - strength)) if 0 < fpr < 1 else float(fpr <= 0)
        )

    def advantage(self, strength: float) -> float:
        """2 Phi(mu / 2) - 1."""
        return math.erf(strength / 2 / math.sqrt(2))

    def epsilon(self, strength: float, delta: float) -> float:
        """By the exact curve."""
        return gaussian_epsilon(strength, delta)


@dataclass(frozen=True)
class ClaimedFamily:
    """The claimed mechanism with its noise divided by `strength`: strength 1 is the claim itself.

    `at` gives the (epsilon, delta) curve of the mechanism at a strength; the trade-off curve is the
    envelope of its lines.
    """

    at: Callable[[float], Curve]
    claim: float = 1.0
    name: str = "claimed mechanism, rescaled"
    precision: float = 1e-2

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", lru_cache(maxsize=256)(self.at))
        object.__setattr__(self, "tradeoff", lru_cache(maxsize=256)(self.tradeoff))

    def tradeoff(self, strength: float) -> Tradeoff:
        """The largest of the lines that the curve excludes: never above the true trade-off."""
        import numpy as np

        heights, slopes = (
            np.array(part) for part in guarantee.of_curve(self.at(strength).delta).lines
        )
        return lambda fpr: float((heights - slopes * fpr).max())

    def advantage(self, strength: float) -> float:
        """delta at epsilon 0."""
        return self.at(strength).delta(0.0)

    def epsilon(self, strength: float, delta: float) -> float:
        """By the curve at this strength."""
        return self.at(strength).epsilon(delta)


def weakest(excluded: Callable[[float], bool], start: float, *, precision: float = 1e-3) -> float:
    """The largest strength found that `excluded` still excludes; 0 if it excludes none.

    Guarantees: the returned strength is excluded (or 0), so that a bound built on it errs to the
    low side. A member so strong that nobody can compute its curve is not excluded.
    """
    low, high = 0.0, start
    while _excludes(excluded, high):
        low, high = high, 2 * high
        if high > 1e6 * start:
            return low
    while (
        high - low > precision * max(high, 0.1 * start) and high > 1e-2 * start
    ):  # weaker than that is nothing
        middle = (low + high) / 2
        low, high = (middle, high) if _excludes(excluded, middle) else (low, middle)
    return low


def _excludes(excluded: Callable[[float], bool], strength: float) -> bool:
    try:
        return excluded(strength)
    except DpfyError:
        return False
