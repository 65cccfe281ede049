"""Integer noise on whole numbers, charged exactly: two-sided geometric noise and the discrete
Gaussian.

Vectors are charged by their L1 norm: both laws are log-concave, so that one coordinate moved by the
whole L1 distance is the worst case (:mod:`dpfy.mechanisms.additive`). For a unit that is counted
once that is exact.

Exact Skellam noise, many at a time: the difference of two Poisson numbers, each by inversion of
a certified table.

Sums of independent Skellam numbers are Skellam, and their variances add up: that is why shares of
noise are made of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.exact import Bits, Enclosure, exp_enclosure, rational
from dpfy.mechanisms.integers import FIRST, Integers, LawSteps
from dpfy.mechanisms.mechanism import drawable, source


@dataclass(frozen=True)
class Discrete(ABC):
    """Integer noise with one parameter, for whole numbers that one unit moves by at most
    `sensitivity` in the L1 norm.
    """

    parameter: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        check.positive("parameter", self.parameter)
        check.integer("sensitivity", self.sensitivity)
        drawable("parameter", self.parameter, self.scale)

    @property
    @abstractmethod
    def event(self) -> events.Event:
        """All that a release does."""

    @property
    @abstractmethod
    def scale(self) -> Fraction:
        """The width of the noise."""

    @abstractmethod
    def noise(self, count: int, bits: Bits) -> NDArray[np.int64]:
        """So many draws."""

    def release(
        self,
        total: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[Any]:
        """Whole numbers with noise: a Python integer, or an array of the shape of the value.

        Guarantees: as :meth:`dpfy.mechanisms.additive.Additive.release`; the bound on what one unit
        adds must be within the sensitivity that is charged.
        """
        counts, name = whole(total.value), f"{type(self).__name__} noise"
        if math.floor(total.bound.finite("l1", name)) > self.sensitivity:
            raise InvalidInput(
                "bound.l1",
                total.bound.l1,
                f"must be at most the sensitivity that is charged, {self.sensitivity}",
            )
        bits = source(self.event, permit, randomness, step)
        noisy = np.asarray(counts + self.noise(counts.size, bits).reshape(counts.shape))
        return Private(noisy if noisy.ndim else int(noisy))


@dataclass(frozen=True)
class DiscreteLaplaceMechanism(Discrete):
    """Noise x with probability proportional to exp(-parameter |x|): pure epsilon of parameter times
    sensitivity.
    """

    @property
    def event(self) -> events.Event:
        """One release."""
        return events.DiscreteLaplace(self.parameter, self.sensitivity)

    def noise(self, count: int, bits: Bits) -> NDArray[np.int64]:
        """See `Discrete`."""
        return integers.laplace(count, self.scale, bits)

    @property
    def scale(self) -> Fraction:
        """See `Discrete`."""
        return 1 / Fraction(self.parameter)


@dataclass(frozen=True)
class DiscreteGaussianMechanism(Discrete):
    """Noise x with probability proportional to exp(-x^2 / (2 parameter^2)) (Canonne, Kamath &
    Steinke 2020).
    """

    @property
    def event(self) -> events.Event:
        """One release."""
        return events.DiscreteGaussian(self.parameter, self.sensitivity)

    def noise(self, count: int, bits: Bits) -> NDArray[np.int64]:
        """See `Discrete`."""
        return integers.gaussian(count, self.scale, bits)

    @property
    def scale(self) -> Fraction:
        """See `Discrete`."""
        return Fraction(self.parameter)


def whole(value: object) -> NDArray[np.int64]:
    """Whole numbers as 64-bit integers; others are refused by their type, which is public."""
    found = np.asarray(value)
    if found.dtype.kind not in "biu":
        raise Unsupported(
            f"integer noise on {found.dtype}",
            "use Laplace or Gaussian, which sum real numbers on a grid",
        )
    return found.astype(np.int64)


MOST_MEAN = 2048
"""Of a Poisson number that is drawn at once; a larger one is a sum of several."""
RARE = 200
"""The table ends where less than 2^-200 is left, which counts as its end."""


def skellam(count: int, variance: Fraction | int, bits: Bits) -> Integers:
    """`count` independent integers, each the difference of two Poisson numbers of mean variance /
    2.

    Guarantees: this law, given fair bits, up to a total variation of 2^-200 for each of the Poisson
    numbers.
    """
    mean = rational("variance", variance, Fraction(1, 1 << 40)) / 2
    if mean > 1 << 24:
        raise InvalidInput(
            "variance",
            variance,
            "must be at most 2^25: larger shares are drawn as discrete Gaussians",
        )
    parts = math.ceil(mean / MOST_MEAN)
    table = _table(mean / parts)
    size = check.integer("count", count, 0)
    out: Integers = table.search(bits.words(size), bits) - table.search(bits.words(size), bits)
    for _ in range(parts - 1):
        out += table.search(bits.words(size), bits) - table.search(bits.words(size), bits)
    return out


@lru_cache(maxsize=8)
def _table(mean: Fraction) -> LawSteps:
    return LawSteps(_sums(mean, FIRST), lambda k: lambda precision: _sums(mean, precision)[k])


@lru_cache(maxsize=2)
def _sums(mean: Fraction, precision: int) -> tuple[Enclosure, ...]:
    """P(at most k) of a Poisson number, for k from 0 on, each enclosed at a precision.

    Guarantees: exp(-mean) is enclosed, each weight is the one before it times mean / k, one copy
    rounded down and one up. What is left beyond the last one is below 2^-200: beyond k = 2 mean
    each weight is at most half of the one before it.
    """
    work = precision + math.ceil(3 * mean) + 2 * RARE
    low, high = exp_enclosure(mean, work)
    total_low, total_high, found, k = low, high, [], 0
    least = 1 << (work - RARE - 1)
    while k <= 2 * mean or high >= least:
        found.append(
            (
                total_low >> (work - precision),
                min(-(-total_high >> (work - precision)), 1 << precision),
            )
        )
        k += 1
        low = low * mean.numerator // (mean.denominator * k)
        high = -(-high * mean.numerator // (mean.denominator * k))
        total_low, total_high = total_low + low, total_high + high
    return tuple(found)
