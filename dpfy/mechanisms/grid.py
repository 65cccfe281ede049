"""Sums on a public grid: contributions are rounded to whole multiples of a power of two and added
as integers.

Integers add up to the same whatever the order, and the noise is a whole number of steps too, so
that no bit of the result tells more than its value (Mironov 2012; Casacuberta et al. 2022; Haney et
al. 2022). What leaves the range of 62 bits counts as its end: that moves two sums no farther apart,
so that it costs accuracy and never privacy, and raises nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import EXAMPLE, Unit
from dpfy.core.values import Bound, Bounded

FINENESS = 24
"""Bits between the scale of the noise and a step, for one coordinate."""
FARTHEST = 900
"""The largest and the least exponent of a step, up to its sign."""
ROOM = 62
MOST = 1 << ROOM
"""The end of the range of a sum."""
BLOCK = 1 << 20
"""Values that are rounded at a time."""


@dataclass(frozen=True)
class Laid:
    """Numbers on a grid: `counts` steps each."""

    grid: Grid
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """Whole multiples of 2 ** `exponent`. Public: it follows from the noise and the bound, never
    from the data.
    """

    exponent: int

    def __post_init__(self) -> None:
        check.integer("grid.exponent", self.exponent, least=-FARTHEST, most=FARTHEST)

    @classmethod
    def of(cls, scale: float, coordinates: int = 1) -> Grid:
        """The grid for noise of this scale on so many coordinates: 2^24 steps or more in a scale,
        and more with many coordinates.
        """
        more = math.ceil(math.log2(check.integer("coordinates", coordinates)) / 2)
        exponent = math.frexp(check.positive("noise scale", scale))[1] - 1 - FINENESS - more
        if abs(exponent) > FARTHEST:
            raise Unsupported(
                f"noise of scale {scale:.3g}",
                "measure the data in another unit: kilometres for metres, say",
            )
        return cls(exponent)

    @property
    def step(self) -> Fraction:
        """The distance of neighbouring points."""
        return Fraction(2) ** self.exponent

    def steps(self, length: float) -> Fraction:
        """A length in steps, exactly."""
        return Fraction(length) / self.step

    def values(self, counts: NDArray[np.int64]) -> Any:
        """So many steps as floating-point numbers: post-processing."""
        found = np.ldexp(counts.astype(np.float64), self.exponent)
        return found if found.ndim else float(found)

    def most_units(self, bound: Bound) -> int:
        """How many units of this bound can be added before a sum may reach the end of its range."""
        return int(MOST // max(self.steps(bound.finite("linf", "a sum")), Fraction(1)))

    def most_steps(self, bound: Bound) -> float:
        """The most steps that one unit of this bound adds to a coordinate, if integers have room
        for it.
        """
        return self._limits(bound, 1).linf

    def sum(self, rows: Any, bound: Bound, unit: Unit = EXAMPLE) -> Bounded[Laid]:
        """The sum of `rows`, what one unit adds in each: clipped to `bound`, rounded, added as
        integers.

        Guarantees: what is returned changes by at most its bound, a little above the one asked for,
        when a row is added or removed, whatever the rows hold. A row that holds anything but finite
        numbers adds nothing. The order of rows does not matter.
        """
        table = np.asarray(rows)
        if table.ndim < 1 or table.dtype.kind not in "biuf":
            raise InvalidInput(
                "rows",
                f"{table.dtype} of {table.ndim} axes",
                "must be an array of numbers, one row for each unit",
            )
        shape, size = table.shape[1:], math.prod(table.shape[1:])
        limits = self._limits(bound, size)
        table, width = table.reshape(len(table), size), max(1, BLOCK // max(1, size))
        parts = (
            self._rounded(table[start : start + width], limits)
            for start in range(0, len(table), width)
        )
        total = np.zeros(size, np.int64)
        if len(table) <= self.most_units(bound):
            for part in parts:
                total += part.sum(axis=0)
        else:  # beyond 64 bits
            exact = sum((_wide_sum(part) for part in parts), np.zeros(size, dtype=object))
            total = np.clip(exact, -MOST, MOST).astype(np.int64)
        return Bounded(Laid(self, total.reshape(shape)), self._grown(limits, size), unit)

    def lay(self, total: Bounded[Any]) -> Bounded[Laid]:
        """A value that was summed elsewhere, on the grid.

        Guarantees: two values that differ by at most the bound lie, rounded, within the returned
        bound: one step more in each coordinate, or none for whole numbers on a grid that holds
        them. What is not finite, which no bounded value can be, counts as zero.
        """
        value = np.asarray(
            max(-MOST, min(MOST, total.value)) if isinstance(total.value, int) else total.value
        )
        if value.dtype.kind in "biu" and -ROOM <= self.exponent <= 0:
            counts = _within(value, MOST >> -self.exponent) << -self.exponent
            return Bounded(Laid(self, np.asarray(counts)), total.bound, total.unit)
        if value.dtype.kind not in "biuf":
            raise InvalidInput("value", str(value.dtype), "must be a number or an array of numbers")
        with np.errstate(all="ignore"):
            counts = np.nan_to_num(
                np.ldexp(value.astype(np.float64), -self.exponent), posinf=MOST, neginf=-MOST
            )
            counts = np.clip(counts, -MOST, MOST)
        step, size = float(self.step), value.size
        grown = [
            total.bound.l2 + math.sqrt(size) * step,
            total.bound.l1 + size * step,
            total.bound.linf + step,
        ]
        return Bounded(
            Laid(self, np.rint(counts).astype(np.int64)), Bound(*(up(b) for b in grown)), total.unit
        )

    def _limits(self, bound: Bound, size: int) -> Bound:
        """The bound in steps, if integers have room for it."""
        if self.steps(bound.finite("linf", "a sum on a grid")) >= MOST:
            raise Unsupported(
                f"contributions of {bound.linf:.3g} on a grid of {float(self.step):.3g}",
                "add more noise, or clip",
            )
        l2, l1, linf = (
            math.ldexp(b, -self.exponent) if math.isfinite(b) else b
            for b in (bound.l2, bound.l1, bound.linf)
        )
        return Bound(linf, linf, linf) if size <= 1 else Bound(l2, l1, linf)

    def _rounded(self, rows: NDArray[Any], limits: Bound) -> NDArray[np.int64]:
        """Whole numbers of steps, each row within the limits before it is rounded."""
        with np.errstate(all="ignore"):
            rows = np.ldexp(rows.astype(np.float64), -self.exponent)
            rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
            rows = np.clip(rows, -limits.linf, limits.linf)
            if limits.l1 < rows.shape[1] * limits.linf:
                rows *= np.minimum(
                    1.0, limits.l1 / np.maximum(np.abs(rows).sum(axis=1, keepdims=True), 1e-300)
                )
            if limits.l2 < math.sqrt(rows.shape[1]) * limits.linf:
                rows *= np.minimum(
                    1.0,
                    limits.l2
                    / np.maximum(np.sqrt((rows * rows).sum(axis=1, keepdims=True)), 1e-300),
                )
        return np.rint(rows).astype(np.int64)

    def _grown(self, limits: Bound, size: int) -> Bound:
        """The bound on rounded rows: half a step in each coordinate more, and what the arithmetic
        of norms can have lost.
        """
        whole = math.ldexp(float(np.rint(limits.linf)), self.exponent)
        if size <= 1:
            return Bound.scalar(max(whole, float(self.step)))
        lost = 1 + (size + 16) * 2.0**-51
        l2, l1 = limits.l2 * lost + math.sqrt(size) / 2, limits.l1 * lost + size / 2
        return Bound(self._length(l2), self._length(l1), max(whole, float(self.step)))

    def _length(self, steps: float) -> float:
        """So many steps, or infinitely many, as a length, rounded up."""
        return up(math.ldexp(steps, self.exponent)) if steps < math.inf else steps


def _wide_sum(rows: NDArray[np.int64]) -> NDArray[Any]:
    """The sums of the columns, as Python's own integers."""
    high, low = (part.sum(axis=0).astype(object) for part in (rows >> 31, rows & (1 << 31) - 1))
    return np.asarray(high * (1 << 31) + low)


def _within(value: NDArray[Any], most: int) -> NDArray[np.int64]:
    """Whole numbers of any type, those beyond `most` counted as that."""
    if value.dtype.kind == "u":
        return np.minimum(value, np.uint64(most)).astype(np.int64)
    return np.clip(value.astype(np.int64), -most, most)


def up(value: float) -> float:
    """A float above what a few roundings of positive numbers can have lost."""
    return value * (1 + 2.0**-50)
