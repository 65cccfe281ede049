"""Histograms whose keys come from the data: noisy counts, and only those that reach a threshold
(Korolova et al. 2009; Bun et al. 2019).

Let neighbours differ in one unit. For the keys that both have, the counts with noise are one
release of a sum. A key that only one of them has is counted by that unit alone, at most `most`
times, and shows itself with probability p = P(most + noise >= threshold). The unit has at most
`keys` of these, so that all of them together differ by a total variation of at most keys * p, which
is delta. The release is both together: composition of the noise's event and of (0, delta).
Replacing a unit: each side has such keys, and what both may say is that all are silent, with a
probability of at least 1 - delta: the total variation is the same.

Tails of integer noise, from certified enclosures: what is added to delta is never below the
truth.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Permit, Private
from dpfy.mechanisms.additive import GaussianMechanism
from dpfy.mechanisms.discrete import DiscreteLaplaceMechanism
from dpfy.mechanisms.exact import exp_enclosure
from dpfy.mechanisms.mechanism import source

DIGITS = 80
"""Bits to which a tail is known."""
FAR = 800
"""Exponents beyond this are not distinguished: exp(-800) is below every float."""


@lru_cache(maxsize=256)
def laplace_tail(parameter: Fraction, least: int) -> Fraction:
    """P(x >= least), rounded up, for P(x) proportional to exp(-parameter |x|).

    exp(-parameter m) / (1 + exp(-parameter)) for m = least >= 1; below that, one less the tail on
    the other side.
    """
    if least < 1:
        return 1 - _tail(parameter, 1 - least, up=False)
    return _tail(parameter, least, up=True)


def _tail(parameter: Fraction, m: int, up: bool) -> Fraction:
    if parameter * m > FAR:
        return (
            Fraction(exp_enclosure(Fraction(FAR), 2 * FAR)[1], 1 << 2 * FAR) if up else Fraction(0)
        )
    precision = DIGITS + math.ceil(2 * parameter * m)
    power, base = exp_enclosure(parameter * m, precision), exp_enclosure(parameter, precision)
    one = 1 << precision
    return Fraction(power[1], one + base[0]) if up else Fraction(power[0], one + base[1])


@lru_cache(maxsize=256)
def laplace_threshold(parameter: Fraction, tail: Fraction) -> int:
    """The least whole number t with P(x >= t) <= tail."""
    low, high = -1, 1
    while laplace_tail(parameter, high) > tail:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if laplace_tail(parameter, middle) > tail else (low, middle)
    return high


def gaussian_tail(ratio: float) -> float:
    """P(x >= m), rounded up, for a discrete Gaussian of parameter sigma >= 4 and ratio = (m - 1) /
    sigma.

    The sum over x >= m is at most the integral from m - 1, since the summands fall from 0 on; for m
    < 1 the bound is trivial.
    """
    return (
        1.0
        if ratio < 0
        else min(
            1.0, max(5e-324, math.erfc(ratio * (1 - 2.0**-45) / math.sqrt(2)) / 2 * (1 + 2.0**-40))
        )
    )


def as_float(value: Fraction) -> float:
    """A float at least as large."""
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)


@dataclass(frozen=True)
class StabilityHistogram:
    """Counts by key, where one unit has at most `keys` keys and adds at most `most` to each; those
    of at least `threshold` are released.

    Noise is two-sided geometric (its sensitivity must be keys * most) or Gaussian (its multiplier
    is of sqrt(keys) * most).
    """

    noise: DiscreteLaplaceMechanism | GaussianMechanism
    threshold: int
    keys: int = 1
    most: int = 1

    def __post_init__(self) -> None:
        check.integer("threshold", self.threshold, most=1 << 40)
        check.integer("keys", self.keys, most=1 << 30)
        check.integer("most", self.most, most=1 << 30)
        if (
            isinstance(self.noise, DiscreteLaplaceMechanism)
            and self.noise.sensitivity != self.keys * self.most
        ):
            raise InvalidInput(
                "noise.sensitivity",
                self.noise.sensitivity,
                f"must be keys * most, {self.keys * self.most}",
            )

    @classmethod
    def of(cls, epsilon: float, delta: float, keys: int = 1, most: int = 1) -> StabilityHistogram:
        """Two-sided geometric noise for an epsilon, and the least threshold for a delta."""
        check.epsilon("epsilon", epsilon)
        parameter = math.nextafter(epsilon / (keys * most), 0.0)
        tail = Fraction(check.delta("delta", delta)) / keys * (1 - Fraction(1, 1 << 40))
        return cls(
            DiscreteLaplaceMechanism(parameter, keys * most),
            laplace_threshold(Fraction(parameter), tail) + most,
            keys,
            most,
        )

    @classmethod
    def least_threshold(
        cls, noise: GaussianMechanism, delta: float, keys: int = 1, most: int = 1
    ) -> int:
        """The least threshold with Gaussian noise for a delta."""
        check.delta("delta", delta)
        low, high = most, most + 1
        while cls(noise, high, keys, most).delta > delta:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if cls(noise, middle, keys, most).delta > delta:
                low = middle
            else:
                high = middle
        return high

    @property
    def bound(self) -> Bound:
        """What one unit adds."""
        return Bound(l1=float(self.keys * self.most), linf=float(self.most))

    @property
    def delta(self) -> float:
        """The chance that a key of one unit alone is released, from the exact tail of the noise,
        rounded up.
        """
        if isinstance(self.noise, DiscreteLaplaceMechanism):
            one = laplace_tail(Fraction(self.noise.parameter), self.threshold - self.most)
            return as_float(min(Fraction(1), self.keys * one))
        grid = self.noise.grid(self.bound)
        parameter = self.noise.parameter(grid, self.bound)
        return min(
            1.0,
            self.keys
            * gaussian_tail(float((grid.steps(self.threshold - self.most) - 1) / parameter))
            * (1 + 2.0**-50),
        )

    @property
    def event(self) -> events.Event:
        """Counts of common keys with noise, and the keys of one unit alone."""
        return events.Composed((self.noise.event, events.EpsilonDelta(0.0, self.delta)))

    def release(
        self,
        counts: Bounded[Mapping[Hashable, int]],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[dict[Hashable, float]]:
        """Keys with their noisy counts, sorted by the text of the keys.

        Guarantees: a key that no unit has is never released, and one that is listed with a count of
        0 counts as absent. Neither the order of keys nor an error tells anything of the data.
        Bounds beyond those that are charged are refused.
        """
        if (
            counts.bound.finite("l1", "a histogram") > self.bound.l1
            or counts.bound.linf > self.bound.linf
        ):
            raise InvalidInput(
                "bound",
                counts.bound,
                f"must be within keys * most = {self.bound.l1:g} and most = {self.most}",
            )
        bits = source(self.event, permit, randomness, step)
        present = sorted(
            ((k, c) for k, c in counts.value.items() if c > 0),
            key=lambda item: (type(item[0]).__name__, repr(item[0])),
        )
        numbers = np.array([int(min(c, 1 << 60)) for _, c in present], dtype=np.int64)
        if isinstance(self.noise, DiscreteLaplaceMechanism):
            noisy, least, exponent = (
                numbers + self.noise.noise(len(present), bits),
                self.threshold,
                0,
            )
        else:
            grid = self.noise.grid(self.bound)
            laid = grid.lay(Bounded(numbers, self.bound)).value.counts
            noisy = laid + self.noise.draw(
                len(present), self.noise.parameter(grid, self.bound), bits
            )
            least, exponent = math.ceil(grid.steps(self.threshold)), grid.exponent
        found = zip((k for k, _ in present), noisy.tolist(), strict=True)
        return Private({key: math.ldexp(count, exponent) for key, count in found if count >= least})
