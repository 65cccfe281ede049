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

A run that ends early is settled: from then on the steps it made are counted instead of those
reserved (docs/early-stopping.md). So is the order chosen from the first event *as it was reserved*:
chosen from what became of it, it would depend on outputs.

A filter for Gaussian releases and choices whose sizes are chosen adaptively: exact, where a
Rényi filter is not.

The claim. Let releases be made one after the other on two neighbours, each chosen with sight of the
outputs before it: Gaussian ones, of noise multipliers s_1, s_2, ... of any sizes as long as the sum
of 1 / s_i^2 stays within m^2 on every path, and at most K choices by mechanisms of bounded range e.
Then all together reveal no more than one Gaussian release of noise multiplier 1 / m and K choices
of range e, one after the other. For Gaussian releases alone this is the filter of Smith & Thakurta
2022 and Koskela, Tobaben & Honkela 2023.

The proof. For t > 0 let H_j(t) be the most that j adaptive choices can reach of P(S) - t Q(S)
(:mod:`dpfy.accounting.bounded_range`), and (T_v f)(t) the mean of f(t exp(-L)) over a Gaussian L of
mean v / 2 and variance v, the loss of a Gaussian release of 1 / s^2 = v. The claim is V_{j,v} <=
T_v H_j, V_{j,v} being the most that can be reached by interactions of at most n releases, where j
choices and squares of v are left. By induction over n; for n = 0 it is (1 - t)+ = H_0 <= T_v H_j,
since who sees more can do no worse.

A Gaussian release first, of u <= v, moving the mean by w <= u of the square: what is reached is at
most the mean of V_{j,v-u}(t exp(-L)) over its loss, at most T_w T_{v-u} H_j = T_{v-u+w} H_j (the
sum of independent Gaussians), at most T_v H_j (adding a release, again).

A choice first: its losses lie in an interval of length e, and V_{j-1,v}(t r) is bounded by T_v
H_{j-1}(t r), convex in r = exp(-L), so two losses at the ends of the interval are the worst: at
most B T_v H_{j-1}, where (B f)(t) is the maximum over intervals of p f(t x) + (1 - p) f(t y). T_v
is a mean over shifts of log t and B a maximum of weighted sums of such shifts, and the maximum of a
mean is at most the mean of the maxima: B T_v H_{j-1} <= T_v B H_{j-1} = T_v H_j. So whatever comes
first, it is at most T_v H_j.

What makes it work is that T_v depends on v alone: nothing is lost to the freedom of choosing sizes.
Two ranges would not commute, so all choices are charged as having the largest.
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
    pass
from fractions import Fraction
from functools import lru_cache

from dpfy.accounting import calibrate, table
from dpfy.accounting.flatten import leaves
from dpfy.core.errors import DpfyError
from dpfy.core.events import BoundedRange, Gaussian, Nothing, Repeated

GRID = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 22.0, 36.0, 64.0, 128.0)
"""Orders that share half of delta; the other half goes to the order that suits the first event
best.
"""
FINE = tuple(1 + 0.05 * 1.07**k for k in range(140))
"""Orders among which the one that suits the first event is looked for."""

SET_ASIDE = 5
"""A new budget sets delta over this aside for runs with a chance of infinite loss: it costs about a
hundredth of epsilon.
"""

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

    Args:
        epsilon: Of the whole sequence.
        delta: Of the whole sequence.
        approximation: The part of delta for runs that can fail with a small chance.

    Raises:
        InvalidInput: A value is out of its range.

    Example:
        >>> from dpfy.accounting import RenyiFilter
        >>> from dpfy.core import events
        >>> from dpfy.core.unit import Adjacency
        >>> budget, run = RenyiFilter(3.0, 1e-5), events.Gaussian(4.0)
        >>> budget.why_not([run], run, Adjacency.ADD_OR_REMOVE_ONE) is None
        True
        >>> budget.why_not([run] * 10, run, Adjacency.ADD_OR_REMOVE_ONE) is None
        False
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
            return f"the Rényi filter cannot charge this run: {error}"
        if chance > self.approximation:
            return (
                f"this run would bring the chance of an infinite loss (a failure probability, as of "
                f"top()) to {chance:.4g} in all; the budget sets {self.approximation:g} of its delta "
                f"{self.delta:g} aside for that (its `approximation`, fixed when the ledger is "
                f"created); ask with a smaller delta"
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

    Args:
        delta: The chance with which a bound may fail.
        approximation: The part of delta for runs that can fail with a small chance.

    Raises:
        InvalidInput: A value is out of its range.

    Example:
        >>> from dpfy.accounting import RenyiOdometer
        >>> from dpfy.core import events
        >>> from dpfy.core.unit import Adjacency
        >>> odometer, run = RenyiOdometer(1e-5), events.Gaussian(4.0)
        >>> one = odometer.epsilon([run], Adjacency.ADD_OR_REMOVE_ONE)
        >>> two = odometer.epsilon([run, run], Adjacency.ADD_OR_REMOVE_ONE)
        >>> 0 < one < two < 2 * one
        True
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
    pass  # MERGED

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


def together(noise_multiplier: float, choices: int = 0, width: float = 0.0) -> Event:
    """The charge of all that a filter admits: one Gaussian release, and so many choices of range
    `width`.
    """
    gaussian = Gaussian(noise_multiplier)
    return Composed((gaussian, Repeated(BoundedRange(width), choices))) if choices else gaussian


def squares(noise_multiplier: float) -> Fraction:
    """What a Gaussian release takes of the sum, exactly."""
    return 1 / Fraction(check.positive("noise_multiplier", noise_multiplier)) ** 2


def noise_of(rest: Fraction) -> float:
    """The noise multiplier that takes `rest` of the sum, or a little less."""
    noise = math.sqrt(1 / rest)
    while squares(noise) > rest:
        noise = math.nextafter(noise, math.inf)
    return noise


@lru_cache(maxsize=64)
def least_noise(
    epsilon: float, delta: float, choices: int, width: float, adjacency: Adjacency
) -> float:
    """The least noise multiplier of a Gaussian release that, with so many choices, is within
    (epsilon, delta).
    """
    try:
        return calibrate.noise(
            lambda s: together(s, choices, width), epsilon, delta, adjacency=adjacency
        )
    except InvalidInput:
        if not choices:
            raise
        rule = (
            f"is less than what {choices} choices of range {width:.4g} cost by themselves: ask for "
            f"more, or for fewer choices"
        )
        raise InvalidInput("epsilon", epsilon, rule) from None


@dataclass(frozen=True)
class GaussianFilter:
    """Admits Gaussian releases of any sizes, and at most `choices` choices of a range of at most
    `width`, within (epsilon, delta).

    Guarantees: any sequence of releases, each chosen with sight of all earlier outputs and each
    admitted by `why_not`, is together (epsilon, delta)-private.

    Args:
        epsilon: Of the whole sequence.
        delta: Of the whole sequence.
        choices: The most choices by the exponential mechanism or one like it.
        width: The range of the privacy loss of a choice.

    Raises:
        InvalidInput: A value is out of its range.

    Example:
        >>> from dpfy.accounting import GaussianFilter
        >>> from dpfy.core import events
        >>> from dpfy.core.unit import Adjacency
        >>> budget = GaussianFilter(1.0, 1e-6)
        >>> least = budget.noise_multiplier()  # of one release that takes it all
        >>> half = events.Gaussian(least * 2**0.5 * 1.001)
        >>> budget.why_not([half], half, Adjacency.ADD_OR_REMOVE_ONE) is None
        True
        >>> budget.why_not([half, half], half, Adjacency.ADD_OR_REMOVE_ONE) is None
        False
    """

    epsilon: float
    delta: float
    choices: int = 0
    width: float = 0.0
    kind: ClassVar[str] = "gaussian"
    approximation: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check.positive("budget.epsilon", self.epsilon)
        check.inside_unit("budget.delta", self.delta)
        check.integer("budget.choices", self.choices, least=0)
        if self.choices or self.width:
            check.positive("budget.width", self.width)

    def noise_multiplier(self, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> float:
        """That of the one Gaussian release to which all Gaussian releases together may amount."""
        return least_noise(self.epsilon, self.delta, self.choices, self.width, adjacency)

    def why_not(
        self, spent: Sequence[Event], asked: Event, adjacency: Adjacency, first: Event | None = None
    ) -> str | None:
        """None if `asked` may be released after `spent`, else one line that says why not."""
        try:
            sums, made = self._counted(Composed((*spent, asked)))
        except DpfyError as error:
            return f"the Gaussian filter cannot charge this run: {error}"
        if made > self.choices:
            return (
                f"this run would bring the number of choices to {made}; the budget allows "
                f"{self.choices}"
            )
        if sums > squares(self.noise_multiplier(adjacency)):
            found = self.spent_epsilon((*spent, asked), adjacency)
            return (
                f"this run would bring the adaptive total to epsilon {found:.4g} at delta "
                f"{self.delta:g} (Gaussian filter); "
                f"the budget is epsilon {self.epsilon:g}"
            )
        return None

    def spent_epsilon(
        self, spent: Sequence[Event], adjacency: Adjacency, first: Event | None = None
    ) -> float:
        """The smallest epsilon at which this filter, with the same delta and choices, would have
        admitted `spent`.
        """
        try:
            sums, made = self._counted(Composed(tuple(spent)))
        except DpfyError:
            return math.inf
        if not sums and not made:
            return 0.0
        most = max(made, self.choices)  # choices are set aside, whether they are made or not
        event = (
            together(noise_of(sums), most, self.width)
            if sums
            else Repeated(BoundedRange(self.width), most)
        )
        return table.accountant(table.DEFAULT).curve(event, adjacency).epsilon(self.delta)

    def to_json(self) -> dict[str, Any]:
        """The filter as JSON."""
        return {
            "kind": self.kind,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "choices": self.choices,
            "width": self.width,
        }

    @classmethod
    def from_json(cls, terms: dict[str, Any]) -> GaussianFilter:
        """The filter that `to_json` wrote."""
        check.known_keys("budget", terms, ("kind", "epsilon", "delta", "choices", "width"))
        return cls(
            terms["epsilon"], terms["delta"], terms.get("choices", 0), terms.get("width", 0.0)
        )

    def _counted(self, event: Event) -> tuple[Fraction, int]:
        """The sum of squares of the Gaussian releases, and the number of choices."""
        sums, made = Fraction(0), 0
        for leaf, count in leaves(event):
            if isinstance(leaf, Gaussian):
                sums += count * squares(leaf.noise_multiplier)
            elif isinstance(leaf, BoundedRange) and leaf.epsilon <= self.width:
                made += count
            elif not isinstance(leaf, Nothing):
                rule = (
                    f"must be a Gaussian release, or a choice of a range of at most "
                    f"{self.width:g}; a Rényi filter takes others"
                )
                raise InvalidInput("event", type(leaf).__name__, rule)
        return sums, made
