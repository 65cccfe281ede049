"""Noise for a limit of what an attack reaches: closed forms of the Gaussian, and the other
library's loss distributions.
"""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from dpfy import accounting
from dpfy.accounting.interpretation import AttackTarget
from dpfy.cli.app import main
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput


def test_it_is_the_closed_form_of_the_gaussian():
    """Advantage 2 Phi(mu / 2) - 1, true-positive rate Phi(Phi^-1(f) + mu), in random settings."""
    rng = np.random.default_rng(4)
    for _ in range(12):
        mu, rate = float(np.exp(rng.uniform(-3, 1.2))), float(np.exp(rng.uniform(-6, -1)))
        limits = [AttackTarget(float(2 * ndtr(mu / 2) - 1))]
        limits.append(AttackTarget(float(ndtr(ndtri(rate) + mu)), rate))
        for target in limits:
            noise = accounting.calibrate.noise_for_risk(ev.Gaussian, target)
            assert 1 - 1e-6 <= noise * mu <= 1.002, (mu, target)
            assert target.reached(accounting.curve(ev.Gaussian(noise))) <= target.limit


def _steps(rate: float, steps: int, noise: float) -> ev.Event:
    return ev.poisson(noise, rate, steps)


def test_sampled_steps_agree_with_the_peers_loss_distributions():
    from dp_accounting import pld

    for rate, steps, target in (
        (0.05, 200, AttackTarget(0.1)),
        (0.02, 500, AttackTarget(0.02, 0.01)),
    ):
        noise = accounting.calibrate.noise_for_risk(partial(_steps, rate, steps), target)
        peer = pld.privacy_loss_distribution.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=1e-3
        ).self_compose(steps)
        grid = np.linspace(0, 2, 41) if target.at else [0.0]
        found = min(
            peer.get_delta_for_epsilon(float(e)) + math.exp(e) * (target.at or 0.0) for e in grid
        )
        assert found == pytest.approx(target.success, rel=2e-3)


def test_more_is_asked_for_less():
    noises = [
        accounting.calibrate.noise_for_risk(ev.Gaussian, AttackTarget(success, 0.01))
        for success in (0.011, 0.02, 0.1, 0.6, 0.995)
    ]
    assert noises == sorted(noises, reverse=True)


@pytest.mark.parametrize(("success", "at"), [(0.0, None), (1.0, None), (0.01, 0.01), (0.5, 0.0)])
def test_impossible_limits_are_refused(success, at):
    with pytest.raises(InvalidInput):
        AttackTarget(success, at)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "calibrate", *arguments])
    return int(stop.value.code or 0)


def test_on_the_command_line(capsys):
    plan = ["--sampling-rate", "1", "--steps", "1", "--json"]
    assert call("--advantage", "0.1", "--delta", "1e-5", *plan) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["noise_multiplier"] == pytest.approx(1 / (2 * ndtri(0.55)), rel=1e-3)
    assert told["reached"] <= 0.1
    assert told["epsilon"] > 0
    assert call("--tpr", "0.02", "--at-fpr", "0.01", *plan) == 0
    first = json.loads(capsys.readouterr().out)
    assert call("--reconstruction", "0.02", "--prior", "0.01", *plan) == 0
    assert json.loads(capsys.readouterr().out) == first
    for wrong in (
        ["--advantage", "0.1", "--epsilon", "1", "--delta", "1e-5"],
        ["--tpr", "0.02"],
        ["--advantage", "0.1", "--prior", "0.01"],
        ["--epsilon", "1"],
        [],
    ):
        assert call(*wrong) == 2
