"""Bins for numbers: among which a randomised number is, in the mean, nearest to the true one (Ghazi
et al. 2022: RR-on-bins).

For a prior P over a public grid, the best epsilon-private answer under a convex loss puts the grid
into k intervals, gives each a value and answers by randomized response among the k. With k values
z_j the mean loss is, up to 1 / (exp(epsilon) + k - 1),

    sum over j of [ E L(z_j, y) + (exp(epsilon) - 1) E L(z_j, y) 1{y in bin j} ],

a sum over bins: the best bins are found by dynamic programming. Here the loss is the squared error.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Binning:
    """Bins of a grid: `bin_of` each of its points, the `values` of the bins, and the mean of the
    grid's points in each (`means`).
    """

    bin_of: NDArray[np.int16]
    values: Reals
    means: Reals
    loss: float

    @property
    def count(self) -> int:
        """How many bins."""
        return len(self.values)

    def unbiased(self, epsilon: float) -> Reals:
        """What to take each answer for, so that its mean is that of the label's bin: the inverse of
        randomized response.
        """
        if self.count == 1:
            return self.means.copy()
        other = 1 / (math.exp(min(epsilon, 700.0)) + self.count - 1)
        truth = math.exp(min(epsilon, 700.0)) * other
        return np.asarray((self.means - other * self.means.sum()) / (truth - other))


def optimal(points: Reals, prior: Reals, epsilon: float, most: int = 64) -> Binning:
    """The bins with the least mean squared error of an answer, among at most `most` of them, for a
    prior over the points of a grid.
    """
    points, mass = np.asarray(points, np.float64), np.maximum(np.asarray(prior, np.float64), 0)
    mass = mass / mass.sum() if mass.sum() > 0 else np.full(len(points), 1 / len(points))
    grown, size = math.exp(min(check.epsilon("epsilon", epsilon), 700.0)), len(points)
    costs = _interval_costs(points, mass, grown)
    best, back = (
        costs[0].copy(),
        [],
    )  # best[b]: the cost of the points before b in one bin, two bins ...
    found = (best[size] / grown, 1)
    for count in range(2, min(most, size) + 1):
        through = best[:, None] + costs
        back.append(np.argmin(through, axis=0))
        best = through.min(axis=0)
        found = min(found, (float(best[size]) / (grown + count - 1), count))
    ends = [size]
    for step in range(found[1] - 2, -1, -1):
        ends.append(int(back[step][ends[-1]]))
    return _binned(points, mass, grown, [0, *reversed(ends)], found[0])


def _interval_costs(points: Reals, mass: Reals, grown: float) -> Reals:
    """[a, b]: the least of E L(z, y) + (grown - 1) E L(z, y) 1{a <= y < b} over z; infinite where b
    <= a.
    """
    p0, p1, p2 = (np.concatenate([[0.0], np.cumsum(mass * points**power)]) for power in (0, 1, 2))
    weight = 1 + (grown - 1) * (p0[None, :] - p0[:, None])
    first = p1[-1] + (grown - 1) * (p1[None, :] - p1[:, None])
    second = p2[-1] + (grown - 1) * (p2[None, :] - p2[:, None])
    with np.errstate(all="ignore"):
        cost = second - first**2 / weight
    return np.where(
        np.arange(len(p0))[None, :] > np.arange(len(p0))[:, None], np.maximum(cost, 0), np.inf
    )


def _binned(points: Reals, mass: Reals, grown: float, edges: list[int], loss: float) -> Binning:
    bin_of, values, means = np.empty(len(points), np.int16), [], []
    for number, (a, b) in enumerate(itertools.pairwise(edges)):
        bin_of[a:b] = number
        held, weighed = mass[a:b].sum(), (mass[a:b] * points[a:b]).sum()
        values.append(((mass * points).sum() + (grown - 1) * weighed) / (1 + (grown - 1) * held))
        means.append(weighed / held if held > 0 else points[a:b].mean())
    return Binning(bin_of, np.array(values), np.array(means), loss)


def seen(
    binning: Binning, answers: NDArray[np.int64], epsilon: float
) -> tuple[NDArray[np.int16], Reals, Reals]:
    """What the answers to one question show: the bin of each point, how often each bin was said,
    and P(said | bin).
    """
    counts = np.bincount(answers, minlength=binning.count).astype(np.float64)
    other = 1 / (math.exp(min(epsilon, 700.0)) + binning.count - 1)
    law = np.full((binning.count, binning.count), other)
    np.fill_diagonal(law, 1 - (binning.count - 1) * other)
    return binning.bin_of, counts, law


def estimated(
    asked: list[tuple[NDArray[np.int16], Reals, Reals]], points: int, steps: int = 50
) -> Reals:
    """The shares of the points of the grid that make the answers likely: expectation maximisation,
    from equal ones.
    """
    mass = np.full(points, 1 / points)
    for _ in range(steps):
        moved = np.zeros(points)
        for bin_of, counts, law in asked:
            held = np.bincount(bin_of, mass, minlength=len(counts))
            told = law * held[:, None]  # [bin, said]
            share = (told / told.sum(axis=0, keepdims=True) * counts).sum(axis=1) / np.maximum(
                held, 1e-300
            )
            moved += mass * share[bin_of]
        mass = moved / moved.sum()
    return mass
