"""Priors and bins: among how many of the likeliest classes a label is best randomised, and in which
intervals a number.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from dpfy.core.errors import InvalidInput
from dpfy.labels import priors


def best_of_all(chances, epsilon):
    """The largest chance of a right answer over all epsilon-private ways to answer, by a linear
    program over their laws.
    """
    k, grown = len(chances), math.exp(epsilon)
    goal = np.zeros((k, k))
    np.fill_diagonal(goal, -np.asarray(chances))
    rows = []
    for said in range(k):
        for one, other in itertools.permutations(range(k), 2):
            row = np.zeros((k, k))
            row[one, said], row[other, said] = 1.0, -grown
            rows.append(row.ravel())
    sums = np.kron(np.eye(k), np.ones(k))
    found = linprog(
        goal.ravel(), np.array(rows), np.zeros(len(rows)), sums, np.ones(k), bounds=(0, 1)
    )
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize("classes", range(2, 7))
def test_rr_with_prior_is_the_best_private_answer(classes):
    rng = np.random.default_rng(classes)
    for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0):
        for concentration in (0.2, 1.0, 5.0):
            chances = rng.dirichlet(np.full(classes, concentration))
            assert priors.success(chances, epsilon) == pytest.approx(
                best_of_all(chances, epsilon), abs=1e-7
            )
    assert priors.success(np.full(classes, 1 / classes), 1.0) == pytest.approx(
        math.e / (math.e + classes - 1), abs=1e-12
    )


def test_the_order_and_the_number_of_classes():
    order, sizes = priors.ranked(
        np.array([[0.1, 0.6, 0.3], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]), 1.0
    )
    assert order[0].tolist() == [1, 2, 0]
    assert sizes[1] == 1
    assert sizes[2] == 3
    for wrong in (np.array([0.5, 0.5]), np.array([[0.5, math.nan]]), np.array([[-0.5, 1.5]])):
        with pytest.raises(InvalidInput, match="prior"):
            priors.ranked(wrong, 1.0)


def cost(points, mass, edges, epsilon):
    """The mean squared error of bins with their best values."""
    grown, total = math.exp(epsilon), 0.0
    for a, b in itertools.pairwise(edges):
        weight = mass * np.where(
            (np.arange(len(points)) >= a) & (np.arange(len(points)) < b), grown, 1.0
        )
        value = (weight * points).sum() / weight.sum()
        total += (weight * (points - value) ** 2).sum()
    return total / (grown + len(edges) - 2)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_bins_are_the_best_of_all_intervals(epsilon):
    rng = np.random.default_rng(5)
    for size in (2, 5, 8):
        points, mass = np.sort(rng.normal(size=size)), rng.dirichlet(np.ones(size))
        inner = itertools.chain.from_iterable(
            itertools.combinations(range(1, size), k) for k in range(size)
        )
        best = min(cost(points, mass, (0, *cut, size), epsilon) for cut in inner)
        found = priors.optimal(points, mass, epsilon)
        assert found.loss == pytest.approx(best, rel=1e-9)
        assert (np.diff(found.bin_of) >= 0).all()
        law = priors.seen(found, np.zeros(1, np.int64), epsilon)[2]
        assert (law @ found.unbiased(epsilon))[found.bin_of] == pytest.approx(
            found.means[found.bin_of], abs=1e-9
        )


def test_shares_are_found_again_from_answers():
    points = np.linspace(0, 1, 16)
    truth = np.exp(-((points - 0.3) ** 2) / 0.02)
    truth /= truth.sum()
    found = priors.optimal(points, np.full(16, 1 / 16), 3.0)
    rng = np.random.default_rng(0)
    labels = rng.choice(16, 40_000, p=truth)
    law = priors.seen(found, np.zeros(1, np.int64), 3.0)[2]
    said = np.array([rng.choice(found.count, p=law[b]) for b in found.bin_of[labels[:5000]]])
    mass = priors.estimated([priors.seen(found, said, 3.0)], 16)
    got, due = (np.bincount(found.bin_of, m, minlength=found.count) for m in (mass, truth))
    assert np.abs(got - due).max() < 0.05  # about five deviations of a share among 5,000
