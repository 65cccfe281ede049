"""Rows of releases on a part of the data, chosen at random and kept secret."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.accounting import numeric_limits
from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Profile
from dpfy.accounting.rules.noise import SILENT, moved, rated, sampled_gaussian
from dpfy.accounting.rules.rule import (
    Divergences,
    DominatingPair,
    EventRule,
    halve_noise_inside,
    no_group,
    rule_of,
    same_fields,
    unsampled,
    words,
)
from dpfy.accounting.rules.stated import amplified_pure, black_box
from dpfy.accounting.tight.gaussian_losses import GaussianPair
from dpfy.accounting.tight.other_losses import LossMixture, fold
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event, flatten
from dpfy.core.unit import Adjacency

MOST_DRAWS = 8
"""Draws with replacement for each unit: more would be a mixture of hundreds of Gaussians."""

FixedSize = ev.SampledWithoutReplacement | ev.SampledWithReplacement


def joined(event: Event) -> Event:
    """Several Gaussians on the same sample are one Gaussian; one release is itself; anything else
    has no pair here.
    """
    leaves = flatten(event)
    if not leaves:
        return ev.Nothing()
    if any(isinstance(leaf, ev.NotPrivate) for leaf, _ in leaves):
        return ev.NotPrivate()
    noises = [(rule_of(leaf).gaussian(leaf), count) for leaf, count in leaves]
    if all(noise is not None for noise, _ in noises):
        return ev.Gaussian(
            1 / math.sqrt(sum(n / noise**2 for noise, n in noises if noise is not None))
        )
    if len(leaves) == 1 and leaves[0][1] == 1:
        return leaves[0][0]
    raise Unsupported(
        "sampling several different releases at once",
        "sample each release by itself, or use --accountant rdp",
    )


def _poisson_plain(event: ev.PoissonSampled) -> Event:
    """Rate 0 is nothing, rate 1 is the event, a batch of Gaussians is one Gaussian."""
    inner = joined(event.event)
    if isinstance(inner, ev.Nothing) or event.rate == 0:
        return ev.Nothing()
    if isinstance(inner, ev.NotPrivate) or event.rate == 1:
        return inner
    if isinstance(
        inner, ev.Parallel
    ):  # a unit is drawn or not, wherever it lies: every part is a Poisson sample of its own
        return ev.Parallel(
            tuple((name, ev.PoissonSampled(event.rate, part)) for name, part in inner.parts)
        )
    return ev.PoissonSampled(event.rate, inner)


def _poisson_pure(event: ev.PoissonSampled, adjacency: Adjacency) -> float:
    """Balle, Barthe & Gaboardi 2018, Theorem 8: log(1 + q (e^epsilon - 1))."""
    whole = rule_of(event.event).pure(event.event, adjacency)
    rule_of(event.event).poisson(event.event, event.rate, adjacency)  # refuses what has no proof
    return amplified_pure(whole, event.rate)


def _poisson_divergences(
    event: ev.PoissonSampled, adjacency: Adjacency, alphas: Array
) -> Divergences:
    """Those of the pair; at orders so large that masses of a discrete Gaussian left out as tiny
    decide, a bound by convexity.
    """
    from dpfy.accounting.rdp import of_pair

    one = _poisson_plain(event)
    if (own := rule_of(one).divergences) is not None and not isinstance(one, ev.PoissonSampled):
        return own(one, adjacency, alphas)
    values, infinity = of_pair(event, adjacency, alphas)
    if isinstance(event.event, ev.DiscreteGaussian) and 0 < event.rate < 1:
        ratio = event.event.sensitivity / event.event.sigma
        logs = np.logaddexp(
            math.log1p(-event.rate), math.log(event.rate) + alphas * (alphas - 1) * ratio**2 / 2
        )
        values = np.where(alphas * ratio > 27, np.maximum(values, logs / (alphas - 1)), values)
    return values, infinity


def _poisson_group(event: ev.PoissonSampled, size: int) -> Event:
    """The sum moves by the number of members that were drawn."""
    noise = rule_of(event.event).gaussian(event.event)
    if noise is None:
        return no_group(event, size)
    return ev.MixtureOfGaussians(
        noise, tuple(float(k) for k in range(size + 1)), _binomial(size, event.rate)
    )


def _binomial(size: int, rate: float) -> tuple[float, ...]:
    logs = [
        math.lgamma(size + 1)
        - math.lgamma(k + 1)
        - math.lgamma(size - k + 1)
        + k * math.log(rate)
        + (size - k) * math.log1p(-rate)
        if 0 < rate < 1
        else (0.0 if k == (size if rate else 0) else -math.inf)
        for k in range(size + 1)
    ]
    chances = [math.exp(v) for v in logs]
    return (max(0.0, 1 - sum(chances[1:])), *chances[1:])


def _without_plain(event: ev.SampledWithoutReplacement) -> Event:
    inner = joined(event.event)
    if isinstance(inner, ev.Nothing) or event.sample_size == 0:
        return ev.Nothing()
    whole = event.sample_size == event.source_size
    return (
        inner
        if whole
        else ev.SampledWithoutReplacement(event.source_size, event.sample_size, inner)
    )


def _with_plain(event: ev.SampledWithReplacement) -> Event:
    inner = joined(event.event)
    if isinstance(inner, ev.Nothing) or event.sample_size == 0:
        return ev.Nothing()
    return ev.SampledWithReplacement(event.source_size, event.sample_size, inner)


def _replaced(event: FixedSize, adjacency: Adjacency) -> None:
    """Refuse every adjacency but the one of fixed-size samples."""
    if adjacency is not Adjacency.REPLACE_ONE:
        what = f"{type(event).__name__} under {adjacency.value}"
        raise Unsupported(what, "fixed-size samples are analysed under --adjacency replace-one")


def _without_pair(event: ev.SampledWithoutReplacement, adjacency: Adjacency) -> DominatingPair:
    """A Gaussian by its own pair; what is (epsilon, delta)-private by that alone (Balle, Barthe &
    Gaboardi 2018, Theorem 9).
    """
    _replaced(event, adjacency)
    inner, q = event.event, event.sample_size / event.source_size
    if rule_of(inner).gaussian(inner) is not None:
        return _fixed_size(event, adjacency)
    delta = inner.delta if isinstance(inner, ev.EpsilonDelta) else 0.0
    try:
        epsilon = (
            inner.epsilon
            if isinstance(inner, ev.EpsilonDelta)
            else rule_of(inner).pure(inner, adjacency)
        )
    except Unsupported:
        return _fixed_size(event, adjacency)
    upper = black_box(amplified_pure(epsilon, q), q * delta).removed
    return DominatingPair(
        upper, upper, (SILENT, SILENT), touched=q
    )  # what is attained is not known: the lower bound is zero


def _without_pure(event: ev.SampledWithoutReplacement, adjacency: Adjacency) -> float:
    _replaced(event, adjacency)
    return amplified_pure(
        rule_of(event.event).pure(event.event, adjacency), event.sample_size / event.source_size
    )


def _fixed_size(event: FixedSize, adjacency: Adjacency) -> DominatingPair:
    """Fixed-size samples under replace-one: without replacement by Zhu, Dong & Wang 2022; with
    replacement the number of copies of the unit is revealed once it is drawn at all (Balle, Barthe
    & Gaboardi 2018, Theorem 10).

    Attained: all other units contribute u, the unit itself u in one world and -u in the other. The
    first world is then one Gaussian, the second a mixture over how often the unit is drawn, 2u
    apart for every time.
    """
    from scipy.special import erf

    _replaced(event, adjacency)
    sigma = rule_of(event.event).gaussian(event.event)
    if sigma is None:
        what = f"{type(event).__name__} of {type(event.event).__name__}"
        raise Unsupported(what, "use a Gaussian release, or Poisson sampling")
    if isinstance(event, ev.SampledWithoutReplacement):
        q, copies, more = event.sample_size / event.source_size, [(1.0, 1)], 0.0
    else:
        q, copies, more = _copies(event.source_size, event.sample_size)
    cases = [(w, *moved(sigma, ((1 - q, 0.0), (q, 2.0 * k)))) for w, k in copies]
    zero = sum(w * (1 - q) * float(erf(k / sigma / math.sqrt(2))) for w, k in copies)
    folded = fold(cases, zero, more)
    attained = moved(sigma, ((1 - q, 0.0), *((q * w, 2.0 * k) for w, k in copies)))
    return DominatingPair(folded, folded, attained, touched=q)


def _copies(source: int, sample: int) -> tuple[float, list[tuple[float, int]], float]:
    """The chance that a unit is drawn at all; given that, how often; and the chance (below 1e-25)
    of more often than listed.
    """
    if source == 1:
        return 1.0, [(1.0, sample)], 0.0
    if sample > MOST_DRAWS * source:
        raise Unsupported(
            f"{sample} draws with replacement from {source} units",
            "draw less, or state a Gaussian of the whole data",
        )
    q = -math.expm1(sample * math.log1p(-1 / source))
    rows = [sample * math.exp((sample - 1) * math.log1p(-1 / source)) / source / q]
    while len(rows) < sample and (rows[-1] > 1e-26 or len(rows) <= sample / source):
        k = len(rows)
        rows.append(rows[-1] * (sample - k) / (k + 1) / (source - 1))
    more = (
        0.0 if len(rows) == sample else 2 * rows[-1]
    )  # beyond the mean each weight is less than half the one before at the end
    total = math.fsum(rows) + more
    return q, [(weight / total, k + 1) for k, weight in enumerate(rows)], more / total


def _truncated(event: ev.TruncatedPoissonGaussian, adjacency: Adjacency) -> DominatingPair:
    """Truncated Poisson batches (Ganesh et al. 2025): given that the batch overflows, a drawn unit
    may push another one out.

    Let m be the number of other units, of which K are drawn. Where K < most, the unit adds itself,
    as in Poisson sampling. Where it is not, the unit takes the place of another one with
    probability rate * most / (K + 1): the sum moves by up to two bounds. Which units are kept
    besides is a uniform choice whatever K is, so all K >= most have one pair, at their mean rate
    `inside` (joint convexity does the rest).

    `source_size` is that of one of the two neighbours: m is source_size - 1 where a unit is
    removed, and source_size where one is added, so that the batch may overflow with one more unit
    although it never does without. K grows by one draw with m. It overflows for both m, with a rate
    that is at most `inside` for the larger; or for neither; or `between`, for the larger alone:
    then a move of two bounds at the whole rate dominates both. Replacing or zeroing a unit leaves m
    = source_size - 1.

    Attained: the other units contribute nothing, so the unit alone shows, at the rate at which it
    is drawn and kept.
    """
    from scipy.special import bdtrc

    n, q, most, sigma = event.source_size, event.rate, event.most, event.noise_multiplier
    overflow = min(1.0, float(bdtrc(most - 1, n - 1, q))) if most < n else 0.0
    between = _chance(most - 1, n - 1, q) * q if adjacency is Adjacency.ADD_OR_REMOVE_ONE else 0.0
    base = sampled_gaussian(sigma, q, adjacency)
    if max(overflow, between) < 1e-300:
        return base
    beyond = float(bdtrc(most, n, q)) if most < n else 0.0
    inside = min(q, beyond * most / overflow / n * (1 + 1e-9)) if overflow else 0.0
    # The size may be meant with the unit or without it: the smaller rate is attained either way.
    larger = float(bdtrc(most, n + 1, q)) if most <= n else 0.0
    among = min(beyond * most / n, larger * most / (n + 1))
    kept = min(q, q * (1 - (float(bdtrc(most - 1, n, q)) if most <= n else 0.0)) + among) * (
        1 - 1e-9
    )
    whole = DominatingPair(*moved(sigma, rated(q, 2.0)))
    if adjacency is Adjacency.ADD_OR_REMOVE_ONE:
        swap = DominatingPair(*moved(sigma, rated(inside, 2.0))) if inside else base
    else:
        apart = GaussianPair(sigma / 2, rated(inside, 1.0), rated(inside, -1.0))
        swap = DominatingPair(apart, apart)
    between = min(between, 1 - overflow)
    cases = [
        (w, r)
        for w, r in ((1 - overflow - between, base), (overflow, swap), (between, whole))
        if w > 0
    ]
    removed, added = (
        sides[0][1] if len(sides) == 1 else LossMixture(tuple(sides))
        for sides in ([(w, r.removed) for w, r in cases], [(w, r.added) for w, r in cases])
    )
    lower = sampled_gaussian(sigma, kept, adjacency)
    return DominatingPair(removed, added, (lower.removed, lower.added), touched=q)


def _chance(hits: int, draws: int, rate: float) -> float:
    """The probability of exactly so many hits, rounded up."""
    if not 0 <= hits <= draws or rate == 1:
        return float(hits == draws)
    logs = math.lgamma(draws + 1) - math.lgamma(hits + 1) - math.lgamma(draws - hits + 1)
    return min(
        1.0,
        math.exp(min(0.0, logs + hits * math.log(rate) + (draws - hits) * math.log1p(-rate)))
        * (1 + 1e-6),
    )


def _with_unsampled(event: ev.SampledWithReplacement, most: int | None) -> Event:
    """One unit may be drawn every time: its contributions add up."""
    inner = unsampled(event.event)
    noise = rule_of(inner).gaussian(inner)
    return ev.NotPrivate() if noise is None else ev.Gaussian(noise / event.sample_size)


def _bins_unsampled(event: ev.BallsInBins, most: int | None) -> Event:
    return ev.Gaussian(
        event.noise_multiplier / math.sqrt(max(row[j] for j, row in enumerate(event.gram)))
    )


def _bins_profile(event: ev.BallsInBins, adjacency: Adjacency) -> Profile:
    from dpfy.accounting import bins
    from dpfy.accounting.bins import BinsCurve

    _bins_proven(adjacency)
    return Profile(
        lambda: BinsCurve(event),
        lambda: bins.profile(event),
        lambda: bins.certain(event),
    )


def _bins_divergences(event: ev.BallsInBins, adjacency: Adjacency, alphas: Array) -> Divergences:
    from dpfy.accounting import bins

    _bins_proven(adjacency)
    return np.maximum(*bins.divergences(event, alphas)), 0.0


def _allocated_pair(event: ev.RandomlyAllocated, adjacency: Adjacency) -> DominatingPair:
    from dpfy.accounting import allocation

    _bins_proven(adjacency, "RandomlyAllocated")
    norm, steps = 1 / event.noise_multiplier, event.steps
    # a choice of t steps is worth at most log t, or a factor of about the root of t
    if norm > allocation.MOST_NORM or norm * math.sqrt(steps) < allocation.LEAST_NORM:
        return replace(
            sampled_gaussian(event.noise_multiplier, 1.0, adjacency), attained=(SILENT, SILENT)
        )
    # more noise and more steps never cost more
    least, most = max(norm, allocation.LEAST_NORM), min(steps, allocation.MOST_STEPS)
    upper, lower = allocation.losses(least, most)
    exact = (least, most) == (norm, steps)
    return DominatingPair(*upper, attained=lower if exact else (SILENT, SILENT))


def _allocated_divergences(
    event: ev.RandomlyAllocated, adjacency: Adjacency, alphas: Array
) -> Divergences:
    from dpfy.accounting import allocation

    _bins_proven(adjacency, "RandomlyAllocated")
    return allocation.divergences(1 / event.noise_multiplier, event.steps, alphas), 0.0


def _bins_proven(adjacency: Adjacency, kind: str = "BallsInBins") -> None:
    if adjacency is Adjacency.REPLACE_ONE:
        raise Unsupported(
            f"{kind} under replace-one",
            "its pair is proven for --adjacency add-or-remove-one and zero-out",
        )


def _allocated_within(event: ev.RandomlyAllocated) -> None:
    numeric_limits.noise("noise_multiplier", event.noise_multiplier)
    numeric_limits.count("steps", event.steps)


def _sampled_row(
    kind: type, fields: dict[str, str], told: Callable[[Any], str], **known: Any
) -> EventRule:
    """A release on a sample; `fields` are its own ones as dp-accounting names them, `told` says how
    the sample is drawn.
    """
    return EventRule(
        kind,
        words=lambda e: f"{words(e.event)}, on {told(e)}",
        halve_noise=halve_noise_inside,
        peer=same_fields(kind, **fields, event="event"),
        **known,
    )


def _fixed_row(kind: type, how: str, **known: Any) -> EventRule:
    """A sample of a given size. What is known of it is about replacing a unit."""

    def within(event: FixedSize) -> None:
        numeric_limits.count("source_size", event.source_size)
        numeric_limits.count("sample_size", event.sample_size)

    return _sampled_row(
        kind,
        {"source_size": "source_dataset_size", "sample_size": "sample_size"},
        lambda e: f"{e.sample_size:,} of {e.source_size:,} units drawn {how} replacement",
        within=within,
        replace_only=True,
        can_be_sampled=False,
        **known,
    )


def _truncated_row() -> EventRule:
    def within(event: ev.TruncatedPoissonGaussian) -> None:
        numeric_limits.noise("noise_multiplier", event.noise_multiplier)
        numeric_limits.count("source_size", event.source_size)
        numeric_limits.count("most", event.most)

    there = {
        "source_size": "dataset_size",
        "rate": "sampling_probability",
        "most": "truncated_batch_size",
        "noise_multiplier": "noise_multiplier",
    }
    return EventRule(
        ev.TruncatedPoissonGaussian,
        lambda e: (
            f"a sum with Gaussian noise of {e.noise_multiplier:.6g} times the bound on one unit, "
            f"on a Poisson sample at rate "
            f"{e.rate:g} of at most {e.most:,}"
        ),
        _truncated,
        plain=lambda e: e if e.rate else ev.Nothing(),
        unsampled=lambda e, most: ev.Gaussian(e.noise_multiplier),
        within=within,
        can_be_sampled=False,
        peer=replace(
            same_fields(ev.TruncatedPoissonGaussian, **there),
            name="TruncatedSubsampledGaussianDpEvent",
        ),
    )


ROWS = (
    _sampled_row(
        ev.PoissonSampled,
        {"rate": "sampling_probability"},
        lambda e: f"a Poisson sample at rate {e.rate:g}",
        pair=lambda e, adjacency: rule_of(e.event).poisson(e.event, e.rate, adjacency),
        divergences=_poisson_divergences,
        pure=_poisson_pure,
        group=_poisson_group,
        plain=_poisson_plain,
        unsampled=lambda e, most: unsampled(e.event),
    ),
    _fixed_row(
        ev.SampledWithoutReplacement,
        "without",
        pair=_without_pair,
        pure=_without_pure,
        plain=_without_plain,
        unsampled=lambda e, most: unsampled(e.event),
    ),
    _fixed_row(
        ev.SampledWithReplacement,
        "with",
        pair=_fixed_size,
        plain=_with_plain,
        unsampled=_with_unsampled,
    ),
    _truncated_row(),
    EventRule(
        ev.BallsInBins,
        words=lambda e: (
            f"one Gaussian release of the whole run in {len(e.gram)} secret bins, noise "
            f"{e.noise_multiplier:.6g}"
        ),
        within=lambda e: numeric_limits.noise("noise_multiplier", e.noise_multiplier),
        profile=_bins_profile,
        divergences=_bins_divergences,
        unsampled=_bins_unsampled,
    ),
    EventRule(
        ev.RandomlyAllocated,
        words=lambda e: (
            f"{e.steps:,} sums with Gaussian noise of {e.noise_multiplier:.6g} times the bound on "
            f"one unit, of which a unit is in one, chosen in secret"
        ),
        pair=_allocated_pair,
        divergences=_allocated_divergences,
        plain=lambda e: ev.Gaussian(e.noise_multiplier) if e.steps == 1 else e,
        unsampled=lambda e, most: ev.Gaussian(e.noise_multiplier),
        within=_allocated_within,
    ),
)
