"""Events for every row of the table, and which of them reveal at least as much as which others."""

from __future__ import annotations

import math
from functools import partial

from dpfy.accounting.rdp import ORDERS, divergences
from dpfy.accounting.rules import grouped, unsampled
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.unit import Adjacency

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
GAUSSIAN, STEP = ev.Gaussian(4.0), ev.PoissonSampled(0.05, ev.Gaussian(2.0))
CURVE = ev.RenyiCurve(tuple(map(float, range(2, 65))), tuple(a / 32 for a in range(2, 65)))
PARTS = ev.Parallel(
    (("north", ev.Gaussian(3.0)), ("south", ev.Laplace(5.0)), ("west", ev.Nothing()))
)

LEAVES: list[ev.Event] = [
    ev.Nothing(),
    ev.NotPrivate(),
    ev.MetricPrivacy(2.0, "the distance of embeddings"),
    GAUSSIAN,
    ev.Laplace(8.0),
    ev.DiscreteLaplace(0.2, 2),
    ev.DiscreteGaussian(6.0, 2),
    ev.DistributedDiscreteGaussian(3.0, 200, 90, 64),
    ev.DistributedDiscreteGaussian(1.1, 200, 9, 64),
    ev.DistributedSkellam(0.9, 500, 12, 64),
    ev.RandomizedResponse(0.8, 3),
    ev.MixtureOfGaussians(4.0, (0.0, 1.0, 2.0), (0.7, 0.2, 0.1)),
    ev.EpsilonDelta(0.1),
    ev.EpsilonDelta(0.1, 1e-14),
    ev.Zcdp(0.02),
    ev.Zcdp(0.02, 0.01),
    CURVE,
    ev.BoundedRange(0.3),
    ev.NoisyThreshold(4.0),
    ev.NoisyArgmax(8.0, 2),
    ev.NoisyArgmax(8.0, 5),
    ev.ObjectivePerturbation(6.0, 0.05),
    ev.ObjectivePerturbation(6.0, 0.05, True, 0.05),
]
WRAPPED: list[ev.Event] = [
    STEP,
    ev.SampledWithoutReplacement(200, 10, ev.Gaussian(3.0)),
    ev.SampledWithReplacement(200, 3, ev.Gaussian(3.0)),
    ev.TruncatedPoissonGaussian(200, 0.05, 12, 2.0),
    ev.BallsInBins(2.0, ((1.0, 0.0), (0.0, 0.8))),
    ev.RandomlyAllocated(2.0, 30),
    ev.Shuffled(1.0, 300),
    ev.Shuffled(1.0, 300, 5),
    ev.RandomCheckIns(1.0, 200, 0.5),
    ev.Repeated(STEP, 7),
    ev.Composed((STEP, ev.Laplace(20.0), ev.BoundedRange(0.1))),
    PARTS,
    ev.OneOf((STEP, ev.Gaussian(9.0))),
    ev.OneOf((ev.Laplace(9.0), ev.BoundedRange(0.1))),
    ev.RepeatAndSelect(ev.OneOf((STEP, ev.PoissonSampled(0.1, ev.Gaussian(4.0)))), 10.0, math.inf),
    ev.RepeatAndSelect(STEP, 10.0, 1.0),
    ev.RepeatAndSelect(STEP, 10.0, math.inf),
    ev.Stopped(ev.Repeated(STEP, 7), 0.5),
]
SAMPLED: list[ev.Event] = [ev.PoissonSampled(0.1, leaf) for leaf in LEAVES]
EVENTS = [*LEAVES, *WRAPPED, *SAMPLED, ev.PoissonSampled(0.1, PARTS)]
"""Every kind of event, and every leaf on a Poisson sample."""


def name_of(event: ev.Event) -> str:
    """A name for a test."""
    inner = getattr(event, "event", None)
    return type(event).__name__ + (f"-{name_of(inner)}" if inner is not None else "")


def _renyi_of(event: ev.Event) -> ev.RenyiCurve:
    return ev.RenyiCurve(ORDERS, tuple(float(v) for v in divergences(event, ADD)))


def dominated() -> list[tuple[ev.Event, ev.Event, Adjacency]]:
    """(event, one that it dominates, adjacency): what the first reveals about anybody, the second
    does not exceed.
    """
    epsilon = 0.3
    without = partial(ev.SampledWithoutReplacement, 50, 10)
    answers = 2 / (1 + math.exp(epsilon))  # randomized response of two answers with this epsilon
    known = [
        (ev.EpsilonDelta(epsilon), ev.Laplace(1 / epsilon), ADD),
        (ev.EpsilonDelta(epsilon), ev.DiscreteLaplace(epsilon), ADD),
        (ev.EpsilonDelta(epsilon), ev.BoundedRange(epsilon), ADD),
        (ev.EpsilonDelta(epsilon), ev.RandomizedResponse(answers), REPLACE),
        (ev.EpsilonDelta(epsilon, 1e-9), ev.EpsilonDelta(epsilon), ADD),
        (ev.BoundedRange(2 * epsilon), ev.EpsilonDelta(epsilon), ADD),
        (ev.BoundedRange(2 * epsilon), ev.RandomizedResponse(answers), REPLACE),
        (ev.BoundedRange(2 * epsilon), ev.Laplace(1 / epsilon), ADD),
        (ev.Zcdp(epsilon**2 / 8), ev.BoundedRange(epsilon), ADD),
        (ev.Zcdp(epsilon * math.tanh(epsilon / 2)), ev.EpsilonDelta(epsilon), ADD),
        (ev.Zcdp(1 / 32), GAUSSIAN, ADD),
        (ev.Zcdp(1 / 32), ev.DiscreteGaussian(4.0), ADD),
        (CURVE, GAUSSIAN, ADD),
        (ev.DistributedDiscreteGaussian(3.0, 16, 9, 1), ev.DiscreteGaussian(12.0, 3), ZERO),
        (ev.DistributedDiscreteGaussian(3.0, 100, 9, 4), ev.Gaussian(10.0), ZERO),
        (ev.DistributedSkellam(0.5, 3600, 9, 4), ev.Gaussian(10.0), ZERO),
        (_renyi_of(STEP), STEP, ADD),
        (_renyi_of(ev.BoundedRange(epsilon)), ev.BoundedRange(epsilon), ADD),
        (ev.BallsInBins(4.0, ((1.0,),)), GAUSSIAN, ADD),
        (ev.RandomlyAllocated(2.0, 10), ev.RandomlyAllocated(2.0, 30), ADD),
        (ev.RandomlyAllocated(1.5, 30), ev.RandomlyAllocated(2.0, 30), ADD),
        (
            ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(2.0)), 20),
            ev.RandomlyAllocated(2.0, 20),
            ADD,
        ),
        (ev.RepeatAndSelect(STEP, 3.0, 1.0), STEP, ADD),
        (
            ev.PoissonSampled(0.2, ev.EpsilonDelta(epsilon)),
            ev.PoissonSampled(0.2, ev.BoundedRange(epsilon)),
            ADD,
        ),
        (
            ev.PoissonSampled(0.2, ev.BoundedRange(2 * epsilon)),
            ev.PoissonSampled(0.2, ev.Laplace(1 / epsilon)),
            ADD,
        ),
        (
            ev.PoissonSampled(0.2, ev.BoundedRange(2 * epsilon)),
            ev.PoissonSampled(0.2, ev.EpsilonDelta(epsilon)),
            ADD,
        ),
        (without(ev.EpsilonDelta(epsilon)), without(ev.Laplace(2 / epsilon)), REPLACE),
        (
            ev.TruncatedPoissonGaussian(200, 0.05, 12, 2.0),
            ev.PoissonSampled(0.04, ev.Gaussian(2.0)),
            ADD,
        ),
        (ev.Parallel((("a", STEP), ("b", GAUSSIAN))), GAUSSIAN, REPLACE),
        (ev.EpsilonDelta(epsilon), ev.Shuffled(epsilon, 100), REPLACE),
        (ev.Shuffled(epsilon, 100), ev.Shuffled(epsilon, 120), REPLACE),
        (ev.Shuffled(2 * epsilon, 100), ev.Shuffled(epsilon, 100), REPLACE),
        (ev.Shuffled(epsilon, 100), ev.RandomCheckIns(epsilon, 100), REPLACE),
        (ev.Shuffled(epsilon, 100), ev.Shuffled(epsilon, 100, 3), REPLACE),
        (ev.Shuffled(epsilon, 100, 3), ev.Shuffled(epsilon, 100, 9), REPLACE),
        (ev.RandomCheckIns(epsilon, 100, 0.5), ev.RandomCheckIns(epsilon, 100, 0.4), ADD),
        (ev.RandomCheckIns(epsilon, 50, 0.5), ev.RandomCheckIns(epsilon, 100, 0.5), ADD),
        (ev.EpsilonDelta(epsilon), ev.RandomCheckIns(epsilon, 20), REPLACE),
        (ev.Stopped(STEP, 0.5), STEP, ADD),
        (GAUSSIAN, ev.NoisyThreshold(4.0), ADD),
        (GAUSSIAN, ev.NoisyArgmax(4 * math.sqrt(2), 2), ADD),
        (ev.NoisyArgmax(8.0, 5), ev.NoisyArgmax(8.0, 2), ADD),
        (ev.NoisyArgmax(8.0, 2), ev.NoisyThreshold(8 / math.sqrt(2)), ADD),
        (ev.Zcdp(1 / 64), ev.NoisyArgmax(8.0, 3), ADD),
        (ev.ObjectivePerturbation(4.0, 0.0, True), GAUSSIAN, ADD),
        (ev.ObjectivePerturbation(4.0, 0.1), GAUSSIAN, REPLACE),
        (ev.ObjectivePerturbation(9.0, 0.1, True, 0.25), GAUSSIAN, ADD),
        (ev.RepeatAndSelect(ev.OneOf((STEP, GAUSSIAN)), 3.0, 0.0), ev.OneOf((STEP, GAUSSIAN)), ADD),
    ]
    pairs: list[tuple[ev.Event, ev.Event, Adjacency]] = [*known]
    pairs += [
        (event, part, ADD)
        for event in EVENTS
        if isinstance(event, ev.Parallel)
        for _, part in event.parts
    ]
    pairs += [
        (event, part, ADD)
        for event in EVENTS
        if isinstance(event, ev.OneOf)
        for part in event.events
    ]
    pairs += [(unsampled(event), event, ADD) for event in EVENTS if unsampled(event) != event]
    for event in EVENTS:
        try:
            pairs.append((grouped(event, 2), event, ADD))
        except Unsupported:
            continue
    return pairs
