"""The best strategy of all for one participation: a dense matrix, with a certificate that nothing
can be much better.

For weights p on rows and q on columns, the nuclear norm of P^1/2 A Q^1/2 over sqrt(sum p sum q) is
a lower bound on the error of ANY factorization (Denisov et al. 2022, Edmonds et al. 2020). The
weights are improved until the factorization they give meets the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.noise import dense as dense_strategy
from dpfy.noise.workload import PREFIX_SUMS, Workload

Matrix = NDArray[np.float64]
MOST_STEPS = 2048
TOLERANCE = 1e-6
RELAXATION = {"mean": 3.0, "max": 2.1}
"""Exponent of the update of the weights; the plain fixed point is 1. Found to be fast and
stable.
"""


@dataclass(frozen=True)
class Optimum:
    """The strategy with its error at sensitivity one, and the bound below which no strategy can
    go.
    """

    strategy: dense_strategy.Dense
    achieved: float
    lower_bound: float


def dense(
    steps: int,
    objective: str = "mean",
    workload: Workload = PREFIX_SUMS,
    tolerance: float = TOLERANCE,
) -> Optimum:
    """The optimal dense strategy for one participation, within a relative `tolerance` of the
    certified bound.
    """
    check.one_of("objective", objective, RELAXATION)
    if check.integer("steps", steps) > MOST_STEPS:
        raise Unsupported(
            f"a dense strategy of {steps} steps",
            f"use at most {MOST_STEPS}, or a banded or BLT strategy",
        )
    a = workload.matrix(steps)
    p, q = np.full(steps, 1 / steps), np.full(steps, 1 / steps)
    best_lower, achieved, gram = 0.0, np.inf, np.eye(steps)
    power = RELAXATION[objective]
    for _ in range(500):
        weighted = np.sqrt(p)[:, None] * a * np.sqrt(q)[None, :]
        right = root(weighted.T @ weighted)
        lower = float(np.trace(right))
        columns = np.diag(right) / q
        x = right / np.sqrt(np.outer(q, q))
        rows = _row_squares(a, x)
        found = float(np.sqrt((rows.mean() if objective == "mean" else rows.max()) * columns.max()))
        if found < achieved:
            achieved, gram = found, x
        best_lower = max(best_lower, lower)
        if achieved <= best_lower * (1 + tolerance):
            break
        q = _normal(q * (columns / columns.mean()) ** (power if objective == "mean" else power / 2))
        if objective == "max":
            p = _normal(p * (rows / rows.mean()) ** (power / 2))
    return Optimum(lower_triangular(gram), achieved, best_lower)


def _normal(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return weights / weights.sum()


def root(gram: Matrix) -> Matrix:
    """Symmetric square root."""
    values, vectors = np.linalg.eigh(gram)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def _row_squares(a: Matrix, x: Matrix) -> NDArray[np.float64]:
    """Diagonal of A X^-1 A^T."""
    from scipy.linalg import cholesky, solve_triangular

    factor = cholesky(x, lower=True)
    squares: NDArray[np.float64] = (solve_triangular(factor, a.T, lower=True) ** 2).sum(axis=0)
    return squares


def lower_triangular(gram: Matrix) -> dense_strategy.Dense:
    """C lower-triangular with C^T C = X: the Cholesky factor taken from the last step backwards."""
    factor = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T
    return dense_strategy.dense(np.tril(factor))
