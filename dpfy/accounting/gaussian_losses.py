"""Losses of the Gaussian family: P and Q are mixtures of Gaussians of one standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpfy.accounting.losses import Array, Density, moments
from dpfy.core.errors import Unsupported


def _log_ratio(weights: Array, exponents: Array) -> Array:
    """log(sum_i w_i exp(y_i)) over the first axis, accurate also where the sum is close to 1."""
    top = exponents.max(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        near: Array = np.log1p((weights[:, None] * np.expm1(exponents)).sum(axis=0))
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

    Covers the Gaussian mechanism, its Poisson-subsampled form in both directions and mixtures of sensitivities.
    """

    sigma: float
    p: tuple[tuple[float, float], ...]
    q: tuple[tuple[float, float], ...]
    infinity: float = 0.0
    cut: float = 0.0
    ceiling: float = math.inf

    def capped(self, mass: float) -> GaussianPair:
        """See `Loss`."""
        high = max(m for _, m in (*self.p, *self.q))
        return replace(self, cut=mass, ceiling=self._end(high, 0.0, math.log(mass), True))

    @cached_property
    def _arrays(self) -> tuple[Array, Array, Array, Array]:
        p, q = np.array(self.p), np.array(self.q)
        return p[:, 0], p[:, 1], q[:, 0], q[:, 1]

    def _parts(self, x: Array) -> tuple[Array, Array]:
        """log(P/N) and log(Q/N) at x, with N the Gaussian centred at 0."""
        weights_p, means_p, weights_q, means_q = self._arrays
        two = 2 * self.sigma**2

        def part(weights: Array, means: Array) -> Array:
            if len(means) == 1 and means[0] == 0:
                return np.zeros_like(x)
            return _log_ratio(weights, (2 * means[:, None] * x - means[:, None] ** 2) / two)

        return part(weights_p, means_p), part(weights_q, means_q)

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
        return min(self.sigma, self.sigma**2)

    def _posterior_q(self, x: Array) -> Array:
        """The posterior mean of Q's component at x: sigma^2 times the derivative of log(Q/N)."""
        _, _, weights, means = self._arrays
        y = (2 * means[:, None] * x - means[:, None] ** 2) / (2 * self.sigma**2)
        e = weights[:, None] * np.exp(y - y.max(axis=0))
        return np.asarray((e * means[:, None]).sum(axis=0) / e.sum(axis=0))

    def _log_density(self, x: Array, log_p: Array) -> Array:
        return log_p - 0.5 * (x / self.sigma) ** 2 - math.log(self.sigma * math.sqrt(2 * math.pi))

    def _log_tails(self, x: Array, s: float, upper: bool) -> Array:
        """Logs of bounds on the integral of P exp(sL) beyond each x; infinity where the slope argument does not apply.

        The log of the integrand has slope ((s+1) m_P - s m_Q - x) / sigma^2 with posterior means m that grow with x: beyond x the
        slope is at most its worst value, so the tail is below that of an exponential.
        """
        _, means_p, _, _ = self._arrays
        sign = 1.0 if upper else -1.0
        extreme = float(means_p.max() if upper else means_p.min())
        gap = sign * (x - ((s + 1) * extreme - s * self._posterior_q(x)))
        log_density, loss = self.density(x)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(gap > 0, log_density + s * loss + np.log(self.sigma**2 / np.maximum(gap, 1e-300)), np.inf)

    def reach(self, s: float, log_tail: float) -> tuple[float, float]:
        """See `Density`."""
        _, means_p, _, means_q = self._arrays
        low = min(float(means_p.min()), float(means_q.min()))
        high = max(float(means_p.max()), float(means_q.max()))
        return self._end(low, s, log_tail, False), self._end(high, s, log_tail, True) if high < self.ceiling else self.ceiling

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
        raise Unsupported(f"a tilt of {s:.3g} for this release", "ask for a larger delta")

    def log_mgf(self, s: float) -> tuple[float, float, float]:
        """See `Loss`. Trapezoid sums of an analytic function: they converge geometrically."""
        losses, log_weights = self.nodes(s)
        return moments(log_weights, losses, s)

    def nodes(self, s: float) -> tuple[Array, Array]:
        """See `Loss`. Kept for all tilts up to the next power of two."""
        bucket = max(-1, math.ceil(math.log2(s))) if s > 0 else -1
        if bucket not in self._known:
            most = 2.0**bucket
            low, high = self.reach(most, self._peak(most) - 46)
            least, largest = self.reach(0.0, -50)
            low, high = min(low, least), max(high, largest)
            step = min(self.sigma, self.sigma**2) / 8
            x = np.linspace(low, high, int(min(max((high - low) / step, 64), 40_000)))
            log_p, log_q = self._parts(x)
            self._known[bucket] = log_p - log_q, self._log_density(x, log_p) + math.log(x[1] - x[0])
        return self._known[bucket]

    @cached_property
    def _known(self) -> dict[int, tuple[Array, Array]]:
        return {}

    def _peak(self, s: float) -> float:
        """The log of P exp(sL), at its largest of a few points: a floor for the scale of the integral."""
        _, means_p, _, _ = self._arrays
        spots = np.unique(np.concatenate([means_p, (s + 1) * means_p]))
        log_p, log_q = self._parts(spots)
        return float((self._log_density(spots, log_p) + s * (log_p - log_q)).max()) + min(0.0, math.log(self.sigma))

    def align(self, spacing: float, mean: float) -> tuple[float, float]:
        """See `Loss`. Where the loss has an edge, the mass within half a spacing of it averages exactly to a point.

        An edge exists where the outermost components of P and Q coincide: the ratio then tends to a constant.
        """
        _, means_p, _, means_q = self._arrays
        for upper, at_edge in ((False, means_p.min() == means_q.min()), (True, means_p.max() == means_q.max())):
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
        # A hair inwards: the merged mass then lies on the outer side of its point and never needs mass from beyond the edge.
        return float(beyond(np.array([inner]))[0]) + sign * 1e-6 * spacing

    def inverse(self, losses: Array, low: float, high: float) -> Array:
        """The x between `low` and `high` at which the loss is reached: closed form where there is one, else Newton in a bracket."""
        weights_p, means_p, weights_q, means_q = self._arrays
        two = 2 * self.sigma**2
        if len(means_q) == 1 and means_q[0] == 0 and len(means_p) <= 2 and means_p[0] == (0 if len(means_p) == 2 else means_p[0]):
            weight, mean = float(weights_p[-1]), float(means_p[-1])
            return (two * log_odds(losses, weight) + mean**2) / (2 * mean)
        if len(means_p) == 1 and means_p[0] == 0 and len(means_q) <= 2 and means_q[0] == (0 if len(means_q) == 2 else means_q[0]):
            weight, mean = float(weights_q[-1]), float(means_q[-1])
            return (two * log_odds(-losses, weight) + mean**2) / (2 * mean)
        return self._newton(losses, low, high)

    def _newton(self, losses: Array, low: float, high: float) -> Array:
        table = np.linspace(low, high, max(256, min(65_536, int((high - low) * 64 / min(self.sigma, self.sigma**2)))))
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
