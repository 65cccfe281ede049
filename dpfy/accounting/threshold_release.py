"""What a Gaussian number tells when only the cell of a public partition that it lies in is
released: thresholds, and noisy votes.

Two cells. A number with standard Gaussian noise is moved by mu, and it is told on which side of a
point it lies. With p the chance of the lower side before the move and q after it, (p, q) lies on
the curve q = Phi(Phi^-1(p) - mu), whatever the point. All that accounting needs are sums of
functions such as p^a q^(1-a), convex in (p, q): their largest value on the curve is at most that at
the corners of a polygon around it, which its tangents make.

Three cells. The arg-max of votes with Gaussian noise, one of which moves from class a to class b.
Let m be the largest of the other noisy votes, which knows nothing of the move: by joint convexity
the worst case is one where m is known. Then a wins, b wins, or neither does. With u the difference
of the two noisy votes over sqrt(2), w their sum over sqrt(2) and t = sqrt(2) m - w, b wins where u
> max(t, 0), a where u < -max(t, 0). The move is one of u alone, by mu = sqrt(2) / sigma; w is
independent of it. The worst case over the means u0 of u and v of -t (in units of sigma) is a
supremum over the plane. It is taken over a lattice:

    N(x, 1) = sum over i of  weight_i(x) N(x_i, 1 - tau^2),  up to a factor of 1 +- 3 exp(-2 pi^2
    tau^2 (1 - tau^2) / h^2),

x_i a lattice of spacing h, for weights that do not depend on the move (Poisson's summation formula:
the product of two Gaussians is a Gaussian in x_i). So every (u0, v) is a mixture of lattice points
with a little less noise, and the worst of those is at least as bad. Points outside a window are two
cells up to a chance of 1e-27 (docs/noisy-votes.md has the whole proof).

Releases that are chosen one after the other, each from a family, with sight of all before: the
most that they tell together.

With H_0(g) = (1 - g)+ the most that j releases can reach, delta at epsilon log g, is

    H_j(g) = max over the family of  sum over outcomes of  P(o) H_{j-1}(g Q(o) / P(o)).

It is computed on a grid of log g, from above: the loss of every outcome is split between the two
grid points around it so that its masses under P and Q stay, which dominates. On the grid a release
is a row of masses, and a step a product of matrices. The family must be the same in both
directions, so that H(1/g) = 1 - 1/g + H(g) / g, and one half is enough.

A family of very many releases is first made smaller: the profile of a release, its delta at every
epsilon, says all about it, and the largest of several profiles is the profile of a release that
dominates them all. Neighbours on a lattice are put together as long as their common profile has
less area than the largest single one: area is what many small releases add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr

from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Points

LEAST, MOST = 1e-8, 2.0
"""Moves for which cells are computed. Smaller ones are charged as the least, larger ones as the
whole number.
"""
STEEPEST = 3.0
"""Above this order times the move, divergences are those of the whole number: a cell far out tells
nearly as much.
"""
WINDOW = 12.0
"""The lattice reaches so far beyond what is moved. What lies outside has a chance of Phi(-WINDOW),
2e-33.
"""
FINE, COARSE = (0.064, 0.32), (0.09, 0.45)
"""tau: the standard deviations that are taken off the noise of u and of w. They cost 0.4% and 0.3%
of a divergence, and 0.8% and 0.7%.
"""
SPACING = 0.65
"""The spacing of the lattice over tau sqrt(1 - tau^2): the factor is 1 +- 2e-20."""
MIXED = 5e-20
"""By how much the log of a chance may be off for the lattice in two directions. What rounding adds
is a part of 1e-9 at most.
"""
PIECE = 1.0
"""Length of a piece of the quadrature: about that of the density."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True, eq=False)
class CellMasses:
    """Partitions, a row each: the chances of their cells when the unit is absent, and by how much
    they are larger when it is present.

    `shape` says how the rows lie on a lattice.
    """

    absent: Array
    gain: Array
    shape: tuple[int, int]

    @property
    def present(self) -> Array:
        """The chances when the unit is present."""
        return self.absent + self.gain

    def information(self) -> Array:
        """The chi-square divergence of every row: twice what it adds to a loss, for small moves."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.nan_to_num(self.gain**2 / self.absent, posinf=0.0).sum(axis=1))


def gap(x: Array, mu: float) -> Array:
    """Phi(x) - Phi(x - mu), to full relative accuracy unless it is below 1e-290."""
    middle = x - mu / 2
    if mu < 1e-2:  # midpoint rule with its first three corrections
        y, d2 = middle**2, (mu / 2) ** 2
        series = (
            1
            + d2 * (y - 1) / 6
            + d2**2 * (y**2 - 6 * y + 3) / 120
            + d2**3 * (y**3 - 15 * y**2 + 45 * y - 15) / 5040
        )
        near = mu * np.exp(-y / 2) / math.sqrt(2 * math.pi) * series
        if (np.abs(middle) < 40).all():
            return np.asarray(near)
    side = np.where(middle > 0, mu - x, x)  # the tail on the side where it is small
    return np.asarray(np.exp(log_ndtr(side)) * -np.expm1(log_ndtr(side - mu) - log_ndtr(side)))


@lru_cache(maxsize=32)
def two_cells(mu: float, fine: float = 0.002, growth: float = 0.01) -> CellMasses:
    """The corners of a polygon around all thresholds within twice WINDOW of what is moved.

    `fine` is half the distance of the tangents beside a tie; where less is told they lie farther
    apart, by `growth` of how far from it.

    Guarantees: a convex function of the chances is, for every such threshold, at most what it is at
    one of the corners.
    """
    steps = [fine]
    while steps[-1] < 2 * WINDOW:
        steps.append(steps[-1] + min(0.5, 2 * fine + growth * steps[-1]))
    x = mu / 2 - np.array(
        steps
    )  # the lower side is the less likely one; the other half of the polygon is its mirror image
    p, q, d, y = (
        ndtr(x),
        ndtr(x - mu),
        gap(x, mu),
        x * mu - mu**2 / 2,
    )  # q grows with p at the rate e^y, d = p - q at 1 - e^y
    rate, step = np.exp(y), p[1:] - p[:-1]
    # From one tangent's point to where it meets the next: in terms of q where the two chances are
    # far apart, else in terms of d.
    bend = np.where(
        rate[:-1] < 0.5, rate[1:] * step - (q[1:] - q[:-1]), d[1:] - d[:-1] + np.expm1(y[1:]) * step
    )
    along = bend / (rate[:-1] * np.expm1(y[1:] - y[:-1]))
    middle = (1 + d[0] + np.expm1(y[0]) * p[0]) / (
        1 + rate[0]
    )  # where the first tangent meets its mirror image: p + q = 1
    lower = np.concatenate([[middle], p[:-1] + along, p[-1:]])
    more = np.concatenate(
        [[d[0] - np.expm1(y[0]) * (middle - p[0])], d[:-1] - np.expm1(y[:-1]) * along, d[-1:]]
    )
    less = np.concatenate(
        [
            [middle - more[0]],
            np.where(rate[:-1] < 0.5, q[:-1] + rate[:-1] * along, lower[1:-1] - more[1:-1]),
            q[-1:],
        ]
    )
    absent = np.concatenate(
        [np.stack([less, 1 - less], axis=1), np.stack([1 - lower, lower], axis=1)]
    )
    gain = np.concatenate([np.stack([more, -more], axis=1)] * 2)
    return CellMasses(absent, gain, (1, len(absent)))


@lru_cache(maxsize=8)
def three_cells(mu: float, tau: tuple[float, float] = FINE) -> CellMasses:
    """Cells of the arg-max of three or more noisy votes: the lattice in the window, by rows of v
    and columns of u0, with less noise.

    t is at most 0 with probability Phi(v); beyond, its density is integrated by Gauss-Legendre
    quadrature on short pieces.

    Guarantees: every arg-max whose worst neighbours move u by `mu` is, in both directions, a
    mixture of these and of the two cells of `narrowed`, up to factors of exp(MIXED) in its chances
    and a chance of CHARGE.
    """
    (su, sv), move = (math.sqrt(1 - x**2) for x in tau), narrowed(mu, tau)
    u = _lattice(-WINDOW, WINDOW + mu, SPACING * tau[0] * su)[:, None] / su
    v = _lattice(-2 * WINDOW, WINDOW, SPACING * tau[1] * sv)[:, None] / sv
    t = (PIECE * (np.arange(math.ceil(4 * WINDOW / PIECE))[:, None] + (1 + _NODES) / 2)).ravel()
    weights = (
        np.tile(PIECE / 2 * _WEIGHTS, len(t) // len(_NODES))
        * np.exp(-((t / sv + v) ** 2) / 2)
        / (sv * math.sqrt(2 * math.pi))
    )
    t, weights = np.append(t, 0.0) / su, np.concatenate([weights, ndtr(v)], axis=1).T
    # b wins where u > t, a where u < -t; u0 is u where the unit is present, u - mu where it is
    # absent.
    up, down = gap(u - t, move), gap(move - u - t, move)
    absent = ndtr(u - move - t), _between(-t - u + move, t - u + move), ndtr(move - u - t)
    gains = up, gap(-t - u + move, move) - gap(t - u + move, move), -down
    cells = [
        np.stack([(part @ weights).T.ravel() for part in parts], axis=1)
        for parts in (absent, gains)
    ]
    return CellMasses(cells[0], cells[1], (len(v), len(u)))


def _between(low: Array, high: Array) -> Array:
    """Phi(high) - Phi(low), on the side where both are small."""
    return np.asarray(np.where(low + high > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)))


def narrowed(mu: float, tau: tuple[float, float]) -> float:
    """The move of u over its noise on the lattice."""
    return mu / math.sqrt(1 - tau[0] ** 2)


CHARGE = 1e-27
"""A chance with which a place outside the window may tell all; more than all that lies there."""


def _lattice(low: float, high: float, spacing: float) -> Array:
    return spacing * np.arange(math.floor(low / spacing), math.ceil(high / spacing) + 1)


def divergences(mu: float, classes: int, alphas: Array) -> Array:
    """Rényi divergences of one cell among two, or of the arg-max of more, at most: in both
    directions, for any neighbours.
    """
    mu = max(mu, LEAST)
    whole = np.asarray(alphas * mu**2 / 2)
    reach, steepest = (2 * WINDOW, 2 * WINDOW / 3) if classes == 2 else (WINDOW, STEEPEST)
    here = alphas * mu <= steepest
    if mu > MOST or not here.any():
        return whole
    orders, found = alphas[here], whole.copy()
    values = largest(two_cells(mu if classes == 2 else narrowed(mu, FINE)), orders)
    if classes > 2:
        values = np.maximum(values, largest(three_cells(mu), orders))
    outside = (
        4 * orders * np.exp(orders * (orders - 1) * mu**2 / 2 + log_ndtr(orders * mu + 1 - reach))
    )
    values = (values + (outside + 2 * orders * MIXED) / (orders - 1)) * (1 + 1e-9)
    found[here] = np.minimum(values, whole[here])
    return found


def largest(cells: CellMasses, orders: Array) -> Array:
    """The largest Rényi divergence over the rows, at every order.

    A divergence grows with the order, so a row whose divergence at the last of some orders is below
    the largest at the first of them cannot be the largest at any of them.
    """
    found, by_order = np.zeros(len(orders)), np.argsort(orders)
    rows = np.arange(len(cells.absent))
    for part in np.array_split(by_order, max(1, len(orders) // 16)):
        if not len(part):
            continue
        first, last = (_moments(cells, rows, float(orders[i])) for i in (part[0], part[-1]))
        kept = rows[last >= first.max() * (1 - 1e-9)]
        for i in part:
            found[i] = _moments(cells, kept, float(orders[i])).max()
    return found


def _moments(cells: CellMasses, rows: Array, order: float) -> Array:
    """Rényi divergences of the rows at an order: log(1 + sum q g(gain / q)) / (order - 1), g(y) =
    (1 + y)^a - 1 - a y.
    """
    q, gain = cells.absent[rows], cells.gain[rows]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        y = np.maximum(np.where(q > 0, gain / q, 0.0), -1.0)
        far = np.expm1(order * np.log1p(y)) - order * y
        near = (
            order * (order - 1) / 2 * y**2 * (1 + (order - 2) / 3 * y * (1 + (order - 3) / 4 * y))
        )
        terms = q * np.where(np.abs(order * y) < 1e-4, near * (1 + 1e-11), far)
        return np.asarray(np.log1p(np.maximum(terms, 0.0).sum(axis=1)) / (order - 1))


POINTS_PER_UNIT = 4
"""Grid points in the loss of the release that tells most."""
FAR = 16
"""The largest loss on the grid, in losses of that release; a larger one counts as infinite."""
END = 14.0
"""Where a curve ends, in standard deviations of the loss: what is left there is below 1e-40."""
ROUNDED = 1e-13
"""By this part every value is raised at every step."""
RAISED = 1e-10
"""By this part common profiles are raised: more than the rounding of their masses."""
TILTS = np.array([0.0, 0.15, 0.3, 0.6, 1.2])
"""How areas are weighted: the tail of what many releases tell falls by so much in the loss of
one.
"""
SLACK = 2e-3
"""How much larger the area of a common profile may be than the largest single one."""


@dataclass(frozen=True, eq=False)
class ReleaseFamily:
    """Releases on a grid of losses: row by row the P-masses at losses -reach .. reach, in units of
    `spacing`, and at infinity.
    """

    spacing: float
    masses: Array

    @property
    def reach(self) -> int:
        """The largest loss, in grid points."""
        return int(self.masses.shape[1] - 2) // 2

    def joined(self, *others: ReleaseFamily) -> ReleaseFamily:
        """This family and others on the same grid."""
        return ReleaseFamily(
            self.spacing, np.concatenate([self.masses, *(other.masses for other in others)])
        )


def on_grid(absent: Array, gain: Array, spacing: float, slack: float = 0.0) -> ReleaseFamily:
    """Releases on a grid, a row of outcomes each: their chances under Q, and what they have more
    under P.

    Every loss is raised by `slack` and split between the points around it.
    """
    present = np.maximum(absent + gain, 0.0)
    reach, rows = FAR * POINTS_PER_UNIT, len(present)
    width = 2 * reach + 2
    with np.errstate(divide="ignore", invalid="ignore"):
        places = (np.log1p(gain / absent) + slack) / spacing
    places = np.where(present <= 0, -np.inf, np.where(absent <= 0, np.inf, places))
    low = np.clip(np.floor(np.clip(places, -reach, reach)), -reach, reach - 1)
    above = np.clip(
        np.expm1(-spacing * np.clip(places - low, 0.0, 1.0)) / math.expm1(-spacing), 0.0, 1.0
    )
    slot = (
        np.where(places <= reach, low.astype(np.int64) + reach, width - 1)
        + width * np.arange(rows)[:, None]
    )
    upper = np.where(places <= reach, slot + 1, slot)
    flat = np.concatenate([slot.ravel(), upper.ravel()])
    weights = np.concatenate([(present * (1 - above)).ravel(), (present * above).ravel()])
    masses = np.bincount(flat, weights=weights, minlength=rows * width).reshape(rows, width)
    return ReleaseFamily(spacing, masses)


def profiles(family: ReleaseFamily) -> tuple[Array, Array]:
    """delta of every release at the epsilons 0 .. reach of its grid, and the same in the other
    direction.
    """
    epsilons = family.spacing * np.arange(family.reach + 1)
    losses = family.spacing * np.arange(-family.reach, family.reach + 1)
    ahead = -np.expm1(np.minimum(epsilons[None, :] - losses[:, None], 0.0))
    back = (
        -np.expm1(np.minimum(epsilons[None, :] + losses[:, None], 0.0)) * np.exp(-losses)[:, None]
    )
    masses = family.masses[:, :-1]
    return np.asarray(masses @ ahead + family.masses[:, -1:]), np.asarray(masses @ back)


def covered(family: ReleaseFamily, shape: tuple[int, int], area: Array) -> ReleaseFamily:
    """A smaller family that dominates one whose rows lie on a lattice of this shape; no common
    profile has larger areas than `area`.
    """
    ahead, back = (curve.reshape(*shape, -1) for curve in profiles(family))
    found: list[tuple[Array, Array]] = []

    def divide(rows: slice, columns: slice) -> None:
        common = ahead[rows, columns].max(axis=(0, 1)), back[rows, columns].max(axis=(0, 1))
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if height * width == 1 or (_areas(*common) <= area).all():
            found.append(common)
        elif height >= width:
            middle = rows.start + height // 2
            divide(slice(rows.start, middle), columns)
            divide(slice(middle, rows.stop), columns)
        else:
            middle = columns.start + width // 2
            divide(rows, slice(columns.start, middle))
            divide(rows, slice(middle, columns.stop))

    divide(slice(0, shape[0]), slice(0, shape[1]))
    joined = _joined(np.array([np.concatenate(pair) for pair in found]), area) * (1 + RAISED)
    half = joined.shape[1] // 2
    return ReleaseFamily(
        family.spacing, _masses(joined[:, :half], joined[:, half:], family.spacing)
    )


def _joined(curves: Array, area: Array) -> Array:
    """Profiles (both directions side by side), each put together with the first before it that it
    fits.
    """
    half = curves.shape[1] // 2
    kept = np.empty((0, 2 * half))
    for curve in curves[np.argsort(-_areas(curves[:, :half], curves[:, half:])[:, 0])]:
        common = np.maximum(kept, curve)
        fits = np.flatnonzero((_areas(common[:, :half], common[:, half:]) <= area).all(axis=1))
        if len(fits):
            kept[fits[0]] = common[fits[0]]
        else:
            kept = np.concatenate([kept, curve[None]])
    return kept


def areas(family: ReleaseFamily) -> Array:
    """The areas under the profile of every release, a column for each of TILTS."""
    return np.asarray(_areas(*profiles(family)))


def _areas(ahead: Array, back: Array) -> Array:
    away = np.arange(ahead.shape[-1])[:, None] / POINTS_PER_UNIT
    return np.asarray(ahead @ np.exp(away * TILTS) + back @ np.exp(-away * TILTS))


def _masses(ahead: Array, back: Array, spacing: float) -> Array:
    """The P-masses of releases with these profiles: e^epsilon times the change of slope in
    e^epsilon.

    Left of 0 in terms of the other direction, where nothing cancels (as in
    `dpfy.accounting.profiles`).
    """
    up, down = math.expm1(spacing), -math.expm1(-spacing)
    before = down + math.exp(-spacing) * back[:, 1:2]  # the profile one point left of 0
    value = np.concatenate([before, ahead], axis=1)
    right = (value[:, 2:] - value[:, 1:-1]) / up - (value[:, 1:-1] - value[:, :-2]) / down
    last = (value[:, -2:-1] - value[:, -1:]) / down
    mirrored = back[:, ::-1]  # at epsilons -reach .. 0
    places = np.exp(-spacing * np.arange(back.shape[1] - 1, 0, -1))
    rise = (mirrored[:, 1:] - mirrored[:, :-1]) / down
    fall = np.concatenate(
        [np.zeros((len(back), 1)), (mirrored[:, 1:-1] - mirrored[:, :-2]) / up], axis=1
    )
    return np.concatenate(
        [np.maximum(places * (rise - fall), 0.0), np.maximum(right, 0.0), last, ahead[:, -1:]],
        axis=1,
    )


def reached(family: ReleaseFamily, steps: int, charge: float = 0.0) -> list[Points]:
    """H of 1, 2, ... releases from the family, rounded up; `charge` is a chance, at every step, to
    tell all.
    """
    reach, h = family.reach, family.spacing
    kernel = np.ascontiguousarray(family.masses[:, -2::-1].T)
    epsilons = h * np.arange(math.ceil(END * POINTS_PER_UNIT * math.sqrt(steps)) + reach + 1)
    known, down, found = np.zeros(len(epsilons)), np.arange(reach, 0, -1), []
    for _ in range(steps):
        right = np.concatenate([known, np.full(reach, known[-1])])
        left = -np.expm1(-h * down) + np.exp(-h * down) * right[down]  # both directions are alike
        windows = np.lib.stride_tricks.sliding_window_view(
            np.concatenate([left, right]), 2 * reach + 1
        )
        best = (windows @ kernel + family.masses[:, -1]).max(axis=1)
        known = np.minimum(1.0, np.maximum(best, known) * (1 + ROUNDED) + charge)
        found.append(Points(epsilons, known))
    return found
