"""Exact draws, one at a time: from fair bits, whole numbers and fractions, to the stated law with total variation 0.

What depends on secrets: how many trials a rejection takes is independent of what it returns; how many words `geometric` takes is not, and
Python's own integers are not constant in time. Whoever can time single draws must be kept away, as from the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Rational

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.reals import Uniform, exp, exp_enclosure

DIGITS = 4096
"""The most binary digits of a numerator or a denominator: more is a mistake, or an attack on the processor."""

FAR = 256
"""Exponents beyond this many halvings are proposed as if they had this many, and then accepted as seldom as it takes."""


def rational(name: str, value: object, least: Fraction | int = 0) -> Fraction:
    """A whole number or a Fraction of at least `least`; floats are refused, since what they stand for is not what they are."""
    if isinstance(value, bool) or not isinstance(value, Rational):
        raise InvalidInput(name, value, "must be a whole number or a fractions.Fraction (of a float: Fraction(0.1))")
    number = Fraction(int(value.numerator), int(value.denominator))
    if number < least:
        raise InvalidInput(name, value, f"must be at least {least}")
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > DIGITS:
        raise InvalidInput(name, value, f"must have at most {DIGITS} binary digits above and below the line")
    return number


def below(n: int, bits: Bits) -> int:
    """A uniform integer from 0 to n - 1."""
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise InvalidInput("n", n, "must be a whole number of at least 1")
    size = (int(n) - 1).bit_length()
    while (value := bits.take(size)) >= n:
        pass
    return value


def bernoulli(p: Fraction | int, bits: Bits) -> bool:
    """True with probability p."""
    if (p := rational("p", p)) > 1:
        raise InvalidInput("p", p, "must lie in [0, 1]")
    return below(p.denominator, bits) < p.numerator


def bernoulli_exp(gamma: Fraction | int, bits: Bits) -> bool:
    """True with probability exp(-gamma)."""
    return Uniform(bits).below(exp(rational("gamma", gamma)))


def geometric(gamma: Fraction | int, bits: Bits) -> int:
    """An integer x >= 0 with probability proportional to exp(-gamma x). Reference: Canonne, Kamath & Steinke 2020, algorithm 2."""
    gamma = rational("gamma", gamma)
    if not gamma:
        raise InvalidInput("gamma", gamma, "must be greater than 0")
    unit = gamma.denominator  # of a geometric number with rate 1 / unit: its low digit, then its high one
    while not bernoulli_exp(Fraction(low := below(unit, bits), unit), bits):
        pass
    high = 0
    while bernoulli_exp(1, bits):
        high += 1
    return (low + unit * high) // gamma.numerator


def permutation(n: int, bits: Bits) -> NDArray[np.int64]:
    """A uniform permutation of 0 ... n - 1: the order of n uniform numbers, drawn further where two begin alike."""
    keys = bits.words(n)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    for start, end in _runs(keys):
        order[start:end] = order[start:end][permutation(end - start, bits)]
    return order


def _runs(keys: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """The stretches of equal values in a sorted array, longer than one."""
    edges = np.flatnonzero(np.diff(keys)) + 1
    bounds = np.concatenate([[0], edges, [len(keys)]])
    long = np.flatnonzero(np.diff(bounds) > 1)
    return [(int(bounds[i]), int(bounds[i + 1])) for i in long]


class Exponents:
    """Weights exp(-gamma_i) of candidates, gamma_i = numerators[i] / denominator, for the exponential mechanism and its kin.

    `halvings[i]` is a whole number with 2^-halvings[i] >= exp(-gamma_i), and close to it: candidates are proposed by powers of two, in
    integers, and accepted with probability exp(-gamma_i) 2^halvings[i], so that only proposals need an exponential.
    """

    def __init__(self, numerators: Sequence[int] | NDArray[np.int64], denominator: int = 1) -> None:
        self.denominator = check.integer("denominator", denominator)
        self.numerators = self._shifted(numerators)
        step = max(0, 24 - self.denominator.bit_length())
        ln2 = 0xB17217F7D1CF79ABD  # ln 2 * 2^68, rounded up: halvings are rounded down
        divisor = -((-(self.denominator << step) * ln2) >> 68)
        near = np.minimum(self.numerators, FAR * self.denominator)
        self.halvings = np.minimum((near << step) // divisor, FAR).astype(np.int64)

    def _shifted(self, numerators: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The numerators less the smallest, as int64 where that has room, else as Python integers."""
        values = np.asarray(numerators)
        if values.ndim != 1 or not len(values):
            raise InvalidInput("exponents", numerators, "must be a list of at least one whole number")
        if values.dtype == object:
            if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
                raise InvalidInput("exponents", numerators, "must be whole numbers on a common denominator")
        elif values.dtype.kind not in "iu":
            raise InvalidInput("exponents", numerators, "must be whole numbers on a common denominator")
        wide = self.denominator > 1 << 30 or int(values.max()) - int(values.min()) >= 1 << 62
        values = values.astype(object if wide else np.int64) if values.dtype != np.uint64 else values.astype(object)
        return values - values.min()

    def accepts(self, i: int, prefix: Uniform) -> bool:
        """Whether the uniform number is below exp(-gamma_i) 2^halvings[i]."""
        gamma, by = Fraction(int(self.numerators[i]), self.denominator), int(self.halvings[i])
        return prefix.below(lambda precision: exp_enclosure(gamma, precision + by))


def choose(numerators: Sequence[int] | NDArray[np.int64], bits: Bits, denominator: int = 1) -> int:
    """The index i with probability proportional to exp(-numerators[i] / denominator), exactly: the exponential mechanism's draw.

    Proposals by powers of two, accepted with a probability of about one half or more: a few vector operations and a few exponentials.
    Timing: the number of proposals is independent of the answer; a proposal's cost is the same for every candidate.
    """
    weights = Exponents(numerators, denominator)
    sizes = np.bincount(weights.halvings, minlength=1).tolist()
    most = len(sizes) - 1
    total = sum(size << (most - level) for level, size in enumerate(sizes))
    while True:
        place = below(total, bits)
        for level, size in enumerate(sizes):
            if place < size << (most - level):
                break
            place -= size << (most - level)
        i = int(np.flatnonzero(weights.halvings == level)[place >> (most - level)])
        if weights.accepts(i, Uniform(bits)):
            return i


def permute_and_flip(numerators: Sequence[int] | NDArray[np.int64], bits: Bits, denominator: int = 1) -> int:
    """Candidates in a random order, each taken with probability exp(-(gamma_i - min gamma)), the first that is: McKenna & Sheldon 2020."""
    weights = Exponents(numerators, denominator)
    for i in permutation(len(weights.numerators), bits).tolist():
        if not bits.take(int(weights.halvings[i])) and weights.accepts(i, Uniform(bits)):
            return i
    raise AssertionError("the best candidate is always taken")
