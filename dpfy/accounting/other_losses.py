"""Losses of Laplace and discrete mechanisms, and losses built out of others: mixtures and folds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dpfy.accounting.gaussian_losses import log_odds
from dpfy.accounting.losses import ROUNDING, Array, Atoms, Density, Grid, Halves, Loss, halves_of_points, moments


@dataclass(frozen=True)
class LaplacePair(Density):
    """Laplace noise with pure epsilon `width`, Poisson-subsampled at `rate`; `added` swaps the two data sets.

    With t the loss of the plain mechanism, uniform in effect between two atoms at -width and width, the ratio of the subsampled
    one is r = 1 - rate + rate e^t. The variable x is t, or -t when `added`, so that the loss grows with x.
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

    def _atoms(self) -> tuple[Array, Array]:
        """Losses and log masses of the two atoms."""
        ends = np.array([-self.width, self.width])
        loss = self.loss(ends)
        t = -ends if self.added else ends
        log_q = np.where(t > 0, -self.width - math.log(2), -math.log(2))
        return loss, log_q + (0.0 if self.added else loss)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`."""
        x, weight = np.polynomial.legendre.leggauss(64)
        log_density, loss = self.density(x * self.width)
        atoms, log_mass = self._atoms()
        return np.concatenate([loss, atoms]), np.concatenate([log_density + np.log(weight * self.width), log_mass])

    def log_mgf(self, s: float) -> tuple[float, float, float]:
        """See `Loss`."""
        losses, log_weights = self.nodes(s)
        return moments(log_weights, losses, s)

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`: both atoms on the grid."""
        low, high = self._atoms()[0]
        return float(high), float(high - low) / max(1, math.ceil((high - low) / spacing))

    def halves(self, grid: Grid, tail: float) -> Halves:
        """See `Loss`."""
        smooth = super().halves(Grid(grid.offset, grid.spacing, grid.tilt, grid.log_scale), tail)
        losses, log_mass = self._atoms()
        return add_halves([smooth, halves_of_points(losses, log_mass + grid.tilt * losses - grid.log_scale, grid, 0.0)])


def add_halves(parts: list[Halves]) -> Halves:
    """The sum of several measures on one grid."""
    first, last = min(int(p.index[0]) for p in parts), max(int(p.index[-1]) for p in parts)
    sums = np.zeros((4, last - first + 1))
    for part in parts:
        for row, values in enumerate((part.right, part.rise, part.left, part.drop)):
            sums[row, part.index - first] += values
    error, slack, relative = sum(p.error for p in parts), max(p.slack for p in parts), max(p.relative for p in parts)
    return Halves(np.arange(first, last + 1), sums[0], sums[1], sums[2], sums[3], error, slack, relative)


def _scaled(part: Halves, factor: float) -> Halves:
    right, rise, left, drop = (factor * v for v in (part.right, part.rise, part.left, part.drop))
    return Halves(part.index, right, rise, left, drop, factor * part.error, part.slack, part.relative)


@dataclass(frozen=True)
class Mixture:
    """Which of several losses applies is drawn at random and revealed: a dominating pair for a mixture of mechanisms."""

    parts: tuple[tuple[float, Loss], ...]
    infinity: float = 0.0
    cut: float = 0.0

    def capped(self, mass: float) -> Mixture:
        """See `Loss`."""
        parts = tuple((w, loss.capped(mass)) for w, loss in self.parts)
        return replace(self, parts=parts, cut=max(loss.cut for _, loss in parts))

    @property
    def top(self) -> float:
        """See `Loss`."""
        return max(loss.top for _, loss in self.parts)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`."""
        rows = [(w, *loss.nodes(s)) for w, loss in self.parts]
        return np.concatenate([r[1] for r in rows]), np.concatenate([math.log(r[0]) + r[2] for r in rows])

    def log_mgf(self, s: float) -> tuple[float, float, float]:
        """See `Loss`."""
        losses, log_weights = self.nodes(s)
        return moments(log_weights, losses, s)

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`."""
        return mean, spacing

    def halves(self, grid: Grid, tail: float) -> Halves:
        """See `Loss`."""
        plain = Grid(grid.offset, grid.spacing, grid.tilt, grid.log_scale)
        return add_halves([_scaled(loss.halves(plain, tail), w) for w, loss in self.parts])


@dataclass(frozen=True)
class Fold:
    """Positive losses of one loss, negative losses of another, the rest of the mass at zero.

    The dominating pair of subsampling without replacement (Zhu, Dong & Wang 2022, Proposition 30): beyond e^0 the privacy curve is
    that of removal, before it that of addition.
    """

    above: Loss
    below: Loss
    zero: float
    infinity: float = 0.0
    cut: float = 0.0

    def capped(self, mass: float) -> Fold:
        """See `Loss`."""
        above = self.above.capped(mass)
        return replace(self, above=above, cut=above.cut)

    @property
    def top(self) -> float:
        """See `Loss`."""
        return max(self.above.top, 0.0)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`."""
        high, low = self.above.nodes(s), self.below.nodes(s)
        up, down = high[0] > 0, low[0] < 0
        losses = np.concatenate([low[0][down], [0.0], high[0][up]])
        return losses, np.concatenate([low[1][down], [math.log(max(self.zero, 1e-300))], high[1][up]])

    def log_mgf(self, s: float) -> tuple[float, float, float]:
        """See `Loss`."""
        losses, log_weights = self.nodes(s)
        return moments(log_weights, losses, s)

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`: zero is a point."""
        return 0.0, spacing

    def halves(self, grid: Grid, tail: float) -> Halves:
        """See `Loss`."""
        plain = Grid(0.0, grid.spacing, grid.tilt, grid.log_scale)
        high, low = self.above.halves(plain, tail / 2), self.below.halves(plain, tail / 2)
        up, down = high.index >= 0, low.index <= 0
        at_zero = high.index == 0
        high = Halves(
            high.index[up],
            high.right[up],
            high.rise[up],
            np.where(at_zero, 0.0, high.left)[up],
            np.where(at_zero, 0.0, high.drop)[up],
            high.error,
            high.slack,
            high.relative,
        )
        at_zero = low.index == 0
        low = Halves(
            low.index[down],
            np.where(at_zero, 0.0, low.right)[down],
            np.where(at_zero, 0.0, low.rise)[down],
            low.left[down],
            low.drop[down],
            low.error,
            low.slack,
            low.relative,
        )
        centre = halves_of_points(np.zeros(1), np.array([math.log(max(self.zero, 1e-300)) - grid.log_scale]), plain, 8 * ROUNDING)
        return add_halves([high, low, centre])


def subsample_atoms(base: Atoms, rate: float, added: bool) -> Atoms:
    """A discrete mechanism on a Poisson sample: P and Q swapped when `added`."""
    rows = []
    for loss, p in zip(base.losses, base.probabilities, strict=True):
        q = p * math.exp(-loss)
        ratio = math.log1p(rate * math.expm1(loss)) if loss < 30 else loss + math.log(rate + (1 - rate) * math.exp(-loss))
        rows.append((-ratio, q) if added else (ratio, q * math.exp(ratio)))
    return Atoms(tuple(r[0] for r in rows), tuple(r[1] for r in rows), 0.0 if added else rate * base.infinity)


def discrete_laplace(parameter: float, sensitivity: int) -> Atoms:
    """Two-sided geometric noise, P(x) proportional to exp(-parameter |x|), moved by `sensitivity`."""
    a, norm = parameter, math.tanh(parameter / 2)
    losses = [a * (sensitivity - 2 * j) for j in range(sensitivity + 1)]
    inner = [norm * math.exp(-a * j) for j in range(1, sensitivity)]
    below = norm / -math.expm1(-a)
    above = norm * math.exp(-a * sensitivity) / -math.expm1(-a)
    return Atoms(tuple(losses), (below, *inner, above))


def discrete_gaussian(sigma: float, sensitivity: int) -> Atoms:
    """Discrete Gaussian noise moved by `sensitivity`; where a mass is below the least float, 38 sigma out, it counts as zero."""
    reach = math.ceil(39 * sigma) + sensitivity
    x = np.arange(-reach, reach + 1)
    p = np.exp(-(x.astype(np.float64) ** 2) / (2 * sigma**2))
    p /= p.sum()
    losses = sensitivity * (sensitivity - 2.0 * x) / (2 * sigma**2)
    keep = p > 0
    return Atoms(tuple(losses[keep].tolist()), tuple(p[keep].tolist()))
