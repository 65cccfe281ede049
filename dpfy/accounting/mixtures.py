"""Everything a ledger may hold, as one curve: releases of every language composed without splitting delta.

Releases with an exact pair go to the lattice as they are. Those known by Rényi divergences alone are added up at every order first, the
sum is turned into the pair that dominates it (:mod:`dpfy.accounting.profiles`), and balls-in-bins bring a profile of their own. The pairs
are convolved with the rest: delta(epsilon) of the whole is the mean of the profile at epsilon less the loss of the rest, which at every
order is at most what adding up divergences of everything would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from dpfy.accounting import bins_profile, profiles, rdp
from dpfy.accounting.bins import BinsCurve, MonteCarlo
from dpfy.accounting.leaves import leaves
from dpfy.accounting.losses import Atoms
from dpfy.accounting.moments import Array
from dpfy.accounting.other_losses import subsample_atoms
from dpfy.accounting.pairs import Composition, Release, composition
from dpfy.accounting.profiles import Points
from dpfy.accounting.tuning import selected
from dpfy.core import events as ev
from dpfy.core.errors import Internal, Unsupported
from dpfy.core.events import Event
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

PAIR, LOOSE, SAMPLED, RENYI, BINS = "pair", "loose pair", "sampled Rényi curve", "Rényi curve", "balls in bins"
"""The languages: an exact pair; a pair that is exact for one release only; divergences on a Poisson sample; divergences; a profile."""
Leaves = tuple[tuple[Event, int], ...]
CLOSED = (ev.Zcdp, ev.RenyiCurve)
"""Events whose divergences cost nothing to compute: where there are no others, many more orders are tried."""
MANY = tuple(1 + 10 ** (x / 60) for x in range(-180, 361))
KNOTS = (1.0, *(1 + 10 ** (x / 6) for x in range(-22, 7)))
"""Values of e^epsilon at which the curve of one trial is asked for; between them it lies below its chords."""
MOST_CASES = 64
"""Ways for a unit to lie in named parts of the data; where there are more, the parts are compared by Rényi divergences."""


@dataclass(frozen=True)
class Case:
    """All releases that touch one unit, with the language of each. Computes when asked."""

    adjacency: Adjacency
    rows: tuple[tuple[str, Event, int], ...]

    def of(self, *languages: str) -> Leaves:
        """The releases of these languages."""
        return tuple((leaf, count) for language, leaf, count in self.rows if language in languages)

    @cached_property
    def routes(self) -> list[Curve]:
        """Curves that all hold, so that the least bound counts."""
        spoken = {language for language, _, _ in self.rows}
        if spoken == {RENYI}:
            return [rdp.RenyiCurve(*divergences(self.of(RENYI), self.adjacency))]
        if spoken == {BINS} and len(self.rows) == 1 and self.rows[0][2] == 1:
            return [BinsCurve(self.rows[0][1])]  # type: ignore[arg-type]
        found = [self._curve((PAIR, LOOSE), (RENYI,), bins_profile.profile)]
        if sum(count for _, count in self.of(LOOSE)) > 1:
            found.append(self._curve((PAIR,), (RENYI, LOOSE), bins_profile.profile))
        if BINS in spoken:  # where delta is about as small as the chance that the draws mislead, what is certain is better
            found.append(self._curve((PAIR, LOOSE), (RENYI,), bins_profile.certain))
        return found

    @cached_property
    def lower(self) -> Curve | None:
        """The curve of what is surely released: the exact pairs, and one run of every tuning that makes at least one."""
        from dpfy.accounting.tight import curve_of

        known = [row for row in self.of(PAIR, LOOSE) if not isinstance(row[0], ev.Nothing)]
        for leaf, count in self.of(RENYI):
            if isinstance(leaf, ev.RepeatAndSelect) and math.isfinite(leaf.shape):  # all scores alike: the best is any one run
                known += [(one, n * count) for one, n in leaves(leaf.event) if language(one, self.adjacency) in (PAIR, LOOSE)]
        return curve_of(_composed(tuple(known), self.adjacency)) if known else None

    def _curve(self, exact: tuple[str, ...], renyi: tuple[str, ...], profile: Callable[[ev.BallsInBins], Sides]) -> Curve:
        from dpfy.accounting.tight import curve_of

        parts = _composed(self.of(*exact), self.adjacency)
        more = [(sampled(leaf, self.adjacency), count) for leaf, count in self.of(SAMPLED)]
        if self.of(*renyi):
            more.append((_symmetric(*divergences(self.of(*renyi), self.adjacency)), 1))
        more += [(_release(*profile(leaf)), count) for leaf, count in self.of(BINS)]  # type: ignore[arg-type]
        return curve_of(replace(parts, releases=(*parts.releases, *more)))


Sides = tuple[Points, Points]


class MixtureCurve:
    """Bounds on the privacy curve of a mixture of languages: the worst over where a unit may lie, each by its best route."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`."""
        return max(min(route.epsilon(delta) for route in case.routes) for case in self._cases)

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        return max(min(route.delta(epsilon) for route in case.routes) for case in self._cases)

    def epsilon_lower(self, delta: float) -> float | None:
        """Lower bound on epsilon at `delta`: that of the releases with an exact pair, the rest being free at best. None without any."""
        found = [case.lower.epsilon_lower(delta) for case in self._cases if case.lower is not None]
        known = [value for value in found if value is not None]
        if known and max(known) > self.epsilon(delta):
            raise Internal("an upper bound on epsilon lies above the lower bound", f"{self.epsilon(delta):.9g} is below {max(known):.9g}")
        return max(known) if known else None


def cases(event: Event, adjacency: Adjacency) -> list[Case]:
    """What the releases of `event` are to a unit, for every way in which it may lie in named parts of the data.

    Guarantees: nothing is computed that takes long. A release that no language knows raises `Unsupported`.
    """
    found = []
    for choice in _choices(tuple(leaves(event)), adjacency):
        found.append(Case(adjacency, tuple((language(leaf, adjacency), leaf, count) for leaf, count in choice)))
    return list(dict.fromkeys(found))


def language(leaf: Event, adjacency: Adjacency) -> str:
    """The language in which a release is best known; `Unsupported` where there is none, with the way out."""
    if isinstance(leaf, ev.BallsInBins):
        if (problem := MonteCarlo().why_not(leaf, adjacency)) is not None:
            raise Unsupported(f"BallsInBins under {adjacency.value}", problem)
        return BINS
    try:
        composition(leaf, adjacency)
    except Unsupported as no_pair:
        try:
            if isinstance(leaf, ev.PoissonSampled) and adjacency is not Adjacency.REPLACE_ONE:
                rdp.approximate(leaf.event, adjacency, (2.0,))
                return SAMPLED
            rdp.approximate(leaf, adjacency, (2.0,))
        except Unsupported:
            raise no_pair from None
        return RENYI
    return LOOSE if isinstance(leaf, ev.BoundedRange) else PAIR


def _choices(whole: Leaves, adjacency: Adjacency) -> list[Leaves]:
    """The releases as each unit meets them: of releases on disjoint parts only the ones on the part it lies in.

    Releases over the same names are about the same parts. Over different names every combination counts, also those that no unit has.
    Under replace-one a unit may move from one part to another: there, and where there are too many, the parts are left as they are.
    """
    split: dict[frozenset[str], list[tuple[ev.Parallel, int]]] = {}
    rest: list[tuple[Event, int]] = []
    for leaf, count in whole:
        if isinstance(leaf, ev.Parallel) and adjacency is not Adjacency.REPLACE_ONE:
            split.setdefault(frozenset(name for name, _ in leaf.parts), []).append((leaf, count))
        else:
            rest.append((leaf, count))
    if math.prod(len(names) for names in split) > MOST_CASES:
        return [whole]
    found: dict[Leaves, None] = {}
    for chosen in product(*(sorted(names) for names in split)):
        parts = [
            ev.Repeated(dict(leaf.parts)[name], count)
            for name, group in zip(chosen, split.values(), strict=True)
            for leaf, count in group
        ]
        met = tuple(leaves(ev.Composed((*(ev.Repeated(leaf, count) for leaf, count in rest), *parts))))
        for choice in _choices(met, adjacency) if parts else [met]:
            found[choice] = None
    return list(found)


def _composed(whole: Leaves, adjacency: Adjacency) -> Composition:
    return composition(ev.Composed(tuple(ev.Repeated(leaf, count) for leaf, count in whole)), adjacency)


def divergences(whole: Leaves, adjacency: Adjacency) -> tuple[Array, Array, float]:
    """Orders, the Rényi divergences of all releases together at them, and the chance of an infinite loss.

    Guarantees: upper bounds in both directions, valid for adaptive composition at each order.
    """
    orders = np.asarray(_orders(whole))
    total, infinity = np.zeros(len(orders)), 0.0
    for leaf, count in whole:
        values, chance = _divergences(leaf, adjacency, tuple(orders))
        total, infinity = total + count * values, infinity + count * chance
    return orders, total, infinity


def _orders(whole: Leaves) -> tuple[float, ...]:
    own = {order for leaf, _ in whole if isinstance(leaf, ev.RenyiCurve) for order in leaf.orders}
    usual = MANY if all(isinstance(leaf, CLOSED) for leaf, _ in whole) else rdp.ORDERS
    return tuple(sorted({*usual, *own}))


@lru_cache(maxsize=64)
def _divergences(leaf: Event, adjacency: Adjacency, orders: tuple[float, ...]) -> tuple[Array, float]:
    """Those of one release. The best of a Poisson number of runs is cheaper by the tight curve of one run."""
    values, chance = rdp.approximate(leaf, adjacency, orders)
    if not (isinstance(leaf, ev.RepeatAndSelect) and math.isinf(leaf.shape)) or chance > 0:
        return values, chance
    one, alphas = rdp.divergences(leaf.event, adjacency, orders), np.asarray(orders)
    deltas = _knots(leaf.event, adjacency)
    better = selected(alphas, one, leaf.mean, leaf.shape, lambda epsilon: float(np.interp(math.exp(epsilon), KNOTS, deltas)))
    return np.minimum(values, np.maximum(better, 0.0)), chance


@lru_cache(maxsize=64)
def _knots(event: Event, adjacency: Adjacency) -> tuple[float, ...]:
    """delta of one run at the knots: its true curve is convex in e^epsilon and falls, so chords and the last value are bounds."""
    from dpfy.accounting.tight import Tight

    curve = Tight().curve(event, adjacency)
    return tuple(curve.delta(math.log(t)) for t in KNOTS)


def _symmetric(orders: Array, values: Array, infinity: float) -> Release:
    """The pair of Rényi divergences that hold in both directions."""
    side = profiles.points(profiles.of_renyi(orders, values, infinity))
    both = profiles.dominating(side, side)
    return Release(both, both)


def _release(removed: Points, added: Points) -> Release:
    """The pairs of a profile, each direction forwards by its own bounds and backwards by the other's."""
    return Release(profiles.dominating(removed, added), profiles.dominating(added, removed))


@lru_cache(maxsize=64)
def sampled(leaf: Event, adjacency: Adjacency) -> Release:
    """Releases known by Rényi divergences, on a Poisson sample (Zhu, Dong & Wang 2022, Theorem 11).

    If (P, Q) dominates in one direction, then with the unit present at rate q the pair ((1 - q) Q + q P, Q) dominates for removing it and
    (P, (1 - q) P + q Q) for adding it. The pair here is the same in both directions.
    """
    assert isinstance(leaf, ev.PoissonSampled)
    whole = _symmetric(*divergences(tuple(leaves(leaf.event)), adjacency))
    if leaf.rate == 1 or not isinstance(whole.removed, Atoms):
        return whole
    return Release(thinned_removed(whole.removed, leaf.rate), thinned_added(whole.removed, leaf.rate), touched=leaf.rate)


def thinned_removed(pair: Atoms, rate: float) -> Atoms:
    """((1 - q) Q + q P, Q)."""
    return subsample_atoms(pair, rate, False)


def thinned_added(pair: Atoms, rate: float) -> Atoms:
    """(P, (1 - q) P + q Q): a loss L becomes -log(1 - q + q e^-L), an infinite one -log(1 - q)."""
    losses = [-math.log1p(rate * math.expm1(min(-loss, 700.0))) for loss in pair.losses]
    return Atoms((*losses, -math.log1p(-rate)), (*pair.probabilities, pair.infinity))
