"""One statistic, from records to answers: the only place where statistics meet mechanisms."""

from __future__ import annotations

import math
from typing import Any

from dpfy.core.book import Permit
from dpfy.core.errors import Unsupported
from dpfy.core.random import Randomness
from dpfy.core.unit import Adjacency
from dpfy.mechanisms.additive import Gaussian, Laplace
from dpfy.mechanisms.discrete import DiscreteLaplace
from dpfy.statistics.answer import Answer, Spread
from dpfy.statistics.claim import StatisticClaim
from dpfy.statistics.columns import Table
from dpfy.statistics.quantiles import Quantiles, rounded_down
from dpfy.statistics.statistic import Statistic, Sums
from dpfy.statistics.units import Contribution

NORMS = {"laplace": "l1", "gaussian": "l2"}


def claim_of(
    statistic: Statistic, contribution: Contribution, family: str, share: float, pure: bool = False, **about: Any
) -> StatisticClaim:
    """The claim of a statistic that may cost `share`.

    The rule, the same for all statistics: equal parts in zCDP, of share^2 / 2. That is Laplace noise of epsilon `share`, Gaussian noise of
    1 / `share` times the bound, and for each of L levels a choice of epsilon 2 `share` / sqrt L. Where only epsilons are added up (`pure`),
    `share` is the epsilon of each, and a choice divides it by its levels. Replacing a unit moves a sum twice as far.
    """
    moves = 2 if Adjacency.parse(about.get("adjacency", Adjacency.ADD_OR_REMOVE_ONE)) is Adjacency.REPLACE_ONE else 1
    if isinstance(statistic, Quantiles):
        epsilon = share / statistic.levels if pure else 2 * share / math.sqrt(statistic.levels)
        held = rounded_down(epsilon), float(contribution.total), statistic.levels, statistic.draws
        return StatisticClaim(statistic.text, "exponential", *held, **about)
    assert isinstance(statistic, Sums)
    bound = contribution.bound(statistic.one(NORMS[family]))
    if family == "gaussian":
        return StatisticClaim(statistic.text, "gaussian", moves / share, bound.l2, **about)
    if statistic.whole:
        return StatisticClaim(statistic.text, "discrete-laplace", share / (moves * bound.l1), bound.l1, **about)
    return StatisticClaim(statistic.text, "laplace", moves / share, bound.l1, **about)


def mechanism_of(claim: StatisticClaim) -> Laplace | Gaussian | DiscreteLaplace:
    """What adds the noise that the claim says."""
    if claim.mechanism == "discrete-laplace":
        return DiscreteLaplace(claim.parameter, int(claim.bound))
    if claim.mechanism == "exponential":
        raise Unsupported("noise for a choice", "release it by its own mechanism")
    return (Gaussian if claim.mechanism == "gaussian" else Laplace)(claim.parameter)


def spread_of(claim: StatisticClaim) -> Spread:
    """The law of the noise on each released number."""
    if claim.mechanism == "discrete-laplace":
        return Spread("laplace", 1 / claim.parameter, whole=True)
    return Spread(claim.mechanism, claim.parameter * claim.bound)


def error_of(statistic: Statistic, claim: StatisticClaim) -> float:
    """The standard deviation of the noise on what is asked, as far as it is known before: to compare families of noise."""
    norm = NORMS["gaussian" if claim.mechanism == "gaussian" else "laplace"]
    return spread_of(claim).error(statistic.leading(norm)) if isinstance(statistic, Sums) else 1.0


def release(
    statistic: Statistic,
    claim: StatisticClaim,
    table: Table,
    contribution: Contribution,
    permit: Permit,
    randomness: Randomness | None = None,
) -> list[Answer]:
    """The answers of one statistic.

    Guarantees: the bill of the permit is the claim's, which is all that is done. What the records hold raises nothing, and does not
    change how often random bits are drawn.
    """
    if isinstance(statistic, Quantiles):
        return statistic.release(table, contribution, claim.parameter, permit, randomness, claim.adjacency)
    assert isinstance(statistic, Sums)
    norm = NORMS["gaussian" if claim.mechanism == "gaussian" else "laplace"]
    mechanism = mechanism_of(claim)
    grid = None
    if not isinstance(mechanism, DiscreteLaplace):
        numbers = statistic.groups.count * statistic.cells * statistic.width(norm)
        grid = mechanism.grid(contribution.bound(statistic.one(norm)), numbers)
    total = statistic.total(table, contribution, norm, grid)
    noisy = mechanism.release(total, permit, randomness).value
    return statistic.answers(noisy, spread_of(claim), norm)
