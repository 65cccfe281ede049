"""The best buffered linear Toeplitz strategy for a run.

c(x) = product of (1 - theta_hat_j x) / (1 - theta_j x) with 1 > theta_1 > theta_hat_1 > theta_2 >
...: interlaced roots are the same as positive omega. The roots are optimised as a chain of ratios,
each through a logistic function, first-order sections in cascade.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.special import expit, logit

from dpfy.core import check, participation
from dpfy.noise.blt import Blt
from dpfy.noise.error import errors
from dpfy.noise.optimise import Objective, descend, pattern_of, squared_overlay
from dpfy.noise.workload import PREFIX_SUMS, Workload

Vector = NDArray[np.float64]
BELOW_ZERO = 0.5
"""How far the last root of the inverse may go below zero."""


def blt(
    buffers: int,
    steps: int,
    pattern: participation.Participation,
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
        found = [cost.solve(start) for start in _starts(roots, count)]
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
        self, steps: int, pattern: participation.Participation, objective: str, workload: Workload
    ) -> None:
        self.steps = steps
        self.error = Objective(steps, objective, workload)
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


def _starts(roots: list[float], count: int) -> list[list[float]]:
    """Starts with `count` pairs: one more pair at either end of the last solution, or all spread
    anew.
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
    pattern: participation.Participation,
    objective: str,
    workload: Workload,
) -> float:
    most, separation = pattern_of(pattern, steps)
    found = errors(strategy, participation.Separated(separation, most), steps, workload)
    return found.rmse if objective == "mean" else found.max_error
