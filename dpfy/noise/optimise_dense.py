"""The best strategy of all for one participation: a dense matrix, with a certificate that nothing
can be much better.

For weights p on rows and q on columns, the nuclear norm of P^1/2 A Q^1/2 over sqrt(sum p sum q) is
a lower bound on the error of ANY factorization (Denisov et al. 2022, Edmonds et al. 2020). The
weights are improved until the factorization they give meets the bound.

A dense strategy for several epochs in a fixed order: columns that meet the same unit are made
orthogonal.

Minimises tr(A^T A X^-1) over X = C^T C with X[i, j] = 0 for different steps i and j a whole number
of epochs apart, and with X[i, i] summing to at most one over the steps of a unit (Choquette-Choo et
al. 2022): the sensitivity is then exactly one. The dual variable is a symmetric matrix D, zero
except on such pairs, its diagonal constant over the steps of a unit. For given D = L L^T the best X
is L^-T (L^T A^T A L)^1/2 L^-1, and the dual value 2 tr (L^T A^T A L)^1/2 - sum of D's distinct
diagonal entries is maximised by L-BFGS.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.unit import FixedOrder
from dpfy.noise import dense as dense_strategy
from dpfy.noise.dense import Dense
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


Vector = NDArray[np.float64]
ROUNDS = 150


def dense_for_epochs(
    steps: int, pattern: FixedOrder, workload: Workload = PREFIX_SUMS, rounds: int = ROUNDS
) -> Dense:
    """The optimised dense strategy for a fixed order: valid for that order only, and best of all
    families there.
    """
    if check.integer("steps", steps) > MOST_STEPS:
        raise Unsupported(
            f"a dense strategy of {steps} steps",
            f"use at most {MOST_STEPS}, or a banded or BLT strategy",
        )
    period = pattern.steps_per_epoch
    # Steps that meet the same unit side by side: the dual variable is block-diagonal.
    blocks = [
        np.arange(start, steps, period)[: pattern.epochs] for start in range(min(period, steps))
    ]
    order = np.concatenate(blocks)
    a = workload.matrix(steps)[:, order] / np.sqrt(steps)
    gram = _Dual(a.T @ a, [len(block) for block in blocks]).solve(rounds)
    back = np.argsort(order)
    return lower_triangular(gram[np.ix_(back, back)])


class _Dual:
    """The dual function over block-diagonal factors L. The rows of a block have one length, so that
    D's diagonal is constant there.

    Free variables: the directions of the rows (lower-triangular, scaled at will) and the logarithm
    of each block's row length.
    """

    def __init__(self, energy: Matrix, sizes: list[int]) -> None:
        self.energy = energy
        self.sizes = sizes
        self.slices = [slice(end - size, end) for end, size in zip(np.cumsum(sizes), sizes)]
        self.places = [np.tril_indices(size) for size in sizes]

    def solve(self, rounds: int) -> Matrix:
        """X at the best dual point found, with its pattern exactly orthogonal and every unit's
        diagonal summing to one.
        """
        start = np.concatenate(
            [np.eye(size)[place] for size, place in zip(self.sizes, self.places)]
            + [np.zeros(len(self.sizes))]
        )
        found = minimize(
            self.negative,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": rounds, "maxcor": 20},
        )
        x = self.primal(self.factor(found.x)[0])[0]
        for block in self.slices:
            diagonal = x[block, block].diagonal().copy()
            x[block, block] = np.diag(diagonal)
            scale = np.ones(len(x))
            scale[block] = 1 / np.sqrt(diagonal.sum())
            x = x * np.outer(scale, scale)
        return x

    def negative(self, free: Vector) -> tuple[float, Vector]:
        """Minus the dual value, and its gradient."""
        factor, lengths = self.factor(free)
        x, value = self.primal(factor)
        slopes, stretches, price = [], [], 0.0
        for block, place, length in zip(self.slices, self.places, lengths):
            part = factor[block, block]
            slope = 2 * (np.eye(len(part)) / len(part) - x[block, block]) @ part
            norms = np.linalg.norm(part, axis=1, keepdims=True)
            unit = part / norms
            # Only turning a row is free here; its length is the block's.
            turn = (slope - (slope * unit).sum(axis=1, keepdims=True) * unit) * (norms / length)
            slopes.append(turn[place])
            stretches.append(float((slope * part).sum()))
            price += float((part**2).sum()) / len(part)
        return price - 2 * value, np.concatenate([*slopes, np.array(stretches)])

    def primal(self, factor: Matrix) -> tuple[Matrix, float]:
        """(X, trace of the root) at a factor."""
        middle = root(factor.T @ self.energy @ factor)
        inverse = np.zeros_like(factor)
        for block in self.slices:
            inverse[block, block] = np.linalg.inv(factor[block, block])
        return inverse.T @ middle @ inverse, float(np.trace(middle))

    def factor(self, free: Vector) -> tuple[Matrix, list[Matrix]]:
        """The block-diagonal factor, and the lengths of the free rows before they were
        normalised.
        """
        result, lengths = np.zeros_like(self.energy), []
        begin, scales = 0, np.exp(free[-len(self.sizes) :])
        for block, size, place, scale in zip(self.slices, self.sizes, self.places, scales):
            count = len(place[0])
            part = np.zeros((size, size))
            part[place] = free[begin : begin + count]
            length = np.linalg.norm(part, axis=1, keepdims=True)
            result[block, block] = scale * part / length
            lengths.append(length)
            begin += count
        return result, lengths
