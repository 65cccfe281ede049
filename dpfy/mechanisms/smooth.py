"""Smooth sensitivity: noise that fits the data at hand, for quantiles (Nissim, Raskhodnikova &
Smith 2007).

Let S be at least the change of the value between neighbours, on both of them, and S' <= exp(beta) S
for neighbours. The value f gets noise x with P(x) proportional to exp(-|x| / b), b = S / alpha, on
integers. The log ratio of the probabilities of one outcome on neighbours is at most alpha + beta
where b < b', since the values differ by at most alpha b', and normalisations by at most b' / b
(tanh(u) / u falls). Where b >= b' it is at most alpha + (exp(beta) - 1) |x| / b, and |x| > L b has
a probability of at most 2 exp(-L) / (1 + exp(-1/b)). So the release is (epsilon, delta)-private for
epsilon = alpha + max(beta, (exp(beta) - 1) L) and this delta. Scales are rounded to whole numbers,
none below 2^LEAST, which changes a ratio of two by less than 2^(1 - LEAST): that is taken off beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.grid import Grid
from dpfy.mechanisms.mechanism import Stated

RANGE, LEAST, WIDEST = 40, 20, 45
"""Bits of the public range of values, of the least scale of the noise and of the largest, in
steps.
"""
ROUNDING = 1 + 1e-9
"""More than the arithmetic of a scale can lose."""


@dataclass(frozen=True)
class SmoothQuantile(Stated):
    """The value at a rank of the sorted data, clipped to a public range, for a public number of
    units, one of which is replaced.
    """

    delta: float
    lower: float
    upper: float
    quantile: float = 0.5
    adjacency: Adjacency = field(default=Adjacency.REPLACE_ONE, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.delta("delta", self.delta)
        check.fraction("quantile", self.quantile)
        if check.real("lower", self.lower) >= check.real("upper", self.upper) or not math.isfinite(
            self.upper - self.lower
        ):
            raise InvalidInput("upper", self.upper, f"must be above lower ({self.lower:g})")
        if self.adjacency is not Adjacency.REPLACE_ONE:
            way_out = (
                "use replace-one with a public number of units, or a quantile by the exponential "
                "mechanism"
            )
            raise Unsupported(f"smooth sensitivity under {self.adjacency.value}", way_out)
        if self.beta <= 0:
            raise Unsupported(
                f"smooth sensitivity at epsilon {self.epsilon:g}, delta {self.delta:g}",
                "use the exponential mechanism",
            )

    @property
    def event(self) -> events.Event:
        """One release."""
        return events.EpsilonDelta(self.epsilon, self.delta)

    @property
    def alpha(self) -> float:
        """The part of epsilon that pays for the move of the value: half."""
        return self.epsilon / 2

    @property
    def beta(self) -> float:
        """How fast the scale may change from neighbour to neighbour, after all rounding."""
        far = math.log((1 + 2.0 ** (1 - LEAST)) / self.delta) * ROUNDING
        rest = (self.epsilon - self.alpha) / ROUNDING
        return min(rest, math.log1p(rest / far)) / ROUNDING - 2.0 ** (1 - LEAST)

    @property
    def grid(self) -> Grid:
        """Where values lie: 2^40 steps or fewer in the range, so that the scale of the noise has
        room.
        """
        bits = min(RANGE, WIDEST - 2 + math.floor(math.log2(self.alpha)))
        return Grid(math.frexp(self.upper - self.lower)[1] - bits)

    def release(
        self,
        values: Bounded[Any],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[float]:
        """The quantile of `values`, one number a unit, with noise, clipped to the range.

        Guarantees: as the module says. A value that is not a number counts as the lower end. The
        number of values is public.
        """
        table = np.asarray(values.value)
        if table.ndim != 1 or not len(table) or table.dtype.kind not in "biuf":
            raise InvalidInput(
                "values",
                f"{table.dtype} of shape {table.shape}",
                "must be a list of numbers, at least one",
            )
        grid, width = self.grid, math.floor(self.grid.steps(self.upper - self.lower))
        with np.errstate(all="ignore"):
            steps = np.ldexp(table.astype(np.float64) - self.lower, -grid.exponent)
        counts = np.sort(
            np.rint(np.clip(np.nan_to_num(steps, posinf=width, neginf=0.0), 0, width)).astype(
                np.int64
            )
        )
        rank = math.floor(self.quantile * (len(counts) - 1) + 0.5)
        scale = max(
            1 << LEAST,
            math.ceil(smooth_sensitivity(counts, rank, width, self.beta) / self.alpha * ROUNDING),
        )
        bits = self._source(permit, randomness, step)
        noisy = int(counts[rank]) + int(integers.laplace(1, scale, bits)[0])
        return Private(
            min(max(self.lower + math.ldexp(noisy, grid.exponent), self.lower), self.upper)
        )


def smooth_sensitivity(counts: NDArray[np.int64], rank: int, width: int, beta: float) -> float:
    """The least beta-smooth bound on how far replacing one of `counts` (sorted, from 0 to `width`)
    moves the value at `rank`.

    The largest exp(-beta k) A(k), A(k) the largest change that one more replacement can make after
    k: the widest stretch of k + 2 values around the rank. Once exp(-beta k) times the width is
    below what was found, no larger k can matter.
    """
    best, k = 0.0, 0
    while k <= len(counts) and (weight := math.exp(-beta * k)) * width > best:
        places = np.arange(rank, rank + k + 2)
        high, low = _at(counts, places, width), _at(counts, places - k - 1, width)
        best, k = max(best, weight * float((high - low).max())), k + 1
    return best


def _at(counts: NDArray[np.int64], places: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """The values at places, with the ends of the range beyond the first and the last."""
    inside = counts[np.clip(places, 0, len(counts) - 1)]
    return np.where(places < 0, 0, np.where(places >= len(counts), width, inside))
