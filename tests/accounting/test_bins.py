"""Balls-in-bins by Monte Carlo: right on average, above the truth with confidence, exact where it
can be checked.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dpfy import accounting
from dpfy.accounting import bins, calibrate
from dpfy.accounting.bins import (
    Adding,
    BinsCurve,
    MonteCarlo,
    Orthogonal,
    Removing,
    ResponsePair,
    upper_bound,
)
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import BallsInBins, Composed, Gaussian, Repeated
from dpfy.core.unit import Adjacency

BANDED = (1.0, 0.6285891602714168, 0.5387694980966745, 0.4933727740616507, 0.4638869464845248, 0.4420219426097662, 0.42439740029205114,  # noqa: E501
          0.4093346792975231, 0.3958722776182447, 0.3833852000006569, 0.37140819898482375, 0.35953378344907844, 0.34732842862344065,  # noqa: E501
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


VERIFIED = {
    "100 bins, low noise": 0.0027,
    "100 bins, high noise": 0.0010,
    "64 bins": 0.0007,
    "64 bins, 16 bands": 0.0013,
}
"""Standard errors of the verified epsilons."""


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_meets_the_verified_epsilon(name):
    """At the verified epsilon delta is 1e-5, known to 3% at worst; false alarm below 1e-5 with five
    standard errors.
    """
    release, epsilon = CASES[name]
    found = BinsCurve(release, 2**16).estimates(epsilon, seed=1, failure=1e-9)
    worst = max(found.values(), key=lambda e: e.mean)
    assert abs(worst.mean - 1e-5) < 5 * math.hypot(worst.standard_error, 3e-7)
    assert worst.standard_error < 2e-6
    assert all(e.bound >= e.mean for e in found.values())
    assert worst is found["remove"]


@pytest.mark.parametrize("name", CASES)
def test_the_certified_epsilon_is_the_verified_one_or_a_little_above(name):
    """Bins that do not overlap leave nothing to chance; the others cost at most a percent of
    confidence.
    """
    release, verified = CASES[name]
    certified = BinsCurve(release).epsilon(1e-5)
    above = 0.01 * verified if name == "64 bins, 16 bands" else 1e-3 * verified
    assert verified - 5 * VERIFIED[name] < certified < verified + 5 * VERIFIED[name] + above
    assert ResponsePair.of(release).gaussian_delta(certified) > 10 * 1e-5


@pytest.mark.parametrize("sigma", [1.0, 8.0])
def test_certified_epsilons_hold_for_fresh_draws(sigma):
    """Five standard errors of an estimate with seeds of its own, at low and at high noise; and they
    are not loose.
    """
    release = event(sigma, banded_gram())
    certified = BinsCurve(release, 2**15).epsilon(1e-5)
    fresh = BinsCurve(release, 2**16).estimates(certified, seed=77, failure=1e-9)
    worst = max(fresh.values(), key=lambda e: e.mean)
    assert worst.mean - 5 * worst.standard_error < 1e-5
    assert worst.mean > 0.75e-5


def test_one_bin_is_the_gaussian_mechanism():
    curve = BinsCurve(event(4.0, np.array([[8.0]])), 2**14)
    assert curve.epsilon(1e-5) == pytest.approx(2.9432252398013663, rel=2e-4)
    assert curve.epsilon(1e-5) >= 2.9432252398013663
    assert curve.delta(2.9432252398013663) == pytest.approx(1e-5, rel=1e-4)


def test_more_bins_amplify_more():
    values = [BinsCurve(event(2.0, 4 * np.eye(m)), 2**14).delta(2.0) for m in (1, 4, 32)]
    assert values[0] > 2 * values[1] > 4 * values[2]


def plane(gram: list[list[float]], epsilon: float) -> dict[str, float]:
    """Two bins: delta in both directions by a sum over a fine grid of the plane."""
    first, second = np.linalg.cholesky(np.array(gram))
    grid = np.linspace(-8, 10, 1801)
    x, y = np.meshgrid(grid, grid)
    cell = (grid[1] - grid[0]) ** 2 / (2 * math.pi)
    q = np.exp(-(x**2 + y**2) / 2) * cell
    p = sum(np.exp(-((x - m[0]) ** 2 + (y - m[1]) ** 2) / 2) for m in (first, second)) / 2 * cell
    raised = math.exp(epsilon)
    return {
        "remove": float(np.maximum(p - raised * q, 0).sum()),
        "add": float(np.maximum(q - raised * p, 0).sum()),
    }


@pytest.mark.parametrize("overlap", [0.0, 1.1, 2.0])
@pytest.mark.parametrize("epsilon", [0.1, 0.8, 2.0])
def test_both_directions_against_numeric_integration(overlap, epsilon):
    gram = [[2.25, overlap], [overlap, 2.25]]
    truth = plane(gram, epsilon)
    found = BinsCurve(event(1.0, np.array(gram)), 2**16).estimates(epsilon, seed=5, failure=1e-9)
    for direction, value in truth.items():
        assert abs(found[direction].mean - value) < 5 * found[direction].standard_error + 1e-5
        assert value - 1e-5 <= found[direction].bound < 1.2 * value + 1e-3
    if not overlap:
        exact = Orthogonal((1.5, 1.5))
        assert exact.removed(epsilon) == pytest.approx(truth["remove"], rel=1e-3)
        assert exact.added(epsilon) == pytest.approx(truth["add"], rel=1e-3)
        assert exact.delta(epsilon) >= truth["remove"] * (1 - 1e-4)


@pytest.mark.parametrize("norms", [(0.6,) * 30, (3.0,) * 8, (1.0, 1.0, 2.0)])
@pytest.mark.parametrize("epsilon", [0.2, 1.5, 4.0])
def test_both_ways_to_convolve_agree_and_chance_agrees_with_them(norms, epsilon):
    exact = Orthogonal(norms)
    strikes = math.exp(epsilon) * np.array([0.8, 1.0])
    put, rounding = exact.puts(strikes)
    for k, call in enumerate(exact.calls(strikes)):
        assert 1 - strikes[k] + put[k] == pytest.approx(call, rel=2e-2, abs=2 * rounding[k])
    found = BinsCurve(event(1.0, np.diag(np.square(norms))), 2**15).estimates(
        epsilon, seed=3, failure=1e-9
    )
    assert (
        abs(found["remove"].mean - exact.removed(epsilon))
        < 5 * found["remove"].standard_error + 1e-3 * exact.removed(epsilon) + 1e-9
    )
    assert (
        abs(found["add"].mean - exact.added(epsilon))
        < 5 * found["add"].standard_error + 1e-3 * exact.added(epsilon) + 1e-9
    )


def test_a_finer_grid_lowers_the_bound(monkeypatch):
    """The error of the grid is on the private side, in both ways of computing."""
    exact, strikes = Orthogonal((0.8,) * 50), np.exp([0.4, 0.5])
    coarse = exact.calls(strikes), exact.puts(strikes)[0]
    monkeypatch.setattr(bins, "DIRECT_CELLS", 2**10)
    monkeypatch.setattr(bins, "LEAST_CELLS", 2**10)
    monkeypatch.setattr(bins, "SPREAD", 1.0)
    assert (exact.calls(strikes) > coarse[0] * 1.001).all()
    assert (exact.puts(strikes)[0] > coarse[1] * (1 + 1e-9)).all()


TILTS = [
    Removing(),
    Removing(2),
    Removing(5),
    Removing(9),
    Removing(stretch=1.5),
    Removing(stretch=3.0),
    Adding(0.0),
    Adding(3.0),
    Adding(1.0),
]


@pytest.mark.parametrize("tilt", TILTS)
def test_every_tilt_has_the_same_mean_and_keeps_its_limit(tilt):
    """Unbiased whatever the tilt, and no draw above the limit that the confidence rests on; two
    bins that overlap, and many.
    """
    gram = [[1.0, 0.4], [0.4, 1.4]]
    pair = ResponsePair.of(event(1.0, np.array(gram)))
    drawn = tilt.draw(pair, 40_000, np.random.default_rng(1))
    for epsilon in (0.2, 1.0):
        values = drawn.values(epsilon)
        truth = plane(gram, epsilon)["remove" if isinstance(tilt, Removing) else "add"]
        assert abs(values.mean() - truth) < 5 * values.std() / 200 + 1e-5
        assert values.min() >= 0
        assert values.max() <= drawn.limit(epsilon)
    many = ResponsePair.of(event(2.0, banded_gram()))
    wide = tilt.draw(many, 20_000, np.random.default_rng(2))
    assert all(wide.values(e).max() <= wide.limit(e) for e in (0.1, 1.0, 3.0))


def test_the_limit_of_several_picks_covers_picks_of_one_bin():
    """The largest weight: all picks the same bin, found by trying all picks of three bins."""
    gram = np.array([[1.0, 0.7, 0.1], [0.7, 1.3, 0.2], [0.1, 0.2, 0.9]])
    pair = ResponsePair.of(event(1.0, gram))
    for picks in (2, 3, 4):
        weights = []
        for chosen in itertools.product(range(3), repeat=picks):
            parts = [np.exp(gram[:, chosen[:a]].sum(axis=1)).mean() for a in range(1, picks)]
            weights.append(math.prod(parts))
        assert math.exp(pair.log_weights[:picks].sum()) >= max(weights) * (1 - 1e-12)


@pytest.mark.parametrize("rate", [0.002, 0.05])
def test_the_confidence_bound_covers_what_it_promises(rate):
    """Rare jackpots are what a normal approximation misses. Failure 0.1, 2,000 trials: at most 250
    misses (false alarm 1e-4).
    """
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


def test_without_room_for_the_confidence_nothing_is_gained_by_overlapping_bins():
    release = event(2.0, banded_gram())
    assert ResponsePair.of(release).gaussian_delta(BinsCurve(release).epsilon(1e-9)) <= 1e-9
    apart = CASES["64 bins"][0]
    assert BinsCurve(apart).epsilon(1e-9) < ResponsePair.of(apart).gaussian_delta(0) * 10


def test_calibration_ends_on_the_private_side():
    gram = CASES["64 bins"][0].gram
    noise = calibrate.noise(lambda s: BallsInBins(s, gram), 2.5, 1e-5, accountant="monte-carlo")
    assert noise == pytest.approx(2.0, rel=4e-3)
    assert accounting.epsilon(BallsInBins(noise, gram), 1e-5, accountant="monte-carlo") <= 2.5


@pytest.mark.parametrize("name", ["pld", "zcdp", "gdp"])
def test_an_accountant_without_a_bound_names_one_that_has_it(name):
    release = CASES["64 bins"][0]
    for whole in (release, Repeated(release, 2), Composed((Gaussian(1.0), release))):
        with pytest.raises(Unsupported, match=r"BallsInBins .* use --accountant tight"):
            accounting.curve(whole, accountant=name)


@pytest.mark.parametrize("name", ["tight", "rdp", "advanced", "basic"])
def test_the_others_compose_it_with_what_else_was_released(name):
    release = event(2.0, 4.0 * np.eye(3))
    alone = accounting.epsilon(release, 1e-5, accountant=name)
    assert BinsCurve(release).epsilon(1e-5) * 0.999 < alone
    assert accounting.epsilon(Composed((Gaussian(1.0), release)), 1e-5, accountant=name) > alone
    assert name != "tight" or alone == BinsCurve(release).epsilon(1e-5)


def test_the_chance_of_failure_is_charged_for_every_reading_of_a_calibration(monkeypatch):
    """A calibration keeps the noise whose draws look best: each reading gets its part of the
    chance, and no search makes more of them.
    """
    gram, chances, readings = 8 * np.eye(4) + 2, [], []
    holds, certified = bins._holds, BinsCurve.certified

    def noted(pilot, fresh, epsilon, goal, failure):
        chances.append(failure)
        return holds(pilot, fresh, epsilon, goal, failure)

    def counted(curve, delta):
        readings.append(delta)
        return certified(curve, delta)

    monkeypatch.setattr(bins, "_holds", noted)
    monkeypatch.setattr(BinsCurve, "certified", counted)
    calibrate.noise(lambda sigma: event(sigma, gram), 2.0, 1e-5, accountant="monte-carlo")
    assert 1 < len(readings) <= MonteCarlo().most_readings < bins.EVALUATIONS
    first = (
        max(chances) * 2 * bins.GRID
    )  # both directions, every epsilon of the grid; later attempts get a half, a quarter, ...
    assert 2 * first * bins.EVALUATIONS <= bins.FAILURE * (1 + 1e-9)
    assert min(chances) > 0


def test_a_calibration_that_would_need_more_readings_than_are_charged_for_is_refused(monkeypatch):
    gram = 8 * np.eye(4) + 2
    monkeypatch.setattr(bins.MonteCarlo, "most_readings", 2)
    monkeypatch.setattr(
        bins.MonteCarlo.__init__, "__defaults__", (bins.SAMPLES, "monte-carlo", 2e-3, 2)
    )
    with pytest.raises(Unsupported, match="more than 2 readings"):
        calibrate.noise(lambda sigma: event(sigma, gram), 0.7, 1e-5, accountant="monte-carlo")
