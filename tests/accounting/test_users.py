"""What users pay: records drawn one by one and billed together (ELS), users drawn whole (ULS), and
the published federated setting.
"""

from __future__ import annotations

import time

import pytest

import dpfy
from dpfy import accounting
from dpfy.accounting import user_level
from dpfy.accounting.rules import amplified, unsampled
from dpfy.core import events
from dpfy.core import events as ev
from dpfy.core.unit import user_unit
from dpfy.plan import ForeignBatches
from dpfy.plan.claim import TrainingClaim

dp_accounting = pytest.importorskip("dp_accounting")
CLIENTS, ROUND, NOISE, ROUNDS, DELTA = 3383, 120, 1.2, 100, 1e-5


def els(noise: float, rate: float, steps: int, records: int) -> ev.Event:
    return user_level.of_group(events.poisson(noise, rate, steps), records)


def theirs(event: ev.Event, delta: float) -> float:
    """Epsilon by dp-accounting's own mixture of Gaussians."""
    assert isinstance(event, ev.Repeated)
    one = event.event
    assert isinstance(one, ev.MixtureOfGaussians)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    told = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
        one.standard_deviation, one.sensitivities, one.probabilities
    )
    return accountant.compose(told, event.count).get_epsilon(delta)


SETTINGS = [
    (3.0, 0.01, 100, 2),
    (4.0, 0.02, 200, 8),
    (12.0, 0.02, 100, 32),
    (20.0, 0.01, 300, 64),
    (2.0, 0.001, 50, 64),
]


@pytest.mark.parametrize(("noise", "rate", "steps", "records"), SETTINGS)
def test_records_of_a_user_cost_what_dp_accounting_says(noise, rate, steps, records):
    event = els(noise, rate, steps, records)
    started = time.process_time()
    found = accounting.epsilon(event, 1e-6)
    seconds = time.process_time() - started
    due = theirs(event, 1e-6)
    assert found <= due + 1e-9
    assert found == pytest.approx(due, abs=1e-3, rel=1e-3)
    assert seconds < 5, "in CPU seconds of a busy machine; about a quarter of one alone"


def test_epsilon_grows_with_the_records_of_a_user_and_a_plan_says_so():
    plans = [
        dpfy.dpsgd(6000, 60, steps=50, unit=user_unit(k), draw="record").with_noise(4.0)
        for k in (1, 2, 3, 8, 64)
    ]
    found = [plan.epsilon for plan in plans]
    assert found == sorted(found)
    assert plans[0].event == events.poisson(4.0, 0.01, 50)
    whole = dpfy.dpsgd(6000, 60, steps=50, unit=user_unit(64)).with_noise(4.0)
    assert whole.epsilon == plans[0].epsilon, (
        "a user who is drawn and clipped whole pays as one record does, whatever they own"
    )


def test_the_federated_setting_is_billed_as_published():
    recipe = dpfy.dpsgd(CLIENTS, ROUND, steps=ROUNDS, unit=user_unit(500))
    plan = recipe.with_noise(NOISE, delta=DELTA)
    assert plan.epsilon == pytest.approx(1.7075, abs=1e-3)
    assert plan.guarantee("rdp").epsilon(DELTA) == pytest.approx(1.986, abs=1e-3)
    assert accounting.epsilon(unsampled(plan.event), DELTA, accountant="rdp") == pytest.approx(
        73.0, abs=0.05
    )
    assert recipe.calibrate(2.0, DELTA).noise_multiplier == pytest.approx(1.1085, abs=1e-3)


def test_the_secret_of_records_drawn_one_by_one_is_part_of_the_claim():
    """Once a mixture said that it relied on no secret sampling: batches formed elsewhere were
    billed as if they were drawn.
    """
    event = els(2.0, 0.1, 30, 3)
    assert amplified(event)
    assert accounting.epsilon(unsampled(event), 1e-6) == pytest.approx(
        accounting.epsilon(els(2.0, 1.0, 30, 3), 1e-6), rel=1e-9
    )
    plan = dpfy.dpsgd(100, 10, steps=30, unit=user_unit(3), draw="record").with_noise(2.0)
    foreign = TrainingClaim(plan, ForeignBatches("shuffled once"))
    assert accounting.epsilon(foreign.event, 1e-6) > 3 * accounting.epsilon(plan.event, 1e-6)
    certain = ev.MixtureOfGaussians(2.0, (0.0, 1.0), (0.0, 1.0))
    assert not amplified(certain)


def test_a_group_of_users_with_several_records_each_is_one_larger_group():
    twice = user_level.of_group(els(3.0, 0.05, 20, 4), 3)
    assert accounting.epsilon(twice, 1e-6) == pytest.approx(
        accounting.epsilon(els(3.0, 0.05, 20, 12), 1e-6), rel=1e-7
    )
