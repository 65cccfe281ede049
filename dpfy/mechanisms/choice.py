"""Exact choices among candidates: with weights exp(-gamma_i) (the exponential mechanism), by
permute-and-flip, or in a random order.

Scores may be private: no message shows them.

Choosing one of several candidates by noisy scores: exponential mechanism, permute-and-flip,
report noisy max.

Scores are whole numbers of steps of a public grid. When neighbours' scores differ by v, all that
matters is the range R, the largest entry of v less the smallest. One unit adds between -linf and
linf, so R is twice that; where all that one unit adds has the same sign (`monotone`: counts, say)
it is once that; replacing a unit doubles both.

Exponential. P(i) proportional to exp(epsilon score_i / R): losses lie in an interval of length
epsilon (Dong, Durfee & Rogers 2020). It is the argmax of scores with Gumbel noise, so that this
noise is never drawn.

Permute-and-flip and report noisy max are epsilon-private: fix the noise of all others and the least
noise r with which i wins. With r + R it wins on the neighbour too, ties being broken by the same
order, and P(noise >= r + R) >= exp(-epsilon) P(noise >= r) for exponential and for two-sided
geometric noise of scale R / epsilon. Permute-and-flip (McKenna & Sheldon 2020) is the argmax of
scores with exponential noise (Ding et al. 2021), so that this noise is never drawn either.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.exact import DIGITS, WORD, Bits, Uniform, below, exp_enclosure, rational
from dpfy.mechanisms.grid import MOST, Grid, Laid
from dpfy.mechanisms.mechanism import Stated

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

    Args:
        exponents: One whole number of at least 0 for each candidate.
        bits: The random bits.
        denominator: What the exponents are divided by.

    Returns:
        The place of the chosen candidate.

    Raises:
        InvalidInput: There is no candidate, or an exponent is no whole number of at least 0.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, choose
        >>> choose([0, 10_000], Bits(Randomness.from_os(), "choice", 0))
        0
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

    Args:
        exponents: One whole number of at least 0 for each candidate.
        bits: The random bits.
        denominator: What the exponents are divided by.

    Returns:
        The place of the chosen candidate.

    Raises:
        InvalidInput: There is no candidate, or an exponent is no whole number of at least 0.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, permute_and_flip
        >>> permute_and_flip([0, 10_000], Bits(Randomness.from_os(), "choice", 0))
        0
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

    Args:
        n: How many.
        bits: The random bits.

    Returns:
        An array of the numbers from 0 to n - 1.

    Raises:
        InvalidInput: `n` is below 0.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, permutation
        >>> sorted(permutation(4, Bits(Randomness.from_os(), "order", 0)).tolist())
        [0, 1, 2, 3]
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


FINE = 16
"""Bits between the bound of a score and a step of the grid for scores that are not whole
numbers.
"""
ROOM = 24
"""Bits of the denominator of exponents, at least."""

NOISES = ("gumbel", "exponential", "laplace")


@dataclass(frozen=True)
class Selection(Stated):
    """The choice of an index by scores. `monotone`: adding a unit raises all scores or lowers
    all.
    """

    monotone: bool = False

    def grid(self, linf: float) -> Grid:
        """Where scores that are not whole numbers are laid."""
        return Grid(math.frexp(linf)[1] - 1 - FINE)

    def _laid(self, scores: Bounded[Any]) -> tuple[NDArray[np.int64], int]:
        """Scores in steps, and their range R."""
        linf = scores.bound.finite("linf", "a choice by scores")
        if not isinstance(scores.value, Laid):
            whole = np.asarray(scores.value).dtype.kind in "biu"
            scores = (Grid(0) if whole else self.grid(linf)).lay(scores)
        counts, most = (
            np.ravel(scores.value.counts),
            math.floor(scores.value.grid.steps(scores.bound.linf)),
        )
        if not len(counts):
            raise InvalidInput("scores", "none", "must have at least one candidate")
        return counts, max(1, most) * self.moves * (1 if self.monotone else 2)

    def release(
        self,
        scores: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[int]:
        """The index of a candidate with a high score; the candidates themselves must be public.

        Guarantees: the probability of every index is the given one, exactly; all are positive.
        """
        counts, width = self._laid(scores)
        return Private(self._index(counts, width, self._source(permit, randomness, step)))

    @abstractmethod
    def _index(self, counts: NDArray[np.int64], width: int, bits: Bits) -> int:
        """The index, for scores in steps whose differences change by at most `width`."""

    def _exponents(self, counts: NDArray[np.int64], width: int) -> tuple[Any, int]:
        """Whole numbers and a denominator: epsilon / width times how far each score is below the
        best, rounded down.
        """
        rate = width / Fraction(self.epsilon)
        more = max(0, ROOM - int(rate).bit_length())
        best, worst = int(counts.max()), int(counts.min())
        behind = best - (counts if (best - worst) << more < MOST else counts.astype(object))
        return behind << more, math.ceil(rate * (1 << more))


@dataclass(frozen=True)
class Exponential(Selection):
    """The exponential mechanism (McSherry & Talwar 2007)."""

    @property
    def event(self) -> events.Event:
        """Losses in an interval of length epsilon."""
        return events.BoundedRange(self.epsilon)

    def _index(self, counts: NDArray[np.int64], width: int, bits: Bits) -> int:
        numerators, denominator = self._exponents(counts, width)
        return choose(numerators, bits, denominator)

    def release_within(
        self,
        scores: Bounded[Any],
        sizes: Any,
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[tuple[int, int]]:
        """The same where candidate i stands for `sizes[i]` candidates of equal score: (i, which of
        them).

        For long public ranges in which few scores differ: all whole numbers between two records,
        say. How candidates are grouped may depend on the data, since each of them has the
        probability that it would have by itself; how many there are in all must not.
        """
        counts, width = self._laid(scores)
        many = [
            check.integer("sizes", int(size), least=0)
            for size in np.ravel(np.asarray(sizes, dtype=object))
        ]
        if len(many) != len(counts) or not any(many):
            raise InvalidInput(
                "sizes",
                f"{len(many)} sizes",
                f"must be one for each of {len(counts)} scores, not all of them 0",
            )
        kept = np.flatnonzero(np.array(many, dtype=object) > 0)
        bits = self._source(permit, randomness, step)
        numerators, denominator = self._exponents(counts[kept], width)
        index, place = choose_sized(numerators, [many[i] for i in kept], bits, denominator)
        return Private((int(kept[index]), place))


@dataclass(frozen=True)
class PermuteAndFlip(Selection):
    """Never a larger expected error than the exponential mechanism, at the same pure epsilon
    (McKenna & Sheldon 2020).
    """

    @property
    def event(self) -> events.Event:
        """Pure epsilon; its losses have no shorter range."""
        return events.EpsilonDelta(self.epsilon)

    def _index(self, counts: NDArray[np.int64], width: int, bits: Bits) -> int:
        numerators, denominator = self._exponents(counts, width)
        return permute_and_flip(numerators, bits, denominator)


@dataclass(frozen=True)
class NoisyMax(Selection):
    """The index of the largest score after noise: gumbel, exponential or laplace."""

    noise: str = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of("noise", self.noise, NOISES)

    @property
    def event(self) -> events.Event:
        """Pure epsilon, and a bounded range with Gumbel noise."""
        return (
            events.BoundedRange(self.epsilon)
            if self.noise == "gumbel"
            else events.EpsilonDelta(self.epsilon)
        )

    def _index(self, counts: NDArray[np.int64], width: int, bits: Bits) -> int:
        if self.noise == "laplace":
            noise = integers.laplace(len(counts), width / Fraction(self.epsilon), bits)
            return int(np.argmax(counts + noise))
        other = Exponential if self.noise == "gumbel" else PermuteAndFlip
        return other(self.epsilon, self.monotone, adjacency=self.adjacency)._index(
            counts, width, bits
        )


def refuse_monotone(mechanism: Any) -> None:
    """What one unit adds has one sign, but what replaces it may have any: a proof for monotone
    queries says nothing then.
    """
    if mechanism.monotone and mechanism.adjacency is Adjacency.REPLACE_ONE:
        raise Unsupported(
            "monotone queries under replace-one", "leave out monotone, or use add-or-remove-one"
        )


def choose_sized(
    numerators: Any, sizes: list[int], bits: Bits, denominator: int
) -> tuple[int, int]:
    """(i, j) with probability proportional to exp(-numerators[i] / denominator), j below sizes[i]:
    exactly.
    """
    weights = Weights(numerators, denominator)
    halvings = weights.halvings.tolist()
    most = max(halvings)
    parts = [size << (most - by) for size, by in zip(sizes, halvings, strict=True)]
    ends = np.cumsum(np.array(parts, dtype=object))
    while True:
        place = below(int(ends[-1]), bits)
        i = int(np.searchsorted(ends, place, side="right"))
        if weights.accepts(i, bits):
            return i, (place - int(ends[i]) + parts[i]) >> (most - halvings[i])
