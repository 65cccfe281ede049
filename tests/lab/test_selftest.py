"""The self-test: every seeded mistake is caught by the check that is named for it, and the code as it
is passes all checks.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dpfy.cli.app import app
from dpfy.core.errors import InvalidInput
from dpfy_lab.checks import CHECKS, integrity, loop, training
from dpfy_lab.mistakes import MISTAKES
from dpfy_lab.selftest import examine
from dpfy_lab.selftest.mistake import Check, Mistake, mistake
from dpfy_lab.selftest.patch import NoSuchTarget, patching, resolve

ALL = tuple(MISTAKES.values())


@pytest.fixture(autouse=True)
def _one_thread():
    """Small models: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_mistake_has_a_check_of_the_table():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {mistake.caught_by.name for mistake in ALL} <= set(names)
    assert len({mistake.words for mistake in ALL}) > 0.9 * len(ALL)


@pytest.mark.parametrize("seeded", ALL, ids=lambda seeded: seeded.name)
def test_every_target_exists_and_is_put_back(seeded: Mistake):
    """A name that moved is an error here, and not a mistake that nobody makes any more."""
    with seeded.switched_on() as patch:
        targets = dict.fromkeys(patch.targets)
        changed = {target: resolve(target)[2] for target in targets}
    assert targets
    assert all(resolve(target)[2] is not value for target, value in changed.items())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_code_as_it_is_passes(check: Check):
    assert check() is None


@pytest.mark.parametrize("seeded", ALL, ids=lambda seeded: seeded.name)
def test_mistake_is_caught(seeded: Mistake):
    row = examine.examine(seeded, [seeded.caught_by])
    assert row.good, f"{seeded.words}: not caught by {seeded.caught_by.name}"


def test_a_crash_is_not_a_catch():
    """Only typed refusals count as caught: an accident in a check must surface, and the code must be
    as it was afterwards.
    """

    def accident(patch):
        def broken(real, *given):
            raise RuntimeError("an accident")

        patch.around("dpfy.gradients.engines.loop.BatchedEngine.attach", broken)

    with pytest.raises(RuntimeError, match="an accident"):
        examine.examine(
            Mistake("broken", "an accident", training.SENSITIVITY, accident), [training.SENSITIVITY]
        )
    assert training.PERMIT() is None

    def refuse():
        raise InvalidInput("x", 1, "must be 2")

    assert Check("refused", refuse)() == "refused by the pipeline: x: got 1; must be 2"


def test_a_mistake_that_changes_nothing_is_a_survivor():
    idle = Mistake("idle", "nothing", integrity.SPENT, lambda patch: None)
    [shipped, row] = examine.run([idle], [integrity.SPENT])
    assert shipped.good
    assert not row.good
    assert row.to_json()["bug"] == "idle"
    assert row.caught_by == []


@pytest.mark.parametrize(
    "target",
    [
        "dpfy.nowhere.f",
        "dpfy.noise.stream.NoiseStream.absent",
        "dpfy.noise.stream.Absent.release",
        "json.dumps",
        "dpfy.gradients.engines.loop.BatchedEngine.detach",  # inherited: patch it where it is
    ],
)
def test_a_target_that_does_not_exist_is_an_error(target):
    with patching() as patch, pytest.raises(NoSuchTarget, match=target):
        patch(target, None)


def test_a_name_is_replaced_wherever_it_was_imported_and_put_back_if_the_block_raises():
    from dpfy.gradients import engine
    from dpfy.gradients.engines import loop

    real, said = engine.clipped_sum, set()

    def fail():
        with patching() as patch:
            patch.around("dpfy.gradients.engine.clipped_sum", lambda real: "other")
            said.update(m.clipped_sum() for m in (engine, loop))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert said == {"other"}
    assert all(m.clipped_sum is real for m in (engine, loop))
    with patching() as patch:
        patch("dpfy.gradients.engines.loop.clipped_sum", "here alone")
        assert loop.clipped_sum == "here alone"
        assert engine.clipped_sum is real
    assert loop.clipped_sum is real


def test_a_module_that_is_first_imported_under_a_mistake_keeps_nothing_of_it():
    name = "dpfy_lab.synthetic_images.sheet"
    from dpfy_lab.synthetic_images import run

    target = "dpfy.synthetic.evolution.fine"
    held = sys.modules.pop("dpfy_lab.synthetic_images.stages")
    try:
        with patching() as patch:
            patch.around(target, lambda real, value: value)
            import dpfy_lab.synthetic_images.stages as again

            assert again is not held
            assert again.fine(0.3) == 0.3
        assert again.fine is held.fine
    finally:
        sys.modules["dpfy_lab.synthetic_images.stages"] = held
        run.stages = held
    assert name in sys.modules


def test_two_mistakes_of_one_name_are_refused():
    with pytest.raises(ValueError, match="clip-mean"):
        mistake("clip-mean", "again", training.SENSITIVITY)(lambda patch: None)


def test_a_run_with_given_gradients_resumes_bit_for_bit():
    rows, plan = np.eye(8, loop.dimension()), loop.plan_of(8, steps=6)
    whole = loop.noisy_sums(rows, plan, seed=4)
    assert np.array_equal(whole, loop.noisy_sums(rows, plan, seed=4, interrupt=2))
    assert not np.array_equal(whole, loop.noisy_sums(rows, plan, seed=5))


@pytest.mark.parametrize(
    "check",
    [
        training.WHITE_BOX,
        training.NOISE_ALONE,
        training.NOISE_AND_DATA,
        training.LATTICE,
        training.SECRET,
        training.RESUMED,
        integrity.SPENT,
    ],
    ids=lambda check: check.name,
)
def test_the_checks_pass_for_exact_noise(check, monkeypatch):
    """Resumed bit for bit, audited at the claimed epsilon, on one lattice: what holds for float
    noise holds for exact noise.
    """
    real = loop.plan_of

    def plan_of(*given, **named):
        plan = real(*given, **named)
        return dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, noise="exact"))

    for module in (loop, training, integrity):
        monkeypatch.setattr(module, "plan_of", plan_of)
    assert check() is None


@pytest.mark.parametrize("good", [True, False])
def test_command(monkeypatch, good):
    """Its JSON object and exit status."""
    seeded = MISTAKES["clip-tied"]
    found = "it adds 2" if good else None
    rows = [
        examine.SelfTestRow(None, {"tied weights": None}, {"tied weights": 0.1}),
        examine.SelfTestRow(seeded, {"tied weights": found}, {"tied weights": 0.2}),
    ]
    monkeypatch.setattr(examine, "run", lambda *given, **named: rows)
    said = CliRunner().invoke(app, ["audit", "selftest", "--json"])
    assert said.exit_code == (0 if good else 1)
    answer = json.loads(said.stdout)
    assert answer["good"] is good
    assert answer["bugs"] == 1
    assert answer["rows"][0]["words"] == "the code as it is"
    assert answer["rows"][1] == {
        "bug": "clip-tied",
        "words": seeded.words,
        "good": good,
        "caught_by": ["tied weights"] if good else [],
        "why": {"tied weights": found} if good else {},
        "seconds": {"tied weights": 0.2},
    }


@pytest.mark.slow
def test_full_matrix():
    rows = examine.run(ALL, CHECKS, every=True)
    assert all(row.good for row in rows)
    assert rows[0].caught_by == []
