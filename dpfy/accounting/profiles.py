"""From a bound on a privacy profile to a pair of distributions that dominates whatever obeys it.

Some releases are known only by a Rényi curve, by Monte Carlo, or by a bound on delta(epsilon). Such
a bound is enough to compose them with anything else, and no delta has to be split: a dominating
pair is read off it (Zhu, Dong & Wang 2022, Proposition 8) and convolved.

Why the pair dominates. With t = e^epsilon let f(t) = sup_S P(S) - t Q(S) be the true profile in one
direction. f is convex, falls, and f(0) = 1; below t = 1 it is known from the other direction, f(t)
= 1 - t + t f'(1/t). Let u_k >= f(t_k) be the bounds at finitely many points, u = 1 at t = 0, and g
the lower convex envelope of these points, constant beyond the last. Every (t, g(t)) is a convex
combination of points (t_k, u_k) that lie on or above the graph of the convex function f, so g(t) >=
sum w_k f(t_k) >= f(t): at the points, between them, and (f falls) beyond the last. g is convex and
falls from 1 with a slope of at least -1, hence is itself a profile: Q has mass g'(t+) - g'(t-) at
the ratio t, P has t times that, and P has mass g(infinity) where Q has none. (The envelope of the
points is taken, never of the function between them: a function that is a minimum of bounds need not
be convex, and need not be: only f must be.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpfy.accounting.moments import Array
from dpfy.accounting.tight.losses import Atoms
from dpfy.core.errors import Internal
from dpfy.core.guarantee import Curve

Bound = Callable[[Array], Array]
"""Upper bounds on delta at an array of epsilons >= 0, ascending."""

ROUNDED = 1e-9
"""By this part every bound is raised: far more than all rounding from here to the masses, which is
about 1e-13.
"""
FLOOR = 1e-230
"""Where delta is below this the pair ends; the rest is a chance of infinite loss. Deltas that may
be asked for are above 1e-200.
"""
FINE, FAR, DEEP = 8e-6, 1e-4, 1e-40
"""The relative error in epsilon that the points aim for; below a delta of DEEP they aim for
less.
"""
MOST = 6000
"""Points of one direction."""
CHECKED = 64
"""About how many points of every pair are compared with the profile they came from."""
FARTHEST = 1e14
"""An epsilon at which a bound that has not ended is cut off: what is left of it is a chance of
infinite loss.
"""


@dataclass(frozen=True)
class Points:
    """Upper bounds on delta at epsilons >= 0, ascending, the first of them 0: one direction of a
    profile.
    """

    epsilons: Array
    deltas: Array

    def __post_init__(self) -> None:
        if (
            self.epsilons[0] != 0
            or (np.diff(self.epsilons) <= 0).any()
            or np.isnan(self.deltas).any()
        ):
            raise Internal(
                "the points of a privacy profile ascend from 0",
                f"they begin with {self.epsilons[:3]}",
            )


Sides = tuple[Points, Points]
"""A profile: removing the unit, adding it."""


@dataclass(frozen=True)
class Profile:
    """A release that is known by its privacy profile; each is computed when asked for.

    `alone`: its curve, as exact as it can be where nothing else is released. `sides`: the whole
    profile. `certain`: the same as far as it is known without chance.
    """

    alone: Callable[[], Curve]
    sides: Callable[[], Sides]
    certain: Callable[[], Sides]


@dataclass(frozen=True)
class _Vertices:
    """Points in order: epsilon, the bound on f there, and the bound of the other direction at
    -epsilon that it amounts to.
    """

    epsilons: Array
    values: Array
    mirrored: Array

    def masses(self) -> Array:
        """The P-mass at every point but the first and the last of the profile through all:
        e^epsilon times the change of slope there.

        Negative or zero where a point lies on or above the edge between its neighbours. Left of
        epsilon 0 the same in terms of the other direction, where nothing cancels.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            gaps, here = np.diff(self.epsilons), self.epsilons[1:-1]
            ahead, behind = np.expm1(gaps), -np.expm1(-gaps)
            rise, mirror = np.diff(self.values), np.diff(self.mirrored)
            found = rise[1:] / ahead[1:] - rise[:-1] / behind[:-1]
            other = np.exp(here) * (mirror[1:] / behind[1:] - mirror[:-1] / ahead[:-1])
        return np.where(here < 0, other, found)

    def envelope(self) -> _Vertices:
        """Without the points that lie on or above an edge between others, as they come from left to
        right.
        """
        if bool((self.masses() > 0).all()):  # the usual case
            return self
        e, f, g = self.epsilons.tolist(), self.values.tolist(), self.mirrored.tolist()
        kept = list[int]()
        for c in range(len(e)):
            while len(kept) > 1 and _mass(e, f, g, kept[-2], kept[-1], c) <= 0:
                kept.pop()
            kept.append(c)
        return _Vertices(self.epsilons[kept], self.values[kept], self.mirrored[kept])


def _mass(e: list[float], f: list[float], g: list[float], a: int, b: int, c: int) -> float:
    """One of :meth:`_Vertices.masses`, of the points `a`, `b` and `c`: faster where they are asked
    for one by one.
    """
    if e[b] < 0:
        return math.exp(e[b]) * (
            (g[c] - g[b]) / -math.expm1(e[b] - e[c]) - (g[b] - g[a]) / _expm1(e[b] - e[a])
        )
    return (f[c] - f[b]) / _expm1(e[c] - e[b]) - (f[b] - f[a]) / -math.expm1(e[a] - e[b])


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


def dominating(forward: Points, backward: Points) -> Atoms:
    """The loss of a pair whose profile lies above `forward` and, read the other way round, above
    `backward`.

    Guarantees: every mechanism whose delta is at most `forward` in this direction and at most
    `backward` in the other, at the points, is dominated by the pair, at all epsilons. The mass at
    infinity is the last bound of `forward`.
    """
    ahead, back = _bounds(forward), _bounds(backward)
    centre = min(
        float(ahead[0]), float(back[0])
    )  # at epsilon 0 both directions are the total variation
    left, right = -backward.epsilons[:0:-1], forward.epsilons[1:]
    epsilons = np.concatenate([[-math.inf], left, [0.0], right, [math.inf]])
    values = np.concatenate(
        [[1.0], np.exp(left) * back[:0:-1] - np.expm1(left), [centre], ahead[1:], [0.0]]
    )
    mirrored = np.concatenate(
        [[0.0], back[:0:-1], [centre], np.exp(-right) * ahead[1:] - np.expm1(-right), [1.0]]
    )
    values[-1] = infinity = float(values[-2])
    chain = _Vertices(epsilons, values, mirrored).envelope()
    masses = chain.masses()
    held = masses > 0
    if infinity >= 1 or not held.any():
        return Atoms((0.0,), (0.0,), 1.0)
    atoms = Atoms(
        tuple(chain.epsilons[1:-1][held].tolist()), tuple(masses[held].tolist()), infinity
    )
    return _lawful(atoms, chain)


def _bounds(points: Points) -> Array:
    """The bounds on delta, falling and rounded up; one that is not 0 is no smaller than what
    arithmetic has all its digits for.
    """
    falling = np.minimum(1.0, np.minimum.accumulate(points.deltas)) * (1 + ROUNDED)
    return np.where(falling > 0, np.maximum(falling, FLOOR), 0.0)


def _lawful(atoms: Atoms, chain: _Vertices) -> Atoms:
    """`atoms`, whose own profile is compared with some of the vertices it must reach; an `Internal`
    error where it does not.
    """
    some = slice(1, -1, max(1, (len(chain.epsilons) - 2) // CHECKED))
    found = hockey_stick(atoms, chain.epsilons[some])
    for epsilon, least, value in zip(chain.epsilons[some], chain.values[some], found, strict=True):
        if value < least * (1 - ROUNDED / 2):
            raise Internal(
                "a dominating pair reaches its profile",
                f"{value:.15g} at {epsilon:.9g} is below {least:.15g}",
            )
    return atoms


def points(bound: Bound) -> Points:
    """Points at which a bound is read: close enough that what lies between them costs a few
    millionths of epsilon.

    Any choice is sound. A chord over a gap h, where delta falls like e^(-s epsilon), lies h^2 s (s
    + 1) / 8 of delta too high, which is h^2 (s + 1) / 8 in epsilon.
    """
    end = _end(bound)
    rough = np.unique(
        np.concatenate([np.linspace(0.0, end, 400), end * np.geomspace(1e-6, 1.0, 300)])
    )
    deltas = np.maximum(np.minimum.accumulate(bound(rough)), 1e-300)
    logs = -np.log(deltas)
    slopes = np.maximum(np.diff(logs) / np.diff(rough), 0.0)
    usual = float(np.interp(-math.log(1e-3 * min(1.0, float(deltas[0]))), logs, rough))
    middle = (rough[1:] + rough[:-1]) / 2
    aim = np.where(deltas[1:] > DEEP, FINE, FAR) * np.maximum(middle, max(usual, 1e-3 * end))
    density = np.sqrt((slopes + 1) / (8 * aim))
    count = np.concatenate([[0.0], np.cumsum(density * np.diff(rough))])
    number = int(min(MOST, max(64, math.ceil(count[-1]))))
    chosen = np.unique(np.interp(np.linspace(0.0, count[-1], number + 1), count, rough))
    return Points(chosen, bound(chosen))


def _end(bound: Bound) -> float:
    """An epsilon beyond which delta is below the floor, or does not fall any more."""

    def at(epsilon: float) -> float:
        return float(bound(np.array([epsilon]))[0])

    high = 1.0
    while high < FARTHEST and at(high) > FLOOR:
        high *= 2
    limit = max(FLOOR, at(high) * (1 + 1e-6))
    low = 0.0
    if at(high / 1e12) <= limit:
        return high / 1e12
    while high - low > 1e-3 * high:
        middle = (
            (low + high) / 2 if low > 1e-3 * high else max(low, high * 1e-14) ** 0.5 * high**0.5
        )
        low, high = (low, middle) if at(middle) <= limit else (middle, high)
    return high


def of_renyi(orders: Array, values: Array, infinity: float = 0.0) -> Bound:
    """The profile that Rényi divergences imply, with a chance of infinite loss beside them.

    Canonne, Kamath & Steinke 2020, Proposition 12, at the best order for each epsilon; at epsilon 0
    also Pinsker's inequality, as the least order's divergence is not below the Kullback-Leibler
    one.
    """
    known = np.isfinite(values)
    alphas, rates = orders[known], np.maximum(values[known], 0.0)
    if not len(alphas):
        return np.ones_like
    constants = -np.log(alphas - 1) + alphas * np.log1p(-1 / alphas)
    pinsker = math.sqrt(float(rates.min()) / 2) if infinity == 0 else 1.0

    def bound(epsilons: Array) -> Array:
        with np.errstate(over="ignore"):
            logs = ((alphas - 1) * (rates - np.asarray(epsilons)[:, None]) + constants).min(axis=1)
        return np.asarray(
            np.minimum(1.0, infinity + np.minimum(pinsker, np.exp(np.minimum(0.0, logs))))
        )

    return bound


def hockey_stick(atoms: Atoms, epsilons: Array) -> Array:
    """The profile of the pair at `epsilons`, summed directly."""
    losses, masses = atoms.falling
    above = np.searchsorted(-losses, -epsilons)
    return np.array(
        [
            atoms.infinity + float(np.sum(masses[:k] * -np.expm1(e - losses[:k])))
            for e, k in zip(epsilons, above, strict=True)
        ]
    )
