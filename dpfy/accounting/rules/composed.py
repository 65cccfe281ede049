"""Rows of events that are made of others: repetition, composition, disjoint parts, the best of
several runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dpfy.accounting.moments import Array
from dpfy.accounting.rules.rule import (
    Divergences,
    EventRule,
    Peer,
    grouped,
    halve_noise,
    halve_noise_inside,
    rule_of,
    unsampled,
    words,
)
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event, flatten, inside
from dpfy.core.unit import Adjacency

ADD = Adjacency.ADD_OR_REMOVE_ONE


def _repeated_unsampled(event: ev.Repeated, most: int | None) -> Event:
    sampled = isinstance(
        event.event, (ev.PoissonSampled, ev.TruncatedPoissonGaussian, ev.SampledWithoutReplacement)
    )
    return ev.Repeated(
        unsampled(event.event), min(event.count, most) if most and sampled else event.count
    )


def _selected(event: ev.RepeatAndSelect, adjacency: Adjacency, alphas: Array) -> Divergences:
    """Papernot & Steinke 2022; a run whose loss is infinite with a small chance fails as often as
    any of them does.

    Write P = (1 - d) P' + d P'' and Q = (1 - d) Q' + d Q'', P' and Q' the outcomes of finite loss.
    That no run meets P'' (or Q'') has the same chance in both worlds, at least 1 - mean d. Given
    that, the runs are those of P' (or Q'), and their number has probabilities multiplied by (1 -
    d)^k: again a truncated negative binomial with a larger gamma, or a Poisson number with a
    smaller mean, hence cheaper. P' and Q' are P and Q over 1 - d at most: their divergences exceed
    those of the finite parts by a / (a - 1) log(1 / (1 - d)).
    """
    from dpfy.accounting.rdp import approximate
    from dpfy.accounting.tuning import selected

    values, chance = approximate(event.event, adjacency, tuple(alphas))
    if chance >= 1:
        return np.full(len(alphas), np.inf), 0.0
    finite = values - alphas / (alphas - 1) * np.log1p(-chance)
    return selected(alphas, finite, event.mean, event.shape), min(1.0, event.mean * chance)


def _worst_of(event: ev.OneOf, adjacency: Adjacency, alphas: Array) -> Divergences:
    """The worst of them at every order.

    Let p be the chances of the choices, the same in both worlds given what was released before. The
    choice is seen, so that the moment of order a is the mean over p of the moments of the choices,
    hence at most the largest; a chance of infinite loss likewise.
    """
    from dpfy.accounting.rdp import approximate

    found = [approximate(part, adjacency, tuple(float(a) for a in alphas)) for part in event.events]
    return np.max([values for values, _ in found], axis=0), max(chance for _, chance in found)


def _worst_pure(event: ev.OneOf, adjacency: Adjacency) -> float:
    from dpfy.accounting.composition import pure

    return max(pure(part, adjacency) for part in event.events)


def _worst_rho(event: ev.OneOf, adjacency: Adjacency) -> float:
    from dpfy.accounting.rdp import rho

    return max(rho(part, adjacency) for part in event.events)


def _all_of(event: ev.OneOf, change: Callable[[Event], Event]) -> ev.OneOf:
    """The same choices, each changed; equal ones once."""
    return ev.OneOf(tuple(dict.fromkeys(change(part) for part in event.events)))


def _each(event: ev.Parallel, change: Callable[[Event], Event]) -> ev.Parallel:
    """The same parts with their events changed."""
    return ev.Parallel(tuple((name, change(part)) for name, part in event.parts))


def require_removal(event: Event) -> Event:
    """`event`, if what it costs to add or remove a unit is known wherever replacing one is; else
    `Unsupported`.
    """
    for leaf, _ in flatten(event):
        if rule_of(leaf).replace_only:
            raise Unsupported(
                f"Parallel under replace-one with {type(leaf).__name__}",
                "a unit may move from one part to another, and nothing is known of removing it; "
                "use --adjacency add-or-remove-one",
            )
        for part in inside(leaf):
            require_removal(part)
    return event


def _parallel_divergences(event: ev.Parallel, adjacency: Adjacency, alphas: Array) -> Divergences:
    """The worst part; under replace-one also a unit removed from one part and added to another."""
    from dpfy.accounting.rdp import approximate

    orders = tuple(float(a) for a in alphas)
    stay = [approximate(part, adjacency, orders) for _, part in event.parts]
    worst, infinity = (
        np.max([values for values, _ in stay], axis=0),
        max(chance for _, chance in stay),
    )
    if adjacency is not Adjacency.REPLACE_ONE or len(stay) == 1:
        return worst, infinity
    move = [approximate(require_removal(part), ADD, orders) for _, part in event.parts]
    two = np.sort([values for values, _ in move], axis=0)[-2:].sum(axis=0)
    return np.maximum(worst, two), max(infinity, sum(sorted(chance for _, chance in move)[-2:]))


def _worst_part(
    event: ev.Parallel, adjacency: Adjacency, cost: Callable[[Event, Adjacency], float]
) -> float:
    """As for divergences, of a cost that adds up."""
    stay = max(cost(part, adjacency) for _, part in event.parts)
    if adjacency is not Adjacency.REPLACE_ONE or len(event.parts) == 1:
        return stay
    return max(stay, sum(sorted(cost(require_removal(part), ADD) for _, part in event.parts)[-2:]))


def _parallel_pure(event: ev.Parallel, adjacency: Adjacency) -> float:
    from dpfy.accounting.composition import pure

    return _worst_part(event, adjacency, pure)


def _parallel_rho(event: ev.Parallel, adjacency: Adjacency) -> float:
    from dpfy.accounting.rdp import rho

    return _worst_part(event, adjacency, rho)


def _parallel_words(event: ev.Parallel) -> str:
    return "on disjoint parts of the data, " + "; ".join(
        f"{name}: {words(part)}" for name, part in event.parts
    )


ROWS = (
    EventRule(
        ev.Stopped,
        words=lambda e: (
            f"{words(e.event)}; at fixed points it could end, as what it had released suggested"
        ),
        group=lambda e, size: replace(e, event=grouped(e.event, size)),
        unsampled=lambda e, most: replace(e, event=unsampled(e.event, most)),
        halve_noise=halve_noise_inside,
    ),
    EventRule(
        ev.Repeated,
        words=lambda e: words(e.event) if e.count == 1 else f"{e.count:,} times: {words(e.event)}",
        group=lambda e, size: ev.Repeated(grouped(e.event, size), e.count),
        unsampled=_repeated_unsampled,
        halve_noise=halve_noise_inside,
        peer=Peer(
            "SelfComposedDpEvent",
            lambda e, translate: (translate(e.event), e.count),
            lambda e, translate: ev.Repeated(translate(e.event), e.count),
        ),
    ),
    EventRule(
        ev.Composed,
        words=lambda e: "; then ".join(words(part) for part in e.events) or "nothing",
        group=lambda e, size: ev.Composed(tuple(grouped(part, size) for part in e.events)),
        unsampled=lambda e, most: ev.Composed(tuple(unsampled(part, most) for part in e.events)),
        halve_noise=lambda e: ev.Composed(tuple(halve_noise(part) for part in e.events)),
        peer=Peer(
            "ComposedDpEvent",
            lambda e, translate: ([translate(part) for part in e.events],),
            lambda e, translate: ev.Composed(tuple(translate(part) for part in e.events)),
        ),
    ),
    EventRule(
        ev.Parallel,
        words=_parallel_words,
        divergences=_parallel_divergences,
        pure=_parallel_pure,
        rho=_parallel_rho,
        unsampled=lambda e, most: _each(e, lambda part: unsampled(part, most)),
        halve_noise=lambda e: _each(e, halve_noise),
    ),
    EventRule(
        ev.OneOf,
        words=lambda e: "one of: " + "; or ".join(words(part) for part in e.events),
        divergences=_worst_of,
        pure=_worst_pure,
        rho=_worst_rho,
        group=lambda e, size: _all_of(e, lambda part: grouped(part, size)),
        unsampled=lambda e, most: _all_of(e, lambda part: unsampled(part, most)),
        halve_noise=lambda e: _all_of(e, halve_noise),
    ),
    EventRule(
        ev.RepeatAndSelect,
        words=lambda e: (
            f"the best of a random number of runs (mean {e.mean:g}) of: {words(e.event)}"
        ),
        divergences=_selected,
        unsampled=lambda e, most: replace(e, event=unsampled(e.event)),
        halve_noise=halve_noise_inside,
        peer=Peer(
            "RepeatAndSelectDpEvent",
            lambda e, translate: (translate(e.event), e.mean, e.shape),
            lambda e, translate: ev.RepeatAndSelect(translate(e.event), e.mean, e.shape),
        ),
    ),
)
