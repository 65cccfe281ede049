"""Balls-in-bins whose responses do not overlap: delta by convolution on a grid, an upper bound
without any chance.

With orthogonal responses the likelihood ratio of the release is S = mean over bins of independent
log-normal Y_k, each with mean one under Q. Removing the unit costs the call E (S - e^eps)_+, adding
it e^eps times the put E (e^-eps - S)_+; E S = 1 makes the call with strike K 1 - K more than the
put. They are convex in each Y_k, so that moving Y_k at random to one of the two grid points around
it, with its mean kept, can only raise them (Jensen's inequality).

Small strikes: Fourier transforms, on fine grids. What matters for the put are sums below m K. A Y_k
beyond that makes it zero and is left out; the sums that wrap around the grid only raise it.
Rounding is charged by the standard bound of a transform in the Euclidean norm. Large strikes: there
that charge is too much. Sums of non-negative products have no cancellation and so a relative error
only.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]
LEAST_CELLS, MOST_CELLS = 2**15, 2**20
DIRECT_CELLS = 2**12
ROOM = 4
"""The grid is this many times as long as the sums that matter."""
DAMPING = 20.0
"""What wraps around the grid is multiplied by e^-DAMPING."""
SPREAD = 0.02
"""Cells are at most this part of a bin's standard deviation, where the most cells allow it."""
TOO_MUCH = 0.01
"""A charge for rounding above this part of delta is worth the slower way."""
SHARED = 1.3
"""Strikes within this factor are read off one grid."""
UNIT = 2.0**-52
RELATIVE = 1e-9
"""More than the relative rounding error of all sums of non-negative products here: about terms x
levels x UNIT.
"""


@dataclass(frozen=True)
class Orthogonal:
    """The pair of a release whose bins have responses of these lengths, in units of the noise, at
    right angles to each other.
    """

    norms: tuple[float, ...]

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta at `epsilon` >= 0, the larger of both directions."""
        return min(1.0, max(self.removed(epsilon), self.added(epsilon)))

    def removed(self, epsilon: float) -> float:
        """The bound for removing the unit."""
        return float(self.removing(np.array([epsilon]))[0])

    def added(self, epsilon: float) -> float:
        """The bound for adding the unit."""
        return float(self.adding(np.array([epsilon]))[0])

    def removing(self, epsilons: Floats) -> Floats:
        """The bounds for removing the unit at many epsilons; strikes within a factor `SHARED` share
        a grid.
        """
        strikes, found = np.exp(epsilons), np.empty(len(epsilons))
        for group in _groups(strikes):
            put, rounding = self.puts(strikes[group])
            bound = np.maximum(1 - strikes[group] + put, 0.0) + rounding + 4 * UNIT * strikes[group]
            doubtful = rounding > TOO_MUCH * bound
            if doubtful.any():
                bound[doubtful] = np.minimum(bound[doubtful], self.calls(strikes[group][doubtful]))
            found[group] = bound
        return found

    def adding(self, epsilons: Floats) -> Floats:
        """The bounds for adding the unit at many epsilons."""
        strikes, found = np.exp(-epsilons), np.empty(len(epsilons))
        for group in _groups(strikes):
            put, rounding = self.puts(strikes[group])
            found[group] = np.exp(epsilons[group]) * (put + rounding)
        return found

    def puts(self, strikes: Floats) -> tuple[Floats, Floats]:
        """E (strike - S)_+ under Q, from above but for rounding, and bounds on what was lost by
        rounding; one grid for all strikes.
        """
        most = float(strikes.max())
        bins, cells = len(self.norms), self._cells(most)
        size, step = ROOM * cells, len(self.norms) * most / cells
        damped = np.exp(-DAMPING / size * np.arange(cells + 1))
        spectrum, error, mass = np.ones(size // 2 + 1, dtype=np.complex128), 0.0, 1.0
        for norm, count in Counter(self.norms).items():
            masses = np.zeros(size)
            masses[: cells + 1] = split(norm, step, cells) * damped
            spectrum *= np.fft.rfft(masses) ** count
            total = float(masses.sum())
            error += count * float(np.linalg.norm(masses)) / max(total, UNIT)
            mass *= total**count
        sums = np.fft.irfft(spectrum, size)[:cells]
        spread = 6 * UNIT * math.log2(size) * (error * mass + float(np.linalg.norm(sums)))
        found, lost = [], []
        for strike in map(float, strikes):
            worth = np.maximum(strike - np.arange(cells) * step / bins, 0.0) / damped[:cells]
            found.append(float(worth @ sums))
            lost.append(spread * float(np.linalg.norm(worth)) + 8 * bins * UNIT * strike)
        return np.array(found), np.array(lost)

    def calls(self, strikes: Floats) -> Floats:
        """E (S - strike)_+ under Q, from above: all bins are added up pair by pair, with what lies
        at or beyond the largest strike kept apart.
        """
        bins, most = len(self.norms), float(strikes.max())
        step = bins * most / DIRECT_CELLS
        total = CellSum(np.eye(1, DIRECT_CELLS)[0], 0.0, 0.0, 0.0)
        for norm, count in Counter(self.norms).items():
            total = total.plus(_beyond(norm, step).times(count))
        place, found = np.arange(DIRECT_CELLS) * step / bins, []
        for strike in map(float, strikes):
            within = place > strike
            gain = total.moment * step / bins + float((total.below * place)[within].sum())
            mass = total.beyond + float(total.below[within].sum())
            found.append(max(gain - strike * mass, 0.0) + RELATIVE * gain)
        return np.array(found)

    def _cells(self, strike: float) -> int:
        """A power of two: fine enough that moving to the grid adds little to the variance of the
        sum.
        """
        bins = len(self.norms)
        spread = min(math.sqrt(math.expm1(min(norm**2, 50.0))) for norm in self.norms)
        wanted = bins * strike / max(SPREAD * spread, 3e-4 * strike * math.sqrt(bins))
        return int(min(max(2 ** math.ceil(math.log2(wanted)), LEAST_CELLS), MOST_CELLS))


def _groups(strikes: Floats) -> list[NDArray[np.intp]]:
    """Indices of strikes that lie within a factor `SHARED` of each other."""
    left, groups = np.argsort(-strikes), []
    while len(left):
        near = strikes[left] * SHARED >= strikes[left[0]]
        groups.append(left[near])
        left = left[~near]
    return groups


@dataclass(frozen=True)
class CellSum:
    """A sum of independent grid values: masses below the strike, and mass, moment beyond it and
    mean in cells.
    """

    below: Floats
    beyond: float
    moment: float
    mean: float

    def plus(self, other: CellSum) -> CellSum:
        """The sum of two independent sums. Every term is non-negative."""
        cells = len(self.below)
        place = np.arange(cells)
        mass = np.concatenate(
            [[other.beyond], other.below[:0:-1]]
        ).cumsum()  # at or beyond cells, cells - 1, ..., 1
        moment = np.concatenate([[other.moment], (place * other.below)[:0:-1]]).cumsum()
        beyond = self.beyond + float(self.below @ mass)
        moments = (
            self.moment + self.beyond * other.mean + float(self.below @ (place * mass + moment))
        )
        return CellSum(
            np.convolve(self.below, other.below)[:cells], beyond, moments, self.mean + other.mean
        )

    def times(self, count: int) -> CellSum:
        """The sum of `count` such sums, by doubling."""
        half = self.times(count // 2) if count > 1 else None
        if half is None:
            return self
        return half.plus(half).plus(self) if count % 2 else half.plus(half)


def _beyond(norm: float, step: float) -> CellSum:
    masses = split(norm, step, DIRECT_CELLS)
    cut = math.log(DIRECT_CELLS * step) / norm + norm / 2
    beyond = float(ndtr(-cut)) + float(masses[-1])
    return CellSum(
        masses[:-1],
        beyond,
        float(ndtr(norm - cut)) / step + float(masses[-1]) * DIRECT_CELLS,
        1 / step,
    )


def split(norm: float, step: float, cells: int) -> Floats:
    """Masses at 0, step, ..., cells * step of exp(norm x - norm^2 / 2), x standard normal, moved to
    the grid with its mean kept.

    What lies beyond the grid is left out.
    """
    edges = np.arange(cells + 1) * step
    with np.errstate(divide="ignore"):
        cut = np.log(edges) / norm + norm / 2
    mass, moment = _between(cut), _between(cut - norm)
    right = np.clip(moment / step - np.arange(cells) * mass, 0, mass)
    found = np.zeros(cells + 1)
    found[:-1] = mass - right
    found[1:] += right
    return found


def _between(edges: Floats) -> Floats:
    """Standard normal mass between neighbouring edges; in the upper half by the upper tails, which
    keep their relative precision.
    """
    lower, upper = np.diff(ndtr(edges)), -np.diff(ndtr(-edges))
    return np.asarray(np.where(edges[:-1] > 0, upper, lower))
