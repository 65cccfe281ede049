"""Records as points of the unit ball, on a grid: what clusters are made of.

Numbers stand on their scales; the middle of their ranges is the middle of the ball. Coordinates are
cut to 14 fractional bits, towards zero, which takes no point out of the ball. Centres stand on the
same grid. So squared distances are sums without rounding: which centre is nearest depends on
nothing but the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.estimators.columns import FeatureColumns
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.threads import each

Floats = NDArray[np.float64]
Points = NDArray[np.float32]
"""Whole steps of 2^-14 between -1 and 1, which single precision holds without rounding."""

BITS = 14
STEPS = 12
"""Fractional bits of what a point adds to a sum."""
BLOCK = 1 << 15
"""Points that are worked on at a time."""
SAFE = 1 - 2.0**-30
"""Below one by far more than the rounding of a norm."""


def on_grid(values: Floats, bits: int = BITS) -> Floats:
    """Numbers cut to whole steps of 2^-bits, towards zero."""
    return np.asarray(np.trunc(values * 2.0**bits) * 2.0**-bits)


def blocks(size: int) -> Iterator[slice]:
    """All places, in blocks: at least one, which may be empty."""
    for start in range(0, max(size, 1), BLOCK):
        yield slice(start, min(size, start + BLOCK))


def summed(size: int, like: NDArray[Any], work: Callable[[slice], NDArray[Any]]) -> NDArray[Any]:
    """What `work` makes of every block, added up in `like`."""
    for found in each(work, blocks(size)):
        like += found
    return like


@dataclass(frozen=True)
class Ball:
    """Where points live, in public terms: the middle of the scaled ranges, and the largest distance
    from it that is kept.
    """

    columns: FeatureColumns
    radius: float

    @classmethod
    def of(cls, columns: FeatureColumns, norm: float | None) -> Ball:
        """Around all that the ranges allow, or around the points within `norm` of their middle."""
        whole = math.sqrt(sum(0.25 if c.scale == "unit" else 1.0 for c in columns.numbers))
        return cls(columns, whole if norm is None else min(norm, whole))

    @property
    def middle(self) -> Floats:
        """Of the scaled ranges."""
        return np.array([0.5 if c.scale == "unit" else 0.0 for c in self.columns.numbers])

    @property
    def half_widths(self) -> Floats:
        """Of the box of all ranges, in units of the radius."""
        return np.minimum(
            np.array([0.5 if c.scale == "unit" else 1.0 for c in self.columns.numbers])
            / self.radius,
            1.0,
        )

    def points(self, data: EncodedRecords) -> Points:
        """Every record as a point; one outside the ball is moved to its edge.

        Guarantees: every coordinate is a whole step, and no point has a norm above one.
        """
        found = np.empty((data.size, len(self.columns.numbers)), np.float32)

        def place(part: slice) -> None:
            rows = (data.scaled(part) - self.middle) / self.radius
            norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
            rows *= (SAFE / np.maximum(norms, SAFE))[:, None]
            found[part] = on_grid(rows)

        for _ in each(place, blocks(data.size)):
            pass
        return found

    def raw(self, points: Floats) -> Floats:
        """Points in the units of the columns."""
        scaled = points * self.radius + self.middle
        return np.stack(
            [_raw(scaled[:, k], column) for k, column in enumerate(self.columns.numbers)], axis=1
        )


def _raw(scaled: Floats, column: Any) -> Floats:
    """A number from its scale back to its own units."""
    share = np.clip(scaled if column.scale == "unit" else (scaled + 1) / 2, 0, 1)
    low, high = (column.transformed(end) for end in column.range)
    value = low + share * (high - low)
    return np.asarray(np.expm1(value) if column.transform == "log1p" else value)


def nearest(points: Floats, centres: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The nearest centre of each point, the first of equals, and the square of its distance. Both
    stand on the grid.
    """
    squares = np.einsum("ij,ij->i", centres, centres) - 2 * points @ centres.T
    best = squares.argmin(axis=1)
    own = np.einsum("ij,ij->i", points, points)
    return best, np.maximum(own + np.take_along_axis(squares, best[:, None], axis=1)[:, 0], 0.0)


def shortened(rows: Floats, squares: Floats, radius: Floats) -> Floats:
    """Differences over the radius of their ball, those outside moved to its edge, on a grid of 12
    bits.

    `squares` are the squared norms of the rows.

    Guarantees: no norm above one.
    """
    norms = np.sqrt(squares)
    factor = SAFE / np.maximum(norms, radius)
    return on_grid(rows * factor[:, None], STEPS)
