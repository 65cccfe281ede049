"""Rows of sums whose noise is made of shares: one from every honest part of the sum.

Sums of discrete Gaussians. Poisson summation: the sum over all integers x of exp(-(x - a)^2 / (2
v)) is sqrt(2 pi v) up to a factor of 1 +- e(v), whatever a, with e(v) = 2 sum_j exp(-2 pi^2 v j^2).
Two discrete Gaussians of parameters a^2 and b^2 add up to the discrete Gaussian of a^2 + b^2 times
such a sum with v = a^2 b^2 / (a^2 + b^2): over its mean that is a factor within (1 + e) / (1 - e),
up or down. Adding one share after the other, all are within e^tau of the discrete Gaussian of their
whole variance S^2, pointwise, with tau = sum_k 2 artanh e(share^2 k / (k + 1)), k from 1 to shares
- 1 (Kairouz, Liu & Steinke 2021, Theorem 11, with 10 exp(-2 pi^2 v) for each term). From there on
two ways:

- By a Gaussian. The discrete Gaussian of S^2 is a real one of S^2 - 4, rounded at random, up to a
  factor of the same kind with v = 4 (`dpfy.mechanisms.additive`). So for all d coordinates together
  the release is, pointwise, at least e^-T times post-processing of a Gaussian release, T = d (tau +
  tau'): with probability e^-T it is that, and with probability 1 - e^-T it may tell all. That is
  the tight pair; it is used where 1 - e^-T is tiny.
- By zCDP. In a coordinate where neighbours differ by x, the discrete Gaussian is (x / S)^2 /
  2-concentrated (Canonne, Kamath & Steinke 2020), and two distributions within e^tau of each other
  are tau^2 / 2-concentrated (Bun & Steinke 2016, Proposition 1.4); square roots of these add up
  from one distribution to the next (their Lemma on groups), and (|x_j| / S + 2 tau)^2 over the
  coordinates gives at most (length / S + 2 tau sqrt(d))^2.

Skellam shares add up exactly; their divergences are those of Agarwal, Kairouz & Liu 2021, Theorem
3.5, at whole orders.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.accounting import numeric_limits
from dpfy.accounting.moments import Array
from dpfy.accounting.rules.noise import SILENT, sampled_gaussian
from dpfy.accounting.rules.rule import (
    Divergences,
    DominatingPair,
    DominatingPairs,
    EventRule,
    group_size_of,
    no_pair,
)
from dpfy.accounting.rules.stated import black_box
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency

ROUNDING = 4.0
"""The variance of the random rounding that makes a discrete Gaussian of a real one, in squared
steps.
"""
TELLS_ALL = 1e-15
"""The largest chance, for one release, with which the way by a Gaussian may fail; beyond it the
release is charged by zCDP.
"""
LEAST_SHARE = 0.5
"""Of discrete Gaussians: smaller ones add up to nothing that is known."""
ONE_BY_ONE = 10**5
"""So many terms of tau are added up each for itself; those after them are at most the last of
these.
"""
ROUNDED = 1 + 1e-12
"""Above what a few roundings of positive numbers can have lost."""
WHOLE = tuple(map(float, (*range(2, 33), *range(34, 65, 2), *range(80, 273, 12))))
"""Orders at which the divergences of Skellam noise are known best."""

Shares = ev.DistributedDiscreteGaussian | ev.DistributedSkellam


def variance(event: Shares) -> float:
    """Of all shares together, in a coordinate."""
    return event.shares * event.share**2


def uneven(v: Any) -> Any:
    """2 artanh e(v), rounded up: by how much a sum over all integers can differ from an integral,
    as a log ratio.
    """
    q = np.exp(-2 * math.pi**2 * np.asarray(v, np.float64))
    return 2 * np.arctanh(2 * q / (1 - q**3)) * (1 + 1e-9)


def distances(share: float, shares: int) -> Array:
    """tau of 1, 2, ... discrete Gaussians: how far, as a log ratio, their sum is from one of their
    whole variance.
    """
    k = np.arange(1.0, min(shares, ONE_BY_ONE))
    return np.concatenate([[0.0], np.cumsum(uneven(share**2 * k / (k + 1)))]) * ROUNDED


def apart(share: float, shares: int) -> float:
    """tau of so many."""
    known = distances(share, shares)
    rest = (
        (shares - len(known)) * float(uneven(share**2 * (1 - 1 / ONE_BY_ONE)))
        if shares > ONE_BY_ONE
        else 0.0
    )
    return (float(known[-1]) + rest) * ROUNDED


def tells_all(event: ev.DistributedDiscreteGaussian) -> float:
    """The chance with which a release is not post-processing of a Gaussian one."""
    factor = event.coordinates * (apart(event.share, event.shares) + float(uneven(ROUNDING)))
    return min(1.0, -math.expm1(-factor) * ROUNDED)


def gaussian_multiplier(event: ev.DistributedDiscreteGaussian) -> float:
    """The noise multiplier of that Gaussian release; 0 where there is none."""
    left = variance(event) - ROUNDING
    return math.sqrt(left / event.squared) / ROUNDED if left > 0 else 0.0


def _stays(event: Shares, adjacency: Adjacency) -> int:
    """How many bounds a unit moves the sum by; refuses an adjacency under which its noise would
    come and go with it.
    """
    if adjacency is Adjacency.ADD_OR_REMOVE_ONE:
        way_out = (
            "a unit that is absent adds no share of the noise, which shows; use --adjacency "
            "zero-out or replace-one"
        )
        raise Unsupported(f"{type(event).__name__} under {adjacency.value}", way_out)
    return group_size_of(adjacency)


def _discrete_repeats(
    event: ev.DistributedDiscreteGaussian, count: int, adjacency: Adjacency
) -> DominatingPairs:
    """All releases together: one Gaussian, and as many chances to tell all. What is attained is not
    known.
    """
    _stays(event, adjacency)
    noise, chance = gaussian_multiplier(event), tells_all(event)
    if not noise or chance > TELLS_ALL:
        raise Unsupported(
            f"{event.shares:,} shares of {event.share:g} by a dominating pair",
            "use --accountant tight or rdp",
        )
    whole = sampled_gaussian(noise / math.sqrt(count), 1.0, adjacency)
    kept = DominatingPair(whole.removed, whole.added, (SILENT, SILENT))
    return (
        ((kept, 1), (replace(black_box(0.0, chance), attained=(SILENT, SILENT)), count))
        if chance
        else ((kept, 1),)
    )


def _discrete_rho(event: ev.DistributedDiscreteGaussian, adjacency: Adjacency) -> float:
    """Some of the shares are enough: the others may count as anybody's noise on a release that is
    charged without them.
    """
    length, known = (
        _stays(event, adjacency) * math.sqrt(event.squared),
        distances(event.share, event.shares),
    )
    counts = np.append(np.arange(1.0, len(known) + 1), event.shares)
    tau = np.append(known, apart(event.share, event.shares))
    roots = length / (event.share * np.sqrt(counts)) + 2 * tau * math.sqrt(event.coordinates)
    return float(roots.min()) ** 2 / 2 * ROUNDED


def _discrete_divergences(
    event: ev.DistributedDiscreteGaussian, adjacency: Adjacency, alphas: Array
) -> Divergences:
    return np.asarray(alphas * _discrete_rho(event, adjacency)), 0.0


def _no_skellam_pair(event: ev.DistributedSkellam, adjacency: Adjacency) -> DominatingPair:
    _stays(event, adjacency)
    return no_pair(event, adjacency)


def _skellam_divergences(
    event: ev.DistributedSkellam, adjacency: Adjacency, alphas: Array
) -> Divergences:
    """Between whole orders log moments lie below the line between them."""
    squared, mu = _stays(event, adjacency) ** 2 * event.squared, variance(event)
    along = min(
        float(squared), math.sqrt(squared) * math.sqrt(event.coordinates)
    )  # L1: |x| <= x^2 for whole numbers

    def logs(order: Array) -> Array:
        more = np.minimum(
            ((2 * order - 1) * squared + 6 * along) / (4 * mu**2), 3 * along / (2 * mu)
        )
        return np.where(order > 1, (order - 1) * (order * squared / (2 * mu) + more), 0.0)

    low, high = np.floor(alphas), np.ceil(alphas)
    between = logs(low) + (alphas - low) * (logs(high) - logs(low))
    return np.asarray(between / (alphas - 1) * ROUNDED), 0.0


def _within(event: Shares) -> None:
    for name in ("shares", "squared", "coordinates"):
        numeric_limits.count(name, getattr(event, name))
    if not event.share <= numeric_limits.MOST_COUNT:
        raise InvalidInput(
            "share", event.share, f"must be at most {numeric_limits.MOST_COUNT:.0e} steps"
        )
    if isinstance(event, ev.DistributedDiscreteGaussian) and event.share < LEAST_SHARE:
        raise InvalidInput(
            "share",
            event.share,
            f"must be at least {LEAST_SHARE} steps; Skellam shares may be smaller",
        )
    numeric_limits.noise(
        "noise over what one unit adds", math.sqrt(variance(event) / event.squared)
    )


def _row(kind: type, name: str, **known: Any) -> EventRule:
    def told(e: Shares) -> str:
        return (
            f"a sum of whole vectors of {e.coordinates:,} numbers, of length "
            f"{math.sqrt(e.squared):.6g} at most, with {e.shares:,} honest "
            f"shares of {name} noise of {e.share:.6g} each"
        )

    def group(e: Any, size: int) -> Event:
        larger: Event = replace(e, squared=size**2 * e.squared)
        return larger

    return EventRule(kind, told, group=group, within=_within, can_be_sampled=False, **known)


ROWS = (
    _row(
        ev.DistributedDiscreteGaussian,
        "discrete Gaussian",
        repeats=_discrete_repeats,
        divergences=_discrete_divergences,
        rho=_discrete_rho,
    ),
    _row(
        ev.DistributedSkellam,
        "Skellam",
        pair=_no_skellam_pair,
        divergences=_skellam_divergences,
        orders=lambda e: WHOLE,
    ),
)
