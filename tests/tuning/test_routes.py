"""What a search costs: whatever the route, kinds and law, the whole is within the target, and every
trial is a part of the bill.
"""

from __future__ import annotations

import math
import random

import pytest

import dpfy
from dpfy import accounting
from dpfy.core import events
from dpfy.core.claim import Reserved
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.unit import Adjacency
from dpfy.core.values import mock_permit, repeatable
from dpfy.tuning.claim import PublicTuning, Tuning
from dpfy.tuning.routes import (
    HELD_OUT,
    PRIVATE,
    SCORES,
    TRAINED_ON,
    PrivacyTarget,
    SearchRoute,
    calibrate_search,
)
from dpfy.tuning.space import Space
from dpfy.tuning.terms import TrialKinds


def _random_setting(rng: random.Random):
    """A payment, a target and some kinds of trials; None where the combination is refused."""
    route, score = rng.choice(PRIVATE), rng.choice(SCORES)
    shape = rng.choice([0.0, 1.0, -0.5, 3.0])
    trials = rng.choice([2, 5, 20, 100])
    adjacency = rng.choice([Adjacency.ADD_OR_REMOVE_ONE] * 3 + [Adjacency.ZERO_OUT])
    adaptive = route == "composition" and rng.random() < 0.5
    try:
        payment = SearchRoute(
            route, trials, shape, score, adaptive, adaptive and rng.random() < 0.3, 0.3, adjacency
        )
    except DpfyError:
        return None
    records = rng.choice([2_000, 60_000])
    kinds = [
        dpfy.dpsgd(
            records,
            records * rng.choice([0.01, 0.05, 0.3]),
            steps=rng.choice([5, 60]),
            adjacency=adjacency,
        )
        for _ in range(rng.choice([1, 2]))
    ]
    kinds = list({kind.event(1.0): kind for kind in kinds}.values())
    return (
        payment,
        PrivacyTarget(
            rng.choice([0.7, 3.0, 8.0]), 1e-5, adjacency, "rdp" if route != "subset" else "tight"
        ),
        kinds,
    )


@pytest.mark.parametrize(("seed", "count"), [(3, 4), pytest.param(4, 100, marks=pytest.mark.slow)])
def test_over_random_settings_the_whole_search_is_within_the_target_and_close_to_it(seed, count):
    rng, seen = random.Random(seed), set()
    for _ in range(count):
        found = _random_setting(rng)
        if found is None:
            continue
        payment, target, kinds = found
        finals = kinds if payment.route == "subset" else []
        counts = (
            [1] * len(kinds)
            if payment.route == "noisy-max"
            or (payment.route == "composition" and not payment.adaptive)
            else []
        )
        paid = calibrate_search(payment, target, kinds, finals, counts)
        reached = target.reached(paid.event)
        assert reached <= target.epsilon
        assert reached >= 0.97 * target.epsilon
        plain = [target.least(kind.event) for kind in kinds]
        assert all(
            plan.noise_multiplier > least * 0.999
            for plan, least in zip(paid.plans, plain, strict=True)
        )
        inside = repeatable(paid.event)
        assert all(plan.event in inside for plan in (*paid.plans, *paid.finals))
        assert paid.score is None or paid.score in inside
        claim = Tuning(paid, {"rate": "0.1..1 log"}, seed=4)
        assert Tuning.from_json(claim.to_json()) == claim
        assert Reserved.from_json(Reserved(claim).to_json()) == Reserved(claim)
        seen.add((payment.route, payment.score))
    assert len(seen) > 1


def test_held_out_scores_cost_training_nothing_and_scores_on_training_records_do():
    recipe, target = dpfy.dpsgd(4000, 400, steps=50), PrivacyTarget(3.0, 1e-5)
    noise = {
        score: calibrate_search(SearchRoute("random", 20, 1.0, score), target, [recipe])
        .plans[0]
        .noise_multiplier
        for score in SCORES
    }
    assert noise["public"] == noise[HELD_OUT] < noise[TRAINED_ON]


def test_a_replaced_person_may_have_moved_from_one_part_to_the_other():
    """Out of training and into validation: the bill is above what leaving the one and joining the
    other cost together.
    """
    recipe, replaced = (
        dpfy.dpsgd(4000, 400, steps=50, adjacency="replace-one"),
        Adjacency.REPLACE_ONE,
    )
    paid = calibrate_search(
        SearchRoute("random", 20, 1.0, HELD_OUT, adjacency=replaced),
        PrivacyTarget(3.0, 1e-5, replaced),
        [recipe],
    )
    (_, training), (_, scores) = paid.event.parts
    moved = accounting.epsilon(
        events.Composed((training, scores)), 1e-5, adjacency=Adjacency.ADD_OR_REMOVE_ONE
    )
    assert moved <= accounting.epsilon(paid.event, 1e-5, adjacency=replaced) <= 3.0


def test_the_bill_of_parts_is_above_what_a_person_in_either_part_can_be_shown():
    """A Gaussian trial and a score on others, by hand: the worst part decides, and their sum is
    never smaller.
    """
    paid = calibrate_search(
        SearchRoute("random", 5, 1.0, HELD_OUT),
        PrivacyTarget(2.0, 1e-5),
        [dpfy.dpsgd(1000, 1000, steps=1)],
    )
    assert isinstance(paid.event, events.Parallel)
    whole = accounting.epsilon(paid.event, 1e-5)
    for _, part in paid.event.parts:
        assert accounting.epsilon(part, 1e-5) <= whole * (1 + 1e-9)


def test_a_permit_of_a_search_gives_rights_for_its_trials_and_for_nothing_else():
    paid = calibrate_search(
        SearchRoute("random", 5, 1.0, HELD_OUT),
        PrivacyTarget(2.0, 1e-4),
        [dpfy.dpsgd(1000, b, steps=3) for b in (50, 200)],
    )
    permit = mock_permit(paid.event, 1, "tuning")
    for plan in paid.plans:
        inner = permit.inner(plan.event, 3, plan.recipe.steps)
        inner.check(2, plan.event)
        with pytest.raises(InvalidInput, match="step"):
            inner.check(3, plan.event)
    weaker = paid.plans[0].recipe.event(paid.plans[0].noise_multiplier / 2)
    for wrong in (
        weaker,
        events.Gaussian(paid.plans[0].noise_multiplier),
        paid.event,
        events.Nothing(),
    ):
        with pytest.raises(InvalidInput, match="may run several times"):
            permit.inner(wrong, 0)
    closed = mock_permit(events.Gaussian(1.0), 1)
    with pytest.raises(InvalidInput):
        closed.inner(events.Gaussian(1.0), 0)


def test_what_a_sample_hides_gives_no_right_to_the_same_without_the_sample():
    event = events.PoissonSampled(0.1, events.Gaussian(1.0))
    assert repeatable(event) == set()
    assert events.Gaussian(1.0) not in repeatable(events.RepeatAndSelect(event, 3.0, 1.0))


@pytest.mark.parametrize("route", ["random", "noisy-max", "subset"])
def test_searches_that_look_at_scores_are_refused_but_by_composition(route):
    with pytest.raises(Unsupported, match="pay by composition"):
        SearchRoute(route, 20, score=HELD_OUT, adaptive=True)
    assert SearchRoute("composition", 20, adaptive=True).event(
        [events.Gaussian(1.0)], None
    ) == events.Repeated(events.Gaussian(1.0), 20)


def test_kinds_follow_the_bill_and_nothing_else():
    space = Space.read(
        {"rate": "0.1..1 log", "batch": [10, 20, 30], "clip": [1.0, 2.0], "steps": [5, 6]}
    )
    kinds = TrialKinds.of(
        space, lambda s: dpfy.dpsgd(1000, s["batch"], steps=s["steps"], clip_norm=s["clip"])
    )
    assert kinds.costly == ("batch", "steps")
    assert len(kinds.recipes) == 6
    with pytest.raises(Unsupported, match="nothing was reserved"):
        kinds.place({"rate": 0.5, "batch": 11, "clip": 1.0, "steps": 5})
    hidden = Space.read({"rate": "0.1..1 log", "steps": [5, 6]})
    with pytest.raises(InvalidInput, match="list its values"):
        TrialKinds.of(hidden, lambda s: dpfy.dpsgd(1000, 1000 * s["rate"], steps=s["steps"]))
    many = Space.read({"batch": list(range(1, 66))})
    with pytest.raises(InvalidInput, match="at most 64"):
        TrialKinds.of(many, lambda s: dpfy.dpsgd(1000, s["batch"], steps=5))


def test_plans_that_may_end_early_are_refused_in_trials():
    with pytest.raises(Unsupported, match="end early"):
        calibrate_search(
            SearchRoute("random", 5, 1.0),
            PrivacyTarget(2.0, 1e-4),
            [dpfy.dpsgd(1000, 50, steps=10, stopping=5)],
        )


def test_a_search_on_public_data_costs_nothing_and_says_so():
    claim = PublicTuning({"rate": "0.1..1"}, 5, "fashion-mnist", delta=1e-5, records=100)
    assert accounting.epsilon(claim.event, 1e-5) == 0.0
    assert PublicTuning.from_json(claim.to_json()) == claim
    assert math.isclose(
        accounting.epsilon(events.Composed((claim.event, events.Gaussian(2.0))), 1e-5),
        accounting.epsilon(events.Gaussian(2.0), 1e-5),
    )
