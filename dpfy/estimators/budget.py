"""From what a fit needs to release, and a budget, to rounds with their noise.

Shares are shares of the budget as noise counts it: Gaussian releases of noise multipliers s_i are
together one of 1 / sqrt(sum 1/s_i^2) (Dong, Roth & Su 2022, Corollary 3.3), so that a need with a
share of w, released n times, gets s = t sqrt(n / w) for one t, which is that of a single Gaussian
release. Choices have zCDP epsilon^2 / 8 and count accordingly. At delta 0 shares are shares of
epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dpfy.accounting import calibrate, table
from dpfy.accounting.gaussian import sigma_analytic
from dpfy.accounting.rules import group_size_of
from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.guarantee import Curve
from dpfy.core.unit import EXAMPLE, Adjacency, Unit
from dpfy.core.values import Bound
from dpfy.estimators.claim import ReleaseRound, together
from dpfy.report import figures

GROW = 1 + 2.0**-40
SUM, CHOICE = "sum", "choice"


@dataclass(frozen=True)
class FitTerms:
    """What a fit may cost and what is hidden. `records` is the public number of records, where
    there is one; `unit` is whose data is protected; `weighted`: records have weights from 0 to 1.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    accountant: str = table.DEFAULT
    records: int | None = None
    unit: Unit = EXAMPLE
    weighted: bool = False

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        if check.below_one("delta", self.delta):
            check.delta("delta", self.delta)
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        check.one_of("accountant", self.accountant, table.TABLE)
        if self.delta == 0:
            object.__setattr__(self, "accountant", "basic")
        if self.records is not None:
            check.integer("records", self.records, most=check.RECORDS)

    @property
    def replaced(self) -> bool:
        """Whether a record is replaced: then how many there are is no secret."""
        return self.adjacency is Adjacency.REPLACE_ONE

    @property
    def at_most(self) -> int:
        """How many records of a unit are used."""
        return self.unit.most_records

    @property
    def mu(self) -> float:
        """All of the budget as one Gaussian release: what a unit adds over the standard deviation.
        Infinite at delta 0.
        """
        return (
            math.inf
            if self.delta == 0
            else 1 / (group_size_of(self.adjacency) * sigma_analytic(self.epsilon, self.delta))
        )


@dataclass(frozen=True)
class ReleaseNeed:
    """A kind of release before its noise is fixed: `releases` sums (or choices), each with at most
    `bound`, for a share of the budget.

    `bound` is that of one record. A person with k of them adds at most k times that: norms add up,
    and so do changes of scores. Where a person is replaced by another, half of the change counts,
    which is at most k times a record's half: `bound` is proven from the inner product of what two
    records add (not negative for histograms and matrices x x'; at least -1 for the second moments
    of a regression), and inner products of sums are sums of those.
    `person` is a smaller bound on a person's total, in units of `bound`, where the sum is made of
    totals that were shortened to it.
    """

    name: str
    bound: Bound
    releases: int = 1
    share: float = 1.0
    how: str = SUM
    make: Callable[[float], events.Event] | None = None
    """The event of one release with a noise multiplier, where it is no plain sum or choice."""
    person: float | None = None

    def __post_init__(self) -> None:
        check.positive(f"share of {self.name}", self.share)
        check.one_of(f"release of {self.name}", self.how, (SUM, CHOICE))


def rounds(needs: Sequence[ReleaseNeed], terms: FitTerms) -> tuple[ReleaseRound, ...]:
    """Each need with its noise.

    Guarantees: the composition of all their events, by the accountant of the terms, is at most
    (epsilon, delta). Only the needs and the terms is looked at.
    """
    if not needs:
        raise InvalidInput("needs", [], "must be at least one release")
    return _rounds(tuple(needs), terms)


@lru_cache(maxsize=256)
def _rounds(needs: tuple[ReleaseNeed, ...], terms: FitTerms) -> tuple[ReleaseRound, ...]:
    """Kept: choices beside sums take a tenth of a second to calibrate."""
    whole = sum(n.share for n in needs)

    def at(scale: float) -> tuple[ReleaseRound, ...]:
        return tuple(
            ReleaseRound(
                n.name, _event(n, n.share / whole, scale, terms), _bound(n, terms), n.releases
            )
            for n in needs
        )

    def curve(scale: float) -> Curve:
        return figures.curve(together(at(scale)), terms.adjacency, terms.accountant)

    if terms.delta == 0:
        scale = float(group_size_of(terms.adjacency)) / terms.epsilon
    elif all(n.how == SUM and n.make is None for n in needs) and terms.accountant in (
        "tight",
        "gdp",
    ):
        scale = 1 / terms.mu
    else:
        tolerance = calibrate.tolerance(terms.accountant)
        scale = calibrate.noise_by(
            curve, terms.epsilon, terms.delta, start=1 / terms.mu, tolerance=tolerance
        )
    while curve(scale).epsilon(terms.delta) > terms.epsilon:
        scale *= GROW
    return at(scale)


def _event(need: ReleaseNeed, weight: float, scale: float, terms: FitTerms) -> events.Event:
    """One release of a need that has this part of the budget, where all of it would be noise of
    `scale`.
    """
    if terms.delta == 0 and need.make is not None:
        raise Unsupported(f"a pure guarantee (delta 0) of {need.name}", "state a delta above 0")
    if terms.delta == 0:
        each = scale * need.releases / weight
        return (
            events.Laplace(each)
            if need.how == SUM
            else events.BoundedRange(group_size_of(terms.adjacency) / each)
        )
    each = scale * math.sqrt(need.releases / weight)
    if need.make is not None:
        return need.make(each)
    return (
        events.Gaussian(each)
        if need.how == SUM
        else events.BoundedRange(2 * group_size_of(terms.adjacency) / each)
    )


def _bound(need: ReleaseNeed, terms: FitTerms) -> float:
    """What a unit adds at most."""
    if terms.at_most > 1 and need.make is not None:
        raise Unsupported(
            f"{need.name} where a person has several records, for which there is no proof,",
            "state at_most=1, or choose another solver or method",
        )
    if need.how == CHOICE:
        return terms.at_most * need.bound.finite("linf", f"a choice ({need.name})")
    norm = "l1" if terms.delta == 0 else "l2"
    one = need.bound.finite(norm, f"noise at delta {terms.delta:g} ({need.name})")
    shortened = need.person is not None and norm == "l2"
    return one * (need.person if shortened and need.person is not None else terms.at_most)
