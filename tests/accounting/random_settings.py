"""Random settings for every event and sampling that the accountants know, and what each costs in
one step, computed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtrc, ndtr
from scipy.stats import binom

from dpfy.core import events as ev
from dpfy.core.unit import Adjacency

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
Make = Callable[[float], ev.Event]
Random = np.random.Generator


@dataclass(frozen=True)
class Setting:
    """An event for every noise, how often it is run, and a delta; `factor` and `axis` say which
    neighbour to compare it with.
    """

    kind: str
    make: Make
    adjacency: Adjacency
    noise: float
    steps: int
    delta: float
    factor: float
    axis: str

    def event(self) -> ev.Event:
        return ev.Repeated(self.make(self.noise), self.steps)

    def costlier(self) -> tuple[ev.Event, float]:
        """The neighbour that must not cost less: more steps, less delta or less noise.

        Less discrete Gaussian noise can cost less, in truth
        (`test_less_discrete_gaussian_noise_can_cost_less`): less delta then.
        """
        noise, steps, delta = self.noise, self.steps, self.delta
        if self.axis == "steps":
            steps = min(10**6, math.ceil(steps * self.factor))
        elif self.axis == "delta" or "discrete gaussian" in self.kind:
            delta /= self.factor
        else:
            noise /= self.factor
        return ev.Repeated(self.make(noise), steps), delta

    def __str__(self) -> str:
        return (
            f"{self.steps} x {self.make(self.noise)} under {self.adjacency.value} at delta "
            f"{self.delta:g}, {self.axis} x {self.factor}"
        )


def between(rng: Random, low: float, high: float) -> float:
    """Uniform in the logarithm."""
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


def _sampled(least: float, inner: Callable[[Random], Make]) -> Callable[[Random], Make]:
    def kind(rng: Random) -> Make:
        rate, make = between(rng, least, 1.0), inner(rng)
        return lambda noise: ev.PoissonSampled(rate, make(noise))

    return kind


def _gaussian(rng: Random) -> Make:
    return ev.Gaussian


def _laplace(rng: Random) -> Make:
    return ev.Laplace


def _discrete_laplace(rng: Random) -> Make:
    sensitivity = int(rng.integers(1, 5))
    return lambda noise: ev.DiscreteLaplace(1 / noise, sensitivity)


def _discrete_gaussian(rng: Random) -> Make:
    sensitivity = int(rng.integers(1, 4))
    return lambda noise: ev.DiscreteGaussian(noise, sensitivity)


def _response(rng: Random) -> Make:
    buckets = int(rng.integers(2, 20))
    return lambda noise: ev.RandomizedResponse(noise / (1 + noise), buckets)


def _mixture(rng: Random) -> Make:
    count = int(rng.integers(2, 5))
    chances = rng.dirichlet(np.ones(count))
    return lambda noise: ev.MixtureOfGaussians(
        noise, tuple(map(float, range(count))), tuple(float(p) for p in chances / chances.sum())
    )


def _black_box(rng: Random) -> Make:
    delta = between(rng, 1e-14, 1e-9) if rng.random() < 0.5 else 0.0
    return lambda noise: ev.EpsilonDelta(1 / noise, delta)


def _range(rng: Random) -> Make:
    return lambda noise: ev.BoundedRange(1 / noise)


def _sizes(rng: Random) -> tuple[int, int]:
    source = int(between(rng, 50, 1e6))
    return source, max(1, int(source * between(rng, 1e-4, 1.0)))


def _without(rng: Random) -> Make:
    source, sample = _sizes(rng)
    return lambda noise: ev.SampledWithoutReplacement(source, sample, ev.Gaussian(noise))


def _with(rng: Random) -> Make:
    source = int(between(rng, 50, 1e6))
    sample = max(1, int(source * between(rng, 1e-4, 0.2)))
    return lambda noise: ev.SampledWithReplacement(source, sample, ev.Gaussian(noise))


def _truncated(rng: Random) -> Make:
    source, rate = int(between(rng, 50, 1e6)), between(rng, 1e-4, 1.0)
    most = max(1, int(source * rate * between(rng, 0.7, 2)))
    return lambda noise: ev.TruncatedPoissonGaussian(source, rate, most, noise)


def _shuffled(rng: Random) -> Make:
    records, answers = int(between(rng, 2, 3000)), int(rng.choice([0, 2, 7]))
    return lambda noise: ev.Shuffled(1 / noise, records, answers)


def _check_ins(rng: Random) -> Make:
    slots, rate = int(between(rng, 1, 1e6)), between(rng, 1e-3, 1.0)
    return lambda noise: ev.RandomCheckIns(1 / noise, slots, rate)


def _allocated(rng: Random) -> Make:
    steps = int(between(rng, 1, 1e4))
    return lambda noise: ev.RandomlyAllocated(noise, steps)


def _threshold(rng: Random) -> Make:
    return ev.NoisyThreshold


def _votes(rng: Random) -> Make:
    return lambda noise: ev.NoisyArgmax(noise, 2)


KINDS: dict[
    str, tuple[Callable[[Random], Make], tuple[Adjacency, ...], tuple[float, float], int]
] = {
    "gaussian": (_gaussian, (ADD, REPLACE, ZERO), (0.3, 50), 2),
    "poisson": (_sampled(1e-5, _gaussian), (ADD, REPLACE, ZERO), (0.3, 50), 9),
    "without-replacement": (_without, (REPLACE,), (0.5, 50), 6),
    "with-replacement": (_with, (REPLACE,), (1.0, 50), 1),
    "truncated-poisson": (_truncated, (ADD, REPLACE), (0.5, 50), 3),
    "laplace": (_laplace, (ADD, REPLACE), (0.3, 50), 3),
    "poisson laplace": (_sampled(1e-3, _laplace), (ADD, ZERO), (0.5, 50), 1),
    "discrete laplace": (_discrete_laplace, (ADD, REPLACE), (0.5, 50), 3),
    "poisson discrete laplace": (_sampled(1e-3, _discrete_laplace), (ADD,), (0.5, 50), 2),
    "discrete gaussian": (_discrete_gaussian, (ADD, REPLACE), (0.5, 50), 2),
    "poisson discrete gaussian": (_sampled(1e-3, _discrete_gaussian), (ADD,), (0.5, 50), 2),
    "randomized response": (_response, (REPLACE, ZERO), (0.01, 50), 3),
    "mixture": (_mixture, (ADD,), (0.5, 50), 2),
    "poisson mixture": (_sampled(1e-3, _mixture), (ADD,), (0.5, 50), 2),
    "black box": (_black_box, (ADD, REPLACE), (0.5, 100), 3),
    "bounded range": (_range, (ADD, REPLACE), (0.5, 100), 2),
    "poisson bounded range": (_sampled(1e-3, _range), (ADD,), (0.5, 100), 2),
    "poisson black box": (_sampled(1e-3, _black_box), (ADD,), (0.5, 100), 2),
    "shuffled": (_shuffled, (REPLACE, ZERO), (0.2, 100), 1),
    "random allocation": (_allocated, (ADD, ZERO), (0.6, 50), 1),
    "threshold check": (_threshold, (ADD, REPLACE, ZERO), (0.3, 1000), 1),
    "votes": (_votes, (ADD, ZERO), (0.3, 1000), 1),
    "check-ins": (_check_ins, (ADD, REPLACE, ZERO), (0.2, 100), 1),
}
"""How to draw an event, the adjacencies it has a bound under, its range of noise, and how often it
is drawn.
"""


def setting(seed: int, kind: str | None = None) -> Setting:
    """The setting of a seed."""
    rng = np.random.default_rng([20261116, seed])
    shares = np.array([row[3] for row in KINDS.values()], dtype=float)
    name = kind or list(KINDS)[int(rng.choice(len(KINDS), p=shares / shares.sum()))]
    draw, adjacencies, noises, _ = KINDS[name]
    make, adjacency = draw(rng), adjacencies[int(rng.integers(len(adjacencies)))]
    axis = ("steps", "delta", "noise")[int(rng.integers(3))]
    return Setting(
        name,
        make,
        adjacency,
        between(rng, *noises),
        int(between(rng, 1, 1e6)),
        between(rng, 1e-13, 1e-3),
        float(rng.choice([1.01, 1.1, 2, 10])),
        axis,
    )


def one_step(leaf: ev.Event, adjacency: Adjacency, epsilon: float) -> float | None:
    """delta at `epsilon` of one release, straight from its two distributions and without losses;
    None for what has no simple form.
    """
    move = 2.0 if adjacency is REPLACE else 1.0
    if isinstance(leaf, ev.Gaussian):
        return _mixtures(leaf.noise_multiplier, [(1.0, move)], [(1.0, 0.0)], epsilon)
    if isinstance(leaf, ev.PoissonSampled) and isinstance(
        leaf.event, (ev.Gaussian, ev.MixtureOfGaussians)
    ):
        q, inner = leaf.rate, leaf.event
        sigma = (
            inner.noise_multiplier if isinstance(inner, ev.Gaussian) else inner.standard_deviation
        )
        if adjacency is REPLACE:
            return _mixtures(sigma, [(1 - q, 0.0), (q, 1.0)], [(1 - q, 0.0), (q, -1.0)], epsilon)
        parts = (
            [(1.0, 1.0)]
            if isinstance(inner, ev.Gaussian)
            else list(zip(inner.probabilities, inner.sensitivities, strict=True))
        )
        return _both(sigma, [(1 - q, 0.0), *((q * p, s) for p, s in parts)], epsilon)
    if isinstance(leaf, ev.MixtureOfGaussians):
        return _both(
            leaf.standard_deviation,
            list(zip(leaf.probabilities, leaf.sensitivities, strict=True)),
            epsilon,
        )
    if isinstance(leaf, ev.SampledWithoutReplacement):
        q = leaf.sample_size / leaf.source_size
        return _mixtures(
            leaf.event.noise_multiplier, [(1 - q, 0.0), (q, 2.0)], [(1.0, 0.0)], epsilon
        )  # type: ignore[union-attr]
    if isinstance(leaf, ev.SampledWithReplacement):
        return _with_replacement(leaf, epsilon)
    if isinstance(leaf, ev.TruncatedPoissonGaussian):
        q = (
            leaf.rate * (1 - float(bdtrc(leaf.most - 1, leaf.source_size, leaf.rate)))
            if leaf.most < leaf.source_size
            else leaf.rate
        )
        if adjacency is REPLACE:  # attained at least: drawn and not pushed out
            return _mixtures(
                leaf.noise_multiplier, [(1 - q, 0.0), (q, 1.0)], [(1 - q, 0.0), (q, -1.0)], epsilon
            )
        return _both(leaf.noise_multiplier, [(1 - q, 0.0), (q, 1.0)], epsilon)
    return _simple(leaf, move, adjacency, epsilon)


def _simple(leaf: ev.Event, move: float, adjacency: Adjacency, epsilon: float) -> float | None:
    grown = math.exp(min(epsilon, 700))
    if isinstance(leaf, ev.Laplace):
        width = move / leaf.noise_multiplier
        return max(0.0, -math.expm1((epsilon - width) / 2))
    if isinstance(leaf, ev.DiscreteGaussian):
        x, shift = np.arange(-4000, 4001), int(move) * leaf.sensitivity
        p = np.exp(-(x.astype(float) ** 2) / (2 * leaf.sigma**2))
        other = np.exp(-((x - shift).astype(float) ** 2) / (2 * leaf.sigma**2))
        return float(np.maximum(p - grown * other, 0.0).sum() / p.sum())
    if isinstance(leaf, ev.DiscreteLaplace):
        x, shift = np.arange(-4000, 4001), int(move) * leaf.sensitivity
        p, other = (
            np.exp(-leaf.noise_parameter * np.abs(v)) * math.tanh(leaf.noise_parameter / 2)
            for v in (x, x - shift)
        )
        return float(np.maximum(p - grown * other, 0.0).sum())
    if isinstance(leaf, ev.RandomizedResponse):
        low = leaf.noise_parameter / leaf.buckets
        high = 1 - leaf.noise_parameter + low
        if adjacency is REPLACE:
            return max(0.0, high - grown * low)
        flat = 1 / leaf.buckets
        return max(0.0, high - grown * flat, (leaf.buckets - 1) * (flat - grown * low))
    if isinstance(leaf, ev.EpsilonDelta):
        return leaf.delta + (1 - leaf.delta) * max(0.0, 1 - grown * math.exp(-leaf.epsilon)) / (
            1 + math.exp(-leaf.epsilon)
        )
    if isinstance(leaf, ev.BoundedRange):
        return max(0.0, math.exp(leaf.epsilon / 2) - math.exp(epsilon / 2)) ** 2 / math.expm1(
            leaf.epsilon
        )
    return None


def _with_replacement(leaf: ev.SampledWithReplacement, epsilon: float) -> float:
    """The pair that is attained: every other unit contributes u, this one -u or u."""
    counts = np.arange(0, min(leaf.sample_size, 400) + 1)
    chances = binom.pmf(counts, leaf.sample_size, 1 / leaf.source_size)
    parts = [(float(p), 2.0 * int(k)) for k, p in zip(counts, chances, strict=True) if p > 1e-18]
    return _mixtures(leaf.event.noise_multiplier, parts, [(1.0, 0.0)], epsilon)  # type: ignore[union-attr]


def _both(sigma: float, parts: list[tuple[float, float]], epsilon: float) -> float:
    """The worse of a unit that is removed and one that is added."""
    mirrored = [(p, -s) for p, s in parts]
    return max(
        _mixtures(sigma, parts, [(1.0, 0.0)], epsilon),
        _mixtures(sigma, [(1.0, 0.0)], mirrored, epsilon),
    )


def _mixtures(
    sigma: float, p: list[tuple[float, float]], q: list[tuple[float, float]], epsilon: float
) -> float:
    """The integral of (p - e^epsilon q)+ for mixtures of Gaussians whose ratio grows: the point of
    equality by bisection.
    """

    def log_density(parts: list[tuple[float, float]], x: float) -> float:
        logs = [math.log(w) - (x - m) ** 2 / (2 * sigma**2) for w, m in parts if w > 0]
        return max(logs) + math.log(sum(math.exp(v - max(logs)) for v in logs))

    low, high = -60 * sigma - 40, 60 * sigma + 40
    while log_density(p, high) - log_density(q, high) < epsilon and high < 1e6:
        high *= 2
    if log_density(p, high) - log_density(q, high) < epsilon:
        return 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if log_density(p, middle) - log_density(q, middle) < epsilon
            else (low, middle)
        )
    above = [sum(w * float(ndtr((m - high) / sigma)) for w, m in parts) for parts in (p, q)]
    return max(0.0, above[0] - math.exp(min(epsilon, 700)) * above[1])


LANGUAGES: tuple[Callable[[float], ev.Event], ...] = (
    lambda noise: ev.Zcdp(0.5 / noise**2),
    lambda noise: ev.Zcdp(0.2 / noise**2, 0.05 / noise),
    lambda noise: ev.RenyiCurve(
        tuple(map(float, range(2, 40))), tuple(0.5 * a / noise**2 for a in range(2, 40))
    ),
    lambda noise: ev.RenyiCurve((1.5, 4.0, 20.0), (0.6 / noise**2, 2 / noise**2, 11 / noise**2)),
    lambda noise: ev.RepeatAndSelect(ev.PoissonSampled(0.05, ev.Gaussian(noise)), 5.0, 1.0),
    lambda noise: ev.RepeatAndSelect(ev.EpsilonDelta(0.2 / noise, 1e-16), 3.0, 0.0),
    lambda noise: ev.PoissonSampled(0.1, ev.Zcdp(0.5 / noise**2)),
    lambda noise: ev.PoissonSampled(0.2, ev.Composed((ev.Gaussian(noise), ev.Laplace(2 * noise)))),
    lambda noise: ev.BoundedRange(2 / noise),
    lambda noise: ev.Parallel((("a", ev.Zcdp(0.3 / noise**2)), ("b", ev.Laplace(noise)))),
)
"""Releases of every language, costlier with less noise."""
EXACT = (
    "gaussian",
    "poisson",
    "laplace",
    "poisson laplace",
    "discrete laplace",
    "discrete gaussian",
    "black box",
)


def mixture(seed: int) -> Setting:
    """One to three releases without an exact pair and up to two with one, as one release of one
    noise.
    """
    rng = np.random.default_rng([16, seed])
    stated = [
        LANGUAGES[k]
        for k in rng.choice(len(LANGUAGES), size=int(rng.integers(1, 4)), replace=False)
    ]
    exact = [
        KINDS[str(name)][0](rng)
        for name in rng.choice(EXACT, size=int(rng.integers(0, 3)), replace=False)
    ]
    counts = [int(between(rng, 1, 30)) for _ in (*stated, *exact)]
    scales = [between(rng, 0.5, 5) for _ in (*stated, *exact)]

    def make(noise: float) -> ev.Event:
        rows = zip((*stated, *exact), counts, scales, strict=True)
        return ev.Composed(
            tuple(ev.Repeated(one(noise * scale), count) for one, count, scale in rows)
        )

    axis = ("steps", "delta", "noise")[int(rng.integers(3))]
    steps, delta, factor = (
        int(between(rng, 1, 50)),
        between(rng, 1e-11, 1e-3),
        float(rng.choice([1.01, 1.1, 2, 10])),
    )
    return Setting("mixture", make, ADD, between(rng, 1, 20), steps, delta, factor, axis)
