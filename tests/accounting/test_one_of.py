"""One of several releases, and which one is seen: against what can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from dpfy import accounting
from dpfy.accounting import rdp
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput
from dpfy.core.events import gamma_for
from dpfy.core.unit import Adjacency

ADD = Adjacency.ADD_OR_REMOVE_ONE
STRONG, WEAK = 0.4, 1.1
"""Two randomized responses."""


def _outcomes(chance: float) -> list[tuple[float, float]]:
    """The outcomes of one of the two, drawn with this chance and shown: their probabilities in both
    worlds.
    """
    rows = []
    for weight, gap in ((chance, STRONG), (1 - chance, WEAK)):
        high, low = 1 / (1 + math.exp(-gap)), 1 / (1 + math.exp(gap))
        rows += [(weight * high, weight * low), (weight * low, weight * high)]
    return rows


def _renyi(p: list[float], q: list[float], order: float) -> float:
    return math.log(sum(a**order * b ** (1 - order) for a, b in zip(p, q, strict=True))) / (
        order - 1
    )


def _logarithmic(x: float, gamma: float) -> float:
    return math.log1p(-(1 - gamma) * x) / math.log(gamma)


def _geometric(x: float, gamma: float) -> float:
    return gamma * x / (1 - (1 - gamma) * x)


def _selected(
    rows: tuple[tuple[float, float], ...], generating: Callable[[float], float]
) -> list[list[float]]:
    """The law of the best of a random number of runs, outcomes from the worst to the best, in both
    worlds.
    """
    worlds = []
    for k in (0, 1):
        below = np.concatenate([[0.0], np.cumsum([row[k] for row in rows])])
        worlds.append([generating(b) - generating(a) for a, b in pairwise(below)])
    return worlds


BOTH = ev.OneOf((ev.EpsilonDelta(STRONG), ev.EpsilonDelta(WEAK)))


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_a_choice_that_is_seen_costs_no_more_than_the_worst(chance: float) -> None:
    rows, orders = _outcomes(chance), (1.5, 2.0, 5.0, 20.0)
    for order, known in zip(orders, rdp.divergences(BOTH, ADD, orders), strict=True):
        kept = [row for row in rows if row[0] > 0]
        assert _renyi([a for a, _ in kept], [b for _, b in kept], order) <= known * (1 + 1e-12)
    curve = accounting.curve(BOTH)
    for epsilon in (0.0, 0.3, 0.9):
        truth = sum(max(0.0, a - math.exp(epsilon) * b) for a, b in rows)
        assert truth <= curve.delta(epsilon) + 1e-12


def test_a_choice_by_what_was_seen_before_is_covered_too() -> None:
    """The second of two is chosen by the outcome of the first, as badly as can be: against all ways
    to choose, by hand.
    """
    orders = (1.5, 3.0, 10.0)
    known = rdp.divergences(ev.Repeated(BOTH, 2), ADD, orders)
    curve = accounting.curve(ev.Repeated(BOTH, 2))
    first = [row for row in _outcomes(0.0) if row[0] > 0]
    for gaps in product((STRONG, WEAK), repeat=2):
        joint = []
        for (a, b), gap in zip(first, gaps, strict=True):
            high, low = 1 / (1 + math.exp(-gap)), 1 / (1 + math.exp(gap))
            joint += [(a * high, b * low), (a * low, b * high)]
        for order, bound in zip(orders, known, strict=True):
            assert _renyi([a for a, _ in joint], [b for _, b in joint], order) <= bound * (
                1 + 1e-12
            )
        for epsilon in (0.0, 0.7, 1.5, 2.0):
            assert (
                sum(max(0.0, a - math.exp(epsilon) * b) for a, b in joint)
                <= curve.delta(epsilon) + 1e-12
            )


@pytest.mark.parametrize(("shape", "generating"), [(0.0, _logarithmic), (1.0, _geometric)])
def test_the_best_of_a_random_number_of_runs_of_different_kinds(
    shape: float, generating: Callable[[float, float], float]
) -> None:
    """Whatever the scores say of the outcomes: every order of them, by hand, below the bill of the
    worst kind.
    """
    gamma, orders = gamma_for(shape, 4.0), (1.5, 2.0, 4.0, 12.0)
    known = rdp.divergences(ev.RepeatAndSelect(BOTH, 4.0, shape), ADD, orders)
    for rows in permutations(_outcomes(0.4)):
        p, q = _selected(rows, lambda x: generating(x, gamma))
        for order, bound in zip(orders, known, strict=True):
            assert max(_renyi(p, q, order), _renyi(q, p, order)) <= bound


def test_the_worst_of_kinds_that_cross_is_above_both_and_close_to_them() -> None:
    kinds = [
        ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(noise)), 100)
        for rate, noise in ((0.064, 1.25), (0.256, 3.8))
    ]
    for shape in (0.0, math.inf):
        each = [accounting.epsilon(ev.RepeatAndSelect(kind, 20.0, shape), 1e-5) for kind in kinds]
        both = accounting.epsilon(ev.RepeatAndSelect(ev.OneOf(tuple(kinds)), 20.0, shape), 1e-5)
        assert max(each) * (1 - 1e-9) <= both <= 1.1 * max(each)
    alone = accounting.curve(ev.OneOf(tuple(kinds)))
    assert alone.epsilon(1e-5) == max(accounting.epsilon(kind, 1e-5) for kind in kinds)


def test_one_alone_is_itself_and_an_empty_choice_is_refused() -> None:
    assert ev.one_of([ev.Gaussian(1.0), ev.Gaussian(1.0)]) == ev.Gaussian(1.0)
    assert ev.one_of([ev.Gaussian(1.0), ev.Gaussian(2.0)]) == ev.OneOf(
        (ev.Gaussian(1.0), ev.Gaussian(2.0))
    )
    for wrong in ((), (ev.Gaussian(1.0), ev.Gaussian(1.0)), [ev.Gaussian(1.0)]):
        with pytest.raises(InvalidInput):
            ev.OneOf(wrong)  # type: ignore[arg-type]
