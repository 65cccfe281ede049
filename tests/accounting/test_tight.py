"""The tight accountant brackets the truth: golden values, closed forms, direct integration,
inversion of the MGF, tiny deltas.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr

from dpfy import accounting
from dpfy.core import events as ev
from dpfy.core.unit import Adjacency

PAIR = Adjacency.ADD_OR_REMOVE_ONE

GOLDEN = [  # sampling rate, noise multiplier, steps, delta, epsilon: converged to the digits given
    (0.001, 0.5, 1000, 1e-5, 3.238878),
    (0.001, 1.0, 10_000, 1e-6, 0.55514),
    (0.001, 0.5, 1_000_000, 1e-8, 63.332523),
    (0.005, 1.0, 200, 1e-6, 0.586786),
    (0.005, 1.0, 20_000, 1e-6, 4.610567),
    (0.01, 1.0, 10_000, 1e-10, 9.316139),
    (0.05, 4.0, 100, 1e-5, 0.461806),
    (0.05, 1.0, 100, 1e-5, 3.502148),
    (0.05, 4.0, 1_000_000, 1e-5, 133.679115),
    (0.01, 1.0, 10_000, 1e-9, 8.76544),
    (0.01, 1.0, 10_000, 1e-12, 10.3467),
]


def _bounds(rate: float, noise: float, steps: int, delta: float) -> tuple[float, float]:
    curve = accounting.curve(
        ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(noise)), steps), accountant="tight"
    )
    lower = curve.epsilon_lower(delta)
    assert lower is not None
    return lower, curve.epsilon(delta)


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "epsilon"), GOLDEN)
def test_golden_values_lie_between_the_bounds(
    rate: float, noise: float, steps: int, delta: float, epsilon: float
) -> None:
    lower, upper = _bounds(rate, noise, steps, delta)
    digits = 5e-7 if epsilon < 100 and delta > 1e-12 else 5e-5  # the golden values are rounded
    assert lower <= epsilon + digits
    assert upper >= epsilon - digits
    assert upper - lower <= 1e-4 * upper


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "delta", "noise"),
    [(0.005, 20_000, 3, 1e-6, 1.2954), (0.05, 10_000, 8, 1e-6, 3.35293)],
)
def test_golden_calibration(
    rate: float, steps: int, epsilon: float, delta: float, noise: float
) -> None:
    found = accounting.calibrate.noise(
        lambda s: ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(s)), steps), epsilon, delta
    )
    assert found == pytest.approx(noise, rel=1e-4)


def test_tiny_deltas_are_monotone_and_smooth() -> None:
    deltas = [10.0**-k for k in range(3, 21)]
    values = [_bounds(0.01, 1.0, 1000, d) for d in deltas]
    uppers = [u for _, u in values]
    assert all(u - low <= 1e-4 * u for low, u in values)
    steps = np.diff(uppers)
    assert (steps > 0).all()
    assert (np.abs(np.diff(steps)) < 0.2 * steps[:-1]).all()


@pytest.mark.parametrize("delta", [1e-3, 1e-8, 1e-15])
@pytest.mark.parametrize("noise", [0.5, 3.0, 40.0])
def test_rate_one_is_the_exact_gaussian(noise: float, delta: float) -> None:
    """And a rate a hair below one, which takes the numeric path, agrees."""
    lower, upper = _bounds(1.0, noise, 10, delta)
    mu = math.sqrt(10) / noise

    def exact(e: float) -> float:
        return float(ndtr(mu / 2 - e / mu) - math.exp(e + log_ndtr(-mu / 2 - e / mu)))

    if upper > 0:
        assert exact(upper) <= delta * (1 + 1e-6)
        assert upper - lower <= 1e-9 * (1 + upper)
    low, high = _bounds(1 - 1e-12, noise, 10, delta)
    assert low <= upper + 1e-9
    assert high >= upper - 1e-9
    assert high - low <= max(1e-3 * high, 1e-4)


def _one_step(rate: float, noise: float, epsilon: float) -> float:
    """delta of one subsampled Gaussian at epsilon by closed form, the worse of both directions."""

    def tails(x: float, sign: int) -> tuple[float, float]:
        return float(ndtr(-sign * x / noise)), float(ndtr(-sign * (x - 1) / noise))

    values = [0.0]
    if (ratio := (math.expm1(epsilon) + rate) / rate) > 0:
        zero, one = tails(noise**2 * math.log(ratio) + 0.5, 1)
        values.append((1 - rate) * zero + rate * one - math.exp(epsilon) * zero)
    if (ratio := (math.expm1(-epsilon) + rate) / rate) > 0:
        zero, one = tails(noise**2 * math.log(ratio) + 0.5, -1)
        values.append(zero - math.exp(epsilon) * ((1 - rate) * zero + rate * one))
    return max(values)


@pytest.mark.parametrize("delta", [1e-4, 1e-7, 1e-10])
@pytest.mark.parametrize(("rate", "noise"), [(0.5, 0.5), (0.01, 0.7), (0.1, 5.0), (0.9, 1.0)])
def test_one_step_is_direct_integration(rate: float, noise: float, delta: float) -> None:
    lower, upper = _bounds(rate, noise, 1, delta)
    assert _one_step(rate, noise, upper) <= delta * (1 + 1e-5)
    if lower > 0:
        assert _one_step(rate, noise, lower) >= delta * (1 - 1e-5)
    assert upper - lower <= max(1e-3 * upper, 1e-4)


def _inverted(rate: float, noise: float, steps: int, epsilon: float, added: bool) -> float | None:
    """delta at epsilon by inverting the moment generating function along a line; None where that
    does not converge.

    Independent of the engine: trapezoid sums in x and in t, no rounding of losses, no FFT.
    """
    width = 14 * noise

    def log_ratio(x: np.ndarray) -> np.ndarray:
        y = (2 * x - 1) / (2 * noise**2)
        return np.where(y < 30, np.log1p(rate * np.expm1(np.minimum(y, 30))), y + math.log(rate))

    def log_mgf(c: float, x: np.ndarray) -> tuple[float, float]:
        power = -c if added else c + 1
        e = power * log_ratio(x) - x**2 / (2 * noise**2)
        w = np.exp(e - e.max())
        loss = -log_ratio(x) if added else log_ratio(x)
        mean = float((w @ loss) / w.sum())
        return float(
            e.max() + np.log(w.sum() * (x[1] - x[0]) / noise / math.sqrt(2 * math.pi))
        ), float(w @ (loss - mean) ** 2 / w.sum())

    def grid(c: float, count: int) -> np.ndarray:
        return np.linspace(-width, width + (0 if added else c + 1), count)

    tilts = np.geomspace(0.02, 2000, 120)
    bound = [
        steps * log_mgf(c, grid(c, 1200))[0] - c * epsilon - math.log(c * (1 + c)) for c in tilts
    ]
    c = float(tilts[int(np.argmin(bound))])
    _, variance = log_mgf(c, grid(c, 4000))
    period = 24 * math.sqrt(steps * variance) + 30 / c
    t = 2 * math.pi / period * np.arange(0, 6000)
    x = grid(c, 3000)
    base = log_ratio(x)
    base = -base if added else base
    weight = (0.0 if added else 1.0) * log_ratio(x) + c * base - x**2 / (2 * noise**2)
    weight = np.exp(weight - weight.max())
    weight /= weight.sum()
    shift = float(weight @ base)
    total = 0.0
    for part in np.array_split(t, 12):
        phi = np.exp(1j * np.outer(part, base - shift)) @ weight
        s = c + 1j * part
        terms = (phi**steps * np.exp(1j * part * (steps * shift - epsilon)) / (s * (1 + s))).real
        total += float(terms.sum()) - (0.5 * float(terms[0]) if part[0] == 0 else 0.0)
        if np.abs(phi[-1]) ** steps < 1e-13:
            break
    else:
        return None
    if abs(base[-1] - base[-2]) * part[-1] > 1 or np.abs(np.diff(base)).max() * part[-1] > 2:
        return None  # the grid in x does not resolve the oscillation
    log_m, _ = log_mgf(c, grid(c, 4000))
    return math.exp(steps * log_m - c * epsilon) * total * (t[1] - t[0]) / math.pi


def _truth(rate: float, noise: float, steps: int, epsilon: float) -> float | None:
    if steps == 1:
        return _one_step(rate, noise, epsilon)
    values = [_inverted(rate, noise, steps, epsilon, added) for added in (False, True)]
    return None if values[0] is None or values[1] is None else max(values[0], values[1])


def _random_settings(count: int) -> list[tuple[float, float, int, float]]:
    rng = np.random.default_rng(20260728)
    return [
        (
            10 ** rng.uniform(-5, 0),
            float(np.exp(rng.uniform(math.log(0.3), math.log(50)))),
            int(10 ** rng.uniform(0, 7)),
            10 ** rng.uniform(-15, -3),
        )
        for _ in range(count)
    ]


def _check(setting: tuple[float, float, int, float]) -> bool:
    """The bounds are close and contain the truth; True if an independent method could tell."""
    rate, noise, steps, delta = setting
    lower, upper = _bounds(rate, noise, steps, delta)
    assert 0 <= lower <= upper, setting
    assert upper - lower <= max(1e-3 * upper, 1e-4), (setting, lower, upper)
    renyi = accounting.epsilon(
        ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(noise)), steps), delta, accountant="rdp"
    )
    assert upper <= renyi * (1 + 1e-4) + 1e-4, setting
    if upper > 300:
        return False
    at_upper = _truth(rate, noise, steps, upper)
    if at_upper is None:
        return False
    assert at_upper <= delta * (1 + 1e-5) + 1e-17, setting
    if lower > 0:
        at_lower = _truth(rate, noise, steps, lower)
        assert at_lower is None or at_lower >= delta * (1 - 1e-5) - 1e-17, setting
    return True


def test_random_settings_against_independent_methods() -> None:
    told = [_check(setting) for setting in _random_settings(10)]
    assert sum(told) >= 2


@pytest.mark.slow
def test_five_hundred_random_settings() -> None:
    told = [_check(setting) for setting in _random_settings(500)]
    assert sum(told) >= 125


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta"),
    [
        (1.4146e-5, 0.8583, 846_583, 7.206e-12),
        (8.6899e-5, 0.82266, 4, 3.146e-13),
        (3.0137e-5, 0.50521, 3086, 9.5316e-12),
        (0.001, 1.0, 10_000_000, 1e-6),
    ],
)
def test_the_bounds_stay_close_where_a_handful_of_rare_losses_decide(
    rate: float, noise: float, steps: int, delta: float
) -> None:
    lower, upper = _bounds(rate, noise, steps, delta)
    assert 0 <= upper - lower <= 5e-4 * upper


def test_phases_in_any_order_and_split_anyhow() -> None:
    a, b = ev.PoissonSampled(0.01, ev.Gaussian(1.0)), ev.PoissonSampled(0.05, ev.Gaussian(3.0))
    one = ev.Composed((ev.Repeated(a, 700), ev.Repeated(b, 300), ev.Gaussian(8.0)))
    other = ev.Composed(
        (ev.Gaussian(8.0), ev.Repeated(b, 100), ev.Repeated(a, 700), ev.Repeated(b, 200))
    )
    first, second = (accounting.curve(event, accountant="tight") for event in (one, other))
    assert first.epsilon(1e-7) == pytest.approx(second.epsilon(1e-7), rel=1e-6)
    lower = second.epsilon_lower(1e-7)
    assert lower is not None
    assert 0 <= first.epsilon(1e-7) - lower <= 1e-3 * lower


def test_the_answer_does_not_depend_on_the_tilt(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpfy.accounting.tight import convolution

    values = []
    for slack in (1.0, 6.0):
        monkeypatch.setattr(convolution, "SLACK", slack)
        values.append(_bounds(0.01, 1.0, 10_000, 1e-9))
    (low_a, high_a), (low_b, high_b) = values
    assert max(low_a, low_b) <= min(high_a, high_b)


def test_delta_of_epsilon_is_the_inverse() -> None:
    for event in (
        ev.Repeated(ev.PoissonSampled(0.02, ev.Gaussian(1.2)), 500),
        ev.Repeated(ev.Laplace(8.0), 30),
        ev.Gaussian(2.0),
    ):
        curve = accounting.curve(event, accountant="tight")
        for delta in (1e-3, 1e-6, 1e-10):
            epsilon = curve.epsilon(delta)
            assert curve.delta(epsilon) == pytest.approx(delta, rel=5e-3)


def test_inversion_agrees_with_the_upper_bound_where_removal_decides() -> None:
    _, upper = _bounds(0.05, 1.0, 100, 1e-5)
    removed = _inverted(0.05, 1.0, 100, upper, added=False)
    assert removed is not None
    assert removed == pytest.approx(1e-5, rel=1e-3)
    assert removed <= 1e-5 * (1 + 1e-6)
