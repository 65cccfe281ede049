"""Choosing one of several candidates by noisy scores: exponential mechanism, permute-and-flip,
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
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.book import Permit
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.random import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bounded, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.exact import below
from dpfy.mechanisms.grid import MOST, Grid, Laid
from dpfy.mechanisms.mechanism import Stated
from dpfy.mechanisms.selection import Weights, choose, permute_and_flip

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

        Guarantees: the probability of every index is the stated one, exactly; all are positive.
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
