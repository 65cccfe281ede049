"""Measure the audit: how tight it is, how often it is wrong on correct code, and what one training
run shows.

python benchmarks/audit.py tight            0.8 of epsilon 1, 3 and 8 must be certified, each within
five minutes python benchmarks/audit.py sound [200]      audits of correct code with independent
seeds; the share that exceeds the claim
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from torch import nn

import dpfy
from dpfy.audit import families, observation, whitebox

RATE, STEPS, REAL, DELTA = 0.1, 40, 500, 1e-5


def real() -> tuple[torch.Tensor, torch.Tensor]:
    """A small classification task beside the canaries."""
    x = torch.randn(REAL, 16, generator=torch.Generator().manual_seed(0))
    return x, x[:, :4].argmax(1)


def network() -> nn.Module:
    """The small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def white_box(plan: dpfy.Plan, canaries: int, seed: int) -> whitebox.ObservedSums:
    """One training with canaries, seen by the attacker."""
    coins = whitebox.fair_coins(canaries, seed)
    seen = observation.observe_table(
        network(), real(), plan, np.where(coins, observation.LENGTH, 0.0), seed=seed
    )
    return whitebox.ObservedSums(seen, coins)


def recipe(canaries: int, steps: int = STEPS) -> dpfy.Recipe:
    """DP-SGD on real records and canaries."""
    return dpfy.dpsgd(REAL + canaries, RATE * (REAL + canaries), steps=steps)


def tight(canaries: int = 90_000) -> None:
    """Certified share of the claimed epsilon."""
    for epsilon in (1.0, 3.0, 8.0):
        started = time.perf_counter()
        plan = recipe(canaries).calibrate(epsilon, DELTA)
        family = families.ClaimedFamily(observation.claimed_curve(plan))
        claim = whitebox.AuditedClaim(plan.epsilon, DELTA, plan.noise_multiplier, RATE, family)
        verdict = whitebox.audit(white_box(plan, canaries, 1), claim)
        seconds = round(time.perf_counter() - started, 1)
        row = {
            "claimed": plan.epsilon,
            "certified": verdict.bound.epsilon,
            "share": verdict.bound.epsilon / plan.epsilon,
        }
        print(json.dumps(row | {"canaries": canaries, "seconds": seconds}), flush=True)


def sound(
    repetitions: int = 200, canaries: int = 1000, steps: int = 10, confidence: float = 0.95
) -> int:
    """How many of the audits of correct code exceed the claim. Exceeding is asked of the claim's
    own curve: no search.
    """
    plan = recipe(canaries, steps).with_noise(0.8, delta=DELTA)
    family = families.ClaimedFamily(observation.claimed_curve(plan))
    allowed = (1 + family.advantage(1.0)) / 2
    claim = whitebox.AuditedClaim(plan.epsilon, DELTA, plan.noise_multiplier, RATE, family)
    exceeded, plain = 0, 0
    for seed in range(repetitions):
        observed = white_box(plan, canaries, 1000 + seed)
        exceeded += whitebox.best_attack(observed, claim, confidence)[3] > allowed
        right = int(((whitebox.ratio(observed, claim) > 0) == observed.included).sum())
        plain += whitebox.intervals.lower(right, canaries, 1 - confidence) > allowed
    row = {
        "repetitions": repetitions,
        "exceeded": exceeded,
        "stated": 1 - confidence,
        "likelihood_ratio_alone": plain,
    }
    print(json.dumps(row | {"claimed": plan.epsilon, "canaries": canaries}), flush=True)
    return exceeded


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["sound"]:
        sound(*(int(a) for a in sys.argv[2:3]))
    else:
        tight()
