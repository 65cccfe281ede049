"""Exact integer noise, millions at a time: the discrete Laplace and Gaussian laws by inversion of a lazy table.

A draw is a 64-bit word: 63 bits of a uniform number, and a sign. The table holds, for every magnitude k, the first 63 bits of
P(at most k), certified (:mod:`dpfy.mechanisms.laws`). Where the bits of the word differ from them, they decide. Where they agree (a tie,
with probability below size / 2^63) more bits are drawn, and the threshold is computed more closely, until it is decided. What lies beyond
the table is drawn by itself. So every value has the stated law exactly: given fair bits the total variation is 0. Nothing here is a float.

A wide law is drawn in blocks of 2^low values: a block by the table of the law at their beginnings, a place in it by fair bits, and the
pair is kept with probability exp(-(difference of their exponents)). A bound that holds for the whole block decides nearly always, in
integers; an exact comparison decides the rest.

Timing: the vector route does the same work for every value. What differs: which cells of the tables are read (whoever shares the cache
might see it); cells with several thresholds (a search instead of one comparison: some 1% of the values, far ones mostly); exact
comparisons in a wide law (below 0.1% of the values; how many candidates are dropped is independent of what is kept); ties and tails
(below 2^-40). Whoever can time single draws must be kept away, as from the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.mechanisms.bits import Bits, Words
from dpfy.mechanisms.exact import rational
from dpfy.mechanisms.laws import FIRST, Law, thresholds
from dpfy.mechanisms.reals import Uniform, exp

Integers = NDArray[np.int64]

SCALES = (Fraction(1, 1 << 20), 1 << 45)
"""Between these scales values fit 64 bits with room to spare."""

BLOCK = 1 << 14
"""Values made at a time: they stay in the cache."""

MANY, WIDE, NARROW = 1 << 14, 12, 5
"""From so many values on, a table of up to 2^WIDE scales is worth its making; for fewer, of up to 2^NARROW."""

LOW_BIT = np.uint64(1)


def laplace(count: int, scale: Fraction | int, bits: Bits) -> Integers:
    """`count` independent integers with P(x) proportional to exp(-|x| / scale), for a scale from 2^-20 to 2^45.

    Guarantees: exactly this law, given fair bits: the total variation is 0. Reference: Ghosh, Roughgarden & Sundararajan 2009 (the law).
    """
    return _draw(count, _scale("scale", scale), False, bits)


def gaussian(count: int, sigma: Fraction | int, bits: Bits) -> Integers:
    """`count` independent integers with P(x) proportional to exp(-x^2 / (2 sigma^2)), for a sigma from 2^-20 to 2^45.

    Guarantees: exactly this law, given fair bits: the total variation is 0. Reference: Canonne, Kamath & Steinke 2020 (the law).
    """
    return _draw(count, _scale("sigma", sigma), True, bits)


def _scale(name: str, value: Fraction | int) -> Fraction:
    if (scale := rational(name, value, SCALES[0])) > SCALES[1]:
        raise InvalidInput(name, value, "must be at most 2^45: values must fit 64 bits")
    return scale


def split(scale: Fraction, count: int) -> int:
    """How many low bits of a magnitude are drawn by themselves: 0 where the whole law fits a table."""
    return max(0, int(scale).bit_length() - (WIDE if count >= MANY else NARROW))


def _draw(count: int, scale: Fraction, square: bool, bits: Bits) -> Integers:
    out = np.empty(check.integer("count", count, 0), np.int64)
    low = split(scale, count)
    source = Table.of(scale, square, low)
    done = 0
    while done < count:
        values = source.values(min(BLOCK, count - done), bits)
        out[done : done + len(values)] = values
        done += len(values)
    return out


@dataclass(frozen=True, eq=False)
class Table:
    """A law, cut into cells by the top bits of a word: the smallest magnitude of each cell and the one threshold in it.

    A cell with several thresholds, and the last one, has -1 for its magnitude, and is searched.
    """

    law: Law
    low: int
    thresholds: Words
    smallest: NDArray[np.int32]
    one: Words
    sure: Words

    @staticmethod
    @lru_cache(maxsize=32)
    def of(scale: Fraction, square: bool, low: int) -> Table:
        """The table of magnitudes (low = 0), or of blocks of 2^low of them."""
        rate = Fraction(4**low) / (2 * scale * scale) if square else Fraction(2**low) / scale
        law = Law(rate, square, folded=not low)
        edges = np.array(list(_certified(law)), np.uint64) << LOW_BIT | LOW_BIT
        cells = min(max(len(edges).bit_length() + 3, 10), 16)
        starts = np.arange(1 << cells, dtype=np.uint64) << np.uint64(64 - cells)
        smallest = np.searchsorted(edges, starts).astype(np.int32)
        inside = np.diff(smallest, append=np.int32(len(edges)))
        one = np.where(inside == 1, edges[np.minimum(smallest, len(edges) - 1)], np.uint64(2**64 - 1))
        smallest[(inside > 1)] = -1
        smallest[-1] = -1
        return Table(law, low, edges, smallest, one, _sure(law, low))

    def values(self, count: int, bits: Bits) -> Integers:
        """Up to `count` signed values: fewer if some were not kept."""
        words = bits.words(count)
        magnitudes = self.magnitudes(words, bits)
        signs = (words & LOW_BIT).view(np.int64)
        if self.low:
            magnitudes, kept = self.fill(magnitudes, bits)
            kept &= (magnitudes > 0) | (signs == 0)  # there is one zero
            magnitudes, signs = magnitudes[kept], signs[kept]
        magnitudes ^= -signs
        magnitudes += signs
        return magnitudes

    def magnitudes(self, words: Words, bits: Bits) -> Integers:
        """One draw of the law for each word; its lowest bit is left for the sign."""
        cells = (words >> np.uint64(64 - len(self.one).bit_length() + 1)).view(np.int64)
        smallest, one = self.smallest.take(cells), self.one.take(cells)
        found = smallest.astype(np.int64)
        found += words > one
        ends = words | LOW_BIT
        for i in np.flatnonzero(ends == one).tolist():
            found[i] = self.settle(int(words[i]), bits)
        if len(several := np.flatnonzero(smallest < 0)):
            found[several] = self.search(words[several], bits)
        return found

    def search(self, words: Words, bits: Bits) -> Integers:
        """The same by search, for cells with several thresholds and for the tail."""
        ends = words | LOW_BIT
        found = np.searchsorted(self.thresholds, ends)
        tied = self.thresholds.take(found, mode="clip") == ends
        for i in np.flatnonzero(tied | (found == self.law.size)).tolist():
            found[i] = self.settle(int(words[i]), bits)
        return found

    def settle(self, word: int, bits: Bits) -> int:
        """The draw of a word whose 63 bits do not decide, or which fall beyond the table: with more bits, and exactly."""
        uniform = Uniform(bits, word >> 1, 63)
        least, most = 0, self.law.size
        while least < most:
            middle = (least + most) // 2
            if uniform.below(lambda precision: self.law.threshold(middle, precision)):  # noqa: B023
                most = middle
            else:
                least = middle + 1
        return least if least < self.law.size else self.law.tail(bits)

    def fill(self, blocks: Integers, bits: Bits) -> tuple[Integers, NDArray[np.bool_]]:
        """Magnitudes in the blocks, and which of them are kept: low bits that are fair, then a coin for the rest of the exponent."""
        words, low = bits.words(len(blocks)), np.uint64(self.low)
        places = (words >> np.uint64(64 - self.low)).view(np.int64)
        kept = (words << low) < self.sure.take(blocks, mode="clip")
        for i in np.flatnonzero(~kept).tolist():
            coin = Uniform(bits, int(words[i]) & ((1 << 64 - self.low) - 1), 64 - self.low)
            kept[i] = coin.below(exp(self.excess(int(blocks[i]), int(places[i]))))
        return (blocks << np.int64(self.low)) + places, kept

    def excess(self, block: int, place: int) -> Fraction:
        """By how much the exponent of a place exceeds that of its block's beginning."""
        part = Fraction(place, 1 << self.low)
        return self.law.rate * (part * (2 * block + part) if self.law.square else part)


def _certified(law: Law) -> Iterator[int]:
    """The first 63 bits of each threshold: both ends of its enclosure have them."""
    most = 2**63 - 1
    for k, (low, high) in enumerate(thresholds(law, FIRST)):
        work = FIRST
        while low >> (work - 63) != min(high >> (work - 63), most):
            work *= 2
            low, high = thresholds(law, work)[k]
        yield low >> (work - 63)


def _sure(law: Law, low: int) -> Words:
    """For each block the number below which the bits of the coin keep any place of it: 1 less its largest exponent; 0 for the tail."""
    if not low:
        return np.zeros(1, np.uint64)
    bounds = []
    for block in range(law.size):
        excess = law.rate * (2 * block + 1 if law.square else 1)
        bounds.append(max(0, int((1 - excess) * 2**64) - (1 << low) + 1))
    return np.array([*bounds, 0], np.uint64)
