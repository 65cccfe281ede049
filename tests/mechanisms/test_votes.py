"""Votes with real Gaussian noise: their law, how closely the noise is known, and what is
refused.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.mechanisms import votes
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.votes import MOVED, GaussianArgmax, GaussianThreshold, NoisyCounts

SECRET = Randomness.for_tests(5)
ACCEPT, REJECT = 1e-4, 1e-9


def law(counts: np.ndarray, sigma: float) -> np.ndarray:
    """The chance of every class, by a fine sum over the winning count."""
    x = np.linspace(counts.min() - 9 * sigma, counts.max() + 9 * sigma, 20_001)
    z = (x - counts[:, None]) / sigma
    below = np.maximum(ndtr(z), 1e-300)
    wins = np.exp(-(z**2) / 2) * below.prod(axis=0) / below
    return wins.sum(axis=1) / wins.sum()


def drawn(counts: np.ndarray, sigma: float, times: int, name: str) -> np.ndarray:
    mechanism = GaussianArgmax(sigma, len(counts))
    permit = mock_permit(mechanism.event, times, name)
    return np.bincount(
        [
            mechanism.release(Bounded(counts, MOVED), permit, SECRET, step).value
            for step in range(times)
        ],
        minlength=len(counts),
    )


@pytest.mark.parametrize(
    ("counts", "sigma"), [((20, 17, 9, 4), 6.0), ((5, 5, 5), 0.5), ((3, 0), 300.0)]
)
def test_winners_have_the_stated_law(counts: tuple[int, ...], sigma: float) -> None:
    """False alarms 1e-4; noise of 2/3 or 3/2 would be found, where it changes the law at all."""
    held, times = np.array(counts), 6000
    found = drawn(held, sigma, times, f"law {sigma}")
    assert stats.chisquare(found, law(held, sigma) * times).pvalue > ACCEPT
    if counts == (20, 17, 9, 4):
        for factor in (2 / 3, 3 / 2):
            assert stats.chisquare(found, law(held, sigma * factor) * times).pvalue < REJECT


def test_checks_have_the_stated_law() -> None:
    check, times = GaussianThreshold(30.0, 200.0), 6000
    permit = mock_permit(check.event, times, "checks")
    above = sum(
        check.release(Bounded(185, Bound.scalar(1.0)), permit, SECRET, step).value
        for step in range(times)
    )
    for factor, held in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        chance = float(ndtr(-15 / (30 * factor)))
        assert bool(stats.binomtest(above, times, chance).pvalue > ACCEPT) is held


def test_ties_are_decided_by_finer_noise_and_the_sum_keeps_its_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a lattice so coarse that the real part is needed nearly always, the law is the same."""
    monkeypatch.setattr(votes, "FINE", 4)
    asked = []
    refine = NoisyCounts.refine
    monkeypatch.setattr(
        NoisyCounts, "refine", lambda self: (asked.append(self.exponent), refine(self))[1]
    )
    held, times = np.array([20, 17, 9, 4]), 3000
    found = drawn(held, 6.0, times, "coarse")
    assert len(asked) > times
    assert (
        stats.chisquare(found, law(held, math.hypot(6.0, 4 / 2 ** (4 - 3))) * times).pvalue > ACCEPT
    )


def test_noise_is_never_less_than_billed_and_hardly_more() -> None:
    for sigma in (1e-3, 0.7, 40.0, 12345.678, 1e11):
        noisy = NoisyCounts(
            np.zeros(4000, np.int64), Fraction(sigma), Bits(SECRET, f"scale {sigma}", 0)
        )
        values = np.array([math.ldexp(v, -noisy.exponent) for v in noisy.steps]) / sigma
        assert stats.kstest(values, "norm").pvalue > ACCEPT
        for factor in (2 / 3, 3 / 2):
            assert stats.kstest(values, "norm", (0, factor)).pvalue < REJECT


def test_a_permit_pays_for_one_release_of_its_event() -> None:
    mechanism = GaussianArgmax(10.0, 3)
    held = Bounded(np.array([3, 2, 1]), MOVED)
    permit = mock_permit(mechanism.event, 2)
    mechanism.release(held, permit, SECRET, 0)
    with pytest.raises(InvalidInput, match="released before"):
        mechanism.release(held, permit, SECRET, 0)
    with pytest.raises(InvalidInput, match="covers 2 releases"):
        mechanism.release(held, permit, SECRET, 2)
    with pytest.raises(InvalidInput, match="not what the permit"):
        GaussianArgmax(9.0, 3).release(held, permit, SECRET, 1)
    assert mechanism.event == events.NoisyArgmax(10.0, 3)


def test_what_one_unit_moves_must_be_one_vote() -> None:
    mechanism, check = GaussianArgmax(10.0, 3), GaussianThreshold(10.0, 2.0)
    permit = mock_permit(mechanism.event, 1)
    for bound, error in (
        (Bound(l1=4.0, linf=1.0), InvalidInput),
        (Bound(l1=2.0, linf=2.0), InvalidInput),
        (Bound(), Unsupported),
    ):
        with pytest.raises(error, match=r"bound|norm"):
            mechanism.release(Bounded(np.array([3, 2, 1]), bound), permit, SECRET)
        if bound.linf != 1.0:
            with pytest.raises(error, match=r"bound|norm"):
                check.release(Bounded(3, bound), mock_permit(check.event, 1), SECRET)
    for wrong in (
        np.array([3, 2]),
        np.array([3.0, 2.0, 1.0]),
        np.array([3, -1, 1]),
        np.array([3, 2, 1 << 30]),
    ):
        with pytest.raises(InvalidInput, match="votes"):
            mechanism.release(Bounded(wrong, MOVED), permit, SECRET)
    mechanism.release(
        Bounded(np.array([3, 2, 1]), MOVED), permit, SECRET
    )  # nothing was spent before
    for wrong_sigma in (0.0, math.nan, math.inf, 1e13, -1.0):
        with pytest.raises(InvalidInput):
            GaussianArgmax(wrong_sigma, 3)
        with pytest.raises(InvalidInput):
            GaussianThreshold(wrong_sigma, 3.0)
    with pytest.raises(InvalidInput):
        GaussianThreshold(1.0, math.inf)
