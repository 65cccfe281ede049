"""The white-box audit through the real training loop: tight, sound, and right about broken
mechanisms.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import dpfy
from dpfy.audit import families, finished, mechanism, observation, whitebox
from dpfy.audit.bounds import TrialScores
from dpfy.audit.observation import StreamFacts
from dpfy.audit.observation import audited as stream_seen
from dpfy.core.errors import InvalidInput

DELTA, RATE, REAL = 1e-5, 0.1, 200


def task() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(REAL, 8, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def audit(
    epsilon: float, canaries: int, seed: int, steps: int = 4, rate: float = 1.0
) -> tuple[whitebox.AuditVerdict, whitebox.ObservedSums, whitebox.AuditedClaim]:
    torch.set_num_threads(1)
    records = REAL + canaries
    plan = dpfy.dpsgd(records, rate * records, steps=steps).calibrate(epsilon, DELTA)
    coins = whitebox.fair_coins(canaries, seed)
    seen = observation.observe_table(
        network(), task(), plan, np.where(coins, observation.LENGTH, 0.0), seed=seed
    )
    observed = whitebox.ObservedSums(seen, coins)
    claim = whitebox.AuditedClaim(
        plan.epsilon,
        DELTA,
        plan.noise_multiplier,
        rate,
        families.ClaimedFamily(observation.claimed_curve(plan)),
    )
    return whitebox.audit(observed, claim), observed, claim


def test_tight_on_full_batches():
    verdict, observed, claim = audit(3.0, 12_000, seed=1)
    assert 0.8 * 3.0 <= verdict.bound.epsilon <= 3.0
    assert not verdict.violated
    assert "no contradiction" in verdict.sentence
    # The attacker's ROC lies on the private side of the claim, up to chance.
    seen = whitebox.roc(observed, claim)
    assert finished.beyond(seen, claim.family.tradeoff(1.0)) == 0
    # The same observations against a claim of half the epsilon are a violation that says what to
    # look at.
    bold = whitebox.AuditVerdict(verdict.bound, 1.5)
    assert bold.violated
    assert "Look first at: noise scale" in bold.sentence
    assert bold.to_json()["violated"] is True


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
def test_tight_with_sampling(epsilon):
    verdict, _, _ = audit(epsilon, 90_000, seed=2, steps=40, rate=RATE)
    assert 0.8 * epsilon <= verdict.bound.epsilon <= epsilon


@pytest.mark.slow
def test_sound_over_two_hundred_repetitions():
    """At most the stated fraction of audits of correct code exceeds the claim."""
    torch.set_num_threads(1)
    canaries, confidence = 500, 0.95
    plan = dpfy.dpsgd(REAL + canaries, RATE * (REAL + canaries), steps=8).with_noise(
        0.8, delta=DELTA
    )
    family = families.ClaimedFamily(observation.claimed_curve(plan))
    claim = whitebox.AuditedClaim(plan.epsilon, DELTA, plan.noise_multiplier, RATE, family)
    exceeded = 0
    for seed in range(200):
        coins = whitebox.fair_coins(canaries, seed)
        seen = observation.observe_table(
            network(), task(), plan, np.where(coins, observation.LENGTH, 0.0), seed=seed
        )
        limit = whitebox.best_attack(whitebox.ObservedSums(seen, coins), claim, confidence)[3]
        exceeded += limit > (1 + family.advantage(1.0)) / 2
    assert exceeded <= 200 * (1 - confidence)


def test_canaries_show_as_one_clip_norm_and_noise_as_billed():
    plan = dpfy.dpsgd(600, 60, steps=10, clip_norm=0.3).with_noise(0.5, delta=1e-4)
    coins = whitebox.fair_coins(400, 3)
    seen = observation.observe_table(
        network(), task(), plan, np.where(coins, observation.LENGTH, 0.0), seed=3
    )
    assert seen.shape == (10, 400)
    assert seen[:, ~coins].std() == pytest.approx(0.5, rel=0.05)
    assert seen[:, coins].mean() == pytest.approx(0.1, abs=0.03)


def test_likelihood_ratio_is_the_ratio_of_densities():
    rng = np.random.default_rng(0)
    y, q, s = rng.standard_normal((5, 7)), 0.3, 0.9
    density = lambda mean: np.exp(-((y - mean) ** 2) / (2 * s * s))  # noqa: E731
    expected = np.log((q * density(1) + (1 - q) * density(0)) / density(0)).sum(0)
    assert whitebox.likelihood_ratio(y, s, q) == pytest.approx(expected)
    replaced = np.log(
        (q * density(1) + (1 - q) * density(0)) / (q * density(-1) + (1 - q) * density(0))
    ).sum(0)
    assert whitebox.likelihood_ratio(y, s, q, absent=-1.0) == pytest.approx(replaced)


def test_matched_filter_is_the_ratio_under_correlated_noise():
    rng = np.random.default_rng(1)
    c = np.tril(rng.random((4, 4)) + np.eye(4))
    u, y, s = np.array([1.0, 0, 1, 0]), rng.standard_normal((4, 3)), 1.3
    precision = c.T @ c / s**2
    expected = [y[:, k] @ precision @ u - u @ precision @ u / 2 for k in range(3)]
    assert whitebox.matched(y, c, u, s) == pytest.approx(expected)
    with pytest.raises(InvalidInput, match="square"):
        whitebox.matched(y, c[:, :3], u, s)


def test_correlated_noise_is_audited_tightly():
    facts = StreamFacts(1.0, steps=12, epochs=3, bands=3)
    seen = stream_seen(facts, 4000, seed=1)
    values = whitebox.matched(seen.projections, seen.encoder, seen.pattern, seen.scale)
    accuracy = ((values > 0) == seen.included).mean()
    ideal = (1 + families.GaussianFamily().advantage(1.0)) / 2
    assert accuracy == pytest.approx(ideal, abs=4 * math.sqrt(0.25 / 4000))
    shape = mechanism.gaussian_shape(seen.alone, seen.scale)
    assert shape.scale == pytest.approx(1.0, abs=0.02)
    assert shape.p_scale > 1e-4
    assert shape.p_shape > 1e-4


def test_shadow_models_separate_canaries():
    rng = np.random.default_rng(2)
    base = rng.standard_normal(300) * 3
    coins = rng.integers(2, size=(21, 300)).astype(bool)
    coins[0], coins[1] = True, False
    values = base + coins + 0.5 * rng.standard_normal((21, 300))
    ratio = whitebox.shadow_likelihood_ratio(values[20], values[:20], coins[:20])
    plain = ((values[20] > np.median(values[20])) == coins[20]).mean()
    assert ((ratio > 0) == coins[20]).mean() > max(0.75, plain + 0.1)


@pytest.mark.parametrize(("scale", "violated"), [(1.0, False), (0.5, True)])
def test_any_mechanism_by_its_outputs(scale, violated):
    """Laplace noise of scale 1 is 1-DP; half the noise under the same claim is found out."""
    rng = np.random.default_rng(3)
    sample = lambda present, count: float(present) + scale * rng.laplace(size=count)  # noqa: E731
    verdict = mechanism.audit(sample, epsilon=1.0, delta=0.0, trials=20_000)
    assert verdict.violated is violated
    assert verdict.bound.epsilon > 0.7
    assert verdict.bound.detail["total_variation_lower"] > 0.2


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_noise_shape_test_has_power(factor):
    noise = np.random.default_rng(4).standard_normal(2000)
    good, bad = mechanism.gaussian_shape(noise, 1.0), mechanism.gaussian_shape(noise, factor)
    assert good.p_scale > 1e-3
    assert good.p_shape > 1e-3
    assert bad.p_scale < 1e-12
    assert good.finds_factor < 1.1


def test_plot_is_an_svg_with_the_claim():
    rng = np.random.default_rng(5)
    seen = TrialScores(rng.standard_normal(300) + 1, rng.standard_normal(300))
    text = finished.roc_svg(seen, families.GaussianFamily().tradeoff(1.0), "title").decode()
    assert text.startswith("<?xml")
    assert "</svg>" in text
    assert finished.beyond(seen, families.GaussianFamily().tradeoff(1.0)) == 0
    assert (
        finished.beyond(
            TrialScores(rng.standard_normal(300) + 3, rng.standard_normal(300)),
            families.GaussianFamily().tradeoff(1.0),
        )
        > 0
    )
