"""Exact integer noise: its law at every scale, by a test with power."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpfy.core.random import Randomness
from dpfy.mechanisms import Bits, gaussian, laplace

DRAWS = {"laplace": laplace, "gaussian": gaussian}
SCALES = [1, Fraction(5, 2), 30, 1000, 10**4, 10**6]
FALSE_ALARM = 1e-4


def bits(name: str = "noise", step: int = 0, seed: int = 1) -> Bits:
    return Bits(Randomness.for_tests(seed), name, step)


def log_weight(law: str, x: np.ndarray, scale: float) -> np.ndarray:
    return -np.abs(x) / scale if law == "laplace" else -(x**2) / (2 * scale**2)


PARTS = np.unique(np.concatenate([np.arange(1, 64) / 64, [1e-4, 1e-3], [1 - 1e-3, 1 - 1e-4]]))


def cells(law: str, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges that cut the integers into parts of about equal probability with tails apart, and the probabilities."""
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
    """A million draws pass at their scale; at 2/3 and 3/2 of it, moved by one, or cut off they fail."""
    values = DRAWS[law](10**6, scale, bits(law))
    assert p_value(values, law, float(scale)) > FALSE_ALARM
    for wrong in (Fraction(2, 3), Fraction(3, 2)):
        assert p_value(values, law, float(scale * wrong)) < 1e-9
    assert p_value(values + max(1, int(scale) // 20), law, float(scale)) < 1e-9
    cut = np.quantile(np.abs(values), 1 - 3e-4)
    assert p_value(values[np.abs(values) < cut], law, float(scale)) < 1e-9
