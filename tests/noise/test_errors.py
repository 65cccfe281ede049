"""Errors of given coefficients against verified numbers, and identities between the families."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpfy.core.unit import FixedOrder, SinglePass
from dpfy.noise.series import square_root
from dpfy.noise.strategy import Identity
from dpfy.noise.toeplitz import (
    Banded,
    Blt,
    NormalisedBanded,
    SquareRoot,
    cancelling,
    inverse_square_root_banded,
    square_root_banded,
)
from dpfy.noise.tree import Tree
from dpfy.noise.workload import Workload, buffers, errors, variances

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def closed(name: str, n: int):
    """The strategies that need no optimiser, by the name of their verified numbers."""
    table = {
        "identity": Banded((1.0,)),
        "sqrt": SquareRoot(),
        "sqrt_normalised": NormalisedBanded(tuple(square_root(n)), n),
        "tree_naive": Tree("completed"),
        "tree_honaker": Tree("honaker"),
    }
    table |= {f"banded_b{p}_bsr": square_root_banded(p) for p in (4, 16, 64)}
    table |= {f"bisr_p{p}": inverse_square_root_banded(p) for p in (2, 4, 16, 64)}
    return table.get(name)


@pytest.mark.parametrize("n", [16, 128, 1024])
def test_closed_form_families(n):
    checked = 0
    for name, numbers in GOLDEN["single"][str(n)].items():
        strategy = cancelling(numbers[2]) if name.startswith("cancelling") else closed(name, n)
        if strategy is not None:
            found = errors(strategy, SinglePass(), n)
            assert (found.rmse, found.max_error) == pytest.approx(numbers[:2], rel=1e-9), name
            checked += 1
    assert checked >= 11


@pytest.mark.parametrize("name", GOLDEN["given"])
def test_given_coefficients(name):
    n, family, _ = name.split()
    numbers, *expected = GOLDEN["given"][name]
    strategy = Banded(tuple(numbers)) if family == "banded" else Blt(*(tuple(v) for v in numbers))
    found = errors(strategy, SinglePass(), int(n))
    assert (found.sensitivity, found.rmse, found.max_error) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("identity", Banded((1.0,))),
        ("sqrt_full", SquareRoot()),
        ("tree_no_restart_naive", Tree("completed")),
        ("tree_no_restart_honaker", Tree("honaker")),
        ("tree_restart_each_epoch_naive", Tree("completed", restart=64)),
        ("tree_restart_each_epoch_honaker", Tree("honaker", restart=64)),
        *((f"BSR_p{p}", square_root_banded(p)) for p in (4, 8, 16, 32, 64)),
        *((f"bisr_p{p}", inverse_square_root_banded(p)) for p in (2, 4, 8, 16, 32, 64)),
    ],
)
def test_eight_epochs_of_64_steps(name, strategy):
    found = errors(strategy, FixedOrder(64, 8), 512)
    assert (found.sensitivity, found.rmse, found.max_error) == pytest.approx(
        GOLDEN["multi"][name], rel=1e-9
    )


@pytest.mark.parametrize(
    ("strategy", "rmse", "max_error"),
    [
        (Tree("completed", 20), 23.55843797877949, 33.166247903554),
        (Tree("completed", 20, True), 19.8997487421324, 27.92848008753788),
        (Tree("honaker", 20, True), 14.93697975011346, 20.989793438036227),
    ],
)
def test_restarted_and_completed_trees(strategy, rmse, max_error):
    found = errors(strategy, FixedOrder(20, 10), 200)
    assert (found.rmse, found.max_error) == pytest.approx((rmse, max_error), rel=1e-9)


@pytest.mark.parametrize(
    "workload", [Workload(), Workload(0.9), Workload(0.5, tuple(np.linspace(1, 0.1, 40)))]
)
@pytest.mark.parametrize(
    "strategy",
    [
        Identity(),
        square_root_banded(5),
        SquareRoot(),
        Blt((0.9, 0.3), (0.2, 0.1)),
        Tree("honaker", 8, True),
    ],
)
def test_variances_are_the_row_norms_of_the_dense_product(strategy, workload):
    a = np.array([[sum((workload.rates[i] if workload.rates else 1) * workload.momentum ** (i - j) for i in range(j, t + 1))  # noqa: E501
                   for j in range(40)] for t in range(40)])  # fmt: skip
    noise = np.eye(40) if isinstance(strategy, Identity) else strategy.noise_matrix(40)
    assert variances(strategy, 40, workload) == pytest.approx(
        ((a @ noise) ** 2).sum(axis=1), rel=1e-10
    )
    assert workload.matrix(40) == pytest.approx(a, rel=1e-12)


def test_encoder_and_noise_matrix_are_inverse():
    for strategy in (square_root_banded(5), SquareRoot(), Blt((0.9, 0.3), (0.2, 0.1)), inverse_square_root_banded(4),
                     NormalisedBanded((1.0, 0.5, 0.2), 30)):  # fmt: skip
        assert strategy.encoder(30) @ strategy.noise_matrix(30) == pytest.approx(
            np.eye(30), abs=1e-12
        )


def test_a_long_run_with_a_blt_designed_for_a_short_one():
    theta = (0.9992293193314552, 0.9889009708984329, 0.9218360612421706, 0.5627956816137543)
    strategy = Blt(theta, (0.037156507650895586, 0.0689715826308848, 0.16004947, 0.23056253))
    assert strategy.forever() == pytest.approx(1.8592466771163676, rel=1e-7)
    assert strategy.sensitivity(SinglePass(), 16384) == pytest.approx(strategy.forever(), rel=1e-8)


def test_buffers_as_stated():
    assert buffers(Identity(), 100) == 0
    assert buffers(square_root_banded(16), 100) == 15
    assert buffers(square_root_banded(16), 10) == 9
    assert buffers(inverse_square_root_banded(16), 100) == 0
    assert buffers(Blt((0.9, 0.3), (0.2, 0.1)), 10**6) == 2
    assert buffers(SquareRoot(), 100) == 99
    assert buffers(Tree("honaker"), 1024) == 10
