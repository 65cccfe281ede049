"""Rényi differential privacy: divergences by quadrature at any order, the optimal conversion, and
the accountant built on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpfy.accounting.flatten import delta_within, leaves, plain_leaves
from dpfy.accounting.moments import Array
from dpfy.accounting.rules import rule_of
from dpfy.accounting.tight.dominating_pairs import composition
from dpfy.accounting.tight.losses import PrivacyLoss, verified
from dpfy.core import check
from dpfy.core.errors import Internal, Unsupported, refusal
from dpfy.core.events import Event, inside
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

_LARGE = (64, 72, 80, 90, 100, 112, 128, 144, 160, 180, 200, 224, 256, 288, 320, 362, 400, 448, 512)
_LARGEST = (640, 800, 1024, 1600, 2500, 4000)
ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *map(float, range(11, 64)),
    *map(float, _LARGE + _LARGEST),
)
"""Those of the field's reference library, so that numbers compare, and more large ones, which small
epsilons need.
"""


MOST_OWN = 64
"""Orders that a release may ask for beside these."""


def divergences(event: Event, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    """Rényi divergences of `event` at `orders`, the worse of both directions (Mironov 2017),
    rounded up.

    Guarantees: valid for adaptive composition of the leaves at each order. A leaf with a chance of
    infinite loss raises `Unsupported`.
    """
    values, infinity = approximate(event, adjacency, orders)
    if infinity > 0:
        raise Unsupported(
            "a release with a chance of infinite loss, by Rényi divergences alone,",
            "use --accountant tight or rdp",
        )
    return values


def approximate(
    event: Event, adjacency: Adjacency, orders: Sequence[float] = ORDERS
) -> tuple[Array, float]:
    """Rényi divergences of what is left when outcomes of infinite loss are set aside, and a bound
    on the chance of those.

    Guarantees: delta at an epsilon is at most that chance plus what the divergences imply.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    total, infinity = np.zeros(len(alphas)), 0.0
    for leaf, count in leaves(event):
        values, chance = _leaf(leaf, adjacency, alphas)
        total, infinity = total + count * values, infinity + count * chance
    return total, infinity


def _leaf(leaf: Event, adjacency: Adjacency, alphas: Array) -> tuple[Array, float]:
    own = rule_of(leaf).divergences
    return own(leaf, adjacency, alphas) if own is not None else of_pair(leaf, adjacency, alphas)


def of_pair(leaf: Event, adjacency: Adjacency, alphas: Array) -> tuple[Array, float]:
    """Those of the dominating pair, the worse of both directions."""
    parts = composition(leaf, adjacency)
    if parts.public:
        return np.full(len(alphas), np.inf), 0.0
    values, infinity = alphas * parts.gaussian / 2, 0.0
    for release, count in parts.releases:
        removed = _of_loss(release.removed, alphas)
        added = removed if release.added == release.removed else _of_loss(release.added, alphas)
        values = values + count * np.maximum(removed, added)
        infinity += count * max(release.removed.infinity, release.added.infinity)
    return values, infinity


def _of_loss(loss: PrivacyLoss, alphas: Array) -> Array:
    found = [verified(loss).log_mgf(float(a) - 1) for a in alphas]
    least = math.log1p(-loss.infinity) if loss.infinity < 1 else -math.inf
    if any(moment.upper < least for moment in found):
        raise Internal(
            "a log moment of positive order is not negative",
            f"one is {min(moment.upper for moment in found):.9g}",
        )
    return np.asarray(np.array([max(moment.upper, 0.0) for moment in found]) / (alphas - 1))


def to_epsilon(orders: Array, values: Array, delta: float) -> float:
    """The least epsilon at `delta` over the orders (Canonne, Kamath & Steinke 2020, Proposition
    12).
    """
    room = (math.log(delta) + np.log(orders - 1) - orders * np.log1p(-1 / orders)) / (orders - 1)
    return max(0.0, float(np.min(values - room)))


def to_delta(orders: Array, values: Array, epsilon: float) -> float:
    """The least delta at `epsilon` over the orders: the same conversion, solved for delta."""
    with np.errstate(over="ignore"):
        logs = (
            (orders - 1) * (values - epsilon) - np.log(orders - 1) + orders * np.log1p(-1 / orders)
        )
    return float(min(1.0, math.exp(min(0.0, float(np.min(logs))))))


class RdpCurve:
    """The curve that a set of Rényi divergences implies, with a chance of infinite loss beside
    them.
    """

    def __init__(self, orders: Sequence[float], values: Array, infinity: float = 0.0) -> None:
        self.orders, self.values, self.infinity = (
            np.asarray(orders, dtype=np.float64),
            values,
            infinity,
        )

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`."""
        room = delta_within(check.inside_unit("delta", delta)) - self.infinity
        return to_epsilon(self.orders, self.values, room) if room > 0 else math.inf

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        return min(
            1.0,
            self.infinity
            + to_delta(self.orders, self.values, check.nonnegative("epsilon", epsilon)),
        )

    def epsilon_lower(self, delta: float) -> float | None:
        """Rényi accounting has no lower bound."""
        return None


class Rdp:
    """Rényi accounting with exact divergences. Valid for adaptively chosen plans through
    `filters`.
    """

    name = "rdp"

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """None if `curve` would answer, else why not and which route would."""
        return refusal(approximate, event, adjacency, (2.0,))

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The curve of `event`. Guarantees: upper bounds; an event without Rényi bound raises
        `Unsupported`.
        """
        orders = (*ORDERS, *sorted(known_orders(event) - set(ORDERS)))
        return RdpCurve(orders, *approximate(event, adjacency, orders))


def known_orders(event: Event) -> set[float]:
    """The orders at which releases in `event` are known best, of each at most MOST_OWN."""
    own = rule_of(event).orders(event)
    return set(own[:: -(-len(own) // MOST_OWN) or 1]).union(*map(known_orders, inside(event)))


def rho(event: Event, adjacency: Adjacency) -> float:
    """The zCDP parameter of `event` (Bun & Steinke 2016): Gaussian 1/(2 sigma^2), pure epsilon at
    most epsilon^2/2; composition adds.
    """
    return math.fsum(
        count * rule_of(leaf).rho(leaf, adjacency) for leaf, count in plain_leaves(event)
    )


class ZcdpCurve:
    """The curve of rho-zCDP, by the optimal conversion over all orders."""

    def __init__(self, value: float) -> None:
        self.rho = value
        self._orders = 1 + np.geomspace(1e-3, 1e6, 400)

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`."""
        check.inside_unit("delta", delta)
        return (
            math.inf
            if math.isinf(self.rho)
            else to_epsilon(self._orders, self.rho * self._orders, delta)
        )

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        return (
            1.0
            if math.isinf(self.rho)
            else to_delta(
                self._orders, self.rho * self._orders, check.nonnegative("epsilon", epsilon)
            )
        )

    def epsilon_lower(self, delta: float) -> float | None:
        """None: zCDP is an upper bound only."""
        return None


class ZcdpAccountant:
    """zCDP accounting: no amplification by sampling; valid for adaptive choices through filters."""

    name = "zcdp"

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """None if `curve` would answer, else why not and which route would."""
        return refusal(rho, event, adjacency)

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The curve of `event`. Guarantees: upper bounds."""
        return ZcdpCurve(rho(event, adjacency))
