"""Audits of answers: most of the claim is certified and never more."""

from __future__ import annotations

import pytest

from dpfy.core.errors import Unsupported
from dpfy.mechanisms import votes
from dpfy.prediction import audit
from dpfy.prediction.rules import ConfidentVotes, GaussianVotes


def test_close_votes_certify_most_of_what_is_billed() -> None:
    """1,200 trials of 15 answers: at least 0.7 of epsilon at 95%; the true ratio is about 0.9, so a
    miss has a chance below 1e-3.
    """
    verdict = audit.audit_votes(GaussianVotes(2, 2.2), answers=15, trials=1200, seed=1)
    assert not verdict.violated
    assert verdict.bound.epsilon >= 0.7 * verdict.claimed


def test_noise_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = votes.NoisyCounts
    monkeypatch.setattr(
        votes, "NoisyCounts", lambda counts, sigma, bits: real(counts, sigma * 2 / 3, bits)
    )
    assert audit.audit_votes(GaussianVotes(2, 2.2), answers=15, trials=1200, seed=1).violated


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(Unsupported, match="gaussian"):
        audit.audit_votes(ConfidentVotes(2, 2.0, 3.0, 1.0), answers=5, trials=100)
