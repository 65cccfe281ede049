"""Inference on junction trees against brute force, and rows in the proportions of a model."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from dpfy.core.errors import InvalidInput
from dpfy.synthetic.graph import JunctionTree, model_cells, triangulated
from dpfy.synthetic.inference import CliqueVector, spread, summed
from dpfy.synthetic.rows import drawn, in_proportion, table_of


def random_model(rng, *, most_cells=100_000, scale=3.0):
    """Sizes, and log potentials on random marginals of up to four columns; some cells are
    forbidden.
    """
    while True:
        columns = int(rng.integers(2, 9))
        sizes = [int(v) for v in rng.integers(2, 8, columns)]
        if math.prod(sizes) <= most_cells:
            break
    cliques = {
        tuple(
            sorted(rng.choice(columns, int(rng.integers(1, min(columns, 4) + 1)), False).tolist())
        )
        for _ in range(int(rng.integers(1, 8)))
    }
    potentials = [
        (c, torch.from_numpy(rng.normal(0, scale, [sizes[v] for v in c]))) for c in sorted(cliques)
    ]
    if rng.random() < 0.5:
        clique, logs = potentials[0]
        mask = torch.from_numpy(rng.random(logs.shape) < 0.3)
        mask.view(-1)[0] = False
        potentials.append((clique, torch.where(mask, -math.inf, 0.0).double()))
    return sizes, potentials


def joint(sizes, potentials):
    """All cells at once."""
    everything = tuple(range(len(sizes)))
    logs = torch.zeros(sizes, dtype=torch.float64)
    for clique, values in potentials:
        logs = logs + spread(values, clique, everything)
    whole = torch.exp(logs - logs.max())
    return whole / whole.sum()


def test_every_marginal_against_brute_force():
    """60 random models of up to 100,000 cells: all marginals of one, two and three columns, and all
    tables.
    """
    rng = np.random.default_rng(0)
    for _ in range(60):
        sizes, potentials = random_model(rng)
        whole, everything = joint(sizes, potentials), tuple(range(len(sizes)))
        beliefs = CliqueVector.calibrated(
            JunctionTree.of(sizes, [c for c, _ in potentials]), potentials
        )
        for degree in (1, 2, 3):
            for clique in combinations(everything, min(degree, len(sizes))):
                assert torch.allclose(
                    beliefs.marginal(clique), summed(whole, everything, clique), atol=1e-12
                )


def test_huge_potentials_that_cancel_out_do_no_harm():
    sizes = [3, 4, 3]
    big = torch.tensor([0.0, 2000.0, -2000.0, 700.0], dtype=torch.float64)
    rng = np.random.default_rng(1)
    small = [
        ((0, 1), torch.from_numpy(rng.normal(size=(3, 4)))),
        ((1, 2), torch.from_numpy(rng.normal(size=(4, 3)))),
    ]
    shifted = [((0, 1), small[0][1] + big), ((1, 2), small[1][1] - big[:, None])]
    tree = JunctionTree.of(sizes, [(0, 1), (1, 2)])
    for clique in ((0,), (0, 2), (0, 1, 2)):
        one, other = (
            CliqueVector.calibrated(tree, held).marginal(clique) for held in (small, shifted)
        )
        assert torch.allclose(one, other, atol=1e-12)


def test_what_cannot_be_at_all_is_refused():
    never = [((0, 1), torch.full((2, 2), -math.inf, dtype=torch.float64))]
    with pytest.raises(InvalidInput, match="at least one combination"):
        CliqueVector.calibrated(JunctionTree.of([2, 2], [(0, 1)]), never)


def test_trees_have_the_running_intersection_property():
    rng = np.random.default_rng(3)
    for _ in range(100):
        columns = int(rng.integers(1, 14))
        sizes = [int(v) for v in rng.integers(2, 50, columns)]
        cliques = [
            tuple(
                sorted(
                    rng.choice(columns, int(rng.integers(1, min(columns, 3) + 1)), False).tolist()
                )
            )
            for _ in range(int(rng.integers(0, 20)))
        ]
        tree = JunctionTree.of(sizes, cliques)
        assert all(tree.home(clique) is not None for clique in cliques)
        assert {v for clique in tree.cliques for v in clique} == set(range(columns))
        assert sorted(tree.order) == list(range(len(tree.cliques)))
        assert tree.parent.count(-1) == 1
        for v in range(columns):  # the tables that hold a column are connected
            holding = {i for i, clique in enumerate(tree.cliques) if v in clique}
            assert sum(tree.parent[i] in holding for i in holding) == len(holding) - 1
        assert model_cells(sizes, cliques) == sum(
            math.prod(sizes[v] for v in c) for c in triangulated(sizes, cliques)
        )


def test_a_change_that_is_passed_on_equals_a_new_calibration():
    rng = np.random.default_rng(4)
    sizes = [3, 4, 5, 2]
    potentials = [
        (c, torch.from_numpy(rng.normal(size=[sizes[v] for v in c])))
        for c in ((0, 1), (1, 2), (2, 3))
    ]
    tree = JunctionTree.of(sizes, [c for c, _ in potentials])
    beliefs = CliqueVector.calibrated(tree, potentials)
    start = tree.home((0, 1))
    change = torch.from_numpy(rng.normal(size=(3, 4)))
    table = beliefs.tables[start] * torch.exp(change)
    beliefs.tables[start] = table / table.sum()
    seen, stack = {start}, [start]
    while stack:
        i = stack.pop()
        for j in tree.neighbours[i]:
            if j not in seen:
                beliefs.pass_on(i, j)
                seen.add(j)
                stack.append(j)
    due = CliqueVector.calibrated(tree, [*potentials, ((0, 1), change)])
    for clique in ((3,), (2, 3), (0, 3)):
        assert torch.allclose(beliefs.marginal(clique), due.marginal(clique), atol=1e-12)


def test_rows_have_the_proportions_of_the_model():
    """Tables of the model come out to within a few rows in every cell; marginals across tables
    nearly so, far better than by chance.
    """
    rng = np.random.default_rng(5)
    sizes = [4, 5, 3, 6]
    potentials = [
        (c, torch.from_numpy(rng.normal(0, 1, [sizes[v] for v in c])))
        for c in ((0, 1), (1, 2), (2, 3))
    ]
    beliefs = CliqueVector.calibrated(
        JunctionTree.of(sizes, [c for c, _ in potentials]), potentials
    )
    count = 20_000
    rows = drawn(beliefs, count, rng)
    for clique in ((0, 1), (1, 2), (2, 3)):
        due = beliefs.marginal(clique).numpy() * count
        assert np.abs(table_of(rows, clique, due.shape) - due).max() < 5
    due = beliefs.marginal((0, 3)).numpy() * count
    by_chance = np.sqrt(2 / np.pi * due).sum()
    assert np.abs(table_of(rows, (0, 3), due.shape) - due).sum() < 0.5 * by_chance


def test_values_are_given_out_in_proportion():
    rng = np.random.default_rng(6)
    weights = np.array([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0], [-1.0, 2.0, 0.0]])
    keys = np.repeat([0, 1, 2], [400, 300, 50])[rng.permutation(750)]
    found = in_proportion(weights, keys, rng)
    assert np.bincount(found[keys == 0], minlength=3).tolist() == [100, 0, 300]
    assert np.bincount(found[keys == 1], minlength=3).tolist() == [100, 100, 100]
    assert np.bincount(found[keys == 2], minlength=3).tolist() == [0, 50, 0]
    assert len(in_proportion(weights, np.zeros(0, np.int64), rng)) == 0
