"""Exact privacy by enumeration: the whole law of every mechanism's own code on small domains,
against the curve that is billed.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dpfy.core import events
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.mechanisms import choice, grid, integers, response
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.candidates import PrivateSelection
from dpfy.mechanisms.choice import Exponential, NoisyMax, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism, DiscreteLaplaceMechanism
from dpfy.mechanisms.grid import Grid, Laid
from dpfy.mechanisms.histogram import StabilityHistogram, as_float, laplace_tail, laplace_threshold
from dpfy.mechanisms.response import RandomizedResponseMechanism, UnaryResponse
from dpfy.mechanisms.sparse import SparseVector
from dpfy_lab.mechanisms import aggregate, local_sensitivity, staircase
from dpfy_lab.mechanisms.aggregate import AggregateMean, AggregateMedian
from dpfy_lab.mechanisms.local_sensitivity import Near, ProposeTestRelease, SmoothQuantile
from dpfy_lab.mechanisms.staircase import Staircase

sys.path.insert(0, str(Path(__file__).parent))
from enumerated import ONE, Branches, check, hockey_stick

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT


@pytest.fixture
def branches(monkeypatch):
    """Every sampler replaced by branches over all of its outcomes."""
    found = Branches()
    for module, names in (
        (integers, ("laplace", "gaussian")),
        (choice, ("choose", "permute_and_flip")),
        (staircase, ("below", "bernoulli", "geometric")),
        (response, ("coins", "uniform")),
        (aggregate, ("uniform",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(found, name))
    return found


def released(mechanism, value, bound, adjacency=ADD):
    """One release under a fresh permit, as something that can be counted."""

    def run():
        answer = mechanism.release(
            Bounded(value, bound), mock_permit(mechanism.event, 1, adjacency=adjacency)
        ).value
        return tuple(np.ravel(answer).tolist()) if isinstance(answer, np.ndarray) else answer

    return run


def laid(*counts):
    return Laid(Grid(0), np.array(counts if len(counts) > 1 else counts[0], np.int64))


@pytest.mark.parametrize("parameter", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_discrete_laplace(branches, parameter, adjacency):
    branches.reach = 40
    mechanism, moves = DiscreteLaplaceMechanism(parameter, 2), 4 if adjacency is REPLACE else 2
    laws = [branches.law(released(mechanism, x, Bound.scalar(2.0))) for x in range(moves + 1)]
    tight = check(laws, mechanism.event, adjacency)
    assert tight == pytest.approx(
        -math.expm1(-parameter * moves / 2), rel=1e-6
    )  # exactly what a shift by so much costs


@pytest.mark.parametrize("sigma", [0.7, 1.5, 3.0])
def test_discrete_gaussian(branches, sigma):
    branches.reach = 60
    mechanism = DiscreteGaussianMechanism(sigma, 2)
    check(
        [branches.law(released(mechanism, x, Bound.scalar(2.0))) for x in range(3)],
        mechanism.event,
        ADD,
    )


@pytest.mark.parametrize(
    "mechanism", [DiscreteLaplaceMechanism(1.5, 2), DiscreteGaussianMechanism(1.2, 2)], ids=repr
)
def test_vectors_cost_no_more_than_their_l1_norm(branches, mechanism):
    branches.reach = 30 if isinstance(mechanism, DiscreteLaplaceMechanism) else 50
    values = [(0, 0), (2, 0), (0, -2), (1, 1), (-1, 1)]
    laws = [branches.law(released(mechanism, np.array(v), Bound(l1=2.0))) for v in values]
    for law in laws[1:]:
        check([laws[0], law], mechanism.event, ADD)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", [LaplaceMechanism, GaussianMechanism])
def test_real_bills_cover_integer_noise(branches, kind, multiplier, most):
    """On the coarsest of grids, where the difference between integers and real numbers is
    largest.
    """
    mechanism = kind(multiplier)
    laws = [
        branches.law(released(mechanism, laid(x), Bound.scalar(float(most))))
        for x in range(most + 1)
    ]
    check(laws, mechanism.event, ADD)


@pytest.mark.parametrize("most", [4, 9])
def test_real_gaussian_bills_cover_two_coordinates(branches, most):
    branches.reach = 24
    mechanism = GaussianMechanism(0.3)
    values = [(0, 0), (most, 0), (round(most * 0.6), round(most * 0.8) - 1)]
    bound = Bound(float(most))
    # Laws of independent coordinates, multiplied.
    one = {x: branches.law(released(mechanism, laid(x), bound)) for v in values for x in v}
    laws = [
        {(i, j): p * q >> 160 for i, p in one[a].items() for j, q in one[b].items()}
        for a, b in values
    ]
    check([laws[0], laws[1]], mechanism.event, ADD)
    check([laws[0], laws[2]], mechanism.event, ADD)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_staircase(branches, epsilon, most):
    mechanism = Staircase(epsilon)
    laws = [
        branches.law(released(mechanism, laid(x), Bound.scalar(float(most))))
        for x in range(most + 1)
    ]
    check(laws, mechanism.event, ADD)
    if epsilon == 1.0:  # and no smaller epsilon would do
        assert hockey_stick(laws[0], laws[-1], 0.99 * epsilon) > 1e-3


@pytest.mark.parametrize("buckets", [2, 3, 5])
@pytest.mark.parametrize("adjacency", [REPLACE, ZERO])
def test_randomized_response(branches, buckets, adjacency):
    mechanism = RandomizedResponseMechanism.of(1.0, buckets)
    laws = [
        branches.law(released(mechanism, np.array([x]), Bound(), adjacency)) for x in range(buckets)
    ]
    if adjacency is ZERO:
        laws = [laws[0], {(x,): ONE // buckets for x in range(buckets)}]
    check(laws, mechanism.event, adjacency)
    if adjacency is REPLACE:
        assert (
            hockey_stick(laws[0], laws[1], 0.999)
            > 1e-4
            > 1e-12
            > hockey_stick(laws[0], laws[1], 1.0)
        )


@pytest.mark.parametrize("optimised", [True, False])
@pytest.mark.parametrize("epsilon", [0.4, 2.0])
def test_unary_response(branches, optimised, epsilon):
    mechanism = UnaryResponse(epsilon, 4, optimised)
    laws = [branches.law(released(mechanism, np.array([x]), Bound(), REPLACE)) for x in range(4)]
    check(laws, mechanism.event, REPLACE)
    assert hockey_stick(laws[0], laws[1], 0.99 * epsilon) > 1e-4


SCORES = [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 1), (-1, 0, 1), (1, -1, -1), (0, 1, -1)]


def neighbours(monotone: bool):
    """Pairs of scores that one unit makes different: by at most 1 each, in one direction if they
    are monotone.
    """
    base = np.array([5, 4, 2])
    return [(base, base + v) for v in SCORES if not monotone or min(v) >= 0]


@pytest.mark.parametrize("monotone", [False, True])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    "kind",
    [
        Exponential,
        PermuteAndFlip,
        *(
            lambda e, m, noise=n: NoisyMax(e, m, noise)
            for n in ("gumbel", "exponential", "laplace")
        ),
    ],
)
def test_choices(branches, kind, epsilon, monotone):
    mechanism = kind(epsilon, monotone)
    if isinstance(mechanism, NoisyMax) and mechanism.noise == "laplace":
        mechanism = NoisyMax(8 * epsilon, monotone, "laplace")  # few branches
        branches.reach = 24
        if epsilon < 1:
            return
    for pair in neighbours(monotone):
        if not np.array_equal(*pair):
            laws = [branches.law(released(mechanism, scores, Bound(linf=1.0))) for scores in pair]
            check(laws, mechanism.event, ADD)


@pytest.mark.parametrize("kind", [Exponential, PermuteAndFlip])
def test_choices_under_replacement_and_with_rounded_scores(branches, kind):
    mechanism = kind(1.0, adjacency=REPLACE)
    for v in [(2, 0, -2), (-2, 2, 0), (2, 2, 2)]:
        scores = np.array([5.0, 4.3, 2.1])
        laws = [
            branches.law(released(mechanism, s, Bound(linf=1.0), REPLACE))
            for s in (scores, scores + v)
        ]
        check(laws, mechanism.event, REPLACE)


def test_permute_and_flip_has_no_bounded_range(branches):
    """So that it is billed as pure epsilon: by a range of epsilon its composition would be too
    cheap.
    """
    mechanism = PermuteAndFlip(2.0)
    p, q = (
        branches.law(released(mechanism, np.array(s), Bound(linf=1.0)))
        for s in ([2, 2, 1], [1, 3, 2])
    )
    losses = [math.log(p[i] / q[i]) for i in p]
    assert max(losses) - min(losses) > 2.2


def test_permute_and_flip_is_billed_as_pure():
    for mechanism in (
        PermuteAndFlip(1.0),
        NoisyMax(1.0, noise="exponential"),
        NoisyMax(1.0, noise="laplace"),
    ):
        assert mechanism.event == events.EpsilonDelta(1.0)
    for mechanism in (Exponential(1.0), NoisyMax(1.0, noise="gumbel")):
        assert mechanism.event == events.BoundedRange(1.0)


@pytest.mark.parametrize(
    ("answers", "numeric", "monotone"),
    [(1, 0.0, False), (2, 0.0, False), (2, 0.0, True), (1, 0.4, False)],
)
def test_sparse_vector(branches, monkeypatch, answers, numeric, monotone):
    """Its own code asks two questions; three where the law has a closed form (below)."""
    monkeypatch.setattr(grid, "FINENESS", 0)
    branches.reach = 14 if answers == 1 else 9
    mechanism = SparseVector(12.0, 1.0, answers=answers, numeric=numeric, monotone=monotone)

    def run(values):
        def ask():
            stream = mechanism.open(mock_permit(mechanism.event, 2))
            out = [stream.ask(Bounded(values[0], Bound.scalar(1.0))).value]
            if stream.left and not numeric:
                out.append(stream.ask(Bounded(values[1], Bound.scalar(1.0))).value)
            return tuple(out)

        return ask

    pairs = [
        ((0.5, 0.5), (1.5, 1.5)),
        ((0.5, 1.5), (1.5, 0.5)),
        ((1.5, 0.5), (0.5, 1.5)),
    ]  # rounded to 0 and 2: as far as can be
    for pair in pairs[:1] if monotone or numeric else pairs[answers:]:
        p, q = (branches.law(run(values)) for values in pair)
        missing = max(1 - sum(law.values()) / ONE for law in (p, q))
        assert missing < 1e-3
        assert max(hockey_stick(p, q, 12.0), hockey_stick(q, p, 12.0)) <= 100 * missing
        assert max(hockey_stick(p, q, 1.0), hockey_stick(q, p, 1.0)) > 100 * missing


def test_sparse_vector_in_closed_form():
    """Many questions, scales as the mechanism has them: P(outcome) is a sum over the threshold's
    noise of a product.
    """
    for answers, monotone, most in ((1, False, 2), (3, False, 2), (3, True, 2)):
        mechanism = SparseVector(2.0, 0.0, answers=answers, monotone=monotone)
        first, each, _ = (float(s) / 2**24 if s else None for s in mechanism.scales())
        rho = np.linspace(-30 * first, 30 * first, 6001)
        density = np.exp(-abs(rho) / first)
        density /= density.sum()
        worst = 0.0
        for shift in ((1, 1, 1, 1, 1), (-1, -1, -1, -1, -1), (1, -1, 1, -1, -1), (-1, 1, -1, 1, 1)):
            if monotone and len(set(shift)) > 1:
                continue
            for outcome in range(2**5):
                chances = []
                for values in (np.zeros(5), np.array(shift, float)):
                    gap = (rho[:, None] - values[None]) / each
                    above = np.where(gap > 0, np.exp(-abs(gap)) / 2, 1 - np.exp(-abs(gap)) / 2)
                    product, left = density.copy(), answers
                    for i in range(5):
                        hit = outcome >> i & 1
                        if left:
                            product = product * (above[:, i] if hit else 1 - above[:, i])
                            left -= hit
                    chances.append(product.sum())
                worst = max(worst, abs(math.log(chances[0] / chances[1])))
        assert worst <= 2.0 + 1e-6
        assert worst > 0.7 or most == 2


def test_propose_test_release(branches, monkeypatch):
    monkeypatch.setattr(grid, "FINENESS", 0)
    mechanism = ProposeTestRelease(6.0, 0.01, 1.0, share=0.3)

    def law(value, distance):
        return branches.law(released(mechanism, Near(value, distance), Bound.scalar(1.0)))

    for near, far in (
        (law(0.0, 0), law(1.0, 1)),
        (law(0.0, 1), law(1.0, 2)),
        (law(0.0, 3), law(1.0, 2)),
        (law(0.0, 0), law(50.0, 0)),
    ):
        check([near, far], mechanism.event, ADD)
    exact = ProposeTestRelease(2.0, 0.01, 0.0)
    laws = [
        branches.law(released(exact, Near(v, d), Bound.scalar(1.0)))
        for v, d in (("a", 0), ("b", 0), ("a", 1))
    ]
    for pair in ([laws[0], laws[1]], [laws[0], laws[2]]):
        check(pair, exact.event, ADD)


def test_the_threshold_of_a_test_is_the_least(branches):
    for epsilon, delta in ((0.5, 1e-6), (3.0, 0.01), (1.0, 0.4)):
        t = laplace_threshold(Fraction(epsilon), Fraction(delta))
        assert laplace_tail(Fraction(epsilon), t) <= delta < laplace_tail(Fraction(epsilon), t - 1)


@pytest.mark.parametrize("kind", [AggregateMean, AggregateMedian])
def test_sample_and_aggregate(branches, monkeypatch, kind):
    monkeypatch.setattr(grid, "FINENESS", 1)
    mechanism = (
        kind(2.0, 2, 0.0, 4.0) if kind is AggregateMean else kind(2.0, 2, 0.0, 4.0, places=5)
    )

    def law(rows):
        def run():
            return mechanism.release(
                lambda part: part.max(), np.array(rows), mock_permit(mechanism.event, 1)
            ).value

        return branches.law(run)

    for pair in (([1.0, 3.0], [1.0]), ([0.0, 0.0], [0.0, 0.0, 9.0]), ([], [4.0])):
        check([law(rows) for rows in pair], mechanism.event, ADD)


def test_smooth_quantile(branches, monkeypatch):
    for name, value in (("RANGE", 6), ("LEAST", 3)):
        monkeypatch.setattr(local_sensitivity, name, value)
    branches.reach = 24
    mechanism = SmoothQuantile(6.0, 0.1, 0.0, 60.0)
    tables = [
        [10, 11, 12, 13, 14],
        [10, 11, 60, 13, 14],
        [0, 0, 30, 60, 60],
        [0, 0, 60, 60, 60],
        [0, 0, 0, 60, 60],
        [30] * 5,
        [30] * 4 + [0],
    ]
    laws = [branches.law(unclipped(mechanism, table, monkeypatch)) for table in tables]
    for i, a in enumerate(tables):
        for j, b in enumerate(tables):
            if i < j and differ_in_one(a, b):
                check([laws[i], laws[j]], mechanism.event, REPLACE)
    assert sum(differ_in_one(a, b) for a in tables for b in tables) >= 6


def differ_in_one(a, b) -> bool:
    left = list(b)
    for x in a:
        if x in left:
            left.remove(x)
    return len(left) == 1


def unclipped(mechanism, table, monkeypatch):
    """What is released before it is clipped to the range, which shows more."""
    wide = SmoothQuantile(mechanism.epsilon, mechanism.delta, mechanism.lower, mechanism.upper)
    return released(wide, np.array(table, float), Bound(linf=60.0), REPLACE)


HISTOGRAMS = [
    (StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5), {"a": 7}, {"a": 7, "b": 1}),
    (StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5), {"a": 7}, {"a": 8}),
    (StabilityHistogram(DiscreteLaplaceMechanism(1.0), 2), {}, {"b": 1}),
    (StabilityHistogram(DiscreteLaplaceMechanism(2.0, 2), 3, keys=2), {"a": 3}, {"a": 4, "b": 1}),
    (StabilityHistogram(DiscreteLaplaceMechanism(2.0, 2), 3, keys=2), {}, {"a": 1, "b": 1}),
    (StabilityHistogram(DiscreteLaplaceMechanism(1.0, 2), 5, most=2), {"a": 2}, {"a": 2, "b": 2}),
    (StabilityHistogram.of(1.5, 0.01), {"a": 3}, {"a": 3, "b": 1}),
]


@pytest.mark.parametrize(("mechanism", "fewer", "more"), HISTOGRAMS)
def test_stability_histogram(branches, mechanism, fewer, more):
    def law(counts):
        def run():
            permit = mock_permit(mechanism.event, 1)
            return tuple(mechanism.release(Bounded(counts, mechanism.bound), permit).value.items())

        return branches.law(run)

    check([law(fewer), law(more)], mechanism.event, ADD)


def test_a_threshold_is_counted_from_the_value_that_is_released():
    """Scale 1, threshold 5: a unit of its own is released with probability P(noise >= 4) = 0.01339,
    not P(noise >= 5) = 0.00493.
    """
    assert StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5).delta == pytest.approx(
        0.0133898, rel=1e-5
    )
    assert StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5).delta >= math.exp(-4) / (
        1 + math.exp(-1)
    )
    assert as_float(Fraction(1, 3)) >= Fraction(1, 3)
    assert laplace_tail(Fraction(1), 0) == pytest.approx(1 / (1 + math.exp(-1)))
    assert laplace_tail(Fraction(1), -1000) <= 1


def test_gaussian_histogram_threshold():
    mechanism = StabilityHistogram(GaussianMechanism(2.0), 10)
    assert mechanism.delta == pytest.approx(math.erfc(9 / 2 / math.sqrt(2)) / 2, rel=1e-4)
    assert mechanism.delta >= math.erfc(9 / 2 / math.sqrt(2)) / 2


@pytest.mark.parametrize(
    ("mean", "shape"), [(3.0, 0.0), (3.0, 1.0), (5.0, -0.5), (2.5, 2.0), (3.0, math.inf)]
)
def test_private_selection(mean, shape):
    """Runs of randomized response, a one scores best: P(one) = 1 - E[(1 - p)^K], which is the whole
    law.
    """
    from dpfy.accounting.tuning import trials_pmf
    from dpfy.core.events import gamma_for

    inner = RandomizedResponseMechanism.of(0.5)
    mechanism = PrivateSelection(inner.event, mean, shape)
    assert mechanism.event == events.RepeatAndSelect(inner.event, mean, shape)
    laws = []
    for truth in (0, 1):
        one = 1 - inner.noise_parameter / 2 if truth else inner.noise_parameter / 2
        if math.isinf(shape):
            none, zeros = math.exp(-mean), math.exp(-mean * one)
        else:
            gamma = gamma_for(shape, mean)
            none, zeros = (
                0.0,
                sum(trials_pmf(shape, gamma, k) * (1 - one) ** k for k in range(1, 400)),
            )
        laws.append(
            {"none": int(none * ONE), 0: int((zeros - none) * ONE), 1: int((1 - zeros) * ONE)}
        )
    check(laws, mechanism.event, REPLACE, accountant="rdp")
