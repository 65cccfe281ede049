"""The noise is right, with power: the true scale is accepted, 2/3 and 3/2 of it are rejected;
nothing is correlated.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import SquareRoot

BOUND = 0.7
SHAPES = {"weight": (60, 50), "bias": (50,), "row": (3, 5, 7)}


def zeros(dtype=torch.float32):
    return Bounded({n: torch.zeros(s, dtype=dtype) for n, s in SHAPES.items()}, Bound(BOUND))


def released(scale=1.3, seed=0, steps=range(3), dtype=torch.float32):
    stream = NoiseStream(Identity(), scale, Randomness.for_tests(seed))
    return [
        stream.release(zeros(dtype), step, {}, mock_permit(stream.event, 1000))[0].value
        for step in steps
    ]


def scale_error(values: np.ndarray, stddev: float) -> float:
    """Standard errors between the sample variance and the stated one (chi-square)."""
    return abs((values**2).mean() / stddev**2 - 1) / math.sqrt(2 / values.size)


def flat(release):
    return torch.cat([t.flatten() for t in release.values()]).double().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_with_power(dtype):
    """False alarm: 5 standard errors, below 1e-6; a wrong scale is hundreds away."""
    values = np.concatenate([flat(r) for r in released(dtype=dtype)])
    truth = 1.3 * BOUND
    assert scale_error(values, truth) < 5
    for wrong in (2 / 3, 3 / 2):
        assert scale_error(values, truth * wrong) > 20


def test_every_parameter_has_its_noise():
    for name in SHAPES:
        values = np.concatenate(
            [r[name].double().numpy().ravel() for r in released(steps=range(200))]
        )
        assert scale_error(values, 1.3 * BOUND) < 5
        assert scale_error(values, 1.3 * BOUND * 2 / 3) > 10


def test_shape_is_gaussian():
    from scipy.stats import kstest

    values = np.concatenate([flat(r) for r in released(steps=range(10))])
    assert kstest(values / (1.3 * BOUND), "norm").pvalue > 1e-4
    assert kstest(values / (1.3 * BOUND * 1.1), "norm").pvalue < 1e-6


def correlation(a, b):
    """Standard errors away from no correlation."""
    n = min(a.size, b.size)
    return abs(np.corrcoef(a[:n], b[:n])[0, 1]) * math.sqrt(n)


def test_steps_parameters_and_runs_are_uncorrelated():
    first, second, third = released()
    other_run = released(seed=1)[0]
    assert correlation(flat(first), flat(second)) < 5
    assert correlation(flat(second), flat(third)) < 5
    assert correlation(flat(first), flat(other_run)) < 5
    assert correlation(first["weight"].numpy().ravel(), first["row"].numpy().ravel()) < 5
    assert correlation(first["weight"].numpy().ravel(), first["bias"].numpy().ravel()) < 5
    assert (
        correlation(flat(first), flat(released()[0])) > 50
    )  # the same address gives the same noise: the test can see it


def test_the_same_step_draws_the_same_noise():
    a, b = released(steps=[7]), released(steps=[7])
    assert all(torch.equal(a[0][n], b[0][n]) for n in SHAPES)


def test_noise_is_added_to_the_sum():
    total = Bounded({"w": torch.full((4,), 1000.0)}, Bound(1.0))
    out = NoiseStream(Identity(), 1.0, Randomness.for_tests(0)).release(
        total, 0, {}, mock_permit(events.Gaussian(1.0), 1)
    )[0]
    assert ((out.value["w"] - 1000).abs() < 10).all()
    assert (total.value["w"] == 1000).all()


def test_in_place_takes_the_memory_of_the_sum_and_releases_the_same():
    apart, inside = ({"w": torch.full((4, 3), 10.0), "b": torch.zeros(5)} for _ in range(2))
    for strategy in (Identity(), SquareRoot()):
        stream = NoiseStream(strategy, 1.0, Randomness.for_tests(0))
        state = stream.init(apart)
        expected = stream.release(
            Bounded(apart, Bound(1.0)), 0, state, mock_permit(stream.event, 1000)
        )[0].value
        found = (
            replace(stream, in_place=True)
            .release(
                Bounded(inside, Bound(1.0)), 0, stream.init(apart), mock_permit(stream.event, 1000)
            )[0]
            .value
        )
        assert all(torch.equal(found[n], expected[n]) and found[n] is inside[n] for n in apart)
        inside = {"w": torch.full((4, 3), 10.0), "b": torch.zeros(5)}


def test_a_narrow_sum_is_widened_before_the_noise():
    total = Bounded({"w": torch.ones(1000, dtype=torch.bfloat16)}, Bound(1e-3))
    for in_place in (False, True):
        stream = NoiseStream(Identity(), 1.0, Randomness.for_tests(0), in_place=in_place)
        value = stream.release(total, 0, {}, mock_permit(stream.event, 1000))[0].value["w"]
        assert value.dtype == torch.float32
        assert value.std() / 1e-3 == pytest.approx(
            1, abs=0.15
        )  # bfloat16 numbers near 1 are four of these apart


def test_a_permit_for_another_event_is_refused():
    """A noise multiplier typed twice cannot differ: less noise than was reserved is never added."""
    stream = NoiseStream(Identity(), 1.0, Randomness.for_tests(0))
    with pytest.raises(InvalidInput, match="was given for"):
        stream.release(zeros(), 0, {}, mock_permit(events.Gaussian(1.1), 10))
    stream.release(zeros(), 0, {}, mock_permit(events.Gaussian(1.0), 10))


def test_refusals():
    stream = NoiseStream(Identity(), 1.0, Randomness.for_tests(0))
    with pytest.raises(InvalidInput, match="covers 1000"):
        stream.release(zeros(), 1000, {}, mock_permit(stream.event, 1000))
    with pytest.raises(Unsupported, match="unbounded"):
        stream.release(
            Bounded({"w": torch.zeros(1)}, Bound(math.inf)), 0, {}, mock_permit(stream.event, 1000)
        )
    with pytest.raises(InvalidInput, match="noise scale"):
        NoiseStream(Identity(), -1.0, Randomness.for_tests(0))
