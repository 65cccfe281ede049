"""The filter admits only sequences whose adaptive total fits the budget."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from dpfy import accounting
from dpfy.accounting import RenyiFilter, RenyiOdometer, calibrate
from dpfy.accounting.filters import GRID, budget, cost, from_json
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput
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
    """Non-adaptive Gaussians are one admissible strategy: their exact delta at the budget's epsilon
    is below the budget's delta.
    """
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


def test_the_odometer_bounds_the_loss_of_adaptive_runs_at_all_times() -> None:
    """Runs chosen by the worst of earlier outcomes, many times over: the loss is above the reading
    at some time at most delta often.
    """
    rng = np.random.default_rng(7)
    delta, times, steps = 0.2, 4000, 12
    odometer = RenyiOdometer(delta)
    noises = (3.0, 6.0)
    readings: dict[tuple[float, ...], float] = {}
    above = 0
    for _ in range(times):
        loss, history, exceeded = 0.0, [], False
        for _ in range(steps):
            noise = noises[0] if loss > 0.2 * len(history) or not history else noises[1]
            history.append(noise)
            loss += rng.normal(1 / (2 * noise**2), 1 / noise)
            key = (history[0], *sorted(history[1:]))
            if key not in readings:
                readings[key] = odometer.epsilon([ev.Gaussian(n) for n in key], PAIR)
            exceeded = exceeded or loss > readings[key]
        above += exceeded
    assert above <= delta * times
    assert above > 0  # the bound is not idle


def test_the_odometer_grows_and_costs_more_than_a_plan_fixed_in_advance() -> None:
    runs = [
        ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 100),
        ev.Gaussian(5.0),
        ev.Gaussian(4.0),
    ]
    odometer = RenyiOdometer(1e-6)
    values = [odometer.epsilon(runs[:k], PAIR) for k in range(4)]
    assert values[0] == 0
    assert all(a < b for a, b in pairwise(values))
    assert values[3] > accounting.epsilon(ev.Composed(tuple(runs)), 1e-6)
    only = RenyiOdometer(1e-6).epsilon([ev.Gaussian(2.0)], PAIR)
    best = 1 / 8 + math.sqrt(
        2 * math.log(2e6) / 4
    )  # a / (2 sigma^2) + log(2/delta) / (a - 1), at the best order
    assert best <= only <= 1.001 * best


def test_every_order_has_only_its_share_of_delta() -> None:
    """The deltas of all orders add up to the budget's: an order that took all of it alone would
    admit more than the union bound allows.
    """
    admits, first = RenyiFilter(1.0, 1e-5), ev.Gaussian(20.0)
    orders = admits._orders(first, PAIR)
    assert sum(share for _, share in orders) == pytest.approx(1e-5, rel=1e-12)
    assert max(share for _, share in orders) <= 5e-6
    # One Gaussian run: the reading is that of the best order with its own share, by the closed form
    # of its divergence.
    noise = 4.0
    run = ev.Gaussian(noise)
    right = min(
        cost(order, order / (2 * noise**2), share) for order, share in admits._orders(run, PAIR)
    )
    whole = min(cost(order, order / (2 * noise**2), 1e-5) for order, _ in admits._orders(run, PAIR))
    assert admits.spent_epsilon([run], PAIR) == pytest.approx(right, rel=1e-9)
    assert admits.spent_epsilon([run], PAIR) > whole * 1.01
    between = RenyiFilter((right + whole) / 2, 1e-5)
    assert between.why_not([], run, PAIR) is not None


def test_the_favourite_order_is_fixed_by_the_first_run_alone() -> None:
    """Chosen anew from all runs it would depend on outputs, and the union bound over the orders
    would not hold.
    """
    from dpfy.accounting.rdp import divergences

    first, second = ev.PoissonSampled(0.01, ev.Gaussian(0.6)), ev.Gaussian(1.5)
    admits = RenyiFilter(6.0, 1e-6)
    both = ev.Composed((first, second))

    def reading(orders: list[tuple[float, float]]) -> float:
        sums = divergences(both, PAIR, tuple(order for order, _ in orders))
        return min(
            cost(order, float(total), share)
            for (order, share), total in zip(orders, sums, strict=True)
        )

    fixed, anew = reading(admits._orders(first, PAIR)), reading(admits._orders(both, PAIR))
    assert fixed > anew * 1.001  # the difference shows here
    assert admits.spent_epsilon([first, second], PAIR) == pytest.approx(fixed, rel=1e-9)
    barely = RenyiFilter(anew * 1.0005, 1e-6)
    assert barely.why_not([first], second, PAIR) is not None


def test_black_boxes_spend_the_part_of_delta_set_aside_for_them() -> None:
    """Their deltas add up; what would pass the part, or a budget without one, is refused with the
    reason.
    """
    box = ev.EpsilonDelta(0.1, 4e-7)
    assert "chance of an infinite loss" in str(RenyiFilter(2.0, 1e-5).why_not([], box, PAIR))
    admits = RenyiFilter(2.0, 1e-5, approximation=1e-6)
    assert admits.why_not([], box, PAIR) is None
    assert admits.why_not([box], box, PAIR) is None
    reason = admits.why_not([box, box], box, PAIR)
    assert reason is not None
    assert "1.2e-06 in all" in reason
    assert admits.why_not([box, box], ev.Gaussian(20.0), PAIR) is None
    assert math.isinf(admits.spent_epsilon([box] * 3, PAIR))
    assert admits.spent_epsilon([box] * 2, PAIR) < 2.0
    assert math.isinf(RenyiOdometer(1e-5).epsilon([box], PAIR))
    assert math.isfinite(RenyiOdometer(1e-5, 1e-6).epsilon([box], PAIR))


def test_what_is_set_aside_is_not_spent_twice() -> None:
    """The orders share what is left; a sequence of boxes and Gaussians that is admitted fits by the
    exact composition.
    """
    admits = RenyiFilter(1.5, 1e-5, approximation=5e-6)
    assert sum(share for _, share in admits._orders(ev.Gaussian(9.0), PAIR)) == pytest.approx(
        5e-6, rel=1e-9
    )
    steps, spent = [ev.Gaussian(9.0), ev.EpsilonDelta(0.05, 1e-6), ev.Laplace(20.0)], []
    for k in range(60):
        if admits.why_not(spent, steps[k % 3], PAIR) is None:
            spent.append(steps[k % 3])
    assert sum(isinstance(e, ev.EpsilonDelta) for e in spent) == 5
    assert accounting.epsilon(ev.Composed(tuple(spent)), 1e-5) <= 1.5
    assert len(spent) > 10


def test_terms_of_budgets_written_before_there_were_approximations_are_read_and_written_alike() -> (
    None
):
    old = {"kind": "renyi", "epsilon": 3.0, "delta": 1e-5}
    assert from_json(old) == RenyiFilter(3.0, 1e-5)
    assert from_json(old).to_json() == old
    new = RenyiFilter(3.0, 1e-5, 1e-6)
    assert from_json(new.to_json()) == new
    for wrong in (1e-5, -1e-9, 2.0):
        with pytest.raises(InvalidInput, match="approximation"):
            RenyiFilter(3.0, 1e-5, wrong)


def test_every_language_has_a_place_in_a_budget() -> None:
    """Tuning, zCDP and black boxes, one after the other in one ledger's budget."""
    tuning = ev.RepeatAndSelect(
        ev.Repeated(ev.PoissonSampled(0.005, ev.Gaussian(1.0)), 50), 10.0, 1.0
    )
    spent: list[ev.Event] = []
    admits = RenyiFilter(12.0, 1e-5, 1e-6)
    for event in (_train(4.0), tuning, ev.Zcdp(0.01), ev.EpsilonDelta(0.2, 1e-8), ev.Laplace(5.0)):
        assert admits.why_not(spent, event, PAIR) is None, event
        spent.append(event)
    assert admits.spent_epsilon(spent, PAIR) >= accounting.epsilon(spent[0], 1e-5)
