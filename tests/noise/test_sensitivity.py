"""Closed-form sensitivities against enumeration, verified numbers, and the cases in which the
formulas are no theorems.
"""

from __future__ import annotations

import json
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest

from dpfy.core.errors import Unsupported
from dpfy.core.unit import (
    CyclicPoisson,
    FixedOrder,
    Poisson,
    Reshuffled,
    SecretBins,
    Separated,
    SinglePass,
)
from dpfy.noise import sensitivity, series
from dpfy.noise.dense import dense
from dpfy.noise.toeplitz import (
    Banded,
    Blt,
    InverseBanded,
    NormalisedBanded,
    SquareRoot,
    cancelling,
    inverse_square_root_banded,
    square_root_banded,
)
from dpfy.noise.tree import Tree

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
FIXED_BLT = Blt((0.99, 0.9, 0.5), (0.15585034013605462, 0.23333333333333323, 0.14081632653061224))


def formula(n: int) -> np.ndarray:
    """A non-negative matrix with no structure to lean on."""
    i, j = np.indices((n, n))
    return np.where(i >= j, (1 + 0.1 * ((3 * i + 5 * j) % 7)) / (1 + np.abs(i - j)), 0.0)


def spread(n: int, most: int, separation: int) -> list[tuple[int, ...]]:
    """All sets of at most k steps that are at least b apart."""
    sets = [c for k in range(1, most + 1) for c in combinations(range(n), k)]
    return [c for c in sets if all(b - a >= separation for a, b in pairwise(c))]


def brute(matrix: np.ndarray, sets: list[tuple[int, ...]]) -> float:
    """The largest ||C u|| over sets and signs: contributions of norm one in one dimension."""
    best = 0.0
    for places in sets:
        for signs in product((1.0, -1.0), repeat=len(places) - 1):
            u = np.zeros(matrix.shape[1])
            u[list(places)] = (1.0, *signs)
            best = max(best, float(np.linalg.norm(matrix @ u)))
    return best


def periodic(n: int, most: int, period: int) -> list[tuple[int, ...]]:
    return [tuple(range(s, n, period))[:k] for s in range(n) for k in range(1, most + 1)]


@pytest.mark.parametrize("seed", range(25))
def test_closed_forms_equal_enumeration_for_random_non_increasing_coefficients(seed):
    rng = np.random.default_rng(seed)
    n, b, k = int(rng.integers(3, 13)), int(rng.integers(1, 5)), int(rng.integers(1, 5))
    c = np.sort(rng.uniform(0, 1, n))[::-1] + 1e-9
    c[int(rng.integers(1, n + 1)) :] = 0
    full = series.dense(c)
    found = Banded(tuple(c[: series.width(c)]))
    assert found.sensitivity(Separated(b, k), n) == pytest.approx(
        brute(full, spread(n, min(k, 4), b)), rel=1e-9
    )
    assert found.sensitivity(FixedOrder(b, k), n) == pytest.approx(
        brute(full, periodic(n, k, b)), rel=1e-9
    )
    assert found.sensitivity(SinglePass(), n) == pytest.approx(
        brute(full, periodic(n, 1, 1)), rel=1e-9
    )


@pytest.mark.parametrize("seed", range(10))
def test_bands_within_the_separation_are_exact_for_any_signs(seed):
    rng = np.random.default_rng(seed)
    n, b = 12, 3
    c = rng.normal(size=b)
    c[0] = abs(c[0]) + 0.1
    full = series.dense(series.padded(c, n))
    assert Banded(tuple(c)).sensitivity(Separated(b, 3), n) == pytest.approx(
        brute(full, spread(n, 3, b)), rel=1e-9
    )
    assert Banded(tuple(c)).sensitivity(FixedOrder(b, 4), n) == pytest.approx(
        brute(full, periodic(n, 4, b)), rel=1e-9
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_fixed_order_needs_no_monotone_coefficients(seed):
    rng = np.random.default_rng(seed)
    c = rng.uniform(0, 1, 12)
    assert Banded(tuple(c)).sensitivity(FixedOrder(3, 4), 12) == pytest.approx(
        brute(series.dense(c), periodic(12, 4, 3)), rel=1e-9
    )


@pytest.mark.parametrize(
    ("coefficients", "n", "b", "k"),
    [
        ([1, 0, 0, 0.9], 8, 2, 2),
        ([1, -0.6, 0.3], 8, 2, 3),
        ([1, 0.5, 0.25, 0.6], 10, 2, 3),
        ([1, 0.9, 0.95], 9, 2, 3),
    ],
)
def test_negative_or_increasing_coefficients_wider_than_the_separation_raise(coefficients, n, b, k):
    with pytest.raises(Unsupported, match="at most as many bands"):
        Banded(tuple(coefficients)).sensitivity(Separated(b, k), n)


def test_a_rise_of_one_rounding_error_is_no_rise():
    slow = Blt((1 - 1e-15, 0.5), (0.1, 0.2))
    assert slow.sensitivity(Separated(4, 5), 500) == pytest.approx(
        slow.sensitivity(FixedOrder(4, 5), 500), rel=1e-11
    )


def test_the_raw_closed_form_would_be_too_small_there():
    raw = float(np.linalg.norm(sensitivity.overlay(series.padded([1, 0, 0, 0.9], 8), 2, 2)))
    truth = brute(series.dense(series.padded([1, 0, 0, 0.9], 8)), spread(8, 2, 2))
    assert raw == pytest.approx(1.9026297590440449, rel=1e-12)
    assert truth == pytest.approx(2.328089345364563, rel=1e-12)


def test_more_bands_than_the_separation_count_the_overlap():
    wide = square_root_banded(8)
    assert wide.sensitivity(Separated(4, 3), 40) > 1.05 * np.sqrt(3) * wide.sensitivity(
        SinglePass(), 40
    )


def test_poisson_with_bands_names_cyclic_poisson():
    with pytest.raises(Unsupported, match="cyclic Poisson"):
        square_root_banded(2).sensitivity(Poisson(0.1), 10)
    with pytest.raises(Unsupported, match="cyclic Poisson"):
        SquareRoot().sensitivity(Poisson(0.1), 10)
    assert square_root_banded(1).sensitivity(Poisson(0.1), 10) == pytest.approx(1, rel=1e-11)


def test_cyclic_poisson_needs_a_cycle_as_long_as_the_bands():
    strategy = square_root_banded(4)
    assert strategy.sensitivity(CyclicPoisson(0.1, 4), 100) == pytest.approx(
        np.linalg.norm([1, 0.5, 0.375, 0.3125]), rel=1e-11
    )
    with pytest.raises(Unsupported, match="cycle of at least 4"):
        strategy.sensitivity(CyclicPoisson(0.1, 3), 100)
    assert NormalisedBanded((1.0, 0.5, 0.2), 30).sensitivity(
        CyclicPoisson(0.1, 3), 30
    ) == pytest.approx(1, rel=1e-11)
    with pytest.raises(Unsupported, match="cycle of 2"):
        NormalisedBanded((1.0, 0.5, 0.2), 30).sensitivity(CyclicPoisson(0.1, 2), 30)


def test_reshuffled_epochs_have_no_proof_beyond_one_band():
    assert Banded((2.0,)).sensitivity(Reshuffled(5, 4), 20) == pytest.approx(4, rel=1e-11)
    with pytest.raises(Unsupported, match="FixedOrder"):
        square_root_banded(2).sensitivity(Reshuffled(5, 4), 20)
    with pytest.raises(Unsupported, match="FixedOrder"):
        dense(formula(20)).sensitivity(Reshuffled(5, 4), 20)


def test_balls_in_bins_needs_non_negative_entries():
    assert square_root_banded(3).sensitivity(SecretBins(5, 4), 20) == square_root_banded(
        3
    ).sensitivity(FixedOrder(5, 4), 20)
    with pytest.raises(Unsupported, match="non-negative"):
        Banded((1.0, -0.1)).sensitivity(SecretBins(5, 4), 20)


CASES = {
    "identity": Banded((1.0,)),
    "sqrt_full": SquareRoot(),
    "BSR_p16": square_root_banded(16),
    "blt3_fixed": FIXED_BLT,
    "bisr_p4": inverse_square_root_banded(4),
    "lambda_cgd_0.9": cancelling(0.9),
    "dense_formula_n512": dense(formula(512)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_verified_sensitivities_at_512_steps(name, k):
    closed, fixed, bound = GOLDEN["sensitivities"][name][f"k{k}"]
    strategy = CASES[name]
    assert strategy.sensitivity(FixedOrder(64, k), 512) == pytest.approx(fixed, rel=1e-9)
    if closed is not None:
        assert strategy.sensitivity(Separated(64, k), 512) == pytest.approx(closed, rel=1e-9)
    elif k > 1:
        with pytest.raises(Unsupported, match="FixedOrder"):
            strategy.sensitivity(Separated(64, k), 512)
    matrix = strategy.encoder(512)
    assert sensitivity.separated_bound(matrix.T @ matrix, k, 64) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize(
    ("k", "b", "exact", "bound"),
    [
        (1, 1, 1.8307929368931315, 1.8307929368931315),
        (2, 3, 2.8442671454916386, 2.8442671454916386),
        (3, 3, 3.6152338159993502, 3.620555985667854),
        (3, 4, 3.3298477098772934, 3.3298477098772934),
        (4, 2, 4.622371111685889, 4.657651090844745),
    ],
)
def test_small_dense_matrices_are_enumerated_and_the_two_stage_value_is_only_a_bound(
    k, b, exact, bound
):
    matrix = formula(12)
    assert dense(matrix).sensitivity(Separated(b, k), 12) == pytest.approx(exact, rel=1e-9)
    assert dense(matrix).sensitivity(FixedOrder(b, k), 12) == pytest.approx(
        brute(matrix, periodic(12, k, b)), rel=1e-9
    )
    assert sensitivity.separated_bound(matrix.T @ matrix, k, b) == pytest.approx(bound, rel=1e-9)
    assert brute(matrix, spread(12, k, b)) == pytest.approx(exact, rel=1e-9)


def test_a_dense_matrix_with_negative_inner_products_on_the_pattern_raises():
    matrix = np.eye(6)
    matrix[2, 0], matrix[2, 2] = -0.5, 1.0
    with pytest.raises(Unsupported, match="non-negative"):
        dense(matrix).sensitivity(FixedOrder(2, 3), 6)
    assert dense(matrix).sensitivity(SinglePass(), 6) == pytest.approx(np.sqrt(1.25), rel=2e-6)


def test_a_horizon_that_cuts_the_last_column_short():
    for n, value in ((500, 7.377406551650333), (449, 6.768393872757576), (448, 6.645661593860267)):
        assert SquareRoot().sensitivity(Separated(64, 8), n) == pytest.approx(value, rel=1e-9)


def test_the_tree_of_the_study():
    tree, epochs = Tree("completed"), FixedOrder(120, 10)
    assert tree.squared_sensitivity(epochs, 1200) == 225
    assert tree.squared_sensitivity(Reshuffled(120, 10), 1200) == 255
    assert Tree("completed", restart=120).squared_sensitivity(epochs, 1200) == 70
    assert Tree("completed", restart=120, completion=True).squared_sensitivity(epochs, 1200) == 80
    with pytest.raises(Unsupported, match="fixed order"):
        tree.sensitivity(Separated(120, 10), 1200)
    with pytest.raises(Unsupported, match="fixed order"):
        tree.sensitivity(Poisson(0.01), 1200)


@pytest.mark.parametrize(
    ("b", "k", "n"), [(3, 3, 9), (4, 3, 12), (5, 2, 10), (3, 4, 11), (2, 5, 10)]
)
@pytest.mark.parametrize(("restart", "completion"), [(0, False), (4, False), (5, True), (3, True)])
def test_tree_sensitivities_equal_enumeration(b, k, n, restart, completion):
    tree = Tree("completed", restart, completion)
    matrix = tree.encoder(n)
    anywhere = [
        tuple(e * b + p for e, p in enumerate(c) if e * b + p < n)
        for c in product(range(b), repeat=k)
    ]
    best = max(float((matrix[:, list(s)].sum(axis=1) ** 2).sum()) for s in anywhere)
    fixed = max(float((matrix[:, list(s)].sum(axis=1) ** 2).sum()) for s in periodic(n, k, b))
    assert tree.squared_sensitivity(Reshuffled(b, k), n) == best
    assert tree.squared_sensitivity(FixedOrder(b, k), n) == fixed


def test_the_sensitivity_is_never_below_that_of_the_coefficients_used_in_single_precision():
    for strategy in (InverseBanded((1.0, -0.3, -0.1)), FIXED_BLT, square_root_banded(8)):
        if isinstance(strategy, Blt):
            used = Blt(
                tuple(series.single(t) for t in strategy.theta),
                tuple(series.single(w) for w in strategy.omega),
            )
        elif isinstance(strategy, InverseBanded):
            used = InverseBanded(tuple(series.single(d) for d in strategy.noising_coefficient))
        else:
            used = Banded(tuple(series.single(c) for c in strategy.coefficient))
        for pattern in (SinglePass(), FixedOrder(10, 7), Separated(8, 5)):
            assert used.sensitivity(pattern, 70) <= strategy.sensitivity(pattern, 70)
