"""Noise made of shares, against exact computations: laws of sums by convolution, divergences and
deltas by adding up over all outcomes.

Random settings; upper bounds lie above the truth everywhere, near it where shares are not tiny, and
follow noise, shares and rounds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ive, logsumexp

from dpfy import accounting
from dpfy.accounting.rdp import divergences
from dpfy.accounting.rules import shares as rules
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
ORDERS = (1.5, 2.0, 3.7, 8.0, 20.0)


def discrete_gaussian(sigma: float, reach: int) -> np.ndarray:
    x = np.arange(-reach, reach + 1.0)
    p = np.exp(-(x**2) / (2 * sigma**2))
    return p / p.sum()


def summed(sigma: float, shares: int) -> np.ndarray:
    """The law of the sum of discrete Gaussians: all terms are positive, so that far tails are as
    exact as the middle.
    """
    total = one = discrete_gaussian(sigma, math.ceil(14 * sigma))
    for _ in range(shares - 1):
        total = np.convolve(total, one)
    return total


def skellam(variance: float) -> np.ndarray:
    reach = math.ceil(16 * math.sqrt(variance) + 30)
    return ive(np.abs(np.arange(-reach, reach + 1)), variance)


def shifted(law: np.ndarray, by: int) -> tuple[np.ndarray, np.ndarray]:
    """The law and the same moved, where both are far from underflow."""
    p, q = law[by:], law[: len(law) - by]
    good = (p > 1e-250) & (q > 1e-250)
    return p[good], q[good]


def renyi(law: np.ndarray, by: int, order: float) -> float:
    """Of the moved law against the law: the larger of both directions."""
    p, q = (np.log(part) for part in shifted(law, by))
    return max(float(logsumexp(order * a + (1 - order) * b)) for a, b in ((p, q), (q, p))) / (
        order - 1
    )


def delta(law: np.ndarray, by: int, epsilon: float) -> float:
    p, q = shifted(law, by)
    return float(np.maximum(q - math.exp(epsilon) * p, 0).sum())


def settings(count: int, seed: int, least: float) -> list[tuple[float, int, int]]:
    rng = np.random.default_rng(seed)
    return [
        (float(rng.uniform(least, 3.5)), int(rng.integers(2, 16)), int(rng.integers(1, 8)))
        for _ in range(count)
    ]


@pytest.mark.parametrize(("share", "shares", "by"), settings(12, 1, 0.6))
def test_sums_of_discrete_gaussians_are_within_tau(share: float, shares: int, by: int) -> None:
    law = summed(share, shares)
    reach = len(law) // 2
    one = discrete_gaussian(share * math.sqrt(shares), reach)
    near = slice(
        reach - math.ceil(9 * share * math.sqrt(shares)),
        reach + math.ceil(9 * share * math.sqrt(shares)) + 1,
    )
    assert np.abs(np.log(law[near] / one[near])).max() <= rules.apart(share, shares) + 1e-12


@pytest.mark.parametrize(("share", "shares", "by"), settings(12, 2, 0.6))
def test_discrete_gaussians_are_billed_above_the_truth(share: float, shares: int, by: int) -> None:
    law, event = summed(share, shares), ev.DistributedDiscreteGaussian(share, shares, by**2, 1)
    orders = [
        order for order in ORDERS if order * by < 9 * share * math.sqrt(shares)
    ]  # beyond, the tails of the law are cut
    exact = np.array([renyi(law, by, order) for order in orders])
    billed = divergences(event, ZERO, orders)
    assert (exact <= billed * (1 + 1e-9)).all()
    if share > 1.2:
        assert (billed <= exact * 1.02 + 1e-6).all()
    curve = accounting.curve(event, adjacency=ZERO)
    for epsilon in (0.1, 0.5, 1.0, 3.0):
        assert delta(law, by, epsilon) <= curve.delta(epsilon) * (1 + 1e-9) + 1e-14


def test_skellam_is_billed_above_the_truth_and_near_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        mu, by = float(np.exp(rng.uniform(math.log(0.5), math.log(3000)))), int(rng.integers(1, 9))
        event, law = ev.DistributedSkellam(math.sqrt(mu / 10), 10, by**2, 1), skellam(mu)
        exact = np.array([renyi(law, by, order) for order in ORDERS])
        billed = divergences(event, ZERO, ORDERS)
        assert (exact <= billed * (1 + 1e-9)).all(), (mu, by)
        if mu > 500:
            assert (billed[[1, 3]] <= exact[[1, 3]] * 1.02).all(), (mu, by)  # whole orders


@pytest.mark.parametrize(
    ("event", "order", "published"),
    [
        (
            ev.DistributedSkellam(2.0, 25, 4, 1),
            3.0,
            0.06 + (5 * 4 + 6 * 2) / 40_000,
        ),  # L1 is at most the root of the coordinates, times 2
        (
            ev.DistributedSkellam(2.0, 25, 4, 9),
            3.0,
            0.06 + (5 * 4 + 6 * 4) / 40_000,
        ),  # or the squared length, of whole numbers
        (ev.DistributedSkellam(1.0, 1, 1, 4), 8.0, 4 + 1.5),
    ],
)
def test_skellam_is_billed_by_the_published_bound(
    event: ev.Event, order: float, published: float
) -> None:
    """Agarwal, Kairouz & Liu 2021, Theorem 3.5; what is exact in one dimension is below it, and
    below the Gaussian's.
    """
    assert divergences(event, ZERO, (order,))[0] == pytest.approx(published, rel=1e-9)


def test_many_coordinates_add_up() -> None:
    """A move by several coordinates, each by itself: divergences add; the bill knows only the
    length.
    """
    rng = np.random.default_rng(4)
    for _ in range(10):
        moved = rng.integers(0, 4, size=6)
        squared = int((moved**2).sum()) or 1
        sums, poisson = summed(1.4, 5), skellam(60.0)
        for order in (2.0, 5.0):
            for law, event in (
                (sums, ev.DistributedDiscreteGaussian(1.4, 5, squared, 6)),
                (poisson, ev.DistributedSkellam(math.sqrt(12.0), 5, squared, 6)),
            ):
                exact = sum(renyi(law, int(by), order) for by in moved if by)
                assert exact <= divergences(event, ZERO, (order,))[0] * (1 + 1e-9)


def _epsilon(event: ev.Event, rounds: int = 1, adjacency: Adjacency = ZERO) -> float:
    return accounting.epsilon(ev.Repeated(event, rounds), 1e-6, adjacency=adjacency)


@pytest.mark.parametrize("kind", [ev.DistributedDiscreteGaussian, ev.DistributedSkellam])
def test_bills_follow_noise_shares_length_coordinates_and_rounds(kind: type) -> None:
    rng = np.random.default_rng(5)
    for _ in range(6):
        share, shares = float(rng.uniform(0.7, 4)), int(rng.integers(50, 2000))
        squared, d = int(rng.integers(1, 1 + int(shares * share**2))), int(2 ** rng.integers(2, 18))
        base = _epsilon(kind(share, shares, squared, d))
        assert _epsilon(kind(share * 1.05, shares, squared, d)) <= base
        assert _epsilon(kind(share, shares + 7, squared, d)) <= base
        assert _epsilon(kind(share, shares, squared + 3, d)) >= base
        assert _epsilon(kind(share, shares, squared, 2 * d)) >= base
        assert _epsilon(kind(share, shares, squared, d), 3) > base
        assert _epsilon(kind(share, shares, squared, d), 1, REPLACE) > base


@pytest.mark.parametrize("rounds", [1, 30])
def test_large_scales_are_gaussian(rounds: int) -> None:
    real = _epsilon(ev.Gaussian(2.0), rounds)
    found = [
        _epsilon(
            ev.DistributedDiscreteGaussian(
                2.0 * 1000 * k / math.sqrt(100), 100, (1000 * k) ** 2, 4096
            ),
            rounds,
        )
        for k in (1, 10)
    ]
    assert all(real <= value <= real * (1 + 1e-4) for value in found)
    by_rdp = accounting.epsilon(
        ev.Repeated(ev.Gaussian(2.0), rounds), 1e-6, adjacency=ZERO, accountant="rdp"
    )
    skellam = _epsilon(
        ev.DistributedSkellam(2.0 * 10000 / math.sqrt(100), 100, 10**8, 4096), rounds
    )
    assert by_rdp * (1 - 1e-6) <= skellam <= by_rdp * (1 + 1e-2)


def test_shares_come_and_go_with_a_unit_that_is_added_or_removed() -> None:
    for event in (
        ev.DistributedDiscreteGaussian(4.0, 50, 9, 8),
        ev.DistributedSkellam(4.0, 50, 9, 8),
    ):
        for accountant in ("tight", "rdp"):
            with pytest.raises(Unsupported, match="zero-out or replace-one"):
                accounting.epsilon(event, 1e-6, adjacency=ADD, accountant=accountant)
        with pytest.raises(Unsupported, match="Poisson sampling"):
            accounting.epsilon(ev.PoissonSampled(0.1, event), 1e-6, adjacency=ZERO)


@pytest.mark.parametrize("share", [0.49, 1e-3])
def test_tiny_discrete_shares_are_refused(share: float) -> None:
    with pytest.raises(InvalidInput, match="Skellam"):
        _epsilon(ev.DistributedDiscreteGaussian(share, 10**6, 9, 8))
    assert _epsilon(ev.DistributedSkellam(share, 10**6, 9, 8)) > 0


def test_a_sum_that_is_no_longer_near_a_gaussian_is_billed_by_its_divergences() -> None:
    """Where the chance to tell all is not tiny the tight accountant is the Rényi one; and never
    below the way by a Gaussian.
    """
    event = ev.DistributedDiscreteGaussian(1.2, 1000, 400, 2**14)
    assert rules.tells_all(event) > rules.TELLS_ALL
    gaussian = _epsilon(ev.Gaussian(math.sqrt(rules.variance(event) / 400)))
    assert _epsilon(event) == pytest.approx(
        accounting.epsilon(event, 1e-6, adjacency=ZERO, accountant="rdp"), rel=1e-6
    )
    assert _epsilon(event) > gaussian
