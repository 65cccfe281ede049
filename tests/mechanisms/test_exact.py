"""Exact integer noise: its law at every scale, by a test with power."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.mechanisms import Bits, gaussian, laplace
from dpfy.mechanisms.integers import Wide

DRAWS = {"laplace": laplace, "gaussian": gaussian}
SCALES = [1, Fraction(5, 2), 30, 1000, 10**4, 10**6]
FALSE_ALARM = 1e-4


def bits(name: str = "noise", step: int = 0, seed: int = 1) -> Bits:
    return Bits(Randomness.for_tests(seed), name, step)


def log_weight(law: str, x: np.ndarray, scale: float) -> np.ndarray:
    return -np.abs(x) / scale if law == "laplace" else -(x**2) / (2 * scale**2)


PARTS = np.unique(np.concatenate([np.arange(1, 64) / 64, [1e-4, 1e-3], [1 - 1e-3, 1 - 1e-4]]))


def cells(law: str, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges that cut the integers into parts of about equal probability with tails apart, and the
    probabilities.
    """
    far = int(40 * scale + 40)
    if far < 10**6:
        x = np.arange(-far, far + 1)
        cdf = np.cumsum(np.exp(log_weight(law, x.astype(float), scale)))
        cdf /= cdf[-1]
        picks = np.unique(np.searchsorted(cdf, PARTS))
        edges = np.unique(np.concatenate([x[picks], [-1, 0]]))
        edges = edges[cdf[edges + far] < 1 - 1e-5]
        return edges, np.diff(np.concatenate([[0], cdf[edges + far], [1]]))
    real = stats.laplace(scale=scale) if law == "laplace" else stats.norm(scale=scale)
    edges = np.unique(np.floor(real.ppf(PARTS)))
    return edges, np.diff(np.concatenate([[0], real.cdf(edges + 0.5), [1]]))


def p_value(values: np.ndarray, law: str, scale: float) -> float:
    edges, chances = cells(law, scale)
    seen = np.bincount(np.searchsorted(edges, values), minlength=len(chances))
    keep = chances * len(values) >= 5
    expected = np.append(chances[keep], chances[~keep].sum()) * len(values)
    observed = np.append(seen[keep], seen[~keep].sum())
    if not expected[-1]:
        assert not observed[-1]
        expected, observed = expected[:-1], observed[:-1]
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("law", DRAWS)
def test_the_law_and_no_other(law, scale):
    """A million draws pass at their scale; at 2/3 and 3/2 of it, moved by one, or cut off they
    fail.
    """
    values = DRAWS[law](10**6, scale, bits(law))
    assert p_value(values, law, float(scale)) > FALSE_ALARM
    for wrong in (Fraction(2, 3), Fraction(3, 2)):
        assert p_value(values, law, float(scale * wrong)) < 1e-9
    assert p_value(values + max(1, int(scale) // 20), law, float(scale)) < 1e-9
    cut = np.quantile(np.abs(values), 1 - 3e-4)
    assert p_value(values[np.abs(values) < cut], law, float(scale)) < 1e-9


@pytest.mark.parametrize("scale", [Fraction(7, 3), 40, 10**5], ids=str)
@pytest.mark.parametrize("law", DRAWS)
def test_a_few_values_at_a_time_have_the_law_too(law, scale):
    """Small calls use a coarser staircase: 2,000 calls of 50 values."""
    source = bits(law, 1)
    values = np.concatenate([DRAWS[law](50, scale, source) for _ in range(2000)])
    assert p_value(values, law, float(scale)) > FALSE_ALARM
    for wrong in (2 / 3, 3 / 2):
        assert p_value(values, law, float(scale) * wrong) < 1e-9


@pytest.mark.parametrize("square", [False, True])
def test_a_staircase_of_few_steps_has_the_law_too(square):
    """Blocks as wide as the law: half of the points fall between two steps, so that a fault there
    would be seen at once.
    """
    values = np.empty(50_000, np.int64)
    Wide(Fraction(9), square, 3).draw(values, bits("coarse", int(square)))
    law = "gaussian" if square else "laplace"
    assert p_value(values, law, 9) > FALSE_ALARM
    for wrong in (6, 8.7, 9.3, 13.5):
        assert p_value(values, law, wrong) < 1e-3
    assert p_value(values + 1, law, 9) < 1e-9


@pytest.mark.parametrize(
    "scale", [Fraction(1, 1 << 20), Fraction(1, 10), 3, 5000, 1 << 45], ids=str
)
@pytest.mark.parametrize("law", DRAWS)
def test_any_count_and_every_address(law, scale):
    draw = DRAWS[law]
    for count in (0, 1, 2, 3, 511, 32_769):
        values = draw(count, scale, bits())
        assert values.shape == (count,)
        assert values.dtype == np.int64
        assert np.array_equal(values, draw(count, scale, bits())), (
            "the same address gives the same values"
        )
    if scale >= 3:
        for other in (bits(step=1), bits("other"), bits(seed=2)):
            assert (draw(511, scale, other) != draw(511, scale, bits())).mean() > 0.5
        source = bits()
        assert (draw(511, scale, source) != draw(511, scale, source)).mean() > 0.5, (
            "a second draw is a fresh one"
        )


@pytest.mark.parametrize("law", DRAWS)
def test_values_are_independent_of_their_neighbours(law):
    for scale in (3, 10**5):
        values = DRAWS[law](10**6, scale, bits(law, 2)).astype(float)
        for signal in (values, np.abs(values) - np.abs(values).mean()):
            for lag in (1, 2, 1 << 15):
                assert abs(np.corrcoef(signal[lag:], signal[:-lag])[0, 1]) < 0.005


def test_the_low_bits_of_wide_noise_are_fair():
    values = gaussian(10**6, 1 << 40, bits("low", 3))
    for bit in range(36):
        assert abs((values >> bit & 1).mean() - 0.5) < 0.0025, bit


WRONG = [
    0.5,
    1.0,
    float("inf"),
    np.float64(2),
    "2",
    None,
    True,
    0,
    -1,
    Fraction(-1, 2),
    (1 << 45) + 1,
    Fraction(1, 1 << 21),
    1 << 5000,
    [1],
    1j,
]


@pytest.mark.parametrize(
    "wrong", [*WRONG, Fraction((1 << 5000) + 1, 1 << 5000)], ids=lambda w: repr(w)[:20]
)
@pytest.mark.parametrize("law", DRAWS)
def test_scales_that_are_refused(law, wrong):
    with pytest.raises(InvalidInput):
        DRAWS[law](3, wrong, bits())


@pytest.mark.parametrize("count", [-1, 2.0, None, True, "3"])
def test_counts_that_are_refused(count):
    with pytest.raises(InvalidInput):
        gaussian(count, 1, bits())
