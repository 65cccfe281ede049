"""What a guarantee means: the attacker's odds, the tier of the guide, in words that a reviewer understands."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfy.core import check
from dpfy.core.guarantee import Curve

GRID = (0.0, *(0.02 * 1.25**k for k in range(40)))


def true_positive_rate(curve: Curve, false_positive_rate: float) -> float:
    """The highest true-positive rate that any membership attack can reach at a false-positive rate.

    Each point of the curve excludes attacks with tpr > e^eps fpr + delta and with tpr > 1 - e^-eps (1 - delta - fpr)
    (Wasserman & Zhou 2010; Kairouz, Oh & Viswanath 2015).
    """
    check.fraction("false_positive_rate", false_positive_rate)
    best = 1.0
    for epsilon in GRID:
        grown, shrunk = math.exp(epsilon) * false_positive_rate, math.exp(-epsilon)
        if grown >= best and 1 - shrunk * (1 - false_positive_rate) >= best:  # from here on no delta could help
            break
        delta = curve.delta(epsilon)
        best = min(best, grown + delta, 1 - shrunk * (1 - delta - false_positive_rate))
    return min(1.0, max(best, false_positive_rate))


def advantage(curve: Curve) -> float:
    """The largest difference of true- and false-positive rate: the total variation distance, delta at epsilon 0."""
    return curve.delta(0.0)


def tradeoff(curve: Curve, rates: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)) -> list[tuple[float, float]]:
    """Points (false-positive rate, least false-negative rate) of the trade-off curve."""
    return [(rate, 1 - true_positive_rate(curve, rate)) for rate in rates]


def reconstruction(curve: Curve, prior: float) -> float:
    """The highest probability of reconstructing a record that a prior alone would hit with probability `prior`.

    A reconstruction that succeeds is a test with false-positive rate `prior` (Balle, Cherubin & Hayes 2022; Hayes et al. 2023).
    """
    return true_positive_rate(curve, check.fraction("prior", prior))


def tier(epsilon: float) -> int:
    """The guide's tier (Ponomareva et al. 2023): 1 up to epsilon 1 (strong), 2 up to 10 (reasonable), 3 above (weak)."""
    check.positive_or_infinite("epsilon + 1", epsilon + 1)
    return 1 if epsilon <= 1 else 2 if epsilon <= 10 else 3


TIERS = {
    1: "a strong formal guarantee",
    2: "a reasonable guarantee, the usual goal for models",
    3: "a weak guarantee that needs other evidence, such as an audit, beside it",
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

    def sentences(self) -> list[str]:
        """The same in words."""
        return [
            f"Tier {self.tier}: {TIERS[self.tier]} (epsilon {self.epsilon:.3g} at delta {self.delta:g}).",
            f"Told who trained the model or not, the best attacker is right at most {50 + 50 * self.advantage:.1f}% of the time "
            f"(50% is guessing).",
            f"Accusing 1% of outsiders wrongly, an attacker finds at most {self.tpr_at_1_percent:.1%} of the members; "
            f"accusing 0.1%, at most {self.tpr_at_1_permille:.2%}.",
            f"A record that could be guessed once in 1000 tries can be reconstructed with probability at most "
            f"{self.reconstruction_of_1_in_1000:.2%}.",
        ]


def meaning(curve: Curve, delta: float) -> Meaning:
    """What a curve means at `delta`. Guarantees: every number is an upper bound on what any attacker can reach."""
    epsilon = curve.epsilon(check.inside_unit("delta", delta))
    permille = true_positive_rate(curve, 1e-3)
    return Meaning(epsilon, delta, tier(epsilon), advantage(curve), true_positive_rate(curve, 1e-2), permille, permille)
