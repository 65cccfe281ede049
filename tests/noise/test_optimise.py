"""Optimisers: as good as the verified optima, never below the certified bound, exact gradients, and
no use of false formulas.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpfy.core.errors import Unsupported
from dpfy.core.unit import FixedOrder, Separated, SinglePass
from dpfy.noise import optimise
from dpfy.noise.optimise import blt
from dpfy.noise.optimise_dense import _Dual, dense, dense_for_epochs
from dpfy.noise.series import dense as toeplitz
from dpfy.noise.workload import Workload, errors

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
SCHEDULE = Workload(0.9, tuple(np.linspace(1, 0.05, 60)))


def figure(strategy, pattern, n, objective):
    found = errors(strategy, pattern, n)
    return found.rmse if objective == "mean" else found.max_error


@pytest.mark.parametrize("n", [16, 128, 1024])
def test_banded_and_blt_reach_the_verified_optima_for_one_pass(n):
    floor = {o: GOLDEN["single"][str(n)][f"dense_{o}"][0] for o in ("mean", "max")}
    for name, numbers in GOLDEN["single"][str(n)].items():
        family, _, rest = name.partition("_")
        if family not in ("banded", "normalised", "blt") or name.endswith("bsr"):
            continue
        size, _, objective = rest.partition("_")
        count = int(size[1:])
        if family == "blt":
            strategy, slack = blt(count, n, SinglePass(), objective), 1.005
        elif family == "banded":
            strategy, slack = optimise.banded(count, n, objective), 1.002
        else:
            strategy, slack = optimise.normalised_banded(count, n), 1.002
        best = figure(strategy, SinglePass(), n, objective)
        assert floor[objective] <= best <= numbers[0 if objective == "mean" else 1] * slack, name


@pytest.mark.parametrize("pattern", [FixedOrder(64, 8), Separated(64, 8)])
def test_optima_for_eight_epochs(pattern):
    n = 512
    for name, (_, rmse, max_error) in GOLDEN["multi"].items():
        if name.startswith("banded_toeplitz") and not name.endswith("colnorm"):
            *_, size, objective = name.split("_")
            strategy, slack = optimise.banded(int(size[1:]), n, objective), 1.002
        elif name.startswith("banded_toeplitz"):
            strategy, slack, objective = (
                optimise.normalised_banded(int(name.split("_")[2][1:]), n),
                1.002,
                "mean",
            )
        elif name.startswith("blt"):
            _, size, objective = name.split("_")
            strategy, slack = blt(int(size[1:]), n, pattern, objective), 1.005
        else:
            continue
        assert (
            figure(strategy, pattern, n, objective)
            <= (rmse if objective == "mean" else max_error) * slack
        ), name


@pytest.mark.parametrize("bands", [2, 4, 8, 16])
def test_band_inverse_strategies_for_eight_epochs(bands):
    fixed, separated = FixedOrder(64, 8), Separated(64, 8)
    golden = GOLDEN["multi"][f"bandinv_opt_p{bands}_mean"][1]
    assert errors(optimise.inverse_banded(bands, 512, fixed), fixed, 512).rmse <= golden * 1.002
    # Under separation C must be non-increasing for its sensitivity to be a theorem: a little worse,
    # and it does not raise.
    assert (
        errors(optimise.inverse_banded(bands, 512, separated), separated, 512).rmse <= golden * 1.13
    )


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize("n", [16, 128])
def test_the_dense_optimum_meets_its_certificate(n, objective):
    lower, achieved = GOLDEN["single"][str(n)][f"dense_{objective}"]
    found = dense(n, objective)
    assert found.lower_bound <= found.achieved <= found.lower_bound * (1 + 1.01e-6)
    assert found.lower_bound == pytest.approx(lower, rel=2e-6)
    assert figure(found.strategy, SinglePass(), n, objective) == pytest.approx(achieved, rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mean", "max"])
def test_the_dense_optimum_of_a_thousand_steps(objective):
    lower, achieved = GOLDEN["single"]["1024"][f"dense_{objective}"]
    found = dense(1024, objective)
    assert (
        lower * (1 - 1e-5)
        <= figure(found.strategy, SinglePass(), 1024, objective)
        <= achieved * 1.002
    )


@pytest.mark.parametrize(("period", "epochs"), [(64, 1), (8, 8), (16, 4), (10, 7)])
def test_the_dense_strategy_for_epochs_beats_the_banded_one(period, epochs):
    pattern, n = FixedOrder(period, epochs), 64
    strategy = dense_for_epochs(n, pattern)
    best = errors(strategy, pattern, n)
    assert best.sensitivity == pytest.approx(1, rel=2e-6)
    assert best.rmse < errors(optimise.banded(period, n), pattern, n).rmse
    gram = strategy.encoder(n).T @ strategy.encoder(n)
    same = np.subtract.outer(np.arange(n), np.arange(n)) % period == 0
    assert np.abs(gram[same & ~np.eye(n, dtype=bool)]).max(initial=0) < 1e-12
    if epochs == 1:
        assert best.rmse == pytest.approx(dense(n).achieved, rel=1e-5)


@pytest.mark.slow
def test_the_dense_strategy_for_eight_epochs_of_64_steps():
    found = errors(dense_for_epochs(512, FixedOrder(64, 8)), FixedOrder(64, 8), 512)
    assert found.rmse <= 8.576946220067713 * 1.002


def test_the_dense_strategy_for_epochs_is_valid_for_its_order_only():
    """Few patterns are enumerated, and cost more; many raise."""
    assert dense_for_epochs(24, FixedOrder(8, 3)).sensitivity(Separated(8, 3), 24) > 1.01
    with pytest.raises(Unsupported, match="FixedOrder"):
        dense_for_epochs(64, FixedOrder(8, 8)).sensitivity(Separated(6, 8), 64)


def test_the_dual_gradient_is_exact():
    rng = np.random.default_rng(0)
    a = np.tril(np.ones((12, 12)))[:, np.concatenate([np.arange(s, 12, 4) for s in range(4)])]
    dual = _Dual(a.T @ a, [3] * 4)
    point = np.concatenate(
        [(np.eye(3) + 0.3 * rng.normal(size=(3, 3)))[p] for p in dual.places]
        + [0.2 * rng.normal(size=4)]
    )
    slope = dual.negative(point)[1]
    for i in range(len(point)):
        step = np.zeros_like(point)
        step[i] = 1e-5
        numeric = (dual.negative(point + step)[0] - dual.negative(point - step)[0]) / 2e-5
        assert numeric == pytest.approx(slope[i], rel=1e-5, abs=1e-6)


def test_all_bands_with_the_max_objective_are_the_square_root():
    assert optimise.banded(16, 16, "max").coefficient[:4] == pytest.approx(
        (1, 0.5, 0.375, 0.3125), abs=1e-6
    )


def test_one_band_is_dp_sgd():
    assert optimise.banded(1, 100).coefficient == (1.0,)
    assert errors(optimise.banded(1, 100), SinglePass(), 100).rmse == pytest.approx(
        np.sqrt(50.5), rel=1e-9
    )


@pytest.mark.parametrize("workload", [Workload(), Workload(0.9), SCHEDULE])
def test_the_objective_is_the_error_and_its_gradient_exact(workload):
    rng = np.random.default_rng(0)
    d = rng.normal(size=60) * 0.2
    error = optimise.StrategyObjective(60, "mean", workload)
    value, slope = error(d)
    assert value == pytest.approx((workload.apply(toeplitz(d)) ** 2).sum() / 60, rel=1e-10)
    for i in (0, 1, 7, 59):
        moved = d.copy()
        moved[i] += 1e-2
        back = d.copy()
        back[i] -= 1e-2
        assert (error(moved)[0] - error(back)[0]) / 2e-2 == pytest.approx(
            slope[i], rel=1e-6, abs=1e-8
        )


@pytest.mark.parametrize("workload", [Workload(0.9), SCHEDULE])
def test_optimising_for_the_workload_at_hand_helps(workload):
    plain, tuned = optimise.banded(6, 60), optimise.banded(6, 60, workload=workload)
    at = lambda s: errors(s, SinglePass(), 60, workload).rmse  # noqa: E731
    assert at(tuned) <= at(plain)
    assert at(blt(2, 60, SinglePass(), workload=workload)) <= at(blt(2, 60, SinglePass())) * 1.0001
    bound = dense(60, workload=workload)
    assert bound.lower_bound <= errors(bound.strategy, SinglePass(), 60, workload).rmse <= at(tuned)


def test_the_max_objective_has_no_meaning_here_for_a_schedule():
    with pytest.raises(Unsupported, match="mean"):
        optimise.banded(3, 60, "max", SCHEDULE)
    with pytest.raises(Unsupported, match="banded or BLT"):
        dense(5000)


@pytest.mark.parametrize(
    ("steps", "most", "separation"), [(10, 3, 4), (10, 2, 4), (17, 17, 1), (101, 34, 3), (7, 1, 9)]
)
def test_the_overlay_of_every_shift_is_that_of_the_definition(steps, most, separation):
    """Running sums where every shift counts: thousands of epochs take no longer than one."""
    c = np.random.default_rng(steps).random(steps)
    shifts = np.array([np.concatenate([np.zeros(j * separation), c])[:steps] for j in range(most)])
    total = shifts.sum(axis=0)
    slope = [
        2 * sum(total[i + j * separation] for j in range(most) if i + j * separation < steps)
        for i in range(steps)
    ]
    value, gradient = optimise.squared_overlay(c, most, separation)
    assert value == pytest.approx(float(total @ total), rel=1e-12)
    assert gradient == pytest.approx(slope, rel=1e-12)


def test_a_separation_beyond_the_steps_takes_no_room():
    c = np.random.default_rng(0).random(6)
    value, gradient = optimise.squared_overlay(c, 1, 6_112_506_801)
    assert value == pytest.approx(float(c @ c))
    assert gradient == pytest.approx(2 * c)
