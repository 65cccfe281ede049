"""Truncated Poisson batches by brute force: every sample of small data sets, exact divergences,
neighbours in both directions.

A data set is a list of contributions in [-1, 1]; a batch of more than `most` drawn units keeps that
many, uniformly chosen.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict

import numpy as np
import pytest
from scipy.special import ndtr
from typer.testing import CliRunner

from dpfy import accounting
from dpfy.core import events as ev
from dpfy.core.unit import Adjacency

ADD, REPLACE, ZERO = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
SLACK = 1e-9

Mixture = dict[float, float]


def sums(units: tuple[float, ...], rate: float, most: int) -> Mixture:
    """The sums of all batches, with their probabilities."""
    found: Mixture = defaultdict(float)
    for drawn in itertools.product((False, True), repeat=len(units)):
        chance = math.prod(rate if d else 1 - rate for d in drawn)
        if chance == 0:
            continue
        batch = [u for u, d in zip(units, drawn, strict=True) if d]
        kept = list(itertools.combinations(batch, most)) if len(batch) > most else [tuple(batch)]
        for some in kept:
            found[round(sum(some), 9)] += chance / len(kept)
    return found


def hockey_stick(one: Mixture, other: Mixture, sigma: float, epsilon: float) -> float:
    """The mass by which a mixture of Gaussians exceeds e^epsilon times another: exact between the
    points where the sign changes.

    A grid finds the changes; on every piece the mass is a difference of normal distribution
    functions, so that a change that the grid misses makes the figure smaller, never larger than the
    truth.
    """
    ends = [*one, *other]
    grid = np.linspace(min(ends) - 12 * sigma, max(ends) + 12 * sigma, 4001)

    def mass(side: Mixture, at: np.ndarray, density: bool) -> np.ndarray:
        total = np.zeros_like(at)
        for mean, weight in side.items():
            z = (at - mean) / sigma
            total += weight * (np.exp(-(z**2) / 2) if density else ndtr(z))
        return total

    middle = (grid[1:] + grid[:-1]) / 2
    above = mass(one, middle, True) > math.exp(epsilon) * mass(other, middle, True)
    exceeded = np.diff(mass(one, grid, False)) - math.exp(epsilon) * np.diff(
        mass(other, grid, False)
    )
    return float(exceeded[above].sum())


def worst(
    pairs: list[tuple[tuple[float, ...], tuple[float, ...]]],
    event: ev.TruncatedPoissonGaussian,
    epsilon: float,
) -> float:
    """The largest delta of any of these neighbours, in both directions."""
    found = 0.0
    for one, other in pairs:
        a, b = (sums(units, event.rate, event.most) for units in (one, other))
        found = max(
            found,
            *(hockey_stick(*pair, event.noise_multiplier, epsilon) for pair in ((a, b), (b, a))),
        )
    return found


def neighbours(
    size: int, adjacency: Adjacency, rng: np.random.Generator
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Neighbours of data sets of `size` units: extreme ones, and some at random."""
    pairs = []
    others = [
        *itertools.product((-1.0, 0.0, 1.0), repeat=1),
        *[tuple(rng.choice([-1.0, 0.0, 1.0], 1)) for _ in range(2)],
    ]
    for (same,) in others:
        rest = tuple([same] * (size - 1))
        mixed = tuple(rng.choice([-1.0, 0.0, 1.0], size - 1))
        for base in {rest, mixed}:
            if adjacency is ADD:
                more = (*base, float(rng.choice([-1.0, 1.0])))
                pairs += [
                    ((*base, 1.0), base),
                    (more, base),
                ]  # a unit is removed from a data set of `size`
                pairs += [
                    ((*more, -1.0), more),
                    ((*base, same, -same if same else 1.0), (*base, same)),
                ]  # one is added to it
            elif adjacency is REPLACE:
                pairs.append(((*base, 1.0), (*base, -1.0)))
            else:
                pairs.append(((*base, 1.0), (*base, 0.0)))
    return pairs


def check(
    event: ev.TruncatedPoissonGaussian, adjacency: Adjacency, rng: np.random.Generator
) -> None:
    curve = accounting.curve(event, adjacency=adjacency)
    renyi = accounting.curve(event, adjacency=adjacency, accountant="rdp")
    pairs = neighbours(event.source_size, adjacency, rng)
    for epsilon in (0.0, 1.0, 3.0, 6.0):
        true = worst(pairs, event, epsilon)
        assert true <= curve.delta(epsilon) * (1 + 1e-6) + SLACK, (
            event,
            adjacency,
            epsilon,
            true,
            curve.delta(epsilon),
        )
        assert true <= renyi.delta(epsilon) * (1 + 1e-6) + SLACK, (event, adjacency, epsilon)
    for delta in (1e-2,):
        assert worst(pairs, event, curve.epsilon(delta)) <= delta * (1 + 1e-6) + SLACK


def setting(seed: int) -> tuple[ev.TruncatedPoissonGaussian, np.random.Generator]:
    rng = np.random.default_rng([1, seed])
    size = int(rng.integers(1, 7))
    rate = 1.0 if rng.random() < 0.25 else float(rng.uniform(0.05, 0.99))
    near = round(size * rate) + int(
        rng.integers(-1, 2)
    )  # truncation matters near the mean, and at the size itself
    most = size if rng.random() < 0.4 else max(1, near)
    return ev.TruncatedPoissonGaussian(size, rate, most, float(rng.uniform(0.5, 2))), rng


@pytest.mark.parametrize("adjacency", [ADD, REPLACE, ZERO])
@pytest.mark.parametrize("seed", range(12))
def test_the_accountant_is_never_below_the_brute_force(seed, adjacency):
    event, rng = setting(seed)
    check(event, adjacency, rng)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", [ADD, REPLACE, ZERO])
@pytest.mark.parametrize("seed", range(100, 160))
def test_the_accountant_is_never_below_the_brute_force_in_many_settings(seed, adjacency):
    event, rng = setting(seed)
    check(event, adjacency, rng)


@pytest.mark.parametrize(("size", "most"), [(1, 1), (3, 3), (4, 3), (5, 1)])
def test_a_unit_more_pushes_another_one_out_of_a_full_batch(size, most):
    """All units are drawn: with one more, one of the others is left out, and the sum may move by
    two bounds.
    """
    event = ev.TruncatedPoissonGaussian(size, 1.0, most, 1.0)
    full, fuller = (-1.0,) * size, (*(-1.0,) * size, 1.0)
    curve = accounting.curve(event)
    for epsilon in (0.5, 2.0, 5.0):
        true = worst([(full, fuller)], event, epsilon)
        assert true <= curve.delta(epsilon) * (1 + 1e-6)
        if most == size:
            replaced = accounting.curve(ev.Gaussian(1.0), adjacency=REPLACE).delta(epsilon)
            assert (
                0.2 * replaced < true <= curve.delta(epsilon) <= replaced * (1 + 1e-3)
            )  # and no more is charged than for a swap


def test_the_command_line_charges_for_the_unit_that_is_pushed_out():
    from dpfy.cli.app import app

    command = (
        "plan account --noise-multiplier 1 --sampling truncated-poisson --sampling-rate 1 --records 100 "
        "--batch-size 100 --steps 1"
    )
    answer = json.loads(
        CliRunner().invoke(app, [*command.split(), "--delta", "1e-5", "--json"]).stdout
    )
    assert 9.97 < answer["epsilon"] < 10.01
    assert answer["epsilon_lower"] <= answer["epsilon"]


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.1, 1.5, 3.0])
def test_two_sizes_that_differ_by_one_cost_nearly_the_same(factor):
    """Whether the stated size counts the unit or not makes no jump, and far above the batch
    truncation costs nothing.
    """
    most = round(200 * factor)
    some = [
        accounting.epsilon(ev.Repeated(ev.TruncatedPoissonGaussian(size, 0.2, most, 2.0), 5), 1e-5)
        for size in (999, 1000, 1001)
    ]
    assert max(some) <= min(some) * 1.02
    plain = accounting.epsilon(ev.Repeated(ev.PoissonSampled(0.2, ev.Gaussian(2.0)), 5), 1e-5)
    if factor >= 1.5:
        assert some[1] == pytest.approx(plain, rel=1e-4)
