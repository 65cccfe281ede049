"""Losses of Laplace and discrete mechanisms, and losses built out of others: mixtures and folds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpfy.accounting.moments import MOST_NODES, QUADRATURE, Array, LogMoments, mixed, moments
from dpfy.accounting.tight.gaussian_losses import GaussianPair, Side, log_odds
from dpfy.accounting.tight.losses import (
    MOST_POINTS,
    Atoms,
    Density,
    Halves,
    LossGrid,
    PrivacyLoss,
    TooFine,
    halves_of_points,
)
from dpfy.core.errors import Unsupported


@dataclass(frozen=True)
class LaplacePair(Density):
    """Laplace noise with pure epsilon `width`, Poisson-subsampled at `rate`; `added` swaps the two
    data sets.

    With t the loss of the plain mechanism, uniform in effect between two atoms at -width and width,
    the ratio of the subsampled one is r = 1 - rate + rate e^t. The variable x is t, or -t when
    `added`, so that the loss grows with x.
    """

    width: float
    rate: float = 1.0
    added: bool = False
    infinity: float = 0.0
    cut: float = 0.0

    def capped(self, mass: float) -> LaplacePair:
        """See `Loss`: the loss is bounded, nothing to cut."""
        return self

    @property
    def top(self) -> float:
        """See `Loss`."""
        return float(self._atoms()[0].max())

    def _ratio(self, t: Array) -> Array:
        if self.rate == 1:
            return t
        with np.errstate(over="ignore"):
            near = np.log1p(self.rate * np.expm1(np.minimum(t, 1.0)))
        far = t + np.log(self.rate + (1 - self.rate) * np.exp(-np.maximum(t, 1.0)))
        return np.where(t > 1, far, near)

    def loss(self, x: Array) -> Array:
        """See `Density`."""
        return -self._ratio(-x) if self.added else self._ratio(x)

    def density(self, x: Array) -> tuple[Array, Array]:
        """See `Density`."""
        loss = self.loss(x)
        t = -x if self.added else x
        base = -0.5 * (t + self.width) - math.log(4)
        return base + (0.0 if self.added else loss), loss

    def inverse(self, losses: Array, low: float, high: float) -> Array:
        """See `Density`."""
        return -log_odds(-losses, self.rate) if self.added else log_odds(losses, self.rate)

    def reach(self, s: float, log_tail: float) -> tuple[float, float]:
        """See `Density`: the whole interval between the atoms."""
        return -self.width, self.width

    def scale(self) -> float:
        """See `Density`."""
        return 1.0

    def extent(self, grid: LossGrid, tail: float) -> tuple[int, int]:
        """See `Loss`: one point beyond each atom, as for atoms alone."""
        first, last = super().extent(grid, tail)
        return first - 1, last + 1

    def _atoms(self) -> tuple[Array, Array]:
        """Losses and log masses of the two atoms."""
        ends = np.array([-self.width, self.width])
        loss = self.loss(ends)
        t = -ends if self.added else ends
        log_q = np.where(t > 0, -self.width - math.log(2), -math.log(2))
        return loss, log_q + (0.0 if self.added else loss)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`. Gauss-Legendre on panels over which the integrand changes by at most e^16;
        right for all tilts up to `s`.
        """
        panels = max(4, math.ceil(self.width / min(2.0, 8 / (s + 1))))
        if panels > MOST_NODES // 20:
            raise TooFine
        x, weight = _legendre()
        edges = np.linspace(-self.width, self.width, panels + 1)
        radius = self.width / panels
        log_density, loss = self.density(((edges[:-1] + radius)[:, None] + radius * x).ravel())
        atoms, log_mass = self._atoms()
        log_weights = log_density + np.tile(np.log(weight * radius), panels)
        return np.concatenate([loss, atoms]), np.concatenate([log_weights, log_mass])

    def log_mgf(self, s: float) -> LogMoments:
        """See `Loss`. Where quadrature is out of reach, the bound 1 - rate + rate M by convexity, M
        the moment of the plain pair.
        """
        try:
            losses, log_weights = self.nodes(s)
        except TooFine:
            high, low = (
                math.log((s + 1) / (2 * s + 1)) + s * self.width,
                math.log(max(s, 1e-300) / (2 * s + 1)) - (s + 1) * self.width,
            )
            plain = float(np.logaddexp(high, low))
            log = (
                float(np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + plain))
                if self.rate < 1
                else plain
            )
            return LogMoments(log, self.width, 1.0, 1e-13 * (1 + abs(log)))
        return moments(log_weights, losses, s, QUADRATURE)

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`: both atoms on the grid."""
        low, high = self._atoms()[0]
        return float(high), float(high - low) / max(1, math.ceil((high - low) / spacing))

    def halves(self, grid: LossGrid, tail: float, index: NDArray[np.int64] | None = None) -> Halves:
        """See `Loss`."""
        if index is None:
            grid = LossGrid(grid.offset, grid.spacing, grid.tilt, grid.log_scale)
            index = grid.indices(*self.extent(grid, tail))
        losses, log_mass = self._atoms()
        atoms = halves_of_points(
            losses, log_mass + grid.tilt * losses - grid.log_scale, grid, 0.0, index=index
        )
        return add_halves([super().halves(grid, tail, index), atoms])


@lru_cache(maxsize=1)
def _legendre() -> tuple[Array, Array]:
    """Nodes and weights of the quadrature on one panel, found once."""
    return np.polynomial.legendre.leggauss(20)


def add_halves(parts: list[Halves]) -> Halves:
    """The sum of several measures on the same points."""
    right, rise, left, drop = (
        np.asarray(sum(rows))
        for rows in zip(*((p.right, p.rise, p.left, p.drop) for p in parts), strict=True)
    )
    error, slack, relative = (
        sum(p.error for p in parts),
        max(p.slack for p in parts),
        max(p.relative for p in parts),
    )
    return Halves(parts[0].index, right, rise, left, drop, error, slack, relative)


def _scaled(part: Halves, factor: float) -> Halves:
    right, rise, left, drop = (factor * v for v in (part.right, part.rise, part.left, part.drop))
    return Halves(
        part.index, right, rise, left, drop, factor * part.error, part.slack, part.relative
    )


@dataclass(frozen=True)
class LossMixture:
    """A sum of measures. Where they are the losses of several mechanisms, which of them applies is
    drawn at random and revealed.

    Where an `anchor` is given it is a point of every grid: a loss at which a part has an atom or an
    end.
    """

    parts: tuple[tuple[float, PrivacyLoss], ...]
    infinity: float = 0.0
    cut: float = 0.0
    anchor: float | None = None

    def capped(self, mass: float) -> LossMixture:
        """See `Loss`. Half of the mass pays for the rarest parts, which are left out whole, the
        other half for capping the rest.
        """
        order = sorted(self.parts, key=lambda part: part[0])
        left_out = 0.0
        while len(order) > 1 and left_out + order[0][0] <= mass / 2:
            left_out += order.pop(0)[0]
        parts = tuple((w, loss.capped(mass / 2)) for w, loss in order)
        return replace(
            self, parts=parts, cut=left_out * (1 + 1e-12) + sum(w * loss.cut for w, loss in parts)
        )

    @property
    def top(self) -> float:
        """See `Loss`."""
        return max(loss.top for _, loss in self.parts)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`."""
        rows = [(w, *loss.nodes(s)) for w, loss in self.parts]
        return np.concatenate([r[1] for r in rows]), np.concatenate(
            [math.log(r[0]) + r[2] for r in rows]
        )

    def log_mgf(self, s: float) -> LogMoments:
        """See `Loss`."""
        return mixed([(w, loss.log_mgf(s)) for w, loss in self.parts])

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`."""
        return mean if self.anchor is None else self.anchor, spacing

    def extent(self, grid: LossGrid, tail: float) -> tuple[int, int]:
        """See `Loss`."""
        ends = [loss.extent(grid, tail) for _, loss in self.parts]
        return min(first for first, _ in ends), max(last for _, last in ends)

    def halves(self, grid: LossGrid, tail: float, index: NDArray[np.int64] | None = None) -> Halves:
        """See `Loss`."""
        if index is None:
            index = grid.indices(*self.extent(grid, tail))
        return add_halves([_scaled(loss.halves(grid, tail, index), w) for w, loss in self.parts])


def fold(
    copies: list[tuple[float, GaussianPair, GaussianPair]], zero: float, infinity: float = 0.0
) -> LossMixture:
    """Positive losses of removal, negative losses of addition, mass `zero` at zero, for each of
    several weighted cases.

    The dominating pair of subsampling without replacement (Zhu, Dong & Wang 2022, Proposition 30):
    beyond e^0 the privacy curve is that of removal, before it that of addition.
    """
    sides = [
        (weight, side)
        for weight, removed, added in copies
        for side in (Side(removed, 1), Side(added, -1))
    ]
    centre = [(zero, Atoms((0.0,), (1.0,)))] if zero > 0 else []
    return LossMixture((*sides, *centre), infinity, anchor=0.0)


def subsample_atoms(base: Atoms, rate: float, added: bool) -> Atoms:
    """A discrete mechanism on a Poisson sample: P and Q swapped when `added`."""
    rows = []
    for loss, p in zip(base.losses, base.probabilities, strict=True):
        if p == 0:
            continue
        log_q = math.log(p) - loss
        ratio = (
            math.log1p(rate * math.expm1(loss))
            if loss < 30
            else loss + math.log(rate + (1 - rate) * math.exp(-loss))
        )
        rows.append((-ratio, math.exp(log_q)) if added else (ratio, math.exp(log_q + ratio)))
    unseen = 1 - math.fsum(
        math.exp(math.log(p) - loss)
        for loss, p in zip(base.losses, base.probabilities, strict=True)
        if p > 0
    )
    if unseen > 1e-13:  # where the mass of P underflows, the alternative's need not
        rows.append(
            (-math.log1p(-rate), unseen) if added else (math.log1p(-rate), (1 - rate) * unseen)
        )
    return Atoms(
        tuple(r[0] for r in rows), tuple(r[1] for r in rows), 0.0 if added else rate * base.infinity
    )


def discrete_laplace(parameter: float, sensitivity: int) -> Atoms:
    """Two-sided geometric noise, P(x) proportional to exp(-parameter |x|), moved by
    `sensitivity`.
    """
    if sensitivity > MOST_POINTS // 4:
        raise Unsupported(
            f"discrete noise on a query of sensitivity {sensitivity}",
            "use the continuous mechanism's event",
        )
    a, norm = parameter, math.tanh(parameter / 2)
    losses = [a * (sensitivity - 2 * j) for j in range(sensitivity + 1)]
    inner = [norm * math.exp(-a * j) for j in range(1, sensitivity)]
    below = norm / -math.expm1(-a)
    above = norm * math.exp(-a * sensitivity) / -math.expm1(-a)
    return Atoms(tuple(losses), (below, *inner, above))


def discrete_gaussian(sigma: float, sensitivity: int) -> Atoms:
    """Discrete Gaussian noise moved by `sensitivity`; a mass below 1e-300, 37 sigma out, counts as
    zero.
    """
    if 39 * sigma + sensitivity > MOST_POINTS // 4:
        raise Unsupported(
            f"a discrete Gaussian of sigma {sigma:g} and sensitivity {sensitivity}",
            "use --accountant zcdp or rdp",
        )
    reach = math.ceil(39 * sigma) + sensitivity
    x = np.arange(-reach, reach + 1)
    p = np.exp(-(x.astype(np.float64) ** 2) / (2 * sigma**2))
    p /= p.sum()
    losses = sensitivity * (sensitivity - 2.0 * x) / (2 * sigma**2)
    keep = p > 1e-300
    return Atoms(tuple(losses[keep].tolist()), tuple(p[keep].tolist()))
