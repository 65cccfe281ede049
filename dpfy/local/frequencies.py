"""Protocols for frequencies: each person has one of `buckets` values, and the server learns the
share of every value.

Where every report supports a value with one chance if it is the person's, and with another one if
it is not (`chances`), the estimate is (support - low) / (high - low), and its variance follows
(Wang, Blocki, Li & Jha 2017). All chances are exact fractions, rounded to the private side.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.local.protocol import LEAST_EPSILON, Protocol, Reals, Rows
from dpfy.mechanisms.discrete import whole
from dpfy.mechanisms.exact import Bits, coins, uniform
from dpfy.mechanisms.response import UP, RandomizedResponseMechanism, UnaryResponse

MOST_BUCKETS = 1 << 20
PRIME = (1 << 31) - 1
"""Of the field over which values are hashed: products of two numbers below it fit 64 bits."""
BLOCK = 1 << 20
"""Hashed values that are compared at a time."""


@dataclass(frozen=True)
class Frequencies(Protocol):
    """Values 0 to buckets - 1, one a person."""

    buckets: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("buckets", self.buckets, least=2, most=MOST_BUCKETS)

    @property
    @abstractmethod
    def chances(self) -> tuple[Fraction, Fraction]:
        """That a report supports the person's own value, and that it supports another one."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """The size of one report."""

    @abstractmethod
    def support(self, rows: Rows) -> Reals:
        """How many reports support each value."""

    def given(self, values: Any) -> NDArray[np.int64]:
        """Whole numbers; one outside of the range counts as the nearest inside."""
        found = np.asarray(values)
        if found.dtype == object and all(
            isinstance(value, int) for value in found.flat
        ):  # beyond 64 bits
            found = np.array(
                [max(0, min(value, self.buckets)) for value in found.flat], np.int64
            ).reshape(found.shape)
        if found.ndim != 1 or found.dtype.kind not in "biu":
            raise InvalidInput(
                "values",
                f"{found.dtype} of {found.ndim} axes",
                "must be a list of whole numbers, one for each person",
            )
        return np.clip(whole(found), 0, self.buckets - 1)

    def summary(self, rows: Rows) -> tuple[Reals, Reals]:
        """Shares of all values, with the variances at the shares that were found."""
        high, low = (float(p) for p in self.chances)
        shares = (self.support(rows) / len(rows) - low) / (high - low)
        return shares, self.variances(np.clip(shares, 0.0, 1.0)) / len(rows)

    def variances(self, frequencies: Reals) -> Reals:
        """The variance of each estimated share, times the number of reports, where the true shares
        are these.
        """
        high, low = (float(p) for p in self.chances)
        own, other = high * (1 - high), low * (1 - low)
        return np.asarray((frequencies * own + (1 - frequencies) * other) / (high - low) ** 2)


@dataclass(frozen=True)
class KaryResponse(Frequencies):
    """The value itself, or with some chance a uniform one: k-ary randomised response. Best for few
    values.
    """

    @cached_property
    def _response(self) -> RandomizedResponseMechanism:
        return RandomizedResponseMechanism.of(self.epsilon, self.buckets)

    @property
    def event(self) -> events.Event:
        """Randomised response, which accounting knows exactly."""
        return self._response.event

    @property
    def chances(self) -> tuple[Fraction, Fraction]:
        """Kept, or drawn uniformly; and drawn uniformly alone."""
        changed = Fraction(self._response.noise_parameter)
        return 1 - changed + changed / self.buckets, changed / self.buckets

    @property
    def bits(self) -> float:
        """One value."""
        return float(math.ceil(math.log2(self.buckets)))

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """A value for every value."""
        return self._response.draw(given, bits)

    def shape(self) -> tuple[tuple[int, ...], str]:
        """A value."""
        return (), "i"

    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """One of the values."""
        return np.asarray((rows >= 0) & (rows < self.buckets))

    def support(self, rows: Rows) -> Reals:
        """How often each value was reported."""
        return np.bincount(rows, minlength=self.buckets).astype(np.float64)


@dataclass(frozen=True)
class BitRows(Frequencies):
    """Reports that are rows of bits, one for each value."""

    @property
    def bits(self) -> float:
        """One for each value."""
        return float(self.buckets)

    def shape(self) -> tuple[tuple[int, ...], str]:
        """Bits."""
        return (self.buckets,), "b"

    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """Any bits."""
        return np.ones(len(rows), bool)

    def support(self, rows: Rows) -> Reals:
        """How many ones each value has."""
        return np.asarray(rows.sum(axis=0, dtype=np.int64).astype(np.float64))


@dataclass(frozen=True)
class UnaryEncoding(BitRows):
    """A row of bits, one for each value, each flipped by chance: the optimised form, or the
    symmetric one, which is basic RAPPOR once.
    """

    optimised: bool = True

    @cached_property
    def _response(self) -> UnaryResponse:
        return UnaryResponse(self.epsilon, self.buckets, self.optimised)

    @property
    def chances(self) -> tuple[Fraction, Fraction]:
        """Of a one."""
        return self._response.chances

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """A row of bits for every value."""
        return self._response.draw(given, bits)


@dataclass(frozen=True)
class Rappor(BitRows):
    """Basic RAPPOR: a permanent row of flipped bits, kept on the device, whose bits are flipped
    again for every report.

    `epsilon` is the longitudinal guarantee: of all reports ever made from one permanent row, and of
    the row itself. `once` is that of a single report. Both are for one value: a device keeps the
    row of the value that it reported first (:class:`dpfy.local.device.Device`), because new rows
    for new values would show when a value changes.

    Reference: Erlingsson, Pihur & Korolova 2014, with one hash function, the identity.
    """

    once: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not LEAST_EPSILON <= check.epsilon("once", self.once) < self.epsilon:
            raise InvalidInput(
                "once",
                self.once,
                f"must be below epsilon, the guarantee of all reports together ({self.epsilon:g})",
            )

    @property
    def flips(self) -> tuple[Fraction, Fraction]:
        """The chance that a bit is flipped permanently, and that it is flipped again in a report."""
        kept, seen = self._kept.chances[1], self.chances[1]
        return kept, (seen - kept) / (1 - 2 * kept)

    @cached_property
    def _kept(self) -> UnaryResponse:
        return UnaryResponse(self.epsilon, self.buckets, False)

    @property
    def chances(self) -> tuple[Fraction, Fraction]:
        """Of a one in a report: both flips together."""
        return UnaryResponse(self.once, self.buckets, False).chances

    def permanent(self, given: Rows, bits: Bits) -> Rows:
        """The row that a device keeps permanently."""
        return self._kept.draw(given, bits)

    def instantaneous(self, rows: Rows, bits: Bits) -> Rows:
        """A report from each of the kept rows."""
        return np.asarray(rows ^ coins(rows.size, self.flips[1], bits).reshape(rows.shape))

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """One report from a new permanent row for every value."""
        return self.instantaneous(self.permanent(given, bits), bits)


@dataclass(frozen=True)
class LocalHashing(Frequencies):
    """A hash function drawn on the device, and randomised response on the hash of the value: short
    reports, whatever the number of values.

    The hash is (a x + b) mod 2^31 - 1, taken mod `cells`: two values meet with chance 1 / cells, up
    to 1e-9. `cells` 0 is the optimum, about exp(epsilon) + 1; 2 is binary local hashing. Reference:
    Wang, Blocki, Li & Jha 2017; Bassily & Smith 2015.
    """

    cells: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cells:
            check.integer("cells", self.cells, least=2, most=MOST_BUCKETS)

    @cached_property
    def _response(self) -> RandomizedResponseMechanism:
        if self.cells:
            return RandomizedResponseMechanism.of(self.epsilon, self.cells)
        near = math.floor(math.exp(min(self.epsilon, 10.0))) + 1
        return min(
            (RandomizedResponseMechanism.of(self.epsilon, cells) for cells in (near, near + 1)),
            key=_rare_variance,
        )

    @property
    def chances(self) -> tuple[Fraction, Fraction]:
        """That the answer is the hash of the value, and of another value."""
        return _kept(self._response), Fraction(1, self._response.buckets)

    @property
    def bits(self) -> float:
        """A hash function and one of its cells."""
        return 62.0 + math.ceil(math.log2(self._response.buckets))

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """Hash function and answer."""
        a, b = uniform(len(given), PRIME, bits), uniform(len(given), PRIME, bits)
        return np.stack(
            [a, b, self._response.draw(_hashed(a, b, given, self._response.buckets), bits)], axis=1
        )

    def shape(self) -> tuple[tuple[int, ...], str]:
        """The two numbers of the hash function, and the answer."""
        return (3,), "i"

    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """A hash function and one of its cells."""
        return np.asarray(
            (rows >= 0).all(axis=1)
            & (rows[:, :2] < PRIME).all(axis=1)
            & (rows[:, 2] < self._response.buckets)
        )

    def support(self, rows: Rows) -> Reals:
        """How many reports each value could stand behind."""
        found, values = np.zeros(self.buckets), np.arange(self.buckets)
        width = max(1, BLOCK // self.buckets)
        for part in (rows[at : at + width] for at in range(0, len(rows), width)):
            a, b, answer = (part[:, k, None] for k in range(3))
            found += (_hashed(a, b, values, self._response.buckets) == answer).sum(axis=0)
        return found


def _kept(response: RandomizedResponseMechanism) -> Fraction:
    changed = Fraction(response.noise_parameter)
    return 1 - changed + changed / response.buckets


def _rare_variance(response: RandomizedResponseMechanism) -> float:
    """Of the share of a value that nobody has, by hashing into the cells of a response."""
    low = 1 / response.buckets
    return low * (1 - low) / (float(_kept(response)) - low) ** 2


def _hashed(a: Rows, b: Rows, values: Rows, cells: int) -> Rows:
    return np.asarray((a * values + b) % PRIME % cells)


@dataclass(frozen=True)
class HadamardResponse(Frequencies):
    """One place of a Hadamard matrix, drawn more often from where the row of the value is +1: short
    reports, quick estimates.

    The values lie in blocks, each with a Hadamard matrix of its own; the number of blocks is the
    one with the least error, 1 where privacy is high. Reference: Acharya, Sun & Zhang 2019.
    """

    @cached_property
    def layout(self) -> tuple[int, int]:
        """The number of blocks and the side of their matrices, powers of two. No value has the
        first row, which is +1 everywhere.
        """
        numbers = (1 << k for k in range((self.buckets - 1).bit_length() + 1))
        sides = [(blocks, 1 << (-(-self.buckets // blocks)).bit_length()) for blocks in numbers]
        return min(
            sides,
            key=lambda layout: float(
                self._variances(layout, np.full(self.buckets, 1 / self.buckets)).mean()
            ),
        )

    def _inside(self, layout: tuple[int, int]) -> Fraction:
        """The chance of a place where the row of the value is +1, rounded down."""
        places, half = layout[0] * layout[1], layout[1] // 2
        return Fraction(half / (half + (places - half) * math.exp(-self.epsilon)) * (2 - UP))

    def _rates(self, layout: tuple[int, int]) -> tuple[float, float, float]:
        """The chances of a place in the block of the value, and in another given block; and what a
        share of one adds to +1 less -1.
        """
        places, half = layout[0] * layout[1], layout[1] // 2
        inside = self._inside(layout)
        each = (1 - inside) / (places - half)
        return float(inside + half * each), float(2 * half * each), float(inside - half * each)

    @property
    def chances(self) -> tuple[Fraction, Fraction]:
        """That the place lies where the row of the value is +1; and, in one block, where that of
        another value is.
        """
        return self._inside(self.layout), Fraction(1, 2)

    @property
    def bits(self) -> float:
        """One place."""
        return math.log2(self.layout[0] * self.layout[1])

    def _place(self, values: Rows) -> tuple[Rows, Rows]:
        """Block and row of values."""
        return values // (self.layout[1] - 1), values % (self.layout[1] - 1) + 1

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """A place: in the half where the row is +1 by a coin, else uniform over all the others."""
        blocks, side = self.layout
        block, row = self._place(given)
        inside = coins(len(given), self._inside(self.layout), bits)
        near, far = (
            uniform(len(given), side // 2, bits),
            uniform(len(given), blocks * side - side // 2, bits),
        )
        beside = ~inside & (far < side // 2)  # where the row is -1
        column = _column(row, np.where(inside, near, np.where(beside, far, 0)), beside)
        other = far - side // 2  # a place in the other blocks
        moved = np.where(other // side >= block, other + side, other)
        return np.where(inside | beside, block * side + column, moved)

    def shape(self) -> tuple[tuple[int, ...], str]:
        """A place."""
        return (), "i"

    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """One of the places."""
        return np.asarray((rows >= 0) & (rows < self.layout[0] * self.layout[1]))

    def support(self, rows: Rows) -> Reals:
        """For each value, reports where its row is +1 less reports where it is -1: a fast transform
        of the counts of places.
        """
        blocks, side = self.layout
        counts = np.bincount(rows, minlength=blocks * side).astype(np.float64).reshape(blocks, side)
        width = 1
        while width < side:
            pairs = counts.reshape(blocks, side // (2 * width), 2, width)
            counts = np.stack(
                [pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2
            ).reshape(blocks, side)
            width *= 2
        return counts[self._place(np.arange(self.buckets))]

    def summary(self, rows: Rows) -> tuple[Reals, Reals]:
        """Shares of all values."""
        shares = self.support(rows) / len(rows) / self._rates(self.layout)[2]
        return shares, self.variances(np.clip(shares, 0.0, 1.0)) / len(rows)

    def variances(self, frequencies: Reals) -> Reals:
        """A report counts +1, -1, or, from another block, 0."""
        return self._variances(self.layout, np.asarray(frequencies))

    def _variances(self, layout: tuple[int, int], frequencies: Reals) -> Reals:
        own, other, gain = self._rates(layout)
        block = np.arange(self.buckets) // (layout[1] - 1)
        shares = np.minimum(1.0, np.bincount(block, frequencies))[block]
        return np.asarray((shares * own + (1 - shares) * other) / gain**2 - frequencies)


def _column(row: Rows, number: Rows, odd: NDArray[np.bool_]) -> Rows:
    """The `number`-th column in which a row of a Hadamard matrix is +1, or -1 where `odd`.

    The entry is the parity of the common bits. The lowest bit of the row is set in the column as
    the parity wants it.
    """
    lowest = row & -row
    column = (number & (lowest - 1)) | ((number & ~(lowest - 1)) << 1)
    wrong = (np.bitwise_count((column & row).astype(np.uint64)) & 1).astype(bool) != odd
    return np.where(wrong, column | lowest, column)
