"""Numbers that can be solved for, against values computed by hand: full batches are one Gaussian of
mean sqrt(steps) / noise, and where noise hides nothing, delta is the chance to be drawn.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dpfy.accounting import calculator, gaussian, planning
from dpfy.accounting.patterns import TrainingPattern
from dpfy.cli.app import main
from dpfy.core.errors import InvalidInput, Unsupported


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    return int(stop.value.code or 0)


def told(capsys, *arguments: str) -> dict:
    assert call(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_noise_and_epsilon_are_each_others_inverse():
    epsilon = planning.epsilon(1.0, 0.01, 500, 1e-6)
    assert planning.noise(epsilon, 0.01, 500, 1e-6) == pytest.approx(1.0, rel=1e-4)


def test_nine_full_batches_with_noise_four_are_one_gaussian_of_mean_three_quarters(capsys):
    epsilon = str(gaussian.epsilon(0.75, 1e-5) * (1 + 1e-9))  # 3.2
    target = ["calibrate", "--epsilon", epsilon, "--delta", "1e-5", "--noise-multiplier", "4"]
    assert told(capsys, *target, "--solve", "steps")["steps"] == 9
    sizes = ["--records", "300", "--batch-size", "100"]
    fixed = ["--sampling", "fixed-order", "--solve", "epochs", *sizes]
    assert told(capsys, *target, *fixed)["epochs"] == 9
    assert told(capsys, *target, "--solve", "epochs", *sizes)["epochs"] >= 9
    assert planning.steps_per_epoch(301, 100) == 4


def test_where_noise_hides_nothing_delta_is_the_chance_to_be_drawn(capsys):
    target = ["calibrate", "--epsilon", "1", "--delta", "1e-3", "--noise-multiplier", "0.1"]
    found = told(capsys, *target, "--solve", "records", "--batch-size", "10")["records"]
    assert found in (10_000, 10_001)
    for records in (found, found - 1):
        reached = calculator.account([TrainingPattern(0.1, 10 / records)], 1e-3)["epsilon"]
        assert (reached <= 1) == (records == found)
    found = told(capsys, *target, "--solve", "batch-size", "--records", "10000")["batch_size"]
    assert found in (9, 10)


def test_the_clip_norm_is_the_noise_by_its_multiplier(capsys):
    """3 / 3.730632, the multiplier of the analytic rule at (1, 1e-5)."""
    target = ["calibrate", "--epsilon", "1", "--delta", "1e-5", "--solve", "clip-norm"]
    found = told(capsys, *target, "--stddev", "3")
    assert found["clip_norm"] == pytest.approx(3 / 3.730632, rel=1e-4)
    assert found["clip_norm"] * found["noise_multiplier"] <= 3


def test_a_group_of_three_moves_the_sum_three_times_as_far(capsys):
    plan = ["account", "--noise-multiplier", "5", "--delta", "1e-5", "--group-size", "3"]
    found = told(capsys, *plan)
    assert found["epsilon"] == pytest.approx(2.4449239, rel=1e-7)  # Gaussian of mean 3 / 5
    assert found["group_size"] == 3
    assert call(*plan, "--adjacency", "replace-one") == 2
    with pytest.raises(Unsupported, match="replaced"):
        calculator.account([TrainingPattern(5.0)], 1e-5, adjacency="replace-one", group_size=2)


@pytest.mark.parametrize(("records", "delta"), [(10_000, 1e-5), (1000, 1e-5), (60_000, 1e-6)])
def test_delta_follows_from_the_records(capsys, records, delta):
    """1 / n^1.1 is 3.98e-5, 5.01e-4 (but never above 1e-5) and 5.55e-6."""
    plan = ["account", "--noise-multiplier", "5", "--records", str(records)]
    found = told(capsys, *plan)
    assert found["delta"] == delta
    assert str(records) in found["delta_from"]
    assert call("account", "--noise-multiplier", "5") == 2


def test_every_sampling_is_solved_as_it_is_charged():
    """What is found fits, and one more or one less does not; random settings."""
    check_solutions(range(1, 4))


@pytest.mark.slow
def test_many_samplings_are_solved_as_they_are_charged():
    check_solutions(range(40))


def check_solutions(seeds):
    for k in seeds:
        rng = np.random.default_rng([45, k])
        sampling = ("poisson", "random-allocation", "fixed-order", "shuffled")[k % 4]
        records, batch = int(rng.integers(200, 3000)), int(rng.integers(10, 100))
        plan = TrainingPattern(
            float(rng.uniform(1, 4)), batch / records, 60, sampling, records, batch
        )
        unknown = planning.UNKNOWNS[k % 3 if sampling != "poisson" else k // 4 % 2 + 2]
        epsilon = float(rng.uniform(2, 8))
        found = planning.solve(unknown, plan, epsilon, 1e-5, accountant="tight")
        for value in (found, found + (-1 if unknown == "records" else 1)):
            if value == 0 or (unknown == "batch-size" and value > records):
                continue
            changed = planning._with(unknown, plan, value)
            reached = calculator.account([changed], 1e-5)["epsilon"]
            assert (reached <= epsilon) == (value == found), (plan, unknown, found)


def test_impossible_questions_are_refused():
    plan = TrainingPattern(1.0, 0.1, 10)
    with pytest.raises(InvalidInput, match="did you mean 'steps'"):
        planning.solve("step", plan, 1.0, 1e-5)
    with pytest.raises(InvalidInput, match="batch_size"):
        planning.solve("records", plan, 1.0, 1e-5)
    with pytest.raises(InvalidInput, match="records"):
        planning.solve("epochs", plan, 1.0, 1e-5)
    assert planning.solve("steps", TrainingPattern(0.5), 1e-3, 1e-6) == 0
    assert call("calibrate", "--epsilon", "1", "--delta", "1e-5", "--solve", "steps") == 2
    assert math.isfinite(calculator.clip_norm(plan, 1.0, 1.0, 1e-5)["clip_norm"])
