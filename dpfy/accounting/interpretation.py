"""What a guarantee means: the attacker's odds, the tier of the guide, in words that a reviewer
understands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfy.core import check, guarantee
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
            f"Told who trained the model or not, the best attacker is right at most "
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
