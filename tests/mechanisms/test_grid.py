"""Grid sums change by at most their bound, whatever the rows hold and in whatever order."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.values import Bound, Bounded
from dpfy.mechanisms.grid import Grid

ODD = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    5e-324,
    0.1,
    1 / 3,
    2.0**53,
    7.0,
]


def norms(counts) -> tuple[float, int, int]:
    """L2, L1 and L-infinity of integers, exactly but for the last root."""
    numbers = [abs(int(c)) for c in np.ravel(counts)]
    return math.sqrt(sum(n * n for n in numbers)), sum(numbers), max(numbers, default=0)


@pytest.mark.parametrize(
    "bound",
    [Bound.scalar(1.0), Bound(0.7), Bound(l1=1.3), Bound(linf=0.4), Bound(2.0, 2.5, 0.9)],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("exponent", [-30, -3, 0])
def test_one_row_adds_at_most_the_bound(bound, size, exponent):
    rng = np.random.default_rng(size)
    rows = rng.choice(ODD, (300, size)) * rng.choice([1.0, 0.3, 1e-5], (300, 1))
    grid = Grid(exponent)
    for row in rows:
        found = grid.sum(row[None], bound)
        for norm, most in zip(
            norms(found.value.counts),
            (found.bound.l2, found.bound.l1, found.bound.linf),
            strict=True,
        ):
            assert math.isinf(most) or Fraction(norm) <= grid.steps(most) * (1 + Fraction(1, 2**50))


def test_bound_grows_by_little():
    grid = Grid.of(1.0)
    assert grid.sum([0.5], Bound.scalar(1.0)).bound == Bound.scalar(1.0)
    wide = grid.sum(np.zeros((3, 100)), Bound(1.0, 4.0, 0.5)).bound
    assert 1 <= wide.l2 < 1 + 1e-5
    assert 4 <= wide.l1 < 4 + 1e-4
    assert wide.linf == 0.5


def test_any_order_and_any_split_is_the_same_sum():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(10_000, 3)) * 10.0 ** rng.integers(-8, 8, (10_000, 1))
    grid, bound = Grid.of(0.01, 3), Bound(1.0)
    whole = grid.sum(rows, bound).value.counts
    assert np.array_equal(whole, grid.sum(rows[rng.permutation(len(rows))], bound).value.counts)
    assert np.array_equal(
        whole, sum(grid.sum(part, bound).value.counts for part in np.array_split(rows, 7))
    )


def test_sums_are_near_the_truth():
    rng = np.random.default_rng(2)
    rows = rng.uniform(-1, 1, 200_000)
    grid = Grid.of(1.0)
    assert grid.values(grid.sum(rows, Bound.scalar(1.0)).value.counts) == pytest.approx(
        math.fsum(rows), abs=1e-3
    )


@pytest.mark.filterwarnings("error")
def test_a_sum_beyond_its_range_counts_as_its_end_and_raises_nothing():
    grid, one = Grid(-61), Bound.scalar(1.0)
    assert grid.most_units(one) == 2
    for units, found in ((1, 1 << 61), (2, 1 << 62), (5, 1 << 62), (1000, 1 << 62)):
        assert grid.sum(np.ones(units), one).value.counts == found
        assert grid.sum(-np.ones(units), one).value.counts == -found
    assert grid.sum([1.0, 1.0, 1.0, -1.0, -1.0, -0.5], one).value.counts == 1 << 60
    rows = np.random.default_rng(0).uniform(-1, 1, (1000, 3))
    exact = [sum(int(c) for c in np.rint(np.ldexp(column, 61))) for column in rows.T]
    found = grid.sum(rows, Bound(linf=1.0)).value.counts
    assert found.tolist() == [max(-(1 << 62), min(1 << 62, c)) for c in exact]


def test_what_was_summed_elsewhere_is_charged():
    grid = Grid(-4)
    laid = grid.lay(Bounded(np.array([0.26, -3.0]), Bound(1.0, 1.0, 1.0)))
    assert laid.value.counts.tolist() == [4, -48]
    assert laid.bound.linf >= 1 + 1 / 16
    assert laid.bound.l1 >= 1 + 2 / 16
    assert laid.bound.l2 >= 1 + math.sqrt(2) / 16
    whole = grid.lay(Bounded(np.array([3, -1]), Bound(1.0)))
    assert whole.value.counts.tolist() == [48, -16]
    assert whole.bound == Bound(1.0)
    assert grid.lay(Bounded(math.nan, Bound.scalar(1.0))).value.counts == 0
    assert grid.lay(Bounded(math.inf, Bound.scalar(1.0))).value.counts == 1 << 62
    for value in (10**18, -(10**18), np.uint64(2**64 - 1), -(2**63)):
        assert abs(int(grid.lay(Bounded(value, Bound.scalar(1.0))).value.counts)) == 1 << 62
    assert grid.lay(Bounded(10**17, Bound.scalar(1.0))).value.counts == 16 * 10**17


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: Grid.of(1e-300), "another unit"),
        (lambda: Grid(0).sum([1.0], Bound()), "without a bound on its linf norm"),
        (lambda: Grid(-100).sum([1.0], Bound.scalar(1.0)), "add more noise"),
        (lambda: Grid(0).sum(1.0, Bound.scalar(1.0)), "one row for each unit"),
        (lambda: Grid(0).sum(["a"], Bound.scalar(1.0)), "array of numbers"),
        (lambda: Grid(0).lay(Bounded("a", Bound.scalar(1.0))), "must be a number"),
        (lambda: Grid(True), "whole number"),
        (lambda: Bound(-1.0), "bound.l2"),
        (lambda: Bound(l1=math.nan), "bound.l1"),
    ],
)
def test_refused(attempt, words):
    with pytest.raises((InvalidInput, Unsupported), match=words):
        attempt()


def test_norms_that_follow_are_filled_in():
    assert Bound(l1=2.0) == Bound(2.0, 2.0, 2.0)
    assert Bound(l1=4.0, linf=1.0).l2 == pytest.approx(2.0)
    assert Bound(l1=4.0, linf=1.0).l2 >= 2
    assert Bound(1.0) == Bound(1.0, math.inf, 1.0)
    assert Bound().l2 == math.inf


def test_a_row_that_is_no_number_adds_nothing():
    grid, bound = Grid(-8), Bound(l1=2.0)
    for odd in (math.nan, math.inf, -math.inf):
        assert grid.sum([[odd, 1.0], [0.5, 0.25]], bound).value.counts.tolist() == [128, 64]
