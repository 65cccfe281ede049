"""Everything a ledger may hold, as one curve: releases of every language composed without splitting
delta.

Releases with an exact pair go to the lattice as they are. Those known by Rényi divergences alone
are added up at every order first, the sum is turned into the pair that dominates it
(:mod:`dpfy.accounting.profiles`), and balls-in-bins bring a profile of their own. The pairs are
convolved with the rest: delta(epsilon) of the whole is the mean of the profile at epsilon less the
loss of the rest, which at every order is at most what adding up divergences of everything would
give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from dpfy.accounting import profiles, rdp
from dpfy.accounting.flatten import leaves
from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Points, Profile
from dpfy.accounting.rules import require_sampling, rule_of
from dpfy.accounting.tight.accountant import TightCurve, curve_of
from dpfy.accounting.tight.dominating_pairs import (
    Composition,
    DominatingPair,
    TouchedReleases,
    World,
    composition,
    together,
)
from dpfy.accounting.tight.losses import Atoms
from dpfy.accounting.tight.other_losses import subsample_atoms
from dpfy.accounting.tuning import SelectedProfile, one_run, selected
from dpfy.core import events as ev
from dpfy.core.errors import Internal, Unsupported
from dpfy.core.events import Event
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

PAIR, LOOSE, SAMPLED, RENYI, PROFILE = (
    "pair",
    "loose pair",
    "sampled Rényi curve",
    "Rényi curve",
    "profile",
)
"""The languages: an exact pair; a pair that is exact for one release only; divergences on a Poisson
sample; divergences; a profile.
"""
WIDE = 1.0
"""Choices of a larger range may cost less by their divergences than by their pairs, also where all
else has a pair: both are tried.
"""
WORSE, FAR = 1.01, 0.1
"""A route is not followed whose coarse bound on epsilon is that many times another's, or on log
delta that much above it: close bounds differ about as coarse ones do.
"""
CELLS = (ev.NoisyThreshold, ev.NoisyArgmax)
CHOSEN = (ev.BoundedRange, *CELLS)
"""Events of a family from which every release may be another one: pairs are those of blocks of
them.
"""
CLOSED = (ev.Zcdp, ev.RenyiCurve)
"""Events whose divergences cost nothing to compute: where there are no others, many more orders are
tried.
"""
MANY = tuple(1 + 10 ** (x / 60) for x in range(-180, 361))
KNOTS = (1.0, *(1 + 10 ** (x / 6) for x in range(-22, 7)))
"""Values of e^epsilon at which the curve of one trial is asked for; between them it lies below its
chords.
"""


@dataclass(frozen=True)
class MixturePart:
    """One release, `count` times, and the language in which it is best known; `piece` says to which
    change of the data it is exposed.
    """

    language: str
    leaf: Event
    count: int
    piece: TouchedReleases

    def turned(self, release: DominatingPair) -> DominatingPair:
        """`release` as it is met here."""
        return release.swapped if self.piece.swapped else release

    @property
    def adjacency(self) -> Adjacency:
        """The change of the data."""
        return self.piece.adjacency

    @property
    def wide(self) -> bool:
        """Whether this is a choice of a wide range, or of a cell: its divergences may cost less."""
        return isinstance(self.leaf, CELLS) or (
            isinstance(self.leaf, ev.BoundedRange) and self.leaf.epsilon > WIDE
        )


class MixtureCurve:
    """Bounds on the privacy curve of releases in several languages. Everything that takes long is
    computed when asked for.
    """

    def __init__(self, parts: tuple[MixturePart, ...]) -> None:
        self._parts = parts

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`, by the best route."""
        values = self._coarse(lambda route: route.quick(delta))
        return min(
            route.epsilon(delta)
            for route, value in values
            if value <= WORSE * min(v for _, v in values)
        )

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`, by the best route."""
        logs = self._coarse(lambda route: route.quick_log_delta(epsilon))
        return min(
            route.delta(epsilon) for route, value in logs if value <= min(v for _, v in logs) + FAR
        )

    def _coarse(self, bound: Callable[[TightCurve], float]) -> list[tuple[Curve, float]]:
        """The routes with bounds that are computed at once; without any to tell them apart, where
        not all have some.
        """
        known = (
            all(isinstance(route, TightCurve) for route in self._routes) and len(self._routes) > 1
        )
        return [
            (route, bound(route) if known and isinstance(route, TightCurve) else 0.0)
            for route in self._routes
        ]

    def epsilon_lower(self, delta: float) -> float | None:
        """Lower bound on epsilon at `delta`: that of what is surely released, the rest being free
        at best. None without any.

        Surely released are the releases with an exact pair, and one run of every tuning that makes
        at least one: where all scores are alike the best of them is any one. Of several releases to
        choose from the choice may always be the worst.
        """
        known = tuple(one for part in self._parts for one in _surely(part, delta))
        if not known:
            return None
        exact = (
            self._routes[0] if known == self._parts else curve_of(_composed(known))
        )  # the first route is that of all pairs
        lower = exact.epsilon_lower(delta)
        if lower is not None and lower > self.epsilon(delta):
            raise Internal(
                "an upper bound on epsilon lies above the lower bound",
                f"{self.epsilon(delta):.9g} is below {lower:.9g}",
            )
        return lower

    @cached_property
    def _routes(self) -> list[Curve]:
        """Curves that all hold, so that the least bound counts."""
        if any(map(_best_by_profile, self._parts)):
            return [*self._plain_routes(), self._route((PAIR, LOOSE), (RENYI,), best=True)]
        return self._plain_routes()

    def _plain_routes(self) -> list[Curve]:
        """Those in which every release is read in its own language."""
        spoken = {part.language for part in self._parts}
        if spoken == {RENYI}:
            orders, values, infinity = divergences(self._parts)
            return [rdp.RdpCurve(tuple(orders), values, infinity)]
        if spoken == {PROFILE} and len(self._parts) == 1 and self._parts[0].count == 1:
            return [_profile(self._parts[0]).alone()]
        found = [self._route((PAIR, LOOSE), (RENYI,))]
        if LOOSE in spoken:
            found.append(self._route((PAIR,), (RENYI, LOOSE)))
        if (
            PROFILE in spoken
            # where delta is about as small as the chance that draws mislead, what is certain is
            # better
        ):
            found.append(self._route((PAIR, LOOSE), (RENYI,), certain=True))
        return found

    def _route(
        self,
        exact: tuple[str, ...],
        renyi: tuple[str, ...],
        certain: bool = False,
        best: bool = False,
    ) -> Curve:
        """The curve of all pairs convolved: exact ones, that of the divergences together, those of
        the profiles; with `best` the best of several runs by its profile.
        """
        parts = _composed(self._of(*exact))
        more = [
            (part.turned(sampled(part.leaf, part.adjacency)), part.count)
            for part in self._of(SAMPLED)
        ]
        known = self._of(*renyi)
        if best:
            chosen = tuple(part for part in known if _best_by_profile(part))
            known = tuple(part for part in known if part not in chosen)
            more += [(part.turned(_best(part.leaf, part.adjacency)), part.count) for part in chosen]
        if known:
            more.append((_symmetric(*divergences(known)), 1))
        for part in self._of(PROFILE):
            profile = _profile(part)
            more.append(
                (
                    part.turned(_release(*(profile.certain() if certain else profile.sides()))),
                    part.count,
                )
            )
        return curve_of(replace(parts, releases=(*parts.releases, *more)))

    def _of(self, *languages: str) -> tuple[MixturePart, ...]:
        return tuple(part for part in self._parts if part.language in languages)


def _surely(part: MixturePart, delta: float) -> list[MixturePart]:
    """Releases with an exact pair that are made for sure, or may be, wherever `part` is
    released.
    """
    if part.language in (PAIR, LOOSE):
        return [part]

    def inner(event: Event) -> list[MixturePart]:
        found = sorted_out((replace(part.piece, event=ev.Repeated(event, part.count)),))
        return [one for each in found for one in _surely(each, delta)]

    if isinstance(part.leaf, ev.RepeatAndSelect) and math.isfinite(part.leaf.shape):
        return inner(part.leaf.event)
    if isinstance(part.leaf, ev.OneOf):
        return max(
            map(inner, part.leaf.events),
            key=lambda made: curve_of(_composed(made)).epsilon_lower(delta) or 0.0,
        )
    return []


def curve(world: World) -> Curve:
    """The curve of all that a unit touches in one world.

    Guarantees: an upper bound for every mixture; a release that no language knows raises
    `Unsupported` with the way out, before anything that takes long is computed.
    """
    parts = sorted_out(world)
    exact = all(
        part.language == PAIR or (part.language == LOOSE and not part.wide) for part in parts
    )
    return curve_of(together(world)) if exact else MixtureCurve(parts)


def sorted_out(world: World) -> tuple[MixturePart, ...]:
    """Every release of a world with its language."""
    rows = [(leaf, count, piece) for piece in world for leaf, count in leaves(piece.event)]
    return tuple(
        MixturePart(language(leaf, piece.adjacency), leaf, count, piece)
        for leaf, count, piece in rows
    )


def language(leaf: Event, adjacency: Adjacency) -> str:
    """The language in which a release is best known; `Unsupported` where there is none, with the
    way out.
    """
    if (profile := rule_of(leaf).profile) is not None:
        profile(leaf, adjacency)
        return PROFILE
    try:
        composition(leaf, adjacency)
    except Unsupported as no_pair:
        try:
            if isinstance(leaf, ev.PoissonSampled) and adjacency is not Adjacency.REPLACE_ONE:
                rdp.approximate(require_sampling(leaf.event), adjacency, (2.0,))
                return SAMPLED
            rdp.approximate(leaf, adjacency, (2.0,))
        except Unsupported:
            raise no_pair from None
        return RENYI
    return LOOSE if isinstance(leaf, CHOSEN) else PAIR


def _composed(parts: Iterable[MixturePart]) -> Composition:
    """The exact pairs of these releases."""
    return together(
        tuple(replace(part.piece, event=ev.Repeated(part.leaf, part.count)) for part in parts)
    )


def _profile(part: MixturePart) -> Profile:
    known = rule_of(part.leaf).profile
    assert known is not None
    return known(part.leaf, part.adjacency)


def divergences(parts: tuple[MixturePart, ...]) -> tuple[Array, Array, float]:
    """Orders, the Rényi divergences of all releases together at them, and the chance of an infinite
    loss.

    Guarantees: upper bounds in both directions, valid for adaptive composition at each order.
    """
    own = set().union(*(rdp.known_orders(part.leaf) for part in parts))
    more = MANY if all(isinstance(part.leaf, CLOSED) for part in parts) else ()
    orders = tuple(sorted({*rdp.ORDERS, *more, *own}))
    total, infinity = np.zeros(len(orders)), 0.0
    for part in parts:
        values, chance = _divergences(part.leaf, part.adjacency, orders)
        total, infinity = total + part.count * values, infinity + part.count * chance
    return np.asarray(orders), total, infinity


@lru_cache(maxsize=64)
def _divergences(
    leaf: Event, adjacency: Adjacency, orders: tuple[float, ...]
) -> tuple[Array, float]:
    """Those of one release. The best of a Poisson number of runs is cheaper by the tight curve of
    one run.
    """
    values, chance = rdp.approximate(leaf, adjacency, orders)
    if not (isinstance(leaf, ev.RepeatAndSelect) and math.isinf(leaf.shape)) or chance > 0:
        return values, chance
    one, deltas = rdp.divergences(leaf.event, adjacency, orders), _knots(leaf.event, adjacency)
    alphas = np.asarray(orders)
    better = selected(
        alphas,
        one,
        leaf.mean,
        leaf.shape,
        lambda epsilon: float(np.interp(math.exp(epsilon), KNOTS, deltas)),
    )
    return np.minimum(values, better), chance


@lru_cache(maxsize=64)
def _knots(event: Event, adjacency: Adjacency) -> tuple[float, ...]:
    """delta of one run at the knots: its true curve is convex in e^epsilon and falls, so chords and
    the last value are bounds.
    """
    from dpfy.accounting.tight.accountant import Tight

    one = Tight().curve(event, adjacency)
    if isinstance(one, TightCurve):
        return tuple(one.deltas(np.log(KNOTS)).tolist())
    return tuple(one.delta(math.log(t)) for t in KNOTS)


def _symmetric(orders: Array, values: Array, infinity: float) -> DominatingPair:
    """The pair of Rényi divergences that hold in both directions."""
    side = profiles.points(profiles.of_renyi(orders, values, infinity))
    both = profiles.dominating(side, side)
    return DominatingPair(both, both)


def _best_by_profile(part: MixturePart) -> bool:
    """Whether this is the best of several runs whose profile is known exactly."""
    return isinstance(part.leaf, ev.RepeatAndSelect) and _profile_known(
        part.leaf.event, part.adjacency
    )


def _profile_known(event: Event, adjacency: Adjacency) -> bool:
    if isinstance(event, ev.OneOf):
        return all(_profile_known(kind, adjacency) for kind in event.events)
    try:
        return not composition(event, adjacency).public
    except Unsupported:
        return False


LEAST_DELTA = 1e-12
"""Up to here the profile of one run is read; below it divergences are better anyway."""


@lru_cache(maxsize=32)
def _best(leaf: ev.RepeatAndSelect, adjacency: Adjacency) -> DominatingPair:
    """The best of a random number of runs, by the profile of one."""
    nodes = one_run(leaf.event, adjacency, LEAST_DELTA / max(leaf.mean, 1.0))
    side = profiles.points(SelectedProfile(*nodes, leaf.mean, leaf.shape))
    both = profiles.dominating(side, side)
    return DominatingPair(both, both)


def _release(removed: Points, added: Points) -> DominatingPair:
    """The pairs of a profile, each direction forwards by its own bounds and backwards by the
    other's.
    """
    return DominatingPair(profiles.dominating(removed, added), profiles.dominating(added, removed))


@lru_cache(maxsize=64)
def sampled(leaf: Event, adjacency: Adjacency) -> DominatingPair:
    """Releases known by Rényi divergences, on a Poisson sample (Zhu, Dong & Wang 2022, Theorem 11).

    If (P, Q) dominates in one direction, then with the unit present at rate q the pair ((1 - q) Q +
    q P, Q) dominates for removing it and (P, (1 - q) P + q Q) for adding it. The pair here is the
    same in both directions.
    """
    assert isinstance(leaf, ev.PoissonSampled)
    piece = TouchedReleases(leaf.event, adjacency)
    whole = _symmetric(
        *divergences(
            tuple(MixturePart(RENYI, one, count, piece) for one, count in leaves(leaf.event))
        )
    )
    if leaf.rate == 1 or not isinstance(whole.removed, Atoms):
        return whole
    return DominatingPair(
        thinned_removed(whole.removed, leaf.rate),
        thinned_added(whole.removed, leaf.rate),
        touched=leaf.rate,
    )


def thinned_removed(pair: Atoms, rate: float) -> Atoms:
    """((1 - q) Q + q P, Q)."""
    return subsample_atoms(pair, rate, False)


def thinned_added(pair: Atoms, rate: float) -> Atoms:
    """(P, (1 - q) P + q Q): a loss L becomes -log(1 - q + q e^-L), an infinite one -log(1 - q)."""
    losses = [-math.log1p(rate * math.expm1(min(-loss, 700.0))) for loss in pair.losses]
    return Atoms((*losses, -math.log1p(-rate)), (*pair.probabilities, pair.infinity))
