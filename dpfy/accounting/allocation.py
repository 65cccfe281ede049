"""Random allocation: a unit takes part in one step of many, chosen uniformly and in secret.

With the unit the noisy steps are the mixture over its step k of Gaussians moved in coordinate k,
without it they are centred: y = dP/dQ is the mean of independent log-normal Y_k, each of mean one
under Q. Both directions are read off the law of y under Q: removing the unit costs E (y - E)_+,
adding it E (1 - E y)_+, with E = e^epsilon. Both are convex in every Y_k.

So the law of y is bounded in the convex order. From above: every Y_k is moved at random to one of
the two grid points around it, with its mean kept (Jensen's inequality). From below: Y_k is replaced
by a grid variable whose put function E (K - Y)_+ is at most that of Y_k, which is a conditional
mean of Y_k under some coupling (Strassen). Sums are convolved by FFT in extended precision, on
grids of several spacings, and the law of P beside that of Q, so that rounding is relative to
either. Moments bound large sums beyond all grids, Laplace transforms small ones.

The curve of the upper law at a list of nodes gives the pair that dominates (connect the dots). The
masses of the lower law between nodes give a pair that is attained (data processing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp, ndtr, ndtri

from dpfy.accounting import gaussian
from dpfy.accounting.rules.noise import SILENT
from dpfy.accounting.tight.losses import Atoms

Reals = NDArray[np.floating[Any]]

FINE = 0.03
"""The finest grid in units of one response's spread."""
MOST_CELLS = 2**15
"""Cells of the finest grid; a grid that would need more is coarser."""
WINDOW_CELLS = 2**18
"""Cells of a window around one."""
COARSER = 8
"""Each further grid is that much coarser and reaches that much further."""
MOST_GRIDS = 6
ROOM = 2
"""The array of a transform is this many times as long as the sums that matter."""
MOST_ROUNDS = 300
"""Rounds in which points above a convex curve are left out."""
NOTHING = 1e-12
"""What a window may leave out of P and Q."""
SMALL = 1e-17
"""Sums are damped so much that what wraps around the array has no more than this."""
UNIT = float(np.finfo(np.longdouble).eps)
ROUNDED = 1e-14
"""More than the relative error of a mass that comes from the normal distribution function."""
NODE = 0.01
"""Nodes are this part of the spread of the loss apart around its middle."""
GROWTH = 0.001
"""Nodes far from the middle are apart by this part of their distance from it."""
MOST_NORM, LEAST_NORM, MOST_STEPS = 6.0, 1e-3, 2**20
"""Where the law of y is computed: the response in units of the noise, and the number of steps."""
MOST_ORDER = 128
"""Whole orders whose moments are exact."""
LARGEST = 2**14
"""Orders whose moments bound large sums."""
FAR = -32.0
"""Grids reach to where the log of a bound on a call is below this."""
END = -80.0
"""Nodes reach to where a curve is below e^END."""
SURE = 3
"""The lower law ends where its curve is so many times its rounding error."""


@dataclass(frozen=True)
class GridLaw:
    """The law of y with every Y_k replaced by a variable on a grid.

    `p` and `q` are the masses of P and Q at `values`; `beyond` bounds what P has to the right of
    them, `lost` the rounding error of any sum of masses.
    """

    values: Reals
    p: Reals
    q: Reals
    beyond: float
    lost: float

    def reaches(self, nodes: Reals) -> NDArray[np.bool_]:
        """Which nodes are not beyond the values."""
        return np.asarray(nodes <= self.values[-1])

    def sums(self, nodes: Reals, right: bool = False) -> tuple[Any, Any]:
        """Masses of P and of Q up to the nodes, or to the right of them, in extended precision."""
        turn = slice(None, None, -1) if right else slice(None)
        first = np.searchsorted(self.values, nodes, side="right")
        count = len(self.q) - first if right else first
        p, q = (
            np.append(np.longdouble(0), np.cumsum(mass[turn], dtype=np.longdouble))[count]
            for mass in (self.p, self.q)
        )
        return p, q

    def curve(self, nodes: Reals) -> Reals:
        """E_Q (node - y)_+ left of 1 and E_Q (y - node)_+ from there on, from above; infinite for
        nodes beyond the grid.
        """
        (above, right), (below, left) = self.sums(nodes, True), self.sums(nodes)
        more = self.lost * (1 + nodes)
        calls = np.maximum(above - nodes * right, 0.0) + self.beyond + more
        puts = np.maximum(nodes * left - below, 0.0) + more
        # a call is a put plus this, the mean of y being one
        calls = np.minimum(calls, puts + 1 - nodes + 4 * UNIT * nodes)
        found = np.where(nodes < 1, puts, calls).astype(float) * (1 + 1e-15)
        return np.where(self.reaches(nodes), found, np.inf)


def split(norm: float, step: float, cells: int) -> Reals:
    """Masses at 0, step, ..., cells * step of Y = exp(norm x - norm^2 / 2), x standard normal, moved
    to the grid with its mean kept. What lies beyond the grid is left out.
    """
    left, right = _halves(norm, np.arange(cells + 1) * step)
    return np.asarray(np.append(left, 0.0) + np.append(0.0, right))


def merged(norm: float, step: float, cells: int) -> tuple[float, Reals] | None:
    """A shift, and masses at shift, shift + step, ... of a variable that is at most Y in the convex
    order.

    Its put function at the points is that of Y, less as much as the chords of the neighbouring cells
    lie above the tangents at their ends: step * left * right / (left + right), with the two masses
    that `split` makes of a cell. It is zero up to the last point where that is not positive, and
    then the least convex curve through the others. On a grid too coarse for that the first point is
    the mean of Y where it is below the second, and the curve begins below the tangent there. To the
    right of the grid it goes on along its last tangent: what is there is left out.
    """
    for shift, most in ((0.0, math.inf), _foot(norm, step)):
        edges = shift + np.arange(cells + 1) * step
        (left, right), cut = _halves(norm, edges), _cuts(norm, edges)
        gaps = step * (1 + 1e-6) * left * right / np.maximum(left + right, 1e-300)
        less = np.maximum(np.append(gaps, gaps[-1]), np.append(0.0, gaps))
        put = edges * ndtr(cut) - ndtr(cut - norm) - less
        if shift:
            put[0], put[1] = 0.0, min(put[1], most * step)
        none = np.flatnonzero(put[1:] <= ROUNDED * edges[1:])
        first = int(none[-1]) + 2 if len(none) else 0 if shift else 1
        if first > cells - 3 or (not shift and edges[first] >= 1):
            continue
        masses = np.append(left, 0.0) + np.append(0.0, right)
        masses[1:-1] -= np.diff(less, 2) / step
        put[first] = 0.0
        masses[first : first + 3] = np.nan
        curve = _convex(edges[first:], put[first:], masses[first:])
        if curve is None or curve[1][0] > 1:
            continue
        places, masses = curve
        found = np.zeros(cells + 1)
        found[np.rint((places - shift) / step).astype(int)] = masses
        found[-1] = 0.0
        return shift, found
    return None


def _foot(norm: float, step: float) -> tuple[float, float]:
    """A shift that is the mean of Y where it is below shift + step, and the chance of that."""
    shift = chance = 0.0
    for _ in range(40):
        cut = float(_cuts(norm, np.array([shift + step]))[0])
        chance = float(ndtr(cut))
        shift = float(ndtr(cut - norm)) / max(chance, 1e-300)
    return shift * (1 - ROUNDED), chance


def _convex(places: Any, put: Any, masses: Any) -> tuple[Any, Any] | None:
    """The places and masses of the least convex curve through points that begin with zero. `masses`
    are those of the points as they are, told more closely than differences tell them, but for the
    first three; the last is the slope that is left.
    """
    changed = np.arange(3)
    for _ in range(MOST_ROUNDS):
        rise = np.diff(put, append=put[-1]) / np.diff(places, append=2 * places[-1])
        masses[changed] = np.diff(rise, prepend=0)[changed]
        bad = np.flatnonzero(masses[1:-1] < 0) + 1
        if not bad.size:
            return places, masses
        bad = bad[np.diff(bad, prepend=-1) > 1]  # neighbours may be saved by it
        around = np.unique(places[np.concatenate([bad - 1, bad + 1])])
        places, put, masses = (np.delete(row, bad) for row in (places, put, masses))
        changed = np.searchsorted(places, np.setdiff1d(around, places[-1:]))
    return None


def _halves(norm: float, edges: Reals) -> tuple[Reals, Reals]:
    """What moves to the left and to the right end of every cell."""
    cut = _cuts(norm, edges)
    mass, moment = _between(cut), _between(cut - norm)
    right = np.clip((moment - edges[:-1] * mass) / np.diff(edges), 0, mass)
    return mass - right, right


def _cuts(norm: float, values: Reals) -> Reals:
    """Where Y reaches these values."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(values) / norm + norm / 2)


def _between(edges: Reals) -> Reals:
    """Standard normal mass between neighbouring edges; in the upper half by the upper tails, which
    keep their relative precision.
    """
    lower, upper = np.diff(ndtr(edges)), -np.diff(ndtr(-edges))
    return np.asarray(np.where(edges[:-1] > 0, upper, lower))


def law(
    masses: Reals, step: float, count: int, low: int, cells: int, shift: float = 0.0
) -> GridLaw:
    """The law of the mean of `count` variables with these masses at shift, shift + step, ...: what Q
    has, and what P has, whose density in Q is the mean itself; at `cells` points from `low` on.
    """
    size = scipy.fft.next_fast_len(cells if low else ROOM * cells, real=True)
    own = np.arange(len(masses))
    sized = masses * (own * step + shift)
    over, under = _outside(masses, sized, count, low, low + size)
    damping = 0.0 if low else min(20.0, max(0.0, math.log(over / SMALL)))
    damped = np.exp(-damping / size * own)
    one, moved = (
        scipy.fft.rfft(np.bincount(own % size, part * damped, size).astype(np.longdouble))
        for part in (masses, sized)
    )
    rest = _power(one, count - 1)
    points = low + np.arange(cells)
    undamp = np.exp(damping / size * points)
    p, q = (
        np.maximum(scipy.fft.irfft(s, size)[points % size].astype(float) * undamp, 0.0)
        for s in (moved * rest, one * rest)
    )
    # Every value of a transform errs by a few units for each level, relative to the sum of its
    # inputs, which is about one; a power multiplies that by its exponent. An inverse transform
    # takes the mean of such errors, and adds as much.
    modulus = np.abs(one).astype(float)
    errors = (modulus ** (count - 1) * 3 + count * modulus ** max(count - 2, 0)).mean()
    rounding = 16 * UNIT * math.log2(size) * float(errors) * max(1.0, float(sized.sum()))
    lost = rounding * float(undamp.sum()) + 2 * UNIT * cells + math.exp(-damping) * over + under
    value = shift + points * (step / count)
    q = np.where(value >= 1, p / np.maximum(value, 1.0), q)
    p = np.where(value >= 1, p, q * value)
    beyond = max(0.0, 1 - float(p.sum())) + lost + count * ROUNDED
    return GridLaw(value, p, q, beyond, lost)


def jumps(norm: float, count: int, many: float) -> GridLaw:
    """A law that is at most that of y in the convex order, for large sums: all Y_k below a cut are
    replaced by their mean, and of those above it, `many` on average, one is distinguished.
    """
    top = -float(ndtri(many / count))
    points = np.linspace(top, top + norm + 12, 4001)
    mass, moment = _between(points), _between(points - norm)
    under, mean = float(ndtr(top)), float(ndtr(top - norm)) / float(ndtr(top))
    kept = mass > 0
    one = count * under ** (count - 1) * mass[kept]
    value = ((count - 1) * mean + moment[kept] / mass[kept]) / count
    none = under**count
    values, q = np.append(mean, value), np.append(none, one)
    p = values * q
    rest_q, rest_p = max(0.0, 1 - float(q.sum())), max(0.0, 1 - float(p.sum()))
    if rest_q > SURE * ROUNDED:
        values, q, p = (
            np.append(a, b) for a, b in ((values, rest_p / rest_q), (q, rest_q), (p, rest_p))
        )
    order = np.argsort(values)
    return GridLaw(values[order], p[order], q[order], 0.0, count * ROUNDED)


def _power(values: Any, exponent: int) -> Any:
    """By squaring, which is much faster here than `**`."""
    found = np.ones_like(values)
    while exponent:
        found = found * values if exponent % 2 else found
        exponent //= 2
        values = values * values if exponent else values
    return found


def _outside(masses: Reals, sized: Reals, count: int, low: int, top: int) -> tuple[float, float]:
    """Bounds on what P or Q has of sums of `top` cells or more, and of less than `low` (Chernoff)."""
    kept = np.flatnonzero(masses > 0)
    places, masses, sized, found = kept, masses[kept], sized[kept], []
    mean, square = float(masses @ places), float(masses @ places**2)
    usual = np.arange(2, 17, 2) / math.sqrt(max(square - mean**2, 1e-12) * count)
    rates = np.sort(np.concatenate([usual, np.geomspace(4, 500, 8) / (top - low)]))
    for end, sign in ((top, 1), (low, -1)):
        logs = [0.0 if end else -math.inf]
        for rate in sign * rates:
            powers = rate * (places - end / count)
            if powers.max() > 600:
                break
            grown = np.exp(powers)
            one, moved = float(masses @ grown), float(sized @ grown)
            if one > 1e-250:
                logs.append((count - 1) * math.log(one) + math.log(max(one, moved)))
        found.append(2 * math.exp(max(min(logs), -690.0)))
    return found[0], found[1]


def log_moments(norm: float, count: int) -> Reals:
    """log E_Q y^a for a = 0, ..., MOST_ORDER, exact but for rounding: the coefficients of a power of
    the series of one Y's moments.
    """
    order = np.arange(MOST_ORDER + 1)
    one = order * (order - 1) / 2 * norm**2 - gammaln(order + 1)
    found, power, left = np.where(order == 0, 0.0, -np.inf), one, count
    while left:
        found = _product(found, power) if left % 2 else found
        left //= 2
        power = _product(power, power) if left else power
    return np.asarray(found + gammaln(order + 1) - order * math.log(count))


def _product(one: Reals, other: Reals) -> Reals:
    """The logs of the coefficients of a product of two series."""
    shifted = [np.append(np.full(k, -np.inf), other[: len(other) - k]) for k in range(len(other))]
    return np.asarray(logsumexp(one[:, None] + np.array(shifted), axis=0))


def log_laplace(norm: float, count: int, rates: Reals) -> Reals:
    """log E_Q exp(-rate y), from above."""
    x = np.linspace(-14, 14, 1401)
    weights = -(x**2) / 2 + math.log((x[1] - x[0]) / math.sqrt(2 * math.pi))
    less = -np.expm1(norm * x - norm**2 / 2)
    one = logsumexp(rates[:, None] / count * less + weights, axis=1)  # times e^(rate / count)
    return np.asarray(count * (one + 1e-12 * (1 + rates / count)) - rates)


def log_calls(norm: float, count: int, nodes: Reals) -> Reals:
    """The log of a bound on E_Q (y - node)_+, by moments: exact ones of low orders; of all orders
    the bound as if every pick of a step had been the same (:mod:`dpfy.accounting.bins`).
    """
    grown = np.arange(LARGEST) * norm**2 - math.log(count)
    grown = np.logaddexp(math.log1p(-1 / count), grown) if count > 1 else grown
    logs = np.append(0.0, np.cumsum(grown))[:-1]
    exact = log_moments(norm, count)
    logs[: len(exact)] = np.minimum(logs[: len(exact)], exact)
    order = np.unique(np.geomspace(2, LARGEST - 1, 300).astype(int))
    constants = logs[order] + (order - 1) * np.log(order - 1.0) - order * np.log(order)
    found = constants + 1e-9 * (1 + logs[order]) + np.log(nodes)[:, None] * (1 - order)
    return np.asarray(found.min(axis=1))


def log_puts(norm: float, count: int, nodes: Reals) -> Reals:
    """The log of a bound on E_Q (node - y)_+, by Laplace transforms."""
    spread = math.expm1(min(norm**2, 700.0)) / count
    rates = np.geomspace(0.01, 1e5, 160) / math.sqrt(min(spread, 1.0))
    constants = log_laplace(norm, count, rates) - np.log(rates) - 1 + 1e-9
    return np.asarray((constants + rates * nodes[:, None]).min(axis=1))


def _grids(norm: float, count: int) -> list[tuple[float, int, int]]:
    """Spacing, for one Y, first point and number of points of each grid: the first one fine, and
    over all sums that matter where that needs few enough points.
    """
    spread = math.expm1(min(norm**2, 700.0))
    finest = FINE * min(math.sqrt(spread), 1.0)
    values = np.geomspace(1.0 + 1e-7, 1e30, 4000)
    far = float(values[np.argmax(log_calls(norm, count, values) < FAR)])
    values = 1 - np.geomspace(min(math.sqrt(spread / count), 0.5), 0.999, 1000)
    small = log_puts(norm, count, values) < FAR - 14
    near = float(values[np.argmax(small)]) if small.any() else 0.0
    if near > 0.5:  # sums that lie close to one: a window around it, if it holds all but nothing
        width = 2.5 * (1 - near) * count
        step = max(finest, width / WINDOW_CELLS)
        low, cells = int(near * count / step), math.ceil(width / step)
        masses = split(norm, step, _own(norm, step, cells))
        sized = masses * np.arange(len(masses)) * step
        if step < 8 * finest and sum(_outside(masses, sized, count, low, low + cells)) < NOTHING:
            return [(step, low, cells)]
    reach = max(1 + 10 * math.sqrt(min(spread, 1.0) / count), min(far, MOST_CELLS * finest / count))
    step = max(finest, reach * count / MOST_CELLS)
    step = max(step / 3, min(step, 2 * reach * count / MOST_CELLS))  # finer where that is cheap
    cells = max(64, math.ceil(reach * count / step))
    found = [(step, 0, cells)]
    while cells * step < far * count and len(found) < MOST_GRIDS:
        step *= COARSER
        found.append((step, 0, cells))
    return found


def _own(norm: float, step: float, cells: int) -> int:
    """How many cells the grid of one Y has: those of the sum, and in a window all that matter."""
    return max(cells, min(math.ceil(math.exp(min(12 * norm, 700.0)) / step), WINDOW_CELLS))


def _nodes(norm: float, count: int) -> Reals:
    """Values of y at which the curves are read, 1 among them."""
    spread = math.sqrt(math.log1p(math.expm1(min(norm**2, 700.0)) / count))
    ends = []
    for sign, bound in ((1, log_calls), (-1, log_puts)):
        far = np.geomspace(1e-3 * spread, 600.0, 400)
        with np.errstate(over="ignore"):
            small = bound(norm, count, np.exp(sign * far)) + (far if sign < 0 else 0) < END
        end = float(far[np.argmax(small)]) if small.any() else 600.0
        steps, unit = [0], min(NODE * spread, 0.01)
        while steps[-1] * unit < end:
            steps.append(steps[-1] + max(1, int(GROWTH * steps[-1])))
        ends.append(sign * unit * np.array(steps))
    return np.asarray(np.exp(np.concatenate([ends[1][:0:-1], ends[0]])))


@lru_cache(maxsize=32)
def losses(norm: float, count: int) -> tuple[tuple[Atoms, Atoms], tuple[Atoms, Atoms]]:
    """The losses of removing and of adding the unit: those that dominate, and those attained.

    `norm` is the length of one response in units of the noise, `count` the number of steps.
    """
    nodes, grids = _nodes(norm, count), _grids(norm, count)
    low = nodes < 1
    bounds = np.concatenate(
        [log_puts(norm, count, nodes[low]), log_calls(norm, count, nodes[~low])]
    )
    alone = [gaussian.delta(norm, abs(math.log(v))) * min(v, 1.0) for v in nodes]  # of one Y
    curve = np.minimum(np.exp(np.maximum(bounds, -700.0)), np.array(alone) * (1 + 1e-9) + 1e-300)
    below = []
    for step, low_end, cells in grids:
        own = _own(norm, step, cells) if low_end else cells
        found = law(split(norm, step, own), step, count, low_end, cells).curve(nodes)
        curve = np.minimum(curve, found * (1 + 4 * count * ROUNDED))
        if (less := merged(norm, step, own)) is None:
            continue
        shift, masses = less
        low_end = max(0, int(low_end - shift * count / step))
        below.append(law(masses, step, count, low_end, cells, shift))
    below += [jumps(norm, count, many) for many in (0.3, 0.03, 0.003) if many < count / 2]
    upper = _dominating(nodes, curve)
    return upper, (_attained(below, nodes) if below else None) or (SILENT, SILENT)


def _dominating(nodes: Reals, curve: Reals) -> tuple[Atoms, Atoms]:
    """The pair with the least convex curve through upper bounds at nodes: puts left of 1, calls from
    there on.
    """
    while True:
        last = int((nodes < 1).sum()) - 1
        ends = curve[1:].copy()
        ends[last] += nodes[last + 1] - 1  # a put is a call plus this
        slopes = (ends - curve[:-1]) / np.diff(nodes)
        slopes = np.concatenate([[curve[0] / nodes[0]], slopes, [0.0]])
        masses = np.diff(slopes)
        masses[last + 1] += 1
        bad = masses < 0
        if not bad.any():
            break
        worst = bad & (masses <= np.minimum(np.append(masses[1:], 0), np.append(0, masses[:-1])))
        nodes, curve = nodes[~worst], curve[~worst]
    logs = np.log(nodes)
    zero, infinity = float(slopes[0]), float(curve[-1])
    removed, added = nodes * masses, masses
    kept = removed > 0
    return (
        _atoms(logs[kept], removed[kept], infinity, 0.0),
        _atoms(-logs[added > 0], added[added > 0], zero, 0.0),
    )


def _attained(laws: list[GridLaw], nodes: Reals) -> tuple[Atoms, Atoms] | None:
    """The pair, on the nodes, of a variable that is at most y in the convex order.

    Where the put function of the next, coarser law is first the larger one, that law takes over: the
    larger of two is a bound, too. What is left of it between nodes is as for one cell in `merged`.
    """
    wide = nodes.astype(np.longdouble)
    puts, slopes = [], []
    for one in laws:
        p, q = one.sums(nodes)
        puts.append(np.where(one.reaches(nodes), wide * q - p - one.lost * (1 + nodes), -np.inf))
        slopes.append(q)
    p, q = laws[-1].sums(nodes, True)  # in the end calls, whose rounding does not grow
    put = np.where((nodes > 1) & laws[-1].reaches(nodes), p - wide * q + wide - 1, -np.inf)
    puts, slopes = [*puts, put - 2 * laws[-1].lost], [*slopes, 1 - q]
    best = np.zeros(len(nodes), dtype=int)
    for k in range(1, len(puts)):
        better = (puts[k] > puts[k - 1]) & (nodes > 1) & (best == k - 1)
        if better.any():
            best[int(np.argmax(better)) :] = k
    put, slope = np.choose(best, puts), np.choose(best, slopes)
    lost = max(one.lost for one in laws)
    kept = (put - wide + 1 > SURE * lost) & np.isfinite(put)
    end = (
        int(np.argmin(kept[nodes > 1])) + int((nodes <= 1).sum()) if not kept.all() else len(nodes)
    )
    nodes, put, slope = wide[:end], put[:end], slope[:end]
    chord, width = np.diff(put) / np.diff(nodes), np.diff(nodes)
    left, right = (np.maximum(x, 0) + 2 * lost for x in (chord - slope[:-1], slope[1:] - chord))
    gaps = width * left * right / (left + right)
    put = put - np.maximum(np.append(gaps, gaps[-1]), np.append(gaps[0], gaps))
    short = np.flatnonzero(put <= nodes - 1)  # where nothing is left of the calls
    end = int(short[0]) if len(short) else len(nodes)
    nodes, put = nodes[:end], put[:end]
    first = int(np.flatnonzero(put <= 0)[-1]) + 1 if (put <= 0).any() else 0
    if first > end - 3 or nodes[first] >= 1:
        return None
    put[first] = 0
    rise = np.diff(put[first:], append=put[-1]) / np.diff(nodes[first:], append=2 * nodes[-1])
    curve = _convex(nodes[first:], put[first:], np.diff(rise, prepend=0))
    if curve is None:
        return None
    places, masses = curve
    q = np.asarray(masses[:-1], dtype=float)
    p, logs = np.asarray(masses[:-1] * places[:-1], dtype=float), np.log(places[:-1].astype(float))
    # the rest of P lies further right, where Q has less of it
    p[-1] += max(0.0, min(float(1 - masses[:-1] @ places[:-1]), float(places[-2] * masses[-1])))
    sure = q > 0
    return tuple(  # type: ignore[return-value]
        _atoms(sign * logs[sure], mass[sure], 0.0, max(0.0, 1 - float(mass.sum())))
        for sign, mass in ((1, p), (-1, q))
    )


def _atoms(values: Reals, masses: Reals, infinity: float, cut: float) -> Atoms:
    return Atoms(tuple(values.tolist()), tuple(masses.tolist()), infinity, cut)


def divergences(norm: float, count: int, orders: Reals) -> Reals:
    """Upper bounds on the Rényi divergences, the larger of removing and of adding the unit.

    Moments of whole orders are computed; log E_Q y^a is convex in a and zero at 0 and 1, so chords
    are bounds between. Both directions are at most those of one step that everybody knows.
    """
    whole = np.arange(1, MOST_ORDER + 1)
    removed = np.interp(orders, whole, log_moments(norm, count)[1:], right=math.inf)
    less = np.concatenate([[0.0], _log_inverse_moments(norm, count)])
    added = np.interp(orders - 1, np.arange(len(less)), less, right=math.inf)
    worse = np.maximum(removed, added) * (1 + 1e-9) + 1e-12
    return np.asarray(np.minimum(worse / (orders - 1), orders * norm**2 / 2 * (1 + 1e-12)))


@lru_cache(maxsize=32)
def _log_inverse_moments(norm: float, count: int) -> Reals:
    """log E_Q y^-s for s = 1, 2, ..., MOST_ORDER, from the Laplace transform of y."""
    logs = np.arange(-30.0, 14.0, 0.01)
    laplace = log_laplace(norm, count, np.exp(logs))
    powers = np.arange(1, MOST_ORDER + 1)
    whole = logsumexp(powers[:, None] * logs + laplace, axis=1) + math.log(0.01)
    # left of the range the transform is at most one
    left = powers * logs[0] - np.log(powers)
    # log-concave in the log of its argument (Prekopa), it goes on at most along its last slope
    slope = powers + (laplace[-1] - laplace[-200]) / (logs[-1] - logs[-200])
    rest = powers * logs[-1] + laplace[-1] - np.log(np.maximum(-slope, 1e-9))
    right = np.where(slope < 0, rest, np.inf)
    return np.asarray(logsumexp([whole, left, right], axis=0) - gammaln(powers))
