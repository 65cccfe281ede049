"""The best strategy of each Toeplitz family for a given run: banded, and with a banded inverse.

All optimisers minimise log(error^2 * sensitivity^2) by L-BFGS with exact gradients in float64. The
result's error and sensitivity are always evaluated again from its coefficients: an optimiser that
stops early costs accuracy of the model, never privacy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import fftconvolve

from dpfy.core import check, participation
from dpfy.core.errors import Unsupported
from dpfy.noise import series
from dpfy.noise.banded import Banded, NormalisedBanded
from dpfy.noise.inverse import InverseBanded, inverse_square_root_banded
from dpfy.noise.sensitivity import capped, overlay
from dpfy.noise.workload import PREFIX_SUMS, Workload

Vector = NDArray[np.float64]
OBJECTIVES = ("mean", "max")
Cost = Callable[[Vector], tuple[float, Vector]]
RESTARTS = 8
SETTINGS = {"maxiter": 3000, "maxfun": 6000, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
HUGE = 1e6
"""Stands for a point where the series overflow; the line search steps back from it."""


class Objective:
    """The squared error as a function of the noising series d, with its gradient."""

    def __init__(
        self, steps: int, objective: str = "mean", workload: Workload = PREFIX_SUMS
    ) -> None:
        check.one_of("objective", objective, OBJECTIVES)
        self.steps = steps
        self.quadratic: NDArray[np.float64] | None = None
        if workload.is_toeplitz:
            # The error grows with the step, so the largest is the last.
            self.weights = 1 - np.arange(steps) / steps if objective == "mean" else np.ones(steps)
            self.workload = workload.coefficients(steps)
            self.sums = workload == PREFIX_SUMS
        elif objective == "max":
            raise Unsupported(
                "the max objective with a learning-rate schedule", 'use objective "mean"'
            )
        else:
            self.quadratic = _along_diagonals(workload.matrix(steps)) / steps

    def __call__(self, noising: Vector) -> tuple[float, Vector]:
        """(squared error, gradient with respect to d)."""
        if self.quadratic is not None:
            image = self.quadratic @ noising
            return float(noising @ image), 2 * image
        response = (
            np.cumsum(noising) if self.sums else series.convolve(self.workload, noising, self.steps)
        )
        slope = 2 * self.weights * response
        back = (
            np.cumsum(slope[::-1])[::-1]
            if self.sums
            else correlate(slope, self.workload, self.steps)
        )
        return float((self.weights * response**2).sum()), back


def _along_diagonals(workload: NDArray[np.float64]) -> NDArray[np.float64]:
    """K with d^T K d = sum of the squares of A M, M Toeplitz with first column d: sums of A^T A
    along its diagonals.
    """
    gram = workload.T @ workload
    total = np.zeros_like(gram)
    n = len(gram)
    for offset in range(n):
        sums = np.cumsum(np.diagonal(gram, offset)[::-1])[::-1]
        rows = np.arange(n - offset)
        total[rows, rows + offset] = sums
        total[rows + offset, rows] = sums
    return total


def correlate(slope: Vector, other: Vector, count: int) -> Vector:
    """r_k = sum over i of slope_i other_(i-k), for k < count: the adjoint of a convolution with
    `other`.
    """
    n = len(slope)
    result: Vector = fftconvolve(slope, other[::-1])[n - 1 : n - 1 + count]
    return result


def inverse_gradient(slope: Vector, inverse: Vector, count: int) -> Vector:
    """Gradient with respect to a series, given the gradient `slope` with respect to its inverse."""
    return -correlate(slope, series.convolve(inverse, inverse, len(inverse)), count)


def squared_overlay(c: Vector, most: int, separation: int) -> tuple[float, Vector]:
    """The squared closed-form sensitivity of c and its gradient."""
    times = capped(most, separation, len(c))
    if times * separation >= len(
        c
    ):  # every shift that reaches: running sums, whatever their number
        total = _running(c, separation)
        return float(total @ total), 2 * _running(total[::-1], separation)[::-1]
    total = overlay(c, most, separation)
    slope = np.zeros_like(c)
    for j in range(times):
        slope[: len(c) - j * separation] += 2 * total[j * separation :]
    return float(total @ total), slope


def _running(c: Vector, separation: int) -> Vector:
    """c_i + c_(i - b) + c_(i - 2b) + ..., for each i."""
    separation = min(separation, len(c))  # one that is longer reaches nothing
    rows = -(-len(c) // separation)
    padded = np.zeros(rows * separation)
    padded[: len(c)] = c
    result: Vector = padded.reshape(rows, separation).cumsum(axis=0).ravel()[: len(c)]
    return result


def pattern_of(pattern: participation.Participation, steps: int) -> tuple[int, int]:
    """(most participations, separation) for which a Toeplitz strategy should be optimised."""
    if isinstance(pattern, participation.FixedOrder):
        return capped(pattern.epochs, pattern.steps_per_epoch, steps), pattern.steps_per_epoch
    if isinstance(pattern, participation.Separated):
        return capped(pattern.most, pattern.separation, steps), pattern.separation
    if isinstance(pattern, participation.SecretBins):
        return capped(pattern.epochs, pattern.bins, steps), pattern.bins
    return 1, steps


def descend(
    function: Cost, start: Vector, bounds: list[tuple[float, float]] | None = None
) -> Vector:
    """The best point found by L-BFGS from `start`, begun anew where a line search gave up; never
    worse than `start`.
    """

    def guarded(point: Vector) -> tuple[float, Vector]:
        with np.errstate(all="ignore"):
            value, slope = function(point)
        return (
            (value, slope)
            if np.isfinite(value) and np.isfinite(slope).all()
            else (HUGE, np.zeros_like(point))
        )

    best, value = start, guarded(start)[0]
    for _ in range(RESTARTS):
        found = minimize(
            guarded, best, jac=True, method="L-BFGS-B", bounds=bounds, options=SETTINGS
        )
        gain = value - float(found.fun)
        if gain > 0:
            best, value = found.x, float(found.fun)
        if gain < 1e-11:
            break
    return best


def best_of(
    function: Cost, starts: list[Vector], bounds: list[tuple[float, float]] | None = None
) -> Vector:
    """The best end point over all starts."""
    ends = [descend(function, start, bounds) for start in starts]
    return min(ends, key=lambda end: function(end)[0])


def banded(
    bands: int, steps: int, objective: str = "mean", workload: Workload = PREFIX_SUMS
) -> Banded:
    """The banded Toeplitz strategy with the least error for one participation, or for many that are
    at least `bands` apart.
    """
    check.integer("bands", bands)
    check.integer("steps", steps)
    error = Objective(steps, objective, workload)
    bands = min(bands, steps)
    if bands == 1:
        return Banded((1.0,))

    def cost(free: Vector) -> tuple[float, Vector]:
        c = np.concatenate([[1.0], free])
        d = series.inverse(c, steps)
        squared, slope = error(d)
        norm = float(c @ c)
        return float(np.log(squared) + np.log(norm)), inverse_gradient(slope, d, bands)[
            1:
        ] / squared + 2 * free / norm

    free = best_of(cost, _starts(cost, series.square_root(bands)[1:]))
    return Banded((1.0, *(float(c) for c in free)))


def _starts(cost: Cost, root: Vector) -> list[Vector]:
    """The square root, and the best of a few slower decays: long runs with few bands want one."""
    slower = [root**power for power in (0.75, 0.5, 0.3, 0.15)]
    return [root, min(slower, key=lambda start: cost(start)[0])]


def normalised_banded(bands: int, steps: int, workload: Workload = PREFIX_SUMS) -> NormalisedBanded:
    """The optimised banded strategy with all columns scaled to norm one: a little better again, for
    exactly `steps` steps.
    """
    return NormalisedBanded(banded(bands, steps, "mean", workload).coefficient, steps)


def inverse_banded(
    bands: int,
    steps: int,
    pattern: participation.Participation,
    objective: str = "mean",
    workload: Workload = PREFIX_SUMS,
) -> InverseBanded:
    """The strategy with a banded inverse that has the least error under `pattern`: no buffers at
    all.
    """
    check.integer("bands", bands)
    error = Objective(steps, objective, workload)
    most, separation = pattern_of(pattern, steps)
    start = np.array(inverse_square_root_banded(min(bands, steps)).noising_coefficient)
    # Under separation the sensitivity is a theorem only for non-increasing C: rises are made
    # expensive, the rest is cut off below.
    stiffness = 300.0 if isinstance(pattern, participation.Separated) else 0.0
    if len(start) == 1:
        return InverseBanded((1.0,))

    def cost(free: Vector) -> tuple[float, Vector]:
        d = series.padded(np.concatenate([[1.0], free]), steps)
        c = series.inverse(d[: len(free) + 1], steps)
        squared, slope = error(d)
        norm, norm_slope = squared_overlay(c, most, separation)
        rises = np.maximum(np.diff(c), 0) * stiffness
        value = float(np.log(squared) + np.log(norm) + rises @ rises)
        bend = np.concatenate([[0.0], 2 * stiffness * rises]) - np.concatenate(
            [2 * stiffness * rises, [0.0]]
        )
        return value, slope[1 : len(free) + 1] / squared + inverse_gradient(
            norm_slope / norm + bend, c, len(free) + 1
        )[1:]

    damped = [start[1:] * share for share in (1.0, 0.9, 1.1)]
    free = best_of(cost, damped, bounds=[(-2.0, 0.0)] * (len(start) - 1))
    if isinstance(pattern, participation.Separated):
        free = _monotone(free, start[1:], steps)
    return InverseBanded((1.0, *(min(0.0, float(d)) for d in free)))


def _monotone(free: Vector, safe: Vector, steps: int) -> Vector:
    """The point nearest to `free`, on the way from `safe`, whose C is non-increasing: where the
    closed form is a theorem.
    """
    for share in np.linspace(1, 0, 1001):
        mixed: Vector = share * free + (1 - share) * safe
        if (np.diff(series.inverse(np.concatenate([[1.0], mixed]), steps)) <= 0).all():
            return mixed
    return safe
