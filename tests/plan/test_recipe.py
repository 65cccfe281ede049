"""Recipes and plans: calibrated to the private side, serialisable, and honest about what cannot be
done.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import dpfy
from dpfy import accounting
from dpfy.accounting.patterns import TrainingPattern
from dpfy.core import events
from dpfy.core.errors import InvalidInput
from dpfy.gradients.clip import FlatClip
from dpfy.noise.toeplitz import Banded
from dpfy.plan.recipe import Recipe
from dpfy.report.words import up
from dpfy.sampling.samplers import FixedOrderSampler


def recipe(**changes):
    return dpfy.dpsgd(**({"records": 1000, "batch_size": 100, "steps": 50} | changes))


def test_event_is_what_will_run():
    plan = recipe(clip_norm=0.5).with_noise(1.5)
    assert plan.event == events.Repeated(events.PoissonSampled(0.1, events.Gaussian(1.5)), 50)
    assert plan.stddev == 0.75
    assert recipe(batch_size=1000).with_noise(2.0).event == events.Repeated(
        events.Gaussian(2.0), 50
    )


@pytest.mark.parametrize("noise", [0.0, 0.7, 2.0])
def test_calculator_and_recipe_give_one_run_one_bill(noise):
    """`Training` is what the calculator is asked about, `Recipe` what is run."""
    for rate in (1.0, 0.25):
        assert TrainingPattern(noise, rate, 12).claim().event == dpfy.dpsgd(
            100, 100 * rate, steps=12
        ).event(noise)
    if noise:
        ordered = Recipe(
            100, FixedOrderSampler(4, 3), 12, FlatClip(1.0), Banded((1.0,))
        )  # its sensitivity is sqrt(3)
        asked = accounting.epsilon(
            TrainingPattern(noise, 0.25, 12, "fixed-order").claim().event, 1e-5
        )
        assert asked == pytest.approx(
            accounting.epsilon(ordered.event(noise / 3**0.5), 1e-5), rel=1e-6
        )


def test_epochs_are_expected_passes():
    assert dpfy.dpsgd(1000, 100, epochs=3).steps == 30
    assert (
        dpfy.dpsgd(1000, 300, epochs=1).steps == 4
    )  # rounded up: never fewer steps billed than run


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("batch", [100, 1000])
def test_calibration_rounds_to_the_private_side(epsilon, batch):
    plan = recipe(batch_size=batch).calibrate(epsilon, 1e-5)
    assert epsilon * 0.999 <= plan.epsilon <= epsilon
    assert plan.guarantee("rdp").epsilon(1e-5) >= plan.epsilon


def test_json_round_trip_is_equal():
    for plan in (
        recipe().calibrate(2.0, 1e-5),
        recipe(clip_norm=math.inf).with_noise(0.0),
        recipe(adjacency="zero-out").with_noise(3.0),
    ):
        again = dpfy.Plan.from_json(json.loads(json.dumps(plan.to_json())))
        assert again == plan
        assert again.fingerprint() == plan.fingerprint()
    assert recipe().with_noise(1.0).fingerprint() != recipe().with_noise(1.1).fingerprint()


def test_json_refuses_what_it_does_not_know():
    data = recipe().with_noise(1.0).to_json()
    with pytest.raises(InvalidInput, match="kind"):
        dpfy.Plan.from_json(data | {"kind": "Plam"})
    with pytest.raises(InvalidInput, match="epsilon_override"):
        dpfy.Plan.from_json(data | {"epsilon_override": 0.1})


def test_no_noise_is_no_privacy_and_says_so():
    plan = recipe(clip_norm=math.inf).with_noise(0.0)
    assert plan.event == events.NotPrivate()
    assert plan.epsilon == math.inf
    assert plan.stddev == 0
    assert "NO differential privacy" in plan.guarantee().sentence(plan.delta)


def test_epsilon_grows_with_the_steps():
    plan = recipe().calibrate(2.0, 1e-5)
    path = [plan.epsilon_after(s) for s in (0, 1, 10, 25, 50)]
    assert path == sorted(path)
    assert path[0] == 0
    assert path[-1] == plan.epsilon


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_size": 1001}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"records": 0}, "records"),
        ({"steps": 0}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"clip_norm": 0}, "clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"epochs": 3}, "epochs"),
        ({"steps": None}, "epochs"),
        ({"adjacency": "add-remove"}, "adjacency"),
    ],
)
def test_bad_recipes(change, field):
    with pytest.raises(InvalidInput, match=field):
        recipe(**change)


@pytest.mark.parametrize(
    ("epsilon", "delta", "field"),
    [
        (0, 1e-5, "epsilon"),
        (-1, 1e-5, "epsilon"),
        (math.nan, 1e-5, "epsilon"),
        (1, 0, "delta"),
        (1, 1, "delta"),
        (1, 1e-3, "1/records"),
    ],
)
def test_bad_targets(epsilon, delta, field):
    with pytest.raises(InvalidInput, match=field):
        recipe().calibrate(epsilon, delta)


def test_large_delta_needs_a_word():
    assert recipe().calibrate(1.0, 1e-3, allow_large_delta=True).delta == 1e-3


def test_bad_plans():
    with pytest.raises(InvalidInput, match="noise_multiplier"):
        recipe().with_noise(-1.0)
    with pytest.raises(InvalidInput, match="clip_norm"):
        recipe(clip_norm=math.inf).with_noise(1.0)
    with pytest.raises(InvalidInput, match="accountant"):
        replace(recipe().with_noise(1.0), accountant="pdl")


def test_a_plan_and_a_guarantee_are_printed_in_words():
    plan = dpfy.dpsgd(60_000, 256, epochs=10, unit=dpfy.Unit("user", 4)).with_noise(1.1, delta=1e-5)
    said = str(plan)
    assert said.startswith("2,344 steps on 60,000 users, 256 in a batch (10 epochs), clip norm 1, ")
    assert f"noise multiplier 1.1: epsilon {up(plan.epsilon)} at delta 1e-05 (one user, " in said
    assert "add-or-remove-one, tight accountant)" in said
    assert str(dpfy.dpsgd(600, 20, steps=30).with_noise(0, delta=1e-3)).count("no guarantee") == 1
    guarantee = plan.guarantee(caveats=("the seed is secret",))
    assert f"{up(guarantee.epsilon(1e-5))} at delta 1e-05, " in str(guarantee)
    assert "for one user, where the data of one unit is added or removed" in str(guarantee)
    assert str(guarantee).endswith("Provided that: the seed is secret.")
    assert "PrivateTraining" not in str(guarantee) + said
    assert repr(plan).startswith("Plan(recipe=Recipe("), "unambiguous where it is compared"
    pure = accounting.guarantee(events.Laplace(2.0), accountant="basic")
    assert str(pure).startswith("epsilon 0.500 at delta 0, for one example")
