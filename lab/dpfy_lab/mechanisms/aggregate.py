"""Sample and aggregate: any computation, run on disjoint blocks of the data; one unit changes the
result of one block.

Nissim, Raskhodnikova & Smith 2007. Units are put into blocks by chance, each by itself, so that who
else is there does not matter: two neighbours differ in the result of one block, whatever the
adjacency.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.choice import Exponential
from dpfy.mechanisms.exact import Bits, uniform
from dpfy.mechanisms.grid import Grid
from dpfy.mechanisms.mechanism import Stated


@dataclass(frozen=True)
class SampleAndAggregate(Stated):
    """The results of `blocks` runs on parts of the data, each a number from `lower` to `upper`,
    made into one.
    """

    blocks: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("blocks", self.blocks, most=1 << 24)
        if check.real("lower", self.lower) >= check.real("upper", self.upper) or not math.isfinite(
            self.upper - self.lower
        ):
            raise InvalidInput("upper", self.upper, f"must be above lower ({self.lower:g})")

    def release(
        self,
        function: Callable[[Any], float],
        rows: Sequence[Any] | NDArray[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[float]:
        """`function` on every block of `rows`, one row a unit, aggregated.

        Guarantees: one unit changes the result of one block, whatever the function does, if it
        keeps nothing from call to call. A block that is empty, a function that fails or returns no
        number count as the middle of the range.
        """
        table = np.asarray(rows)
        bits = self._source(permit, randomness, step)
        places = uniform(len(table), self.blocks, bits)
        results = [self._result(function, table[places == block]) for block in range(self.blocks)]
        return Private(self._aggregate(np.array(results), bits))

    def _result(self, function: Callable[[Any], float], rows: NDArray[Any]) -> float:
        middle = self.lower + (self.upper - self.lower) / 2
        try:
            found = float(function(rows)) if len(rows) else middle
        except Exception:  # whatever it is, it must not show
            found = middle
        return min(max(found, self.lower), self.upper) if math.isfinite(found) else middle

    @abstractmethod
    def _aggregate(self, results: NDArray[np.float64], bits: Bits) -> float:
        """One private number from the results."""


@dataclass(frozen=True)
class AggregateMean(SampleAndAggregate):
    """The mean of the blocks' results, with two-sided geometric noise on a grid."""

    @property
    def event(self) -> events.Event:
        """Pure epsilon."""
        return events.EpsilonDelta(self.epsilon)

    def _aggregate(self, results: NDArray[np.float64], bits: Bits) -> float:
        width = Bound.scalar(self.upper - self.lower)
        grid = Grid.of(width.l1)
        total = grid.sum(results - self.lower, width)
        scale = math.floor(grid.steps(total.bound.l1)) / Fraction(self.epsilon)
        noisy = int(total.value.counts) + int(integers.laplace(1, scale, bits)[0])
        return self.lower + math.ldexp(noisy, grid.exponent) / self.blocks


@dataclass(frozen=True)
class AggregateMedian(SampleAndAggregate):
    """One of `places` evenly spread numbers near the median of the blocks' results, by the
    exponential mechanism.
    """

    places: int = 1001

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("places", self.places, least=2, most=1 << 24)

    @property
    def event(self) -> events.Event:
        """One choice by scores."""
        return events.BoundedRange(self.epsilon)

    def _aggregate(self, results: NDArray[np.float64], bits: Bits) -> float:
        values, found = np.linspace(self.lower, self.upper, self.places), np.sort(results)
        below = np.searchsorted(found, values, side="right")
        above = len(found) - np.searchsorted(found, values, side="left")
        chosen = Exponential(self.epsilon)._index(
            np.minimum(below, above).astype(np.int64), 2, bits
        )
        return float(values[chosen])
