"""Laplace and Gaussian noise on bounded sums, drawn exactly as whole steps of a public grid.

The charge is that of the real-valued mechanism, and the integer noise is a little larger, by at most
a part in 2^20 on the grids chosen here, so that the charge is right:

Laplace. On integers, noise with P(x) proportional to exp(-|x|/b) and a shift of D has, at the
epsilons (D - 2j)/b, the delta 1 - exp(-j/b) of the real Laplace mechanism, and its delta falls with
epsilon. At an epsilon between the points j and j + 1 it is thus at most the delta at j + 1, which
is that of a real Laplace mechanism of shift D + 2 at the point j. So b = multiplier * (D + 2) is
charged as `multiplier`. Several coordinates: the noise is log-concave, so that tests by a threshold
are best for every shift, and the power of the best test at shift r + s is that at s taken after
that at r. Going from one data set to its neighbour one coordinate after the other gives at most the
power of a single coordinate moved by the L1 distance.

Gaussian. Let y be drawn by rounding at random a real Gaussian z of variance s^2 around an integer
x: P(y | z) proportional to exp(-(y - z)^2 / (2 t^2)). By Poisson summation the normalisation is t
sqrt(2 pi) up to a factor of 1 +- 2.1 exp(-2 pi^2 t^2), whatever z. Integrating over z, P(y) is, up
to such factors, exp(-(y - x)^2 / (2 (s^2 + t^2))) over its sum: the discrete Gaussian of variance
parameter s^2 + t^2. With t = 4 the factors are 1 +- 1e-136 for each coordinate. So discrete noise
of parameter sqrt(s^2 + 16) is post-processing of real noise of standard deviation s, up to a factor
that is far below what accounting rounds its answers up by (1e-13).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.grid import Grid, Laid
from dpfy.mechanisms.mechanism import source

ROUNDING = 16
"""The variance of the random rounding that makes integers of real Gaussian noise, in squared
steps.
"""
TAIL = 2
"""By how many steps a real Laplace mechanism must be moved farther to cover one on integers."""


@dataclass(frozen=True)
class Additive(ABC):
    """Noise on a sum, of `noise_multiplier` times the norm of what one unit adds."""

    noise_multiplier: float

    norm: ClassVar[str]

    def __post_init__(self) -> None:
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )

    @property
    @abstractmethod
    def event(self) -> events.Event:
        """All that a release does."""

    @abstractmethod
    def _whole(self, most: Fraction) -> int:
        """The parameter of the integer noise for a norm of `most` steps."""

    @abstractmethod
    def draw(self, count: int, parameter: int, bits: Bits) -> NDArray[np.int64]:
        """Integer noise of this parameter."""

    def parameter(self, grid: Grid, bound: Bound) -> int:
        """The parameter of the noise that is drawn, in steps of the grid."""
        return self._whole(grid.steps(bound.finite(self.norm, f"{type(self).__name__} noise")))

    def scale(self, bound: Bound) -> float:
        """The parameter of the noise in the units of the data; a little below what is drawn."""
        return self.noise_multiplier * bound.finite(self.norm, f"{type(self).__name__} noise")

    def grid(self, bound: Bound, coordinates: int = 1) -> Grid:
        """Where contributions of this bound are best summed."""
        return Grid.of(self.scale(bound), coordinates)

    def release(
        self,
        total: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[Any]:
        """The sum with noise: a number, or an array of the shape of the sum.

        `total` holds integers on a grid (`Grid.sum`), or numbers that were summed elsewhere, whose
        rounding is charged.

        Guarantees: refuses a step or an event that the permit does not cover, and a sum without the
        norm that the noise needs. The noise is drawn exactly on a public grid; it is a function of
        (secret, name of the permit, step). Nothing is raised because of the data.
        """
        if not isinstance(total.value, Laid):
            total = self.grid(total.bound, max(1, np.size(total.value))).lay(total)
        grid, counts = total.value.grid, total.value.counts
        parameter = self.parameter(grid, total.bound)
        bits = source(self.event, permit, randomness, step)
        noise = self.draw(counts.size, parameter, bits).reshape(counts.shape)
        return Private(grid.values(np.asarray(counts + noise)))


@dataclass(frozen=True)
class LaplaceMechanism(Additive):
    """Laplace noise of scale `noise_multiplier` times the L1 norm of what one unit adds: pure
    epsilon of 1 / noise_multiplier.
    """

    norm: ClassVar[str] = "l1"

    @property
    def event(self) -> events.Event:
        """One Laplace release."""
        return events.Laplace(self.noise_multiplier)

    def stddev(self, bound: Bound) -> float:
        """The standard deviation of a released coordinate."""
        return math.sqrt(2) * self.scale(bound)

    def _whole(self, most: Fraction) -> int:
        return math.ceil(Fraction(self.noise_multiplier) * (math.floor(most) + TAIL))

    def draw(self, count: int, parameter: int, bits: Bits) -> NDArray[np.int64]:
        return integers.laplace(count, parameter, bits)


@dataclass(frozen=True)
class GaussianMechanism(Additive):
    """Gaussian noise of standard deviation `noise_multiplier` times the L2 norm of what one unit
    adds.

    The multiplier for an epsilon and a delta is `dpfy.accounting.gaussian.sigma_analytic`, the
    least there is (Balle & Wang 2018); `sigma_classic`, `sigma_blog` and `sigma_pei` there are for
    comparison.
    """

    norm: ClassVar[str] = "l2"

    @property
    def event(self) -> events.Event:
        """One Gaussian release."""
        return events.Gaussian(self.noise_multiplier)

    def stddev(self, bound: Bound) -> float:
        """The standard deviation of a released coordinate."""
        return self.scale(bound)

    def _whole(self, most: Fraction) -> int:
        return math.isqrt(math.ceil((Fraction(self.noise_multiplier) * most) ** 2) + ROUNDING) + 1

    def draw(self, count: int, parameter: int, bits: Bits) -> NDArray[np.int64]:
        return integers.gaussian(count, parameter, bits)
