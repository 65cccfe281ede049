"""Samples of fixed size, with and without replacement: right moments, monotone in the steps, and
right against direct inversion.

The integrals here are written from the definition of the two distributions: Gauss-Legendre on
panels that end where the loss is zero, an inverse transform along a line, no rounding of losses and
nothing of the engine.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.special import erf
from scipy.stats import binom

from dpfy import accounting
from dpfy.accounting import rdp
from dpfy.cli.app import main
from dpfy.core import events as ev
from dpfy.core.unit import Adjacency

REPLACE = Adjacency.REPLACE_ONE
RECORDS, BATCH, DELTA = 60_000, 256, 1e-5
NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)
Loss = tuple[np.ndarray, np.ndarray]


def _panels(low: float, high: float, width: float) -> Loss:
    count = math.ceil((high - low) / width)
    edges = np.linspace(low, high, count + 1)
    half = (edges[1] - edges[0]) / 2
    return ((edges[:-1] + half)[:, None] + half * NODES).ravel(), np.tile(half * WEIGHTS, count)


def _folded(q: float, sigma: float, move: float, reach: float) -> Loss:
    """Losses and log weights: positive ones of removal, negative ones of addition, the rest at
    zero; x runs from the point of zero loss.
    """

    def log_ratio(x: np.ndarray) -> np.ndarray:
        return np.logaddexp(math.log1p(-q), math.log(q) + (2 * move * x - move**2) / (2 * sigma**2))

    def log_normal(x: np.ndarray) -> np.ndarray:
        return -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))

    width = min(sigma, sigma**2 / move) / 2
    up, up_weights = _panels(move / 2, move / 2 + reach, width)
    down, down_weights = _panels(
        move / 2, move / 2 + 12 * sigma, width
    )  # addition is the mirror image: Q shifted to the other side
    losses = np.concatenate([log_ratio(up), -log_ratio(down), [0.0]])
    logs = [
        log_ratio(up) + log_normal(up) + np.log(up_weights),
        log_normal(down) + np.log(down_weights),
    ]
    zero = (1 - q) * float(erf(move / 2 / sigma / math.sqrt(2)))
    return losses, np.concatenate([*logs, [math.log(zero)]])


def _without(sigma: float, reach: float, records: int = RECORDS, batch: int = BATCH) -> Loss:
    return _folded(batch / records, sigma, 2.0, reach)


def _with(sigma: float, reach: float, records: int, batch: int) -> Loss:
    """As above for every number of copies, which is revealed; up to eight."""
    chances = binom.pmf(np.arange(0, 9), batch, 1 / records)
    q = float(1 - chances[0])
    rows = [(float(chances[k]) / q, _folded(q, sigma, 2.0 * k, reach * k)) for k in range(1, 9)]
    return np.concatenate([r[0] for _, r in rows]), np.concatenate(
        [math.log(w) + r[1] for w, r in rows]
    )


def _log_moment(loss: Loss, s: float) -> float:
    exponents = loss[1] + s * loss[0]
    return float(exponents.max() + np.log(np.exp(exponents - exponents.max()).sum()))


def _delta(loss: Loss, steps: int, epsilon: float) -> float:
    """delta at epsilon of `steps` of them, by inverting the moment generating function along a
    line.
    """
    losses, logs = loss
    tilts = np.geomspace(1e-3, 50, 200)
    c = float(
        min(tilts, key=lambda t: steps * _log_moment(loss, t) - t * epsilon - math.log(t * (1 + t)))
    )
    log_m = _log_moment(loss, c)
    weights = np.exp(logs + c * losses - log_m)
    mean = float(weights @ losses)
    variance = float(weights @ (losses - mean) ** 2)
    gap = 2 * math.pi / (24 * math.sqrt(steps * variance) + 30 / c)
    total, done = 0.0, False
    for start in range(0, 40_000, 500):
        t = gap * np.arange(start, start + 500)
        phi = np.exp(1j * np.outer(t, losses - mean)) @ weights
        s = c + 1j * t
        terms = (
            np.exp(steps * np.log(phi)) * np.exp(1j * t * (steps * mean - epsilon)) / (s * (1 + s))
        ).real
        total += float(terms.sum()) - (0.5 * float(terms[0]) if start == 0 else 0.0)
        if done := bool(steps * math.log(abs(phi[-1])) < -35):
            break
    assert done, "the integral does not converge here"
    return math.exp(steps * log_m - c * epsilon) * total * gap / math.pi


def _epsilon(event: ev.Event, steps: int, accountant: str = "tight", delta: float = DELTA) -> float:
    return accounting.epsilon(
        ev.Repeated(event, steps), delta, adjacency=REPLACE, accountant=accountant
    )


def test_the_moments_are_those_of_the_pair() -> None:
    orders = (1.1, 1.5, 2.0, 4.0, 9.0, 20.0)
    for sigma in (0.6, 1.0, 3.0):
        cases = [
            (
                ev.SampledWithoutReplacement(RECORDS, BATCH, ev.Gaussian(sigma)),
                _without(sigma, 70 + 12 * sigma),
            ),
            (
                ev.SampledWithReplacement(2000, 8, ev.Gaussian(sigma)),
                _with(sigma, 70 + 12 * sigma, 2000, 8),
            ),
        ]
        for event, loss in cases:
            assert _log_moment(loss, 0.0) == pytest.approx(0.0, abs=1e-12)
            found = rdp.divergences(event, REPLACE, orders)
            for order, value in zip(orders, found, strict=True):
                right = _log_moment(loss, order - 1) / (order - 1)
                assert value >= right * (1 - 1e-10)
                assert value == pytest.approx(right, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize(
    ("steps", "epsilon"), [(1000, 7.5736), (4700, 14.3427), (100_000, 99.8738), (1_000_000, 675.81)]
)
def test_without_replacement_is_what_inversion_gives(steps: int, epsilon: float) -> None:
    upper = _epsilon(ev.SampledWithoutReplacement(RECORDS, BATCH, ev.Gaussian(1.0)), steps)
    assert upper == pytest.approx(epsilon, rel=2e-5)
    found = _delta(_without(1.0, 40.0), steps, upper)
    assert DELTA * (1 - 2e-2) <= found <= DELTA * (1 + 1e-6)


@pytest.mark.parametrize("steps", [1000])
def test_with_replacement_is_what_inversion_gives(steps: int) -> None:
    upper = _epsilon(ev.SampledWithReplacement(200, 8, ev.Gaussian(6.0)), steps)
    found = _delta(_with(6.0, 60.0, 200, 8), steps, upper)
    assert DELTA * (1 - 2e-2) <= found <= DELTA * (1 + 1e-6)


@pytest.mark.parametrize("event", [ev.SampledWithoutReplacement, ev.SampledWithReplacement])
def test_every_accountant_is_monotone_to_a_million_steps_and_above_the_lower_bound(
    event: type,
) -> None:
    for sigma in (1.0,):
        leaf = event(RECORDS, BATCH, ev.Gaussian(sigma))
        for name, counts in (
            ("tight", (1, 1000, 2000, 2500, 4700, 1_000_000)),
            ("rdp", (1, 2500, 1_000_000)),
        ):
            values = [_epsilon(leaf, steps, name) for steps in counts]
            assert values == sorted(values)
            assert values[0] < values[-1]
        for steps in (2500,):
            curve = accounting.curve(ev.Repeated(leaf, steps), adjacency=REPLACE)
            lower = curve.epsilon_lower(DELTA)
            assert lower is not None
            assert 0 < lower <= curve.epsilon(DELTA) <= _epsilon(leaf, steps, "rdp")
            # Poisson sampling of the same rate under replace-one is a special case: other units
            # contribute nothing.
            poisson = accounting.curve(
                ev.Repeated(ev.PoissonSampled(BATCH / RECORDS, ev.Gaussian(sigma)), steps),
                adjacency=REPLACE,
            )
            assert curve.epsilon(DELTA) >= poisson.epsilon_lower(DELTA)  # type: ignore[operator]


def test_rdp_of_the_reported_run() -> None:
    assert _epsilon(
        ev.SampledWithoutReplacement(RECORDS, BATCH, ev.Gaussian(1.0)), 4700, "rdp"
    ) == pytest.approx(16.2015, abs=1e-3)


def _answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    plan = [
        "--sampling",
        "without-replacement",
        "--records",
        "60000",
        "--batch-size",
        "256",
        "--adjacency",
        "replace-one",
        "--json",
    ]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--delta", "1e-5", *plan])
    assert left.value.code == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_command_line_bills_and_calibrates_it(capsys: pytest.CaptureFixture[str]) -> None:
    values = []
    for steps in ("1000", "2000", "2500", "4700"):
        answer = _answer(capsys, "plan", "account", "--noise-multiplier", "1", "--steps", steps)
        assert 2.594 <= answer["epsilon_lower"] <= answer["epsilon"]
        values.append(answer["epsilon"])
    assert values == sorted(values)
    noise = _answer(capsys, "plan", "calibrate", "--epsilon", "1", "--steps", "4700")[
        "noise_multiplier"
    ]
    assert (
        noise > 2.19
        # what Poisson sampling needs when a unit is added or removed; a replaced one moves the sum
        # twice as far
    )
