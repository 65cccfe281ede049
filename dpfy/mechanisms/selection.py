"""Exact choices among candidates: with weights exp(-gamma_i) (the exponential mechanism), by
permute-and-flip, or in a random order.

Scores may be private: no message shows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.mechanisms.bits import WORD, Bits
from dpfy.mechanisms.exact import DIGITS, below, rational
from dpfy.mechanisms.reals import Uniform, exp_enclosure

Exponents = Sequence[int] | Sequence[Fraction] | NDArray[np.int64]

FAR = 256
"""Candidates beyond this many halvings are proposed as if they had this many, and accepted as
seldom as it takes.
"""

LN2 = 0xB17217F7D1CF79ABD
"""ln 2 times 2^68, rounded up: halvings are rounded down."""


def choose(exponents: Exponents, bits: Bits, denominator: int = 1) -> int:
    """The index i with probability proportional to exp(-exponents[i] / denominator): the draw of
    the exponential mechanism.

    Guarantees: exactly this law, given fair bits. Candidates are proposed by powers of two, in
    integers, and accepted with a probability of one half or more: a few vector operations and a few
    exponentials for any number of candidates. Timing: the number of proposals is independent of the
    answer; a proposal costs nearly the same for every candidate.
    """
    weights = Weights(exponents, denominator)
    sizes = np.bincount(weights.halvings).tolist()
    most = len(sizes) - 1
    total = sum(size << most - level for level, size in enumerate(sizes))
    while True:
        place = below(total, bits)
        level = 0
        while place >= (share := sizes[level] << most - level):
            place, level = place - share, level + 1
        i = int(np.flatnonzero(weights.halvings == level)[place >> most - level])
        if weights.accepts(i, bits):
            return i


def permute_and_flip(exponents: Exponents, bits: Bits, denominator: int = 1) -> int:
    """The first candidate, in a random order, whose coin shows heads: with probability
    exp(-(gamma_i - least gamma)).

    Guarantees: exactly the law of McKenna & Sheldon 2020. A coin is `halvings` fair ones and one
    exact one for the rest.
    """
    weights = Weights(exponents, denominator)
    order = permutation(len(weights.halvings), bits)
    halvings = weights.halvings[order]
    words = bits.words(len(order))
    heads = (halvings == 0) | (
        words >> (np.uint64(WORD) - np.clip(halvings, 1, WORD).astype(np.uint64)) == 0
    )
    for i in np.flatnonzero(heads).tolist():
        if not bits.take(max(0, int(halvings[i]) - WORD)) and weights.accepts(int(order[i]), bits):
            return int(order[i])
    raise AssertionError("the best candidate has a coin with two heads")


def permutation(n: int, bits: Bits) -> NDArray[np.int64]:
    """A uniform permutation of 0 ... n - 1: the order of n uniform numbers, drawn further where
    some begin alike.
    """
    keys = bits.words(n)
    order = np.argsort(keys, kind="stable")
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(keys[order])) + 1, [n]])
    for run in np.flatnonzero(np.diff(bounds) > 1).tolist():
        alike = order[bounds[run] : bounds[run + 1]]
        alike[:] = alike[permutation(len(alike), bits)]
    return order


class Weights:
    """Weights exp(-gamma_i), up to a factor: the largest is 1. `halvings[i]` is whole,
    2^-halvings[i] >= exp(-gamma_i), and close to it.
    """

    def __init__(self, exponents: Exponents, denominator: int) -> None:
        self.numerators, self.denominator = _common(
            exponents, check.integer("denominator", denominator)
        )
        step = max(0, 24 - self.denominator.bit_length())
        divisor = -((-(self.denominator << step) * LN2) >> 68)
        near = np.minimum(self.numerators, FAR * self.denominator)
        self.halvings = np.minimum((near << step) // divisor, FAR).astype(np.int64)

    def accepts(self, i: int, bits: Bits) -> bool:
        """True with probability exp(-gamma_i) 2^halvings[i]."""
        gamma, by = Fraction(int(self.numerators[i]), self.denominator), int(self.halvings[i])
        return Uniform(bits).below(lambda precision: exp_enclosure(gamma, precision + by))


def _common(exponents: Exponents, denominator: int) -> tuple[NDArray[np.int64], int]:
    """Numerators less the smallest, over one denominator: int64 where that has room, else Python's
    own integers.
    """
    values = np.asarray(exponents)
    if values.ndim != 1 or not len(values):
        raise InvalidInput(
            "exponents", f"shape {values.shape}", "must be a list of at least one number"
        )
    if values.dtype == object:
        try:
            fractions = [rational("exponents", value, -(1 << DIGITS)) for value in values]
        except DpfyError:
            raise InvalidInput(
                "exponents",
                "other numbers",
                f"must be whole numbers or fractions of at most {DIGITS} digits",
            ) from None
        if (common := math.lcm(*{f.denominator for f in fractions})).bit_length() > DIGITS:
            raise InvalidInput(
                "exponents",
                f"{common.bit_length()} digits",
                f"must have a common denominator of at most {DIGITS} digits",
            )
        values = np.array([f.numerator * (common // f.denominator) for f in fractions], object)
        denominator *= common
    elif values.dtype.kind not in "iu":
        raise InvalidInput(
            "exponents",
            f"an array of {values.dtype}",
            "must be whole numbers or fractions, not floats",
        )
    least, most = int(values.min()), int(values.max())
    narrow = max(abs(least), abs(most)) < 1 << 62 and denominator < 1 << 30
    values = values.astype(np.int64 if narrow else object)
    return values - least, denominator
