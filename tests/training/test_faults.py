"""A run killed at any moment resumes to the same bits, and its ledger never claims less than was released."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from dpfy import accounting
from dpfy.core.ledger import Ledger
from dpfy.report.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
import small


@pytest.fixture(scope="module")
def spawn():
    """Start a child from a clean server process that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dpfy.training.fit", "dp_accounting"])

    def start(path: Path, death: tuple[str, int] | None = None):
        child = context.Process(target=small.train_in_child, args=(str(path), death))
        child.start()
        return child

    return start


@pytest.fixture(scope="module")
def reference(spawn, tmp_path_factory):
    """The uninterrupted run: its folder and how long it took."""
    path = tmp_path_factory.mktemp("whole") / "run"
    started = time.monotonic()
    child = spawn(path)
    child.join(120)
    assert child.exitcode == 0
    return path, time.monotonic() - started


def assert_never_under_reports(path: Path) -> None:
    """If anything was released or could be released from what is on disk, the whole plan is in the ledger."""
    released = [
        f for f in (path / "checkpoint" / "state.safetensors", path / "model.safetensors", path / "privacy.json") if f.exists()
    ]
    if released:
        ledger = Ledger.open(path / "ledger.jsonl")
        assert ledger.guarantee(accounting.accountant("rdp")).epsilon(1e-3) >= small.plan().guarantee("rdp").epsilon(1e-3)


def assert_same_result(path: Path, reference: Path) -> None:
    assert (path / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    ours, theirs = (json.loads((p / "privacy.json").read_text()) for p in (path, reference))
    assert ours["guarantee"] == theirs["guarantee"]
    assert (path / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert not (path / "checkpoint").exists()
    assert all(f.holds for f in verify(path)), verify(path)


# Inside ledger and checkpoint writes: a torn write, before and after a sync, before a rename, at the start, middle and end of the run.
DEATHS = [("write", n) for n in (1, 2, 3, 4, 5, 6, 20, 43, 47, 49, 50)] + [("fsync", n) for n in (1, 3, 7, 9, 30, 88, 92, 96)]
DEATHS += [("replace", n) for n in (1, 2, 3, 4, 17, 44, 45, 46)]


def test_killed_inside_writes(spawn, reference, tmp_path):
    """Every death below happens inside a ledger, checkpoint, model or card write."""
    path_of_reference, _ = reference
    died = 0
    for number, death in enumerate(DEATHS):
        path = tmp_path / str(number)
        child = spawn(path, death)
        child.join(120)
        died += child.exitcode == -signal.SIGKILL
        assert child.exitcode in (0, -signal.SIGKILL)
        assert_never_under_reports(path)
        if not (path / "privacy.json").exists():
            child = spawn(path)
            child.join(120)
            assert child.exitcode == 0, death
            assert_same_result(path, path_of_reference)
    assert died >= 20


def test_killed_at_random_moments_again_and_again(spawn, reference, tmp_path):
    """One run killed at random moments until it gets through; with 20 or more kills in all over several runs."""
    path_of_reference, duration = reference
    dice = random.Random(0)
    kills = 0
    for number in range(40):
        path = tmp_path / str(number)
        for _ in range(30):
            child = spawn(path)
            child.join(dice.uniform(0.05, 1.1) * duration)
            if child.exitcode is None:
                child.kill()
                child.join()
                kills += 1
            assert_never_under_reports(path)
            if (path / "privacy.json").exists():
                break
        if (path / "checkpoint").exists() and (path / "privacy.json").exists():
            continue  # killed between the card and the erasure; covered by test_secrets_left_by_a_crash_are_erased_on_resume
        assert_same_result(path, path_of_reference)
        if kills >= 24:
            break
    assert kills >= 20


def test_secrets_left_by_a_crash_are_erased_on_resume(spawn, tmp_path):
    """A crash after the card and before the erasure: resuming the job erases what is left."""
    from dpfy.training import config, job

    path = tmp_path / "run"
    flags = {"data.kind": "digits", "privacy.records": 1437, "model.name": "linear", "training.steps": 2, "privacy.delta": 1e-4}
    settings = config.make({}, flags)
    job.run(settings, path, seed=1)
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "secret.json").write_text("left over")
    outcome = job.run(settings, path, resume=True)
    assert not (path / "checkpoint").exists()
    assert outcome.card == json.loads((path / "privacy.json").read_text())
