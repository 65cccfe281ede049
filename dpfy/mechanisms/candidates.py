"""The best of a random number of private runs (Liu & Talwar 2019; Papernot & Steinke 2022).

Only because their number is random is the best of several runs as cheap as it is: the number is
drawn exactly from the law that is charged, before anything is run, and neither it nor any run but
the best is released.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from dpfy.core import check, events
from dpfy.core.errors import Unsupported
from dpfy.core.events import gamma_for
from dpfy.core.randomness import Randomness
from dpfy.core.values import Permit, Private
from dpfy.mechanisms.exact import Bits, Enclosure, Uniform, bernoulli
from dpfy.mechanisms.mechanism import source

T = TypeVar("T")
Run = Callable[[int, Permit, Randomness], tuple[float, T]]
"""One run: its number, its permit and its secret, to a score and what would be released."""

MOST_MEAN = 1e5


@dataclass(frozen=True)
class PrivateSelection:
    """Runs of `candidate` a random number of times and releases the output of the highest score,
    which must be part of what the run releases. The number of runs has the truncated negative
    binomial law of this `shape` and `mean`, or Poisson's (shape infinity).
    """

    candidate: events.Event
    mean: float
    shape: float = 0.0

    def __post_init__(self) -> None:
        check.positive_or_infinite("shape + 1", self.shape + 1)
        if (
            check.positive("mean", self.mean) > MOST_MEAN
            or (self.mean <= 1 and self.shape < math.inf)
            or 64 < self.shape < math.inf
        ):
            raise Unsupported(
                f"a mean of {self.mean:g} runs, shape {self.shape:g}",
                "ask for 1 to 100,000 runs, and a shape of at most 64",
            )

    @property
    def event(self) -> events.Event:
        """All runs, the best of which is released."""
        return events.RepeatAndSelect(self.candidate, self.mean, self.shape)

    def runs(self, bits: Bits) -> int:
        """The number of runs, drawn exactly."""
        if math.isinf(self.shape):
            return poisson(Fraction(self.mean), bits)
        return negative_binomial(
            Fraction(self.shape), Fraction(gamma_for(self.shape, self.mean)), bits
        )

    def release(
        self, run: Run[T], permit: Permit, randomness: Randomness | None = None, step: int = 0
    ) -> Private[T | None]:
        """The output of the best run; None if there was none (Poisson). Ties go to the first.

        `run` releases `candidate` under the permit and from the secret that it is given, its own.

        Guarantees: the number of runs is never told, if `run` tells nothing of itself; a score that
        is not a number is the worst.
        """
        secret = Randomness.from_os() if randomness is None else randomness
        count = self.runs(source(self.event, permit, secret, step))
        best: tuple[float, T | None] = (-math.inf, None)
        for number in range(count):
            # A secret of its own for each run: no name that a claim may have leads to the same
            # noise.
            own = Randomness(
                bytes.fromhex(secret.tag("run", f"{permit.name}:{step}:{number}".encode())),
                secret.fixed,
            )
            score, output = run(number, permit.inner(self.candidate, number), own)
            if number == 0 or (not math.isnan(score) and score > best[0]):
                best = (-math.inf if math.isnan(score) else score, output)
        return Private(best[1])


def negative_binomial(shape: Fraction, gamma: Fraction, bits: Bits) -> int:
    """A whole number k >= 1 with probability proportional to (1 - gamma)^k times the product of (l
    + shape) / (l + 1) over l < k.

    For a shape above 0 it is a sum: of a geometric number for every whole unit of the shape, and of
    one for the rest; drawn again while it is 0. For shape 0 the product is 1 / k, with which a
    geometric number is kept. Below 0 it is the law of Sibuya, which ends at k with probability
    -shape / k, if a coin of 1 - gamma at every number holds. All take about as many coins as there
    are runs.
    """
    if shape > 0:
        whole, rest = divmod(shape, 1)
        while not (
            total := sum(geometric_number(gamma, bits) for _ in range(whole))
            + (_thinned(rest, gamma, 0, bits) if rest else 0)
        ):
            pass
        return total
    return _thinned(shape, gamma, 1, bits) if shape == 0 else _sibuya(-shape, gamma, bits)


def _sibuya(alpha: Fraction, gamma: Fraction, bits: Bits) -> int:
    while True:
        k = 1
        while bernoulli(1 - gamma, bits):
            if bernoulli(alpha / k, bits):
                return k
            k += 1


def _thinned(shape: Fraction, gamma: Fraction, least: int, bits: Bits) -> int:
    """The same law from `least` on, for a shape below 1: geometric proposals, kept by one coin for
    each factor below 1.
    """
    while True:
        k = least + geometric_number(gamma, bits)
        if all(bernoulli((j + shape) / (j + 1), bits) for j in range(least, k)):
            return k


def geometric_number(gamma: Fraction, bits: Bits) -> int:
    """A whole number k >= 0 with probability gamma (1 - gamma)^k: how many powers of 1 - gamma a
    uniform number is below.
    """
    uniform, low, high = Uniform(bits), 0, 1
    while uniform.below(_power(1 - gamma, high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if uniform.below(_power(1 - gamma, middle)) else (low, middle)
    return low


def _power(base: Fraction, exponent: int) -> Callable[[int], Enclosure]:
    """base^exponent for a base in [0, 1], by squaring, each product rounded down and up."""

    def enclosed(precision: int) -> Enclosure:
        work = precision + 2 * exponent.bit_length() + 8
        low, high = (
            (base.numerator << work) // base.denominator,
            -((-base.numerator << work) // base.denominator),
        )
        found = (1 << work, 1 << work)
        for digit in bin(exponent)[2:]:
            found = (found[0] * found[0] >> work, -(-found[1] * found[1] >> work))
            if digit == "1":
                found = (found[0] * low >> work, -(-found[1] * high >> work))
        return found[0] >> (work - precision), -(-found[1] >> (work - precision))

    return enclosed


def poisson(mean: Fraction, bits: Bits) -> int:
    """A Poisson number: a sum of those of mean 1, and of the rest."""
    whole, rest = divmod(mean, 1)
    return sum(_small_poisson(Fraction(1), bits) for _ in range(whole)) + _small_poisson(rest, bits)


def _small_poisson(mean: Fraction, bits: Bits) -> int:
    """A Poisson number of a mean of at most 1: k is proposed with probability 2^-(k + 1), and kept
    with (2 mean)^k / (2 k!).
    """
    while True:
        k = geometric_number(Fraction(1, 2), bits)
        if bernoulli((2 * mean) ** k / (2 * math.factorial(k)), bits):
            return k
