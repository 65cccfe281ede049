"""Exact sensitivities: the largest ||C u|| over the contributions that a participation pattern
allows, each of norm at most one.

Every function here is exact up to a relative 1e-12, by which the value is rounded up, and raises
`Unsupported` outside the case in which its formula is a theorem. `separated_bound` alone is an
upper bound, and says so.

Notation: n steps, at most k participations, b the separation (or the period of a fixed order), X =
C^T C.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise.series import width

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpfy.noise.series import Vector

    Matrix = NDArray[np.float64]

ROUNDING = 1e-12
ENUMERATED = 200_000


def up(value: float) -> float:
    """A little above `value`, to cover the rounding of the sums behind it."""
    return float(value) * (1 + ROUNDING)


def capped(most: int, separation: int, steps: int) -> int:
    """How many participations fit: never more than ceil(n / b)."""
    return min(most, -(-steps // separation))


def check_length(pattern: patterns.Participation, steps: int) -> None:
    """Balls-in-bins is accounted for whole epochs: the sensitivity of another run would be that of
    another release.
    """
    if isinstance(pattern, patterns.SecretBins) and steps != pattern.bins * pattern.epochs:
        raise InvalidInput(
            "steps", steps, f"must be {pattern.epochs} epochs of {pattern.bins} bins"
        )


def toeplitz(coefficients: Vector, pattern: patterns.Participation, steps: int) -> float:
    """Sensitivity of the lower-triangular Toeplitz matrix with this first column under `pattern`.

    Guarantees: exact. One participation: the first column is the longest. A fresh sample at every
    step: one band only. Cyclic Poisson: at most `cycle` bands, so that two participations never
    meet (Choquette-Choo et al. 2023, theorem 4). Fixed order: non-negative coefficients, or no more
    bands than the period. Separated: no more bands than the separation, or non-negative
    non-increasing coefficients (Kalinin & Lampert 2024, theorem 2). Everything else raises.
    """
    check_length(pattern, steps)
    c = np.asarray(coefficients, dtype=np.float64)[:steps]
    bands = width(c)
    if isinstance(pattern, patterns.SinglePass):
        return single_pass(c)
    if isinstance(pattern, patterns.Poisson | patterns.WithoutReplacement):
        if bands > 1:
            raise Unsupported(
                f"a fresh sample at every step with a strategy of {bands} bands",
                "use cyclic Poisson sampling with a cycle of at least as many steps",
            )
        return single_pass(c)
    if isinstance(pattern, patterns.CyclicPoisson):
        if bands > pattern.cycle:
            raise Unsupported(
                f"cyclic Poisson sampling with {bands} bands and a cycle of {pattern.cycle}",
                f"use a cycle of at least {bands} or fewer bands",
            )
        return single_pass(c)
    if isinstance(pattern, patterns.FixedOrder):
        return fixed_order(c, pattern.epochs, pattern.steps_per_epoch)
    if isinstance(pattern, patterns.SecretBins):
        if (c < 0).any():
            raise Unsupported(
                "balls-in-bins with negative coefficients", "use non-negative coefficients"
            )
        return fixed_order(c, pattern.epochs, pattern.bins)
    if isinstance(pattern, patterns.Separated):
        return separated(c, pattern.most, pattern.separation)
    if bands > 1:
        raise Unsupported(
            f"reshuffling between epochs with a strategy of {bands} bands",
            "keep the order fixed (FixedOrder) or enforce a separation (Separated)",
        )
    return up(abs(float(c[0])) * math.sqrt(capped(pattern.epochs, pattern.steps_per_epoch, steps)))


def single_pass(c: Vector) -> float:
    """The norm of the first column, of which every other column is a beginning."""
    return up(float(np.linalg.norm(c)))


def overlay(c: Vector, most: int, separation: int) -> Vector:
    """C u for participations at 0, b, 2b, ...: the sum of the shifted columns."""
    total = np.zeros(len(c))
    for j in range(capped(most, separation, len(c))):
        total[j * separation :] += c[: len(c) - j * separation]
    return total


def fixed_order(c: Vector, most: int, period: int) -> float:
    """Toeplitz, participations at s, s + b, ...: a later start only cuts the response short, so s =
    0 is the worst.
    """
    if most == 1 or capped(most, period, len(c)) == 1:
        return single_pass(c)
    if width(c) <= period:
        return _disjoint(c, most, period)
    if (c < 0).any():
        raise Unsupported(
            "a fixed order with negative coefficients and more bands than the period",
            "use non-negative coefficients",
        )
    return up(float(np.linalg.norm(overlay(c, most, period))))


def separated(c: Vector, most: int, separation: int) -> float:
    """Toeplitz, any k participations at least b apart: the closed form, where it is a theorem."""
    if most == 1 or capped(most, separation, len(c)) == 1:
        return single_pass(c)
    if width(c) <= separation:
        return _disjoint(c, most, separation)
    # A rise of a rounding error is no rise; the majorant without it is a little above c, which is
    # the private side.
    falling = np.maximum.accumulate(c[::-1])[::-1]
    if (c < 0).any() or (falling - c).max() > ROUNDING * c.max():
        raise Unsupported(
            f"{width(c)} bands under a separation of {separation} with negative or increasing "
            f"coefficients",
            "use at most as many bands as the separation, or non-negative non-increasing "
            "coefficients",
        )
    return up(float(np.linalg.norm(overlay(falling, most, separation))))


def _disjoint(c: Vector, most: int, separation: int) -> float:
    """Columns that never overlap: their squared norms add up, whatever the signs, and earlier
    columns are longer.
    """
    squares = np.cumsum(c**2)
    ends = len(c) - separation * np.arange(capped(most, separation, len(c)))
    return up(math.sqrt(float(squares[ends - 1].sum())))


def dense(matrix: Matrix, pattern: patterns.Participation) -> float:
    """Sensitivity of a general matrix (rows: noisy values, columns: steps) under `pattern`.

    Guarantees: exact. Fixed order needs X >= 0 on the pattern. Separated needs X to vanish at
    distance b or few enough patterns to look at all of them. Everything else raises.
    """
    steps = matrix.shape[1]
    check_length(pattern, steps)
    gram = matrix.T @ matrix
    longest = up(math.sqrt(float(gram.diagonal().max())))
    if isinstance(pattern, patterns.SinglePass):
        return longest
    if isinstance(pattern, patterns.Poisson | patterns.WithoutReplacement):
        if not _vanishes(gram, 1):
            raise Unsupported(
                "a fresh sample at every step with a strategy of more than one band",
                "use cyclic Poisson sampling and a banded strategy",
            )
        return longest
    if isinstance(pattern, patterns.CyclicPoisson):
        if not _vanishes(gram, pattern.cycle):
            raise Unsupported(
                f"cyclic Poisson sampling with more bands than its cycle of {pattern.cycle}",
                "use a strategy with at most that many bands",
            )
        return longest
    if isinstance(pattern, patterns.FixedOrder):
        return fixed_order_dense(gram, pattern.epochs, pattern.steps_per_epoch)
    if isinstance(pattern, patterns.SecretBins):
        if (matrix < 0).any():
            raise Unsupported(
                "balls-in-bins with negative entries", "use a strategy with non-negative entries"
            )
        return fixed_order_dense(gram, pattern.epochs, pattern.bins)
    if isinstance(pattern, patterns.Separated):
        return separated_dense(gram, pattern.most, pattern.separation)
    if not _vanishes(gram, 1):
        raise Unsupported(
            "reshuffling between epochs with a dense strategy", "keep the order fixed (FixedOrder)"
        )
    return up(longest * math.sqrt(capped(pattern.epochs, pattern.steps_per_epoch, steps)))


def fixed_order_dense(gram: Matrix, most: int, period: int) -> float:
    """max over starts s of the sum of X over s, s + b, ..., where no entry there is negative."""
    best = 0.0
    for start in range(len(gram)):
        places = np.arange(start, len(gram), period)[:most]
        best = max(best, _total(gram[np.ix_(places, places)]))
    return up(math.sqrt(best))


def separated_dense(gram: Matrix, most: int, separation: int) -> float:
    """Exact for X that vanishes at distance b, and by enumeration when there are few patterns."""
    steps = len(gram)
    k = capped(most, separation, steps)
    if k == 1 or _vanishes(gram, separation):
        return up(math.sqrt(float(best_spread(gram.diagonal()[None], k, separation)[0])))
    sizes = [(j, steps - (j - 1) * (separation - 1)) for j in range(1, k + 1)]
    if sum(math.comb(free, j) for j, free in sizes) > ENUMERATED:
        raise Unsupported(
            "the exact sensitivity of this dense strategy under a minimum separation",
            "use at most as many bands as the separation, or keep the order fixed (FixedOrder)",
        )
    best = 0.0
    for j, free in sizes:
        for chosen in combinations(range(free), j):
            places = np.array(chosen) + (separation - 1) * np.arange(j)
            best = max(best, _total(gram[np.ix_(places, places)]))
    return up(math.sqrt(best))


def separated_bound(gram: Matrix, most: int, separation: int) -> float:
    """An UPPER BOUND for any X under separation, in two stages: the best row sums, then the best
    rows. Not exact in general.
    """
    k = capped(most, separation, len(gram))
    rows = best_spread(np.abs(gram), k, separation)
    return up(math.sqrt(float(best_spread(rows[None], k, separation)[0])))


def best_spread(values: Matrix, most: int, separation: int) -> Vector:
    """For each row: the largest sum of at most k entries that are at least b places apart."""
    rows, steps = values.shape
    best = np.zeros((steps + separation + 1, rows))
    for _ in range(most):
        new = np.zeros_like(best)
        for i in range(steps - 1, -1, -1):
            new[i] = np.maximum(new[i + 1], values[:, i] + best[i + separation])
        best = new
    result: Vector = best[0]
    return result


def _vanishes(gram: Matrix, distance: int) -> bool:
    """Whether columns at least `distance` apart are orthogonal, exactly."""
    return not np.triu(gram, distance).any()


def _total(block: Matrix) -> float:
    """Sum of |X| on a pattern; exact only without negative entries (a rounding error of 1e-12 is
    forgiven, upwards).
    """
    total = float(np.abs(block).sum())
    if total - float(block.sum()) > ROUNDING * total:
        raise Unsupported(
            "a strategy whose columns have negative inner products on the pattern",
            "use a strategy with non-negative entries",
        )
    return total
