"""Losses of the Gaussian family: P and Q are mixtures of Gaussians of one standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpfy.accounting.moments import (
    MOST_NODES,
    QUADRATURE,
    ROUNDING,
    Array,
    LogMoments,
    moments,
    settled,
    trapezoid,
)
from dpfy.accounting.tight.losses import Density, Halves, LossGrid, TooFine
from dpfy.core.errors import Internal


def _log_ratio(weights: Array, exponents: Array, missing: float) -> Array:
    """log(sum_i w_i exp(y_i)) over the first axis, accurate also where the sum is close to 1; the
    weights add up to 1 - `missing`.
    """
    if len(weights) == 1 and not missing:  # far below zero the sum would be lost in rounding
        return np.asarray(exponents[0] + math.log(weights[0]))
    top = exponents.max(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        near: Array = np.log1p((weights[:, None] * np.expm1(exponents)).sum(axis=0) - missing)
    if not (top > 1).any():
        return near
    far = top + np.log((weights[:, None] * np.exp(exponents - top)).sum(axis=0))
    return np.where(top > 1, far, near)


def log_odds(losses: Array, weight: float) -> Array:
    """y with 1 - w + w e^y = e^loss."""
    if weight == 1.0:
        return losses
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log(np.maximum(np.expm1(np.minimum(losses, 30)) + weight, 0.0) / weight)
        return np.where(losses < 30, near, losses - math.log(weight))


@dataclass(frozen=True)
class GaussianPair(Density):
    """P and Q are mixtures of Gaussians of one standard deviation whose log ratio grows with x.

    Covers the Gaussian mechanism, its Poisson-subsampled form in both directions and mixtures of
    sensitivities.
    """

    sigma: float
    p: tuple[tuple[float, float], ...]
    q: tuple[tuple[float, float], ...]
    infinity: float = 0.0
    cut: float = 0.0
    ceiling: float = math.inf
    missing: float = 0.0

    @property
    def top(self) -> float:
        """See `Loss`: where the uppermost components of P and Q coincide the ratio tends to that of
        their weights.
        """
        (w_p, m_p), (w_q, m_q) = (max(side, key=lambda part: part[1]) for side in (self.p, self.q))
        return math.log(w_p / w_q) * (1 + 1e-13) if m_p == m_q else math.inf

    def capped(self, mass: float) -> GaussianPair:
        """See `Loss`."""
        p, missing = list(self.p), 0.0
        while (
            len(p) > 2 and missing + p[-1][0] <= mass / 2
        ):  # rare large moves go whole, the rest of the mass cuts the tail
            missing += p.pop()[0]
        fewer = replace(self, p=tuple(p), missing=missing) if missing else self
        high = max(m for _, m in (*fewer.p, *fewer.q))
        return replace(
            fewer, cut=mass, ceiling=fewer._end(high, 0.0, math.log(mass - missing), True)
        )

    @cached_property
    def _arrays(self) -> tuple[Array, Array, Array, Array]:
        p, q = np.array(self.p), np.array(self.q)
        return p[:, 0], p[:, 1], q[:, 0], q[:, 1]

    def _parts(self, x: Array) -> tuple[Array, Array]:
        """log(P/N) and log(Q/N) at x, with N the Gaussian centred at 0."""
        weights_p, means_p, weights_q, means_q = self._arrays
        two = 2 * self.sigma**2

        def part(weights: Array, means: Array, missing: float) -> Array:
            if len(means) == 1 and means[0] == 0:
                return np.zeros_like(x)
            return _log_ratio(
                weights, (2 * means[:, None] * x - means[:, None] ** 2) / two, missing
            )

        return part(weights_p, means_p, self.missing), part(weights_q, means_q, 0.0)

    def density(self, x: Array) -> tuple[Array, Array]:
        """See `Density`."""
        log_p, log_q = self._parts(x)
        return self._log_density(x, log_p), log_p - log_q

    def loss(self, x: Array) -> Array:
        """See `Density`."""
        log_p, log_q = self._parts(x)
        return log_p - log_q

    def scale(self) -> float:
        """See `Density`."""
        means = [mean for _, mean in (*self.p, *self.q)]
        return min(self.sigma, self.sigma**2 / max(max(means) - min(means), 1e-300))

    def _posterior_q(self, x: Array) -> Array:
        """The posterior mean of Q's component at x: sigma^2 times the derivative of log(Q/N)."""
        _, _, weights, means = self._arrays
        y = (2 * means[:, None] * x - means[:, None] ** 2) / (2 * self.sigma**2)
        e = weights[:, None] * np.exp(y - y.max(axis=0))
        return np.asarray((e * means[:, None]).sum(axis=0) / e.sum(axis=0))

    def _log_density(self, x: Array, log_p: Array) -> Array:
        return log_p - 0.5 * (x / self.sigma) ** 2 - math.log(self.sigma * math.sqrt(2 * math.pi))

    def _log_tails(self, x: Array, s: float, upper: bool) -> Array:
        """Logs of bounds on the integral of P exp(sL) beyond each x; infinity where the slope
        argument does not apply.

        The log of the integrand has slope ((s+1) m_P - s m_Q - x) / sigma^2 with posterior means m
        that grow with x: beyond x the slope is at most its worst value, so the tail is below that
        of an exponential.
        """
        _, means_p, _, _ = self._arrays
        sign = 1.0 if upper else -1.0
        extreme = float(means_p.max() if upper else means_p.min())
        gap = sign * (x - ((s + 1) * extreme - s * self._posterior_q(x)))
        log_density, loss = self.density(x)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(
                gap > 0,
                log_density + s * loss + np.log(self.sigma**2 / np.maximum(gap, 1e-300)),
                np.inf,
            )

    def reach(self, s: float, log_tail: float) -> tuple[float, float]:
        """See `Density`."""
        _, means_p, _, means_q = self._arrays
        low = min(float(means_p.min()), float(means_q.min()))
        high = max(float(means_p.max()), float(means_q.max()))
        return self._end(low, s, log_tail, False), self._end(
            high, s, log_tail, True
        ) if high < self.ceiling else self.ceiling

    def _end(self, start: float, s: float, log_tail: float, upper: bool) -> float:
        sign, stride = (1.0 if upper else -1.0), self.sigma / 2
        while stride < 1e9 * max(1.0, self.sigma):
            x = start + sign * stride * np.arange(64)
            if upper and x[-1] >= self.ceiling:
                x = np.minimum(x, self.ceiling)
            fine = np.flatnonzero(self._log_tails(x, s, upper) <= log_tail)
            if len(fine):
                return float(x[fine[0]])
            if upper and x[-1] >= self.ceiling:
                return self.ceiling
            start, stride = float(x[-1]), stride * 8
        raise TooFine

    def log_mgf(self, s: float, side: int = 0) -> LogMoments:
        """See `Loss`; with a `side` of positive (1) or negative (-1) losses only. Where quadrature
        is out of reach, a closed bound.
        """
        if not side and len(self.p) == len(self.q) == 1 and self.p[0][0] == self.q[0][0] == 1:
            return self._gaussian(s)
        try:
            losses, log_weights = self.nodes(s, side)
        except TooFine:
            return self._closed(s)
        return moments(log_weights, losses, s, self._error(s))

    def nodes(self, s: float, side: int = 0) -> tuple[Array, Array]:
        """See `Loss` and `log_mgf`. Kept for all tilts up to the next power of two."""
        bucket = max(-1, math.ceil(math.log2(s))) if s > 0 else -1
        if (bucket, side) not in self._known:
            self._known[bucket, side] = self._quadrature(2.0**bucket, side)
        if (found := self._known[bucket, side]) is None:
            raise TooFine
        return found

    def _quadrature(self, most: float, side: int) -> tuple[Array, Array] | None:
        """Losses and log weights for all tilts up to `most`, None where too many would be needed.

        Sums of an analytic function over equal steps converge geometrically. P and Q have no zeros
        within pi sigma^2 / span of the real line, span the range of their means: there the terms of
        either lie in one half plane.
        """
        _, means_p, _, means_q = self._arrays
        span = max(float(np.ptp(means_p)), float(np.ptp(means_q)))
        try:
            low, high = self._range(most)
        except TooFine:
            return None
        if side:
            zero = float(self.inverse(np.zeros(1), low, high)[0])
            low, high = (
                (zero, high) if side > 0 else (min(low, zero - 10 * self.sigma), min(zero, high))
            )
        if low >= high:
            return np.zeros(0), np.zeros(0)
        hard = side > 0, side < 0 or high >= self.ceiling
        step = min(self.sigma / 3, self.sigma**2 / (4 * span) if span else math.inf)
        for _ in range(6):
            if high - low > MOST_NODES * step:
                break
            x, log_step = trapezoid(low, high, step, *hard)
            log_p, log_q = self._parts(x)
            losses, log_weights = log_p - log_q, self._log_density(x, log_p) + log_step
            if settled(losses, log_weights, (0.0, most / 2, most)):
                self._below_closed(losses, log_weights, most)
                return losses, log_weights
            step /= 2
        return None

    def _range(self, most: float) -> tuple[float, float]:
        """Where P exp(sL) lies for all s up to `most`, and Q."""
        _, _, _, means_q = self._arrays
        low, high = self.reach(most, self._peak(most) - 46)
        least, largest = self.reach(0.0, -50)
        low, high = min(low, least), max(high, largest)
        if most < 1:
            low, high = (
                min(low, float(means_q.min()) - 9 * self.sigma),
                max(high, float(means_q.max()) + 9 * self.sigma),
            )
        return low, min(high, self.ceiling)

    def _gaussian(self, s: float) -> LogMoments:
        """The moment of single Gaussians P and Q: tilted, x is Gaussian again, about (s + 1) m_P -
        s m_Q, and ends at the ceiling.
        """
        ((_, m_p),), ((_, m_q),) = self.p, self.q
        slope = (m_p - m_q) / self.sigma  # of the loss, by standard deviations of x
        whole, middle = s * (s + 1) * slope**2 / 2, (s + 0.5) * slope**2
        if math.isinf(self.ceiling):
            return LogMoments(whole, middle, slope**2, self._error(s) + 64 * ROUNDING * (8 + whole))
        from scipy.special import log_ndtr

        end = (self.ceiling - m_p) / self.sigma - s * slope
        log_kept = float(log_ndtr(end))
        hazard = math.exp(-0.5 * end**2 - 0.5 * math.log(2 * math.pi) - log_kept)
        spread = (
            1 - end * hazard - hazard**2 if end > -30 else (1 - 6 / end**2 + 50 / end**4) / end**2
        )  # where all digits cancel
        error = self._error(s) + 64 * ROUNDING * (8 + whole + end**2)
        return LogMoments(whole + log_kept, middle - slope * hazard, slope**2 * spread, error)

    def _error(self, s: float) -> float:
        """Of the log of a moment by quadrature. Exponents as large as this are rounded, and their
        error comes s + 1 times.
        """
        size = (s + 1) * max(abs(mean) for _, mean in (*self.p, *self.q)) / self.sigma
        return QUADRATURE + 2 * ROUNDING * size**2

    def _closed(self, s: float) -> LogMoments:
        """An upper bound on the moment: P^(s+1) Q^-s is jointly convex, so any way to pair the
        components of P and Q gives one.
        """
        weights, squares = self._pairing
        exponents = np.log(weights) + s * (s + 1) * squares
        top = float(exponents.max())
        shares = np.exp(exponents - top)
        slopes = (2 * s + 1) * squares
        total = float(shares.sum())
        mean = float((shares * slopes).sum()) / total
        variance = float((shares * (2 * squares + (slopes - mean) ** 2)).sum()) / total
        return LogMoments(top + math.log(total), mean, variance, 64 * ROUNDING * (8 + abs(top)))

    @cached_property
    def _pairing(self) -> tuple[Array, Array]:
        """Components of P and Q paired in order: weights, and half the squared distances in units
        of the noise.
        """
        ends = [
            np.concatenate([[0.0], np.cumsum(sorted_weights)])
            for sorted_weights in (self._arrays[0], self._arrays[2])
        ]
        if len(self.p) == 1 or len(self.q) == 1:  # no sums, in which rare components would be lost
            weights = self._arrays[0] * self._arrays[2]
            distances = self._arrays[1] - self._arrays[3]
        else:
            cuts = np.unique(np.concatenate(ends))
            middles = (cuts[1:] + cuts[:-1]) / 2
            at = [np.clip(np.searchsorted(end, middles) - 1, 0, len(end) - 2) for end in ends]
            weights, distances = (
                np.diff(cuts) + 4 * ROUNDING,
                self._arrays[1][at[0]] - self._arrays[3][at[1]],
            )
        return weights, (distances / self.sigma) ** 2 / 2

    def _below_closed(self, losses: Array, log_weights: Array, s: float) -> None:
        found, most = moments(log_weights, losses, s), self._closed(s)
        if found.log > most.upper + 1e-9:
            raise Internal(
                "a log moment lies below its closed bound",
                f"at {s:g} it is {found.log:.9g} above {most.log:.9g}",
            )

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[Array, Array] | None]:
        return {}

    def _peak(self, s: float) -> float:
        """The log of P exp(sL), at its largest of a few points: a floor for the scale of the
        integral.
        """
        _, means_p, _, _ = self._arrays
        spots = np.unique(np.concatenate([means_p, (s + 1) * means_p]))
        log_p, log_q = self._parts(spots)
        return float((self._log_density(spots, log_p) + s * (log_p - log_q)).max()) + min(
            0.0, math.log(self.sigma)
        )

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`. Where the loss has an edge, the mass within half a spacing of it averages
        exactly to a point.

        An edge exists where the outermost components of P and Q coincide: the ratio then tends to a
        constant.
        """
        _, means_p, _, means_q = self._arrays
        for upper, at_edge in (
            (False, means_p.min() == means_q.min()),
            (True, means_p.max() == means_q.max()),
        ):
            if at_edge:
                return self._edge(spacing, upper, mean), spacing
        return mean, spacing

    def _edge(self, spacing: float, upper: bool, mean: float) -> float:
        from scipy.special import ndtr

        weights_p, means_p, weights_q, means_q = self._arrays
        sign = -1.0 if upper else 1.0

        def beyond(x: Array) -> Array:
            """The log ratio of the masses of P and Q between the edge and x."""
            p = weights_p @ ndtr(sign * (x - means_p[:, None]) / self.sigma)
            q = weights_q @ ndtr(sign * (x - means_q[:, None]) / self.sigma)
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where(q > 0, np.log1p((p - q) / q), self.loss(x))

        reach = 30 * self.sigma + float(np.abs(means_p).max() + np.abs(means_q).max()) * 30
        inner, outer = (-reach, reach) if upper else (reach, -reach)
        for _ in range(8):
            x = np.linspace(outer, inner, 65)
            inside = np.flatnonzero(sign * (self.loss(x) - beyond(x)) > spacing / 2)
            if not len(inside) or inside[0] == 0:
                return mean
            inner, outer = float(x[inside[0]]), float(x[inside[0] - 1])
        # A hair inwards: the merged mass then lies on the outer side of its point and never needs
        # mass from beyond the edge.
        return float(beyond(np.array([inner]))[0]) + sign * 1e-6 * spacing

    def inverse(self, losses: Array, low: float, high: float) -> Array:
        """The x between `low` and `high` at which the loss is reached: closed form where there is
        one, else Newton in a bracket.
        """
        weights_p, means_p, weights_q, means_q = self._arrays
        two = 2 * self.sigma**2
        if (
            len(means_q) == 1
            and means_q[0] == 0
            and len(means_p) <= 2
            and means_p[0] == (0 if len(means_p) == 2 else means_p[0])
        ):
            weight, mean = float(weights_p[-1]), float(means_p[-1])
            return (two * log_odds(losses, weight) + mean**2) / (2 * mean)
        if (
            len(means_p) == 1
            and means_p[0] == 0
            and len(means_q) <= 2
            and means_q[0] == (0 if len(means_q) == 2 else means_q[0])
        ):
            weight, mean = float(weights_q[-1]), float(means_q[-1])
            return (two * log_odds(-losses, weight) + mean**2) / (2 * mean)
        return self._newton(losses, low, high)

    def _newton(self, losses: Array, low: float, high: float) -> Array:
        table = np.linspace(
            low,
            high,
            max(256, min(65_536, int((high - low) * 64 / min(self.sigma, self.sigma**2)))),
        )
        values = np.maximum.accumulate(self.loss(table))
        at = np.clip(np.searchsorted(values, losses) - 1, 0, len(table) - 2)
        left, right = table[at].copy(), table[at + 1].copy()
        x = np.interp(losses, values, table)
        for _ in range(6):
            value = self.loss(x)
            left, right = np.where(value <= losses, x, left), np.where(value >= losses, x, right)
            step = 1e-6 * self.sigma
            slope = (self.loss(x + step) - self.loss(x - step)) / (2 * step)
            with np.errstate(divide="ignore", invalid="ignore"):
                moved = x - (value - losses) / slope
            x = np.where((moved >= left) & (moved <= right), moved, (left + right) / 2)
        return x


@dataclass(frozen=True)
class Side:
    """The part of a Gaussian pair with positive (`sign` 1) or negative (-1) losses: a measure, not
    a distribution.
    """

    pair: GaussianPair
    sign: int
    infinity: float = 0.0

    @property
    def cut(self) -> float:
        """See `Loss`."""
        return self.pair.cut

    @property
    def top(self) -> float:
        """See `Loss`."""
        return math.inf if self.sign > 0 else 0.0

    def capped(self, mass: float) -> Side:
        """See `Loss`: only positive losses have outliers."""
        return replace(self, pair=self.pair.capped(mass)) if self.sign > 0 else self

    def log_mgf(self, s: float) -> LogMoments:
        """See `Loss`."""
        return self.pair.log_mgf(s, self.sign)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`."""
        return self.pair.nodes(s, self.sign)

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`: zero is a point."""
        return 0.0, spacing

    def extent(self, grid: LossGrid, tail: float) -> tuple[int, int]:
        """See `Loss`."""
        return self.pair.extent(grid, tail)

    def halves(self, grid: LossGrid, tail: float, index: NDArray[np.int64] | None = None) -> Halves:
        """See `Loss`. Zero must be a point of the grid: no half cell then holds losses of both
        signs.
        """
        if grid.offset != 0:
            raise Internal(
                "one side of a loss is put on a grid through zero",
                f"the grid begins at {grid.offset:g}",
            )
        whole = self.pair.halves(grid, tail, index)
        outside = self.sign * whole.index
        right = outside >= 0 if self.sign > 0 else outside > 0
        left = outside > 0 if self.sign > 0 else outside >= 0
        return replace(
            whole,
            right=np.where(right, whole.right, 0.0),
            rise=np.where(right, whole.rise, 0.0),
            left=np.where(left, whole.left, 0.0),
            drop=np.where(left, whole.drop, 0.0),
        )
