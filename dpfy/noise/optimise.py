"""The best strategy of each Toeplitz family for a given run: banded, and with a banded inverse.

All optimisers minimise log(error^2 * sensitivity^2) by L-BFGS with exact gradients in float64. The
result's error and sensitivity are always evaluated again from its coefficients: an optimiser that
stops early costs accuracy of the model, never privacy.

The best buffered linear Toeplitz strategy for a run.

c(x) = product of (1 - theta_hat_j x) / (1 - theta_j x) with 1 > theta_1 > theta_hat_1 > theta_2 >
...: interlaced roots are the same as positive omega. The roots are optimised as a chain of ratios,
each through a logistic function, first-order sections in cascade.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import fftconvolve, lfilter
from scipy.special import expit, logit

from dpfy.core import check
from dpfy.core import unit as patterns
from dpfy.core.errors import Unsupported
from dpfy.noise import series
from dpfy.noise.sensitivity import capped, overlay
from dpfy.noise.toeplitz import (
    Banded,
    Blt,
    InverseBanded,
    NormalisedBanded,
    inverse_square_root_banded,
)
from dpfy.noise.workload import PREFIX_SUMS, Workload, errors

Vector = NDArray[np.float64]
OBJECTIVES = ("mean", "max")
Cost = Callable[[Vector], tuple[float, Vector]]
RESTARTS = 8
SETTINGS = {"maxiter": 3000, "maxfun": 6000, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
HUGE = 1e6
"""Stands for a point where the series overflow; the line search steps back from it."""


class StrategyObjective:
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


def pattern_of(pattern: patterns.Participation, steps: int) -> tuple[int, int]:
    """(most participations, separation) for which a Toeplitz strategy should be optimised."""
    if isinstance(pattern, patterns.FixedOrder):
        return capped(pattern.epochs, pattern.steps_per_epoch, steps), pattern.steps_per_epoch
    if isinstance(pattern, patterns.Separated):
        return capped(pattern.most, pattern.separation, steps), pattern.separation
    if isinstance(pattern, patterns.SecretBins):
        return capped(pattern.epochs, pattern.bins, steps), pattern.bins
    return 1, steps


def descend(
    function: Cost, start: Vector, bounds: list[tuple[float, float]] | None = None
) -> Vector:
    """The best point found by L-BFGS from `start`, started again where a line search gave up; never
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
    error = StrategyObjective(steps, objective, workload)
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
    pattern: patterns.Participation,
    objective: str = "mean",
    workload: Workload = PREFIX_SUMS,
) -> InverseBanded:
    """The strategy with a banded inverse that has the least error under `pattern`: no buffers at
    all.
    """
    check.integer("bands", bands)
    error = StrategyObjective(steps, objective, workload)
    most, separation = pattern_of(pattern, steps)
    start = np.array(inverse_square_root_banded(min(bands, steps)).noising_coefficient)
    # Under separation the sensitivity is a theorem only for non-increasing C: rises are made
    # expensive, the rest is cut off below.
    stiffness = 300.0 if isinstance(pattern, patterns.Separated) else 0.0
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
    if isinstance(pattern, patterns.Separated):
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


BELOW_ZERO = 0.5
"""How far the last root of the inverse may go below zero."""


def blt(
    buffers: int,
    steps: int,
    pattern: patterns.Participation,
    objective: str = "mean",
    workload: Workload = PREFIX_SUMS,
) -> Blt:
    """The BLT strategy with at most `buffers` buffers and the least error under `pattern`.

    Fewer buffers come back where one more does not help.
    """
    check.integer("buffers", buffers)
    cost = _Cost(steps, pattern, objective, workload)
    roots = [1 - 1 / max(4, steps), 1 - 1 / max(2.5, steps**0.5)]
    best: Blt | None = None
    for count in range(1, buffers + 1):
        found = [cost.solve(start) for start in _blt_starts(roots, count)]
        roots = min(found, key=lambda r: cost(_to_free(np.array(r)))[0])
        candidate = _strategy(roots)
        if candidate is not None and (
            best is None
            or _score(candidate, steps, pattern, objective, workload)
            < _score(best, steps, pattern, objective, workload)
        ):
            best = candidate
    assert best is not None, "one buffer always has a solution"
    return best


class _Cost:
    """log(error^2 * sensitivity^2) of a chain of roots."""

    def __init__(
        self, steps: int, pattern: patterns.Participation, objective: str, workload: Workload
    ) -> None:
        self.steps = steps
        self.error = StrategyObjective(steps, objective, workload)
        self.most, self.separation = pattern_of(pattern, steps)

    def __call__(self, free: Vector) -> tuple[float, Vector]:
        roots, jacobian = _chain(free)
        theta, hat = roots[::2], roots[1::2]
        c, d = _cascade(theta, hat, self.steps), _cascade(hat, theta, self.steps)
        if (
            c[min(1, len(c) - 1)] > 1
        ):  # then c is not non-increasing, and the closed form no theorem
            return np.inf, np.zeros_like(free)
        squared, slope = self.error(d)
        norm, norm_slope = squared_overlay(c, self.most, self.separation)
        gradient = np.empty(len(roots))
        for place, root in enumerate(roots):
            sign = 1.0 if place % 2 == 0 else -1.0
            both = lfilter([0.0, sign], [1.0, -root], np.stack([c, -d]))
            gradient[place] = norm_slope @ both[0] / norm + slope @ both[1] / squared
        return float(np.log(squared) + np.log(norm)), jacobian.T @ gradient

    def solve(self, start: list[float]) -> list[float]:
        """The best roots from a start."""
        free = descend(self, _to_free(np.array(start)))
        return [float(r) for r in _chain(free)[0]]


def _blt_starts(roots: list[float], count: int) -> list[list[float]]:
    """Starts with `count` pairs: one more pair at either end of the last solution, or all spread
    again.
    """
    if 2 * count == len(roots):
        return [roots, [roots[0], 0.5 * roots[0]]]
    last = max(roots[-1], 0.05)
    small = [*roots[:-1], last, 0.6 * last, 0.3 * last]
    large = [1 - (1 - roots[0]) * 1e-2, 1 - (1 - roots[0]) * 0.1, *roots]
    theta = 1 - (1 - roots[0]) ** (np.arange(1, count + 1) / count) * 0.9
    spread = [float(v) for t in theta for v in (t, 1 - 2.2 * (1 - t) if t > 0.7 else 0.4 * t)]
    ordered = all(a > b for a, b in itertools.pairwise(spread))
    return [small, large, spread] if ordered else [small, large]


def _cascade(poles: Vector, zeros: Vector, steps: int) -> Vector:
    """Series of the product of (1 - zero x) / (1 - pole x)."""
    out = np.zeros(steps)
    out[0] = 1.0
    for pole, zero in zip(poles, zeros):
        out = lfilter([1.0, -zero], [1.0, -pole], out)
    return out


def _chain(free: Vector) -> tuple[Vector, NDArray[np.float64]]:
    """Roots from free variables, each a fraction of the one before it, and the Jacobian."""
    share = expit(free)
    roots = np.cumprod(share)
    jacobian = np.tril(roots[:, None] * (1 - share)[None, :])
    before = roots[-2]
    roots[-1] = (before + BELOW_ZERO) * share[-1] - BELOW_ZERO
    jacobian[-1] = jacobian[-2] * share[-1]
    jacobian[-1, -1] = (before + BELOW_ZERO) * share[-1] * (1 - share[-1])
    return roots, jacobian


def _to_free(roots: Vector) -> Vector:
    ratios = roots / np.concatenate([[1.0], roots[:-1]])
    ratios[-1] = (roots[-1] + BELOW_ZERO) / (roots[-2] + BELOW_ZERO)
    free: Vector = logit(np.clip(ratios, 1e-9, 1 - 1e-9))
    return free


def _strategy(roots: list[float]) -> Blt | None:
    """theta and omega from the roots; None when two thetas have met, where omega has no stable
    value.
    """
    theta, hat = np.array(roots[::2]), np.array(roots[1::2])
    omega = []
    for j, t in enumerate(theta):
        gaps = np.delete(t - theta, j)
        if (np.abs(gaps) < 1e-9).any():
            return None
        omega.append(float(np.prod(t - hat) / np.prod(gaps)))
    if min(omega) < 0 or theta.max() >= 1:
        return None
    return Blt(tuple(float(t) for t in theta), tuple(omega))


def _score(
    strategy: Blt,
    steps: int,
    pattern: patterns.Participation,
    objective: str,
    workload: Workload,
) -> float:
    most, separation = pattern_of(pattern, steps)
    found = errors(strategy, patterns.Separated(separation, most), steps, workload)
    return found.rmse if objective == "mean" else found.max_error
