"""What any attacker can reach: the trade-off curve that a privacy curve implies. The one place
where it is computed.

An (epsilon, delta) that holds excludes every attacker with a false-negative rate below

    max(1 - delta - e^epsilon fpr,  e^-epsilon (1 - delta - fpr))

at the false-positive rate fpr (Wasserman & Zhou 2010; Kairouz, Oh & Viswanath 2015); a curve
excludes what any of its points excludes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

GRID = (0.0, *(0.02 * 1.25**k for k in range(32)))
"""Epsilons at which a curve is read where the caller has no points of its own: 0 and 0.02 to 20,
beyond which a point excludes attackers with rates below 2e-9 only.
"""

Points = tuple[tuple[float, float], ...]
MOST_EXPONENT = 700.0


@dataclass(frozen=True)
class Tradeoff:
    """The trade-off curve of the (epsilon, delta) pairs in `points`.

    Guarantees: every rate is a bound on all attackers if every pair holds; fewer pairs make the
    attacker look stronger, never weaker. Without any pair nothing is excluded.
    """

    points: Points

    def miss_rate(self, false_positive_rate: float) -> float:
        """The least share of members that any attacker overlooks at this false-positive rate."""
        f = false_positive_rate
        return max(
            [0.0, *(max(1 - d - _grown(e) * f, (1 - d - f) / _grown(e)) for e, d in self.points)]
        )

    def hit_rate(self, false_positive_rate: float) -> float:
        """The largest share of members that any attacker recognises at this false-positive rate."""
        return 1 - self.miss_rate(false_positive_rate)

    def hit_rates(self, false_positive_rates: Iterable[float]) -> list[float]:
        """`hit_rate` at each of these."""
        return [self.hit_rate(f) for f in false_positive_rates]

    @property
    def lines(self) -> tuple[list[float], list[float]]:
        """The same as (heights, slopes): the miss rate at f is the largest height - slope f, for
        those who ask very often.
        """
        left = [(1 - d, _grown(e)) for e, d in self.points]
        return [h for h, _ in left] + [h / g for h, g in left] + [0.0], [g for _, g in left] + [
            1 / g for _, g in left
        ] + [0.0]


def of_curve(delta: Callable[[float], float], epsilons: Sequence[float] = GRID) -> Tradeoff:
    """The trade-off curve of a privacy curve, given as epsilon to delta, read at `epsilons`.

    From the first epsilon at which delta is zero on, no further one can exclude more.
    """
    points = []
    for epsilon in epsilons:
        points.append((epsilon, delta(epsilon)))
        if points[-1][1] == 0:
            break
    return Tradeoff(tuple(points))


def _grown(epsilon: float) -> float:
    return math.exp(min(epsilon, MOST_EXPONENT))
