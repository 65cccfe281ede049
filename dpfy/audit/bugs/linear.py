"""Mistakes of linear models, naive Bayes and components: bounds from the data, noise of a wrong
scale, minima that are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug
from dpfy.audit.learners import MINIMA, NEIGHBOURS, NOISE

HOME = "dpfy.estimators"
RELEASE = f"{HOME}.fitting.FitSession.release"
GRADIENT, STATISTICS, OBJECTIVE = "linear, gradient", "linear, statistics", "linear, objective"
BAYES, COMPONENTS = "naive bayes", "components"


def norm_of_the_data(real: Any) -> Any:
    """The norm that rows are shortened to is their true median."""
    return lambda layout, norms, fit, share=0.5: float(np.quantile(norms, share))


def long_rows(real: Any) -> Any:
    """Rows are divided by the norm that was bought, and those that are longer stay so."""
    return lambda self, data, norm, norms=None: real(self, data, self.largest, norms)


def one_step(real: Any) -> Any:
    """The minimum is where the first Newton step ends."""

    def minimise(objective: Any, tolerance: float) -> Any:
        start = np.zeros(len(objective.term))
        return start - np.linalg.solve(objective.hessian(start), objective.gradient(start))

    return minimise


def quieter(factor: float) -> Callable[[Any], Any]:
    """Noise of a smaller multiplier than was billed."""
    return lambda real: lambda multiplier: real(multiplier * factor)


def ends_of_the_data(real: Any) -> Any:
    """Bins lie between the smallest and the largest value that occurs."""

    def cells(self: Any, bins: int, part: Any = slice(None)) -> Any:
        places, sizes = real(self, bins, part)
        for k, size in enumerate(sizes):
            if size == bins and len(self.given):
                mine, whole = places[:, k], real(self, bins)[0][:, k]
                low, high = int(whole.min()), int(whole.max())
                places[:, k] = (mine - low) * (bins - 1) // max(high - low, 1)
        return places, sizes

    return cells


def exact_where(chosen: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Some values of a release are left without noise."""

    def make(real: Any) -> Any:
        def release(self: Any, name: str, total: Any, bits: int = 0) -> Any:
            return np.where(chosen(np.asarray(total)), total, real(self, name, total, bits))

        return release

    return make


def diagonal(total: Any) -> Any:
    """Of a matrix; nothing of anything else."""
    return (
        np.eye(len(total), dtype=bool)
        if total.ndim == 2 and len(total) == total.shape[1]
        else np.zeros(total.shape, bool)
    )


def exact_mean(real: Any) -> Any:
    """The mean of what is kept is that of the records."""

    def learn(self: Any, data: Any, public: Any, fit: Any) -> Any:
        found = real(self, data, public, fit)
        found["moments"][0, 1:] = data.scaled().mean(axis=0) * found["moments"][0, 0]
        return found

    return learn


BUGS = (
    Bug(
        "norm-of-the-data",
        "rows are shortened to the true median of their norms",
        NEIGHBOURS,
        learner={f"{HOME}.linear.solver.bought_norm": norm_of_the_data},
        case=GRADIENT,
    ),
    Bug(
        "rows-not-shortened",
        "rows longer than the norm stay as long as they are",
        NEIGHBOURS,
        learner={f"{HOME}.linear.design.RowLayout.rows": long_rows},
        case=STATISTICS,
    ),
    Bug(
        "slopes-not-cut",
        "slopes of the loss are scaled for a clip norm, and not clipped to it",
        NEIGHBOURS,
        learner={f"{HOME}.linear.descent.unit_rows": lambda real: lambda factors: factors},
        case=GRADIENT,
    ),
    Bug(
        "rounds-not-composed",
        "every gradient has the noise of a single release",
        NOISE,
        learner={f"{HOME}.fitting.Gaussian": quieter(50**-0.5)},
        case=GRADIENT,
    ),
    Bug(
        "optimum-not-reached",
        "what is released was taken for the minimum, and is none",
        MINIMA,
        learner={f"{HOME}.linear.minima.minimise": one_step},
        case=OBJECTIVE,
    ),
    Bug(
        "bins-of-the-data",
        "bins of a histogram lie between the smallest and the largest record",
        NEIGHBOURS,
        learner={f"{HOME}.records.EncodedRecords.cells": ends_of_the_data},
        case=BAYES,
    ),
    Bug(
        "one-histogram-billed",
        "a record counts in the histogram of every column, the noise is for one of them",
        NEIGHBOURS,
        learner={
            f"{HOME}.naive_bayes.one_of_each": lambda real: lambda columns, terms: real(1, terms)
        },
        case=BAYES,
    ),
    Bug(
        "empty-cells-exact",
        "cells that no record is in have no noise",
        NOISE,
        learner={RELEASE: exact_where(lambda total: total == 0)},
        case=BAYES,
    ),
    Bug(
        "diagonal-exact",
        "the diagonal of a matrix of second moments has no noise",
        NOISE,
        learner={RELEASE: exact_where(diagonal)},
        case=COMPONENTS,
    ),
    Bug(
        "mean-exact",
        "components are taken about the true mean of the records",
        NEIGHBOURS,
        learner={f"{HOME}.components.PCA._learn": exact_mean},
        case=COMPONENTS,
    ),
)
