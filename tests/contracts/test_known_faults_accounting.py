"""Faults of other libraries' accounting, as tests on dpfy: it is right, or it refuses in one clear line."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from dpfy import accounting
from dpfy.core import events as ev
from dpfy.core.errors import DpfyError
from dpfy.core.unit import Adjacency

REPLACE, ADD = Adjacency.REPLACE_ONE, Adjacency.ADD_OR_REMOVE_ONE


def gaussian_delta(distance: float, epsilon: float) -> float:
    """delta of telling N(0, 1) from N(distance, 1), exactly (Balle & Wang 2018)."""
    return float(
        norm.cdf(distance / 2 - epsilon / distance) - math.exp(epsilon + norm.logcdf(-distance / 2 - epsilon / distance))
    )


@pytest.mark.parametrize("accountant", ["tight", "rdp", "zcdp", "gdp", "advanced"])
@pytest.mark.parametrize("adjacency", [REPLACE, "replace-one"])
@pytest.mark.parametrize("sigma", [0.7, 2.0, 9.0])
@pytest.mark.parametrize("steps", [1, 40])
def test_a_replaced_unit_moves_the_sum_by_two_bounds(accountant, adjacency, sigma, steps):
    """dp-accounting #378: Rényi divergences under replace-one are a quarter of the truth, because the sensitivity is not doubled.

    The name of an adjacency means the same as the adjacency.
    """
    event = ev.Repeated(ev.Gaussian(sigma), steps)
    try:
        found = accounting.curve(event, adjacency=adjacency, accountant=accountant)
        epsilon = found.epsilon(1e-5)
    except DpfyError:
        assert accountant == "advanced"  # a single rough bound: it may refuse, never under-report
        return
    assert gaussian_delta(2 * math.sqrt(steps) / sigma, epsilon) <= 1e-5 * (1 + 1e-6)
    assert epsilon >= accounting.epsilon(event, 1e-5, adjacency=ADD, accountant=accountant)
