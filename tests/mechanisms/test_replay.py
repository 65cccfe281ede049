"""Record and replay: on neighbouring data the same draws are asked for, and what they meet moves no
farther than was paid for.

Samplers are replaced by recorders that add no noise. The distance of two releases over the scales
that were recorded is the loss that a unit really causes, whatever the mechanism believes of its
sensitivity (after Cebere et al. 2026: 13 faults in 12 libraries).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.mechanisms import choice, integers, response
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.choice import Exponential, NoisyMax, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism, DiscreteLaplaceMechanism
from dpfy.mechanisms.histogram import StabilityHistogram
from dpfy.mechanisms.response import RandomizedResponseMechanism, UnaryResponse
from dpfy.mechanisms.sparse import SparseVector
from dpfy_lab.mechanisms import aggregate
from dpfy_lab.mechanisms.aggregate import AggregateMean, AggregateMedian
from dpfy_lab.mechanisms.local_sensitivity import Near, ProposeTestRelease

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
UNITS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0, 5e-324, 1.0, -1.0, 0.3, 2.5]
"""What one more unit may bring."""


class Recorder:
    """Samplers that write down what is asked for and answer nothing: no noise, the first candidate,
    no coin.
    """

    def __init__(self) -> None:
        self.calls, self.exponents = [], []

    def noise(self, name):
        def draw(count, scale, bits):
            self.calls.append((name, count, scale))
            return np.zeros(count, np.int64)

        return draw

    def pick(self, exponents, bits, denominator=1):
        self.calls.append(("pick", len(exponents)))
        self.exponents = [int(e) / denominator for e in exponents]
        return 0

    def coins(self, count, p, bits):
        self.calls.append(("coins", count, p))
        return np.zeros(count, bool)

    def uniform(self, count, n, bits):
        self.calls.append(("uniform", n))  # how many units there are is not public
        return np.arange(count) % n


@pytest.fixture
def record(monkeypatch):
    """From a release to (value, calls, exponents)."""

    def run(release):
        found = Recorder()
        monkeypatch.setattr(integers, "laplace", found.noise("laplace"))
        monkeypatch.setattr(integers, "gaussian", found.noise("gaussian"))
        monkeypatch.setattr(choice, "choose", found.pick)
        monkeypatch.setattr(choice, "permute_and_flip", found.pick)
        for module in (response, aggregate):
            monkeypatch.setattr(module, "uniform", found.uniform)
        monkeypatch.setattr(response, "coins", found.coins)
        return release(), found.calls, found.exponents

    return run


def permit(mechanism, releases=1, adjacency=ADD):
    return mock_permit(mechanism.event, releases, adjacency=adjacency)


ROWS = np.random.default_rng(0).normal(size=(50, 3))


@pytest.mark.parametrize("mechanism", [LaplaceMechanism(0.8), GaussianMechanism(0.8)], ids=repr)
@pytest.mark.parametrize("unit", UNITS)
def test_sums(record, mechanism, unit):
    bound = Bound(1.0, 1.5, 0.9)
    grid = mechanism.grid(bound, 3)

    def release(rows):
        return lambda: mechanism.release(grid.sum(rows, bound), permit(mechanism)).value

    first, calls, _ = record(release(ROWS))
    second, again, _ = record(release(np.vstack([ROWS, np.full((1, 3), unit)])))
    assert calls == again
    (_, _, scale), norm = calls[0], np.abs if isinstance(mechanism, LaplaceMechanism) else np.square
    distance = norm((first - second) / float(grid.step)).sum()
    distance = distance if isinstance(mechanism, LaplaceMechanism) else math.sqrt(distance)
    assert distance / float(scale) <= 1 / mechanism.noise_multiplier
    if unit == 2.5:  # as far as it may, and not much less: the noise is no larger than it must be
        assert distance / float(scale) > 0.8 / mechanism.noise_multiplier


@pytest.mark.parametrize(
    "mechanism", [DiscreteLaplaceMechanism(0.7, 2), DiscreteGaussianMechanism(1.5, 2)], ids=repr
)
def test_whole_numbers(record, mechanism):
    runs = [
        record(
            lambda v=v: (
                mechanism.release(Bounded(np.array(v), Bound(l1=2.0)), permit(mechanism)).value
            )
        )
        for v in ([5, 0], [4, 1])
    ]
    assert (
        runs[0][1]
        == runs[1][1]
        == [
            (
                type(mechanism).__name__.removeprefix("Discrete").removesuffix("Mechanism").lower(),
                2,
                mechanism.scale,
            )
        ]
    )


@pytest.mark.parametrize("monotone", [False, True])
@pytest.mark.parametrize("kind", [Exponential, PermuteAndFlip])
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_choices(record, kind, monotone, adjacency):
    rng, mechanism = np.random.default_rng(1), kind(0.9, monotone, adjacency=adjacency)
    for whole in (True, False):
        for _ in range(20):
            scores = rng.integers(0, 9, 6) if whole else rng.uniform(0, 9, 6)
            low = 0 if monotone else -1
            move = rng.integers(low, 2, 6) - (
                rng.integers(low, 2, 6) if adjacency is REPLACE else 0
            )
            runs = [
                record(
                    lambda s=s: (
                        mechanism.release(
                            Bounded(s, Bound(linf=1.0)), permit(mechanism, 1, adjacency)
                        ).value
                    )
                )
                for s in (scores, scores + move)
            ]
            assert runs[0][1] == runs[1][1]
            moved = np.subtract(runs[0][2], runs[1][2])
            assert moved.max() - moved.min() <= 0.9 + 1e-9


def test_noisy_max(record):
    mechanism = NoisyMax(0.9, noise="laplace")
    runs = [
        record(lambda s=s: mechanism.release(Bounded(s, Bound(linf=1.0)), permit(mechanism)).value)
        for s in ([3, 1, 2], [2, 2, 3])
    ]
    assert runs[0][1] == runs[1][1]
    assert float(2 / runs[0][1][0][2]) <= 0.9 + 1e-12


def test_streams(record):
    mechanism = SparseVector(1.0, 100.0, answers=3)

    def release(values):
        def run():
            stream = mechanism.open(permit(mechanism, 10))
            return [stream.ask(Bounded(v, Bound.scalar(1.0))).value for v in values]

        return run

    first, second = record(release([1, 2, 3])), record(release([2, 1, 4]))
    assert first == second
    assert [name for name, *_ in first[1]] == ["laplace"] * 4


def test_tests(record):
    mechanism = ProposeTestRelease(1.0, 1e-3, 2.0)
    runs = [
        record(
            lambda n=n: mechanism.release(Bounded(n, Bound.scalar(1.0)), permit(mechanism)).value
        )
        for n in (Near(5.0, 50), Near(7.0, 49))
    ]
    assert runs[0][1] == runs[1][1]
    (_, _, test), (_, _, noise) = runs[0][1]
    step = 2.0**-23
    assert float(1 / test) + abs(runs[0][0] - runs[1][0]) / step / float(noise) <= 1.0
    silent = record(
        lambda: mechanism.release(Bounded(Near(5.0, 0), Bound.scalar(1.0)), permit(mechanism)).value
    )
    assert silent[0] is None
    assert silent[1] == runs[0][1]  # noise is drawn whether the test passes or not


@pytest.mark.parametrize("kind", [AggregateMean, AggregateMedian])
@pytest.mark.parametrize("unit", UNITS)
def test_aggregates(record, kind, unit):
    mechanism = kind(0.7, 7, -1.0, 1.0)

    def release(rows):
        return lambda: mechanism.release(lambda part: part.sum(), rows, permit(mechanism)).value

    rows = ROWS[:, 0]
    first, second = (
        record(release(rows)),
        record(release(np.append(rows, unit))),
    )  # the last row changes the last row's block alone
    assert first[1] == second[1]
    if kind is AggregateMean:
        width, (_, _, scale) = abs(first[0] - second[0]) * 7 * 2**23, first[1][1]
        assert width / float(scale) <= 0.7 + 1e-6
    else:
        moved = np.subtract(first[2], second[2])
        assert moved.max() - moved.min() <= 0.7 + 1e-9


def test_histograms(record):
    """A key more is a draw more, which the threshold hides; all others meet the same noise."""
    mechanism = StabilityHistogram(DiscreteLaplaceMechanism(0.5, 2), 5, keys=2)
    runs = [
        record(lambda c=c: mechanism.release(Bounded(c, mechanism.bound), permit(mechanism)).value)
        for c in ({"a": 9}, {"a": 10, "b": 1})
    ]
    assert [c[2] for c in runs[0][1]] == [c[2] for c in runs[1][1]] == [2]
    assert runs[0][0] == {"a": 9.0}
    assert runs[1][0] == {"a": 10.0}


@pytest.mark.parametrize(
    "mechanism", [RandomizedResponseMechanism.of(1.0, 4), UnaryResponse(1.0, 4)], ids=repr
)
def test_answers(record, mechanism):
    """Which coins are thrown does not depend on the answer, and nobody's coins on another's
    answer.
    """
    runs = [
        record(
            lambda a=a: (
                mechanism.release(
                    Bounded(np.array(a), Bound()), permit(mechanism, 1, REPLACE)
                ).value
            )
        )
        for a in ([0, 1, 2], [0, 3, 2], [0, 99, 2])
    ]
    assert runs[0][1] == runs[1][1] == runs[2][1]
    assert np.array_equal(np.delete(runs[0][0], 1, 0), np.delete(runs[1][0], 1, 0))
    assert np.array_equal(runs[1][0], runs[2][0])
