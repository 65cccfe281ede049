"""Composition of (epsilon, delta) black boxes: basic, advanced, and the optimum of Kairouz, Oh &
Viswanath.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from dpfy.accounting.flatten import leaves, plain_leaves
from dpfy.accounting.numeric_limits import rounded_up
from dpfy.accounting.rules import rule_of
from dpfy.accounting.tight.accountant import Tight
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.events import Event
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency


def basic(epsilon: float, delta: float, count: int) -> tuple[float, float]:
    """Basic composition: epsilons and deltas add (Dwork & Roth 2014, Theorem 3.16)."""
    check.integer("count", count, least=0)
    return count * check.nonnegative("epsilon", epsilon), min(
        1.0, count * check.fraction("delta", delta)
    )


def advanced(epsilon: float, delta: float, count: int, slack: float) -> tuple[float, float]:
    """Advanced composition: (eps sqrt(2 k ln(1/slack)) + k eps (e^eps - 1), k delta + slack) (Dwork
    & Roth 2014, Theorem 3.20).
    """
    check.inside_unit("slack", slack)
    check.integer("count", count, least=0)
    total = epsilon * math.sqrt(2 * count * math.log(1 / slack)) + count * epsilon * math.expm1(
        epsilon
    )
    return total, min(1.0, count * delta + slack)


def kairouz(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """The least epsilon of `count` (epsilon, delta) black boxes at `total_delta` (Kairouz, Oh &
    Viswanath 2015, Theorem 3.3).

    The attained values are (k - 2i) epsilon with delta_i = 1 - (1 - delta)^k (1 - sum_{l<i} C(k,l)
    (e^{(k-l)eps} - e^{(k-2i+l)eps}) / (1 + e^eps)^k).
    """
    check.integer("count", count)
    log_norm = count * math.log1p(math.exp(epsilon))
    survive = count * math.log1p(-delta)
    best = math.inf
    for i in range(count // 2 + 1):
        value = (count - 2 * i) * epsilon
        inner = 0.0
        for j in range(i):
            log_choose = math.lgamma(count + 1) - math.lgamma(j + 1) - math.lgamma(count - j + 1)
            inner += math.exp(log_choose + (count - j) * epsilon - log_norm) * -math.expm1(
                -2 * (i - j) * epsilon
            )
        reached = -math.expm1(survive) + math.exp(survive) * inner
        if reached > total_delta:
            break
        best = value
    return best


def share(epsilon: float, delta: float, count: int) -> tuple[float, float]:
    """What each of `count` releases may spend so that together they are (epsilon, delta)-private.

    epsilon / (2 sqrt(k ln(e + epsilon/delta))), delta / (2k) (Kairouz, Oh & Viswanath 2015, a
    corollary of advanced composition). A rule for choosing; what the releases then cost together is
    for an accountant to say.
    """
    check.positive("epsilon", epsilon)
    check.inside_unit("delta", delta)
    each = epsilon / (
        2 * math.sqrt(check.integer("count", count) * math.log(math.e + epsilon / delta))
    )
    if each >= 1:
        raise InvalidInput(
            "epsilon",
            epsilon,
            f"gives each of {count} releases {each:.3g}; the rule needs less than 1",
        )
    return each, delta / (2 * count)


def pure(event: Event, adjacency: Adjacency) -> float:
    """Epsilon at delta 0: the pure epsilons of all releases added (Dwork & Roth 2014, Theorem
    3.16).

    Guarantees: an upper bound; a release that has no pure guarantee raises `Unsupported`.
    """
    found = [(rule_of(leaf).pure(leaf, adjacency), count) for leaf, count in plain_leaves(event)]
    if any(math.isinf(epsilon) for epsilon, _ in found):
        return math.inf
    return rounded_up(sum((count * Fraction(epsilon) for epsilon, count in found), Fraction(0)))


class _BlackBoxes:
    """Each release alone by the tight accountant, then a composition theorem that knows only
    (epsilon, delta).
    """

    name: str

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """As the tight accountant's: every release must have a curve of its own."""
        return Tight().why_not(event, adjacency)

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The curve of `event`. Guarantees: upper bounds by the theorem named in the class."""
        parts = [(Tight().curve(leaf, adjacency), count) for leaf, count in leaves(event)]
        return BlackBoxCurve(
            parts, lambda: pure(event, adjacency), optimised=self.name == "advanced"
        )


class BlackBoxCurve:
    """Half of delta (all of it for basic composition) is shared by the releases; the other half
    pays for the theorem.
    """

    def __init__(
        self, parts: list[tuple[Curve, int]], pure: Callable[[], float], optimised: bool
    ) -> None:
        self._leaves, self._pure, self._optimised = parts, pure, optimised

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`; at delta 0 the pure guarantee, where there is one."""
        if check.below_one("delta", delta) == 0:
            return self._pure()
        count = sum(n for _, n in self._leaves)
        if not count:
            return 0.0
        plain = sum(n * curve.epsilon(delta / count) for curve, n in self._leaves)
        if not self._optimised:
            return plain
        parts = [(curve.epsilon(delta / 2 / count), n) for curve, n in self._leaves]
        if any(math.isinf(e) for e, _ in parts):
            return math.inf
        # Kairouz, Oh & Viswanath 2015, Theorem 3.5 (heterogeneous).
        drift = sum(n * e * math.tanh(e / 2) for e, n in parts)
        return min(
            plain, drift + math.sqrt(2 * math.log(2 / delta) * sum(n * e * e for e, n in parts))
        )

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`, by bisection on its logarithm."""
        check.nonnegative("epsilon", epsilon)
        low, high = -60.0, math.log(0.5)
        if self.epsilon(math.exp(high)) > epsilon:
            return 1.0
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (
                (low, middle) if self.epsilon(math.exp(middle)) <= epsilon else (middle, high)
            )
        return math.exp(high)

    def epsilon_lower(self, delta: float) -> float | None:
        """None: the theorems give upper bounds only."""
        return None


class Basic(_BlackBoxes):
    """Basic composition of the releases' own (epsilon, delta)."""

    name = "basic"


class Advanced(_BlackBoxes):
    """Advanced composition (the heterogeneous form of Kairouz, Oh & Viswanath), or basic where that
    is smaller.
    """

    name = "advanced"
