"""Calibration always ends on the private side and says so when it cannot."""

from __future__ import annotations

import pytest

from dpfy import accounting
from dpfy.accounting import calibrate
from dpfy.accounting.tight import accountant
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput


def _train(noise: float) -> ev.Event:
    return ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(noise)), 200)


@pytest.mark.parametrize("target", [0.3, 1.0, 8.0])
def test_never_above_the_target_and_close_below(target: float) -> None:
    noise = calibrate.noise(_train, target, 1e-6, accountant="rdp")
    assert accounting.epsilon(_train(noise), 1e-6, accountant="rdp") <= target
    assert accounting.epsilon(_train(noise * (1 - 1e-4)), 1e-6, accountant="rdp") > target


def test_published_noise() -> None:
    assert calibrate.noise(_train, 1.0, 1e-6, accountant="rdp") == pytest.approx(3.4256, abs=2e-4)


def test_bisection_stays_private_on_a_step_function() -> None:
    assert calibrate.least(lambda x: 0.0 if x >= 2.5 else 9.0, 1.0, start=1.0) >= 2.5
    with pytest.raises(InvalidInput, match="cannot be reached"):
        calibrate.least(lambda x: 5.0, 1.0, start=1.0)


@pytest.mark.parametrize(("power", "target"), [(1, 1e3), (2, 1e5), (3, 1e7), (6, 1e9)])
def test_a_far_target_is_reached_in_few_evaluations(power: int, target: float) -> None:
    """However fast epsilon grows as noise falls: each evaluation at little noise takes a tenth of a
    second.
    """
    tried: list[float] = []
    noise = calibrate.least(lambda x: tried.append(x) or x**-power, target, start=1.0)
    assert noise**-power <= target
    assert noise == pytest.approx(target ** (-1 / power), rel=1e-4)
    assert len(tried) <= 14
    assert min(tried) >= calibrate.LEAST / 2


def test_a_coarse_bound_serves_far_below_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where next to nothing is spent a close bound can take long, and nobody needs it; near the
    target it is what counts.
    """
    close: list[float] = []
    whole = accountant.TightCurve.epsilon
    monkeypatch.setattr(
        accountant.TightCurve,
        "epsilon",
        lambda curve, delta: close.append(found := whole(curve, delta)) or found,
    )
    target = 3e4

    def event(noise: float) -> ev.Event:
        return ev.Repeated(ev.PoissonSampled(1.6e-10, ev.Gaussian(noise)), 6)

    noise = calibrate.noise(event, target, 8e-10)
    assert close
    assert min(close) >= calibrate.BELOW * target / 10
    monkeypatch.undo()
    assert accounting.epsilon(event(noise), 8e-10) <= target
    assert accounting.epsilon(event(noise * (1 - 1e-3)), 8e-10) > target


@pytest.mark.parametrize("power", [0.5, 1, 2, 4])
def test_a_good_guess_is_confirmed_in_few_evaluations(power: float) -> None:
    """From either side, near or far, the answer is the same; near ones take three or four."""
    for off in (0.01, 0.7, 0.95, 0.999, 1.001, 1.05, 1.4, 100.0):
        tried: list[float] = []

        def reached(x: float, tried: list[float] = tried) -> float:
            tried.append(x)
            return x**-power

        noise = calibrate.least(reached, 2.0, start=off * 2 ** (-1 / power))
        assert noise**-power <= 2.0
        assert noise == pytest.approx(2 ** (-1 / power), rel=1e-4)
        assert noise in tried
        if 0.9 < off < 1.1:
            assert len(tried) <= 5


def test_who_has_curves_gets_the_same_noise() -> None:
    direct = calibrate.noise(_train, 1.0, 1e-6)
    assert calibrate.noise_by(lambda noise: accounting.curve(_train(noise)), 1.0, 1e-6) == direct
    for start in (0.5, 3.2, 20.0):
        guessed = calibrate.noise_by(
            lambda noise: accounting.curve(_train(noise)), 1.0, 1e-6, start=start
        )
        assert guessed == pytest.approx(direct, rel=1e-4)
        assert accounting.epsilon(_train(guessed), 1e-6) <= 1.0
