"""Canary users in one run: how far the angles between their updates and the model's movement are
from chance.

A canary user sends a random direction, clipped as everybody's update is. In many dimensions the
cosine between a random direction that was not sent and the movement of the model is N(0, 1/d);
those of canaries that were sent are larger. Epsilon is estimated as that of telling a Gaussian with
their mean and deviation from N(0, 1/d). It is an estimate of what this attack learns and no bound:
lower bounds come from the coins of the canaries (:mod:`dpfy.audit.one_run`). Reference: Andrew,
Kairouz, Oh, Oprea, McMahan & Suriyakumar 2023, algorithms 2, 3.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfy.core import check
from dpfy.core.codec import number
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

WIDE, POINTS = 12.0, 40_001
MOST = 200.0
"""Beyond this epsilon the two laws are told apart for sure."""


Law = tuple[float, float]
"""Mean and standard deviation of a Gaussian."""


@dataclass(frozen=True)
class CosineEstimate:
    """What cosines of canaries say: an estimate of epsilon at `delta`, and the two Gaussian laws
    that it was made of.
    """

    epsilon: float
    delta: float
    canaries: int
    sent: Law
    unsent: Law

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self) | {"epsilon": number(self.epsilon), "kind": "an estimate, no bound"}


def estimate(cosines: ArrayLike, unsent: Law, delta: float) -> CosineEstimate:
    """From the cosines of canaries that were sent, and the law of those that were not."""
    sent = fitted(cosines)
    found = told_apart(sent, unsent, check.inside_unit("delta", delta))
    return CosineEstimate(found, delta, np.size(cosines), sent, unsent)


def by_chance(dimension: int) -> Law:
    """Of the cosine between a random direction and any other one, in many dimensions."""
    return 0.0, 1 / math.sqrt(check.integer("dimension", dimension, least=2))


def fitted(cosines: ArrayLike) -> Law:
    """The Gaussian with the mean and deviation of a sample: of canaries that were not sent, where
    no law is known.
    """
    seen = np.asarray(cosines, dtype=np.float64).reshape(-1)
    if len(seen) < 3 or not np.isfinite(seen).all():
        raise InvalidInput("cosines", f"{len(seen)} values", "must be at least 3 finite numbers")
    return float(seen.mean()), max(float(seen.std(ddof=1)), 1e-12)


def told_apart(one: Law, other: Law, delta: float) -> float:
    """The least epsilon with which two Gaussians are indistinguishable at `delta`, by sums over a
    fine grid.
    """
    ends = [mean + sign * WIDE * deviation for mean, deviation in (one, other) for sign in (-1, 1)]
    at = np.linspace(min(ends), max(ends), POINTS)
    logs = [
        -0.5 * ((at - m) / s) ** 2 - math.log(s * math.sqrt(2 * math.pi)) for m, s in (one, other)
    ]
    step, low, high = float(at[1] - at[0]), 0.0, MOST
    if _left(logs, 0.0, step) <= delta:
        return 0.0
    if _left(logs, high, step) > delta:
        return math.inf
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _left(logs, middle, step) > delta else (low, middle)
    return high


def _left(logs: list[NDArray[np.float64]], epsilon: float, step: float) -> float:
    """Delta at an epsilon, the larger of both directions."""
    found = []
    for one, other in (logs, logs[::-1]):
        beyond = np.minimum(epsilon + other - one, 0.0)
        found.append(float((np.exp(one) * -np.expm1(beyond)).sum()) * step)
    return max(found)
