"""Protocols for means: numbers by Laplace noise, vectors with bounded coordinates, and unit
vectors.

A value that is not finite counts as the middle of its range. The Laplace and Duchi protocols are
exact; PrivUnit draws real numbers, and rounds what it sends to a public grid far coarser than the
errors of floating point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.local.protocol import Protocol, Reals, Rows
from dpfy.mechanisms import integers
from dpfy.mechanisms.exact import Bits, coins
from dpfy.mechanisms.grid import Grid
from dpfy.mechanisms.response import UP

MOST_DIMENSION, MOST_SIGNS = 1 << 20, 1 << 16
DIGITS = 53
SLACK = 1e-9
"""What the measure of a cap may be off by, relative to it: charged to epsilon."""
STEP = -24
"""Unit vectors are sent in steps of 2^-24 times 1 / sqrt(dimension)."""


def table(values: Any, dimension: int | None = None) -> Reals:
    """Rows of numbers, one a person; a vector of numbers where no dimension is given."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput("values", type(values).__name__, "must be numbers") from None
    if found.shape[1:] != (() if dimension is None else (dimension,)) or not found.ndim:
        raise InvalidInput(
            "values",
            found.shape,
            f"must be one {'number' if dimension is None else f'row of {dimension}'} a person",
        )
    return found


@dataclass(frozen=True)
class LaplaceMean(Protocol):
    """A number between `low` and `high` with Laplace noise, drawn exactly on a public grid."""

    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not check.real("low", self.low) < check.real("high", self.high):
            raise InvalidInput("high", self.high, f"must be above low ({self.low:g})")

    @property
    def grid(self) -> Grid:
        """Where values are laid."""
        return Grid.of((self.high - self.low) / self.epsilon)

    @property
    def parameter(self) -> int:
        """The scale of the noise in steps: two values lie, laid, at most one step farther apart
        than the ends.
        """
        return math.ceil(
            (math.ceil(self.grid.steps(self.high) - self.grid.steps(self.low)) + 1)
            / Fraction(self.epsilon)
        )

    def given(self, values: Any) -> Rows:
        """Numbers in the range, in whole steps."""
        found = np.nan_to_num(table(values), nan=(self.low + self.high) / 2)
        return np.rint(np.ldexp(np.clip(found, self.low, self.high), -self.grid.exponent)).astype(
            np.int64
        )

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """Whole steps."""
        return given + integers.laplace(len(given), self.parameter, bits)

    def shape(self) -> tuple[tuple[int, ...], str]:
        """Whole steps."""
        return (), "i"

    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """Within 60 scales of the range: noise lies beyond once in 1e26 times."""
        ends = [math.floor(self.grid.steps(end)) for end in (self.low, self.high)]
        return np.asarray(
            (rows >= ends[0] - 60 * self.parameter) & (rows <= ends[1] + 60 * self.parameter)
        )

    def summary(self, rows: Rows) -> tuple[Reals, Reals]:
        """The mean, with the variance of the noise."""
        mean = np.ldexp(rows.astype(np.float64).mean(), self.grid.exponent)
        return np.asarray(mean), np.asarray(self.variance / len(rows))

    @property
    def variance(self) -> float:
        """Of one report."""
        half = 1 / (2 * self.parameter)
        return math.ldexp(0.5 / math.sinh(half) ** 2, 2 * self.grid.exponent)


@dataclass(frozen=True)
class DuchiMean(Protocol):
    """A vector of `dimension` numbers between -1 and 1: the signs of a report agree with more of
    the value's than not, by a coin.

    The value is rounded at random to signs of the same mean. By the coin the report is uniform over
    the signs of which more agree with those than not, else over all others. The chance of the coin
    makes one density exp(epsilon) times the other. (As first published, reports with as many of the
    one as of the other, which an even dimension has, come from both sides: the ratio is then
    exp(epsilon) + 1.) Reference: Duchi, Jordan & Wainwright 2018, section 4.2.3; Wang et al. 2019,
    section 4, for an even dimension.
    """

    dimension: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("dimension", self.dimension, most=MOST_SIGNS)

    @cached_property
    def inside(self) -> float:
        """The part of all signs of which more agree with given ones than not."""
        ties = math.comb(self.dimension, self.dimension // 2) if self.dimension % 2 == 0 else 0
        return float(Fraction((1 << self.dimension) - ties, 2 << self.dimension))

    @property
    def chance(self) -> Fraction:
        """Of that part, rounded down."""
        return Fraction(
            1
            - min(
                1.0,
                UP * (1 - self.inside) / (math.exp(self.epsilon) * self.inside + 1 - self.inside),
            )
        )

    @cached_property
    def scale(self) -> float:
        """What a sign of a report stands for: one over its mean where the value is +1."""
        moment = float(
            Fraction(math.comb(self.dimension - 1, self.dimension // 2), 1 << self.dimension)
        )
        chance = float(self.chance)
        return 1 / (moment * (chance / self.inside - (1 - chance) / (1 - self.inside)))

    def given(self, values: Any) -> Rows:
        """Numbers from -1 to 1."""
        rows = table(
            values, None if self.dimension == 1 and np.ndim(values) == 1 else self.dimension
        ).reshape(-1, self.dimension)
        return np.clip(np.nan_to_num(rows, nan=0.0), -1.0, 1.0)

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """Signs as bits."""
        signs = fractions(given.size, bits).reshape(given.shape) < (1 + given) / 2
        return agreeing(signs, coins(len(given), self.chance, bits), bits)

    def shape(self) -> tuple[tuple[int, ...], str]:
        """A bit for each coordinate."""
        return (self.dimension,), "b"

    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """Any bits."""
        return np.ones(len(rows), bool)

    def summary(self, rows: Rows) -> tuple[Reals, Reals]:
        """The mean vector, with the variances of its coordinates at the mean that was found."""
        mean = (2 * rows.mean(axis=0) - 1) * self.scale
        return mean, (self.scale**2 - np.clip(mean, -1.0, 1.0) ** 2) / len(rows)


def agreeing(signs: NDArray[np.bool_], near: NDArray[np.bool_], bits: Bits) -> NDArray[np.bool_]:
    """For each row uniform signs, drawn again until more of them agree with the row's than not, or,
    where not `near`, until not: exact.
    """
    found = np.empty_like(signs)
    left = np.arange(len(signs))
    while len(left):
        words = bits.words(len(left) * -(-signs.shape[1] // 64)).reshape(len(left), -1)
        found[left] = np.unpackbits(words.view(np.uint8), axis=1, count=signs.shape[1]).astype(bool)
        left = left[(2 * (found[left] == signs[left]).sum(axis=1) > signs.shape[1]) != near[left]]
    return found


def fractions(count: int, bits: Bits) -> Reals:
    """Numbers in (0, 1) from 53 bits each: not exact, for what needs no exact law."""
    return ((bits.words(count) >> np.uint64(64 - DIGITS)).astype(np.float64) + 0.5) / float(
        1 << DIGITS
    )


@dataclass(frozen=True)
class PrivUnit(Protocol):
    """A unit vector of `dimension`, at least 2, numbers, drawn by a coin from a cap around the
    value or from the rest of the sphere.

    `cap` is what of epsilon the size of the cap takes, and the coin has the rest; 0 is the division
    with the least error. Its epsilon is exact: log of the odds of the coin, plus log of the odds of
    missing the cap. A vector is scaled to length 1, and one without a direction is replaced by a
    uniform one, which has the mean 0. Reference: Bhowmick et al. 2018; Asi, Feldman & Talwar 2022.
    """

    dimension: int
    cap: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("dimension", self.dimension, least=2, most=MOST_DIMENSION)
        if not 0 <= check.real("cap", self.cap) <= self.epsilon:
            raise InvalidInput(
                "cap", self.cap, f"must be 0 (the best) or at most epsilon ({self.epsilon:g})"
            )

    @cached_property
    def _cut(self) -> tuple[float, float, float, float]:
        """The chance of the cap, its measure, where it begins, and the mean length of a report
        along the value.
        """
        if self.cap:
            return self._at(self.cap)
        shares = np.linspace(0.0, 1.0, 65)[1:]
        for _ in range(4):  # the length has one peak
            lengths = [self._at(self.epsilon * float(share))[3] for share in shares]
            best = int(np.argmax(lengths))
            shares = np.linspace(
                shares[max(0, best - 1)], shares[min(len(shares) - 1, best + 1)], 17
            )
        return self._at(self.epsilon * float(shares[8]))

    def _at(self, cap: float) -> tuple[float, float, float, float]:
        from scipy.special import betainc, betaincinv, gammaln

        side = (self.dimension - 1) / 2
        begins = 1 - 2 * float(betaincinv(side, side, 1 / (1 + math.exp(cap))))
        measure = float(betainc(side, side, (1 - begins) / 2))
        odds = max(0.0, self.epsilon - math.log((1 - measure) / measure) - SLACK)
        chance = 1 / (1 + math.exp(-odds))
        peak = math.exp(gammaln(self.dimension / 2) - gammaln(side)) / math.sqrt(math.pi)
        moment = peak * (1 - begins**2) ** side / (2 * side)
        return chance, measure, begins, moment * (chance / measure - (1 - chance) / (1 - measure))

    @property
    def exact_epsilon(self) -> float:
        """What the chances that are used cost."""
        chance, measure = self._cut[:2]
        return math.log(chance / (1 - chance)) + math.log((1 - measure) / measure)

    @property
    def variance(self) -> float:
        """The mean squared error of one report."""
        return 1 / self._cut[3] ** 2 - 1

    def given(self, values: Any) -> Rows:
        """Vectors of length 1; zeros where there is no direction."""
        rows = np.nan_to_num(table(values, self.dimension), nan=0.0, posinf=0.0, neginf=0.0)
        rows = rows / np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-300)
        length = np.sqrt((rows**2).sum(axis=1, keepdims=True))
        return np.where(length > 0.5, rows / np.maximum(length, 0.5), 0.0)

    def draw(self, given: Rows, bits: Bits) -> Rows:
        """Points of the sphere, on the grid."""
        from scipy.special import betaincinv, ndtri

        chance, measure, _, _ = self._cut
        shape = given.shape
        lost = (given == 0).all(axis=1)
        normal = ndtri(fractions(2 * given.size, bits)).reshape(2, *shape)
        value = np.where(
            lost[:, None], normal[0] / np.linalg.norm(normal[0], axis=1, keepdims=True), given
        )
        inside, place = coins(len(given), Fraction(chance), bits), fractions(len(given), bits)
        beyond = np.where(
            inside, place * measure, measure + place * (1 - measure)
        )  # the measure of what lies farther along
        side = (self.dimension - 1) / 2
        along = (1 - 2 * betaincinv(side, side, beyond))[:, None]
        across = normal[1] - (normal[1] * value).sum(axis=1, keepdims=True) * value
        across /= np.linalg.norm(across, axis=1, keepdims=True)
        return np.asarray(
            np.rint((along * value + np.sqrt(1 - along**2) * across) / self.step) * self.step
        )

    @property
    def step(self) -> float:
        """Of the grid: a power of two."""
        return math.ldexp(1.0, STEP - math.ceil(math.log2(self.dimension) / 2))

    def shape(self) -> tuple[tuple[int, ...], str]:
        """Numbers."""
        return (self.dimension,), "f"

    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """Of length 1, up to the grid."""
        with np.errstate(all="ignore"):
            return np.asarray(np.abs(np.sqrt((rows**2).sum(axis=1)) - 1) < 1e-5)

    def summary(self, rows: Rows) -> tuple[Reals, Reals]:
        """The mean vector, with the spread of the reports."""
        scaled = rows / self._cut[3]
        spread = (
            scaled.var(axis=0, ddof=1)
            if len(rows) > 1
            else np.full(self.dimension, 1 / self._cut[3] ** 2)
        )
        return scaled.mean(axis=0), spread / len(rows)
