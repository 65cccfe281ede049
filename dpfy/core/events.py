"""What a computation did, as data: all that accounting needs and nothing else.

The names and meanings follow dp-accounting's ``DpEvent`` family, the field's common language; ours
are frozen, hashable, validated at construction and cost no import
(`accounting/dp_accounting_adapter.py` translates both ways). A leaf never sees a count: repetition
and composition are written once, here.

How many runs are made where a random number of them is: the truncated negative binomial law of
Papernot & Steinke 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

from dpfy.core import check
from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput, Unsupported

MOST_NAME = 80
"""Characters in the name of a part of the data."""


@dataclass(frozen=True)
class Nothing:
    """No access to the data: the identity of composition."""


@dataclass(frozen=True)
class NotPrivate:
    """A release without any protection: epsilon is infinite."""


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise of standard deviation `noise_multiplier` times the L2 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        check.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class Laplace:
    """Laplace noise of scale `noise_multiplier` times the L1 sensitivity: pure epsilon of 1 /
    noise_multiplier.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        check.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class DiscreteLaplace:
    """Two-sided geometric noise with parameter `noise_parameter` on an integer query of
    `sensitivity`.
    """

    noise_parameter: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        check.positive("noise_parameter", self.noise_parameter)
        check.integer("sensitivity", self.sensitivity)


@dataclass(frozen=True)
class DiscreteGaussian:
    """Discrete Gaussian noise of parameter `sigma` on an integer query of `sensitivity`."""

    sigma: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        check.positive("sigma", self.sigma)
        check.integer("sensitivity", self.sensitivity)


@dataclass(frozen=True)
class _Shares:
    """A sum of whole vectors of `coordinates` numbers, in which a unit takes part with a vector of
    squared length `squared` at most.

    Every part of the sum has its own noise, of standard deviation `share` in each coordinate; at
    least `shares` of them are honest, that of the unit itself among them, and nobody sees less than
    all of them together. A unit that is zeroed out or replaced still adds its share.
    """

    share: float
    shares: int
    squared: int
    coordinates: int

    def __post_init__(self) -> None:
        check.positive("share", self.share)
        for name in ("shares", "squared", "coordinates"):
            check.integer(name, getattr(self, name))


class DistributedDiscreteGaussian(_Shares):
    """Shares that are discrete Gaussians of parameter `share` (Kairouz, Liu & Steinke 2021)."""


class DistributedSkellam(_Shares):
    """Shares that are differences of two Poisson numbers, of variance `share` squared (Agarwal,
    Kairouz & Liu 2021).
    """


@dataclass(frozen=True)
class RandomizedResponse:
    """With probability `noise_parameter` the answer is uniform over `buckets` values, otherwise the
    truth.
    """

    noise_parameter: float
    buckets: int = 2

    def __post_init__(self) -> None:
        check.fraction("noise_parameter", self.noise_parameter)
        check.integer("buckets", self.buckets, least=2)


@dataclass(frozen=True)
class MixtureOfGaussians:
    """Gaussian noise of `standard_deviation` on a query of sensitivity `sensitivities[i]` with
    probability `probabilities[i]`.
    """

    standard_deviation: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        check.positive("standard_deviation", self.standard_deviation)
        if len(self.sensitivities) != len(self.probabilities) or not self.sensitivities:
            raise InvalidInput(
                "probabilities",
                self.probabilities,
                "must pair with the sensitivities, at least one",
            )
        for s in self.sensitivities:
            check.nonnegative("sensitivities", s)
        for p in self.probabilities:
            check.fraction("probabilities", p)
        if abs(sum(self.probabilities) - 1) > 1e-9:
            raise InvalidInput("probabilities", self.probabilities, "must sum to 1")


@dataclass(frozen=True)
class EpsilonDelta:
    """A black box that is (epsilon, delta)-differentially private, about which nothing else is
    known.

    With delta 0 it is the event of pure differential privacy: it has a pure guarantee, exact Rényi
    divergences and zCDP.
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        check.nonnegative("epsilon", self.epsilon)
        check.fraction("delta", self.delta)


@dataclass(frozen=True)
class MetricPrivacy:
    """A release whose chances change by a factor of at most exp(eta d) where the data of a unit
    moves by d in `metric`: d_chi privacy.

    That is no differential privacy: data far apart may be distinguished, and accounting gives it no
    epsilon (Chatzikokolakis et al. 2013).
    """

    eta: float
    metric: str

    def __post_init__(self) -> None:
        check.positive("eta", self.eta)
        check.one_line("metric", self.metric)


@dataclass(frozen=True)
class Zcdp:
    """A mechanism known by zCDP alone: its Rényi divergence of every order a > 1 is at most `xi` +
    `rho` a.
    """

    rho: float
    xi: float = 0.0

    def __post_init__(self) -> None:
        check.nonnegative("rho", self.rho)
        check.nonnegative("xi", self.xi)


@dataclass(frozen=True)
class RenyiCurve:
    """A mechanism known by its Rényi divergences alone: at most `values[i]` at order `orders[i]`,
    in both directions.

    The form of a data-dependent analysis. Such values are computed from the data, so that they may
    be published only if they were made private themselves; between the orders log moments are
    interpolated, beyond the largest one nothing is known.
    """

    orders: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.orders, tuple) or not isinstance(self.values, tuple):
            raise InvalidInput("orders, values", (self.orders, self.values), "must be tuples")
        if len(self.orders) != len(self.values) or not self.orders:
            raise InvalidInput("values", self.values, "must pair with the orders, at least one")
        for order in self.orders:
            check.positive("orders - 1", check.real("orders", order) - 1)
        if any(b <= a for a, b in zip(self.orders, self.orders[1:], strict=False)):
            raise InvalidInput("orders", self.orders, "must grow")
        for value in self.values:
            check.nonnegative("values", value)


@dataclass(frozen=True)
class BoundedRange:
    """A mechanism whose privacy losses lie in an interval of length `epsilon` for any two
    neighbours (Durfee & Rogers 2019).

    The exponential mechanism with P(r) proportional to exp(epsilon G(r) / (2 sensitivity)) is one.
    It is epsilon-private, and cheaper than that under composition. Permute-and-flip and
    report-noisy-max with Laplace noise are NOT: state EpsilonDelta(epsilon).
    """

    epsilon: float

    def __post_init__(self) -> None:
        check.nonnegative("epsilon", self.epsilon)


@dataclass(frozen=True)
class NoisyThreshold:
    """Whether a number lies above a threshold, after Gaussian noise of `noise_multiplier` times the
    bound on one unit was added to it.

    The threshold is public, or chosen from what was released before. Nothing else of the number is
    released.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        check.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class NoisyArgmax:
    """Which of `classes` has the most votes, after Gaussian noise of standard deviation `sigma`
    votes was added to every count.

    One unit moves one vote, from one class to another: it belongs to one voter, whatever that voter
    makes of it. Only the class is released (Papernot et al. 2018: GNMax).
    """

    sigma: float
    classes: int

    def __post_init__(self) -> None:
        check.positive("sigma", self.sigma)
        check.integer("classes", self.classes, least=2)


@dataclass(frozen=True)
class ObjectivePerturbation:
    """The minimum of convex losses of linear scores, plus a quadratic, plus a Gaussian linear term,
    with Gaussian releases beside it.

    What is minimised is sum_i f_i(x_i w) + lambda/2 |w|^2 + b w. The slope of a loss times |x| is
    at most L, its curvature times |x|^2 at most `curvature` times lambda, and b has standard
    deviation `noise_multiplier` times L. `one_sided`: the sign of a loss's slope is known from the
    record alone. `beside` is mu, the ratio of sensitivity to noise, of all Gaussian releases beside
    it, which may depend on the minimum.
    """

    noise_multiplier: float
    curvature: float
    one_sided: bool = False
    beside: float = 0.0

    def __post_init__(self) -> None:
        check.positive("noise_multiplier", self.noise_multiplier)
        check.nonnegative("curvature", self.curvature)
        check.nonnegative("beside", self.beside)
        if not isinstance(self.one_sided, bool):
            raise InvalidInput("one_sided", self.one_sided, "must be true or false")


@dataclass(frozen=True)
class PoissonSampled:
    """`event` run on a subset in which each unit is present independently with probability
    `rate`.
    """

    rate: float
    event: Event

    def __post_init__(self) -> None:
        check.fraction("sampling_rate", self.rate)


@dataclass(frozen=True)
class SampledWithoutReplacement:
    """`event` run on a uniform subset of exactly `sample_size` of `source_size` units."""

    source_size: int
    sample_size: int
    event: Event

    def __post_init__(self) -> None:
        check.integer("source_size", self.source_size)
        if check.integer("sample_size", self.sample_size, least=0) > self.source_size:
            raise InvalidInput(
                "sample_size", self.sample_size, f"must be at most source_size ({self.source_size})"
            )


@dataclass(frozen=True)
class SampledWithReplacement:
    """`event` run on `sample_size` draws, with replacement, from `source_size` units."""

    source_size: int
    sample_size: int
    event: Event

    def __post_init__(self) -> None:
        check.integer("source_size", self.source_size)
        check.integer("sample_size", self.sample_size, least=0)


@dataclass(frozen=True)
class TruncatedPoissonGaussian:
    """A Gaussian release on a Poisson batch of which at most `most` units are kept, uniformly
    chosen.
    """

    source_size: int
    rate: float
    most: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        check.integer("source_size", self.source_size)
        check.fraction("sampling_rate", self.rate)
        check.integer("most", self.most)
        check.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class BallsInBins:
    """One Gaussian release of a whole run in which a unit takes part at the steps of one bin,
    chosen secretly and uniformly.

    `gram` holds the inner products of the bins' responses C u_j, in units of the squared
    sensitivity; they must not be negative. The noise has standard deviation `noise_multiplier`
    times the sensitivity.
    """

    noise_multiplier: float
    gram: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        check.positive("noise_multiplier", self.noise_multiplier)
        if not self.gram or any(len(row) != len(self.gram) for row in self.gram):
            raise InvalidInput(
                "gram", f"{len(self.gram)} rows", "must be square, one row for each bin"
            )
        for j, row in enumerate(self.gram):
            check.positive("gram diagonal", row[j])
            for v in row:
                check.nonnegative("gram", v)


@dataclass(frozen=True)
class RandomlyAllocated:
    """Gaussian releases of `steps` steps, of which a unit takes part in exactly one, chosen
    uniformly and in secret.
    """

    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        check.positive("noise_multiplier", self.noise_multiplier)
        check.integer("steps", self.steps)


@dataclass(frozen=True)
class Shuffled:
    """One report from each of `records` units, each by a randomiser that is `epsilon0`-private by
    itself, put into a random order.

    Nobody sees who reported what before the shuffle. A randomiser may depend on the reports before
    it in that order, which is a single pass over shuffled data with noise for each record. Batches
    with one noise for all, and a buffer that is smaller than the data, are not this. Where all
    reports are randomised responses of that epsilon with so many `answers`, less is seen; 0 says
    nothing of them.
    """

    epsilon0: float
    records: int
    answers: int = 0

    def __post_init__(self) -> None:
        check.nonnegative("epsilon0", self.epsilon0)
        check.integer("records", self.records)
        if self.answers:
            check.integer("answers", self.answers, least=2)


@dataclass(frozen=True)
class RandomCheckIns:
    """Reports from `slots` slots, one each, by randomisers that are `epsilon0`-private by
    themselves.

    A unit takes part with probability `rate`, in one slot that it chooses uniformly and in secret.
    A slot reports for one of those who chose it, drawn at random, or for a fixed input where nobody
    did.
    """

    epsilon0: float
    slots: int
    rate: float = 1.0

    def __post_init__(self) -> None:
        check.nonnegative("epsilon0", self.epsilon0)
        check.integer("slots", self.slots)
        check.fraction("rate", self.rate)


@dataclass(frozen=True)
class Repeated:
    """`event` run `count` times, independently."""

    event: Event
    count: int

    def __post_init__(self) -> None:
        check.integer("count", self.count, least=0)


@dataclass(frozen=True)
class Composed:
    """All of `events`, one after the other, each free to depend on the outputs of those before
    it.
    """

    events: tuple[Event, ...]


@dataclass(frozen=True)
class Parallel:
    """Releases on disjoint parts of the data, each `(name, event)`: all records of a unit lie in
    one part.

    Which part a unit belongs to depends on only the unit. A name stands for the same part
    wherever it occurs in a ledger: releases over the same names are added up part by part. A part
    that nothing is released from is named with `Nothing`.
    """

    parts: tuple[tuple[str, Event], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple):
            raise InvalidInput(
                "parts", self.parts, "must be a tuple of pairs of a name and an event"
            )
        for part in self.parts:
            if not isinstance(part, tuple) or len(part) != 2:
                raise InvalidInput("parts", part, "must be pairs of a name and an event")
            check.one_line("parts", part[0], MOST_NAME)
        names = [name for name, _ in self.parts]
        if not names or len(set(names)) != len(names):
            raise InvalidInput("parts", names, "must have at least one name, each used once")


@dataclass(frozen=True)
class OneOf:
    """One of `events`, and which one is known: chosen without the data, or with sight of what was
    released before it.

    Settings that are tried in a search, each with a charge of its own, are one. No one of them costs
    more than what is given.
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if (
            not isinstance(self.events, tuple)
            or not self.events
            or len(set(self.events)) != len(self.events)
        ):
            raise InvalidInput(
                "events", self.events, "must be a tuple of at least one event, each of them once"
            )


@dataclass(frozen=True)
class RepeatAndSelect:
    """`event` run a random number of times, the best output released (Papernot & Steinke 2022).

    The number of runs is truncated negative binomial with `shape` eta > -1 and the given `mean`;
    shape infinity is Poisson.
    """

    event: Event
    mean: float
    shape: float

    def __post_init__(self) -> None:
        check.positive("mean", self.mean)
        check.positive_or_infinite("shape + 1", self.shape + 1)


@dataclass(frozen=True)
class Stopped:
    """`event`, all that was released by a run whose end was chosen, from its own outputs, among
    points fixed in advance.

    `share` of delta is what each of the points may use: at most one over their number. What is
    given of it is given after the fact: see docs/early-stopping.md.
    """

    event: Event
    share: float

    def __post_init__(self) -> None:
        check.positive("share", check.fraction("share", self.share))


Event = Union[
    Nothing,
    NotPrivate,
    Gaussian,
    Laplace,
    DiscreteLaplace,
    DiscreteGaussian,
    DistributedDiscreteGaussian,
    DistributedSkellam,
    RandomizedResponse,
    MixtureOfGaussians,
    EpsilonDelta,
    MetricPrivacy,
    Zcdp,
    RenyiCurve,
    BoundedRange,
    NoisyThreshold,
    NoisyArgmax,
    ObjectivePerturbation,
    PoissonSampled,
    SampledWithoutReplacement,
    SampledWithReplacement,
    TruncatedPoissonGaussian,
    BallsInBins,
    RandomlyAllocated,
    Shuffled,
    RandomCheckIns,
    Repeated,
    Composed,
    Parallel,
    OneOf,
    RepeatAndSelect,
    Stopped,
]

CODEC = Codec(
    "event",
    {
        "nothing": Nothing,
        "not-private": NotPrivate,
        "gaussian": Gaussian,
        "laplace": Laplace,
        "discrete-laplace": DiscreteLaplace,
        "discrete-gaussian": DiscreteGaussian,
        "distributed-discrete-gaussian": DistributedDiscreteGaussian,
        "distributed-skellam": DistributedSkellam,
        "randomized-response": RandomizedResponse,
        "gaussian-mixture": MixtureOfGaussians,
        "epsilon-delta": EpsilonDelta,
        "metric-privacy": MetricPrivacy,
        "zcdp": Zcdp,
        "renyi-curve": RenyiCurve,
        "bounded-range": BoundedRange,
        "noisy-threshold": NoisyThreshold,
        "noisy-argmax": NoisyArgmax,
        "objective-perturbation": ObjectivePerturbation,
        "poisson-sampled": PoissonSampled,
        "sampled-without-replacement": SampledWithoutReplacement,
        "sampled-with-replacement": SampledWithReplacement,
        "truncated-poisson-gaussian": TruncatedPoissonGaussian,
        "balls-in-bins": BallsInBins,
        "randomly-allocated": RandomlyAllocated,
        "shuffled": Shuffled,
        "random-check-ins": RandomCheckIns,
        "repeated": Repeated,
        "composed": Composed,
        "parallel": Parallel,
        "one-of": OneOf,
        "repeat-and-select": RepeatAndSelect,
        "stopped": Stopped,
    },
)


def decode(data: object) -> Event:
    """The event whose JSON form is `data`, whole down to its leaves; anything else is
    :class:`InvalidInput`.
    """
    try:
        event = CODEC.decode(data)
        _check_tree(event)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as problem:
        if isinstance(problem, InvalidInput):
            raise
        raise InvalidInput("event", data, f"cannot be read ({type(problem).__name__})") from None
    found: Event = event
    return found


def _check_tree(node: object) -> None:
    if type(node) not in CODEC.names:
        raise InvalidInput("event", node, "must be an event")
    for part in inside(node):
        _check_tree(part)
    hash(node)  # what holds a list or an object in place of a number


def inside(event: object) -> tuple[Event, ...]:
    """The events that `event` is made of; none for a leaf."""
    if isinstance(event, Composed | OneOf):
        return event.events
    if isinstance(event, Parallel):
        return tuple(part for _, part in event.parts)
    return (event.event,) if hasattr(event, "event") else ()


def one_of(found: Iterable[Event]) -> Event:
    """Any one of these, each named once; one alone is itself."""
    each = tuple(dict.fromkeys(found))
    return each[0] if len(each) == 1 else OneOf(each)


def on_part(part: str, parts: Sequence[str], event: Event) -> Parallel:
    """`event` on the records of one named part of the data; nothing is released from the other
    `parts`.

    Releases on parts of the same names add up part by part: two on different parts cost what the
    costlier one does.
    """
    check.one_of("part", part, tuple(parts))
    return Parallel(tuple((name, event if name == part else Nothing()) for name in parts))


def flatten(event: Event) -> list[tuple[Event, int]]:
    """The event as a list of (leaf, count) with repetition and composition multiplied out and equal
    leaves merged.
    """
    counts: dict[Event, int] = {}

    def walk(node: Event, times: int) -> None:
        if isinstance(node, Repeated):
            walk(node.event, times * node.count)
        elif isinstance(node, Composed):
            for part in node.events:
                walk(part, times)
        elif times and not isinstance(node, Nothing):
            counts[node] = counts.get(node, 0) + times

    walk(event, 1)
    return list(counts.items())


def mean_trials(shape: float, gamma: float) -> float:
    """The mean of the truncated negative binomial distribution with shape eta > -1 and parameter
    gamma.
    """
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


@lru_cache(maxsize=256)
def gamma_for(shape: float, mean: float) -> float:
    """The gamma that gives a mean number of trials."""
    check.positive_or_infinite("shape + 1", shape + 1)
    if check.positive("mean", mean) <= 1:
        raise Unsupported(f"a mean of {mean:g} trials", "ask for more than 1")
    low, high = 1e-300, 1 - 1e-12
    for _ in range(400):
        middle = math.sqrt(low * high) if low < 1e-3 * high else (low + high) / 2
        low, high = (middle, high) if mean_trials(shape, middle) > mean else (low, middle)
    return high


def poisson(noise_multiplier: float, sampling_rate: float, steps: int) -> Event:
    """Noisy steps, each on a fresh Poisson sample. At rate 1 nothing is sampled."""
    noise = Gaussian(noise_multiplier)
    return Repeated(noise if sampling_rate == 1 else PoissonSampled(sampling_rate, noise), steps)


def without_replacement(
    noise_multiplier: float, records: int, batch_size: int, steps: int
) -> Event:
    """Noisy steps, each on a fresh uniform subset of a fixed size. A batch of everybody samples
    nothing.
    """
    noise = Gaussian(noise_multiplier)
    return Repeated(
        noise if batch_size == records else SampledWithoutReplacement(records, batch_size, noise),
        steps,
    )


def random_allocation(
    noise_multiplier: float, steps_per_epoch: int, epochs: int, times: int = 1
) -> Event:
    """Epochs in each of which a unit takes part in `times` of the steps, drawn again for each.

    A uniform choice of k of t steps is a uniform choice of one step in each of k blocks of t // k
    steps, the blocks being drawn at random in advance: anyone who is told the blocks sees k releases of
    one step in t // k (Feldman & Shenfeld 2025).
    """
    return Repeated(RandomlyAllocated(noise_multiplier, steps_per_epoch // times), times * epochs)
