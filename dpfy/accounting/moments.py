"""Log moments of a privacy loss, log E[exp(sL)], with certified errors: the ground of Chernoff
bounds and Rényi divergences.

An error in one log moment counts as often as the release is repeated, so it is bounded, checked
where it is made, and charged.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROUNDING = float(np.finfo(np.float64).eps)
QUADRATURE = 1e-12
"""The relative error charged for a moment found by quadrature; `settled` makes sure that it is
smaller by far.
"""
MOST_NODES = 100_000
"""Nodes of one quadrature; where more would be needed a closed upper bound stands in."""


class LogMoments(NamedTuple):
    """log E_P[exp(sL)], its first two derivatives in s, and a bound on the error of the first."""

    log: float
    mean: float
    variance: float
    error: float = 0.0

    @property
    def upper(self) -> float:
        """A certified upper bound on the log moment."""
        return self.log + self.error


def moments(log_weights: Array, losses: Array, s: float, error: float = 0.0) -> LogMoments:
    """log sum w exp(sL), its first two derivatives in s, and `error` with what rounding adds."""
    if not len(losses):
        return LogMoments(-math.inf, 0.0, 0.0)
    e, total, log, rounding = _tilted(log_weights, losses, s)
    mean = float((e * losses).sum()) / total
    variance = float((e * (losses - mean) ** 2).sum()) / total
    return LogMoments(log, mean, variance, error + rounding)


def log_moment(log_weights: Array, losses: Array, s: float) -> tuple[float, float]:
    """The log and the error of `moments` alone, in half the time."""
    return _tilted(log_weights, losses, s)[2:] if len(losses) else (-math.inf, 0.0)


def _tilted(log_weights: Array, losses: Array, s: float) -> tuple[Array, float, float, float]:
    """w exp(sL) over the largest of them, their sum, the log of the sum of w exp(sL), and what
    rounding may do to it.
    """
    exponents = log_weights + s * losses
    at = int(exponents.argmax())
    top = float(exponents[at])
    e = np.exp(exponents - top)
    total = float(e.sum())
    rounding = 16 * ROUNDING * (8 + abs(float(log_weights[at])) + abs(s * float(losses[at])))
    return e, total, top + math.log(total), rounding


def mixed(parts: list[tuple[float, LogMoments]]) -> LogMoments:
    """The moments of a sum of measures, each with its weight."""
    known = [(math.log(w) + m.log, m) for w, m in parts if w > 0 and m.log > -math.inf]
    if not known:
        return LogMoments(-math.inf, 0.0, 0.0)
    top = max(log for log, _ in known)
    shares = [math.exp(log - top) for log, _ in known]
    total = sum(shares)
    mean = sum(share * m.mean for share, (_, m) in zip(shares, known, strict=True)) / total
    variance = (
        sum(
            share * (m.variance + (m.mean - mean) ** 2)
            for share, (_, m) in zip(shares, known, strict=True)
        )
        / total
    )
    return LogMoments(
        top + math.log(total), mean, variance, max(m.error for _, m in known) + 16 * ROUNDING
    )


def trapezoid(
    low: float, high: float, step: float, hard_low: bool, hard_high: bool
) -> tuple[Array, Array]:
    """Points from `low` to `high` and the logs of their weights, for an integrand that is smooth in
    between.

    It must be negligible at an end that is not `hard`. A hard end, where it stops at full height,
    is pushed to infinity by a smooth change of variables that is straight elsewhere: sums over
    equal steps then converge geometrically, as they do on the whole line.
    """
    if not hard_low and not hard_high:
        x = np.linspace(low, high, max(64, math.ceil((high - low) / step) + 1))
        return x, np.full(len(x), math.log(x[1] - x[0]))
    unit = 3 * step
    length = (high - low) / unit
    tail = 44.0 + 2 * max(0.0, -math.log(min(length, 1.0)))
    first, last = (-tail if hard_low else 0.0), (length + tail if hard_high else length)
    u = np.linspace(first, last, math.ceil(3 * (last - first)) + 1)
    gap = math.log(u[1] - u[0])
    if not hard_high:
        return low + unit * np.logaddexp(0.0, u), gap + math.log(unit) - np.logaddexp(0.0, -u)
    back = np.logaddexp(0.0, length - u)
    if not hard_low:
        return high - unit * back, gap + math.log(unit) - np.logaddexp(0.0, u - length)
    # Both: the slope is the difference of two logistic functions, written as a product so that
    # nothing cancels.
    slope = -np.logaddexp(0.0, -u) - np.logaddexp(0.0, u - length) + math.log(-math.expm1(-length))
    x = low + unit * (np.logaddexp(0.0, u) - np.logaddexp(0.0, u - length))
    return np.clip(x, low, high), gap + math.log(unit) + slope


def settled(losses: Array, log_weights: Array, orders: tuple[float, ...]) -> bool:
    """Whether sums over equal steps agree with those over every second one at all of `orders`.

    They converge geometrically: the error of the finer sum is about the square of the difference,
    which is below 1e-8. And whether nothing that matters lies beyond the ends.
    """
    for s in orders:
        exponents = log_weights + s * losses
        exponents -= exponents.max()
        e = np.exp(exponents)
        if (
            abs(2 * float(e[::2].sum()) / float(e.sum()) - 1) > 1e-8
            or max(exponents[0], exponents[-1]) > -33
        ):
            return False
    return True
