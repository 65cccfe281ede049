"""What comes out has the stated distribution: tests that accept it and reject 2/3 and 3/2 of the
scale, a shift and a cut tail.

Default sizes are small; the slow ones draw 1e6 values of every mechanism.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.mechanisms.additive import (
    GaussianMechanism,
    LaplaceMechanism,
)
from dpfy.mechanisms.candidates import PrivateSelection, geometric_number, poisson
from dpfy.mechanisms.choice import Exponential, NoisyMax, PermuteAndFlip
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism, DiscreteLaplaceMechanism
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.grid import Grid, Laid
from dpfy.mechanisms.histogram import StabilityHistogram
from dpfy.mechanisms.response import RandomizedResponseMechanism, UnaryResponse
from dpfy_lab.mechanisms.staircase import Staircase, draw, edge, expected_size

SECRET = Randomness.for_tests(17)
FEW, MANY = 20_000, 1_000_000
SIZES = [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
ONE_BY_ONE = [pytest.param(8_000, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
ACCEPT, REJECT = 1e-4, 1e-9


def chi_square(found: np.ndarray, chances: np.ndarray) -> float:
    """The p-value of counts against chances (which add up to at most one; the rest is one more
    cell). Cells below 5 are joined.
    """
    total = found.sum()
    expected = np.append(chances, max(0.0, 1 - chances.sum())) * total
    counts = np.append(found[: len(chances)], total - found[: len(chances)].sum())
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    counts = np.append(counts[~small], counts[small].sum())
    if expected[-1] < 1e-9:
        if counts[-1]:
            return 0.0
        expected, counts = expected[:-1], counts[:-1]
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1))


def integer_law(kind: type, parameter: float, reach: int) -> np.ndarray:
    x = np.arange(-reach, reach + 1)
    weights = (
        np.exp(-abs(x) * parameter)
        if kind is DiscreteLaplaceMechanism
        else np.exp(-(x**2) / 2 / parameter**2)
    )
    return weights / weights.sum()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    "mechanism",
    [
        DiscreteLaplaceMechanism(0.4),
        DiscreteLaplaceMechanism(1.7),
        DiscreteGaussianMechanism(0.8),
        DiscreteGaussianMechanism(5.0),
    ],
    ids=repr,
)
def test_integer_noise(mechanism, count):
    drawn = (
        mechanism.release(
            Bounded(np.full(count, 3), Bound(l1=1.0)), mock_permit(mechanism.event, 1), SECRET
        ).value
        - 3
    )
    reach = 60
    found = np.bincount(np.clip(drawn + reach, 0, 2 * reach), minlength=2 * reach + 1)
    kind, parameter = type(mechanism), mechanism.parameter
    right = integer_law(kind, parameter, reach)
    assert chi_square(found, right) > ACCEPT
    cut = np.where(np.cumsum(right) < 0.99, right, 0)
    for wrong in (
        integer_law(kind, parameter * 2 / 3, reach),
        integer_law(kind, parameter * 1.5, reach),
        np.roll(right, 1),
        cut / cut.sum(),
    ):
        assert chi_square(found, wrong) < REJECT


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("mechanism", [LaplaceMechanism(0.7), GaussianMechanism(1.3)], ids=repr)
def test_noise_on_a_grid(mechanism, count):
    """Steps of 2^-24 of the scale are far below what so many draws can tell from a continuous
    law.
    """
    bound = Bound(2.0, 2.0)
    drawn = mechanism.release(
        Bounded(np.full(count, 0.1), bound), mock_permit(mechanism.event, 1), SECRET
    ).value
    law = (stats.laplace if isinstance(mechanism, LaplaceMechanism) else stats.norm)(
        0.1, mechanism.noise_multiplier * 2.0
    )
    assert stats.kstest(drawn, law.cdf).pvalue > ACCEPT
    (center, scale) = law.args
    kind, high = law.dist, law.ppf(0.99)
    for wrong in (
        kind(center, scale * 2 / 3).cdf,
        kind(center, scale * 1.5).cdf,
        kind(center + scale / 5, scale).cdf,
    ):
        assert stats.kstest(drawn, wrong).pvalue < REJECT
    assert (drawn > high).mean() == pytest.approx(0.01, rel=0.3)  # not cut


@pytest.mark.parametrize("count", ONE_BY_ONE)
def test_staircase(count):
    mechanism, most = Staircase(1.2), 6
    permit, value = (
        mock_permit(mechanism.event, count),
        Bounded(Laid(Grid(0), np.array(0)), Bound.scalar(float(most))),
    )
    if count == MANY:  # the draw itself: a release costs as much again
        bits = Bits(SECRET, "staircase", 0)
        drawn = np.array([draw(Fraction(1.2), most, edge(1.2, most), bits) for _ in range(count)])
    else:
        drawn = np.array(
            [mechanism.release(value, permit, SECRET, step).value for step in range(count)]
        ).astype(int)

    def law(epsilon, first):
        x = np.abs(np.arange(-60, 61))
        weights = np.exp(-epsilon * np.where(x < first, 0, (x - first) // most + 1))
        return weights / weights.sum()

    r = edge(1.2, most)
    assert r == 3
    found = np.bincount(np.clip(drawn + 60, 0, 120), minlength=121)
    right = law(1.2, r)
    assert chi_square(found, right) > ACCEPT
    cut = np.where(np.cumsum(right) < 0.99, right, 0)
    for wrong in (law(0.8, r), law(1.8, r), law(1.2, r + 1), np.roll(right, 1), cut / cut.sum()):
        assert chi_square(found, wrong) < REJECT
    assert abs(drawn).mean() == pytest.approx(expected_size(1.2, most, r), rel=0.03)


def test_staircase_is_better_than_laplace_by_what_the_paper_says():
    """Expected size: D e^(eps/2) / (e^eps - 1), against D / eps (Geng & Viswanath 2014); the gain
    grows with epsilon.
    """
    width, gains = 1 << 20, []
    for epsilon in (0.1, 1.0, 5.0, 10.0):
        found = expected_size(epsilon, width, edge(epsilon, width)) / width
        assert found == pytest.approx(math.exp(epsilon / 2) / math.expm1(epsilon), rel=1e-4)
        gains.append(found * epsilon)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] <= 1
    assert gains[-1] < 0.1


@pytest.mark.parametrize("count", SIZES)
def test_randomized_response(count):
    mechanism = RandomizedResponseMechanism(0.4, 5)
    drawn = mechanism.release(
        Bounded(np.full(count, 2), Bound()), mock_permit(mechanism.event, 1), SECRET
    ).value
    found = np.bincount(drawn, minlength=5)

    def law(p, truth=2):
        chances = np.full(5, p / 5)
        chances[truth] += 1 - p
        return chances

    assert chi_square(found, law(0.4)) > ACCEPT
    for wrong in (law(0.4 * 2 / 3), law(0.6), law(0.4, 3), np.array([0.25, 0.25, 0.5, 0, 0])):
        assert chi_square(found, wrong) < REJECT
    assert mechanism.frequencies(drawn) == pytest.approx([0, 0, 1, 0, 0], abs=0.03)


@pytest.mark.parametrize("optimised", [True, False])
@pytest.mark.parametrize("count", SIZES)
def test_unary_response(count, optimised):
    mechanism = UnaryResponse(1.0, 3, optimised)
    permit = mock_permit(mechanism.event, 1, adjacency=Adjacency.REPLACE_ONE)
    rows = mechanism.release(Bounded(np.full(count, 1), Bound()), permit, SECRET).value
    found = np.bincount(rows @ np.array([1, 2, 4]), minlength=8)

    def law(high, low):
        bits = np.array([[k >> i & 1 for i in range(3)] for k in range(8)])
        return np.prod(np.where(bits == 1, [low, high, low], [1 - low, 1 - high, 1 - low]), axis=1)

    high, low = (float(p) for p in mechanism.chances)
    assert (high, low) == pytest.approx(
        (0.5, 1 / (math.e + 1))
        if optimised
        else (1 - 1 / (math.exp(0.5) + 1), 1 / (math.exp(0.5) + 1))
    )
    assert chi_square(found, law(high, low)) > ACCEPT
    for wrong in (
        law(high, low * 2 / 3),
        law(high, low * 1.5),
        law(high * 2 / 3, low),
        law(low, high),
    ):
        assert chi_square(found, wrong) < REJECT


SCORES = np.array([10, 9, 9, 6, 0])


def exponential_law(epsilon, scores=SCORES):
    weights = np.exp(epsilon * (scores - scores.max()) / 2)
    return weights / weights.sum()


def flip_law(epsilon, scores=SCORES):
    """Permute-and-flip by its definition, over all orders."""
    from itertools import permutations

    heads, chances = np.exp(epsilon * (scores - scores.max()) / 2), np.zeros(len(scores))
    for order in permutations(range(len(scores))):
        left = 1.0
        for i in order:
            chances[i] += left * heads[i]
            left *= 1 - heads[i]
    return chances / math.factorial(len(scores))


def laplace_max_law(epsilon, scores=SCORES):
    """The largest of scores with two-sided geometric noise of scale 2 / epsilon, ties to the
    first.
    """
    x = np.arange(-250, 250)
    p = np.exp(-abs(x) * epsilon / 2)
    p /= p.sum()
    below = np.concatenate([[0], np.cumsum(p)])

    def under(values, strict):
        return below[np.clip(values + 250 + (0 if strict else 1), 0, 500)]

    return np.array(
        [
            sum(
                p
                * np.prod([under(s + x - t, j < i) for j, t in enumerate(scores) if j != i], axis=0)
            )
            for i, s in enumerate(scores)
        ]
    )


CHOICES = [
    (Exponential(0.8), exponential_law),
    (NoisyMax(0.8, noise="gumbel"), exponential_law),
    (PermuteAndFlip(0.8), flip_law),
    (NoisyMax(0.8, noise="exponential"), flip_law),
    (NoisyMax(0.8, noise="laplace"), laplace_max_law),
]


@pytest.mark.parametrize("count", ONE_BY_ONE)
@pytest.mark.parametrize(
    ("mechanism", "law"), CHOICES, ids=lambda v: repr(v) if not callable(v) else ""
)
def test_choices(mechanism, law, count):
    permit, value = mock_permit(mechanism.event, count), Bounded(SCORES, Bound(linf=1.0))
    if count == MANY:
        (counts, width), bits = mechanism._laid(value), Bits(SECRET, "choice", 0)
        drawn = [mechanism._index(counts, width, bits) for _ in range(count)]
    else:
        drawn = [mechanism.release(value, permit, SECRET, step).value for step in range(count)]
    found = np.bincount(drawn, minlength=len(SCORES))
    right = law(0.8)
    assert chi_square(found, right) > ACCEPT
    cut = np.where(right < 0.02, 0, right)
    for wrong in (law(0.8 * 2 / 3), law(1.2), np.roll(right, 1), cut / cut.sum()):
        assert chi_square(found, wrong) < REJECT


def test_gumbel_noise_on_scores_is_the_exponential_mechanism():
    """By floating-point Gumbel noise, which is how it is done elsewhere: the same law."""
    noise = np.random.default_rng(0).gumbel(scale=2 / 0.8, size=(200_000, len(SCORES)))
    found = np.bincount(np.argmax(SCORES + noise, axis=1), minlength=len(SCORES))
    assert chi_square(found, exponential_law(0.8)) > ACCEPT
    flips = np.random.default_rng(1).exponential(scale=2 / 0.8, size=(200_000, len(SCORES)))
    assert (
        chi_square(
            np.bincount(np.argmax(SCORES + flips, axis=1), minlength=len(SCORES)), flip_law(0.8)
        )
        > ACCEPT
    )


def test_permute_and_flip_is_never_worse():
    rng = np.random.default_rng(3)
    for _ in range(200):
        scores, epsilon = rng.integers(0, 12, rng.integers(2, 6)), float(rng.uniform(0.05, 5))
        errors = [
            float(law(epsilon, scores) @ (scores.max() - scores))
            for law in (flip_law, exponential_law)
        ]
        assert errors[0] <= errors[1] + 1e-12


@pytest.mark.parametrize("count", ONE_BY_ONE)
def test_candidates_of_equal_score_in_one(count):
    """A stretch of a public range stands for all of its places."""
    mechanism, sizes = Exponential(0.8), [1, 0, 1000, 2, 40]
    permit, value = mock_permit(mechanism.event, count), Bounded(SCORES, Bound(linf=1.0))
    drawn = [
        mechanism.release_within(value, sizes, permit, SECRET, step).value for step in range(count)
    ]
    weights = exponential_law(0.8) * sizes
    assert (
        chi_square(np.bincount([i for i, _ in drawn], minlength=5), weights / weights.sum())
        > ACCEPT
    )
    places = np.array([j for i, j in drawn if i == 2])
    assert places.min() >= 0
    assert places.max() < 1000
    assert chi_square(np.bincount(places // 100, minlength=10), np.full(10, 0.1)) > ACCEPT


@pytest.mark.parametrize(
    ("mean", "shape"), [(8.0, 0.0), (8.0, 1.0), (4.0, -0.5), (6.0, 2.0), (5.0, 1.5), (3.0, 0.5)]
)
def test_the_number_of_runs(mean, shape):
    from dpfy.accounting.tuning import trials_pmf
    from dpfy.core.events import gamma_for

    count = 1500
    mechanism, bits = (
        PrivateSelection(DiscreteLaplaceMechanism(1.0).event, mean, shape),
        Bits(SECRET, f"runs {shape}", 0),
    )
    drawn = np.array([mechanism.runs(bits) for _ in range(count)])
    assert drawn.min() >= 1
    law = [
        np.array([trials_pmf(shape, gamma_for(shape, m), k) for k in range(1, 200)])
        for m in (mean, 1 + (mean - 1) / 2, mean * 2)
    ]
    found = np.bincount(np.minimum(drawn - 1, 199), minlength=200)
    assert chi_square(found, law[0]) > 1e-3
    for wrong in (law[1], law[2], np.roll(law[0], 1)):
        assert (
            chi_square(found, wrong) < 1e-3
        )  # numbers this small tell long tails apart but slowly


def test_poisson_and_geometric_numbers():
    bits = Bits(SECRET, "numbers", 0)
    drawn = np.array([poisson(Fraction(9, 4), bits) for _ in range(2000)])
    found = np.bincount(drawn, minlength=30)
    assert chi_square(found, stats.poisson(2.25).pmf(np.arange(30))) > ACCEPT
    assert chi_square(found, stats.poisson(1.5).pmf(np.arange(30))) < REJECT
    drawn = np.array([geometric_number(Fraction(1, 10), bits) for _ in range(2000)])
    assert chi_square(np.bincount(drawn, minlength=200), 0.1 * 0.9 ** np.arange(200)) > ACCEPT


def test_a_key_of_one_unit_is_released_as_often_as_billed():
    mechanism = StabilityHistogram(DiscreteLaplaceMechanism(1.0), 5)
    count = 8_000
    permit = mock_permit(mechanism.event, count)
    value = Bounded({"one": 1}, mechanism.bound)
    found = sum(bool(mechanism.release(value, permit, SECRET, step).value) for step in range(count))
    assert stats.binomtest(found, count, mechanism.delta).pvalue > ACCEPT
    assert stats.binomtest(found, count, math.exp(-5) / (1 + math.exp(-1))).pvalue < REJECT
