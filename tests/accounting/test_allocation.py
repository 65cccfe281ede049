"""Random allocation: both bounds against Monte Carlo of the true mechanism, Poisson sampling, the
Gaussian, and the other ways to the same number.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import gammaln

from dpfy import accounting
from dpfy.accounting import allocation, gaussian
from dpfy.accounting.bins import BinsCurve
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency

SETTINGS = [
    (noise, steps, epochs)
    for noise, steps, epochs in [
        (0.6, 200, 1), (0.6, 50, 4), (0.7, 20, 5), (0.7, 117, 10), (0.8, 117, 40),
        (0.8, 10, 3), (0.8, 400, 2), (0.9, 60, 30), (0.9, 8, 8), (1.0, 12, 60),
        (1.0, 2, 3), (1.0, 100, 100), (1.0, 1000, 10), (1.0, 300, 5), (1.1, 5, 20),
        (1.2, 250, 4), (1.2, 16, 16), (1.3, 40, 80), (1.5, 3, 10), (1.5, 500, 20),
        (1.5, 60, 1), (1.7, 30, 30), (1.8, 1000, 5), (2.0, 64, 8), (2.0, 20, 300),
        (2.0, 2, 50), (2.0, 2000, 3), (2.5, 100, 40), (2.5, 10, 10), (3.0, 20, 100),
        (3.0, 400, 60), (3.0, 4, 4), (3.5, 50, 500), (4.0, 500, 100), (4.0, 15, 25),
        (4.0, 1500, 10), (5.0, 10, 1000), (5.0, 100, 100), (5.0, 1000, 3), (6.0, 30, 60),
        (7.0, 200, 400), (8.0, 5, 100), (8.0, 64, 640), (10.0, 100, 100), (12.0, 25, 900),
        (15.0, 600, 50), (20.0, 7, 50), (30.0, 300, 3000), (50.0, 1000, 100), (100.0, 50, 100),
    ]
]  # fmt: skip
QUICK = SETTINGS[::7]


def event(noise: float, steps: int, epochs: int = 1, times: int = 1) -> ev.Event:
    return ev.random_allocation(noise, steps, epochs, times)


def check(noise: float, steps: int, epochs: int, delta: float) -> None:
    curve = accounting.curve(event(noise, steps, epochs))
    upper, lower = curve.epsilon(delta), curve.epsilon_lower(delta)
    poisson = accounting.epsilon(ev.poisson(noise, 1 / steps, steps * epochs), delta)
    known = accounting.epsilon(ev.Repeated(ev.Gaussian(noise), epochs), delta)
    assert upper <= poisson * (1 + 1e-4), (upper, poisson)
    assert upper <= known * (1 + 1e-4)
    assert 0 <= lower <= upper
    assert upper - lower <= 2e-3 * upper, (lower, upper)


@pytest.mark.parametrize(("noise", "steps", "epochs"), QUICK)
def test_it_never_costs_more_than_poisson_sampling_and_the_bounds_agree(noise, steps, epochs):
    check(noise, steps, epochs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "steps", "epochs"), SETTINGS)
def test_in_fifty_settings_it_never_costs_more_than_poisson_sampling(noise, steps, epochs):
    check(noise, steps, epochs, 1e-5)


def simulated(noise: float, steps: int, epochs: int, epsilon: float, draws: int, seed: int):
    """delta of the true mechanism in both directions: means of draws with their standard errors."""
    rng = np.random.default_rng(seed)
    found = []
    for sign in (1, -1):
        loss = np.zeros(draws)
        for _ in range(epochs):
            x = rng.standard_normal((draws, steps)) / noise
            if sign > 0:
                x[np.arange(draws), rng.integers(steps, size=draws)] += 1 / noise**2
            top = x.max(axis=1)
            ratio = top + np.log(np.exp(x - top[:, None]).mean(axis=1)) - 1 / (2 * noise**2)
            loss += sign * ratio
        gain = np.maximum(0.0, -np.expm1(epsilon - loss))
        found.append((gain.mean(), gain.std() / math.sqrt(draws)))
    return found


TRIED = [
    (noise, steps, epochs)
    for noise, steps, epochs in [
        (0.5, 30, 1), (0.5, 5, 2), (0.6, 20, 2), (0.7, 50, 1), (0.8, 10, 3),
        (0.8, 2, 2), (0.9, 40, 2), (1.0, 12, 6), (1.0, 3, 4), (1.2, 25, 3),
        (1.3, 4, 10), (1.5, 30, 4), (1.5, 2, 6), (2.0, 16, 8), (2.0, 60, 3),
        (2.5, 5, 20), (3.0, 10, 10), (4.0, 3, 30), (5.0, 20, 10), (8.0, 2, 60),
    ]
]  # fmt: skip


def against_simulation(noise: float, steps: int, epochs: int) -> None:
    curve = accounting.curve(event(noise, steps, epochs))
    epsilon = curve.epsilon(0.05)
    told = curve.delta(epsilon)
    found = simulated(noise, steps, epochs, epsilon, 60_000, steps * 100 + epochs)
    mean, error = max(found)
    assert mean <= told + 4.5 * error
    assert mean >= told * 0.998 - 4.5 * error
    assert 4.5 * error < 0.1 * told  # else the simulation would say nothing


@pytest.mark.parametrize(("noise", "steps", "epochs"), TRIED[::5])
def test_a_simulation_of_the_true_mechanism_agrees(noise, steps, epochs):
    against_simulation(noise, steps, epochs)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "steps", "epochs"), TRIED)
def test_simulations_of_the_true_mechanism_agree(noise, steps, epochs):
    against_simulation(noise, steps, epochs)


def tilted(noise: float, steps: int, order: int, draws: int, rng: np.random.Generator):
    """log y in draws from Q with density y^order, up to its mean; and the log of that mean.

    y^order is a sum over which step each of `order` picks was; picks are drawn step by step.
    """
    count = np.arange(order + 1)
    one = count * (count - 1) / (2 * noise**2) - gammaln(count + 1)
    ways = [np.where(count == 0, 0.0, -np.inf)]
    for _ in range(steps):
        ways.append(np.array([np.logaddexp.reduce(ways[-1][: n + 1] + one[n::-1]) for n in count]))
    left, picks = np.full(draws, order), np.zeros((draws, steps))
    for k in range(steps):
        for n in np.unique(left):
            chances = np.exp(one[: n + 1] + ways[steps - k - 1][n::-1] - ways[steps - k][n])
            who = np.flatnonzero(left == n)
            picks[who, k] = rng.choice(n + 1, size=len(who), p=chances / chances.sum())
        left = left - picks[:, k].astype(int)
    z = rng.standard_normal((draws, steps)) / noise + picks / noise**2
    log_y = np.logaddexp.reduce(z, axis=1) - math.log(steps) - 1 / (2 * noise**2)
    return log_y, ways[steps][order] + gammaln(order + 1) - order * math.log(steps)


def small_delta(noise: float, steps: int, epochs: int, epsilon: float):
    """delta of removing a unit from the true mechanism, by draws in which the loss is about
    `epsilon`, as many as a standard error of 2% needs; with that error.
    """
    rng = np.random.default_rng([steps, epochs])
    for order in range(2, 60):
        if epochs * tilted(noise, steps, order, 1000, rng)[0].mean() >= epsilon:
            break
    gains = np.zeros(0)
    while len(gains) < 8000 or (gains.std() > 0.02 * gains.mean() * math.sqrt(len(gains))):
        drawn = [tilted(noise, steps, order, 8000, rng) for _ in range(epochs)]
        loss, log_mean = sum(one[0] for one in drawn), sum(one[1] for one in drawn)
        gain = np.exp(log_mean + (1 - order) * loss) * np.maximum(0.0, -np.expm1(epsilon - loss))
        gains = np.append(gains, gain)
        assert len(gains) < 10**6
    return gains.mean(), gains.std() / math.sqrt(len(gains))


def against_draws(setting: tuple[float, int, int], delta: float) -> None:
    curve = accounting.curve(event(*setting))
    mean, error = small_delta(*setting, curve.epsilon(delta))
    assert mean <= delta + 4.5 * error
    mean, error = small_delta(*setting, curve.epsilon_lower(delta))
    assert mean >= delta - 4.5 * error


def test_a_small_delta_is_that_of_the_true_mechanism():
    against_draws((2.0, 8, 3), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("setting", TRIED)
def test_small_deltas_are_those_of_the_true_mechanism(setting):
    against_draws(setting, 1e-6)


@pytest.mark.parametrize(("noise", "steps"), [(0.7, 30), (1.0, 64), (2.0, 8)])
def test_it_agrees_with_bins_that_are_computed_in_another_way(noise, steps):
    gram = tuple(tuple(float(i == j) for j in range(steps)) for i in range(steps))
    other = BinsCurve(ev.BallsInBins(noise, gram))
    ours = accounting.curve(event(noise, steps))
    for delta in (1e-3, 1e-5):
        assert ours.epsilon(delta) <= other.epsilon(delta) * (1 + 1e-4)
        assert ours.epsilon_lower(delta) <= other.epsilon(delta)
        assert ours.epsilon(delta) == pytest.approx(other.epsilon(delta), rel=2e-2)


def test_one_step_is_the_gaussian_exactly():
    assert accounting.epsilon(event(2.0, 1), 1e-6) == accounting.epsilon(ev.Gaussian(2.0), 1e-6)


def test_the_pair_of_one_step_is_nearly_the_gaussian():
    """The computation itself, which the rule for one step never reaches."""
    (removed, _), (less, _) = allocation.losses(1.0, 1)
    for epsilon in (0.0, 0.5, 1.0, 3.0):
        truth = gaussian.delta(1.0, epsilon)
        upper, lower = (
            one.infinity
            + sum(
                p * -math.expm1(epsilon - loss)
                for loss, p in zip(one.losses, one.probabilities, strict=True)
                if loss > epsilon
            )
            for one in (removed, less)
        )
        assert lower <= truth <= upper
        assert upper - lower < 2e-3 * truth


@pytest.mark.parametrize(
    ("norm", "step", "cells"), [(1.0, 0.05, 2000), (0.5, 0.02, 1000), (2.0, 0.3, 3000)]
)
def test_grid_variables_are_on_their_sides_of_the_true_one(norm, step, cells):
    """Put functions at points on and between those of the grid, against a quadrature."""
    nodes = np.concatenate([np.arange(1, 60) * step, np.linspace(step / 3, 59.3 * step, 83)])
    truth = [gaussian.delta(norm, abs(math.log(v))) * min(v, 1.0) + max(0.0, v - 1) for v in nodes]
    shift, less = allocation.merged(norm, step, cells)
    for masses, sign, start in ((allocation.split(norm, step, cells), 1, 0.0), (less, -1, shift)):
        places = start + np.arange(len(masses)) * step
        puts = np.maximum(nodes[:, None] - places, 0.0) @ masses
        assert (sign * (puts - truth) >= -1e-11).all()
        assert masses.min() >= 0
        assert masses.sum() <= 1 + 1e-12


def test_less_noise_fewer_steps_and_more_epochs_cost_more():
    values = [accounting.epsilon(event(noise, 50, 3), 1e-6) for noise in (3.0, 1.0, 0.7)]
    assert values == sorted(values)
    values = [accounting.epsilon(event(1.0, steps, 3), 1e-6) for steps in (1000, 30, 2, 1)]
    assert values == sorted(values)
    values = [accounting.epsilon(event(1.0, 30, epochs), 1e-6) for epochs in (1, 3, 20)]
    assert values == sorted(values)


def test_several_steps_an_epoch_are_so_many_choices_of_one():
    assert event(1.0, 30, 4, 3) == ev.Repeated(ev.RandomlyAllocated(1.0, 10), 12)
    assert event(1.0, 31, 4, 3) == event(1.0, 30, 4, 3)
    exact = exact_two_of_four(2.0, 0.5)
    assert exact <= accounting.curve(event(2.0, 4, 1, 2)).delta(0.5) * (1 + 1e-3)


def exact_two_of_four(noise: float, epsilon: float) -> float:
    """delta of removing, by simulation with many draws: two of four steps, all six choices alike."""
    rng = np.random.default_rng(5)
    pairs = [(i, j) for i in range(4) for j in range(i)]
    x = rng.standard_normal((400_000, 4)) / noise
    chosen = np.array(pairs)[rng.integers(6, size=len(x))]
    for k in (0, 1):
        x[np.arange(len(x)), chosen[:, k]] += 1 / noise**2
    loss = np.log(np.mean([np.exp(x[:, i] + x[:, j] - 1 / noise**2) for i, j in pairs], axis=0))
    return float(np.maximum(0, -np.expm1(epsilon - loss)).mean())


def test_renyi_divergences_are_above_those_of_the_pair():
    orders = np.array([1.3, 2.0, 3.5, 6.0])
    for noise, steps in ((0.8, 117), (5.0, 4)):
        told = allocation.divergences(1 / noise, steps, orders)
        for loss in allocation.losses(1 / noise, steps)[1]:
            attained = np.array([loss.log_mgf(float(a) - 1).log / (a - 1) for a in orders])
            assert (told >= attained).all()
    assert accounting.epsilon(event(1.0, 50, 9), 1e-5, accountant="rdp") > accounting.epsilon(
        event(1.0, 50, 9), 1e-5
    )


def test_what_is_not_proven_is_refused():
    with pytest.raises(Unsupported, match="replace-one"):
        accounting.curve(event(1.0, 10), adjacency=Adjacency.REPLACE_ONE)
    with pytest.raises(Unsupported):
        accounting.curve(event(1.0, 10), adjacency=Adjacency.REPLACE_ONE, accountant="rdp")
    for steps in (0, 2.5, -1):
        with pytest.raises(InvalidInput):
            ev.RandomlyAllocated(1.0, steps)
    assert accounting.epsilon(
        event(1.0, 10, 2), 1e-5, adjacency=Adjacency.ZERO_OUT
    ) == accounting.epsilon(event(1.0, 10, 2), 1e-5)


@pytest.mark.parametrize("noise", [1e-2, 0.3, 1e4, 1e8])
@pytest.mark.parametrize("steps", [2, 10**9])
def test_it_answers_far_out(noise, steps):
    curve = accounting.curve(event(noise, steps))
    assert 0 <= curve.epsilon_lower(1e-6) <= curve.epsilon(1e-6)
    assert curve.epsilon(1e-6) <= accounting.epsilon(ev.Gaussian(noise), 1e-6) * 1.01 + 1e-9


def test_it_composes_with_other_releases():
    alone = accounting.epsilon(event(1.0, 50, 3), 1e-5)
    with_more = accounting.curve(
        ev.Composed((event(1.0, 50, 3), ev.Gaussian(5.0), ev.poisson(2.0, 0.1, 10)))
    )
    assert with_more.epsilon(1e-5) > with_more.epsilon_lower(1e-5) > alone  # fmt: skip
