"""Choosing a mechanism: the calibration tables, the recipes, and the reasons."""

from __future__ import annotations

import json

import pytest

import dpfy
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import (
    Adjacency,
    CyclicPoisson,
    FixedOrder,
    Poisson,
    Reshuffled,
    SecretBins,
    Separated,
    SinglePass,
)
from dpfy.gradients.clip import FlatClip
from dpfy.noise.dense import dense
from dpfy.noise.strategy import Identity
from dpfy.noise.toeplitz import Banded, Blt, NormalisedBanded, SquareRoot, square_root_banded
from dpfy.noise.tree import Tree
from dpfy.plan import pairs
from dpfy.plan.auto import MECHANISMS, CalibrationTarget, RunSetting, auto, compare, recipe_for
from dpfy.plan.correlated import bandmf, blt, dpftrl, fixed_order, with_strategy
from dpfy.plan.recipe import Plan, Recipe
from dpfy.sampling.samplers import BallsInBinsSampler, ReshuffledSampler, SeparatedSampler

# (records, batch, steps), epsilon, delta -> verified rmse of mean-gradient prefix sums at clip 1
TABLES = [
    ((5000, 25, 200), 1.0, 1e-6,
     {("dp-sgd", "poisson"): 0.34900999, ("band-mf", "cyclic-poisson"): 0.23079785, ("dp-sgd", "fixed-order"): 1.69409097,  # noqa: E501
      ("band-mf", "fixed-order"): 0.42893425, ("blt", "fixed-order"): 0.42906119, ("sqrt", "fixed-order"): 0.43774118}),
    ((5000, 250, 200), 3.41, 1e-5,
     {("dp-sgd", "poisson"): 0.047899, ("band-mf", "cyclic-poisson"): 0.043402, ("band-mf", "fixed-order"): 0.049612,
      ("blt", "fixed-order"): 0.052592, ("sqrt", "fixed-order"): 0.068800, ("tree", "fixed-order"): 0.074242}),
    ((60000, 500, 2400), 8.0, 1e-6,
     {("dp-sgd", "poisson"): 0.045270, ("band-mf", "cyclic-poisson"): 0.024446, ("band-mf", "fixed-order"): 0.026723,
      ("blt", "fixed-order"): 0.028250, ("tree", "fixed-order"): 0.043285}),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "epsilon", "delta", "verified"), TABLES)
def test_the_calibration_tables(setting, epsilon, delta, verified):
    rows = {
        (c.mechanism, c.sampling): c
        for c in compare(*setting, CalibrationTarget(epsilon, delta), dense=False)
    }
    for key, rmse in verified.items():
        assert rows[key].rmse == pytest.approx(rmse, rel=1e-4), key
        assert rows[key].plan.epsilon <= epsilon
    assert [c.rmse for c in rows.values()] == pytest.approx(
        sorted(c.rmse for c in rows.values()), rel=1e-4
    )


@pytest.mark.parametrize(
    "setting", [(100, 10, 1), (100, 100, 5), (100, 7, 13), (50, 1, 60), (1000, 1000, 1)]
)
def test_odd_settings_have_an_answer(setting):
    rows = compare(*setting, CalibrationTarget(1.0, 1e-4))
    assert all(c.plan.epsilon <= 1.0 and c.rmse > 0 for c in rows)
    assert rows[0].buffers == 0 or rows[0].rmse < min(c.rmse for c in rows if c.buffers == 0)


def test_the_noise_of_the_best_bands():
    (best, *_) = compare(5000, 25, 200, CalibrationTarget(1.0, 1e-6), sampling="poisson")
    assert best.mechanism == "band-mf"
    assert best.plan.recipe.strategy.bands == 8
    assert best.plan.noise_multiplier == pytest.approx(1.40626, rel=1e-4)
    assert best.plan.event == events.Repeated(
        events.PoissonSampled(0.04, events.Gaussian(best.plan.noise_multiplier)), 25
    )


def test_one_row_as_json():
    row = compare(5000, 25, 200, CalibrationTarget(1.0, 1e-6), sampling="fixed-order", dense=False)[
        0
    ].to_json()
    assert set(row) == {
        "mechanism",
        "sampling",
        "noise_multiplier",
        "noise_std",
        "sensitivity",
        "rmse",
        "max_error",
        "buffers",
    }
    assert row["noise_std"] == pytest.approx(
        row["noise_multiplier"] * row["sensitivity"], rel=1e-12
    )
    assert row["noise_multiplier"] == pytest.approx(4.224678889326827, rel=1e-4)


def test_auto_follows_the_data_pattern_and_says_why():
    sampled = auto(5000, 250, steps=200, epsilon=1.0, delta=1e-6)
    assert isinstance(sampled.plan.recipe.strategy, Identity)
    assert "independent noise wins" in sampled.reason
    ordered = auto(
        5000, 250, steps=200, epsilon=1.0, delta=1e-6, sampling="fixed-order", clip_norm=0.3
    )
    assert ordered.plan.recipe.sampler.participation == FixedOrder(20, 10)
    assert ordered.plan.recipe.clip == FlatClip(0.3)
    assert ordered.plan.epsilon <= 1.0
    assert "least error" in ordered.reason
    assert ordered.candidates[0].rmse <= min(c.rmse for c in ordered.candidates)
    with pytest.raises(InvalidInput, match="sampling"):
        auto(5000, 250, steps=200, epsilon=1.0, delta=1e-6, sampling="random")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_has_a_recipe_that_calibrates_and_travels(mechanism):
    recipe = recipe_for(mechanism, RunSetting(400, 20, 40, 0.5), CalibrationTarget(2.0, 1e-5))
    plan = recipe.calibrate(2.0, 1e-5)
    assert plan.epsilon <= 2.0
    assert plan.recipe.clip == FlatClip(0.5)
    assert plan.recipe.expected_batch == pytest.approx(20)
    assert plan.stddev == pytest.approx(plan.scale * 0.5)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_auto_without_a_target_is_refused():
    with pytest.raises(InvalidInput, match="needs epsilon"):
        recipe_for("auto", RunSetting(400, 20, 40))
    assert recipe_for("band-mf", RunSetting(400, 20, 40)).sampler.participation == FixedOrder(20, 2)
    assert recipe_for(
        "band-mf", RunSetting(400, 20, 40), bands=4
    ).sampler.participation == CyclicPoisson(0.2, 4)


def test_one_band_is_dp_sgd():
    banded, plain = (
        bandmf(1000, 50, bands=1, steps=60).calibrate(1.0, 1e-5),
        dpfy.dpsgd(1000, 50, steps=60).calibrate(1.0, 1e-5),
    )
    assert banded.event == plain.event
    assert banded.stddev == pytest.approx(plain.stddev, rel=1e-11)


def test_a_cycle_at_rate_one_is_unamplified():
    everything = bandmf(1000, 50, bands=20, steps=40)
    assert everything.event(3.0) == events.Repeated(events.Gaussian(3.0), 2)
    with pytest.raises(InvalidInput, match="at most 20"):
        bandmf(1000, 50, bands=21, steps=42)


def test_the_study_is_one_gaussian_of_sensitivity_fifteen():
    """Five rows of its table III: noise multiplier on the nodes -> epsilon by RDP at delta 1e-5."""
    recipe = dpftrl(60_000, 500, epochs=10, estimator="completed", restart=False)
    assert recipe.steps == 1200
    assert recipe.strategy.sensitivity(recipe.sampler.participation, 1200) == pytest.approx(
        15, rel=1e-9
    )
    for noise, epsilon in ((25, 2.65), (20, 3.41), (12.5, 5.84), (8, 9.92), (4, 23.80)):
        plan = recipe.with_noise(noise / 15, delta=1e-5, accountant="rdp")
        assert plan.scale == pytest.approx(noise, rel=1e-9)
        assert plan.epsilon == pytest.approx(epsilon, abs=0.006)
        exact = recipe.with_noise(noise / 15, delta=1e-5).epsilon
        assert exact < plan.epsilon


@pytest.mark.parametrize(("records", "epoch"), [(1000, 10), (1003, 11), (997, 10)])
def test_recipes_in_a_fixed_order(records, epoch):
    for recipe in (
        blt(records, 100, epochs=3),
        dpftrl(records, 100, epochs=3),
        bandmf(records, 100, bands=10, epochs=3, sampling="fixed-order"),
    ):
        assert recipe.steps == dpfy.dpsgd(records, 100, epochs=3).steps
        assert recipe.sampler.participation == FixedOrder(epoch, 3)
        assert recipe.expected_batch == records / epoch <= 100
        assert recipe.event(2.0) == events.Gaussian(2.0)
        assert recipe.calibrate(1.0, 1e-5).epsilon_after(3) <= 1.0


@pytest.mark.parametrize(
    ("records", "batch", "epochs"),
    [(60_000, 4096, 40), (1003, 100, 3), (1000, 30, 3), (700, 300, 7), (90, 90, 2)],
)
def test_epochs_are_the_same_steps_for_every_mechanism_and_no_record_takes_part_more_often(
    records, batch, epochs
):
    steps = dpfy.dpsgd(records, batch, epochs=epochs).steps
    assert epochs <= steps * batch / records < epochs + batch / records
    choice = (
        auto(records, batch, epochs=epochs, epsilon=3.0, delta=1e-6, sampling="fixed-order")
        if steps < 100
        else None
    )
    recipes = [
        bandmf(records, batch, bands=1, epochs=epochs),
        dpftrl(records, batch, epochs=epochs),
        *([choice.plan.recipe] if choice else []),
    ]
    setting = RunSetting(records, batch, steps)
    recipes += [recipe_for(name, setting) for name in ("dp-sgd", "sqrt", "tree")]
    assert {recipe.steps for recipe in recipes} == {steps}
    assert all(
        r.sampler.participation.epochs <= epochs
        for r in recipes
        if isinstance(r.sampler.participation, FixedOrder)
    )


def test_forty_epochs_of_mnist():
    """586 steps for all: 560, which correlated recipes made before, are 38.2 passes of batches of
    4096.
    """
    assert dpfy.dpsgd(60_000, 4096, epochs=40).steps == dpftrl(60_000, 4096, epochs=40).steps == 586
    assert dpftrl(60_000, 4096, epochs=40).sampler.participation == FixedOrder(15, 40)


def test_proven_pairs_have_theorems_and_the_others_name_the_nearest():
    assert all(len(pair.theorem) > 40 for pair in pairs.PAIRS.values())
    with pytest.raises(Unsupported, match="cyclic Poisson"):
        pairs.find(Poisson(0.1), SquareRoot())
    with pytest.raises(Unsupported, match="cyclic Poisson"):
        pairs.event(1.0, Poisson(0.1), square_root_banded(2), 10)
    with pytest.raises(Unsupported, match="FixedOrder with Blt"):
        pairs.find(CyclicPoisson(0.1, 5), Blt((0.5,), (0.1,)))
    with pytest.raises(Unsupported, match="Reshuffled with Tree"):
        pairs.find(Reshuffled(5, 2), SquareRoot())
    with pytest.raises(Unsupported, match="FixedOrder with Tree"):
        pairs.find(Separated(5, 2), Tree())
    with pytest.raises(InvalidInput, match="at most 2 epochs"):
        pairs.event(1.0, FixedOrder(5, 2), SquareRoot(), 11)
    assert pairs.event(2.0, SinglePass(), SquareRoot(), 11) == events.Gaussian(2.0)
    assert pairs.event(0.0, SinglePass(), SquareRoot(), 11) == events.NotPrivate()


def test_separated_and_reshuffled_recipes():
    separated = Recipe(1000, SeparatedSampler(0.1, 5, 6), 60, FlatClip(1.0), square_root_banded(5))
    assert separated.calibrate(1.0, 1e-5).scale == pytest.approx(
        4.0 * (6 * sum(c * c for c in square_root_banded(5).coefficient)) ** 0.5, rel=0.2
    )
    reshuffled = Recipe(1000, ReshuffledSampler(10, 3), 30, FlatClip(1.0), Tree("completed"))
    assert reshuffled.calibrate(1.0, 1e-5).epsilon <= 1.0


def test_balls_in_bins_is_billed_by_monte_carlo():
    recipe = Recipe(
        1000, BallsInBinsSampler(10, 3), 30, FlatClip(1.0), NormalisedBanded((1.0, 0.5, 0.3), 30)
    )
    event = recipe.event(2.0)
    assert isinstance(event, events.BallsInBins)
    assert max(event.gram[j][j] for j in range(10)) == pytest.approx(1, rel=1e-9)
    plan = recipe.with_noise(2.0, delta=1e-5, accountant="monte-carlo")
    unamplified = with_strategy(
        Recipe(1000, fixed_order(1000, 100, 30), 30, FlatClip(1.0), Banded((1.0,))), recipe.strategy
    )
    assert plan.epsilon < unamplified.with_noise(2.0, delta=1e-5).epsilon
    assert plan.epsilon_after(7) == plan.epsilon
    assert (
        recipe.with_noise(2.0, delta=1e-5).epsilon == plan.epsilon
    )  # alone, the default accountant says the same
    with pytest.raises(InvalidInput, match="3 epochs of 10 bins"):
        Recipe(1000, BallsInBinsSampler(10, 3), 20, FlatClip(1.0), SquareRoot()).with_noise(  # noqa: B018
            1.0, accountant="monte-carlo"
        ).scale


def test_a_matrix_of_your_own():
    base = Recipe(100, fixed_order(100, 50, 4), 4, FlatClip(1.0), Banded((1.0,)))
    mine = with_strategy(
        base, dense([[1, 0, 0, 0], [0.5, 1, 0, 0], [0.25, 0.5, 1, 0], [0, 0.25, 0.5, 1]])
    )
    assert mine.calibrate(1.0, 1e-3).epsilon <= 1.0


def test_replacing_a_record_costs_twice_the_sensitivity():
    one = blt(1000, 100, epochs=2).calibrate(1.0, 1e-5).noise_multiplier
    two = (
        blt(1000, 100, epochs=2, adjacency=Adjacency.REPLACE_ONE)
        .calibrate(1.0, 1e-5)
        .noise_multiplier
    )
    assert two == pytest.approx(2 * one, rel=1e-4)
    assert SecretBins(3, 2).bins == 3
