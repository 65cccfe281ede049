"""The filter admits only sequences whose adaptive total fits the budget."""

from __future__ import annotations

import math

import pytest

from dpfy.accounting import RenyiFilter, calibrate
from dpfy.accounting.filters import GRID, budget, cost
from dpfy.core import events as ev
from dpfy.core.unit import Adjacency

PAIR = Adjacency.ADD_OR_REMOVE_ONE


def _train(noise: float) -> ev.Event:
    return ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(noise)), 100)


def test_a_budget_of_three_holds_one_run_of_two_but_not_two() -> None:
    run = _train(calibrate.noise(_train, 2.0, 1e-5, accountant="pld"))
    budget_of_three = RenyiFilter(3.0, 1e-5)
    assert budget_of_three.why_not([], run, PAIR) is None
    reason = budget_of_three.why_not([run], run, PAIR)
    assert reason is not None
    assert "budget is epsilon 3" in reason
    assert 2.0 < budget_of_three.spent_epsilon([run], PAIR) < 3.0


def test_budget_and_cost_are_inverse() -> None:
    for order in GRID:
        assert cost(order, budget(order, 5.0, 1e-6), 1e-6) == pytest.approx(max(5.0, 0.0))


def test_every_admitted_gaussian_sequence_fits_by_the_exact_curve() -> None:
    """Non-adaptive Gaussians are one admissible strategy: their exact delta at the budget's epsilon is below the budget's delta."""
    from scipy.special import ndtr

    admits, steps = RenyiFilter(1.0, 1e-5), [ev.Gaussian(20.0), ev.Gaussian(9.0), ev.Gaussian(35.0)]
    spent: list[ev.Event] = []
    for k in range(400):
        if admits.why_not(spent, steps[k % 3], PAIR) is None:
            spent.append(steps[k % 3])
    mu = math.sqrt(sum(1 / e.noise_multiplier**2 for e in spent if isinstance(e, ev.Gaussian)))
    delta = ndtr(mu / 2 - 1 / mu) - math.e * ndtr(-mu / 2 - 1 / mu)
    assert len(spent) > 5
    assert delta <= 1e-5
    assert admits.to_json() == {"kind": "renyi", "epsilon": 1.0, "delta": 1e-5}


def test_what_cannot_be_billed_is_refused_in_words() -> None:
    reason = RenyiFilter(1.0, 1e-5).why_not([], ev.NotPrivate(), PAIR)
    assert reason is not None
