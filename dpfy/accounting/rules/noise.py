"""Rows of mechanisms that are known exactly: sums with noise, and randomized response.

A noise multiplier is the noise over the bound on one unit's contribution. Adding, removing or
zeroing a unit moves a sum by one such bound; replacing it moves the sum by two.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from dpfy.accounting import numeric_limits
from dpfy.accounting.moments import Array
from dpfy.accounting.rules.rule import (
    Divergences,
    DominatingPair,
    EventRule,
    Peer,
    group_size_of,
    refuse_replaced,
    same_fields,
)
from dpfy.accounting.tight.gaussian_losses import GaussianPair
from dpfy.accounting.tight.losses import Atoms
from dpfy.accounting.tight.other_losses import (
    LaplacePair,
    discrete_gaussian,
    discrete_laplace,
    subsample_atoms,
)
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency

ONE = ((1.0, 0.0),)
SILENT = Atoms((0.0,), (1.0,))
"""The loss of a release that depends on nothing."""

MOST_AMOUNTS = 4096
"""Different amounts by which a group may move a sum."""

Moves = tuple[tuple[float, float], ...]
"""Amounts by which a Gaussian is moved: (probability, move)."""


def moved(sigma: float, amounts: Moves) -> tuple[GaussianPair, GaussianPair]:
    """A Gaussian moved by a random amount against one that is not; and the other way round."""
    kept = tuple((p, m) for p, m in amounts if p > 0)
    return GaussianPair(sigma, kept, ONE), GaussianPair(sigma, ONE, tuple((p, -m) for p, m in kept))


def rated(q: float, move: float) -> Moves:
    """Nothing or `move`, the latter with probability q."""
    return ((1.0, move),) if q == 1 else ((1 - q, 0.0), (q, move))


def sampled_gaussian(sigma: float, q: float, adjacency: Adjacency) -> DominatingPair:
    """A Gaussian at rate q in (0, 1]; one step, also where q is 1."""
    if q == 1 or adjacency is not Adjacency.REPLACE_ONE:
        return DominatingPair(*moved(sigma, rated(q, float(group_size_of(adjacency)))), touched=q)
    both = GaussianPair(sigma, rated(q, 1.0), rated(q, -1.0))
    return DominatingPair(both, both, touched=q)


def _gaussian_pair(event: ev.Gaussian, adjacency: Adjacency) -> DominatingPair:
    return sampled_gaussian(event.noise_multiplier, 1.0, adjacency)


def _gaussian_poisson(event: ev.Gaussian, rate: float, adjacency: Adjacency) -> DominatingPair:
    return sampled_gaussian(event.noise_multiplier, rate, adjacency)


def _noise_divided(event: Any, size: int) -> Event:
    """A group moves the sum `size` times as far."""
    divided: Event = replace(event, noise_multiplier=event.noise_multiplier / size)
    return divided


def _ratio_rho(event: Any, adjacency: Adjacency) -> float:
    """Gaussian 1/(2 sigma^2), pure epsilon at most epsilon^2/2 (Bun & Steinke 2016)."""
    return (group_size_of(adjacency) / float(event.noise_multiplier)) ** 2 / 2


def _laplace_pair(event: ev.Laplace, adjacency: Adjacency) -> DominatingPair:
    both = LaplacePair(group_size_of(adjacency) / event.noise_multiplier)
    return DominatingPair(both, both)


def _laplace_poisson(event: ev.Laplace, rate: float, adjacency: Adjacency) -> DominatingPair:
    if adjacency is Adjacency.REPLACE_ONE:
        refuse_replaced(event)
    width = 1 / event.noise_multiplier
    return DominatingPair(
        LaplacePair(width, rate), LaplacePair(width, rate, added=True), touched=rate
    )


def sampled_atoms(base: Atoms, rate: float) -> DominatingPair:
    """A discrete pair, the same in both directions, on a Poisson sample (Zhu, Dong & Wang 2022,
    Theorem 11).
    """
    return DominatingPair(
        subsample_atoms(base, rate, False), subsample_atoms(base, rate, True), touched=rate
    )


def _discrete(event: ev.DiscreteLaplace | ev.DiscreteGaussian, adjacency: Adjacency) -> Atoms:
    shift = group_size_of(adjacency) * event.sensitivity
    if isinstance(event, ev.DiscreteLaplace):
        return discrete_laplace(event.noise_parameter, shift)
    return discrete_gaussian(event.sigma, shift)


def _discrete_pair(event: Any, adjacency: Adjacency) -> DominatingPair:
    both = _discrete(event, adjacency)
    return DominatingPair(both, both)


def _discrete_poisson(event: Any, rate: float, adjacency: Adjacency) -> DominatingPair:
    if adjacency is Adjacency.REPLACE_ONE:
        refuse_replaced(event)
    return sampled_atoms(_discrete(event, adjacency), rate)


def _more_sensitive(event: Any, size: int) -> Event:
    grown: Event = replace(event, sensitivity=size * event.sensitivity)
    return grown


def _discrete_gaussian_divergences(
    event: ev.DiscreteGaussian, adjacency: Adjacency, alphas: Array
) -> Divergences:
    """At most those of the continuous one (Canonne, Kamath & Steinke 2020, Theorem 4)."""
    return np.asarray(alphas * _discrete_gaussian_rho(event, adjacency)), 0.0


def _discrete_gaussian_rho(event: ev.DiscreteGaussian, adjacency: Adjacency) -> float:
    return (group_size_of(adjacency) * event.sensitivity / event.sigma) ** 2 / 2


def _response_odds(event: ev.RandomizedResponse, adjacency: Adjacency) -> tuple[float, float]:
    """The chance of the true value and of each other one."""
    if adjacency is Adjacency.ADD_OR_REMOVE_ONE:
        raise Unsupported(
            f"RandomizedResponse under {adjacency.value}",
            "an answer cannot be absent; use --adjacency replace-one or zero-out",
        )
    if event.noise_parameter == 0:
        raise Unsupported(
            "RandomizedResponse without noise", "give noise_parameter above 0, or state NotPrivate"
        )
    other = event.noise_parameter / event.buckets
    return 1 - event.noise_parameter + other, other


def _response_pair(event: ev.RandomizedResponse, adjacency: Adjacency) -> DominatingPair:
    (true, other), k = _response_odds(event, adjacency), event.buckets
    if adjacency is Adjacency.REPLACE_ONE:
        a = math.log(true / other)
        atoms = Atoms((a, 0.0, -a), (true, (k - 2) * other, other)) if a else SILENT
        return DominatingPair(atoms, atoms)
    high, low = math.log(true * k), math.log(other * k)
    if high == low:
        return DominatingPair(SILENT, SILENT)
    return DominatingPair(
        Atoms((high, low), (true, (k - 1) * other)), Atoms((-low, -high), (1 - 1 / k, 1 / k))
    )


def _response_pure(event: ev.RandomizedResponse, adjacency: Adjacency) -> float:
    (true, other), k = _response_odds(event, adjacency), event.buckets
    exact = (
        math.log(true / other)
        if adjacency is Adjacency.REPLACE_ONE
        else max(math.log(true * k), -math.log(other * k))
    )
    return (exact + 1e-15) * (1 + 1e-15)


def _response_within(event: ev.RandomizedResponse) -> None:
    numeric_limits.count("buckets", event.buckets)
    if 0 < event.noise_parameter < 1e-15:
        raise InvalidInput("noise_parameter", event.noise_parameter, "must be 0 or at least 1e-15")


def _mixture(sigma: float, parts: Moves, adjacency: Adjacency, name: str) -> DominatingPair:
    if adjacency is Adjacency.REPLACE_ONE:
        raise Unsupported(
            f"{name} under replace-one", "use --adjacency add-or-remove-one or zero-out"
        )
    chances: dict[float, float] = {}
    for p, s in parts:
        if p > 0:
            chances[s] = chances.get(s, 0.0) + p
    if set(chances) == {0.0}:
        return DominatingPair(SILENT, SILENT)
    total = math.fsum(chances.values())
    kept = tuple((chances[s] / total, s) for s in sorted(chances))
    return DominatingPair(*moved(sigma, kept), touched=sum(p for p, s in kept if s))


def _mixture_pair(event: ev.MixtureOfGaussians, adjacency: Adjacency) -> DominatingPair:
    parts = tuple(zip(event.probabilities, event.sensitivities, strict=True))
    return _mixture(event.standard_deviation, parts, adjacency, type(event).__name__)


def _mixture_poisson(
    event: ev.MixtureOfGaussians, rate: float, adjacency: Adjacency
) -> DominatingPair:
    if adjacency is Adjacency.REPLACE_ONE:
        refuse_replaced(event)
    thinned = [(rate * p, s) for p, s in zip(event.probabilities, event.sensitivities, strict=True)]
    return _mixture(
        event.standard_deviation, ((1 - rate, 0.0), *thinned), adjacency, type(event).__name__
    )


def _mixture_known(event: ev.MixtureOfGaussians, most: int | None) -> Event:
    """Who knows by how much a unit moves the sum sees a Gaussian moved by the largest amount; one
    amount alone was never hidden.
    """
    amounts = [s for p, s in zip(event.probabilities, event.sensitivities, strict=True) if p > 0]
    if len(set(amounts)) < 2:
        return event
    return ev.Gaussian(event.standard_deviation / max(amounts))


def _mixture_group(event: ev.MixtureOfGaussians, size: int) -> Event:
    """Each member moves the sum by an amount of its own: the amounts of all add up."""
    one = {s: p for p, s in zip(event.probabilities, event.sensitivities, strict=True) if p > 0}
    total = {0.0: 1.0}
    for _ in range(size):
        sums: dict[float, float] = {}
        for s, p in total.items():
            for more, chance in one.items():
                sums[s + more] = sums.get(s + more, 0.0) + p * chance
        total = sums
        if len(total) > MOST_AMOUNTS:
            raise Unsupported(
                f"a group whose sum moves by more than {MOST_AMOUNTS} amounts",
                "ask for a smaller group",
            )
    amounts = sorted(total)
    chances = [total[s] for s in amounts]
    return ev.MixtureOfGaussians(
        event.standard_deviation,
        tuple(amounts),
        (max(0.0, 1 - math.fsum(chances[1:])), *chances[1:]),
    )


def _mixture_within(event: ev.MixtureOfGaussians) -> None:
    numeric_limits.noise("standard_deviation", event.standard_deviation)
    if max(event.sensitivities) / event.standard_deviation > 1 / numeric_limits.LEAST_NOISE:
        rule = f"must be at most {1 / numeric_limits.LEAST_NOISE:g} times the noise"
        raise InvalidInput("sensitivities", max(event.sensitivities), rule)


def _noisy_sum(kind: type, **known: Any) -> EventRule:
    """A sum whose noise is given in bounds on one unit. dp-accounting writes a release without
    noise as one with noise 0.
    """
    return EventRule(
        kind,
        words=lambda e: (
            f"a sum with {kind.__name__} noise of {e.noise_multiplier:.6g} times the bound on one "
            f"unit"
        ),
        rho=_ratio_rho,
        group=_noise_divided,
        halve_noise=lambda e: _noise_divided(e, 2),
        within=lambda e: numeric_limits.noise("noise_multiplier", e.noise_multiplier),
        peer=replace(
            same_fields(kind, noise_multiplier="noise_multiplier"),
            back=lambda e, translate: (
                kind(e.noise_multiplier) if e.noise_multiplier else ev.NotPrivate()
            ),
        ),
        **known,
    )


def _noisy_integer(kind: type, name: str, parameter: str, **known: Any) -> EventRule:
    """An integer with noise on the integers; a group moves it farther."""

    def within(event: Any) -> None:
        numeric_limits.noise(parameter, getattr(event, parameter))
        numeric_limits.count("sensitivity", event.sensitivity)

    def told(e: Any) -> str:
        return (
            f"an integer of sensitivity {e.sensitivity:,} with {name} noise of parameter "
            f"{getattr(e, parameter):.6g}"
        )

    return EventRule(
        kind,
        told,
        _discrete_pair,
        poisson=_discrete_poisson,
        group=_more_sensitive,
        within=within,
        **known,
    )


ROWS = (
    _noisy_sum(
        ev.Gaussian,
        pair=_gaussian_pair,
        poisson=_gaussian_poisson,
        gaussian=lambda e: e.noise_multiplier,
    ),
    _noisy_sum(
        ev.Laplace,
        pair=_laplace_pair,
        poisson=_laplace_poisson,
        pure=lambda e, adjacency: numeric_limits.rounded_up(
            group_size_of(adjacency) / Fraction(e.noise_multiplier)
        ),
    ),
    _noisy_integer(
        ev.DiscreteLaplace,
        "discrete Laplace",
        "noise_parameter",
        pure=lambda e, adjacency: numeric_limits.rounded_up(
            group_size_of(adjacency) * e.sensitivity * Fraction(e.noise_parameter)
        ),
        peer=same_fields(
            ev.DiscreteLaplace, noise_parameter="noise_parameter", sensitivity="sensitivity"
        ),
    ),
    _noisy_integer(
        ev.DiscreteGaussian,
        "discrete Gaussian",
        "sigma",
        divergences=_discrete_gaussian_divergences,
        rho=_discrete_gaussian_rho,
    ),
    EventRule(
        ev.RandomizedResponse,
        words=lambda e: (
            f"one of {e.buckets:,} answers, replaced by a random one with probability "
            f"{e.noise_parameter:g}"
        ),
        pair=_response_pair,
        pure=_response_pure,
        within=_response_within,
        peer=same_fields(
            ev.RandomizedResponse, noise_parameter="noise_parameter", buckets="num_buckets"
        ),
        replace_only=True,
        can_be_sampled=False,
    ),
    EventRule(
        ev.MixtureOfGaussians,
        lambda e: (
            f"a sum with Gaussian noise of {e.standard_deviation:.6g}, moved by one of "
            f"{len(e.sensitivities):,} amounts"
        ),
        pair=_mixture_pair,
        poisson=_mixture_poisson,
        group=_mixture_group,
        unsampled=_mixture_known,
        within=_mixture_within,
        peer=Peer(
            "MixtureOfGaussiansDpEvent",
            lambda e, translate: (e.standard_deviation, e.sensitivities, e.probabilities),
            lambda e, translate: ev.MixtureOfGaussians(
                e.standard_deviation, tuple(e.sensitivities), tuple(e.sampling_probs)
            ),
        ),
    ),
)
