"""Gaussian differential privacy and trade-off functions (Dong, Roth & Su 2022)."""

from __future__ import annotations

import math
from typing import Any

from dpfy.accounting.flatten import plain_leaves
from dpfy.accounting.gaussian import GaussianCurve
from dpfy.accounting.rules import group_size_of, rule_of
from dpfy.core import check
from dpfy.core.errors import Unsupported, refusal
from dpfy.core.events import Event, Nothing
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency


def mu_of(event: Event, adjacency: Adjacency) -> float:
    """mu of a composition of Gaussian releases: squares add (Corollary 3.3)."""
    squared = 0.0
    for one, count in plain_leaves(event):
        noise = rule_of(one).gaussian(one)
        if noise is None and not isinstance(one, Nothing):
            raise Unsupported(
                f"{type(one).__name__} by the gdp accountant", "use --accountant tight"
            )
        squared += count * (group_size_of(adjacency) / noise) ** 2 if noise else 0.0
    return math.sqrt(squared)


def clt_mu(sampling_rate: float, noise_multiplier: float, steps: int) -> float:
    """The central-limit mu of subsampled Gaussian training, q sqrt(T (exp(1/sigma^2) - 1)) (Bu et
    al. 2020).

    APPROXIMATION: it can be below the truth. It is for plots and intuition; nothing in dpfy accepts
    it as a guarantee.
    """
    check.rate("sampling_rate", sampling_rate)
    check.positive("noise_multiplier", noise_multiplier)
    return sampling_rate * math.sqrt(
        check.integer("steps", steps) * math.expm1(1 / noise_multiplier**2)
    )


class Gdp:
    """GDP accounting: exact for compositions of Gaussians, and nothing else, because the central
    limit is no guarantee.
    """

    name = "gdp"

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """None if `curve` would answer, else why not and which route would."""
        return refusal(mu_of, event, adjacency)

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The exact curve of a composition of Gaussians."""
        return GaussianCurve(mu_of(event, adjacency))
