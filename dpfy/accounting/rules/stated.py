"""Rows of mechanisms that are known by a statement about them, under the adjacency for which it was
made.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dpfy.accounting import bounded_range, numeric_limits
from dpfy.accounting.moments import Array
from dpfy.accounting.rules.noise import SILENT, sampled_atoms
from dpfy.accounting.rules.rule import (
    Divergences,
    DominatingPair,
    DominatingPairs,
    EventRule,
    Peer,
    no_group,
    no_rho,
    not_pure,
    refuse_replaced,
)
from dpfy.accounting.tight.losses import Atoms
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency


def black_box(epsilon: float, delta: float) -> DominatingPair:
    """The pair that dominates every (epsilon, delta) mechanism: randomized response with a chance
    delta of telling all.
    """
    if delta >= 1:
        raise Unsupported("a black box with delta 1", "state the mechanism, or leave it out")
    high, low = (
        (1 - delta) / (1 + math.exp(-epsilon)),
        (1 - delta) / (1 + math.exp(min(epsilon, 700))),
    )
    two = (
        0 < epsilon < 700
    )  # beyond, the lower atom underflows: all mass on the upper one dominates
    atoms = (
        Atoms((epsilon, -epsilon), (high, low), delta)
        if two
        else Atoms((epsilon,), (1 - delta,), delta)
    )
    return DominatingPair(atoms, atoms)


def _box_poisson(event: ev.EpsilonDelta, rate: float, adjacency: Adjacency) -> DominatingPair:
    """The pair of the box on a Poisson sample (Zhu, Dong & Wang 2022, Theorem 11): P becomes the
    mixture of P and Q.

    The box gives e^epsilon as much to one outcome and e^-epsilon as much to another; with chance
    delta it tells all, either way.
    """
    if adjacency is Adjacency.REPLACE_ONE:
        refuse_replaced(event)
    epsilon, delta, q = event.epsilon, event.delta, rate
    if delta >= 1 or epsilon >= 700:  # then masses underflow: what the two outcomes imply dominates
        upper = black_box(amplified_pure(epsilon, q), q * delta).removed
        return DominatingPair(upper, upper, (SILENT, SILENT), touched=q)
    high, low = (1 - delta) / (1 + math.exp(-epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    more, less, alone = (
        amplified_pure(epsilon, q),
        math.log1p(q * math.expm1(-epsilon)),
        math.log1p(-q),
    )
    removed = Atoms(
        (more, less, alone),
        ((1 - q) * low + q * high, (1 - q) * high + q * low, (1 - q) * delta),
        q * delta,
    )
    return DominatingPair(removed, Atoms((-more, -less, -alone), (low, high, delta)), touched=q)


def amplified_pure(epsilon: float, rate: float) -> float:
    """log(1 + rate (e^epsilon - 1)), rounded up (Balle, Barthe & Gaboardi 2018, Theorems 8 and
    9).
    """
    grown = math.log1p(rate * math.expm1(epsilon)) if epsilon < 700 else epsilon + math.log(rate)
    return min(epsilon, grown * (1 + 1e-15))


def walked(delta: float, epsilon: float, size: int) -> float:
    """The delta at `size` times epsilon of a group of `size`, where one member has (epsilon,
    delta).

    Walking from one data set to the other through `size` neighbours multiplies by e^epsilon and
    adds delta at each step, in all delta (e^(size epsilon) - 1) / (e^epsilon - 1).
    """
    if delta == 0 or size * epsilon > 700:
        return 1.0 if delta else 0.0
    factor = float(size) if epsilon == 0 else math.expm1(size * epsilon) / math.expm1(epsilon)
    return min(1.0, delta * factor)


def _box_rho(event: ev.EpsilonDelta, adjacency: Adjacency) -> float:
    """epsilon tanh(epsilon / 2), the least rho of pure epsilon.

    With u = order - 1/2 the log moment of randomized response is log cosh(u epsilon) - log
    cosh(epsilon / 2), concave in u^2: its tangent at order 1, of this slope, lies above it, and
    order (order - 1) = u^2 - 1/4.
    """
    return no_rho(event, adjacency) if event.delta else event.epsilon * math.tanh(event.epsilon / 2)


def _box_words(event: ev.EpsilonDelta) -> str:
    if event.delta == 0:
        return f"a mechanism known to be {event.epsilon:g}-differentially private (pure, delta 0)"
    return f"a mechanism known to be ({event.epsilon:g}, {event.delta:g})-differentially private"


def _zcdp_group(event: ev.Zcdp, size: int) -> Event:
    """Bun & Steinke 2016, Proposition 1.9."""
    return no_group(event, size) if event.xi else ev.Zcdp(size**2 * event.rho)


def _renyi_divergences(event: ev.RenyiCurve, adjacency: Adjacency, alphas: Array) -> Divergences:
    """Log moments (order - 1) D are convex in the order and 0 at order 1: lines between known ones
    lie above them.
    """
    orders, values = np.array(event.orders), np.array(event.values)
    values = np.minimum.accumulate(values[::-1])[
        ::-1
    ]  # a divergence is at most that of a larger order
    logs = np.interp(
        alphas - 1,
        np.concatenate([[0.0], orders - 1]),
        np.concatenate([[0.0], (orders - 1) * values]),
    )
    return np.where(alphas <= orders[-1], logs / (alphas - 1) * (1 + 1e-15), np.inf), 0.0


def _range_pair(event: ev.BoundedRange, adjacency: Adjacency, steps: int = 1) -> DominatingPair:
    """So many mechanisms of this range, each chosen with sight of the outputs before it."""
    lower = bounded_range.attained(event.epsilon, steps)
    if not bounded_range.block(event.epsilon):
        return replace(black_box(event.epsilon, 0.0), attained=(lower, lower))
    both = bounded_range.composed(event.epsilon, steps)
    return DominatingPair(both, both, (lower, lower))


def _range_repeats(event: ev.BoundedRange, count: int, adjacency: Adjacency) -> DominatingPairs:
    block = bounded_range.block(event.epsilon) or 1
    found = ((block, count // block), (count % block, 1))
    return tuple(
        (_range_pair(event, adjacency, steps), often) for steps, often in found if steps and often
    )


def _range_poisson(event: ev.BoundedRange, rate: float, adjacency: Adjacency) -> DominatingPair:
    if adjacency is Adjacency.REPLACE_ONE:
        refuse_replaced(event)
    whole = _range_pair(event, adjacency)
    assert isinstance(whole.removed, Atoms)
    upper, lower = (
        sampled_atoms(whole.removed, rate),
        sampled_atoms(bounded_range.attained(event.epsilon), rate),
    )
    return DominatingPair(upper.removed, upper.added, (lower.removed, lower.added), rate)


ROWS = (
    EventRule(
        ev.Nothing,
        words=lambda e: "nothing",
        rho=lambda e, adjacency: 0.0,
        pure=lambda e, adjacency: 0.0,
        group=lambda e, size: e,
        divergences=lambda e, adjacency, alphas: (np.zeros(len(alphas)), 0.0),
        peer=Peer("NoOpDpEvent", lambda e, translate: (), lambda e, translate: ev.Nothing()),
    ),
    EventRule(
        ev.NotPrivate,
        words=lambda e: "a release without any protection",
        rho=lambda e, adjacency: math.inf,
        pure=lambda e, adjacency: math.inf,
        group=lambda e, size: e,
        divergences=lambda e, adjacency, alphas: (np.full(len(alphas), np.inf), 0.0),
        peer=Peer(
            "NonPrivateDpEvent", lambda e, translate: (), lambda e, translate: ev.NotPrivate()
        ),
    ),
    EventRule(
        ev.EpsilonDelta,
        words=_box_words,
        pair=lambda e, adjacency: black_box(e.epsilon, e.delta),
        poisson=_box_poisson,
        rho=_box_rho,
        pure=lambda e, adjacency: not_pure(e, adjacency) if e.delta else e.epsilon,
        group=lambda e, size: ev.EpsilonDelta(size * e.epsilon, walked(e.delta, e.epsilon, size)),
        plain=lambda e: e if e.epsilon or e.delta else ev.Nothing(),
        within=lambda e: numeric_limits.cost("EpsilonDelta", e.epsilon),
        replace_only=True,
    ),
    EventRule(
        ev.MetricPrivacy,
        words=lambda e: (
            f"metric privacy of {e.eta:g} in {e.metric}: no differential privacy, and no epsilon"
        ),
        rho=lambda e, adjacency: math.inf,
        pure=lambda e, adjacency: math.inf,
        group=lambda e, size: ev.NotPrivate(),
        plain=lambda e: ev.NotPrivate(),
        divergences=lambda e, adjacency, alphas: (np.full(len(alphas), np.inf), 0.0),
        can_be_sampled=False,
    ),
    EventRule(
        ev.Zcdp,
        words=lambda e: (
            f"a mechanism known to be {e.rho:g}-zCDP"
            if not e.xi
            else f"a mechanism known to be ({e.xi:g}, {e.rho:g})-zCDP"
        ),
        divergences=lambda e, adjacency, alphas: (np.asarray(e.xi + e.rho * alphas), 0.0),
        rho=lambda e, adjacency: no_rho(e, adjacency) if e.xi else e.rho,
        group=_zcdp_group,
        within=lambda e: numeric_limits.cost("Zcdp", e.rho, e.xi),
        peer=Peer(
            "ZCDpEvent",
            lambda e, translate: (e.rho, e.xi),
            lambda e, translate: ev.Zcdp(e.rho, e.xi),
        ),
        replace_only=True,
    ),
    EventRule(
        ev.RenyiCurve,
        words=lambda e: (
            f"a mechanism known by its Rényi divergences at {len(e.orders):,} orders (at most "
            f"{e.values[0]:.4g} at order {e.orders[0]:g})"
        ),
        divergences=_renyi_divergences,
        orders=lambda e: e.orders,
        within=lambda e: numeric_limits.cost("RenyiCurve", e.orders[-1], *e.values),
        replace_only=True,
    ),
    EventRule(
        ev.BoundedRange,
        words=lambda e: (
            f"a choice by a mechanism of range {e.epsilon:g} (exponential mechanism), "
            f"{e.epsilon:g}-differentially private"
        ),
        pair=_range_pair,
        repeats=_range_repeats,
        poisson=_range_poisson,
        divergences=lambda e, adjacency, alphas: (
            bounded_range.divergences(e.epsilon, alphas),
            0.0,
        ),
        rho=lambda e, adjacency: (
            e.epsilon**2 / 8
        ),  # Hoeffding's lemma for losses in such an interval
        pure=lambda e, adjacency: e.epsilon,
        group=lambda e, size: ev.BoundedRange(size * e.epsilon),
        plain=lambda e: e if e.epsilon else ev.Nothing(),
        within=lambda e: numeric_limits.cost("BoundedRange", e.epsilon),
        replace_only=True,
    ),
)
