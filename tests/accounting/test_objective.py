"""Objective perturbation: its bound against densities that are known, against Monte Carlo, and
against the theorem it refines.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit, ndtr

from dpfy import accounting
from dpfy.accounting.gaussian import delta as gaussian_delta
from dpfy.accounting.rdp import divergences
from dpfy.accounting.rules.objective import curve
from dpfy.core import events as ev
from dpfy.core.unit import Adjacency

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
GRID = np.linspace(-60, 60, 400_001)


def density(records, lam, noise, slope, bend):
    """The density of the minimum in one dimension, on the grid: that of b at the point, times the
    derivative of the map.
    """
    gradient, curved = lam * GRID, np.full_like(GRID, lam)
    for x, y in records:
        gradient = gradient + x * slope(x * GRID, y)
        curved = curved + x * x * bend(x * GRID, y)
    found = np.exp(-(gradient**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi)) * curved
    whole = found.sum() * (GRID[1] - GRID[0])
    assert whole == pytest.approx(1, abs=1e-4)  # it jumps where a slope has a corner
    return found / whole


def exact(p, q, epsilon):
    """delta of a pair of densities on the grid."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum() * (GRID[1] - GRID[0]))


def logistic(z, y):
    return expit(z) - y


def logistic_bend(z, y):
    return expit(z) * expit(-z)


def huber(z, y):
    return np.clip(z - y, -1.0, 1.0)


def huber_bend(z, y):
    return (np.abs(z - y) < 1.0).astype(float)


CASES = [
    (logistic, logistic_bend, 0.25, True, [(1.0, 1), (-0.5, 0), (0.7, 0)]),
    (logistic, logistic_bend, 0.25, True, []),
    (huber, huber_bend, 1.0, False, [(1.0, 0.4), (-0.8, 0.3)]),
    (huber, huber_bend, 1.0, False, []),
]
NEW = [(1.0, 1), (-1.0, 0), (1.0, 0), (0.6, 1)]


@pytest.mark.parametrize("noise", [1.0, 3.0])
@pytest.mark.parametrize("lam", [0.4, 4.0])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_bound_covers_the_exact_delta_in_one_dimension(case, lam, noise):
    slope, bend, curvature, sided, held = CASES[case]
    event = ev.ObjectivePerturbation(noise, curvature / lam, sided)
    tightest = 0.0
    for new in NEW:
        without = density(held, lam, noise, slope, bend)
        with_it = density([*held, new], lam, noise, slope, bend)
        for epsilon in (0.0, 0.05, 0.2, 0.5, 1.0, 2.0):
            true = max(exact(with_it, without, epsilon), exact(without, with_it, epsilon))
            bound = curve(event, ADD).delta(epsilon)
            assert true <= bound * (1 + 1e-6) + 1e-5
            tightest = max(tightest, true / bound)
            for other in NEW:
                replaced = exact(with_it, density([*held, other], lam, noise, slope, bend), epsilon)
                assert replaced <= curve(event, REPLACE).delta(epsilon) * (1 + 1e-6) + 1e-5
    assert tightest > 0.2


def test_a_minimum_with_gaussian_releases_beside_it():
    """A second release whose centre follows the minimum: the joint delta on a grid of two
    dimensions is within the bound.
    """
    lam, noise, out = 1.0, 2.0, 0.6
    grid = np.linspace(-14, 14, 1601)
    event = ev.ObjectivePerturbation(noise, 0.25 / lam, True, beside=0.5)
    held, new = [(1.0, 1)], (1.0, 0)

    def minimum(records):
        gradient = lam * grid + sum(
            (x * logistic(x * grid, y) for x, y in records), np.zeros_like(grid)
        )
        bent = lam + sum(
            (x * x * logistic_bend(x * grid, y) for x, y in records), np.zeros_like(grid)
        )
        return np.exp(-(gradient**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi)) * bent

    p = minimum([*held, new])[:, None] * np.exp(
        -((grid[None, :] - grid[:, None] - out / 2) ** 2) / (2 * out**2)
    )
    q = minimum(held)[:, None] * np.exp(
        -((grid[None, :] - grid[:, None] - out) ** 2) / (2 * out**2)
    )  # moved by out / 2: mu = 1/2
    area = (grid[1] - grid[0]) ** 2 / (out * math.sqrt(2 * math.pi))
    for epsilon in (0.0, 0.3, 0.8, 1.5):
        true = max(
            np.maximum(a - math.exp(epsilon) * b, 0).sum() * area for a, b in ((p, q), (q, p))
        )
        assert true <= curve(event, ADD).delta(epsilon) * (1 + 1e-4)


def theorem(mu, curvature, epsilon):
    """Redberg, Koskela & Wang 2023, Theorem 3.1."""
    kappa = -math.log1p(-curvature)
    if epsilon >= kappa + mu**2 / 2:
        return 2 * gaussian_delta(mu, epsilon - kappa)
    rest = epsilon - kappa - mu**2 / 2
    return -math.expm1(rest) + 2 * math.exp(rest) * gaussian_delta(mu, mu**2 / 2)


@pytest.mark.parametrize("curvature", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.7, 3.0, 20.0])
def test_it_is_never_above_the_theorem_of_its_source_and_half_of_it_where_signs_are_known(
    noise, curvature
):
    for epsilon in (0.02, 0.1, 0.5, 1.0, 3.0):
        due = theorem(1 / noise, curvature, epsilon)
        two = curve(ev.ObjectivePerturbation(noise, curvature), ADD).delta(epsilon)
        one = curve(ev.ObjectivePerturbation(noise, curvature, True), ADD).delta(epsilon)
        assert one <= two * (1 + 1e-9)
        if epsilon >= -math.log1p(-curvature) + 1 / (2 * noise**2):
            assert two <= due * (1 + 1e-9) + 1e-15


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize("sided", [True, False])
def test_renyi_divergences_cover_monte_carlo_of_the_loss_that_bounds_it(sided, adjacency):
    """The divergence is that of kappa + the largest end; drawn, it is not above what the row says.
    Five deviations.
    """
    event = ev.ObjectivePerturbation(8.0, 0.1, sided)
    u = np.random.default_rng(0).normal(size=(400_000, 2))
    mu = 1 / 8.0
    if adjacency is ADD:
        ends = (
            [mu * u[:, 0] + mu**2 / 2, -mu * u[:, 0] + mu**2 / 2]
            if not sided
            else [mu * u[:, 0] + mu**2 / 2, 0 * u[:, 0]]
        )
    else:  # two slopes on the same row, opposite signs: the corner moves twice as far
        both = 2 * mu * u[:, 0] + 2 * mu**2
        ends = (
            [both, mu * u[:, 0] + mu**2 / 2, 0 * u[:, 0]]
            if sided
            else [both, -2 * mu * u[:, 0] + 2 * mu**2]
        )
    loss = np.max(ends, axis=0) + math.log(1.1)
    for order in (1.5, 2.0, 4.0, 8.0):
        terms = np.exp((order - 1) * loss)
        low = terms.mean() - 5 * terms.std() / math.sqrt(len(terms))
        found = accounting.accountant("rdp").curve(event, adjacency)
        assert math.log(low) / (order - 1) <= float(divergences(event, adjacency, (order,))[0]) * (
            1 + 1e-12
        )
        assert found.epsilon(1e-6) >= accounting.epsilon(event, 1e-6, adjacency=adjacency)


def test_composed_with_others_it_costs_no_less_than_alone_and_about_what_is_beside():
    alone, beside = (
        ev.ObjectivePerturbation(5.0, 0.05, True),
        ev.ObjectivePerturbation(5.0, 0.05, True, 0.1),
    )
    whole = accounting.epsilon(ev.Composed((alone, ev.Gaussian(10.0))), 1e-6)
    assert accounting.epsilon(alone, 1e-6) < whole
    assert whole == pytest.approx(accounting.epsilon(beside, 1e-6), rel=2e-3)


def test_without_curvature_and_signs_it_is_a_gaussian_twice():
    event = ev.ObjectivePerturbation(2.0, 0.0)
    for epsilon in (0.1, 1.0, 2.0):
        assert curve(event, ADD).delta(epsilon) == pytest.approx(
            2 * gaussian_delta(0.5, epsilon), rel=1e-9
        )
    assert float(ndtr(0.25) - ndtr(-0.25)) <= curve(event, ADD).delta(0.0)
