"""Priors over a record's classes, and among how many of the likeliest a label is best randomised
(Ghazi et al. 2021, algorithm 2).

Clusters of public features: k-means with k-means++ (Arthur & Vassilvitskii 2007), from a fixed
seed.

Bins for numbers: among which a randomised number is, in the mean, nearest to the true one (Ghazi
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
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput

Reals = NDArray[np.float64]


def uniform(records: int, outcomes: int) -> Reals:
    """No prior: every outcome is as likely as any other."""
    return np.full((records, outcomes), 1 / outcomes)


def ranked(prior: Reals, epsilon: float) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """For each row of `prior` its outcomes, the likeliest first, and the number k of them among
    which a label is randomised.

    k maximises the chance that the answer is the label, exp(epsilon) / (exp(epsilon) + k - 1) times
    the prior mass of the first k; the least k where several do. No epsilon-private answer has a
    larger chance (tested against linear programs).
    """
    held = np.asarray(prior, dtype=np.float64)
    if held.ndim != 2 or not np.isfinite(held).all() or (held < 0).any():
        raise InvalidInput(
            "prior", f"{held.ndim} axes", "must be a table of finite chances, none below 0"
        )
    order = np.argsort(-held, axis=1, kind="stable")
    mass = np.cumsum(np.take_along_axis(held, order, axis=1), axis=1)
    sizes = 1 + np.argmax(mass * kept(epsilon, held.shape[1]), axis=1)
    return order.astype(np.int16), sizes.astype(np.int16)


def kept(epsilon: float, outcomes: int) -> Reals:
    """The chance that randomized response among 1, 2, ... `outcomes` of them keeps a label."""
    shrunk = math.exp(-min(epsilon, 700.0))
    return np.asarray(1 / (1 + np.arange(outcomes) * shrunk))


def success(prior: Reals, epsilon: float) -> float:
    """The chance, under one row of a prior, that the answer is the label."""
    order, sizes = ranked(np.atleast_2d(prior), epsilon)
    held = np.ravel(prior)[order[0, : sizes[0]]]
    return float(held.sum() * kept(epsilon, len(np.ravel(prior)))[sizes[0] - 1])


ROUNDS = 10
SAMPLE = 10_000
AT_ONCE = 4000


@torch.no_grad()
def clustered(features: Tensor, count: int, seed: int = 0) -> NDArray[np.int32]:
    """The cluster of each record, numbered from 0. Centres are found on a public sample of records,
    then all go to the nearest.
    """
    generator = torch.Generator().manual_seed(seed)
    sample = features[torch.randperm(len(features), generator=generator)[:SAMPLE]]
    centres = _seeded(sample, min(count, len(sample)), generator)
    for _ in range(ROUNDS):
        nearest = _nearest(sample, centres)
        sums = torch.zeros_like(centres).index_add_(0, nearest, sample)
        sizes = torch.bincount(nearest, minlength=len(centres))
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centres)
    found = _nearest(features, centres)
    return np.asarray(torch.unique(found, return_inverse=True)[1].numpy().astype(np.int32))


def _seeded(sample: Tensor, count: int, generator: torch.Generator) -> Tensor:
    chosen = [int(torch.randint(len(sample), (1,), generator=generator))]
    far = (sample - sample[chosen[0]]).square().sum(1)
    while len(chosen) < count:
        total = float(far.sum())
        weights = far if total > 0 else torch.ones_like(far)
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
        far = torch.minimum(far, (sample - sample[chosen[-1]]).square().sum(1))
    return sample[chosen]


def _nearest(rows: Tensor, centres: Tensor) -> Tensor:
    return torch.cat([torch.cdist(part, centres).argmin(1) for part in rows.split(AT_ONCE)])


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
