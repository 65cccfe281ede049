"""Integer noise on whole numbers, billed exactly: two-sided geometric noise and the discrete
Gaussian.

Vectors are billed by their L1 norm: both laws are log-concave, so that one coordinate moved by the
whole L1 distance is the worst case (:mod:`dpfy.mechanisms.additive`). For a unit that is counted
once that is exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.bits import Bits
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
        adds must be within the sensitivity that is billed.
        """
        counts, name = whole(total.value), f"{type(self).__name__} noise"
        if math.floor(total.bound.finite("l1", name)) > self.sensitivity:
            raise InvalidInput(
                "bound.l1",
                total.bound.l1,
                f"must be at most the sensitivity that is billed, {self.sensitivity}",
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
