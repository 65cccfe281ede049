"""What a guarantee means: the attacker's odds, the tier of the guide, in words that a reviewer
understands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpfy.core import check, guarantee
from dpfy.core.errors import InvalidInput
from dpfy.core.guarantee import Curve


def true_positive_rate(curve: Curve, false_positive_rate: float) -> float:
    """The highest true-positive rate that any membership attack can reach at a false-positive
    rate.
    """
    return guarantee.of_curve(curve.delta).hit_rate(
        check.fraction("false_positive_rate", false_positive_rate)
    )


def advantage(curve: Curve) -> float:
    """The largest difference of true- and false-positive rate: the total variation distance, delta
    at epsilon 0.
    """
    return curve.delta(0.0)


READ = 513
"""Epsilons of which the best is taken."""
STEEPEST = 40.0
"""Miss rates far below e^-STEEPEST are not distinguished."""


def _lowest(value: Callable[[float], float], high: float) -> float:
    """About the least value of a unimodal function on [0, high], by golden section."""
    ratio, low, far = (math.sqrt(5) - 1) / 2, 0.0, high
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    first, second = value(left), value(right)
    best = min(first, second)
    while high - low > 3e-3 * (1 + far):
        if first <= second:
            high, right, second = right, left, first
            left = high - ratio * (high - low)
            first = value(left)
        else:
            low, left, first = left, right, second
            right = low + ratio * (high - low)
            second = value(right)
        best = min(best, first, second)
    return best


def _least_of_many(deltas: Callable[..., Any], rate: float) -> float:
    """The least bound on a true-positive rate of many, for a curve that tells many deltas at once."""
    import numpy as np

    epsilons = np.linspace(0.0, -math.log(rate), READ)
    found = float((deltas(epsilons, 1e-4 * rate) + np.exp(epsilons) * rate).min())
    if found + rate > 1:  # to the right of where both error rates are equal
        epsilons = np.linspace(0.0, STEEPEST, READ)
        hit = 1 - np.exp(-epsilons) * (1 - deltas(epsilons) - rate)
        found = min(found, float(hit.min()))
    return found


@dataclass(frozen=True)
class AttackTarget:
    """What no membership attack may exceed: its advantage (true- minus false-positive rate), or with
    `at` its true-positive rate at that false-positive rate.

    A reconstruction that succeeds is a test whose false-positive rate is the chance of guessing
    right (Balle, Cherubin & Hayes 2022), so that a limit for it is one at that rate.

    Args:
        success: The limit, between 0 and 1; with `at` above it, as guessing reaches that much.
        at: The false-positive rate; None for a limit of the advantage.

    Raises:
        InvalidInput: A value does not fit its rule.

    Example:
        >>> from dpfy import accounting
        >>> from dpfy.accounting.interpretation import AttackTarget
        >>> from dpfy.core import events
        >>> target = AttackTarget(0.1)
        >>> noise = accounting.calibrate.noise_for_risk(events.Gaussian, target)
        >>> round(noise, 2)
        3.98
    """

    success: float
    at: float | None = None

    def __post_init__(self) -> None:
        check.inside_unit("success", self.success)
        if self.at is not None and check.inside_unit("at", self.at) >= self.success:
            raise InvalidInput(
                "success", self.success, f"must be above the false-positive rate ({self.at:g})"
            )

    def reached(self, curve: Curve) -> float:
        """An upper bound on what an attack reaches, less what guessing reaches: every epsilon gives
        one, and the least of many is told.
        """
        if self.at is None:
            return advantage(curve)
        rate = self.at
        if (many := getattr(curve, "deltas", None)) is not None:
            return max(0.0, min(1.0, _least_of_many(many, rate)) - rate)
        found = _lowest(lambda e: curve.delta(e) + math.exp(e) * rate, -math.log(rate))
        if found + rate > 1:  # to the right of where both error rates are equal
            miss = _lowest(lambda e: -math.exp(-e) * (1 - curve.delta(e) - rate), STEEPEST)
            found = min(found, 1 + miss)
        return max(0.0, min(1.0, found) - rate)

    @property
    def limit(self) -> float:
        """The limit, less what guessing reaches."""
        return self.success - (self.at or 0.0)


def tier(epsilon: float) -> int:
    """The guide's tier (Ponomareva et al. 2023, section 5.2.1): 1 up to epsilon 1, 2 up to 10, 3
    above. 4 is ours: no finite epsilon.
    """
    check.positive_or_infinite("epsilon + 1", epsilon + 1)
    return 1 if epsilon <= 1 else 2 if epsilon <= 10 else 3 if epsilon < math.inf else 4


TIERS = {
    1: "strong formal guarantee",
    2: "reasonable guarantee",
    3: "weak formal guarantee",
    4: "no guarantee",
}


@dataclass(frozen=True)
class Meaning:
    """A guarantee in an attacker's terms."""

    epsilon: float
    delta: float
    tier: int
    advantage: float
    tpr_at_1_percent: float
    tpr_at_1_permille: float
    reconstruction_of_1_in_1000: float
    """A reconstruction that succeeds is a test whose false-positive rate is that of guessing
    (Balle, Cherubin & Hayes 2022).
    """

    def sentences(self) -> list[str]:
        """The same in words."""
        return [
            f"Tier {self.tier}: {TIERS[self.tier]} (epsilon {self.epsilon:.3g} at delta "
            f"{self.delta:g}).",
            f"Knowing who trained the model or not, the best attacker is right at most "
            f"{50 + 50 * self.advantage:.1f}% of the time "
            f"(50% is guessing).",
            f"Accusing 1% of outsiders wrongly, an attacker finds at most "
            f"{self.tpr_at_1_percent:.1%} of the members; "
            f"accusing 0.1%, at most {self.tpr_at_1_permille:.2%}.",
            f"A record that could be guessed once in 1000 tries can be reconstructed with "
            f"probability at most "
            f"{self.reconstruction_of_1_in_1000:.2%}.",
        ]


def meaning(curve: Curve, delta: float) -> Meaning:
    """What a curve means at `delta`. Guarantees: every number is an upper bound on what any
    attacker can reach.
    """
    epsilon, attacks = (
        curve.epsilon(check.inside_unit("delta", delta)),
        guarantee.of_curve(curve.delta),
    )
    permille = attacks.hit_rate(1e-3)
    return Meaning(
        epsilon, delta, tier(epsilon), advantage(curve), attacks.hit_rate(1e-2), permille, permille
    )
