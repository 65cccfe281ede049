"""The privacy loss of one release: two output distributions P and Q, and L = log(P/Q) under P.

A loss answers two questions. `log_mgf` says log E_P[exp(sL)] with its first two derivatives and a
bound on its error (Chernoff bounds, Rényi divergences, the choice of a tilt). `halves` says how
much of P lies in each half cell of a grid of losses and how far it lies from the grid point, which
is all that a sound discretisation needs. `verified` holds a loss to the laws it must obey.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpfy.accounting.moments import ROUNDING, Array, LogMoments, log_moment, moments
from dpfy.core.errors import Internal

LAW = 1e-11
"""How far from one the masses of a release may lie: rounding and quadrature, whose errors are
charged, are smaller.
"""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)
MOST_POINTS = 1 << 22
MOST_PIECES = 400_000
"""Pieces of a quadrature over cells; a loss that needs more is too sharp for its range."""


class TooFine(Exception):
    """A grid would have too many points; the engine tries a wider spacing."""


@dataclass(frozen=True)
class LossGrid:
    """The points ``offset + spacing * k``, and the tilt and scale under which masses are reported.

    Far from the middle, where little mass lies, only every ``stride``-th point is used: `tiers`
    lists (low, high, stride), meaning that outside the losses low to high no stride smaller than
    that is needed.
    """

    offset: float
    spacing: float
    tilt: float
    log_scale: float
    tiers: tuple[tuple[float, float, int], ...] = ()

    def indices(self, first: int, last: int) -> NDArray[np.int64]:
        """The points in use from `first` to `last` or a little beyond, ascending; too many raise
        `TooFine`.
        """
        if not self.tiers and last - first + 1 > MOST_POINTS:
            raise TooFine
        lows = [math.floor((left - self.offset) / self.spacing) for left, _, _ in self.tiers]
        highs = [math.ceil((right - self.offset) / self.spacing) for _, right, _ in self.tiers]
        index = _points(
            first, max(last, first + 1), lows, highs, [stride for _, _, stride in self.tiers]
        )
        if (
            self.tiers and len(index) > MOST_POINTS // 4
        ):  # strides keep these few; more would be slow for nothing
            raise TooFine
        return index


def _points(
    first: int, last: int, lows: list[int], highs: list[int], strides: list[int]
) -> NDArray[np.int64]:
    """Every point from lows[0] to highs[0], then every strides[0]-th out to lows[1] and highs[1],
    and so on to first and last.
    """
    if not strides:
        return np.arange(first, last + 1)
    lows = [stride * (low // stride) for low, stride in zip(lows, strides, strict=True)]
    highs = [stride * -(-high // stride) for high, stride in zip(highs, strides, strict=True)]
    left, right = (
        max(lows[0], strides[0] * (first // strides[0])),
        min(highs[0], strides[0] * -(-last // strides[0])),
    )
    pieces = [np.arange(left, right + 1)]
    for k, stride in enumerate(strides):
        more = k + 1 < len(strides)
        low = max(first, lows[k + 1]) if more else first
        high = min(last, highs[k + 1]) if more else last
        if more:  # end on a point of the next stride
            low, high = (
                strides[k + 1] * (low // strides[k + 1]),
                strides[k + 1] * -(-high // strides[k + 1]),
            )
        if left > low:
            steps = -(-(left - low) // stride)
            pieces.insert(0, left - stride * np.arange(steps, 0, -1))
            left -= stride * steps
        if right < high:
            steps = -(-(high - right) // stride)
            pieces.append(right + stride * np.arange(1, steps + 1))
            right += stride * steps
    return np.concatenate(pieces).astype(np.int64)


@dataclass(frozen=True)
class Halves:
    """P around the points g of a grid, each value multiplied by exp(tilt * g - log_scale).

    ``right`` is the mass with loss between g and the middle to the next point and ``rise`` its
    integral of 1 - exp(g - L); ``left`` is the mass from the middle to the point before up to g and
    ``drop`` its integral of exp(g - L) - 1. ``error`` bounds the tilted mass that is missing,
    ``slack`` the error of any loss, ``relative`` the relative error of any mass. Nothing lies left
    of the first or right of the last point.
    """

    index: NDArray[np.int64]
    right: Array
    rise: Array
    left: Array
    drop: Array
    error: float
    slack: float
    relative: float = 0.0


class PrivacyLoss(Protocol):
    """The privacy loss of one release in one direction."""

    @property
    def infinity(self) -> float:
        """The P-mass of outcomes that Q cannot produce."""

    @property
    def cut(self) -> float:
        """The P-mass that was capped away."""

    @property
    def top(self) -> float:
        """The largest finite loss, infinity if there is none or it is not known."""

    def capped(self, mass: float) -> PrivacyLoss:
        """The same with outcomes of the largest losses left out, together of P-mass at most `mass`,
        which is noted in ``cut``.
        """

    def log_mgf(self, s: float) -> LogMoments:
        """log E_P[exp(sL); L finite] for s >= 0 with its derivatives; ``upper`` is an upper
        bound.
        """

    def extent(self, grid: LossGrid, tail: float) -> tuple[int, int]:
        """The first and the last point of the grid that `halves` needs."""

    def halves(self, grid: LossGrid, tail: float, index: NDArray[np.int64] | None = None) -> Halves:
        """Masses around the grid points; at most `tail` of the tilted mass is left out (and
        reported in ``error``).

        An `index` says which points to use; they must be those of the grid over at least its
        `extent`.
        """

    def nodes(self, s: float) -> tuple[Array, Array]:
        """Losses and log weights that stand for P under a tilt of s: good for averages, not
        certified.
        """

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """An offset and a spacing near the one asked for, so that atoms and edges of the loss fall
        on points of the grid.
        """


class Density:
    """A loss that grows with x, where P has a density in x."""

    @property
    def top(self) -> float:
        """See `Loss`."""
        return math.inf

    def density(self, x: Array) -> tuple[Array, Array]:
        """log of the density of P, and the loss, at x."""
        raise NotImplementedError

    def loss(self, x: Array) -> Array:
        """L at x."""
        raise NotImplementedError

    def inverse(self, losses: Array, low: float, high: float) -> Array:
        """The x between `low` and `high` at which the loss is reached."""
        raise NotImplementedError

    def reach(self, s: float, log_tail: float) -> tuple[float, float]:
        """An interval outside which P exp(sL) has at most exp(log_tail) on each side."""
        raise NotImplementedError

    def scale(self) -> float:
        """A length in x over which density and loss change by a factor of order e."""
        raise NotImplementedError

    def extent(self, grid: LossGrid, tail: float) -> tuple[int, int]:
        """See `Loss`."""
        ends = self.loss(np.array(self._between(grid, tail)))
        return math.floor((ends[0] - grid.offset) / grid.spacing), math.ceil(
            (ends[1] - grid.offset) / grid.spacing
        )

    def _between(self, grid: LossGrid, tail: float) -> tuple[float, float]:
        return self.reach(grid.tilt, math.log(tail) + grid.log_scale - math.log(2))

    def halves(self, grid: LossGrid, tail: float, index: NDArray[np.int64] | None = None) -> Halves:
        """See `Loss`. Gauss-Legendre quadrature on pieces so short that its error is below
        rounding.
        """
        c, (low, high) = grid.tilt, self._between(grid, tail)
        if index is None:
            index = grid.indices(*self.extent(grid, tail))
        points = grid.offset + grid.spacing * index
        cuts, half, slack = self._cuts(points, (low, high))
        centre, radius = (cuts[1:] + cuts[:-1]) / 2, (cuts[1:] - cuts[:-1]) / 2
        slot = (half + 1) // 2
        point = points[slot]
        scale = c * point - grid.log_scale
        mass, bend, size = np.zeros_like(centre), np.zeros_like(centre), np.zeros_like(centre)
        first_log, last_log = np.zeros_like(centre), np.zeros_like(centre)
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            x = centre + radius * node
            log_density, loss = self.density(x)
            first_log, last_log = (log_density if node == _NODES[0] else first_log), log_density
            value = weight * radius * np.exp(log_density + scale)
            mass += value
            size = np.maximum(size, np.abs(log_density))
            bend += value * np.abs(np.expm1(point - loss))
        right = half % 2 == 0
        sums = [
            np.bincount(slot[keep], weights=part[keep], minlength=len(index))
            for part, keep in ((mass, right), (bend, right), (mass, ~right), (bend, ~right))
        ]
        # The relative error of a mass: a few roundings, those of the exponent it was computed from,
        # and that of the quadrature, which for exp(ax) on a piece of length h is 5.6e-10 (ah)^8;
        # the nodes span 0.86 of h.
        steepest = float(np.abs(last_log - first_log).max()) / 0.86
        relative = 4 * ROUNDING * (8 + float((size + np.abs(scale)).max())) + 1e-9 * steepest**8
        return Halves(index, sums[0], sums[1], sums[2], sums[3], tail, slack, relative)

    def _cuts(
        self, points: Array, reach: tuple[float, float]
    ) -> tuple[Array, NDArray[np.int64], float]:
        """Cut points in x: where the loss crosses a half cell, and so finely that quadrature is
        exact; the half cell of each piece.
        """
        low, high = reach
        edges = np.empty(2 * len(points) - 1)
        edges[::2], edges[1::2] = points, _middles(points)
        ends = self.loss(np.array([low, high]))
        inside = (edges > ends[0]) & (edges < ends[1])
        losses = edges[inside]
        crossing = np.clip(self.inverse(losses, low, high), low, high)
        slack = float(np.abs(self.loss(crossing) - losses).max()) if len(losses) else 0.0
        piece = self.scale() / 48
        if high - low > MOST_PIECES * piece:
            raise TooFine
        fine = np.linspace(low, high, max(2, math.ceil((high - low) / piece) + 1))
        cuts = np.concatenate([fine, crossing])
        cuts.sort()
        below = np.searchsorted(crossing, (cuts[1:] + cuts[:-1]) / 2)
        start = int(np.searchsorted(edges, ends[0], side="right")) - 1
        half = np.clip(start + below, 0, 2 * len(points) - 3)
        return (
            cuts,
            np.asarray(half, dtype=np.int64),
            slack + 4 * ROUNDING * (1 + float(np.abs(ends).max())),
        )


def _middles(points: Array) -> Array:
    """Where the half cells of neighbouring points meet; beside a coarser gap a point keeps the half
    width of its finer one.
    """
    gaps = np.diff(points)
    middles = points[:-1] + gaps / 2
    coarser_right = np.flatnonzero(gaps[1:] > 1.5 * gaps[:-1]) + 1
    middles[coarser_right] = points[coarser_right] + gaps[coarser_right - 1] / 2
    coarser_left = np.flatnonzero(gaps[:-1] > 1.5 * gaps[1:])
    middles[coarser_left] = points[coarser_left + 1] - gaps[coarser_left + 1] / 2
    return middles


def verified(loss: PrivacyLoss) -> PrivacyLoss:
    """`loss`, held to the laws of a privacy loss.

    Guarantees: with what is cut or infinite P has mass one (so the log moment at order 0 is 0), and
    Q, the integral of exp(-L), has mass one too (less where something was cut or Q cannot produce
    it); anything else raises `Internal`.
    """
    try:
        losses, log_weights = loss.nodes(0.0)
    except TooFine:  # then moments are closed bounds, which obey the laws
        return loss
    whole, slack = (
        loss.infinity == loss.cut == 0 and math.isinf(loss.top),
        LAW + 4 * loss.log_mgf(0.0).error,
    )
    with np.errstate(over="ignore"):
        p, q = (
            float(np.exp(log_weights).sum()),
            float(np.exp(np.minimum(log_weights - losses, 1.0)).sum()),
        )
    if not 1 - loss.infinity - loss.cut - slack <= p <= 1 - loss.infinity + slack:
        raise Internal(
            "the masses of a release add up to 1", f"they add up to {p + loss.infinity:.12g}"
        )
    if not (1 - slack if whole else 0.0) <= q <= 1 + slack:
        raise Internal(
            "the masses of a release's alternative add up to 1", f"they add up to {q:.12g}"
        )
    return loss


@dataclass(frozen=True)
class Atoms:
    """A loss with finitely many values; `infinity` is the mass of P where Q has none."""

    losses: tuple[float, ...]
    probabilities: tuple[float, ...]
    infinity: float = 0.0
    cut: float = 0.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: there may be thousands of values, and curves ask often."""
        return hash((self.losses, self.probabilities, self.infinity, self.cut))

    def capped(self, mass: float) -> Atoms:
        """See `Loss`."""
        losses, masses = self.falling
        sums = np.cumsum(masses)
        k = min(int(np.searchsorted(sums, mass, side="right")), len(losses) - 1)
        if not k:
            return self
        return Atoms(
            tuple(losses[k:].tolist()),
            tuple(masses[k:].tolist()),
            self.infinity,
            self.cut + float(sums[k - 1]) * (1 + 1e-12),
        )

    @cached_property
    def falling(self) -> tuple[Array, Array]:
        """Losses from the largest to the least, with their masses."""
        losses, masses = np.array(self.losses), np.array(self.probabilities)
        order = np.lexsort((masses, losses))[::-1]
        return losses[order], masses[order]

    @property
    def top(self) -> float:
        """See `Loss`."""
        return float(self.falling[0][0])

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`. The spacing divides the gap between the extreme values; exact when all values
        are evenly spaced.
        """
        width = self._width
        return self.top, spacing if width == 0 else width / max(1, math.ceil(width / spacing))

    @cached_property
    def _width(self) -> float:
        """The least gap between two values if all others are whole multiples of it, else between
        the extreme ones; 0 of one value.
        """
        values = np.unique(self.falling[0])
        if len(values) == 1:
            return 0.0
        steps, whole = np.diff(values), float(values[-1] - values[0])
        least = float(steps.min())
        few = whole < MOST_POINTS * least  # beyond that every number looks whole
        return (
            least
            if few and bool(np.allclose(steps / least, np.rint(steps / least), rtol=0, atol=1e-9))
            else whole
        )

    def log_mgf(self, s: float) -> LogMoments:
        """See `Loss`. Exact."""
        losses, log_weights = self.nodes(s)
        return moments(log_weights, losses, s)

    def log_moment(self, s: float) -> tuple[float, float]:
        """The log of the moment and a bound on its error, without the rest of `log_mgf`."""
        losses, log_weights = self.nodes(s)
        return log_moment(log_weights, losses, s)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`."""
        return self._arrays

    @cached_property
    def _arrays(self) -> tuple[Array, Array]:
        """Losses and logs of masses, those without mass left out."""
        losses, masses = np.array(self.losses), np.array(self.probabilities)
        return losses[masses > 0], np.log(masses[masses > 0])

    def extent(self, grid: LossGrid, tail: float) -> tuple[int, int]:
        """See `Loss`."""
        ends = [(float(end) - grid.offset) / grid.spacing for end in self.falling[0][[-1, 0]]]
        return round(ends[0]) - 1, round(ends[1]) + 1

    def halves(self, grid: LossGrid, tail: float, index: NDArray[np.int64] | None = None) -> Halves:
        """See `Loss`."""
        losses, log_mass = self.nodes(0.0)
        log_tilted = log_mass + grid.tilt * losses - grid.log_scale
        if index is not None:
            return halves_of_points(losses, log_tilted, grid, 0.0, index=index)
        kept = log_tilted > math.log(tail / len(losses))  # the rest has at most the tail
        return halves_of_points(losses[kept], log_tilted[kept], grid, 0.0 if kept.all() else tail)


def halves_of_points(
    losses: Array,
    log_tilted: Array,
    grid: LossGrid,
    error: float,
    down: bool = False,
    index: NDArray[np.int64] | None = None,
) -> Halves:
    """The halves of a measure with finitely many points, given the logs of its tilted masses at the
    points.

    `down` moves every point to the grid point below it at the same P-mass: isolated atoms have no
    neighbours to merge with. Without an `index` every point of the grid is used.
    """
    place = (losses - grid.offset) / grid.spacing
    if index is None:
        nearest = (np.floor(place + 1e-9) if down else np.rint(place)).astype(np.int64)
        if int(nearest.max()) - int(nearest.min()) > MOST_POINTS:
            raise TooFine
        index = np.arange(int(nearest.min()) - 1, int(nearest.max()) + 2)
        slot = nearest - index[0]
    else:
        slot = np.searchsorted(_middles(index.astype(np.float64)), place)
    gap = losses - (grid.offset + grid.spacing * index[slot])
    if down:
        log_tilted, gap = log_tilted - grid.tilt * gap, np.zeros_like(gap)
    snap = 64 * ROUNDING * (1 + float(np.abs(losses).max()))
    gap = np.where(np.abs(gap) <= snap, 0.0, gap)
    value = np.exp(log_tilted - grid.tilt * gap)
    bend = value * np.abs(np.expm1(-gap))
    right = gap > 0

    def total(values: Array, keep: NDArray[np.bool_]) -> Array:
        return np.bincount(slot[keep], weights=values[keep], minlength=len(index))

    sums = total(value, right), total(bend, right), total(value, ~right), total(bend, ~right)
    relative = (
        8
        * ROUNDING
        * (
            8
            + abs(grid.log_scale)
            + float(np.abs(grid.tilt * losses).max() + np.abs(log_tilted).max())
        )
    )
    return Halves(index, *sums, error, snap, relative)
