"""Lower bounds on delta that share no code with the accountants: what an attacker surely reaches.

An attacker who looks at finitely many outcomes of each release, and adds up their log-likelihood
ratios, reaches at most what the release allows (data processing). Ratios are rounded down to a
grid, which only lowers delta. So an accountant whose bound lies below is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CUTS, GRID = 3000, 2**18
"""Into how many outcomes a continuous output is cut, and points of the grid of summed ratios."""
ARITHMETIC = 1e-12
"""What double precision may add to a delta, which is subtracted."""


@dataclass(frozen=True)
class Outcomes:
    """Chances of the outcomes of one release with a record, and without it."""

    present: Array
    absent: Array

    @property
    def swapped(self) -> Outcomes:
        """The other direction."""
        return Outcomes(self.absent, self.present)


def of_outputs(present: Callable[[Array], Array], absent: Callable[[Array], Array]) -> Outcomes:
    """A continuous output, by its two distribution functions, cut into intervals."""
    cuts = np.concatenate([[-np.inf], np.linspace(-40.0, 40.0, CUTS), [np.inf]])
    return Outcomes(np.diff(present(cuts)), np.diff(absent(cuts)))


def gaussian_shift(noise: float, chances: Sequence[tuple[float, float]]) -> Outcomes:
    """A Gaussian output around each of the values with its chance, against one around zero.

    Args:
        noise: The standard deviation.
        chances: Pairs of a chance and a value.
    """
    from scipy.special import ndtr

    return of_outputs(
        lambda x: sum((p * ndtr(x - value / noise) for p, value in chances), np.zeros(len(x))),
        lambda x: np.asarray(ndtr(x)),
    )


def sampled_gaussians(rate: float, noise: float, other: float) -> Outcomes:
    """A record that adds 1 with probability `rate`, against one that adds `other` as often."""
    from scipy.special import ndtr

    def mixture(value: float) -> Callable[[Array], Array]:
        return lambda x: np.asarray((1 - rate) * ndtr(x) + rate * ndtr(x - value / noise))

    return of_outputs(mixture(1.0), mixture(other))


def laplace_shift(noise: float, rate: float = 1.0) -> Outcomes:
    """A Laplace output around 1 with probability `rate`, else around 0, against one around 0."""

    def distribution(x: Array, centre: float) -> Array:
        off = x - centre / noise
        tail = 0.5 * np.exp(-np.abs(off))
        return np.where(off < 0, tail, 1 - tail)

    return of_outputs(
        lambda x: rate * distribution(x, 1.0) + (1 - rate) * distribution(x, 0.0),
        lambda x: distribution(x, 0.0),
    )


def two_answers(right: float, wrong: float) -> Outcomes:
    """One answer that the truth makes more likely, and all others together."""
    return Outcomes(np.array([right, 1 - right]), np.array([wrong, 1 - wrong]))


def black_box(epsilon: float, delta: float) -> Outcomes:
    """The worst mechanism that is (epsilon, delta)-private (Kairouz, Oh & Viswanath 2015)."""
    much = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    little = 1 - delta - much
    return Outcomes(np.array([delta, much, little, 0.0]), np.array([0.0, little, much, delta]))


@dataclass(frozen=True)
class ComposedLosses:
    """The log-likelihood ratio of many releases together: its finite values with their chances."""

    losses: Array
    chances: Array
    infinite: float

    def delta(self, epsilon: float) -> float:
        """A lower bound on delta at `epsilon`."""
        above = self.losses > epsilon
        reached = float(self.chances[above] @ -np.expm1(epsilon - self.losses[above]))
        return max(0.0, reached + self.infinite - ARITHMETIC)


def composed(releases: Sequence[tuple[Outcomes, int]]) -> ComposedLosses:
    """All of these releases, each so many times."""
    total = sum(count * _reach(outcomes) for outcomes, count in releases)
    step = max(total / (GRID / 2), 1e-9)
    held = [(*_grid(outcomes, step), count) for outcomes, count in releases]
    size = 1 + sum((len(masses) - 1) * count for masses, _, _, count in held)
    length = 1 << (size - 1).bit_length()
    spectrum: NDArray[np.complex128] = np.ones(length // 2 + 1, dtype=np.complex128)
    finite, lowest = 1.0, 0
    for masses, first, infinite, count in held:
        finite *= (1 - infinite) ** count
        lowest += first * count
        spectrum *= np.fft.rfft(masses, length) ** count
    chances: Array = np.maximum(np.fft.irfft(spectrum, length)[:size], 0.0)
    losses: Array = (lowest + np.arange(size, dtype=np.float64)) * step
    return ComposedLosses(losses, chances, 1 - finite)


def _losses(outcomes: Outcomes) -> tuple[Array, Array]:
    """Chances of the possible outcomes, and their log-likelihood ratios."""
    there = outcomes.present > 0
    with np.errstate(divide="ignore"):
        return outcomes.present[there], np.log(outcomes.present[there]) - np.log(
            outcomes.absent[there]
        )


def _reach(outcomes: Outcomes) -> float:
    _, losses = _losses(outcomes)
    finite = losses[np.isfinite(losses)]
    return float(finite.max() - finite.min()) if len(finite) else 0.0


def _grid(outcomes: Outcomes, step: float) -> tuple[Array, int, float]:
    """Chances on the grid, ratios rounded down; the first point; the chance of an infinite one."""
    chances, losses = _losses(outcomes)
    infinite = float(chances[np.isinf(losses)].sum())
    finite = np.isfinite(losses)
    places = np.floor(losses[finite] / step - 1e-9).astype(np.int64)
    if not len(places):
        return np.zeros(1), 0, infinite
    first = int(places.min())
    masses = np.bincount(places - first, weights=chances[finite])
    return masses.astype(np.float64), first, infinite


def gaussian_delta(mean: float, epsilon: float) -> float:
    """The exact delta of a Gaussian of standard deviation 1 that a record moves by `mean` (Balle &
    Wang 2018).
    """
    from scipy.special import log_ndtr, ndtr

    above = ndtr(mean / 2 - epsilon / mean)
    return float(above - math.exp(epsilon + float(log_ndtr(-mean / 2 - epsilon / mean))))
