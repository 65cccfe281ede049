"""Mistakes of linear models, naive Bayes and components: bounds from the data, noise of a wrong
scale, minima that are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpfy_lab.checks.estimators import MINIMA, NEIGHBOURS, NOISE
from dpfy_lab.selftest.mistake import mistake

HOME = "dpfy.estimators"
RELEASE, GAUSSIAN = f"{HOME}.fitting.FitSession.release", f"{HOME}.fitting.GaussianMechanism"
GRADIENT, STATISTICS, OBJECTIVE = "linear, gradient", "linear, statistics", "linear, objective"
BAYES, COMPONENTS, SCALER = "naive bayes", "components", "scaler"


def quieter(factor: float) -> Callable[..., Any]:
    """A noise distribution of a smaller multiplier than was billed."""
    return lambda real, multiplier: real(multiplier * factor)


def exact_where(chosen: Callable[[Any], Any]) -> Callable[..., Any]:
    """A release that leaves some values without noise."""

    def release(real: Any, self: Any, name: str, total: Any, bits: int = 0) -> Any:
        return np.where(chosen(np.asarray(total)), total, real(self, name, total, bits))

    return release


@mistake(
    "norm-of-the-data",
    "rows are shortened to the true median of their norms",
    NEIGHBOURS.of(GRADIENT),
    f"{HOME}.linear.solver.bought_norm",
)
def _(real: Any, layout: Any, norms: Any, fit: Any, share: float = 0.5) -> float:
    return float(np.quantile(norms, share))


@mistake(
    "rows-not-shortened",
    "rows longer than the norm stay as long as they are",
    NEIGHBOURS.of(STATISTICS),
    f"{HOME}.linear.design.RowLayout.rows",
)
def _(real: Any, self: Any, data: Any, norm: Any, norms: Any = None) -> Any:
    return real(self, data, self.largest, norms)


@mistake(
    "slopes-not-cut",
    "slopes of the loss are scaled for a clip norm, and not clipped to it",
    NEIGHBOURS.of(GRADIENT),
    f"{HOME}.linear.descent.unit_rows",
)
def _(real: Any, factors: Any) -> Any:
    return factors


mistake(
    "rounds-not-composed",
    "every gradient has the noise of a single release",
    NOISE.of(GRADIENT),
    GAUSSIAN,
)(quieter(50**-0.5))


@mistake(
    "optimum-not-reached",
    "what is released was taken for the minimum, and is none",
    MINIMA.of(OBJECTIVE),
    "dpfy_lab.estimators.minima.minimise",
)
def _(real: Any, objective: Any, tolerance: float) -> Any:
    start = np.zeros(len(objective.term))
    return start - np.linalg.solve(objective.hessian(start), objective.gradient(start))


@mistake(
    "bins-of-the-data",
    "bins of a histogram lie between the smallest and the largest record",
    NEIGHBOURS.of(BAYES),
    f"{HOME}.records.EncodedRecords.cells",
)
def _(real: Any, self: Any, bins: int, part: Any = slice(None)) -> Any:
    places, sizes = real(self, bins, part)
    for k, size in enumerate(sizes):
        if size == bins and len(self.given):
            mine, whole = places[:, k], real(self, bins)[0][:, k]
            low, high = int(whole.min()), int(whole.max())
            places[:, k] = (mine - low) * (bins - 1) // max(high - low, 1)
    return places, sizes


@mistake(
    "one-histogram-billed",
    "a record counts in the histogram of every column, the noise is for one of them",
    NEIGHBOURS.of(BAYES),
    f"{HOME}.naive_bayes.one_of_each",
)
def _(real: Any, columns: int, terms: Any) -> Any:
    return real(1, terms)


mistake("empty-cells-exact", "cells that no record is in have no noise", NOISE.of(BAYES), RELEASE)(
    exact_where(lambda total: total == 0)
)


def diagonal(total: Any) -> Any:
    """Where the diagonal of a matrix is; nowhere in anything else."""
    square = total.ndim == 2 and len(total) == total.shape[1]
    return np.eye(len(total), dtype=bool) if square else np.zeros(total.shape, bool)


mistake(
    "diagonal-exact",
    "the diagonal of a matrix of second moments has no noise",
    NOISE.of(COMPONENTS),
    RELEASE,
)(exact_where(diagonal))


@mistake(
    "mean-exact",
    "components are taken about the true mean of the records",
    NEIGHBOURS.of(COMPONENTS),
    f"{HOME}.components.PCA._learn",
)
def _(real: Any, self: Any, data: Any, public: Any, fit: Any) -> Any:
    found = real(self, data, public, fit)
    found["moments"][0, 1:] = data.scaled().mean(axis=0) * found["moments"][0, 0]
    return found


@mistake(
    "squares-of-a-scaler-not-billed",
    "squares are released beside sums with noise for sums alone",
    NEIGHBOURS.of(SCALER),
    f"{HOME}.scaler.Bound",
)
def _(real: Any, **norms: Any) -> Any:
    return real(**(norms | {"l2": norms["l2"] / 2**0.5}))
