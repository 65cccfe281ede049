"""Measures on a grid of losses, tilted: rounding them up or down in the order of privacy, composing
them, reading off delta.

A point at loss g carries P-mass ``weights * exp(log_scale - tilt * g)``. With the tilt near the
saddle point of the answer, the part of the distribution that decides delta has weights of order
one, so that round-off is relative to what matters.

Rounding up (`spread`) splits the mass of a cell between its ends so that its P- and Q-mass stay:
the log ratio is spread, hence the new pair dominates the old one (connect-the-dots, Doroshenko et
al. 2022). Rounding down (`contract`) merges the mass around a point, and a little of the
neighbouring points' mass, so that the ratio is exactly that of the point; merging is
post-processing, so the old pair dominates the new one. Both change the loss in second order only.
Every other error (truncation, wrap-around, FFT round-off, arithmetic) is bounded in tilted total
mass, which `pld.Reading` turns into a bound on delta.

Composition of measures in layers: a fine grid where most of the mass lies, coarser ones for what
is rare.

Write S for a layered measure up to some layer, M for the next layer and C for rounding onto its
grid. The n-fold composition of S + M is that of S, plus every term in which M takes part: (C(S) +
M)^n - C(S)^n, on the coarser grid. The difference is a sum of products of measures, each rounded
the same way (up or down), so the whole is; and what is rounded onto the coarser grid counts only as
often as M occurs. The arrays stay short although the losses of a step may reach a million times as
far as they usually lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.accounting.moments import ROUNDING, Array
from dpfy.accounting.tight.losses import MOST_POINTS, Halves, LossGrid, TooFine

LENT = 0.45
"""The part of its mass that a point may lend to each neighbour."""
FACTOR = 5
"""Coarsening between transforms, and from one layer to the next (odd)."""
VISIBLE = 2e-4
"""A bound on round-off, relative to delta, from which on extended precision is used; far earlier
for transforms up to `SHORT`.
"""
SHORT = 1 << 16


@dataclass(frozen=True)
class LossLattice:
    """A tilted measure on the points ``offset + spacing * (start + k)``.

    Guarantees: it differs from one that exactly dominates (or is dominated by) the described
    release by at most `error` in tilted total mass and by the factor 1 +- `relative` in every mass.
    """

    offset: float
    spacing: float
    start: int
    weights: Array
    tilt: float
    log_scale: float
    error: float
    relative: float = 0.0

    def positions(self) -> Array:
        """The losses of the points."""
        return self.offset + self.spacing * (self.start + np.arange(len(self.weights)))


Layers = tuple[LossLattice, ...]
"""A measure as a sum of lattices on one offset, each `FACTOR` times coarser than the one before.
Error and relative error of the whole are those of the first; the others carry none.
"""


def spread(halves: Halves, grid: LossGrid) -> Layers:
    """Round a release up onto the grid.

    Guarantees: up to `error` the result dominates the release; its P- and Q-mass are those of the
    release.
    """
    gaps = grid.spacing * np.diff(halves.index)
    up, fall = np.exp(grid.tilt * gaps), -np.expm1(-gaps)
    # The mass left of a point belongs to the cell whose lower end is the point before: state it
    # relative to that end.
    inner, drop = halves.left[1:] / up, halves.drop[1:] / up
    mass = halves.right[:-1] + inner
    top = np.clip(halves.rise[:-1] + inner * fall - drop * np.exp(-gaps), 0.0, mass * fall) / fall
    weights = np.zeros(len(halves.index))
    weights[:-1] += mass - top
    weights[1:] += top * up
    weights[0] += halves.left[0]
    weights[-1] += halves.right[-1]
    return _layers(grid, halves, weights, halves.slack, halves.error)


def contract(halves: Halves, grid: LossGrid) -> Layers:
    """Round a release down onto the grid.

    Guarantees: up to `error` the result is dominated by the release.
    """
    weights, rest = _merge(halves, grid.spacing * np.diff(halves.index), grid.tilt)
    return _layers(grid, halves, weights, -halves.slack, halves.error + rest)


def _layers(grid: LossGrid, halves: Halves, weights: Array, shift: float, error: float) -> Layers:
    """The points in use, sorted by the stride they lie on. Where the finest stride is not in use,
    all go to the finest layer.
    """
    index = halves.index
    if int(index[-1] - index[0]) == len(index) - 1:  # every point of the grid
        return (
            LossLattice(
                grid.offset + shift,
                grid.spacing,
                int(index[0]),
                weights,
                grid.tilt,
                grid.log_scale,
                error,
                halves.relative,
            ),
        )
    gaps = np.diff(index)
    level = np.rint(
        np.log(np.minimum(np.append(gaps[:1], gaps), np.append(gaps, gaps[-1:]))) / math.log(FACTOR)
    ).astype(int)
    level = np.where(
        (level == level.min()) | (index % FACTOR ** np.minimum(level, 24) != 0), 0, level
    )
    result = []
    for k in range(int(level.max()) + 1):
        at = index[level == k] // FACTOR**k
        dense = np.zeros(int(at[-1] - at[0]) + 1 if len(at) else 1)
        start = int(at[0]) if len(at) else 0
        dense[at - start] = weights[level == k]
        doubt = (error, halves.relative) if k == 0 else (0.0, 0.0)
        result.append(
            LossLattice(
                grid.offset + shift,
                grid.spacing * FACTOR**k,
                start,
                dense,
                grid.tilt,
                grid.log_scale,
                *doubt,
            )
        )
    return tuple(result)


def _merge(halves: Halves, gaps: Array, c: float) -> tuple[Array, float]:
    """The mass around each point, the points lying `gaps` apart, moved onto the points from above.

    Tries the halves as they are and with the outermost atoms opened up, and keeps what loses less.
    """
    up = np.exp(c * gaps)
    left, drop, right, rise = (
        part.copy() for part in (halves.left, halves.drop, halves.right, halves.rise)
    )
    _drop_ends(left, drop, right, rise, halves.error)
    plain = _settle(left + right, rise - drop, gaps, up)
    _give_inwards(left, drop, right, rise, gaps, up)
    opened = _settle(left + right, rise - drop, gaps, up)
    return _nonnegative(
        max(plain, opened, key=lambda weights: float(weights.sum())), gaps, c, halves.error
    )


def _settle(mass: Array, excess: Array, gaps: Array, up: Array) -> Array:
    """Atoms put exactly onto their points by merging.

    The excess of an atom is the integral of 1 - exp(g - L): zero if its ratio P/Q is that of the
    point g. An atom above its point is merged with as much of the mass one point below as brings
    the ratio down to the point, one below with mass from above. Where the neighbour has too little
    to lend, only a part `kept` of the atom is merged; the rest is moved down, to its point or to
    the one before, at the same P-mass. Merging and moving down both lower the privacy curve
    everywhere, so their sum does.
    """
    need_below, need_above = (
        np.maximum(excess[1:], 0.0) / np.expm1(gaps),
        np.maximum(-excess[:-1], 0.0) / -np.expm1(-gaps),
    )
    kept = np.ones(len(mass))
    kept[-1] = float(excess[-1] >= 0)
    for _ in range(4):  # who keeps less can lend less
        with np.errstate(divide="ignore", invalid="ignore"):
            share = LENT * kept[1:] * mass[1:] / up / need_above
        kept[:-1] = np.where(need_above > 0, np.minimum(1.0, share), 1.0)
    from_above = need_above * kept[:-1]
    from_below = np.minimum(need_below, LENT * kept[:-1] * mass[:-1] * up)
    weights = kept * mass
    weights[1:] += from_below - from_above * up
    weights[:-1] += from_above - from_below / up
    weights[:-1] += ((1 - kept) * mass)[1:] / up
    return weights


def _drop_ends(left: Array, drop: Array, right: Array, rise: Array, noise: float) -> None:
    """Leave out what lies beyond the ends of the mass that can be distinguished from numeric noise: less
    mass is dominated. In place.
    """
    sums = np.cumsum(left + right)
    low, high = np.searchsorted(sums, noise), np.searchsorted(sums, sums[-1] - noise) + 1
    for part in (left, drop, right, rise):
        part[:low] = 0.0
        part[high:] = 0.0


def _give_inwards(
    left: Array, drop: Array, right: Array, rise: Array, gaps: Array, up: Array
) -> None:
    """Hand the inner half of the outermost atoms to their neighbours, so that none needs mass from
    beyond the ends. In place.
    """
    filled = np.flatnonzero(left + right > 0)
    if not len(filled):
        return
    for k in range(int(filled[0]), len(gaps)):
        if rise[k] <= drop[k] and left[k] + right[k] > 0:
            break
        left[k + 1] += right[k] * up[k]
        drop[k + 1] += (math.expm1(gaps[k]) * right[k] - math.exp(gaps[k]) * rise[k]) * up[k]
        right[k] = rise[k] = 0.0
        if left[k] > 0:
            break
    filled = np.flatnonzero(left + right > 0)
    for k in range(int(filled[-1]) - 1, -1, -1):
        if drop[k + 1] <= rise[k + 1] and left[k + 1] + right[k + 1] > 0:
            break
        right[k] += left[k + 1] / up[k]
        rise[k] += (-math.expm1(-gaps[k]) * left[k + 1] - math.exp(-gaps[k]) * drop[k + 1]) / up[k]
        left[k + 1] = drop[k + 1] = 0.0
        if right[k + 1] > 0:
            break


def _nonnegative(weights: Array, gaps: Array, c: float, allowed: float) -> tuple[Array, float]:
    """Cancel negative masses against Q-mass at higher losses: moving Q-mass to a lower loss only
    lowers the curve.

    The smallest ones, together at most `allowed`, are dropped. Returns what was dropped, in tilted
    mass: the caller counts it as error.
    """
    places = np.flatnonzero(weights < 0)
    if not len(places):
        return weights, 0.0
    order = places[np.argsort(-weights[places])]
    sums = np.cumsum(-weights[order])
    small = order[sums <= allowed]
    dropped = float(sums[len(small) - 1]) if len(small) else 0.0
    weights[small] = 0.0
    for k in np.sort(order[len(small) :]):
        debt, at = 0.0, int(k)
        while at < len(weights):
            value = float(weights[at]) - debt
            weights[at] = max(value, 0.0)
            if value >= 0:
                break
            growth = math.exp((c + 1) * gaps[at]) if at < len(gaps) else 1.0
            debt, at = -value * growth, at + 1
        if at == len(weights):
            # Nothing above to merge with: leave these points and the one that needed their mass
            # out. Less mass is dominated.
            weights[max(k - 1, 0) :] = 0.0
            break
    return np.maximum(weights, 0.0), dropped


def coarsen_up(lattice: LossLattice, factor: int) -> LossLattice:
    """Round up onto every `factor`-th point. Guarantees: the result dominates."""
    if factor == 1:
        return lattice
    h, c = lattice.spacing, lattice.tilt
    shift = lattice.start % factor
    cells = -(-(shift + len(lattice.weights)) // factor)
    padded = np.zeros(cells * factor)
    padded[shift : shift + len(lattice.weights)] = lattice.weights
    table, j = padded.reshape(cells, factor), np.arange(factor)
    share = -np.expm1(-h * j) / -math.expm1(-h * factor)
    weights = np.zeros(cells + 1)
    weights[:-1] += _dot(table, (1 - share) * np.exp(-c * h * j))
    weights[1:] += _dot(table, share * np.exp(c * h * (factor - j)))
    growth = math.exp(c * h * factor)
    return replace(
        lattice,
        spacing=h * factor,
        start=(lattice.start - shift) // factor,
        weights=weights,
        error=lattice.error * growth,
    )


def coarsen_down(lattice: LossLattice, factor: int) -> LossLattice:
    """Round down onto every `factor`-th point, `factor` odd. Guarantees: the result is
    dominated.
    """
    if factor == 1:
        return lattice
    h, c, half = lattice.spacing, lattice.tilt, factor // 2
    shift = (lattice.start + half) % factor
    cells = -(-(shift + len(lattice.weights)) // factor)
    padded = np.zeros(cells * factor)
    padded[shift : shift + len(lattice.weights)] = lattice.weights
    table, j = padded.reshape(cells, factor), np.arange(factor) - half
    base = np.exp(-c * h * j)
    bend = base * np.abs(np.expm1(-h * j))
    below, above = slice(0, half + 1), slice(half + 1, factor)
    start = (lattice.start + half - shift) // factor
    halves = Halves(
        np.arange(start, start + cells),
        _dot(table[:, above], base[above]),
        _dot(table[:, above], bend[above]),
        _dot(table[:, below], base[below]),
        _dot(table[:, below], bend[below]),
        lattice.error,
        0.0,
    )
    weights, rest = _merge(halves, np.full(cells - 1, h * factor), c)
    error = lattice.error * math.exp(c * h * factor) + rest
    return replace(lattice, spacing=h * factor, start=start, weights=weights, error=error)


def compose(
    parts: Sequence[tuple[LossLattice, int]], tail: float, weight: float = 1.0
) -> LossLattice:
    """The sum of independent losses: each lattice `count` times, all of one spacing and tilt.

    An error of the result counts `weight` times in the answer; where that would show, the
    transforms use extended precision.

    Guarantees: `error` of the result covers the errors of the parts, what wraps around or falls
    outside (at most 4 `tail`) and the round-off of the transforms.
    """
    parts = [(part, count) for part, count in parts if count > 0]
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    return compose_without(parts, (), tail, weight)


def compose_without(
    parts: Sequence[tuple[LossLattice, int]],
    inner: Sequence[tuple[LossLattice, int]],
    tail: float,
    weight: float,
) -> LossLattice:
    """`compose(parts)` less `compose(inner)`, where each of `inner` is a part of its partner in
    `parts` and has its count.

    Guarantees: as `compose`, the errors of `parts` counted and those of `inner` not.
    """
    spacing, tilt = parts[0][0].spacing, parts[0][0].tilt
    if not all(
        part.weights.any() for part, _ in parts
    ):  # rounding down left nothing on points so far apart
        raise TooFine
    low, high = _window(parts, tail)
    size = _fast_size(high - low + 1)
    if size > MOST_POINTS:
        raise TooFine
    total = sum(count for _, count in parts)
    visible = weight * math.sqrt(size) * total * 3 * ROUNDING * math.log2(size)
    kind = np.longdouble if visible > (VISIBLE if size > SHORT else 5e-2 * VISIBLE) else np.float64
    bases = [_base(part) for part, _ in parts]
    spectrum, noise = _spectrum(parts, bases, size, kind)
    if inner:
        less, more_noise = _spectrum(inner, bases, size, kind)
        spectrum, noise = spectrum - less, noise + more_noise
    low -= sum(count * base for (_, count), base in zip(parts, bases, strict=True))
    weights = np.roll(np.fft.irfft(spectrum, size).astype(np.float64), -(low % size))
    noise += 3 * float(np.finfo(kind).eps) * math.log2(size) * math.sqrt(size) * _norm(weights)
    start = low + sum(count * base for (_, count), base in zip(parts, bases, strict=True))
    offset, log_scale = (
        sum(count * part.offset for part, count in parts),
        sum(count * part.log_scale for part, count in parts),
    )
    error = (1.05 * sum(count * part.error for part, count in parts) + 4 * tail) * largest_mass(
        parts
    ) + 2 * noise
    relative = 2 * ROUNDING + sum(count * part.relative for part, count in parts)
    return _trimmed(
        LossLattice(
            offset, spacing, start, np.maximum(weights, 0.0), tilt, log_scale, error, relative
        ),
        tail,
    )


def largest_mass(parts: Sequence[tuple[LossLattice, int]]) -> float:
    """The total tilted mass of a composition, at least 1."""
    return math.exp(
        min(
            700.0,
            max(0.0, sum(count * math.log(float(part.weights.sum())) for part, count in parts)),
        )
    )


def _spectrum(
    parts: Sequence[tuple[LossLattice, int]], bases: Sequence[int], size: int, kind: Any
) -> tuple[NDArray[Any], float]:
    """The transform of the composition, each part with its base at the origin, and a bound on its
    round-off in total mass.
    """
    epsilon = float(np.finfo(kind).eps)
    unit = 3 * epsilon * math.log2(size)
    spectrum: NDArray[Any] = np.ones(1)
    doubt: Array = np.zeros(1)
    for (part, count), base in zip(parts, bases, strict=True):
        folded = _fold(part, base, size)
        transform = np.fft.rfft(folded.astype(kind))
        # An output of the transform is a sum over log2(size) stages of partial sums of the weights:
        # its error is below eta.
        eta = unit * float(folded.sum())
        doubt = doubt + count * (
            eta / np.maximum(np.abs(transform).astype(np.float64), eta) + 8 * epsilon
        )
        spectrum = spectrum * _power(transform, count)
    noise = 1.2 * math.sqrt(2) * _norm(np.minimum(doubt, 2.0) * np.abs(spectrum).astype(np.float64))
    return spectrum, noise


def _dot(table: Array, vector: Array) -> Array:
    """table @ vector without BLAS, whose threads cost more than they save on arrays this short."""
    return np.asarray(np.einsum("...j,j->...", table, vector))


def _norm(values: Array) -> float:
    """The Euclidean norm, also without BLAS."""
    return math.sqrt(float(np.einsum("i,i->", values, values)))


def _trimmed(lattice: LossLattice, tail: float) -> LossLattice:
    """Without the ends that hold at most `tail` each."""
    low = int(np.searchsorted(np.cumsum(lattice.weights), tail))
    high = len(lattice.weights) - int(np.searchsorted(np.cumsum(lattice.weights[::-1]), tail))
    if high <= low:
        return lattice
    return replace(
        lattice,
        start=lattice.start + low,
        weights=lattice.weights[low:high],
        error=lattice.error + 2 * tail,
    )


def _power(values: NDArray[Any], count: int) -> NDArray[Any]:
    """values ** count by repeated squaring."""
    result: NDArray[Any] | None = None
    while True:
        if count & 1:
            result = values if result is None else result * values
        count >>= 1
        if not count:
            return result if result is not None else np.ones_like(values)
        values = values * values


def _base(part: LossLattice) -> int:
    """The index near the mean: phases stay small when it is taken as the origin."""
    weights = part.weights
    return part.start + round(float(_dot(weights, np.arange(len(weights)))) / float(weights.sum()))


def _fold(part: LossLattice, base: int, size: int) -> Array:
    """The weights on a circle of `size` points with the base at 0."""
    at = (part.start - base + np.arange(len(part.weights))) % size
    return np.bincount(at, weights=part.weights, minlength=size)


def _window(parts: Sequence[tuple[LossLattice, int]], tail: float) -> tuple[int, int]:
    """Indices between which all but `tail` of the tilted mass lies on each side (Chernoff)."""
    bins = []
    mean, variance = 0.0, 0.0
    for part, count in parts:
        group = max(1, len(part.weights) // 256)
        cells = -(-len(part.weights) // group)
        padded = np.zeros(cells * group)
        padded[: len(part.weights)] = part.weights
        sums = padded.reshape(cells, group).sum(axis=1)
        edge = part.start + group * np.arange(cells)
        keep = sums > 0
        bins.append((sums[keep], edge[keep].astype(np.float64), group, count))
        total = float(sums.sum())
        middle = float(_dot(sums, edge)) / total
        mean += count * middle
        variance += count * (float(_dot(sums, (edge - middle) ** 2)) / total + group**2)
    rates = np.geomspace(0.1, 200, 24)[:, None] / math.sqrt(variance)
    ends = []
    for sign in (-1, 1):
        bound = np.full(len(rates), -math.log(tail))
        for sums, edge, group, count in bins:
            exponent = rates * (sign * (edge + (group - 1 if sign > 0 else 0))) + np.log(sums)
            top = exponent.max(axis=1)
            bound += count * (top + np.log(np.exp(exponent - top[:, None]).sum(axis=1)))
        ends.append(float((bound / rates[:, 0]).min()))
    return math.floor(-ends[0]) - 1, math.ceil(ends[1]) + 1


def _fast_size(least: int) -> int:
    """The smallest 2^a, 3*2^a or 5*2^a that is at least `least`: sizes on which the transform is
    quick.
    """
    sizes = [k << a for k in (1, 3, 5) for a in range(40) if k << a >= max(least, 16)]
    return min(size for size in sizes if size % 2 == 0)


Coarsen = Callable[[LossLattice, int], LossLattice]
NOISE = 0.02
"""The part of the error up to which rounding an inner sum may drop negative masses."""


def compose_layers(
    parts: Sequence[tuple[Layers, int]], coarsen: Coarsen, tail: float, weight: float
) -> Layers:
    """The sum of independent losses, each `count` times, in layers on the same grids; see
    `lattice.compose`.

    Guarantees: rounded the way `coarsen` rounds; the error of the result covers the errors of the
    parts and everything cut, wrapped around or rounded off on the way.
    """
    parts = [(layers, count) for layers, count in parts if count > 0]
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    depth = max(len(layers) for layers, _ in parts)
    sums = [_sums(layers, depth, coarsen) for layers, _ in parts]
    result, error = [], 0.0
    for k in range(depth):
        whole = [(rows[k][0], count) for rows, (_, count) in zip(sums, parts, strict=True)]
        inner = (
            [(rows[k][1], count) for rows, (_, count) in zip(sums, parts, strict=True)] if k else []
        )
        layer = compose_without(whole, inner, tail, weight)
        mass = largest_mass(whole)
        error += layer.error + 1.05 * mass * sum(
            count * rows[k][2] for rows, (_, count) in zip(sums, parts, strict=True)
        )
        result.append(replace(layer, error=0.0, relative=0.0))
    error += 1.05 * mass * sum(count * layers[0].error for layers, count in parts)
    relative = 2 * ROUNDING + sum(count * layers[0].relative for layers, count in parts)
    return (replace(result[0], error=error, relative=relative), *result[1:])


def _sums(
    layers: Layers, depth: int, coarsen: Coarsen
) -> list[tuple[LossLattice, LossLattice, float]]:
    """For every layer: all layers up to it on its grid, those before it on its grid, and the error
    made in rounding them.

    The errors of the layers themselves are the caller's to count, once for all.
    """
    first = replace(layers[0], error=0.0, relative=0.0)
    rows = [(first, first, 0.0)]
    noise = NOISE * layers[0].error
    for k in range(1, depth):
        before = replace(rows[-1][0], error=noise)
        grown = noise * math.exp(before.tilt * before.spacing * FACTOR)
        coarse = coarsen(before, FACTOR)
        dropped = max(0.0, coarse.error - grown * (1 - 1e-12))
        coarse = replace(coarse, error=0.0)
        rows.append((plus(coarse, layers[k]) if k < len(layers) else coarse, coarse, dropped))
    return rows


def plus(one: LossLattice, other: LossLattice) -> LossLattice:
    """The sum of two measures on one grid."""
    start = min(one.start, other.start)
    stop = max(one.start + len(one.weights), other.start + len(other.weights))
    if stop - start > MOST_POINTS:
        raise TooFine
    weights = np.zeros(stop - start)
    for part in (one, other):
        weights[part.start - start : part.start - start + len(part.weights)] += part.weights
    return replace(
        one,
        start=start,
        weights=weights,
        error=one.error + other.error,
        relative=max(one.relative, other.relative),
    )


def coarsen_layers(layers: Layers, coarsen: Coarsen) -> Layers:
    """The finest layer rounded onto the grid of the next one."""
    first = coarsen(layers[0], FACTOR)
    return (plus(first, layers[1]), *layers[2:]) if len(layers) > 1 else (first,)


def flat(layers: Layers) -> LossLattice:
    """All layers on the finest grid."""
    result = layers[0]
    for k, layer in enumerate(layers[1:], 1):
        stride = FACTOR**k
        if stride * len(layer.weights) > MOST_POINTS:
            raise TooFine
        dense = np.zeros(stride * (len(layer.weights) - 1) + 1)
        dense[::stride] = layer.weights
        result = plus(
            result,
            replace(layer, spacing=result.spacing, start=stride * layer.start, weights=dense),
        )
    return result
