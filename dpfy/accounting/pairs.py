"""From events to losses: the dominating pairs of every supported leaf, in both directions, under each adjacency.

A noise multiplier is the noise over the bound on one unit's contribution. Adding, removing or zeroing a unit moves a sum by one
such bound; replacing it moves the sum by two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfy.accounting.gaussian_losses import GaussianPair
from dpfy.accounting.leaves import leaves
from dpfy.accounting.losses import Atoms, Loss
from dpfy.accounting.other_losses import LaplacePair, Mixture, discrete_gaussian, discrete_laplace, fold, subsample_atoms
from dpfy.accounting.table import way_out
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event, flatten
from dpfy.core.unit import Adjacency

ONE = ((1.0, 0.0),)
MOST_DRAWS = 8
"""Draws with replacement for each unit: more would be a mixture of hundreds of Gaussians."""


@dataclass(frozen=True)
class Release:
    """One release as seen by a removed unit and by an added one.

    `attained` are losses that some neighbouring data sets really have, on which lower bounds rest: the same two where the pair is
    exact. `touched` is the chance that the release depends on the unit at all.
    """

    removed: Loss
    added: Loss
    attained: tuple[Loss, Loss] | None = None
    touched: float = 1.0


@dataclass(frozen=True)
class Composition:
    """Everything an event releases: `gaussian` is the sum of squared ratios of sensitivity to noise of its plain Gaussians."""

    gaussian: float
    releases: tuple[tuple[Release, int], ...]
    public: bool = False

    @property
    def touched(self) -> float:
        """A bound on the chance that anything depends on the unit: no larger delta can be reached, at any epsilon."""
        if self.gaussian or any(release.touched >= 1 for release, _ in self.releases):
            return 1.0
        return -math.expm1(sum(count * math.log1p(-release.touched) for release, count in self.releases)) * (1 + 1e-12)


def composition(event: Event, adjacency: Adjacency) -> Composition:
    """The losses of `event`. An event or adjacency without a proven pair raises `Unsupported` and names the way out."""
    squared, releases, public = 0.0, [], False
    for leaf, count in leaves(event):
        inner = _effective(leaf)
        if isinstance(inner, ev.NotPrivate):
            public = True
        elif isinstance(inner, ev.Gaussian):
            squared += count * (moves(adjacency) / inner.noise_multiplier) ** 2
        elif not isinstance(inner, ev.Nothing):
            releases.append((_release(inner, adjacency), count))
    return Composition(squared, tuple(releases), public)


def moves(adjacency: Adjacency) -> int:
    """How many contribution bounds a change of one unit can move a sum by."""
    return 2 if adjacency is Adjacency.REPLACE_ONE else 1


def _effective(leaf: Event) -> Event:
    """A sampled event without its trivial cases: rate 0 is nothing, rate 1 is the event, a batch of Gaussians is one Gaussian."""
    if isinstance(leaf, (ev.PoissonSampled, ev.SampledWithoutReplacement, ev.SampledWithReplacement)):
        inner = _joined(leaf.event)
        if isinstance(inner, ev.Nothing):
            return inner
        if isinstance(leaf, ev.PoissonSampled):
            if leaf.rate in (0.0, 1.0):
                return inner if leaf.rate else ev.Nothing()
            return inner if isinstance(inner, ev.NotPrivate) else ev.PoissonSampled(leaf.rate, inner)
        if leaf.sample_size == 0:
            return ev.Nothing()
        if isinstance(leaf, ev.SampledWithoutReplacement):
            whole = leaf.sample_size == leaf.source_size
            return inner if whole else ev.SampledWithoutReplacement(leaf.source_size, leaf.sample_size, inner)
        return ev.SampledWithReplacement(leaf.source_size, leaf.sample_size, inner)
    if isinstance(leaf, ev.TruncatedPoissonGaussian) and leaf.rate == 0:
        return ev.Nothing()
    if isinstance(leaf, ev.EpsilonDelta) and leaf.epsilon == 0 and leaf.delta == 0:
        return ev.Nothing()
    return leaf


def _joined(event: Event) -> Event:
    """Several Gaussians on the same sample are one Gaussian; one release is itself; anything else has no pair here."""
    leaves = flatten(event)
    if not leaves:
        return ev.Nothing()
    if any(isinstance(leaf, ev.NotPrivate) for leaf, _ in leaves):
        return ev.NotPrivate()
    if all(isinstance(leaf, ev.Gaussian) for leaf, _ in leaves):
        squared = sum(n / leaf.noise_multiplier**2 for leaf, n in leaves if isinstance(leaf, ev.Gaussian))
        return ev.Gaussian(1 / math.sqrt(squared))
    if len(leaves) == 1 and leaves[0][1] == 1:
        return leaves[0][0]
    raise Unsupported("sampling several different releases at once", "sample each release by itself, or use --accountant rdp")


def _release(leaf: Event, adjacency: Adjacency) -> Release:
    if isinstance(leaf, ev.PoissonSampled):
        return _poisson(leaf, adjacency)
    if isinstance(leaf, (ev.SampledWithoutReplacement, ev.SampledWithReplacement)):
        return _fixed_size(leaf, adjacency)
    if isinstance(leaf, ev.TruncatedPoissonGaussian):
        return _truncated(leaf, adjacency)
    if isinstance(leaf, ev.GaussianMixture):
        return _mixture(leaf.standard_deviation, tuple(zip(leaf.probabilities, leaf.sensitivities, strict=True)), leaf, adjacency)
    if isinstance(leaf, ev.Laplace):
        both = LaplacePair(moves(adjacency) / leaf.noise_multiplier)
        return Release(both, both)
    if isinstance(leaf, (ev.DiscreteLaplace, ev.DiscreteGaussian)):
        both_atoms = _discrete(leaf, moves(adjacency))
        return Release(both_atoms, both_atoms)
    if isinstance(leaf, ev.RandomizedResponse):
        return _randomized_response(leaf, adjacency)
    if isinstance(leaf, ev.EpsilonDelta):
        return _black_box(leaf.epsilon, leaf.delta)
    raise Unsupported(f"{type(leaf).__name__} by the tight accountant", way_out(leaf, "use --accountant rdp"))


def _discrete(leaf: ev.DiscreteLaplace | ev.DiscreteGaussian, moves: int) -> Atoms:
    if isinstance(leaf, ev.DiscreteLaplace):
        return discrete_laplace(leaf.noise_parameter, moves * leaf.sensitivity)
    return discrete_gaussian(leaf.sigma, moves * leaf.sensitivity)


def _black_box(epsilon: float, delta: float) -> Release:
    """The pair that dominates every (epsilon, delta) mechanism: randomized response with a chance delta of telling all."""
    if delta >= 1:
        raise Unsupported("a black box with delta 1", "state the mechanism, or leave it out")
    high, low = (1 - delta) / (1 + math.exp(-epsilon)), (1 - delta) / (1 + math.exp(min(epsilon, 700)))
    two = 0 < epsilon < 700  # beyond, the lower atom underflows: all mass on the upper one dominates
    atoms = Atoms((epsilon, -epsilon), (high, low), delta) if two else Atoms((epsilon,), (1 - delta,), delta)
    return Release(atoms, atoms)


def _randomized_response(leaf: ev.RandomizedResponse, adjacency: Adjacency) -> Release:
    p, k = leaf.noise_parameter, leaf.buckets
    other, true = p / k, 1 - p + p / k
    if adjacency is Adjacency.ADD_OR_REMOVE_ONE:
        raise Unsupported(
            f"RandomizedResponse under {adjacency.value}", "an answer cannot be absent; use --adjacency replace-one or zero-out"
        )
    if p == 0:
        raise Unsupported("RandomizedResponse without noise", "give noise_parameter above 0, or state NotPrivate")
    if adjacency is Adjacency.REPLACE_ONE:
        a = math.log(true / other)
        atoms = Atoms((a, 0.0, -a), (true, (k - 2) * other, other)) if a else Atoms((0.0,), (1.0,))
        return Release(atoms, atoms)
    high, low = math.log(true * k), math.log(other * k)
    if high == low:
        return Release(Atoms((0.0,), (1.0,)), Atoms((0.0,), (1.0,)))
    return Release(Atoms((high, low), (true, (k - 1) * other)), Atoms((-low, -high), (1 - 1 / k, 1 / k)))


def _mixture(sigma: float, parts: tuple[tuple[float, float], ...], leaf: Event, adjacency: Adjacency) -> Release:
    if adjacency is Adjacency.REPLACE_ONE:
        raise Unsupported(f"{type(leaf).__name__} under replace-one", "use --adjacency add-or-remove-one or zero-out")
    chances: dict[float, float] = {}
    for p, s in parts:
        if p > 0:
            chances[s] = chances.get(s, 0.0) + p
    if set(chances) == {0.0}:
        return Release(Atoms((0.0,), (1.0,)), Atoms((0.0,), (1.0,)))
    total = math.fsum(chances.values())
    kept = tuple((chances[s] / total, s) for s in sorted(chances))
    mirrored = tuple((p, -s) for p, s in kept)
    return Release(GaussianPair(sigma, kept, ONE), GaussianPair(sigma, ONE, mirrored), touched=sum(p for p, s in kept if s))


def _poisson(leaf: ev.PoissonSampled, adjacency: Adjacency) -> Release:
    q, inner = leaf.rate, leaf.event
    if isinstance(inner, ev.Gaussian):
        return _sampled(inner.noise_multiplier, q, adjacency)
    if adjacency is Adjacency.REPLACE_ONE:
        raise Unsupported(
            f"Poisson sampling of {type(inner).__name__} under replace-one", "use --adjacency add-or-remove-one or zero-out"
        )
    if isinstance(inner, ev.GaussianMixture):
        thinned = [(q * p, s) for p, s in zip(inner.probabilities, inner.sensitivities, strict=True)]
        return _mixture(inner.standard_deviation, ((1 - q, 0.0), *thinned), leaf, adjacency)
    if isinstance(inner, ev.Laplace):
        width = 1 / inner.noise_multiplier
        return Release(LaplacePair(width, q), LaplacePair(width, q, added=True), touched=q)
    if isinstance(inner, (ev.DiscreteLaplace, ev.DiscreteGaussian)):
        base = _discrete(inner, 1)
        return Release(subsample_atoms(base, q, False), subsample_atoms(base, q, True), touched=q)
    if isinstance(inner, ev.EpsilonDelta):
        # Balle, Barthe & Gaboardi 2018, Theorem 8.
        return _black_box(math.log1p(q * math.expm1(min(inner.epsilon, 700.0))), q * inner.delta)
    raise Unsupported(
        f"Poisson sampling of {type(inner).__name__}", "sample a Gaussian or Laplace release, or use --accountant rdp"
    )


def _fixed_size(leaf: ev.SampledWithoutReplacement | ev.SampledWithReplacement, adjacency: Adjacency) -> Release:
    """Fixed-size samples under replace-one: without replacement by Zhu, Dong & Wang 2022; with replacement the number of copies
    of the unit is revealed once it is drawn at all (Balle, Barthe & Gaboardi 2018, Theorem 10).

    Attained: all other units contribute u, the unit itself u in one world and -u in the other. The first world is then one Gaussian,
    the second a mixture over how often the unit is drawn, 2u apart for every time.
    """
    from scipy.special import erf

    name = type(leaf).__name__
    if adjacency is not Adjacency.REPLACE_ONE:
        raise Unsupported(f"{name} under {adjacency.value}", "fixed-size samples are analysed under --adjacency replace-one")
    if not isinstance(leaf.event, ev.Gaussian):
        raise Unsupported(f"{name} of {type(leaf.event).__name__}", "use a Gaussian release, or Poisson sampling")
    sigma = leaf.event.noise_multiplier
    if isinstance(leaf, ev.SampledWithoutReplacement):
        q, copies, more = leaf.sample_size / leaf.source_size, [(1.0, 1)], 0.0
    else:
        q, copies, more = _copies(leaf.source_size, leaf.sample_size)
    cases = [(w, *_moved(sigma, ((1 - q, 0.0), (q, 2.0 * k)))) for w, k in copies]
    zero = sum(w * (1 - q) * float(erf(k / sigma / math.sqrt(2))) for w, k in copies)
    folded = fold(cases, zero, more)
    attained = _moved(sigma, ((1 - q, 0.0), *((q * w, 2.0 * k) for w, k in copies)))
    return Release(folded, folded, attained, touched=q)


def _moved(sigma: float, moves: tuple[tuple[float, float], ...]) -> tuple[GaussianPair, GaussianPair]:
    """A Gaussian moved by a random amount, of (probability, move), against one that is not; and the other way round."""
    kept = tuple((p, m) for p, m in moves if p > 0)
    return GaussianPair(sigma, kept, ONE), GaussianPair(sigma, ONE, tuple((p, -m) for p, m in kept))


def _copies(source: int, sample: int) -> tuple[float, list[tuple[float, int]], float]:
    """The chance that a unit is drawn at all; given that, how often; and the chance (below 1e-25) of more often than listed."""
    if source == 1:
        return 1.0, [(1.0, sample)], 0.0
    if sample > MOST_DRAWS * source:
        raise Unsupported(
            f"{sample} draws with replacement from {source} units", "draw less, or state a Gaussian of the whole data"
        )
    q = -math.expm1(sample * math.log1p(-1 / source))
    rows = [sample * math.exp((sample - 1) * math.log1p(-1 / source)) / source / q]
    while len(rows) < sample and (rows[-1] > 1e-26 or len(rows) <= sample / source):
        k = len(rows)
        rows.append(rows[-1] * (sample - k) / (k + 1) / (source - 1))
    more = 0.0 if len(rows) == sample else 2 * rows[-1]  # beyond the mean each weight is less than half the one before at the end
    total = math.fsum(rows) + more
    return q, [(weight / total, k + 1) for k, weight in enumerate(rows)], more / total


def _truncated(leaf: ev.TruncatedPoissonGaussian, adjacency: Adjacency) -> Release:
    """Truncated Poisson batches (Ganesh et al. 2025): given that the batch overflows, a drawn unit may push another one out.

    Attained: the other units contribute nothing, so the unit alone shows, at the rate at which it is drawn and kept.
    """
    from scipy.special import bdtrc

    n, q, most, sigma = leaf.source_size, leaf.rate, leaf.most, leaf.noise_multiplier
    overflow = min(1.0, float(bdtrc(most - 1, n - 1, q))) if most < n else 0.0
    base = _sampled(sigma, q, adjacency)
    if overflow < 1e-300:
        return base
    beyond = float(bdtrc(most, n, q))
    inside = min(1.0, beyond * most / overflow / n)
    # The size may be meant with the unit or without it: the smaller rate is attained either way.
    among = min(beyond * most / n, float(bdtrc(most, n + 1, q)) * most / (n + 1))
    kept = min(q, q * (1 - float(bdtrc(most - 1, n, q))) + among) * (1 - 1e-9)
    swap = GaussianPair(sigma / 2, _rated(inside, 1.0), _rated(inside, -1.0))
    removed = Mixture(((1 - overflow, base.removed), (overflow, swap))) if overflow < 1 else swap
    added = Mixture(((1 - overflow, base.added), (overflow, swap))) if overflow < 1 else swap
    lower = _sampled(sigma, kept, adjacency)
    return Release(removed, added, (lower.removed, lower.added), touched=q)


def _sampled(sigma: float, q: float, adjacency: Adjacency) -> Release:
    """A Gaussian at rate q in (0, 1]; one step, also where q is 1."""
    if q == 1 or adjacency is not Adjacency.REPLACE_ONE:
        pair = _moved(sigma, _rated(q, float(moves(adjacency))))
        return Release(*pair, touched=q)
    both = GaussianPair(sigma, _rated(q, 1.0), _rated(q, -1.0))
    return Release(both, both, touched=q)


def _rated(q: float, move: float) -> tuple[tuple[float, float], ...]:
    """Nothing or `move`, the latter with probability q."""
    return ((1.0, move),) if q == 1 else ((1 - q, 0.0), (q, move))
