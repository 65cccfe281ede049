"""Budgets over runs that are chosen adaptively: a Rényi filter and an odometer (Lécuyer 2021;
Feldman & Zrnic 2021).

A bound for a plan fixed in advance says nothing about runs chosen after seeing the results of
earlier ones. A filter does: at one order fixed in advance the Rényi divergences of adaptively
chosen runs add up, so refusing whatever would push the sum over the order's budget keeps the whole
interaction private.

Runs with a chance of infinite loss, (epsilon, delta) black boxes for one, are admitted too where
the budget sets a part of its delta aside for them (Whitehouse, Ramdas, Rogers & Wu 2023). Leave
out, run by run, the outcomes of infinite loss: a chance of at most d_i given everything before. On
every path the d_i admitted add up to at most the part set aside, so their expected sum does, and
with it the probability that anything was left out. What remains is a measure below P under which
exp((a - 1)(L - R)) is a supermartingale, R the sum of its divergences: the filter without such
runs, for what is left of delta. The part must be fixed in advance: a filter that let the
divergences have what the chances leave of delta would spend up to twice the delta on an adversary
who decides by the outputs.

A run that ends early is settled: from then on the steps it made are counted in place of those
reserved (docs/early-stopping.md). So is the order chosen from the first event *as it was reserved*:
chosen from what became of it, it would depend on outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Composed, Event
from dpfy.core.unit import Adjacency

if TYPE_CHECKING:
    from dpfy.accounting.gaussian_filter import GaussianFilter

GRID = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 22.0, 36.0, 64.0, 128.0)
"""Orders that share half of delta; the other half goes to the order that suits the first event
best.
"""
FINE = tuple(1 + 0.05 * 1.07**k for k in range(140))
"""Orders among which the one that suits the first event is looked for."""

ADDED = 1 + 1e-12
"""Sums of chances are right up to this factor."""


@dataclass(frozen=True)
class RenyiFilter:
    """Admits runs as long as the whole adaptive sequence is (epsilon, delta)-differentially
    private.

    Half of delta goes to one order, chosen from the first event alone, which is fixed before
    anything was released; the other half is split over a fixed grid. A sequence is admitted if at
    one of these orders the divergences sum to at most that order's budget. What was released only
    grows, and is never more than what stands in the ledger, so a sequence admitted at an order was
    within that order's budget all the time, and the deltas of the orders add up (union bound).

    Runs with a chance of infinite loss are admitted up to `approximation`, a part of delta that is
    set aside for them; without it such runs are refused.

    Guarantees: any sequence of runs, each chosen with sight of all earlier outputs and each
    admitted by `why_not`, is together (epsilon, delta)-private. Without a run in progress the
    answer depends on the events only.
    """

    epsilon: float
    delta: float
    approximation: float = 0.0
    kind: ClassVar[str] = "renyi"

    def __post_init__(self) -> None:
        check.positive("budget.epsilon", self.epsilon)
        check.inside_unit("budget.delta", self.delta)
        _part("budget.approximation", self.approximation, self.delta)

    def why_not(
        self, spent: Sequence[Event], asked: Event, adjacency: Adjacency, first: Event | None = None
    ) -> str | None:
        """None if `asked` may run after `spent`, else one line that says why not. `first` is the
        first event as it was reserved.
        """
        try:
            orders = self._orders(first or (spent[0] if spent else asked), adjacency)
            sums, chance = _divergences(
                Composed((*spent, asked)), adjacency, tuple(order for order, _ in orders)
            )
        except Unsupported as error:
            return f"the Rényi filter cannot bill this run: {error}"
        if chance > self.approximation:
            return (
                f"this run would bring the chance of an infinite loss to {chance:.4g} in all; the "
                f"budget sets {self.approximation:g} "
                f"of its delta {self.delta:g} aside for that (its `approximation`, fixed when the "
                f"ledger is created)"
            )
        for (order, share), total in zip(orders, sums, strict=True):
            if total <= budget(order, self.epsilon, share):
                return None
        need = min(
            cost(order, total, share) for (order, share), total in zip(orders, sums, strict=True)
        )
        return (
            f"this run would bring the adaptive total to epsilon {need:.4g} at delta "
            f"{self.delta:g} (Rényi filter); "
            f"the budget is epsilon {self.epsilon:g}"
        )

    def spent_epsilon(
        self, spent: Sequence[Event], adjacency: Adjacency, first: Event | None = None
    ) -> float:
        """The smallest epsilon at which this filter, with the same delta, would have admitted
        `spent`.
        """
        if not spent:
            return 0.0
        orders = self._orders(first or spent[0], adjacency)
        sums, chance = _divergences(
            Composed(tuple(spent)), adjacency, tuple(order for order, _ in orders)
        )
        if chance > self.approximation:
            return math.inf
        return min(
            cost(order, total, share) for (order, share), total in zip(orders, sums, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """The filter as JSON: as it was written before there were approximations, where it sets
        nothing aside for them.
        """
        terms = {"kind": self.kind, "epsilon": self.epsilon, "delta": self.delta}
        return terms | {"approximation": self.approximation} if self.approximation else terms

    def _orders(self, first: Event, adjacency: Adjacency) -> list[tuple[float, float]]:
        """Orders with their shares of what is left of delta: the favourite of the first event, then
        the grid.
        """
        values, _ = _divergences(first, adjacency, FINE)
        half = (self.delta - self.approximation * ADDED) / 2
        favourite = max(
            zip(FINE, values, strict=True),
            key=lambda pair: _repeats(budget(pair[0], self.epsilon, half), pair[1]),
        )[0]
        return [(favourite, half), *((order, half / len(GRID)) for order in GRID)]


@dataclass(frozen=True)
class RenyiOdometer:
    """A running bound on what adaptively chosen runs have cost so far, read after any of them
    without a budget set in advance.

    At an order a the process exp((a - 1) (L_t - R_t)), with L_t the privacy loss of the first t
    runs and R_t the sum of their Rényi divergences, is a nonnegative supermartingale that starts at
    1, however each run is chosen from earlier outputs. By Ville's inequality L_t exceeds R_t +
    log(1/delta') / (a - 1) at any time with probability at most delta'. Half of delta goes to the
    order that suits the first event best, which is fixed before anything was released, the other
    half over a fixed grid (union bound).

    Guarantees: for any two neighbouring data sets, with probability at least 1 - delta the privacy
    loss is at most `epsilon` of the runs so far after every run at once; so stopping at any moment,
    chosen with sight of all outputs, leaves an interaction whose loss exceeds the epsilon read at
    that moment with probability at most delta.
    """

    delta: float
    approximation: float = 0.0

    def __post_init__(self) -> None:
        check.inside_unit("odometer.delta", self.delta)
        _part("odometer.approximation", self.approximation, self.delta)

    def epsilon(self, spent: Sequence[Event], adjacency: Adjacency) -> float:
        """The bound on the privacy loss of `spent`, in the order in which the runs were made.

        Infinity once their chances of infinite loss add up to more than the part of delta set aside
        for them.
        """
        if not spent:
            return 0.0
        orders = self._orders(spent[0], adjacency)
        sums, chance = _divergences(
            Composed(tuple(spent)), adjacency, tuple(order for order, _ in orders)
        )
        if chance > self.approximation:
            return math.inf
        return min(
            total + math.log(1 / share) / (order - 1)
            for (order, share), total in zip(orders, sums, strict=True)
        )

    def _orders(self, first: Event, adjacency: Adjacency) -> list[tuple[float, float]]:
        half = (self.delta - self.approximation * ADDED) / 2
        values, _ = _divergences(first, adjacency, FINE)
        favourite = min(
            zip(FINE, values, strict=True),
            key=lambda pair: pair[1] + math.log(1 / half) / (pair[0] - 1),
        )[0]
        return [(favourite, half), *((order, half / len(GRID)) for order in GRID)]


def from_json(terms: dict[str, Any]) -> RenyiFilter | GaussianFilter:
    """The filter that `to_json` wrote."""
    from dpfy.accounting.gaussian_filter import GaussianFilter

    if (
        check.one_of("budget.kind", terms.get("kind"), [RenyiFilter.kind, GaussianFilter.kind])
        == GaussianFilter.kind
    ):
        return GaussianFilter.from_json(terms)
    check.known_keys("budget", terms, ("kind", "epsilon", "delta", "approximation"))
    return RenyiFilter(terms["epsilon"], terms["delta"], terms.get("approximation", 0.0))


def _part(name: str, part: float, delta: float) -> None:
    """Refuse a part of delta that leaves nothing of it."""
    if check.nonnegative(name, part) >= delta:
        raise InvalidInput(
            name, part, f"must be less than delta ({delta:g}), of which it is a part"
        )


def budget(order: float, epsilon: float, delta: float) -> float:
    """The Rényi divergence at `order` that still implies (epsilon, delta); negative if none does.

    Canonne, Kamath & Steinke 2020, Proposition 12: delta = exp((order - 1)(rho - epsilon)) / (order
    - 1) * (1 - 1/order)^order.
    """
    return epsilon + (math.log(delta) + math.log(order - 1) - order * math.log1p(-1 / order)) / (
        order - 1
    )


def cost(order: float, divergence: float, delta: float) -> float:
    """The epsilon at `delta` that a Rényi divergence at `order` implies: the inverse of
    `budget`.
    """
    return max(0.0, divergence - budget(order, 0.0, delta))


def _repeats(room: float, value: float) -> float:
    if room <= 0:
        return room - 1
    return room / value if value > 0 else math.inf


def _divergences(
    event: Event, adjacency: Adjacency, orders: tuple[float, ...]
) -> tuple[list[float], float]:
    """The Rényi divergences of `event` at `orders` without its outcomes of infinite loss, and a
    bound on the chance of those.

    Those of the steps that were made, where a run ended early: divergences add up step by step,
    whatever ends the run.
    """
    from dpfy.accounting.rdp import approximate
    from dpfy.accounting.stopping import unwrapped

    values, chance = approximate(unwrapped(event)[0], adjacency, orders)
    return [float(v) for v in values], chance
