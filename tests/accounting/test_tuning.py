"""The prices of a search: each is a bound for the release that it names, and a figure without a
proof is never one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr

from dpfy import accounting
from dpfy.accounting import gaussian, tuning
from dpfy.core import events as ev

TRUE = 9.99998
"""Epsilon at delta 1e-6 of ten randomised responses of epsilon 1, by hand: see `_true`."""


def _true(runs: int, delta: float) -> float:
    """The exact epsilon of so many binary randomised responses of epsilon 1, of which all answers
    (so the best one, too) are seen.
    """
    p = math.e / (math.e + 1)

    def exceeded(epsilon: float) -> float:
        worlds = (
            (
                math.comb(runs, k) * p**k * (1 - p) ** (runs - k),
                math.comb(runs, k) * p ** (runs - k) * (1 - p) ** k,
            )
            for k in range(runs + 1)
        )
        return sum(max(0.0, one - math.exp(epsilon) * other) for one, other in worlds)

    low, high = 0.0, float(runs)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeded(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("runs", [2, 5, 10, 25])
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_every_route_that_shows_all_runs_costs_at_least_what_ten_of_them_tell(runs, delta):
    event, true = ev.RandomizedResponse(2 / (math.e + 1), 2), _true(runs, delta)
    routes = tuning.routes(event, runs, delta, adjacency="replace-one")
    for route in routes:
        if not route.name.startswith(
            "random trials"
        ):  # these release the best of a random number of runs
            assert route.epsilon >= true - 1e-9, route


def test_the_figure_of_the_guide_is_below_the_truth_and_is_never_a_route():
    event = ev.RandomizedResponse(2 / (math.e + 1), 2)
    assert _true(10, 1e-6) == pytest.approx(TRUE, abs=2e-5)
    claimed = tuning.printed(event, 10, 1e-6, adjacency="replace-one")
    assert claimed.figure == pytest.approx(2.57, abs=0.01)
    assert "not a guarantee" in claimed.note
    assert not hasattr(claimed, "epsilon")


@pytest.mark.parametrize(("sigma", "trials"), [(0.5, 2), (1.0, 30)])
def test_the_cheapest_route_is_a_proven_one(sigma, trials):
    event = ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(sigma)), 20)
    routes = tuning.routes(event, trials, 1e-6)
    assert tuning.cheapest(event, trials, 1e-6) == routes[0]
    assert [route.epsilon for route in routes] == sorted(route.epsilon for route in routes)
    assert all(route.name.startswith(("compose", "random trials")) for route in routes)


LAWS = (
    *[(10.0, 0.0), (100.0, 1.0), (5.0, 3.0), (4.0, -0.5)],
    *[(10.0, math.inf), (0.5, math.inf), (6.0, -12.0)],
)
"""Mean and shape of the number of trials; the last is binomial, 12 coins of a half."""


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_slopes_begin_with_the_mean_and_hold_all_that_comes_out(mean, shape):
    """The integral over [0, 1] is 1 - P(no trial): e^-mean for Poisson, 2^-12 for twelve coins."""
    miss = np.concatenate([[0.0], np.geomspace(1e-7, 1, 4000)])
    found = tuning.slope(mean, shape, miss)
    none = math.exp(-mean) if math.isinf(shape) else 2.0**-12 if shape <= -1 else 0.0
    assert found[0] == pytest.approx(mean, rel=1e-9)
    assert np.trapezoid(found, miss) == pytest.approx(1 - none, rel=1e-4)


def best_of(p: np.ndarray, q: np.ndarray, mean: float, shape: float, epsilon: float) -> float:
    """delta of the best of K runs with outcomes in ascending order, exactly but for the width of a
    cell: the generating function at the chances to be at most an outcome, by its own formula.
    """
    worlds = []
    for chances in (p, q):
        below = np.clip(np.append(0.0, np.cumsum(chances)), 0, 1)
        if math.isinf(shape):
            reached = np.exp(mean * (below - 1))
        elif shape <= -1:
            reached = (1 + mean / shape - mean / shape * below) ** -shape
        else:
            gamma = ev.gamma_for(shape, mean)
            rest = 1 - (1 - gamma) * below
            reached = (
                np.log(rest) / math.log(gamma)
                if shape == 0
                else (rest**-shape - 1) / (gamma**-shape - 1)
            )
        worlds.append(np.diff(reached))
    return float(np.maximum(0.0, worlds[0] - math.exp(epsilon) * worlds[1]).sum())


ORDERS = (np.arange, lambda n: np.arange(n)[::-1], lambda n: np.argsort(np.abs(np.arange(n) - n / 2)))  # fmt: skip


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_the_best_of_gaussian_runs_is_never_above_its_profile(mean, shape):
    edges = np.linspace(-9, 9, 4001)
    for mu in (0.2, 1.0):
        p, q = np.diff(ndtr(edges - mu)), np.diff(ndtr(edges))
        nodes = np.linspace(0, 12, 60)
        known = np.array([gaussian.delta(mu, float(e)) for e in nodes])
        bound = tuning.SelectedProfile(nodes, known, mean, shape)
        for order in ORDERS:
            at = order(len(p))
            for epsilon in (0.0, 0.3, 1.0, 2.5):
                told = bound(np.array([epsilon]))[0]
                assert best_of(p[at], q[at], mean, shape, epsilon) <= told + 1e-12
                assert best_of(q[at], p[at], mean, shape, epsilon) <= told + 1e-12


def test_the_best_of_random_runs_is_never_above_its_profile():
    """Random pairs of distributions on a few outcomes, in random orders, also with outcomes that one
    world lacks.
    """
    rng = np.random.default_rng(6)
    tightest = 0.0
    for k in range(150):
        p, q = (rng.dirichlet(np.full(5, 0.7)) for _ in range(2))
        p = (p + q * rng.choice([0, 1, 10, 100])) / 1.0
        p /= p.sum()
        if k % 5 == 0:
            q[0], p = 0.0, p
            q /= q.sum()
        nodes = np.concatenate([[0.0], np.geomspace(1e-3, 8, 80)])
        known = np.array(
            [
                max(np.maximum(0, a - math.exp(e) * b).sum() for a, b in ((p, q), (q, p)))
                for e in nodes
            ]
        )
        mean, shape = LAWS[k % len(LAWS)]
        bound = tuning.SelectedProfile(nodes, known, mean, shape)
        for epsilon in (0.0, 0.5, 1.5):
            true = max(best_of(a, b, mean, shape, epsilon) for a, b in ((p, q), (q, p)))
            told = bound(np.array([epsilon]))[0]
            assert true <= told + 1e-12, (k, epsilon)
            tightest = max(tightest, true / max(told, 1e-12))
    assert tightest > 0.3  # and it is not loose everywhere


def test_a_geometric_number_of_coins_by_hand():
    """The best of a geometric number (mean 4) of randomised responses of epsilon 1: yes comes out
    unless all said no. With a = 1 / (e + 1): no has p / (4 - 3 p) at p = a and at p = 1 - a.
    """
    a = 1 / (math.e + 1)
    low, high = a / (4 - 3 * a), (1 - a) / (4 - 3 * (1 - a))
    true = math.log(high / low)  # log(0.404611 / 0.084224)
    assert true == pytest.approx(1.5694, abs=1e-4)
    event = ev.RandomizedResponse(2 * a, 2)
    told = accounting.epsilon(ev.RepeatAndSelect(event, 4.0, 1.0), 1e-9, adjacency="replace-one")
    assert true <= told <= 3.0001


def test_the_guides_appendix_costs_half_of_what_divergences_say():
    """Appendix C: a million records, batches of 5000, noise 1, one epoch, 100 runs, delta 1e-6."""
    found = {
        route.name: route.epsilon for route in tuning.routes(ev.poisson(1.0, 0.005, 200), 100, 1e-6)
    }
    for name, before in (("logarithmic (eta 0)", 2.412), ("geometric (eta 1)", 2.741)):
        assert found[f"random trials, {name}, rdp"] == pytest.approx(before, abs=1e-3)
        assert found[f"random trials, {name}, tight"] < 0.55 * before
    assert found["random trials, Poisson, tight"] <= 2.4873
    charged = accounting.epsilon(ev.RepeatAndSelect(ev.poisson(1.0, 0.005, 200), 100.0, 1.0), 1e-6)
    assert charged <= 1.02 * found["random trials, geometric (eta 1), tight"]
