"""The guide's recipes on utilities that can be computed by hand; on real images in the study `dpfy
reproduce tuning`.
"""

from __future__ import annotations

import math

import pytest

from dpfy import accounting
from dpfy.accounting import planning
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.plan.recipe import dpsgd
from dpfy.training import config as configuration
from dpfy_lab import strategies


def bowl(settings):
    """Gradients of length 1: clipping below that shortens steps; the best step is 0.5; noise of the
    average takes away its square.
    """
    norm = settings["clip_norm"]
    step = settings["learning_rate"] * min(norm, 1.0)
    noise = (
        settings["noise_multiplier"] * norm / settings["batch_size"]
        if settings["noise_multiplier"]
        else 0.0
    )
    return 1 - 0.2 * math.log2(step / 0.5) ** 2 - (20 * noise) ** 2


def test_clip_search_takes_the_smallest_norm_that_hardly_hurts():
    found = strategies.clip_search(
        bowl, {"learning_rate": 0.5, "batch_size": 100}, (0.1, 0.5, 0.9, 1.0, 10.0)
    )
    assert found.settings == {"clip_norm": 0.9}
    assert [settings["clip_norm"] for settings, _ in found.tried[-2:]] == [0.67, 0.78]
    finer = strategies.clip_search(
        bowl, {"learning_rate": 0.5, "batch_size": 100}, (0.3, 3.0, 10.0)
    )
    assert finer.settings == {"clip_norm": 0.95}
    assert [settings["clip_norm"] for settings, _ in finer.tried[-2:]] == [0.95, 0.53]
    assert "only slightly" in found.words()
    assert all(settings["noise_multiplier"] == 0 for settings, _ in found.tried)
    assert strategies.clip_search(
        bowl, {"learning_rate": 0.5, "batch_size": 100}, (0.1, 0.2)
    ).settings == {"clip_norm": 0.2}
    for wrong in ((0.0, 1.0), (-1.0,), (math.nan,)):
        with pytest.raises(InvalidInput):
            strategies.clip_search(bowl, {"learning_rate": 0.5, "batch_size": 100}, wrong)


def test_privacy_and_computation_goes_through_the_five_steps_in_their_order():
    limits = strategies.ComputeLimits(batch_size=100, epochs=5, most_batch=1000, most_epochs=20)
    rates, norms = (0.125, 0.25, 0.5, 1.0, 2.0), (0.01, 0.1, 1.0, 10.0)
    found = strategies.privacy_and_computation(
        bowl, records=10_000, epsilon=2.0, delta=1e-5, limits=limits, rates=rates, norms=norms
    )
    assert (found.settings["batch_size"], found.settings["epochs"]) == (1000.0, 20.0)
    plan = dpsgd(10_000, 1000, epochs=20).with_noise(found.settings["noise_multiplier"], delta=1e-5)
    assert accounting.epsilon(plan.event, 1e-5) == pytest.approx(2.0, rel=1e-3)
    words = found.words()
    assert [
        words.index(w)
        for w in (
            "batch 1000",
            "without privacy, to look",
            "clip norm 1:",
            "noise multiplier",
            "the best of 15",
        )
    ] == sorted(
        words.index(w)
        for w in (
            "batch 1000",
            "without privacy, to look",
            "clip norm 1:",
            "noise multiplier",
            "the best of 15",
        )
    )
    assert found.settings["learning_rate"] * min(found.settings["clip_norm"], 1.0) == 0.5
    with pytest.raises(InvalidInput, match="leave room"):
        strategies.largest_feasible(
            records=100, batch_size=50, epochs=5, most_batch=20, most_epochs=9
        )


@pytest.mark.slow
def test_privacy_and_accuracy_finds_the_smallest_batch_with_the_noise_at_the_knee():
    settings = {"batch_size": 50.0, "learning_rate": 0.5}
    found = strategies.privacy_and_accuracy(
        bowl,
        settings,
        records=100_000,
        steps=200,
        epsilon=2.0,
        delta=1e-6,
        wanted=0.95,
        noises=(0.1, 0.3, 0.5, 0.7, 1.0, 2.0),
    )
    batch, sigma, norm = (
        found.settings[k] for k in ("batch_size", "noise_multiplier", "clip_norm")
    )
    assert norm == 1.0
    average = sigma * norm / batch
    knee = max(
        s / 50
        for s in (0.1, 0.3, 0.5)
        if bowl({**settings, "clip_norm": 1.0, "noise_multiplier": s}) >= 0.95
    )
    assert average == pytest.approx(knee, rel=0.02)
    assert average <= knee
    assert planning.epsilon(sigma, batch / 100_000, 200, 1e-6) == pytest.approx(2.0, rel=1e-3)
    assert bowl(found.settings) >= 0.95
    with pytest.raises(Unsupported, match="utility 2"):
        strategies.privacy_and_accuracy(
            bowl,
            settings,
            records=100_000,
            steps=200,
            epsilon=2.0,
            delta=1e-6,
            wanted=2.0,
            noises=(0.1,),
        )
    with pytest.raises(Unsupported, match="not even a batch of all"):
        strategies.privacy_and_accuracy(
            bowl,
            settings,
            records=300,
            steps=200,
            epsilon=0.1,
            delta=1e-6,
            wanted=0.95,
            noises=(0.1, 0.3),
        )


def test_the_rate_to_look_for_a_clip_norm_with_is_the_largest_of_those_that_do_alike():
    flat = {0.1: 0.8, 0.3: 0.9, 1.0: 0.896, 3.0: 0.892, 10.0: 0.7}
    found = strategies.plain_rate(
        lambda settings: flat[settings["learning_rate"]], {"batch_size": 100.0}, tuple(flat)
    )
    assert found.settings == {"learning_rate": 3.0}
    assert all(
        each["clip_norm"] == math.inf and each["noise_multiplier"] == 0 for each, _ in found.tried
    )
    losses = {rate: -reached for rate, reached in flat.items()}  # a utility may be below zero
    found = strategies.plain_rate(
        lambda settings: losses[settings["learning_rate"]], {"batch_size": 100.0}, tuple(flat)
    )
    assert found.settings == {"learning_rate": 10.0}


def test_without_a_wanted_utility_privacy_and_accuracy_takes_the_knee_or_what_is_nearly_the_least_noise():
    settings, noises = {"batch_size": 50.0, "learning_rate": 0.5}, (0.1, 0.3, 0.5, 0.7, 1.0, 2.0)
    asked = {"steps": 200, "epsilon": 2.0, "delta": 1e-6, "noises": noises}
    found = strategies.privacy_and_accuracy(bowl, settings, records=100_000, **asked)
    knee = max(
        s / 50
        for s in noises
        if bowl({**settings, "clip_norm": 1.0, "noise_multiplier": s}) >= 0.98
    )
    average = (
        found.settings["noise_multiplier"]
        * found.settings["clip_norm"]
        / found.settings["batch_size"]
    )
    assert 0.98 * knee < average <= knee
    assert "only slightly affected" in found.words()
    found = strategies.privacy_and_accuracy(bowl, settings, records=2000, **asked)
    batch, sigma = found.settings["batch_size"], found.settings["noise_multiplier"]
    least = planning.noise(2.0, 1.0, 200, 1e-6) / 2000
    assert least < sigma / batch <= 1.1 * least
    assert batch < 1000
    assert "out of reach" in found.words()
    noise, why = strategies._noise_of_average([(0.1, 0.5), (0.2, 0.4)], 0.05, 1.0, None, 50.0)
    assert noise == pytest.approx(0.055)
    assert "below all noise that was tried" in why


def test_privacy_and_accuracy_searches_clip_norm_and_rate_last_with_the_noise_it_found_and_the_small_batch():
    asked = {
        "records": 2000,
        "steps": 200,
        "epsilon": 2.0,
        "delta": 1e-6,
        "noises": (0.1, 0.3),
        "norms": (1.0, 30.0),
    }

    def shallow(settings):
        """As `bowl`, where steps that are too short hurt less: without noise the larger clip norm
        seems to be needed.
        """
        return bowl({**settings, "clip_norm": settings["clip_norm"] / 30})

    found = strategies.privacy_and_accuracy(
        shallow, {"batch_size": 50.0, "learning_rate": 0.5}, rates=(0.5, 5.0), **asked
    )
    last = found.tried[-6:]
    ratio = found.settings["noise_multiplier"] / found.settings["batch_size"]
    assert all(each["batch_size"] == 50.0 for each, _ in found.tried)
    assert all(each["noise_multiplier"] / 50.0 == pytest.approx(ratio) for each, _ in last)
    assert {(each["clip_norm"], each["learning_rate"]) for each, _ in last} == {
        (c, r) for c in (30.0, 9.0, 3.0) for r in (0.5, 5.0)
    }
    best = max(last, key=lambda row: row[1])[0]
    assert (found.settings["clip_norm"], found.settings["learning_rate"]) == (
        best["clip_norm"],
        best["learning_rate"],
    )
    assert found.settings["clip_norm"] * found.settings["learning_rate"] == 15.0


@pytest.mark.slow
def test_figure_one_read_backwards_agrees_with_it_forwards():
    curve = planning.batch_curve(10_000, 100, 1.0, 1e-5, [1000])
    for point in curve:
        batch, sigma = strategies.batch_for_noise(
            records=10_000, steps=100, epsilon=1.0, delta=1e-5, ratio=point.relative_noise * 1.0001
        )
        assert batch == pytest.approx(point.batch_size, rel=0.02)
        assert sigma == pytest.approx(point.noise_multiplier, rel=0.02)


def test_scaling_keeps_the_noise_of_the_average_and_the_diagonal_the_product():
    base = {"batch_size": 64.0, "noise_multiplier": 1.5, "clip_norm": 0.5, "learning_rate": 2.0}
    found = strategies.scaled(base, 4.0).settings
    assert (
        found["noise_multiplier"] / found["batch_size"]
        == base["noise_multiplier"] / base["batch_size"]
    )
    assert found["batch_size"] == 256
    rows = strategies.diagonal(base)
    assert len(rows) == 5
    assert all(row["clip_norm"] * row["learning_rate"] == 1.0 for row in rows)
    assert all(
        bowl({**row, "noise_multiplier": 0.0}) == bowl({**base, "noise_multiplier": 0.0})
        for row in rows
        if row["clip_norm"] <= 1
    )


def test_the_optimizer_rule():
    assert strategies.optimizer_rule({"sgd": 0.9, "adam": 0.905}).settings["optimizer"] == "sgd"
    assert (
        strategies.optimizer_rule({"sgd": 0.7, "adam": 0.9, "adamw": 0.92}).settings["optimizer"]
        == "adamw"
    )
    with pytest.raises(InvalidInput):
        strategies.optimizer_rule({"adam": 0.9})


def test_defaults_are_settings_of_a_job_with_a_reason_each():
    found = strategies.defaults(records=4000, epsilon=3.0, delta=1e-5, parameters=26_010)
    config = configuration.make({}, found.settings)
    assert config.training.clip == "automatic"
    assert len(found.reasons) == 4
    less = strategies.defaults(records=4000, epsilon=0.3, delta=1e-5, parameters=26_010)
    assert less.settings["training.learning_rate"] < found.settings["training.learning_rate"]
    assert less.settings["training.batch_size"] <= found.settings["training.batch_size"]
