"""What a question tells at most, by the lead of its largest count alone: a bound that a unit can
move only a little (docs/smooth-votes.md).

`by_lead(...)[s]` is at least the Rényi divergence, in both directions, between the noisy arg-max of
any votes whose largest count leads by s or more and of the same with one vote moved. `QuestionMargins`
adds the check before it and sums over questions; its `smooth` bound changes by a factor of at most
exp(beta) from neighbour to neighbour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound, Bounded
from dpfy_lab.data_dependent.analysis import DataDependent

Array = NDArray[np.float64]
LOW, HIGH, WIDTH = -9.0, 10.0, 0.05
"""Where the largest count of all others may lie, in sigmas from the largest, and how finely it is
told.
"""
MOST_VOTERS = 1 << 16
LOST = 1e-12
"""More than sums, logarithms and what lies outside of the window can take from a moment."""
LEAD_MOVED = 2
"""By how many votes one voter moves a lead at most: the first loses what the second wins."""
ROUNDED = 1 + 1e-6
"""More than the arithmetic of a smooth bound can lose."""
FAR, MOST_PLACES = 14.0, 1024
"""Counts that are farther behind, in sigmas, never win; and how many counts behind the largest are
looked at, at most.
"""
LARGEST_MOVE = 1.0
"""Of the order over sigma: beyond, the window is too narrow."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)


def excess(log_p: Array, log_q: Array, order: float) -> Array:
    """Of cells with chances p and q: p^order q^(1 - order) - order p + (order - 1) q, which is
    never negative.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        loss = np.where(np.isneginf(log_p) & np.isneginf(log_q), 0.0, log_p - log_q)
        found = np.exp(log_q) * (np.expm1(order * loss) - order * np.expm1(loss))
    return np.asarray(np.where(np.isneginf(log_q), 0.0, np.maximum(found, 0.0)))


@lru_cache(maxsize=16)
def by_lead(order: float, sigma: float, voters: int, classes: int) -> Array:
    """For a lead of 0, 1, ..., `voters` votes: what the noisy arg-max tells at most about one vote
    that moves. It never rises.
    """
    check.integer("voters", voters, most=MOST_VOTERS)
    check.integer("classes", classes, least=2)
    places = min(voters, math.ceil(FAR * sigma))
    if places > MOST_PLACES:
        raise InvalidInput(
            "sigma",
            sigma,
            f"must be at most {MOST_PLACES / FAR:.3g} for more than {MOST_PLACES} voters",
        )
    if order <= 1 or order / sigma > LARGEST_MOVE:
        raise InvalidInput(
            "order", order, f"must be above 1 and at most {LARGEST_MOVE:g} of sigma ({sigma:g})"
        )
    with_first, without = _sweep(order, sigma, places)
    edges, leads = _edges(), np.arange(places + 1)
    below = ndtr(edges[None] + leads[:, None] / sigma) ** (classes - 2)
    chances = np.diff(
        np.concatenate([np.zeros((places + 1, 1)), below, np.ones((places + 1, 1))], axis=1), axis=1
    )
    means = chances @ np.maximum.accumulate(with_first, axis=0)
    worst = np.where(leads[None] >= leads[:, None], means, 0.0).max(axis=1)
    if classes > 2:
        worst = np.maximum(worst, np.array([without[s:, s:].max() for s in leads]))
    made = np.log1p(np.maximum.accumulate((worst + LOST)[::-1])[::-1]) / (order - 1)
    made = np.concatenate([made, np.full(voters - places, made[-1])])
    made.setflags(write=False)
    return np.asarray(made)


def _edges() -> Array:
    return np.asarray(np.linspace(LOW, HIGH, round((HIGH - LOW) / WIDTH) + 1))


def _sweep(order: float, sigma: float, voters: int) -> tuple[Array, Array]:
    """Moments less one of three cells, for every stretch of the largest count m of all others: from
    high to low.

    The first: for pairs of which one has the largest count, [stretch, place of the other]. The
    second: for pairs behind the largest count, which m is at least: the mean over it, [place,
    place].
    """
    edges, count = _edges(), voters + 1
    y = np.arange(-1, voters + 2) / sigma
    wins = np.zeros((len(y), len(y)))  # row beats column, with a count above m
    first, mean, most = (
        np.zeros((len(edges) + 1, count)),
        np.zeros((count, count)),
        np.zeros((count, count)),
    )
    for k in range(
        len(edges) - 1, -1, -1
    ):  # the stretch from edges[k - 1] to edges[k]; below edges[0] all of it
        low = edges[k - 1] if k else -math.inf
        found = np.maximum(*_cells(wins, y, low, order))
        if k:
            more, added = _stretch(y, low, order)
            found, wins = found + 2 * more, wins + added
        most = np.maximum(most, found)
        mean += (ndtr(edges[k]) - (ndtr(low) if k else 0.0)) * most
        first[k] = np.maximum(found[0], found[:, 0])
    first[-1] = first[-2]
    return first, mean + (1 - ndtr(edges[-1])) * most


def _moved(table: Array) -> Array:
    """Places (a, b) from (0, 0) on, after a has lost a vote and b has won it."""
    return table[2:, :-2]


def _cells(wins: Array, y: Array, low: float, order: float) -> tuple[Array, Array]:
    """a wins, b wins, neither does: both directions."""
    with np.errstate(divide="ignore"):
        row = np.log(wins)
    here = log_ndtr(low + y)
    neither = here[:, None] + here[None]
    pairs = [(part[1:-1, 1:-1], _moved(part)) for part in (row, row.T, neither)]
    return (
        np.asarray(sum(excess(p, q, order) for p, q in pairs)),
        np.asarray(sum(excess(q, p, order) for p, q in pairs)),
    )


def _stretch(y: Array, low: float, order: float) -> tuple[Array, Array]:
    """What it adds that m is told by its stretch alone; and the chances that the winning count lies
    in it.
    """
    x, weights = low + (_NODES + 1) / 2 * WIDTH, _WEIGHTS / 2 * WIDTH
    place = x[None] + y[:, None]
    log_d, log_c = -(place**2) / 2 - math.log(2 * math.pi) / 2, log_ndtr(place)
    d, c = np.exp(log_d) * weights, np.exp(log_c)
    kept = slice(1, -1)
    before, after = (d[kept], c[kept]), (d[2:], c[:-2])

    def part(a: float) -> Array:
        """The excess of densities of a's win, as sums of outer products, since both have two
        factors.
        """
        own = np.exp(a * log_d[kept] + (1 - a) * log_d[2:]) * weights
        other = np.exp(a * log_c[kept] + (1 - a) * log_c[:-2])
        return np.asarray(
            own @ other.T - a * (before[0] @ before[1].T) + (a - 1) * (after[0] @ after[1].T)
        )

    def mirrored(a: float) -> Array:
        """The same for b."""
        own = np.exp(a * log_d[kept] + (1 - a) * log_d[:-2]) * weights
        other = np.exp(a * log_c[kept] + (1 - a) * log_c[2:])
        return np.asarray(other @ own.T - a * (c[kept] @ d[kept].T) + (a - 1) * (c[2:] @ d[:-2].T))

    more = np.maximum(part(order) + mirrored(order), part(1 - order) + mirrored(1 - order))
    return np.maximum(more, 0.0), d @ c.T


@dataclass(frozen=True)
class QuestionMargins:
    """Noisy votes on many questions at one Rényi order: arg-max at `sigma`, before it a check at
    `check_sigma` (0 for none).

    `renyi(votes)` bounds what all answers together tell about one voter, for these votes. It is as
    private as they are.
    """

    order: float
    sigma: float
    voters: int
    classes: int
    check_sigma: float = 0.0
    threshold: float = 0.0

    @cached_property
    def table(self) -> Array:
        """[largest count, lead]: the bound of one question; it never rises with the lead."""
        told = np.expm1(
            (self.order - 1) * by_lead(self.order, self.sigma, self.voters, self.classes)
        )
        if not self.check_sigma:
            return np.broadcast_to(
                np.log1p(told) / (self.order - 1), (self.voters + 1, self.voters + 1)
            )
        above = (np.arange(-1, self.voters + 2) - self.threshold) / self.check_sigma
        passes, fails = log_ndtr(above), log_ndtr(-above)
        found = np.zeros((self.voters + 1, self.voters + 1))
        here = slice(1, -1)
        for other in (slice(0, -2), here, slice(2, None)):
            for p, q in ((here, other), (other, here)):
                plain = excess(fails[p], fails[q], self.order) + excess(
                    passes[p], passes[q], self.order
                )
                power = np.exp(self.order * passes[p] + (1 - self.order) * passes[q])
                found = np.maximum(found, plain[:, None] + power[:, None] * told[None])
        return np.log1p(found + LOST) / (self.order - 1)

    def places(self, votes: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Largest counts and leads. Whatever the votes are, both lie in the table."""
        held = np.asarray(votes)
        if held.ndim != 2 or held.shape[1] != self.classes or held.dtype.kind not in "biuf":
            rule = f"must be counts of {self.classes} classes, a row for every question"
            raise InvalidInput("votes", f"{held.dtype} of shape {held.shape}", rule)
        top = np.sort(np.clip(np.nan_to_num(held.astype(np.float64)), 0, self.voters), axis=1)[
            :, -2:
        ]
        whole = np.rint(top).astype(np.int64)
        return whole[:, 1], whole[:, 1] - whole[:, 0]

    def renyi(self, votes: object, moved: int = 0) -> DataDependent:
        """The largest bound that votes reach of which at most so many voters say something else, on
        each question as they like.
        """
        return DataDependent(self._total(*self.places(votes), moved))

    def _total(self, counts: NDArray[np.int64], leads: NDArray[np.int64], moved: int) -> float:
        return float(self._reached(moved)[counts, leads].sum())

    def _reached(self, moved: int) -> Array:
        """The table after `moved` voters did what makes it largest."""
        leads = np.maximum(np.arange(self.voters + 1) - LEAD_MOVED * moved, 0)
        found = self.table[:, leads]
        for _ in range(min(moved, self.voters) if self.check_sigma else 0):
            found = np.maximum(
                found,
                np.maximum(np.vstack([found[1:], found[-1:]]), np.vstack([found[:1], found[:-1]])),
            )
        return found

    def smooth(self, votes: object, beta: float) -> Bounded[float]:
        """The logarithm of a bound on `renyi` that is at most `beta` away on neighbours: the
        largest log renyi(votes, d) - beta d.

        A voter who changes moves every largest count by at most one and every lead by at most two.
        So what d voters reach from neighbours, d + 1 reach from here. What is given has room for
        the rounding of all this.
        """
        counts, leads = self.places(votes)
        best, most = -math.inf, math.log(max(len(counts), 1) * float(self.table.max()))
        for moved in range(self.voters + 1):
            if most - beta * moved <= best:
                break
            best = max(best, math.log(self._total(counts, leads, moved)) - beta * moved)
        return Bounded(best, Bound.scalar(beta * ROUNDED))
