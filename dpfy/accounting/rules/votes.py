"""Rows of releases that tell which cell a number with Gaussian noise lies in: a threshold check,
and the arg-max of noisy votes.

Each is a function of a Gaussian release. One alone can tell as much as that does; many together
tell less, by a third of the divergence. What is known of them stands in `dpfy.accounting.threshold_release`,
how it adds up in `dpfy.accounting.threshold_release`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr

from dpfy.accounting import numeric_limits, threshold_release
from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Points, dominating
from dpfy.accounting.rules.noise import sampled_gaussian
from dpfy.accounting.rules.rule import (
    Divergences,
    DominatingPair,
    DominatingPairs,
    EventRule,
    group_size_of,
)
from dpfy.accounting.tight.losses import Atoms
from dpfy.core import events as ev
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency

ADD = Adjacency.ADD_OR_REMOVE_ONE
BLOCK = 128
"""Releases whose most is computed together. More are blocks; larger ones would gain half a percent
of epsilon after thousands.
"""


FEW = 2
"""So few releases are charged as the Gaussian numbers themselves: one alone tells no less."""


def _move(event: ev.NoisyArgmax | ev.NoisyThreshold, adjacency: Adjacency) -> tuple[float, int]:
    """How far a unit moves the number, in units of its noise, and how many cells there are; 0 cells
    where nothing is known of them.

    A unit that is replaced may leave one voter for another: two votes move, in any direction.
    """
    if isinstance(event, ev.NoisyThreshold):
        return max(threshold_release.LEAST, group_size_of(adjacency) / event.noise_multiplier), 2
    replaced = adjacency is Adjacency.REPLACE_ONE
    return max(
        threshold_release.LEAST, group_size_of(adjacency) * math.sqrt(2) / event.sigma
    ), 0 if replaced else min(event.classes, 3)


def tie(mu: float, steps: int = 1) -> Atoms:
    """The loss of so many two-way ties, which there are: binomial."""
    high, low = float(ndtr(mu / 2)), float(ndtr(-mu / 2))
    loss = float(log_ndtr(mu / 2) - log_ndtr(-mu / 2))
    chances = [math.comb(steps, k) * high ** (steps - k) * low**k for k in range(steps + 1)]
    return Atoms(tuple(loss * (steps - 2 * k) for k in range(steps + 1)), tuple(chances))


@lru_cache(maxsize=16)
def family(mu: float, kinds: int) -> threshold_release.ReleaseFamily:
    """All releases of one kind, on a grid on which a tie is exact."""
    two = threshold_release.two_cells(
        mu if kinds == 2 else threshold_release.narrowed(mu, threshold_release.COARSE), 0.01, 0.25
    )
    most = int(two.information().argmax())
    spacing = (
        abs(math.log1p(two.gain[most, 0] / two.absent[most, 0])) / threshold_release.POINTS_PER_UNIT
    )
    slack = 2 * threshold_release.MIXED
    known = threshold_release.on_grid(two.absent, two.gain, spacing, slack)
    if kinds == 2:
        return known
    three = threshold_release.three_cells(mu, threshold_release.COARSE)
    lattice = threshold_release.on_grid(three.absent, three.gain, spacing, slack)
    area = np.maximum(
        threshold_release.areas(lattice).max(axis=0), threshold_release.areas(known).max(axis=0)
    ) * (1 + threshold_release.SLACK)
    return known.joined(threshold_release.covered(lattice, three.shape, area))


@lru_cache(maxsize=16)
def _reached(mu: float, kinds: int, steps: int) -> list[Points]:
    return threshold_release.reached(
        family(mu, kinds), steps, 0.0 if kinds == 2 else threshold_release.CHARGE
    )


@lru_cache(maxsize=64)
def _block(mu: float, kinds: int, steps: int) -> DominatingPair:
    """The pair that dominates every adaptive composition of `steps` releases, at most a block."""
    lower = tie(mu, steps)
    if steps <= FEW:
        return replace(
            sampled_gaussian(1 / (mu * math.sqrt(steps)), 1.0, ADD), attained=(lower, lower)
        )
    known = _reached(mu, kinds, min(BLOCK, 1 << (steps - 1).bit_length()))[steps - 1]
    both = dominating(known, known)
    return DominatingPair(both, both, (lower, lower))


def _repeats(
    event: ev.NoisyArgmax | ev.NoisyThreshold, count: int, adjacency: Adjacency
) -> DominatingPairs:
    mu, kinds = _move(event, adjacency)
    if not kinds or mu > threshold_release.MOST:
        lower = tie(mu)
        return ((replace(sampled_gaussian(1 / mu, 1.0, ADD), attained=(lower, lower)), count),)
    found = ((BLOCK, count // BLOCK), (count % BLOCK, 1))
    return tuple((_block(mu, kinds, steps), often) for steps, often in found if steps and often)


def _pair(event: ev.NoisyArgmax | ev.NoisyThreshold, adjacency: Adjacency) -> DominatingPair:
    return _repeats(event, 1, adjacency)[0][0]


def _divergences(
    event: ev.NoisyArgmax | ev.NoisyThreshold, adjacency: Adjacency, alphas: Array
) -> Divergences:
    mu, kinds = _move(event, adjacency)
    return np.array(_at_orders(mu, kinds, tuple(alphas.tolist()))), 0.0


@lru_cache(maxsize=64)
def _at_orders(mu: float, kinds: int, orders: tuple[float, ...]) -> tuple[float, ...]:
    """A budget asks for the same orders again and again."""
    alphas = np.array(orders)
    found = threshold_release.divergences(mu, kinds, alphas) if kinds else alphas * mu**2 / 2
    return tuple(found.tolist())


def _rho(event: ev.NoisyArgmax | ev.NoisyThreshold, adjacency: Adjacency) -> float:
    """That of the Gaussian number: at large orders a cell tells nearly as much."""
    return _move(event, adjacency)[0] ** 2 / 2


def _argmax_group(event: ev.NoisyArgmax, size: int) -> Event:
    """Several units move several votes, in any direction: the Gaussian release of all counts."""
    return ev.Gaussian(event.sigma / (math.sqrt(2) * size))


def _within(event: ev.NoisyArgmax) -> None:
    numeric_limits.noise("sigma", event.sigma)
    numeric_limits.count("classes", event.classes)


ROWS = (
    EventRule(
        ev.NoisyThreshold,
        words=lambda e: (
            f"whether a number is above a threshold, with Gaussian noise of "
            f"{e.noise_multiplier:.6g} times the bound on one unit"
        ),
        pair=_pair,
        repeats=_repeats,
        divergences=_divergences,
        rho=_rho,
        group=lambda e, size: replace(e, noise_multiplier=e.noise_multiplier / size),
        halve_noise=lambda e: replace(e, noise_multiplier=e.noise_multiplier / 2),
        within=lambda e: numeric_limits.noise("noise_multiplier", e.noise_multiplier),
    ),
    EventRule(
        ev.NoisyArgmax,
        words=lambda e: (
            f"which of {e.classes:,} classes has most votes, each count with Gaussian noise of "
            f"{e.sigma:.6g} votes"
        ),
        pair=_pair,
        repeats=_repeats,
        divergences=_divergences,
        rho=_rho,
        group=_argmax_group,
        halve_noise=lambda e: replace(e, sigma=e.sigma / 2),
        within=_within,
    ),
)
