"""Laws on the integers from 0 on with weights exp(-rate k) or exp(-rate k^2), and their thresholds:
certified, as closely as asked for.

Exact integer noise, millions at a time: the discrete Laplace and Gaussian laws by inversion of a
lazy table.

A draw is a 64-bit word: 63 bits of a uniform number, and a sign. The table holds, for every
magnitude k, the first 63 bits of P(at most k), certified (:mod:`dpfy.mechanisms.integers`). Where the
bits of the word differ from them, they decide. Where they agree (a tie, with probability below size
/ 2^63) more bits are drawn, and the threshold is computed more closely, until it is decided. What
lies beyond the table is drawn by itself. So every value has the given law exactly: given fair bits
the total variation is 0. Nothing here is a float.

A wide law is drawn in blocks of 2^low values, by the ziggurat's idea (Marsaglia & Tsang 2000). A
point is thrown under a staircase over the weights, whose step k is the weight w_k at the beginning
of block k. What lies below the next step, w_(k+1), lies below the weights of the whole block: any
place of block k, on either side, has the same part there. These parts, and all that is left (w_0,
since the differences of the steps add up to it), have the law w_0, w_1, w_2, ... of a table: k + 1
says block k, and 0, seldom, says that the point is between two steps, where it is compared exactly.

Timing: the vector route does the same work for every value. What differs: which cells of the tables
are read (anyone who shares the cache might see it); cells with several thresholds (a search instead of
one comparison: a few in a hundred values, far ones mostly); points between two steps of a wide law
(one in 2,000 to 4,000 where millions are drawn, one in 16 to 32 where few are; how often a point is
thrown again is independent of what is kept); ties and tails (below 2^-40). Anyone who can time single
draws must be kept away, as from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.mechanisms.exact import (
    Bits,
    Enclosed,
    Enclosure,
    Uniform,
    Words,
    bernoulli_exp,
    exp,
    exp_enclosure,
    geometric,
    less,
    rational,
)

RARE = 30
"""The table of a law ends at weights below exp(-30): less than 2^-40 is left, and drawn by
itself.
"""

FIRST = 192
"""The precision at which thresholds are computed first."""


@dataclass(frozen=True)
class Law:
    """P(k) proportional to exp(-rate k), or exp(-rate k^2) if `square`; doubled for k >= 1 if
    `folded` (k is then a magnitude).
    """

    rate: Fraction
    square: bool
    folded: bool

    @cached_property
    def size(self) -> int:
        """How many thresholds the table has: `size` or more is its tail."""
        return (
            math.isqrt(math.ceil(RARE / self.rate)) if self.square else math.ceil(RARE / self.rate)
        ) + 1

    def exponent(self, k: int | Fraction) -> Fraction:
        """Minus the logarithm of the weight of k."""
        return self.rate * (k * k if self.square else k)

    def threshold(self, k: int, precision: int) -> Enclosure:
        """P(at most k), for k below `size`, enclosed at a precision."""
        work = FIRST
        while work < precision + 64:
            work *= 2
        low, high = thresholds(self, work)[k]
        return low >> (work - precision), -(-high >> (work - precision))

    def tail(self, bits: Bits) -> int:
        """A draw of the law given that it is at least `size`: memoryless, or by rejection from a
        geometric number beyond that.
        """
        if not self.square:
            return self.size + geometric(self.rate, bits)
        while not bernoulli_exp(
            self.exponent(beyond := geometric(2 * self.size * self.rate, bits)), bits
        ):
            pass
        return self.size + beyond


@lru_cache(maxsize=1)  # one table, for the comparisons of a tie: it is large, and ties are rare
def thresholds(law: Law, work: int) -> list[Enclosure]:
    """P(at most k) for k below `law.size`, each enclosed by integers over 2^work.

    Guarantees: the weights, their sums and the sum of all are enclosed, and so are the quotients.
    """
    lows, highs = zip(*weights(law, work), strict=True)
    rest_low, rest_high = _rest(law, work, len(lows))
    sums_low, sums_high = (
        _sums((*lows, rest_low), law.folded),
        _sums((*highs, rest_high), law.folded),
    )
    one = 1 << work
    least, most = (
        (one << work) // sums_high[-1],
        -((-one << work) // sums_low[-1]),
    )  # one over the sum of all
    pairs = zip(sums_low[: law.size], sums_high[: law.size], strict=True)
    return [(low * least >> work, min((high * most >> work) + 1, one)) for low, high in pairs]


def _sums(parts: Iterable[int], folded: bool) -> list[int]:
    return list(
        accumulate(parts, lambda total, part: total + part + part if folded else total + part)
    )


def weights(law: Law, work: int) -> Iterator[Enclosure]:
    """exp(-rate k), or exp(-rate k^2), for k up to `law.size`, for squares further until they are
    below 2^(32 - work).

    Guarantees: enclosed by a recurrence, one copy of it rounded down and one up.
    """
    ratio_low, ratio_high = exp_enclosure(law.rate, work)
    bend_low, bend_high = exp_enclosure(2 * law.rate, work)
    low = high = 1 << work
    left = law.size
    while left >= 0 or (law.square and high >= 1 << 32):
        yield low, high
        low, high = low * ratio_low >> work, (high * ratio_high >> work) + 1
        if law.square:
            ratio_low, ratio_high = (
                ratio_low * bend_low >> work,
                (ratio_high * bend_high >> work) + 1,
            )
        left -= 1


def _rest(law: Law, work: int, first: int) -> Enclosure:
    """The sum of the weights from `first` on: at most a geometric series, a weight over one less
    the next ratio. Without squares, that.
    """
    low, high = exp_enclosure(law.exponent(first), work)
    ratio_low, ratio_high = exp_enclosure(law.exponent(first + 1) - law.exponent(first), work)
    one = 1 << work
    return 0 if law.square else (low << work) // (one - ratio_low), (high << work) // (
        one - ratio_high
    ) + 1


Integers = NDArray[np.int64]

SCALES = (Fraction(1, 1 << 20), 1 << 45)
"""Between these scales values fit 64 bits with room to spare."""

BLOCK = 1 << 15
"""Values made at a time: they stay in the cache."""

FEW, MANY = 5, 12
"""The table of a law reaches to 2^FEW scales for few values, which is made in a moment, and to
2^MANY for millions.
"""

LAST = np.uint64(1)


def laplace(count: int, scale: Fraction | int, bits: Bits) -> Integers:
    """`count` independent integers with P(x) proportional to exp(-|x| / scale), for a scale from
    2^-20 to 2^45.

    Guarantees: exactly this law, given fair bits: the total variation is 0. Reference: Ghosh,
    Roughgarden & Sundararajan 2009 (the law).

    Args:
        count: How many.
        scale: The scale of the noise, a fraction.
        bits: The random bits.

    Returns:
        An array of integers.

    Raises:
        InvalidInput: The scale is out of its range.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, laplace
        >>> laplace(3, 10, Bits(Randomness.from_os(), "noise", 0)).dtype
        dtype('int64')
    """
    return _draw(count, _scale("scale", scale), False, bits)


def gaussian(count: int, sigma: Fraction | int, bits: Bits, *, again: bool = False) -> Integers:
    """`count` independent integers with P(x) proportional to exp(-x^2 / (2 sigma^2)), for a sigma
    from 2^-20 to 2^45.

    `again` says that the same law will be drawn from many times: a larger table is worth its
    making.

    Guarantees: exactly this law, given fair bits: the total variation is 0. Reference: Canonne,
    Kamath & Steinke 2020 (the law).

    Args:
        count: How many.
        sigma: The standard deviation of the law (of the continuous one), a fraction.
        bits: The random bits.
        again: Whether the same law will be drawn from many times.

    Returns:
        An array of integers.

    Raises:
        InvalidInput: Sigma is out of its range.

    Example:
        >>> from dpfy.core.randomness import Randomness
        >>> from dpfy.mechanisms import Bits, gaussian
        >>> bool(abs(gaussian(10_000, 10, Bits(Randomness.from_os(), "noise", 0)).std() - 10) < 1)
        True
    """
    return _draw(count, _scale("sigma", sigma), True, bits, again)


def _scale(name: str, value: Fraction | int) -> Fraction:
    if (scale := rational(name, value, SCALES[0])) > SCALES[1]:
        raise InvalidInput(name, value, "must be at most 2^45: values must fit 64 bits")
    return scale


def split(scale: Fraction, count: int) -> int:
    """How many low bits of a magnitude are drawn by themselves: 0 where the law fits a table that
    is worth its making.
    """
    reach = min(max(count.bit_length() - 9, FEW), MANY)
    return max(0, int(scale).bit_length() - reach)


def _draw(count: int, scale: Fraction, square: bool, bits: Bits, again: bool = False) -> Integers:
    out = np.empty(check.integer("count", count, 0), np.int64)
    low = split(scale, 1 << 30 if again else count)
    if count:
        (_wide(scale, square, low) if low else _narrow(scale, square)).draw(out, bits)
    return out


class Room:
    """Memory for what is between words and values, used again for every block: fresh memory costs
    more than what is done in it.
    """

    def __init__(self, size: int) -> None:
        self.words, self.other, self.step = (np.empty(size, np.uint64) for _ in range(3))
        self.before = np.empty(size, np.int64)
        self.above, self.rare = np.empty(size, np.bool_), np.empty(size, np.bool_)

    def signs(self) -> Integers:
        """-1 or 0 for each word, by its last bit; `other` is overwritten."""
        signs = np.bitwise_and(self.words, LAST, out=self.other).view(np.int64)
        return np.negative(signs, out=signs)

    def first(self, size: int) -> Room:
        """The first so many places of it."""
        if size == len(self.words):
            return self
        part = Room(0)
        for name, array in vars(self).items():
            setattr(part, name, array[:size])
        return part


def blocks_of(out: Integers) -> Iterator[tuple[int, Integers, Room]]:
    """An array in parts that stay in the cache, each with where it begins, and room for it."""
    room = Room(min(len(out), BLOCK))
    for start in range(0, len(out), BLOCK):
        part = out[start : start + BLOCK]
        yield start, part, room.first(len(part))


class LawSteps:
    """Increasing numbers in (0, 1) without a last bit: from a uniform number to how many of them it
    has reached, by its first 63 bits.

    `rough` encloses them at the precision FIRST, `number(k)` as closely as asked for. The last bit
    of a word is left alone: it is a sign.
    """

    def __init__(self, rough: Iterable[Enclosure], number: Callable[[int], Enclosed]) -> None:
        self.number = number
        self.edges: Words = (
            np.array([first_bits(pair, number, k) for k, pair in enumerate(rough)], np.uint64)
            << LAST
            | LAST
        )

    def search(self, words: Words, bits: Bits) -> Integers:
        """How many numbers each word has reached."""
        ends = words | LAST
        found = np.searchsorted(self.edges, ends)
        for i in np.flatnonzero(self.edges.take(found, mode="clip") == ends).tolist():
            found[i] = self.settle(Uniform(bits, int(words[i]) >> 1, 63))
        return found

    def settle(self, uniform: Uniform) -> int:
        """The same for one uniform number, with as many bits as it takes."""
        least, most = 0, len(self.edges)
        while least < most:
            middle = (least + most) // 2
            least, most = (
                (least, middle) if uniform.below(self.number(middle)) else (middle + 1, most)
            )
        return least


def first_bits(rough: Enclosure, number: Callable[[int], Enclosed], k: int) -> int:
    """The first 63 bits of a number in (0, 1), certain: both ends of an enclosure have them."""
    (low, high), precision = rough, FIRST
    while (first := low >> (precision - 63)) != min(high >> (precision - 63), 2**63 - 1):
        precision *= 2
        low, high = number(k)(precision)
    return first


class LawTable:
    """A law, cut into cells by the top bits of a word: how many steps lie before each cell, and the
    one step in it.

    The last cell, and those with several steps, are searched: they are marked by -1.
    """

    def __init__(self, law: Law) -> None:
        self.law = law
        self.steps = LawSteps(
            thresholds(law, FIRST), lambda k: lambda precision: law.threshold(k, precision)
        )
        edges = self.steps.edges
        cells = min(max(len(edges).bit_length() + 3, 10), 16)
        starts = np.arange(1 << cells, dtype=np.uint64) << np.uint64(64 - cells)
        before = np.searchsorted(edges, starts)
        inside = np.diff(before, append=len(edges))
        self.shift = np.uint64(64 - cells)
        self.step: Words = np.where(
            inside == 1, edges.take(before, mode="clip"), np.uint64(2**64 - 1)
        )
        before[inside > 1] = before[-1] = -1
        self.before: Integers = before

    def values(self, bits: Bits, room: Room) -> Integers:
        """Fresh words in `room.words`, and one draw of the law for each of them, which leaves its
        last bit alone, in `room.before`.
        """
        words, other, values, step, rare = room.words, room.other, room.before, room.step, room.rare
        bits.into(words)
        cells = np.right_shift(words, self.shift, out=other).view(np.int64)
        self.before.take(cells, out=values, mode="clip")
        self.step.take(cells, out=step, mode="clip")
        np.less(values, 0, out=rare)
        values += np.greater(words, step, out=room.above)
        np.bitwise_or(words, LAST, out=other)
        rare |= np.equal(other, step, out=room.above)
        if len(places := np.flatnonzero(rare)):
            values[places] = found = self.steps.search(words[places], bits)
            for i in places[found == self.law.size].tolist():
                values[i] = self.law.tail(bits)
        return values


class Narrow:
    """A law whose magnitudes are drawn from one table."""

    def __init__(self, scale: Fraction, square: bool) -> None:
        self.table = LawTable(
            Law(1 / (2 * scale * scale) if square else 1 / scale, square, folded=True)
        )

    def draw(self, out: Integers, bits: Bits) -> None:
        """Overwrite an array with draws."""
        for _, part, room in blocks_of(out):
            np.bitwise_xor(self.table.values(bits, room), signs := room.signs(), out=part)
            part -= signs


class Wide:
    """A law whose magnitudes are drawn in blocks of 2^low, below a staircase."""

    def __init__(self, scale: Fraction, square: bool, low: int) -> None:
        self.low = low
        self.law = Law(
            Fraction(4**low) / (2 * scale * scale) if square else Fraction(2**low) / scale,
            square,
            folded=False,
        )
        self.table = LawTable(self.law)
        one = 1 << FIRST
        heights = islice(weights(self.law, FIRST), 1, self.law.size + 1)
        self.falls = LawSteps(
            ((one - high, one - low) for low, high in heights), lambda k: self.depth(k + 1)
        )

    def depth(self, place: int | Fraction) -> Enclosed:
        """How far the weight at a place, counted in blocks, lies below 1."""
        return less(exp(self.law.exponent(place)))

    def draw(self, out: Integers, bits: Bits) -> None:
        """Overwrite an array with draws."""
        between = []
        for start, part, room in blocks_of(out):
            blocks = self.table.values(bits, room)
            between.append(np.flatnonzero(np.equal(blocks, 0, out=room.rare)) + start)
            blocks -= 1
            self.place(blocks, bits, part, room)
        if len(places := np.concatenate(between)):
            out[places] = self.between(len(places), bits)

    def place(self, blocks: Integers, bits: Bits, out: Integers, room: Room) -> None:
        """Fair places in blocks, on the side of the words' last bits: block 0 is 0 to 2^low - 1, or
        -1 to -2^low.
        """
        blocks <<= np.int64(self.low)
        bits.into(room.step)
        room.step >>= np.uint64(64 - self.low)
        blocks |= room.step.view(np.int64)
        np.bitwise_xor(blocks, room.signs(), out=out)

    def between(self, count: int, bits: Bits) -> Integers:
        """Draws for points between two steps: their depth says which, and a place there is kept if
        its weight reaches above the point.
        """
        room, out = Room(count), np.empty(count, np.int64)
        bits.into(room.words)
        ends = room.words | LAST
        blocks = np.searchsorted(self.falls.edges, ends)
        depths = [Uniform(bits, word >> 1, 63) for word in room.words.tolist()]
        for i in np.flatnonzero(
            self.falls.edges.take(blocks, mode="clip") <= ends
        ).tolist():  # on a step, or beyond the last
            blocks[i] = self.falls.settle(depths[i])
            while blocks[i] >= len(self.falls.edges) and not depths[i].below(
                self.depth(int(blocks[i]) + 1)
            ):
                blocks[i] += 1
        self.place(blocks, bits, out, room)
        thrown = [
            d.below(self.depth(Fraction(abs(x), 1 << self.low)))
            for d, x in zip(depths, out.tolist(), strict=True)
        ]
        if any(thrown):
            again = np.empty(sum(thrown), np.int64)
            self.draw(again, bits)
            out[thrown] = again
        return out


_narrow, _wide = lru_cache(maxsize=16)(Narrow), lru_cache(maxsize=16)(Wide)
