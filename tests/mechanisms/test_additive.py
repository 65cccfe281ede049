"""Laplace and Gaussian releases: on permits, on the grid, with the noise that is billed."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from dpfy.accounting import gaussian as rules
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism, DiscreteLaplaceMechanism

BOTH = [LaplaceMechanism(2.0), GaussianMechanism(2.0)]
ALL = [*BOTH, DiscreteLaplaceMechanism(0.5), DiscreteGaussianMechanism(2.0)]


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_a_permit_is_spent_once_and_for_this_event(mechanism):
    value, permit = Bounded(3, Bound.scalar(1.0)), mock_permit(mechanism.event, 2)
    secret = Randomness.for_tests(0)
    first = mechanism.release(value, permit, secret).value
    assert mechanism.release(value, permit, secret, 1).value != first
    for step, words in ((0, "was released before"), (2, "covers 2 releases")):
        with pytest.raises(InvalidInput, match=words):
            mechanism.release(value, permit, secret, step)
    with pytest.raises(InvalidInput, match="is not what the permit"):
        mechanism.release(value, mock_permit(type(mechanism)(3.0).event, 1))
    assert (
        mechanism.release(value, mock_permit(mechanism.event, 2), secret).value == first
    )  # a resumed run draws the same
    assert mechanism.release(value, mock_permit(mechanism.event, 2, "other"), secret).value != first


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_no_two_releases_share_their_noise(mechanism):
    """A seed of one byte has 256 noises: among 200 releases some would be the same (all but 1 in
    10^33).
    """
    value = Bounded(np.zeros(40, int), Bound(1.0, 1.0))
    assert (
        len(
            {
                mechanism.release(value, mock_permit(mechanism.event, 1)).value.tobytes()
                for _ in range(200)
            }
        )
        == 200
    )


@pytest.mark.parametrize(
    ("mechanism", "bound", "words"),
    [
        (LaplaceMechanism(1.0), Bound(1.0), "l1 norm.*Bound.l1="),
        (LaplaceMechanism(1.0), Bound(linf=1.0), "l1 norm"),
        (GaussianMechanism(1.0), Bound(linf=1.0), "l2 norm"),
        (DiscreteLaplaceMechanism(1.0), Bound(1.0), "l1 norm"),
        (DiscreteGaussianMechanism(1.0), Bound(1.0), "l1 norm"),
    ],
)
def test_wrong_pairs_are_refused_before_the_permit_is_spent(mechanism, bound, words):
    permit = mock_permit(mechanism.event, 1)
    with pytest.raises(Unsupported, match=words):
        mechanism.release(Bounded(np.array([1, 2]), bound), permit)
    mechanism.release(Bounded(np.array([1, 2]), Bound(1.0, 1.0)), permit)


def test_more_than_the_billed_sensitivity_is_refused():
    with pytest.raises(InvalidInput, match="sensitivity that is charged, 2"):
        DiscreteLaplaceMechanism(1.0, 2).release(
            Bounded(1, Bound.scalar(3.0)), mock_permit(DiscreteLaplaceMechanism(1.0, 2).event, 1)
        )
    with pytest.raises(Unsupported, match="use Laplace or Gaussian"):
        DiscreteLaplaceMechanism(1.0).release(
            Bounded(1.0, Bound.scalar(1.0)), mock_permit(DiscreteLaplaceMechanism(1.0).event, 1)
        )


@pytest.mark.parametrize("mechanism", BOTH, ids=repr)
@pytest.mark.parametrize("most", [1e-200, 1e-3, 1.0, 3e7, 1e200])
def test_the_noise_is_that_of_the_bill(mechanism, most):
    bound = Bound(most, most, most)
    grid = mechanism.grid(bound, 4000)
    total = grid.sum(np.zeros((1, 4000)), bound)
    drawn = mechanism.release(total, mock_permit(mechanism.event, 1), Randomness.for_tests(1)).value
    assert np.std(drawn / most) == pytest.approx(mechanism.stddev(bound) / most, rel=0.1)
    parameter = mechanism._whole(grid.steps(getattr(total.bound, mechanism.norm)))
    assert 1 <= parameter / float(grid.steps(mechanism.scale(bound))) < 1 + 1e-4
    one = mechanism.grid(bound)
    parameter = mechanism._whole(one.steps(one.sum([0.0], bound).bound.l1))
    assert 1 <= parameter / float(one.steps(mechanism.scale(bound))) < 1 + 1e-6


@pytest.mark.filterwarnings("error")
def test_odd_sums_raise_nothing():
    for mechanism in BOTH:
        for value in (
            math.nan,
            math.inf,
            -math.inf,
            1e308,
            -(2**63),
            2**63 - 1,
            np.zeros((0,)),
            np.float32(1.0),
            True,
        ):
            mechanism.release(Bounded(value, Bound.scalar(1.0)), mock_permit(mechanism.event, 1))


def test_the_salary_mean():
    """n = 10^4 people, at most 10^6 each, delta 1e-6, epsilon 1/2: 806 by the analytic rule, 1026
    by Pei's, 1070 by the text's own.
    """
    one, epsilon, delta = 1e6 / 1e4, 0.5, 1e-6
    assert [
        round(one * rule(epsilon, delta))
        for rule in (rules.sigma_analytic, rules.sigma_pei, rules.sigma_blog)
    ] == [
        806,
        1026,
        1070,
    ]
    mechanism = GaussianMechanism(rules.sigma_analytic(epsilon, delta))
    bound = Bound.scalar(1e6)
    salaries = np.full(10_000, 60_000.0)
    total = mechanism.grid(bound).sum(salaries, bound)
    many = Bounded(
        type(total.value)(total.value.grid, np.repeat(total.value.counts, 100_000)), bound
    )  # as many releases, in one call
    answers = (
        mechanism.release(many, mock_permit(mechanism.event, 1), Randomness.for_tests(2)).value
        / 1e4
    )
    within = [float(np.mean(abs(answers - 60_000) < width)) for width in (806, 1612)]
    assert within[0] == pytest.approx(0.6827, abs=0.006)
    assert within[1] == pytest.approx(0.9545, abs=0.003)


def test_laplace_for_one_number_gaussian_for_many():
    """The figure of docs/mechanisms.md: at epsilon 1/2 and delta 1e-6, Gaussian noise from 9
    coordinates on.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from laplace_gaussian import measured

    assert rules.least_coordinates(0.5, 1e-6) == 9
    for coordinates, better in ((1, 0), (4, 0), (16, 1), (300, 1)):
        found = measured(0.5, 1e-6, coordinates)
        assert found[better] < found[1 - better]
        expected = (
            math.sqrt(8) * coordinates,
            math.sqrt(coordinates) * rules.sigma_analytic(0.5, 1e-6),
        )
        assert found == pytest.approx(expected, rel=0.05)
    assert [rules.least_coordinates(epsilon, 1e-6) for epsilon in (0.1, 1.0, 4.0)] == [7, 9, 12]
    assert rules.least_coordinates(0.5, 1e-12) > rules.least_coordinates(
        0.5, 1e-6
    )  # ever more so for a small delta


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "mechanisms.md").read_text()
    held: dict = {}
    exec(page.split("```python")[1].split("```")[0], held)
    assert held["mean"] == pytest.approx(held["salaries"].mean(), abs=5 * 806)
