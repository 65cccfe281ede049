"""Real numbers that are known as closely as a comparison needs: certified enclosures, and uniform
numbers bit by bit.

Whether a uniform number U is below p is asked with more bits of U, and a closer p, until the answer
is certain. So it is true with probability p exactly, for any real p that can be enclosed. Integers
alone are used: no rounding is ever trusted.

Exact coins and small laws: from fair bits, whole numbers and fractions, to the given law with
total variation 0.

What depends on secrets: how many trials a rejection takes is independent of what it returns; how
many words `geometric` takes is not, and Python's own integers are not constant in time. Anyone who can
time single draws must be kept away, as from the data.

The random bits of one address: the project's keystream as words, taken in order, none of them
twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from numbers import Integral, Rational

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness, require_same_process

WORD = 64
READY = 128
"""Words that are made at a time for callers who take a few."""

Words = NDArray[np.uint64]


class Bits:
    """Fair coins of the address (name, step) under a secret: AES-256 in counter mode, from
    operating-system entropy by default.

    Guarantees: the words come in the order of the keystream and each is handed out once, whatever
    the calls: `words(3)` and then `words(5)` are `words(8)`. Two objects with one address give the
    same words, so an address belongs to one draw: who makes two releases names two addresses. It
    cannot be copied, and a fork cannot use it. Not for two threads at once. An address ends after
    2^33 words, with an error.

    Args:
        randomness: The secret, and the generator made from it.
        name: The first part of the address.
        step: The second part.

    Raises:
        Unsupported: It is copied, or used in a forked process.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits
        >>> secret = Randomness.from_os()
        >>> one, same = Bits(secret, "answer", 0), Bits(secret, "answer", 0)
        >>> one.words(8).tolist() == [*same.words(3).tolist(), *same.words(5).tolist()]
        True
    """

    grain = WORD
    """How many bits a lazy comparison takes at a time."""

    def __init__(self, randomness: Randomness, name: str, step: int) -> None:
        self._fill: Callable[[memoryview], None] = randomness.keystream(
            check.one_line("name", name), check.integer("step", step, 0)
        )
        self._process = os.getpid()
        self._ready: Words = np.empty(READY, np.uint64)
        self._used = READY

    def __reduce_ex__(self, protocol: object) -> str:
        raise Unsupported(
            "a copy of random bits, which would hand out the same words again",
            "make another address",
        )

    def words(self, count: int) -> Words:
        """The next `count` words: uniform integers of 64 bits."""
        out = np.empty(check.integer("count", count, 0), np.uint64)
        self.into(out)
        return out

    def into(self, out: Words) -> None:
        """Overwrite an array (contiguous) with the next words."""
        require_same_process(self._process, "random bits")
        held = min(len(out), READY - self._used)
        out[:held] = self._ready[self._used : self._used + held]
        self._used += held
        if len(rest := out[held:]) >= READY:
            self._fill(rest.data.cast("B"))
        elif len(rest):
            self._fill(self._ready.data.cast("B"))
            rest[:] = self._ready[: len(rest)]
            self._used = len(rest)

    def take(self, count: int) -> int:
        """A uniform integer of `count` bits; what is left of its last word is thrown away."""
        value, words = 0, -(-count // WORD)
        for word in self.words(words).tolist():
            value = value << WORD | word
        return value >> (words * WORD - count)


Enclosure = tuple[int, int]
"""(low, high) at a precision b: the number lies between low / 2^b and high / 2^b."""

Enclosed = Callable[[int], Enclosure]
"""From a precision to an enclosure."""

MARGIN = 32
"""Bits by which a number is known more closely than the uniform number that it is compared with."""


class Uniform:
    """A uniform real number in [0, 1) whose first `length` bits are `value`; the next ones are
    drawn when a comparison needs them.
    """

    def __init__(self, bits: Bits, value: int = 0, length: int = 0) -> None:
        self.bits, self.value, self.length = bits, value, length

    def below(self, number: Enclosed) -> bool:
        """Whether it is below a number. Guarantees: for a fresh one, true with the probability that
        is the number, exactly.
        """
        while True:
            if self.length:
                low, high = number(self.length + MARGIN)
                if (self.value + 1) << MARGIN <= low:
                    return True
                if self.value << MARGIN >= high:
                    return False
            grain = self.bits.grain
            self.value, self.length = (
                self.value << grain | self.bits.take(grain),
                self.length + grain,
            )


def constant(number: Fraction) -> Enclosed:
    """A fraction in [0, 1]."""
    return lambda precision: (
        (number.numerator << precision) // number.denominator,
        -((-number.numerator << precision) // number.denominator),
    )


def exp(gamma: Fraction) -> Enclosed:
    """exp(-gamma) for gamma >= 0."""
    return lambda precision: exp_enclosure(gamma, precision)


def less(number: Enclosed) -> Enclosed:
    """One less a number."""

    def enclosed(precision: int) -> Enclosure:
        low, high = number(precision)
        return (1 << precision) - high, (1 << precision) - low

    return enclosed


def exp_enclosure(gamma: Fraction, precision: int) -> Enclosure:
    """exp(-gamma) enclosed at a precision, within a few units of the last bit.

    gamma is halved until it is below 1/256; the series alternates there, so that what is not summed
    is below the last term; the result is squared as often. Rounding: gamma is rounded down (its
    exponential moves by less than a unit), each term too, by less than two units.
    """
    if not gamma:
        return 1 << precision, 1 << precision
    halvings = (256 * gamma.numerator // gamma.denominator).bit_length()
    work = precision + halvings + 16
    x = (gamma.numerator << work - halvings) // gamma.denominator
    total = term = 1 << work
    count = 0
    while term:
        count += 1
        term = (term * x >> work) // count
        total += -term if count & 1 else term
    low, high = total - 2 * count - 2, total + 2 * count + 2
    for _ in range(halvings):
        low, high = low * low >> work, (high * high >> work) + 1
    return low >> (work - precision), min(-(-high >> (work - precision)), 1 << precision)


DIGITS = 4096
"""The most binary digits of a numerator or a denominator: more is a mistake, or an attack on the
processor.
"""


def rational(name: str, value: object, least: Fraction | int = 0) -> Fraction:
    """A whole number or a Fraction of at least `least`; floats are refused: what is meant by 0.1 is
    not what it is.
    """
    if isinstance(value, bool) or not isinstance(value, Rational):
        raise InvalidInput(
            name,
            value,
            "must be a whole number or a fractions.Fraction (of a float: Fraction(0.1))",
        )
    number = Fraction(int(value.numerator), int(value.denominator))
    if number < least:
        raise InvalidInput(name, value, f"must be at least {least}")
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > DIGITS:
        raise InvalidInput(
            name, value, f"must have at most {DIGITS} binary digits above and below the line"
        )
    return number


def probability(name: str, value: object) -> Fraction:
    """A whole number or a Fraction in [0, 1]."""
    if (number := rational(name, value)) > 1:
        raise InvalidInput(name, value, "must lie in [0, 1]")
    return number


def below(n: int, bits: Bits) -> int:
    """A uniform integer from 0 to n - 1.

    Args:
        n: How many values there are.
        bits: The random bits.

    Returns:
        The integer.

    Raises:
        InvalidInput: `n` is no whole number of at least 1.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, below
        >>> 0 <= below(6, Bits(Randomness.from_os(), "die", 0)) < 6
        True
    """
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise InvalidInput("n", n, "must be a whole number of at least 1")
    size = (int(n) - 1).bit_length()
    while (value := bits.take(size)) >= n:
        pass
    return value


def bernoulli(p: Fraction | int, bits: Bits) -> bool:
    """True with probability p.

    Args:
        p: The probability, a fraction.
        bits: The random bits.

    Returns:
        The outcome.

    Raises:
        InvalidInput: `p` is no fraction from 0 to 1.

    Example:
        >>> from fractions import Fraction
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, bernoulli
        >>> bernoulli(Fraction(1, 3), Bits(Randomness.from_os(), "coin", 0)) in (True, False)
        True
    """
    return Uniform(bits).below(constant(probability("p", p)))


def bernoulli_exp(gamma: Fraction | int, bits: Bits) -> bool:
    """True with probability exp(-gamma).

    Args:
        gamma: The exponent, a fraction of at least 0.
        bits: The random bits.

    Returns:
        The outcome.

    Raises:
        InvalidInput: `gamma` is no fraction of at least 0.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, bernoulli_exp
        >>> bernoulli_exp(0, Bits(Randomness.from_os(), "coin", 0))
        True
    """
    return Uniform(bits).below(exp(rational("gamma", gamma)))


def geometric(gamma: Fraction | int, bits: Bits) -> int:
    """An integer x >= 0 with probability proportional to exp(-gamma x). Reference: Canonne, Kamath
    & Steinke 2020, algorithm 2.

    Args:
        gamma: The rate, a fraction above 0.
        bits: The random bits.

    Returns:
        The integer.

    Raises:
        InvalidInput: `gamma` is no fraction above 0.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, geometric
        >>> geometric(1, Bits(Randomness.from_os(), "wait", 0)) >= 0
        True
    """
    if not (rate := rational("gamma", gamma)):
        raise InvalidInput("gamma", gamma, "must be greater than 0")
    unit = rate.denominator  # a geometric number of rate 1 / unit: its low digit, then its high one
    while not bernoulli_exp(Fraction(low := below(unit, bits), unit), bits):
        pass
    high = 0
    while bernoulli_exp(1, bits):
        high += 1
    return (low + unit * high) // rate.numerator


def coins(count: int, p: Fraction | int, bits: Bits) -> NDArray[np.bool_]:
    """`count` independent coins, each true with probability p: one word each, and more where 64
    bits agree with those of p.

    Args:
        count: How many.
        p: The probability, a fraction.
        bits: The random bits.

    Returns:
        An array of truth values.

    Raises:
        InvalidInput: `p` is no fraction from 0 to 1.

    Example:
        >>> from fractions import Fraction
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, coins
        >>> coins(5, Fraction(1, 3), Bits(Randomness.from_os(), "coins", 0)).shape
        (5,)
    """
    chance = probability("p", p)
    words = bits.words(count)
    if chance == 1:
        return np.ones(count, np.bool_)
    edge = np.uint64((chance.numerator << WORD) // chance.denominator)
    heads = words < edge
    for i in np.flatnonzero(words == edge).tolist():
        heads[i] = Uniform(bits, int(edge), WORD).below(constant(chance))
    return heads


def uniform(count: int, n: int, bits: Bits) -> NDArray[np.int64]:
    """`count` independent uniform integers from 0 to n - 1: words, cut to the bits of n, drawn
    again while they are n or more.

    Args:
        count: How many.
        n: How many values there are.
        bits: The random bits.

    Returns:
        An array of integers.

    Raises:
        InvalidInput: `n` is below 1, or `count` below 0.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, uniform
        >>> int(uniform(100, 6, Bits(Randomness.from_os(), "dice", 0)).max()) < 6
        True
    """
    size = (check.integer("n", n) - 1).bit_length()
    out = np.empty(check.integer("count", count, 0), np.int64)
    if not size:
        out[:] = 0
        return out
    left = np.arange(count)
    while len(left):
        values = (bits.words(len(left)) >> np.uint64(WORD - size)).view(np.int64)
        out[left] = values
        left = left[values >= n]
    return out
