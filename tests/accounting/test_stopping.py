"""Runs that end when their own outputs say so: no rule makes the loss exceed what is stated by more
than delta.

The privacy loss of Gaussian steps, plain or on Poisson samples, is a random walk whose law is
known; here it lives on a lattice. A rule that sees all outputs can use nothing better than the loss
itself. Of ten thousand rules the exact

    sum over k of E_P[(1 - e^(epsilon_k - L_k))+, ended at k]

is computed by pushing their laws through the walk, and of the best of all rules by going backwards
through it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import norm

from dpfy import accounting
from dpfy.accounting import RenyiFilter
from dpfy.accounting.stopping import unwrapped
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency

PAIR = Adjacency.ADD_OR_REMOVE_ONE
WIDTH, LOW, HIGH = 0.02, -6.0, 10.0
LATTICE = LOW + WIDTH * np.arange(round((HIGH - LOW) / WIDTH) + 1)
POINTS, EACH, DELTA = 5, 8, 1e-4


def onto(losses: np.ndarray, mass: np.ndarray, width: float) -> tuple[np.ndarray, int]:
    """The law on multiples of `width`, and the first of them: each loss is shared by its neighbours
    so that both worlds keep their mass.

    That reveals no less: it is what a loss is made of that may be either of them.
    """
    below = np.floor(losses / width).astype(int)
    up = -np.expm1(below * width - losses) / -math.expm1(-width)
    law = np.zeros(below.max() - below.min() + 2)
    np.add.at(law, below - below.min(), mass * (1 - up))
    np.add.at(law, below - below.min() + 1, mass * up)
    return law, int(below.min())


def segment(sigma: float, rate: float, removed: bool) -> np.ndarray:
    """The matrix that takes a law of the loss at one point to that at the next; what leaves the
    lattice stays at its ends.
    """
    grid = np.linspace(-12 * sigma, 12 * sigma + 1, 400_001)
    edges = (grid[1:] + grid[:-1]) / 2
    without = np.diff(norm.cdf(edges, 0, sigma), prepend=0, append=1)
    with_unit = (1 - rate) * without + rate * np.diff(
        norm.cdf(edges, 1, sigma), prepend=0, append=1
    )
    ratio = np.log1p(rate * np.expm1((2 * grid - 1) / (2 * sigma**2)))
    law, first = onto(*((ratio, with_unit) if removed else (-ratio, without)), WIDTH / 8)
    whole = np.ones(1)
    for _ in range(EACH):
        whole = np.maximum(fftconvolve(whole, law), 0)
    whole, first = onto(WIDTH / 8 * (EACH * first + np.arange(len(whole))), whole, WIDTH)
    size = len(LATTICE)
    matrix = np.zeros((size, size))
    for row in range(size):
        np.add.at(matrix[row], np.clip(row + first + np.arange(len(whole)), 0, size - 1), whole)
    return matrix


def excess(epsilon: float) -> np.ndarray:
    return np.maximum(-np.expm1(np.minimum(epsilon - LATTICE, 0)), 0)


def best(moves: np.ndarray, epsilons: list[float]) -> float:
    """What the best of all rules reaches."""
    value = excess(epsilons[-1])
    for epsilon in reversed(epsilons[:-1]):
        value = np.maximum(excess(epsilon), moves @ value)
    return float((moves @ value)[round(-LOW / WIDTH)])


def reached(moves: np.ndarray, epsilons: list[float], rules: np.ndarray) -> np.ndarray:
    """What each rule reaches: `rules` says for each, at each point, at which losses it ends the
    run.
    """
    laws = np.zeros((len(rules), len(LATTICE)))
    laws[:, round(-LOW / WIDTH)] = 1.0
    found = np.zeros(len(rules))
    for k, epsilon in enumerate(epsilons):
        laws = laws @ moves
        ends = rules[:, k] if k + 1 < len(epsilons) else np.ones_like(laws, dtype=bool)
        found += (laws * ends) @ excess(epsilon)
        laws = laws * ~ends
    return found


def some_rules(count: int, epsilons: list[float], seed: int) -> np.ndarray:
    """Thresholds, windows and random sets of losses, most of them near what is stated; the first
    ends wherever the loss is too large.
    """
    rng = np.random.default_rng(seed)
    rules = np.zeros((count, len(epsilons), len(LATTICE)), dtype=bool)
    for k, epsilon in enumerate(epsilons):
        start = epsilon + rng.normal(0, 0.4, count)
        length = np.where(rng.random(count) < 0.5, np.inf, rng.exponential(1.0, count))
        rules[:, k] = (start[:, None] <= LATTICE) & ((start + length)[:, None] > LATTICE)
        rules[:, k] ^= (rng.random(count) < 0.2)[:, None] & (
            rng.random((count, len(LATTICE))) < 0.3
        )
        rules[0, k] = epsilon < LATTICE
    return rules


def run(sigma: float, rate: float, steps: int) -> ev.Event:
    return ev.Repeated(
        ev.PoissonSampled(rate, ev.Gaussian(sigma)) if rate < 1 else ev.Gaussian(sigma), steps
    )


def stated(sigma: float, rate: float, share: float) -> list[float]:
    return [
        accounting.epsilon(ev.Stopped(run(sigma, rate, EACH * k), share), DELTA)
        for k in range(1, POINTS + 1)
    ]


@pytest.mark.parametrize(("sigma", "rate"), [(9.0, 1.0), (1.0, 0.05)])
def test_no_rule_among_ten_thousand_exceeds_what_is_stated(sigma: float, rate: float) -> None:
    for removed in (True, False) if rate < 1 else (True,):
        moves = segment(sigma, rate, removed)
        epsilons = stated(sigma, rate, 1 / POINTS)
        for part in range(5):
            assert (
                reached(
                    moves, epsilons, some_rules(2_000 if rate == 1 else 1_000, epsilons, part)
                ).max()
                <= DELTA
            )
        assert best(moves, epsilons) <= DELTA


def test_the_epsilon_of_the_steps_made_would_be_exceeded() -> None:
    """The test has power: without the share of delta, simple rules reach twice delta, and so they
    do if billed at the point before.
    """
    moves = segment(9.0, 1.0, True)
    naive, epsilons = stated(9.0, 1.0, 1.0), stated(9.0, 1.0, 1 / POINTS)
    assert reached(moves, naive, some_rules(50, naive, 1)).max() > 2 * DELTA
    assert best(moves, naive) > 2.5 * DELTA
    assert best(moves, [0.0, *epsilons[:-1]]) > 10 * DELTA


PLANS = [(4096, 500, 3.0, 1e-5, 5), (1024, 1000, 1.0, 1e-6, 5), (256, 2000, 3.0, 1e-5, [0.6])]
"""Batch, steps, epsilon, delta, points: five of them, or one early one where there is little
noise.
"""


@pytest.mark.parametrize(("batch", "steps", "epsilon", "delta", "points"), PLANS)
def test_a_run_stopped_at_sixty_percent_is_billed_within_ten_percent(
    batch: int, steps: int, epsilon: float, delta: float, points: int | list[float]
) -> None:
    import dpfy

    plan = dpfy.dpsgd(60_000, batch, steps=steps, stopping=points).calibrate(epsilon, delta)
    made = round(0.6 * steps)
    fixed = dpfy.dpsgd(60_000, batch, steps=made).with_noise(plan.noise_multiplier, delta=delta)
    assert plan.epsilon <= epsilon
    assert fixed.epsilon < plan.epsilon_after(made) <= 1.1 * fixed.epsilon
    assert plan.epsilon_after(made - 10) == plan.epsilon_after(made)


def test_shares_multiply_and_stay_outside() -> None:
    inner = run(2.0, 0.1, 10)
    stopped = ev.Stopped(inner, 0.25)
    whole = ev.Composed((ev.Repeated(stopped, 2), ev.Gaussian(5.0), stopped))
    plain, share = unwrapped(whole)
    assert share == 0.25**3
    assert plain == ev.Composed((ev.Repeated(inner, 2), ev.Gaussian(5.0), inner))
    assert accounting.epsilon(whole, 1e-3) == accounting.epsilon(plain, 1e-3 * share)
    unchanged = ev.Composed((inner, ev.Gaussian(5.0)))
    assert unwrapped(unchanged)[0] is unchanged
    for hidden in (
        ev.RepeatAndSelect(stopped, 3.0, 1.0),
        ev.PoissonSampled(0.5, stopped),
        ev.Parallel((("a", stopped),)),
    ):
        for name in ("tight", "rdp", "zcdp"):
            with pytest.raises(Unsupported):
                accounting.epsilon(hidden, 1e-5, accountant=name)
    for share in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(InvalidInput, match="share"):
            ev.Stopped(inner, share)


def test_the_order_of_a_filter_is_that_of_the_first_run_as_reserved() -> None:
    """Chosen from what became of it, the order would depend on outputs, and half of delta would be
    spent twice.
    """
    admits, short = RenyiFilter(3.0, 1e-5), run(3.0, 0.02, 1000)
    long = ev.Composed(
        (short, run(0.7, 0.02, 1000))
    )  # a schedule whose second phase has less noise
    assert admits._orders(long, PAIR)[0] != admits._orders(short, PAIR)[0]
    kept, anew = (admits.spent_epsilon([short] * 8, PAIR, first) for first in (long, None))
    assert kept > anew
    assert admits.spent_epsilon([short] * 8, PAIR, short) == anew
    assert admits.spent_epsilon([ev.Stopped(short, 0.2)] * 8, PAIR, long) == kept
