"""A filter for Gaussian releases and choices whose sizes are chosen adaptively: exact, where a
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
Two ranges would not commute, so all choices are billed as having the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from dpfy.accounting import calibrate, table
from dpfy.accounting.leaves import leaves
from dpfy.core import check
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.events import BoundedRange, Composed, Event, Gaussian, Nothing, Repeated
from dpfy.core.unit import Adjacency


def together(noise_multiplier: float, choices: int = 0, width: float = 0.0) -> Event:
    """The bill of all that a filter admits: one Gaussian release, and so many choices of range
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
            return f"the Gaussian filter cannot bill this run: {error}"
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
