"""Groups, users, disjoint data, patterns, planning, meaning: each against a closed form or a rule
it must obey.
"""

from __future__ import annotations

import math

import pytest
from scipy.special import ndtr, ndtri

from dpfy import accounting
from dpfy.accounting import gaussian, gdp, interpretation, patterns, planning, user_level
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
TRAIN = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 1000)


def test_a_group_of_gaussians_is_exact_and_cheaper_than_any_curve_rule() -> None:
    curve = accounting.curve(ev.Gaussian(30.0))
    exact = accounting.curve(user_level.of_group(ev.Gaussian(30.0), 5)).delta(1.0)
    assert exact == pytest.approx(gaussian.delta(5 / 30.0, 1.0), rel=1e-6)
    by_curve = user_level.from_curve(curve, 1.0, 5)
    _, by_rule = user_level.textbook(0.2, curve.delta(0.2), 5)
    assert exact < by_curve < by_rule


def test_a_user_with_several_examples_pays_more_than_one_and_less_than_the_rule() -> None:
    one, user = (
        accounting.epsilon(TRAIN, 1e-6),
        accounting.epsilon(user_level.of_group(TRAIN, 3), 1e-6),
    )
    # Three examples drawn together would be noise over three; drawn independently they cost less
    # than that.
    together = accounting.epsilon(
        ev.Repeated(ev.PoissonSampled(0.03, ev.Gaussian(1.0 / 3)), 1000), 1e-6
    )
    assert one < user < together
    assert user_level.of_group(TRAIN, 1) == TRAIN


def test_attacker_of_a_gaussian() -> None:
    """Against mu-GDP the best attack has tpr = Phi(Phi^-1(fpr) + mu): our bound lies above it,
    closely.
    """
    mu = 1.0
    curve = accounting.curve(ev.Gaussian(1 / mu))
    for rate in (1e-3, 1e-2, 0.1):
        exact = float(ndtr(ndtri(rate) + mu))
        assert exact <= interpretation.true_positive_rate(curve, rate) <= 1.05 * exact
    assert interpretation.advantage(curve) == pytest.approx(2 * ndtr(mu / 2) - 1, rel=1e-6)


def test_meaning_reads_as_words_and_tiers_are_the_guides() -> None:
    assert [interpretation.tier(e) for e in (0.5, 1.0, 5.0, 10.0, 10.1, math.inf)] == [
        1,
        1,
        2,
        2,
        3,
        4,
    ]
    found = interpretation.meaning(accounting.curve(ev.Gaussian(2.0)), 1e-5)
    assert found.tier == 2
    assert found.tpr_at_1_permille < found.tpr_at_1_percent < 1
    assert "Tier 2" in found.sentences()[0]
    missed = accounting.guarantee(ev.Gaussian(2.0)).tradeoff((0.001, 0.01, 0.05, 0.1, 0.25, 0.5))
    assert missed == sorted(missed, reverse=True)


def test_relative_noise_falls_up_to_the_knee_and_stays() -> None:
    records, steps, epsilon = 100_000, 1000, 1.0
    knee = planning.knee(records, steps, epsilon)
    sizes = [int(knee / 30), int(knee), int(10 * knee)]
    small, middle, large = planning.batch_curve(
        records, steps, epsilon, 1e-6, sizes, accountant="rdp"
    )
    assert small.relative_noise > 3 * middle.relative_noise
    assert large.relative_noise > 0.3 * middle.relative_noise
    with pytest.raises(InvalidInput, match="batch_size"):
        planning.batch_curve(10, 10, 1.0, 1e-3, [11])


def test_patterns_claim_only_what_is_proven() -> None:
    poisson = patterns.TrainingPattern(1.0, 0.01, 1000).claim()
    shuffled = patterns.TrainingPattern(1.0, 0.01, 1000, "shuffled").claim()
    assert poisson.event == TRAIN
    assert shuffled.event == ev.Repeated(ev.Gaussian(1.0), 10)
    assert any("no amplification" in line for line in shuffled.assumptions)
    assert patterns.TrainingPattern(1.0, 0.3, 10, "fixed-order").claim().event == ev.Repeated(
        ev.Gaussian(1.0), 3
    )
    assert patterns.TrainingPattern(0.0, 0.5, 10).claim().event == ev.NotPrivate()
    with pytest.raises(InvalidInput, match="records"):
        patterns.TrainingPattern(1.0, 0.01, 10, "without-replacement").claim()
    with pytest.raises(InvalidInput, match="did you mean 'poisson'"):
        patterns.TrainingPattern(1.0, 0.01, 10, "poison")


def test_amplification_by_iteration_needs_its_conditions() -> None:
    declared = patterns.ConvexConditions(True, True, True, True)
    event = patterns.by_iteration(2.0, 9, REPLACE, declared)
    assert event == ev.Zcdp((2 / 2.0) ** 2 / 2 / 10)
    with pytest.raises(Unsupported, match="losses are convex"):
        patterns.by_iteration(2.0, 9, REPLACE, patterns.ConvexConditions(False, True, True, True))


def test_the_central_limit_is_an_approximation_that_can_be_too_low() -> None:
    """Why it is never a guarantee: at few steps and small rates it lies below the certified lower
    bound.
    """
    curve = accounting.curve(ev.Repeated(ev.PoissonSampled(0.001, ev.Gaussian(0.6)), 1000))
    lower = curve.epsilon_lower(1e-6)
    assert lower is not None
    assert gaussian.epsilon(gdp.clt_mu(0.001, 0.6, 1000), 1e-6) < lower


def test_classic_rules_are_sufficient_and_ordered() -> None:
    for epsilon, delta in ((0.1, 1e-5), (0.5, 1e-6), (0.9, 1e-8)):
        analytic = gaussian.sigma_analytic(epsilon, delta)
        rules = [
            gaussian.sigma_pei(epsilon, delta),
            gaussian.sigma_blog(epsilon, delta),
            gaussian.sigma_classic(epsilon, delta),
        ]
        assert all(sigma >= analytic for sigma in rules)
        assert all(
            gaussian.delta(1 / sigma, epsilon) <= delta * (1 + 1e-9) for sigma in [analytic, *rules]
        )
        assert gaussian.delta(1 / (analytic * (1 - 1e-6)), epsilon) > delta
    with pytest.raises(InvalidInput, match="below 1"):
        gaussian.sigma_classic(2.0, 1e-5)


def test_gaussian_curve_far_out_and_close_in() -> None:
    """Where the closed form cancels, the series takes over: compare with 40-digit arithmetic."""
    import mpmath

    with mpmath.workdps(60):
        for mu, epsilon in (
            (1e-4, 1e-6),
            (1e-3, 5e-3),
            (0.01, 0.0),
            (1.0, 30.0),
            (5.0, 0.1),
            (1e-6, 4e-6),
        ):
            low, high = (
                mpmath.mpf(mu) / 2 - mpmath.mpf(epsilon) / mu,
                -mpmath.mpf(mu) / 2 - mpmath.mpf(epsilon) / mu,
            )
            exact = mpmath.ncdf(low) - mpmath.exp(epsilon) * mpmath.ncdf(high)
            assert gaussian.log_delta(mu, epsilon) == pytest.approx(
                float(mpmath.log(exact)), rel=1e-9, abs=1e-9
            )
