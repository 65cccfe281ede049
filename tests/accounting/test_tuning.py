"""The prices of a search: each is a bound for the release that it names, and a figure without a
proof is never one of them.
"""

from __future__ import annotations

import math

import pytest

from dpfy.accounting import tuning
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


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("trials", [2, 30, 300])
def test_the_cheapest_route_is_a_proven_one(sigma, trials):
    event = ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(sigma)), 20)
    routes = tuning.routes(event, trials, 1e-6)
    assert tuning.cheapest(event, trials, 1e-6) == routes[0]
    assert [route.epsilon for route in routes] == sorted(route.epsilon for route in routes)
    assert all(route.name.startswith(("compose", "random trials")) for route in routes)
