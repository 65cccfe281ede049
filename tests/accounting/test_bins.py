"""Balls-in-bins by Monte Carlo: right on average, above the truth with confidence, exact where it can be checked."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfy import accounting
from dpfy.accounting.bins import BinsCurve, MonteCarlo, Pair, upper_bound
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import BallsInBins, Composed, Gaussian, Repeated
from dpfy.core.unit import Adjacency

BANDED = (1.0, 0.6285891602714168, 0.5387694980966745, 0.4933727740616507, 0.4638869464845248, 0.4420219426097662, 0.42439740029205114,
          0.4093346792975231, 0.3958722776182447, 0.3833852000006569, 0.37140819898482375, 0.35953378344907844, 0.34732842862344065,
          0.334218873377682, 0.31924018551803357, 0.3001374190731664)  # fmt: skip


def event(sigma: float, gram: np.ndarray) -> BallsInBins:
    return BallsInBins(sigma, tuple(tuple(float(v) for v in row) for row in gram))


def banded_gram() -> np.ndarray:
    c = np.zeros(512)
    c[:16] = BANDED / np.linalg.norm(BANDED)
    matrix = np.array([[c[i - j] if i >= j else 0.0 for j in range(512)] for i in range(512)])
    responses = np.array([matrix[:, j::64].sum(axis=1) for j in range(64)])
    return responses @ responses.T


CASES = {
    "100 bins, low noise": (event(1.0, 10 * np.eye(100)), 13.253748480887074),
    "100 bins, high noise": (event(4.0, 10 * np.eye(100)), 0.34347057849585455),
    "64 bins": (event(2.0, 8 * np.eye(64)), 2.5004015680665286),
    "64 bins, 16 bands": (event(2.0, banded_gram()), 3.8838209847673935),
}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_meets_the_verified_epsilon(name):
    """At the verified epsilon delta is 1e-5, known to 3% at worst; false alarm below 1e-5 with five standard errors."""
    release, epsilon = CASES[name]
    found = BinsCurve(release, 2**17).estimates(epsilon, seed=1, failure=1e-9)
    worst = max(found.values(), key=lambda e: e.mean)
    assert abs(worst.mean - 1e-5) < 5 * math.hypot(worst.standard_error, 3e-7)
    assert worst.standard_error < 6e-6
    assert all(e.bound >= e.mean for e in found.values())
    assert worst is found["remove"]


@pytest.mark.parametrize("name", ["100 bins, low noise", pytest.param("64 bins, 16 bands", marks=pytest.mark.slow)])
def test_the_certified_epsilon_is_above_the_truth_and_below_no_amplification(name):
    release, truth = CASES[name]
    certified = BinsCurve(release, 2**16).epsilon(1e-5)
    assert truth < certified < truth * 1.12
    assert Pair.of(release).gaussian_delta(certified) > 10 * 1e-5


def test_one_bin_is_the_gaussian_mechanism():
    curve = BinsCurve(event(4.0, np.array([[8.0]])), 2**14)
    assert curve.epsilon(1e-5) == pytest.approx(2.9432252398013663, rel=2e-3)
    assert curve.epsilon(1e-5) >= 2.9432252398013663
    assert curve.delta(2.9432252398013663) == pytest.approx(1e-5, rel=2e-2)


def test_more_bins_amplify_more():
    values = [BinsCurve(event(2.0, 4 * np.eye(m)), 2**14).delta(2.0) for m in (1, 4, 32)]
    assert values[0] > 2 * values[1] > 4 * values[2]


def test_both_directions_against_numeric_integration():
    """Two orthogonal bins: delta by a sum over a fine grid of the plane."""
    norm, epsilon = 1.5, 0.8
    grid = np.linspace(-8, 10, 1801)
    x, y = np.meshgrid(grid, grid)
    cell = (grid[1] - grid[0]) ** 2 / (2 * math.pi)
    q = np.exp(-(x**2 + y**2) / 2) * cell
    p = (np.exp(-((x - norm) ** 2 + y**2) / 2) + np.exp(-(x**2 + (y - norm) ** 2) / 2)) / 2 * cell
    truth = {"remove": np.maximum(p - math.exp(epsilon) * q, 0).sum(), "add": np.maximum(q - math.exp(epsilon) * p, 0).sum()}
    found = BinsCurve(event(1.0, norm**2 * np.eye(2)), 2**17).estimates(epsilon, seed=5, failure=1e-9)
    for direction, value in truth.items():
        assert abs(found[direction].mean - value) < 5 * found[direction].standard_error + 1e-5
        assert found[direction].bound >= value
    overlap = event(1.0, norm**2 * np.array([[1.0, 0.5], [0.5, 1.0]]))
    angle = math.acos(0.5)
    far = norm * np.array([math.cos(angle), math.sin(angle)])
    p = (np.exp(-((x - norm) ** 2 + y**2) / 2) + np.exp(-((x - far[0]) ** 2 + (y - far[1]) ** 2) / 2)) / 2 * cell
    found = BinsCurve(overlap, 2**17).estimates(epsilon, seed=6, failure=1e-9)
    assert abs(found["remove"].mean - np.maximum(p - math.exp(epsilon) * q, 0).sum()) < 5 * found["remove"].standard_error + 1e-5
    assert abs(found["add"].mean - np.maximum(q - math.exp(epsilon) * p, 0).sum()) < 5 * found["add"].standard_error + 1e-5


@pytest.mark.parametrize("rate", [0.002, 0.05])
def test_the_confidence_bound_covers_what_it_promises(rate):
    """Rare jackpots are what a normal approximation misses. Failure 0.1, 2,000 trials: at most 250 misses (false alarm 1e-4)."""
    rng = np.random.default_rng(0)
    draws = (rng.random((2000, 500)) < rate).astype(float)
    bounds = np.array([upper_bound(row, 1.0, rate, 0.1) for row in draws])
    assert (bounds < rate).sum() <= 250
    assert np.median(bounds) < rate + 5 * math.sqrt(rate / 500) + 0.01


def test_the_confidence_bound_of_draws_below_zero_is_a_delta():
    assert 0 <= upper_bound(np.full(1000, -0.3), 0.2, 0.01, 1e-9) <= 0.2


def test_what_it_does_not_read():
    accountant = MonteCarlo()
    release = CASES["64 bins"][0]
    assert accountant.why_not(release, Adjacency.ADD_OR_REMOVE_ONE) is None
    with pytest.raises(Unsupported, match="--accountant tight"):
        accountant.curve(Gaussian(1.0), Adjacency.ADD_OR_REMOVE_ONE)
    with pytest.raises(Unsupported, match="exactly one"):
        accountant.curve(Repeated(release, 2), Adjacency.ADD_OR_REMOVE_ONE)
    with pytest.raises(Unsupported, match="add-or-remove-one"):
        accountant.curve(release, Adjacency.REPLACE_ONE)
    with pytest.raises(InvalidInput, match="at least 0"):
        BallsInBins(1.0, ((1.0, -0.1), (-0.1, 1.0)))
    with pytest.raises(InvalidInput, match="square"):
        BallsInBins(1.0, ((1.0, 0.1),))
    assert BinsCurve(release).epsilon(1e-9) == math.inf


@pytest.mark.parametrize("name", [name for name in accounting.TABLE if name != "monte-carlo"])
def test_every_other_accountant_names_this_one_as_the_way_out(name):
    release = CASES["64 bins"][0]
    for whole in (release, Repeated(release, 2), Composed((Gaussian(1.0), release))):
        with pytest.raises(Unsupported, match=r"BallsInBins .* use --accountant monte-carlo"):
            accounting.curve(whole, accountant=name)
