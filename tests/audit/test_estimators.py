"""Estimators against closed forms and against simulated mechanisms whose epsilon is known: sound,
and with power.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpfy.accounting import gaussian
from dpfy.audit import bounds, families, one_run
from dpfy.audit.bounds import TrialScores
from dpfy.audit.one_run import Guesses
from dpfy.core.errors import InvalidInput

DELTA = 1e-5


def gaussian_trials(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores N(mu b, 1) with fair coins b: exactly mu-GDP, and the score is the sufficient
    statistic.
    """
    rng = np.random.default_rng(seed)
    coins = rng.integers(2, size=count).astype(bool)
    return rng.standard_normal(count) + mu * coins, coins


def right_by_accuracy(mu: float, count: int, seed: int) -> int:
    scores, coins = gaussian_trials(mu, count, seed)
    return int(((scores > mu / 2) == coins).sum())


@pytest.mark.parametrize(
    ("k", "n", "alpha"),
    [(0, 10, 0.05), (3, 10, 0.05), (10, 10, 0.05), (812, 1000, 0.025), (1, 3, 0.2)],
)
def test_limits_are_the_exact_ones(k, n, alpha):
    low, high = bounds.lower(k, n, alpha), bounds.upper(k, n, alpha)
    assert low <= k / n <= high
    if k:
        assert stats.binom.sf(k - 1, n, low) == pytest.approx(alpha)
    if k < n:
        assert stats.binom.cdf(k, n, high) == pytest.approx(alpha)


def test_impossible_counts_are_refused():
    with pytest.raises(
        InvalidInput, match="successes: got 11; must be at most the number of trials"
    ):
        bounds.lower(11, 10, 0.05)
    with pytest.raises(InvalidInput, match="canaries >= made >= right"):
        Guesses(10, 11, 3)
    with pytest.raises(InvalidInput, match="no NaN"):
        TrialScores(np.array([math.nan]), np.array([0.0]))


@pytest.mark.parametrize(("mu", "delta"), [(1.0, 1e-5), (0.5, 1e-6), (2.0, 1e-5), (0.05, 1e-5)])
def test_gaussian_epsilon_is_the_accountants_rounded_down(mu, delta):
    found = families.gaussian_epsilon(mu, delta)
    assert families.gaussian_delta(mu, found) == pytest.approx(delta, rel=1e-9)
    # The textbook form, in plain arithmetic.
    plain = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found) * stats.norm.cdf(
        -mu / 2 - found / mu
    )
    assert plain == pytest.approx(delta, rel=1e-5)
    assert found <= gaussian.epsilon(mu, delta) <= found * (1 + 1e-9)


def test_rates_bound_is_the_formula():
    scores = TrialScores(np.r_[np.ones(90), np.zeros(10)], np.r_[np.ones(5), np.zeros(95)])
    bound = bounds.clopper_pearson(scores, delta=0.01, threshold=0.5)
    fpr, fnr = stats.beta.ppf(0.975, 6, 95), stats.beta.ppf(0.975, 11, 90)
    assert bound.epsilon == pytest.approx(
        max(math.log((1 - fnr - 0.01) / fpr), math.log((1 - fpr - 0.01) / fnr))
    )
    assert bound.canaries == 200


def test_threshold_is_chosen_on_trials_that_are_not_counted():
    scores, coins = gaussian_trials(2.0, 4000, 1)
    bound = bounds.clopper_pearson(TrialScores.of(scores, coins), delta=DELTA)
    assert 1990 <= bound.canaries <= 2010
    assert 0.5 < bound.epsilon < families.gaussian_epsilon(2.0, DELTA)


@pytest.mark.parametrize("estimate", [bounds.clopper_pearson, bounds.gaussian_fit])
def test_rates_bounds_are_sound_on_a_gaussian(estimate):
    """400 audits at 80% confidence of a tight mechanism exceed the truth at most 20% of the time,
    plus three standard errors.
    """
    truth, beyond = families.gaussian_epsilon(1.0, DELTA), 0
    for seed in range(400):
        scores, coins = gaussian_trials(1.0, 400, seed)
        beyond += (
            estimate(
                TrialScores.of(scores, coins), delta=DELTA, confidence=0.8, threshold=0.5
            ).epsilon
            > truth
        )
    assert beyond / 400 <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / 400)


def test_gaussian_fit_comes_close_with_power():
    scores, coins = gaussian_trials(1.66, 20_000, 2)
    bound = bounds.gaussian_fit(TrialScores.of(scores, coins), delta=DELTA, threshold=0.83)
    truth = families.gaussian_epsilon(1.66, DELTA)
    assert 0.9 * truth < bound.epsilon < truth


def test_accuracy_bound_is_sound_and_not_timid():
    """The false-alarm rate of a tight mechanism is close to what is stated: not above it, and not
    far below.
    """
    family, truth = families.GaussianFamily(claim=1.0), families.gaussian_epsilon(1.0, DELTA)
    alarms = sum(
        bounds.by_accuracy(
            right_by_accuracy(1.0, 500, s), 500, delta=DELTA, family=family, confidence=0.8
        ).epsilon
        > truth
        for s in range(400)
    )
    assert 0.08 < alarms / 400 <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / 400)


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
def test_accuracy_bound_certifies_most_of_epsilon(epsilon):
    """With as many canaries as `canaries_needed` asks for, 0.8 of epsilon is certified about as
    often as it promises.
    """
    mu = families.weakest(
        lambda s: families.gaussian_epsilon(s, DELTA) <= epsilon, 1.0, precision=1e-4
    )
    count = one_run.canaries_needed(epsilon, DELTA, share=0.8, power=0.9)
    found = [
        bounds.by_accuracy(right_by_accuracy(mu, count, s), count, delta=DELTA).epsilon
        for s in range(60)
    ]
    assert sum(e >= 0.795 * epsilon for e in found) >= 48
    assert sum(e > epsilon for e in found) <= 3 + 6


def test_members_that_nobody_can_compute_are_not_excluded():
    """A strength beyond the limits of accounting ends the search there, on the low side, instead of
    the audit.
    """

    def excluded(strength: float) -> bool:
        if strength > 40:
            raise InvalidInput("noise_multiplier", 1 / strength, "must be more")
        return True

    assert families.weakest(excluded, 1.0, precision=1e-3) == pytest.approx(40, rel=2e-3)
    assert families.weakest(excluded, 1.0, precision=1e-3) <= 40


def test_claimed_family_agrees_with_the_gaussian_family():
    class Exact:
        def __init__(self, mu: float) -> None:
            self.mu = mu

        def epsilon(self, delta: float) -> float:
            return families.gaussian_epsilon(self.mu, delta)

        def delta(self, epsilon: float) -> float:
            return families.gaussian_delta(self.mu, epsilon)

        def epsilon_lower(self, delta: float) -> float | None:
            return None

    claimed, exact = (
        families.ClaimedFamily(lambda s: Exact(1.2 * s)),
        families.GaussianFamily(claim=1.2),
    )
    a = bounds.by_accuracy(800, 1000, delta=DELTA, family=claimed)
    b = bounds.by_accuracy(800, 1000, delta=DELTA, family=exact)
    assert a.epsilon == pytest.approx(b.epsilon, rel=3e-3)
    for fpr in (0.001, 0.01, 0.1, 0.5, 0.9):
        low, true = claimed.tradeoff(1.0)(fpr), exact.tradeoff(1.2)(fpr)
        assert true - 0.004 <= low <= true + 1e-9  # the envelope of lines is never above the curve


def test_one_run_p_value_is_the_binomial_tail_without_delta():
    assert one_run.p_value(Guesses(100, 80, 60), 1.0, 0.0) == pytest.approx(
        stats.binom.sf(59, 80, 1 / (1 + math.exp(-1)))
    )
    with_delta = one_run.p_value(Guesses(100, 80, 60), 1.0, 1e-5)
    assert with_delta > one_run.p_value(Guesses(100, 80, 60), 1.0, 0.0)


def test_one_run_known_number():
    """Steinke et al. 2023, Section 1: 100% right of 100 guesses at 95% gives ln(p / (1 - p)) with p
    = 0.05^(1/100).
    """
    p = 0.05 ** (1 / 100)
    assert one_run.steinke(Guesses(100, 100, 100), delta=0.0).epsilon == pytest.approx(
        math.log(p / (1 - p)), rel=2e-3
    )
    assert one_run.steinke(Guesses(100, 100, 50), delta=0.0).epsilon == 0.0


@pytest.mark.parametrize("made", [400, 100])
def test_one_run_bounds_are_sound_on_randomized_response(made):
    """Randomized response is the worst pure-DP mechanism: the bound is tight there, and exceeds the
    truth as often as stated.
    """
    truth, chance = 1.0, 1 / (1 + math.exp(-1.0))
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(400):
        coins = rng.integers(2, size=400).astype(bool)
        flipped = coins ^ (rng.random(400) > chance)
        guesses = Guesses.from_scores(flipped + 1e-6 * rng.random(400), coins, made)
        alarms += one_run.steinke(guesses, delta=0.0, confidence=0.8).epsilon > truth
    assert 0.05 < alarms / 400 <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / 400)


@pytest.mark.parametrize("made", [500, 100])
def test_f_dp_is_sound_and_tighter_on_a_gaussian(made):
    family, truth = families.GaussianFamily(claim=1.5), families.gaussian_epsilon(1.5, DELTA)
    tighter = alarms = 0
    for seed in range(60):
        guesses = Guesses.from_scores(*gaussian_trials(1.5, 500, seed), made)
        refined = one_run.f_dp(guesses, delta=DELTA, family=family, confidence=0.9).epsilon
        alarms += refined > truth
        tighter += refined > one_run.steinke(guesses, delta=DELTA, confidence=0.9).epsilon
    assert alarms <= 6 + 3 * math.sqrt(60 * 0.1 * 0.9)
    assert tighter >= 55


def test_f_dp_on_one_guess_is_the_trade_off_itself():
    """m = 1: guessing right has probability (1 + TV)/2 at most; the recursion rejects exactly below
    it.
    """
    f = families.GaussianFamily().tradeoff(1.0)
    best = (1 + families.GaussianFamily().advantage(1.0)) / 2
    assert one_run.too_many_right(Guesses(1, 1, 1), f, best + 1e-3)
    assert not one_run.too_many_right(Guesses(1, 1, 1), f, best - 0.05)


def test_several_numbers_of_guesses_pay_for_themselves():
    scores, coins = gaussian_trials(2.0, 1000, 7)
    estimate = lambda g, c: one_run.steinke(g, delta=DELTA, confidence=c)  # noqa: E731
    bound = one_run.best_of(scores, coins, [1000, 400, 100], estimate)
    single = one_run.steinke(
        Guesses.from_scores(scores, coins, int(bound.detail["guesses"])), delta=DELTA
    )
    assert bound.confidence == 0.95
    assert 0 < bound.epsilon < single.epsilon


def test_ranks_and_exposure():
    losses = np.array([[3.0, 1.0, 2.0, 4.0], [0.5, 0.5, 2.0, 4.0]])
    assert bounds.ranks(losses, [1, 0]).tolist() == [1, 2]
    assert bounds.exposure([1, 2], 4).tolist() == [2.0, 1.0]
    full = bounds.from_ranks([1] * 200, 1024, delta=DELTA)
    assert full.epsilon == pytest.approx(math.log((0.05 ** (1 / 200) - DELTA) * 1024), rel=1e-6)
    rng = np.random.default_rng(0)
    assert (
        bounds.from_ranks(rng.integers(1, 1025, size=200), 1024, most=100, delta=DELTA).epsilon
        < 0.3
    )


def test_power_tables():
    assert one_run.most_by_rates(1000) == pytest.approx(
        math.log((1 - 3.68e-3 * 2) / (3.68e-3 * 2)), abs=0.05
    )
    assert one_run.most_in_one_run(1000) == pytest.approx(5.81, abs=0.02)
    assert one_run.detection(1000, 0.8, 0.7) > 0.99
    assert one_run.detection(1000, 0.7, 0.7) < 0.05
    assert (
        one_run.canaries_needed(1.0, DELTA)
        > one_run.canaries_needed(3.0, DELTA)
        > one_run.canaries_needed(8.0, DELTA)
    )


def test_log_ratio_is_a_lower_bound_with_power():
    rng = np.random.default_rng(1)
    chances = np.array([math.e, 1.0, 1.0]) / (math.e + 2)
    one, other = rng.choice(3, 30_000, p=chances), rng.choice(3, 30_000, p=chances[[1, 0, 2]])
    assert 0.8 < bounds.log_ratio(one, other) < 1.0
    assert bounds.log_ratio(one, one) == 0
    assert bounds.log_ratio(np.zeros(1000, int), np.ones(1000, int)) > 3
