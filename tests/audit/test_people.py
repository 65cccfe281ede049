"""Audits of people: canary users in one run, the estimate from their cosines, and checks that see
what they are named for.
"""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from dpfy.audit import finished
from dpfy.audit.families import ClaimedFamily, gaussian_epsilon
from dpfy.audit.observation import claimed_curve
from dpfy.audit.user_training import UserFacts, audited_users, by_records
from dpfy.audit.whitebox import AuditedClaim, ObservedSums, audit
from dpfy.cli.app import app
from dpfy.core.errors import InvalidInput
from dpfy.federated.audit import observe_rounds
from dpfy.federated.recipes import CLIENT

FACTS = UserFacts(noise_multiplier=1.5, users=40, canaries=150, records=3, rate=0.5, steps=6)


def judged(facts, observe, seed, unit=None):
    seen = audited_users(facts, observe, seed, unit)
    family = ClaimedFamily(claimed_curve(seen.plan), precision=0.05)
    claim = AuditedClaim(seen.plan.epsilon, facts.delta, facts.noise_multiplier, facts.rate, family)
    verdict = audit(ObservedSums(seen.projections, seen.included), claim)
    return verdict, seen, finished.of_people(seen, claim, 0.95)


@pytest.mark.parametrize("kind", ["users", "clients"])
def test_canary_users_certify_some_of_the_claim_and_never_more(kind):
    observe, unit = (by_records(3), None) if kind == "users" else (observe_rounds, CLIENT)
    facts = FACTS if kind == "users" else dataclasses.replace(FACTS, records=1)
    verdict, seen, told = judged(facts, observe, 3, unit)
    assert not verdict.violated
    assert verdict.bound.epsilon > 0.5
    assert seen.plan.recipe.unit.name == ("user" if kind == "users" else "client")
    assert told["power"]["finds_half_the_noise"] > 0.8
    assert 0.3 * verdict.claimed < told["cosines"]["final"]["epsilon"] < 3 * verdict.claimed
    out = seen.final[~seen.included]
    assert abs(out.mean()) < 5 / math.sqrt(
        seen.dimension * len(out)
    )  # canaries that were not sent: chance
    assert out.std() == pytest.approx(1 / math.sqrt(seen.dimension), rel=0.35)


def test_noise_for_a_record_is_found():
    """The claim is for users; what runs has the noise of one of their three records."""

    def quiet(model, rows, plan, seed):
        return by_records(3)(
            model, rows, dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / 3), seed
        )

    verdict, _, told = judged(FACTS, quiet, 4)
    assert verdict.violated
    assert told["cosines"]["final"]["epsilon"] > verdict.claimed


def test_estimates_are_those_of_gaussians():
    for mu, delta in ((0.5, 1e-5), (2.0, 1e-3), (4.0, 1e-6)):
        scale = 0.03
        assert finished.told_apart((mu * scale, scale), (0.0, scale), delta) == pytest.approx(
            gaussian_epsilon(mu, delta), rel=1e-3
        )
    assert finished.told_apart((0.0, 1.0), (0.0, 1.0), 1e-6) == 0
    assert finished.told_apart((100.0, 1.0), (0.0, 1.0), 1e-6) == math.inf
    rng = np.random.default_rng(0)
    found = finished.estimate(rng.normal(0.02, 0.01, 20_000), finished.by_chance(10_000), 1e-5)
    assert found.epsilon == pytest.approx(gaussian_epsilon(2.0, 1e-5), rel=0.05)
    with pytest.raises(InvalidInput, match="cosines"):
        finished.estimate([0.1, math.nan, 0.2], (0.0, 1.0), 1e-5)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"canaries": 5}, "canaries"),
        ({"rate": 0.0}, "sampling_rate"),
        ({"users": 10**7}, "canaries"),
        ({"users": 20, "canaries": 12, "records": 1828}, "canaries"),
        ({"canaries": 3000, "steps": 9000}, "canaries"),
    ],
)
def test_bad_input_is_one_line(change, field):
    with pytest.raises(InvalidInput, match=field):
        dataclasses.replace(FACTS, **change)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [[], ["--rounds"]])
def test_command(rounds):
    said = CliRunner().invoke(
        app,
        [
            "audit",
            "users",
            "--canaries",
            "80",
            "--steps",
            "6",
            "--insecure-seed",
            "1",
            "--json",
            *rounds,
        ],
    )
    answer = json.loads(said.stdout)
    assert said.exit_code == 0
    assert answer["unit"] == ("client" if rounds else "user")
    assert 0 < answer["epsilon_lower"] < answer["epsilon_claimed"]
    assert answer["cosines"]["final"]["kind"] == "an estimate, no bound"
    assert 0 <= answer["power"]["finds_half_the_noise"] <= 1
