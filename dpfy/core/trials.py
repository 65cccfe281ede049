"""How many runs are made where a random number of them is: the truncated negative binomial law of
Papernot & Steinke 2022.
"""

from __future__ import annotations

import math
from functools import lru_cache

from dpfy.core import check
from dpfy.core.errors import Unsupported


def mean_trials(shape: float, gamma: float) -> float:
    """The mean of the truncated negative binomial distribution with shape eta > -1 and parameter
    gamma.
    """
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


@lru_cache(maxsize=256)
def gamma_for(shape: float, mean: float) -> float:
    """The gamma that gives a mean number of trials."""
    check.positive_or_infinite("shape + 1", shape + 1)
    if check.positive("mean", mean) <= 1:
        raise Unsupported(f"a mean of {mean:g} trials", "ask for more than 1")
    low, high = 1e-300, 1 - 1e-12
    for _ in range(400):
        middle = math.sqrt(low * high) if low < 1e-3 * high else (low + high) / 2
        low, high = (middle, high) if mean_trials(shape, middle) > mean else (low, middle)
    return high
