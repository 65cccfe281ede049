"""Votes with Gaussian noise, of which only the winner is told, and numbers of which only the side
of a threshold is told.

The charge is that of real Gaussian noise (docs/noisy-votes.md), and the noise is real: it is known as
closely as the comparison needs. A real Gaussian number is the sum of a discrete Gaussian of
parameter s on a lattice and of a real Gaussian of standard deviation t: by Poisson's formula its
density is that of variance s^2 + t^2 up to a factor of 1 +- 2.1 exp(-2 pi^2 t^2), t in steps. With
t = 4 that is 1 +- 1e-136. So the discrete part is drawn, exactly, and where it does not decide (the
two largest are closer than what the real parts can be, beyond 60 of their standard deviations with
a chance below 1e-780), the real part is drawn in the same way on a finer lattice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.mechanism import source

FINE = 32
"""Bits between the standard deviation of the noise and a step of the lattice, at least."""
REST = 4
"""Standard deviation of the real part that is not drawn yet, in steps."""
NEAR = 2 * 60 * REST
"""Values that are closer than this, in steps, are not distinguished yet."""
MOST_VOTES = 1 << 24
MOVED = Bound(math.sqrt(2) * (1 + 1e-15), 2.0, 1.0)
"""What one unit does to the counts: a vote leaves one class for another."""


class NoisyCounts:
    """Whole numbers with real Gaussian noise of standard deviation `sigma` on each, known ever more
    closely.
    """

    def __init__(self, counts: NDArray[np.int64], sigma: Fraction, bits: Bits) -> None:
        self._bits = bits
        self.exponent = max(0, FINE - math.floor(sigma).bit_length())  # a step is 2^-exponent
        # The parameter of the lattice noise, rounded up; the real part comes on top: never less
        # noise than is billed.
        drawn = integers.gaussian(
            len(counts), math.ceil(sigma * (1 << self.exponent)), bits, again=True
        )
        self.steps = [
            (int(count) << self.exponent) + int(noise)
            for count, noise in zip(counts, drawn, strict=True)
        ]

    def refine(self) -> None:
        """Draw the real part that is left on a lattice finer by FINE bits."""
        drawn = integers.gaussian(len(self.steps), REST << FINE, self._bits)
        self.steps = [
            (value << FINE) + int(noise) for value, noise in zip(self.steps, drawn, strict=True)
        ]
        self.exponent += FINE

    def largest(self) -> int:
        """The place of the largest number."""
        while True:
            order = sorted(range(len(self.steps)), key=self.steps.__getitem__)
            if len(order) == 1 or self.steps[order[-1]] - self.steps[order[-2]] > NEAR:
                return order[-1]
            self.refine()

    def above(self, threshold: Fraction) -> bool:
        """Whether the first number is above a threshold."""
        while True:
            apart = self.steps[0] - threshold * (1 << self.exponent)
            if abs(apart) > NEAR:
                return apart > 0
            self.refine()


@dataclass(frozen=True)
class GaussianArgmax:
    """Which of `classes` has most votes, after Gaussian noise of standard deviation `sigma` votes
    on every count: GNMax.
    """

    sigma: float
    classes: int

    def __post_init__(self) -> None:
        check.noise_multiplier("sigma", check.positive("sigma", self.sigma))
        check.integer("classes", self.classes, least=2, most=1 << 20)

    @property
    def event(self) -> events.Event:
        """The arg-max alone."""
        return events.NoisyArgmax(self.sigma, self.classes)

    def release(
        self,
        votes: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[int]:
        """The winner.

        Guarantees: nothing else of the counts is released; the noise is real Gaussian noise of at
        least `sigma`, drawn as closely as the comparison needs. Counts of which one unit moves more
        than one vote are refused, before the permit is spent.
        """
        counts = counted(votes, self.classes)
        return Private(self.winner(counts, source(self.event, permit, randomness, step)))

    def winner(self, counts: NDArray[np.int64], bits: Bits) -> int:
        """The winner, for random bits of an address that a permit was spent for."""
        return NoisyCounts(counts, Fraction(self.sigma), bits).largest()


@dataclass(frozen=True)
class GaussianThreshold:
    """Whether a whole number that one unit moves by at most 1 is above `threshold`, after Gaussian
    noise of `noise_multiplier`.
    """

    noise_multiplier: float
    threshold: float

    def __post_init__(self) -> None:
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        check.real("threshold", self.threshold)

    @property
    def event(self) -> events.Event:
        """The side alone."""
        return events.NoisyThreshold(self.noise_multiplier)

    def release(
        self,
        number: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[bool]:
        """Whether it is above. Guarantees: as for votes; a number that one unit moves by more than
        1 is refused.
        """
        if number.bound.finite("linf", "a threshold check") > 1:
            raise InvalidInput(
                "bound.linf", number.bound.linf, "must be at most 1, which is charged"
            )
        count = check.integer(
            "number", int(np.asarray(number.value).reshape(())), least=-MOST_VOTES, most=MOST_VOTES
        )
        return Private(self.above(count, source(self.event, permit, randomness, step)))

    def above(self, count: int, bits: Bits) -> bool:
        """Whether it is above, for random bits of an address that a permit was spent for."""
        return NoisyCounts(np.array([count]), Fraction(self.noise_multiplier), bits).above(
            Fraction(self.threshold)
        )


def counted(votes: Bounded[Any], classes: int) -> NDArray[np.int64]:
    """Whole counts of so many classes; others are refused, and so is a bound that is larger than
    one moved vote.
    """
    counts = np.asarray(votes.value)
    if (
        counts.shape != (classes,)
        or counts.dtype.kind not in "iu"
        or counts.min() < 0
        or counts.max() > MOST_VOTES
    ):
        raise InvalidInput(
            "votes", f"{counts.dtype} of shape {counts.shape}", f"must be {classes} whole counts"
        )
    for norm in ("l1", "linf"):
        if votes.bound.finite(norm, "votes") > getattr(MOVED, norm):
            rule = (
                f"must be at most {getattr(MOVED, norm):g}: one unit moves one vote, which is "
                f"charged"
            )
            raise InvalidInput(f"bound.{norm}", getattr(votes.bound, norm), rule)
    return counts.astype(np.int64)
