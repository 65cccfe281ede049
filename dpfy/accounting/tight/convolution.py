"""The tight engine: an upper and a lower bound on epsilon of any composition, at any delta, at a
cost that does not grow with steps.

The loss of one step is rounded up and down onto a fine grid, under a tilt near the saddle point of
the answer. Blocks of steps are composed by FFT; when the sum has become wide, its grid is made
coarser (again rounded up and down), so the arrays stay short whatever the number of steps. The
spacings are chosen for the gap between the two bounds that was asked for. See `lattice` for why
each operation is sound, `docs/accounting.md` for the whole argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpfy.accounting.moments import ROUNDING, Array, LogMoments
from dpfy.accounting.tight.lattice import (
    FACTOR,
    Layers,
    LossLattice,
    coarsen_down,
    coarsen_layers,
    coarsen_up,
    compose,
    compose_layers,
    contract,
    flat,
    spread,
)
from dpfy.accounting.tight.losses import Atoms, LossGrid, PrivacyLoss, TooFine, halves_of_points
from dpfy.core.errors import Internal, Unsupported

TOLERANCE = 1.5e-5
"""Relative error in epsilon that each bound aims for."""
LEAST_EPSILON = 1e-7
"""Below this epsilon the error aimed for is absolute: the tolerance times this."""
TOP = 24
"""How many blocks the last transform composes."""
SLACK = 2.0
"""By which power of e the Chernoff bound at the chosen tilt may exceed delta."""
LARGEST_LOG_TILT = 18.0
"""Tilts up to e^18: epsilons down to 1e-8 are told from zero."""
TAIL = 1e-9
"""Tilted mass that may be cut off, relative to what matters."""
SPARSE, UNDERFLOW = 25.0, 746.0
"""A spacing at which few points count beside the first, and a difference of losses at which none
does: exp(-746) is zero.
"""


@dataclass(frozen=True)
class LossSum:
    """Losses, each a number of times: one direction of a composition."""

    parts: tuple[tuple[PrivacyLoss, int], ...]

    @property
    def infinity(self) -> float:
        """The probability that some release has infinite loss."""
        if any(loss.infinity >= 1 for loss, _ in self.parts):
            return 1.0
        return -math.expm1(sum(count * math.log1p(-loss.infinity) for loss, count in self.parts))

    @property
    def top(self) -> float:
        """The largest finite loss, infinity if there is none."""
        return sum(count * loss.top for loss, count in self.parts)

    @property
    def cut(self) -> float:
        """A bound on the probability that some release was capped away."""
        return sum(count * loss.cut for loss, count in self.parts)

    def capped(self, mass: float) -> LossSum:
        """The same with outliers of probability at most `mass` altogether left out and noted in
        `cut`.

        Heavy tails, which would spoil every tilt, end where they no longer matter.
        """
        total = sum(count for _, count in self.parts)
        return LossSum(tuple((loss.capped(mass / total), count) for loss, count in self.parts))

    def log_mgf(self, s: float) -> LogMoments:
        """log E[exp(sL)] of the sum, its derivatives and a bound on its error."""
        rows = [[count * value for value in loss.log_mgf(s)] for loss, count in self.parts]
        return LogMoments(*(sum(column) for column in zip(*rows, strict=True)))

    def upper(self, s: float) -> float:
        """A certified upper bound on log E[exp(sL)]: that of `log_mgf`. Kept: the search for a tilt
        comes back to the same ones.
        """
        if s not in self._uppers:
            rows = [
                (count * log, count * error)
                for loss, count in self.parts
                for log, error in [_log_moment(loss, s)]
            ]
            logs, errors = zip(*rows, strict=True)
            self._uppers[s] = sum(logs) + sum(errors)
        return self._uppers[s]

    @cached_property
    def _uppers(self) -> dict[float, float]:
        return {}


def _log_moment(loss: PrivacyLoss, s: float) -> tuple[float, float]:
    if isinstance(loss, Atoms):  # which may have thousands of values
        return loss.log_moment(s)
    found = loss.log_mgf(s)
    return found.log, found.error


@dataclass(frozen=True)
class Saddle:
    """Where the answer is expected: epsilon, the tilt in use, how fast log delta falls there, the
    log of by how much the Chernoff bound exceeds delta, and mean and variance of the tilted sum.
    """

    epsilon: float
    tilt: float
    slope: float
    excess: float
    mean: float
    variance: float


def log_peak(tilt: float) -> float:
    """log of the largest value of exp(-tilt t) (1 - exp(-t)) over t > 0."""
    return tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt) if tilt > 0 else 0.0


def sharpest(total: LossSum, delta: float) -> float:
    """The log of the tilt at which the Chernoff bound on epsilon at `delta` is smallest."""

    def bound(log_s: float) -> float:
        s = math.exp(log_s)
        return (total.upper(s) + log_peak(s) - math.log(delta)) / s

    return minimise(bound, math.log(1e-2), math.log(1e2), steepest(total))


def steepest(total: LossSum) -> float:
    """The log of the largest tilt that is of use: where losses end, a larger one would only look at
    the last of them more sharply.
    """
    if not 0 < total.top < math.inf:
        return LARGEST_LOG_TILT
    return min(
        LARGEST_LOG_TILT,
        math.log(2e4 * math.sqrt(sum(count for _, count in total.parts)) / total.top),
    )


def saddle(total: LossSum, delta: float, high: float, guess: float | None = None) -> Saddle:
    """A tilt fit to find epsilon at `delta`, given the log `high` of the sharpest one.

    Errors stay small at any tilt where the Chernoff bound on delta is within a modest factor of
    `delta`; the least such tilt keeps far outliers, which a larger one would put in the middle of
    the picture, at the rim. `guess` is epsilon where it is already known roughly.
    """

    def excess(log_s: float, epsilon: float) -> float:
        s = math.exp(log_s)
        return total.upper(s) + log_peak(s) - s * epsilon - math.log(delta)

    best = math.exp(high)
    epsilon = excess(high, 0.0) / best if guess is None else guess
    low, room = high - 6.0, SLACK + max(0.0, excess(high, epsilon))
    if excess(low, epsilon) > room:
        while high - low > 0.05:
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle, epsilon) > room else (low, middle)
    else:
        high = low
    found = total.log_mgf(math.exp(high))
    return Saddle(
        epsilon, math.exp(high), best, max(0.0, excess(high, epsilon)), found.mean, found.variance
    )


def minimise(function: Callable[[float], float], low: float, high: float, most: float) -> float:
    """A minimum of a unimodal function, to 1e-2, starting from [low, high] and growing down to
    e^-20 and up to `most`.
    """
    low, high = min(low, most - 1), min(high, most)
    while low > -20 and function(low - 0.5) < function(low):
        low, high = low - 3, low
    while high < most and function(high + 0.5) < function(high):
        low, high = high, min(high + 2, most)
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > 2e-2:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2


@dataclass(frozen=True)
class Rounding:
    """Up or down: how a release and a finer lattice are put onto a grid."""

    release: Callable[..., Layers]
    coarsen: Callable[[LossLattice, int], LossLattice]
    needs_smooth: bool


UP, DOWN = Rounding(spread, coarsen_up, False), Rounding(contract, coarsen_down, True)


def final_spacing(total: LossSum, saddle: Saddle, tolerance: float) -> float:
    """The spacing of the last grid: rounding the blocks onto it widens the sum by what moves
    epsilon by the tolerance.
    """
    target = max(saddle.epsilon, 0.05 * math.sqrt(saddle.variance), LEAST_EPSILON) * tolerance
    target = min(
        target, 1 / saddle.tilt
    )  # else rounding up would grow the tilted mass by powers of e
    # Every level of coarsening rounds once more by about as much as the last grid does.
    blocks = sum(
        min(TOP, count) * max(1.0, math.log(count / TOP) / math.log(FACTOR**2))
        for _, count in total.parts
    )
    return math.sqrt(6 * 2 * target / (saddle.slope + 1) / blocks)


def compose_sum(
    total: LossSum, saddle: Saddle, final: float, rounding: Rounding, rough: bool = False
) -> LossLattice:
    """The whole composition on one lattice, rounded up or down, on a grid of about the spacing
    `final`; `rough` spares precision.

    Where that takes too many points the spacing is widened: the bound stays a bound and moves away
    a little.
    """
    for _ in range(8):
        try:
            made = _compose_sum(
                total, saddle, final, rounding, 0.0 if rough else math.exp(min(saddle.excess, 60.0))
            )
        except TooFine:
            final *= 1.7
            continue
        if made.weights.any():
            return made
        break  # every mass has underflowed: nothing can be read off
    raise Unsupported(
        "this composition (its loss spans too many scales)",
        "ask for a larger delta, or use --accountant rdp",
    )


def _compose_sum(
    total: LossSum, saddle: Saddle, final: float, rounding: Rounding, weight: float
) -> LossLattice:
    tail = TAIL * math.exp(-min(saddle.excess, 60.0)) / len(total.parts)
    phases = [
        _phase(loss, count, saddle, final, (rounding, weight), tail) for loss, count in total.parts
    ]
    if len(phases) == 1:
        return compose(phases[0], tail, weight)
    return compose(
        [piece for phase in phases for piece in _onto(phase, final, rounding, tail)], tail, weight
    )


def _onto(
    phase: list[tuple[LossLattice, int]], final: float, rounding: Rounding, tail: float
) -> list[tuple[LossLattice, int]]:
    """The blocks of a phase; where they lie on a grid of another spacing, their composition rounded
    onto the common one.
    """
    if abs(phase[0][0].spacing / final - 1) < 1e-9:
        return phase
    whole = compose(phase, tail)
    keep = whole.weights > 0
    grid = LossGrid(float(whole.positions()[keep][-1]), final, whole.tilt, whole.log_scale)
    halves = halves_of_points(
        whole.positions()[keep],
        np.log(whole.weights[keep]),
        grid,
        whole.error,
        rounding.needs_smooth,
    )
    return [(flat(rounding.release(halves, grid)), 1)]


def _levels(loss: PrivacyLoss, count: int, saddle: Saddle, final: float) -> int:
    """How many times finer than the last the first grid must be, as a power of `FACTOR`.

    A smooth loss is widened by spacing^2 / 6 a step. One whose mass sits close to a grid point is
    widened less: measured here.
    """
    losses, log_weights = loss.nodes(saddle.tilt)
    tilted = np.exp(log_weights + saddle.tilt * losses - loss.log_mgf(saddle.tilt).log)
    mean = float(np.sum(tilted * losses))
    levels = 0
    while TOP * FACTOR ** (2 * levels) < count:
        spacing = final / FACTOR**levels
        offset, spacing = loss.align(spacing, mean)
        place = (losses - offset) / spacing
        place -= np.floor(place)
        if count * float(np.sum(tilted * place * (1 - place))) < TOP / 6 * 0.9:
            break
        levels += 1
    return levels


def _tiers(
    loss: PrivacyLoss, count: int, saddle: Saddle, spacing: float, final: float, smooth: bool
) -> tuple[tuple[float, float, int], ...]:
    """Ranges of losses outside which coarser spacings change the sum by less than a tenth of what
    is allowed.
    """
    losses, log_weights = loss.nodes(saddle.tilt)
    exponent = log_weights + saddle.tilt * losses
    tilted = np.exp(exponent - exponent.max())
    order = np.argsort(losses)
    losses, sums = losses[order], np.cumsum(tilted[order]) / tilted.sum()
    tiers, stride = [], FACTOR
    while stride * spacing < (0.5 if smooth else 1.5) * final:
        step = stride * spacing
        rare = 0.004 * TOP / count * (final / step) ** 2
        if smooth:
            rare = min(rare, 0.05 * TOLERANCE * max(saddle.epsilon, 0.01) / (count * step))
        low, high = np.searchsorted(sums, rare) - 1, np.searchsorted(sums, 1 - rare) + 1
        tiers.append(
            (
                float(losses[max(int(low), 0)]),
                float(losses[min(int(high), len(losses) - 1)]),
                stride,
            )
        )
        stride *= FACTOR
    return tuple(tiers)


def _smoothing(layers: Layers) -> int:
    """How many blocks must be summed before no coarse cell holds most of the mass."""
    block = layers[0]
    cells = -(-len(block.weights) // FACTOR)
    padded = np.zeros((cells + 1) * FACTOR)
    padded[: len(block.weights)] = block.weights
    sums = np.convolve(padded, np.ones(FACTOR), mode="valid")
    heaviest = float(sums.max()) / sum(float(layer.weights.sum()) for layer in layers)
    return (
        1
        if heaviest < 0.2
        else min(1 << 40, math.ceil(math.log(0.03) / math.log(min(heaviest, 1 - 1e-12))))
    )


def _phase(
    loss: PrivacyLoss,
    count: int,
    saddle: Saddle,
    final: float,
    how: tuple[Rounding, float],
    tail: float,
) -> list[tuple[LossLattice, int]]:
    """One loss `count` times, as blocks on one grid, the last one or (where it pays) a finer one:
    [(block, times), (rest, 1)].

    `how` is the rounding and how many times an error counts in the answer.
    """
    rounding, weight = how
    levels = _levels(loss, count, saddle, final)
    log_scale, mean, *_ = loss.log_mgf(saddle.tilt)
    offset, spacing = loss.align(final / FACTOR**levels, mean)
    tiers = _tiers(loss, count, saddle, spacing, final, rounding.needs_smooth)
    grid = LossGrid(offset, spacing, saddle.tilt, log_scale, tiers)
    block = rounding.release(loss.halves(grid, tail / count), grid)
    rest: list[tuple[Layers, int]] = []
    left = count
    for level in range(levels):
        size = max(1, math.ceil(left / TOP / FACTOR ** (2 * (levels - level - 1))))
        if rounding.needs_smooth:
            size = max(size, _smoothing(block))
        if 2 * size > left:
            break
        left, digit = divmod(left, size)
        if digit and left > 2:  # a remainder of more than a block: fewer would not be smooth
            left, digit = left - 1, digit + size
        if digit or rest:
            remainder = compose_layers([(block, digit), *rest], rounding.coarsen, tail, weight)
            rest = [(coarsen_layers(remainder, rounding.coarsen), 1)]
        block = compose_layers([(block, size)], rounding.coarsen, tail / left, weight * left)
        block = coarsen_layers(block, rounding.coarsen)
    return [(flat(block), left), *((flat(layers), times) for layers, times in rest)]


class Reading:
    """Reads delta and epsilon off a composed lattice; `sign` +1 adds the numeric error (upper
    bound), -1 takes it off.
    """

    def __init__(self, lattice: LossLattice, infinity: float, sign: float) -> None:
        positions, tilt = lattice.positions(), lattice.tilt
        if not 0 < float(lattice.weights.sum()) < math.inf or math.isnan(lattice.error):
            raise Internal(
                "the masses of a composition are finite",
                f"their sum is {float(lattice.weights.sum())}",
            )
        self.reference = float(np.sum(lattice.weights * positions)) / float(lattice.weights.sum())
        exponent = -tilt * (positions - self.reference)
        keep = exponent < 300
        self.positions, self.mass = positions[keep], lattice.weights[keep] * np.exp(exponent[keep])
        self.log_scale = lattice.log_scale - tilt * self.reference
        self.tilt, self.infinity, self.sign = tilt, infinity, sign
        self.error = lattice.error
        # Masses, and the scale they are read at, are right up to these factors.
        self.factor = 1 + sign * 1.1 * (
            lattice.relative
            + 16 * ROUNDING * (1 + abs(lattice.log_scale) + abs(tilt * self.reference))
        )

    def slope(self, epsilon: float, step: float) -> float:
        """How fast log delta falls around `epsilon`."""
        values = []
        for at in (epsilon - step, epsilon + step):
            first = int(np.searchsorted(self.positions, at, side="right"))
            values.append(float(np.sum(self.mass[first:] * -np.expm1(at - self.positions[first:]))))
        return (
            math.log(values[0] / values[1]) / (2 * step)
            if values[1] > 0 and values[0] > 0
            else 20.0 / step
        )

    def delta(self, epsilon: float) -> float:
        """The bound on delta at `epsilon`."""
        if epsilon < self.positions[0] and self.sign > 0:
            return 1.0
        at = int(np.searchsorted(self.positions, epsilon, side="right"))
        seen = float(np.sum(self.mass[at:] * -np.expm1(epsilon - self.positions[at:])))
        doubt = self.error * math.exp(
            min(600.0, -self.tilt * (epsilon - self.reference) + log_peak(self.tilt))
        )
        value = self.factor * seen + self.sign * doubt
        if value <= 0:
            return self.infinity
        return min(1.0, self.infinity + math.exp(min(0.0, self.log_scale + math.log(value))))

    def epsilon(self, delta: float) -> float:
        """The least epsilon at which an upper bound is at most `delta`; the largest at which a
        lower bound is at least it.

        Infinity, or minus infinity for a lower bound, where there is none on the lattice.
        """
        low, high = self._cell(delta)
        if not math.isfinite(low + high):
            return math.inf if self.sign > 0 else -math.inf
        while high - low > 1e-12 * (1 + abs(high)):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high if self.sign > 0 else low

    def _discounted(self) -> Array:
        """For every point x_k the sum over x_j >= x_k of mass_j exp(x_k - x_j), in stretches short
        enough for the exponentials.
        """
        x, result = self.positions, np.empty_like(self.mass)
        if (
            len(x) > 1 and (gap := float(x[1] - x[0])) > SPARSE
        ):  # hardly a point in a stretch: the few that count, one after the other
            result[:] = self.mass
            for further in range(1, min(len(x), math.ceil(UNDERFLOW / gap) + 1)):
                result[:-further] += self.mass[further:] * np.exp(x[:-further] - x[further:])
            return result
        stop, carried, after = len(x), 0.0, float(x[-1])
        while stop > 0:
            start = int(np.searchsorted(x, x[stop - 1] - 300.0))
            part = x[start:stop] - x[stop - 1]
            sums = np.cumsum((self.mass[start:stop] * np.exp(-part))[::-1])[::-1]
            result[start:stop] = np.exp(part) * (
                sums + carried * math.exp(min(0.0, float(x[stop - 1]) - after))
            )
            stop, carried, after = start, float(result[start]), float(x[start])
        return result

    def _cell(self, delta: float) -> tuple[float, float]:
        """Neighbouring points between which the bound on delta falls through `delta`, the last such
        pair.
        """
        x = self.positions
        seen = np.cumsum(self.mass[::-1])[::-1] - self._discounted()
        exponent = -self.tilt * (x - self.reference) + log_peak(self.tilt)
        value = self.factor * seen + self.sign * self.error * np.exp(np.minimum(exponent, 600))
        level = math.exp(min(700.0, math.log(max(delta - self.infinity, 1e-320)) - self.log_scale))
        above = np.flatnonzero(value > level)
        if delta <= self.infinity:
            return (math.nan, math.nan) if self.sign > 0 else (float(x[-1]), float(x[-1]))
        if not len(above):
            if self.sign > 0:
                return float(x[0]), float(x[0])
            lows = [float(x[0]) - step / (1 + self.tilt) for step in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)]
            return next(
                ((low, float(x[0])) for low in lows if self.delta(low) > delta),
                (math.nan, math.nan),
            )
        at = int(above[-1])
        # One cell more on each side: the running sums place the crossing only up to their own
        # round-off.
        high = float(x[min(at + 2, len(x) - 1)])
        for low in (float(x[max(at - 1, 0)]), float(x[at])):
            if self.delta(high) <= delta and (self.sign > 0 or self.delta(low) > delta):
                return low, high
        return math.nan, math.nan
