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

Propose, test, release: a value that hardly moves near the data at hand, though it may move far
elsewhere (Dwork & Lei 2009).

The test passes if the distance to data that move more than proposed, with two-sided geometric
noise, reaches a threshold t with P(noise >= t) <= delta. Where the distance is 0 the test passes
with probability at most delta. Where it is 1 or more the value moves by at most what was proposed,
test and value cost their parts of epsilon. So all of it is (epsilon, delta)-private, in both
directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, Permit, Private
from dpfy.mechanisms import integers
from dpfy.mechanisms.grid import Grid
from dpfy.mechanisms.histogram import laplace_threshold
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


@dataclass(frozen=True)
class Near:
    """A value, and how many units must change (in the sense of the adjacency) before one more can
    move it by more than proposed.
    """

    value: Any
    distance: int


@dataclass(frozen=True)
class ProposeTestRelease(Stated):
    """One number that neighbours near the data differ in by at most `proposed`; with 0, a value of
    any kind that they agree in.

    `share` of epsilon pays for the test, the rest for the noise on the number; with `proposed` 0
    all of it pays for the test.
    """

    delta: float
    proposed: float
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.delta("delta", self.delta)
        check.nonnegative("proposed", self.proposed)
        check.inside_unit("share", self.share)

    @property
    def event(self) -> events.Event:
        """Test and release."""
        return events.EpsilonDelta(self.epsilon, self.delta)

    @property
    def split(self) -> tuple[Fraction, Fraction]:
        """Epsilon of the test and of the noise: together epsilon."""
        total = Fraction(self.epsilon)
        test = total * Fraction(self.share) if self.proposed else total
        return test, total - test

    @property
    def threshold(self) -> int:
        """The noisy distance from which on the value is released."""
        return laplace_threshold(self.split[0], Fraction(self.delta))

    def release(
        self,
        found: Bounded[Near],
        permit: Permit,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> Private[Any]:
        """The value (with noise, where something was proposed), or None: the data are not far
        enough from data that move it.

        Guarantees: as the module says, if the distance is right: 0 where the value of a neighbour
        may differ by more than proposed, and changing by at most 1 between neighbours, which its
        bound (`linf`) must say.
        """
        if found.bound.finite("linf", "a test of distance") > 1:
            raise InvalidInput(
                "bound.linf",
                found.bound.linf,
                "must be 1: a unit changes the distance by at most 1",
            )
        distance = max(0, check.integer("distance", found.value.distance, least=-(1 << 62)))
        bits = self._source(permit, randomness, step)
        test, rest = self.split
        passed = distance + int(integers.laplace(1, 1 / test, bits)[0]) >= self.threshold
        if not self.proposed:
            return Private(found.value.value if passed else None)
        grid = Grid.of(self.proposed)
        noise = int(
            integers.laplace(1, (math.floor(grid.steps(self.proposed)) + 1) / rest, bits)[0]
        )
        count = int(
            grid.lay(Bounded(float(found.value.value), Bound.scalar(self.proposed))).value.counts
        )
        return Private(math.ldexp(count + noise, grid.exponent) if passed else None)
