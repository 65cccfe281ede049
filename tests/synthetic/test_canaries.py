"""Canary rows: outliers in a rare cell, over 500 syntheses with them and 500 without; an attacker
who knows everything else.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfy.audit.mechanism import audit
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.synthetic.counts import count
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.methods import SynthesisTask
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms, plan
from dpfy.synthetic.releases import MarginalReleases

TRIALS = 500
DOMAIN = Domain.of({"job": 3, "rich": 2})
WITHOUT = np.array([[k % 2, k % 2] for k in range(12)])
WITH = np.concatenate([WITHOUT, [[2, 1]]])
"""The canary is the only one with job 2."""
TERMS = SynthesisTerms(1.0, 1e-5)


def syntheses(present: bool, trials: int) -> np.ndarray:
    """What the attacker makes of each synthesis: noisy counts of the canary's cells, weighted by
    their precision, and its rows.
    """
    held = plan(DOMAIN, TERMS, SynthesisOptions("mst"))
    marginals = count(WITH if present else WITHOUT, DOMAIN, held.weights)
    scores = []
    for trial in range(trials):
        permit = mock_permit(
            held.claim.event, held.claim.releases, held.claim.name, held.claim.adjacency
        )
        meter = MarginalReleases(
            held.claim, marginals, permit, Randomness.for_tests(trial + (1 << 20) * present)
        )
        model = held.method.rule(SynthesisTask(DOMAIN, held.weights, meter, 64), held.method)
        rows = model.rows(12, np.random.default_rng(trial))
        cells = [
            (m.values.numpy()[tuple((2, 1)[v] for v in m.clique)], m.deviation)
            for m in meter.released
        ]
        score = sum(value / deviation**2 for value, deviation in cells)
        scores.append(score + 1e-6 * float((rows[:, 0] == 2).sum()))
    return np.array(scores)


@pytest.mark.slow
def test_canaries_never_show_more_than_the_claim():
    """False alarms: 1 in 100; the next test shows that the attack finds a mistake."""
    found = audit(syntheses, epsilon=1.0, delta=1e-5, trials=TRIALS, confidence=0.99)
    assert not found.violated
    assert found.bound.detail["most"] > 1.0


@pytest.mark.slow
def test_canaries_that_are_counted_with_too_little_noise_are_found(monkeypatch):
    """The same attack where a tenth of the noise is added: far above the claim."""
    real = MarginalReleases.measure

    def quiet(self, clique, noise_multiplier):
        found = real(self, clique, noise_multiplier)
        exact = torch.from_numpy(self.marginals.tables[clique].astype(np.float64))
        found.values.copy_(exact + (found.values - exact) / 10)
        return found

    monkeypatch.setattr(MarginalReleases, "measure", quiet)
    found = audit(syntheses, epsilon=1.0, delta=1e-5, trials=TRIALS, confidence=0.99)
    assert found.violated
