"""Draws whose mean is the delta of balls-in-bins and which cannot exceed a small, known limit.

y = dP/dQ is the mean over bins k of Y_k = exp(t_k - G_kk / 2), t centred Gaussian with the
covariance G of the responses under Q. Removing the unit costs E (y - E)_+, adding it E (1 - E y)_+,
with E = e^epsilon. Draws from Q would almost always be zero. Instead:

Removing, with p picks: y^p is, up to its mean, the density of Q moved by m_k1 + ... + m_kp, the
bins picked one after the other, bin k with weight exp(G_k,k1 + G_k,k2 + ...); W, the product of the
mean weights, is what the picks leave over. Then X = W (y - E)_+ / y^p has the mean delta. The mean
weight is a convex function of how often each bin was picked, so it is largest if all picks were the
same bin: X has a limit, for the best p not far above the Rényi bound on delta. With one pick and
stretch s >= 1: Q moved by s m_k and X = (y - E)_+ / M, M the mean over k of exp(s t_k - s^2 G_kk /
2), which is at least y^s exp(-s (s - 1) max G_kk / 2) (power means).

Adding, with push c >= 0: Q moved by -c times the mean response a; X = (1 - E y)_+ exp(c u + c^2
|a|^2 / 2), u the mean of the t_k. The mean of exponentials is at least the exponential of the mean,
so u bounds y from below, and X has a limit again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from dpfy.core.events import BallsInBins

Floats = NDArray[np.float64]
CHUNK = 2**12
"""Draws made at a time: the intermediate arrays stay in the cache."""
POWERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32)
STRETCHES = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
PUSHES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)


@dataclass(frozen=True)
class Pair:
    """The two distributions, up to rotation: inner products of the bins' responses in units of the
    noise.
    """

    gram: Floats
    root: Floats = field(repr=False)
    diagonal: bool

    @classmethod
    def of(cls, event: BallsInBins) -> Pair:
        """The pair of an event."""
        gram = np.asarray(event.gram, dtype=np.float64) / event.noise_multiplier**2
        if not (gram - np.diag(gram.diagonal())).any():
            return cls(gram, np.sqrt(gram), True)
        values, vectors = np.linalg.eigh(gram)
        return cls(gram, vectors * np.sqrt(np.maximum(values, 0)), False)

    def gaussian_delta(self, epsilon: float) -> float:
        """delta of the longest response alone: no bins would help less."""
        norm = math.sqrt(float(self.gram.diagonal().max()))
        upper = float(ndtr(norm / 2 - epsilon / norm))
        return upper - math.exp(epsilon + float(log_ndtr(-norm / 2 - epsilon / norm)))

    @cached_property
    def log_weights(self) -> Floats:
        """By how many bins are picked already, 0, 1, ...: the log of the largest mean weight of the
        next.
        """
        return np.array([float(_log_mean(a * self.gram).max()) for a in range(POWERS[-1])])

    def centred(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` draws of t under Q."""
        return rng.standard_normal((count, len(self.gram))) @ self.root.T


@dataclass(frozen=True)
class Removing:
    """A tilt towards large y: several bins stand out (`picks`), or one by more than its response
    (`stretch`).
    """

    picks: int = 1
    stretch: float = 1.0

    def limit(self, pair: Pair, epsilon: float) -> float:
        """The most that a draw can be: for y^q, q = picks x stretch, the largest (y - E) / y^q is
        at y = E q / (q - 1).
        """
        order = self.picks * self.stretch
        loss = self.stretch * (self.stretch - 1) * float(pair.gram.diagonal().max()) / 2
        value = (1 - order) * epsilon - order * math.log(order)
        value += (order - 1) * math.log(order - 1) if order > 1 else 0.0
        return math.exp(min(float(pair.log_weights[: self.picks].sum()) + loss + value, 700.0))

    def draw(self, pair: Pair, count: int, rng: np.random.Generator) -> Drawn:
        """`count` independent draws, for every epsilon."""
        parts = [
            self._some(pair, min(CHUNK, count - start), rng) for start in range(0, count, CHUNK)
        ]
        log_weight, y = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Drawn(self, pair, log_weight, y)

    def _some(self, pair: Pair, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        bins, half = len(pair.gram), pair.gram.diagonal() / 2
        picked = pair.gram[rng.integers(bins, size=count)]
        log_weight = np.zeros(count)
        for _ in range(1, self.picks):
            top = picked.max(axis=1)
            running = np.exp(picked - top[:, None]).cumsum(axis=1)
            log_weight += top + np.log(running[:, -1] / bins)
            place = (running < rng.random((count, 1)) * running[:, -1:]).sum(axis=1)
            picked = picked + pair.gram[np.minimum(place, bins - 1)]
        t = pair.centred(count, rng) + self.stretch * picked
        log_y = _log_mean(t - half)
        log_m = log_y if self.stretch == 1 else _log_mean(self.stretch * t - self.stretch**2 * half)
        return log_weight - self.picks * log_m, np.exp(log_y)


@dataclass(frozen=True)
class Adding:
    """A tilt towards small y: against the mean response, `push` times."""

    push: float

    def limit(self, pair: Pair, epsilon: float) -> float:
        """The most that a draw can be: with v = e^u the largest (1 - E v e^-h) v^c, h half the mean
        of the G_kk.
        """
        c, size = self.push, float(pair.gram.mean())
        value = (
            c**2 * size / 2
            - c * (epsilon - float(pair.gram.diagonal().mean()) / 2)
            - (1 + c) * math.log1p(c)
        )
        return math.exp(min(value + (c * math.log(c) if c else 0.0), 700.0))

    def draw(self, pair: Pair, count: int, rng: np.random.Generator) -> Drawn:
        """`count` independent draws, for every epsilon."""
        moved, half = self.push * pair.gram.mean(axis=0), pair.gram.diagonal() / 2
        weights, ys = [], []
        for start in range(0, count, CHUNK):
            t = pair.centred(min(CHUNK, count - start), rng) - moved
            weights.append(self.push * t.mean(axis=1) + self.push**2 * float(pair.gram.mean()) / 2)
            ys.append(np.exp(_log_mean(t - half)))
        return Drawn(self, pair, np.concatenate(weights), np.concatenate(ys))


@dataclass(frozen=True)
class Drawn:
    """Draws of a tilt. They do not depend on epsilon: the same ones serve for all."""

    tilt: Removing | Adding
    pair: Pair
    log_weight: Floats = field(repr=False)
    y: Floats = field(repr=False)

    def values(self, epsilon: float) -> Floats:
        """X at `epsilon`: independent, with the mean delta, between 0 and `limit`."""
        gain = (
            self.y - math.exp(epsilon)
            if isinstance(self.tilt, Removing)
            else 1 - math.exp(epsilon) * self.y
        )
        inside = gain > 0
        found = np.zeros(len(gain))
        found[inside] = np.exp(self.log_weight[inside]) * gain[inside]
        return found

    def limit(self, epsilon: float) -> float:
        """The most that any draw can be at `epsilon`, rounding included."""
        return self.tilt.limit(self.pair, epsilon) * (1 + 1e-9)


def removing(pair: Pair, epsilon: float) -> tuple[Removing, ...]:
    """The tilts worth trying at `epsilon`: those with the least limit, and their neighbours."""
    many = sorted((Removing(picks=p) for p in POWERS), key=lambda t: t.limit(pair, epsilon))
    one = sorted((Removing(stretch=s) for s in STRETCHES), key=lambda t: t.limit(pair, epsilon))
    return (*many[:3], one[0])


def adding(pair: Pair, epsilon: float) -> tuple[Adding, ...]:
    """The tilts worth trying at `epsilon`: those with the least limit."""
    return tuple(sorted((Adding(c) for c in PUSHES), key=lambda t: t.limit(pair, epsilon))[:3])


def _log_mean(values: Floats) -> Floats:
    """log of the mean of exp along the last axis."""
    top = values.max(axis=-1)
    return np.asarray(top + np.log(np.exp(values - top[..., None]).mean(axis=-1)))
