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
    context.set_forkserver_preload(["torch", "dpfy.training.fit", "dpfy.accounting.tight", "dp_accounting", "scipy.special"])

    def start(path: Path, death: tuple[str, int] | None = None, tally: Path | None = None):
        child = context.Process(target=small.train_in_child, args=(str(path), death, tally and str(tally)))
        child.start()
        return child

    return start


@pytest.fixture(scope="module")
def reference(spawn, tmp_path_factory):
    """The uninterrupted run: its folder, how long it took, and how often it called each os function."""
    first = spawn(tmp_path_factory.mktemp("first") / "run")  # starts the server, which takes longer than a run
    first.join(120)
    path = tmp_path_factory.mktemp("whole") / "run"
    started = time.monotonic()
    child = spawn(path, tally=path.parent / "calls.json")
    child.join(120)
    assert child.exitcode == 0
    return path, time.monotonic() - started, json.loads((path.parent / "calls.json").read_text())


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


def test_killed_inside_writes(spawn, reference, tmp_path):
    """Torn writes, before and after a sync, before a rename: in secret, ledger, checkpoint, model and card, from first to last."""
    path_of_reference, _, calls = reference
    died = 0
    deaths = [("write", n) for n in (2, 4, 5, 6)] + [("fsync", 1), ("fsync", 7), ("replace", 4)]
    deaths += [
        (name, calls[name] - back) for name, back in (("write", 0), ("write", 2), ("write", 4), ("fsync", 3), ("replace", 1))
    ]
    deaths += [(name, calls[name] // 2) for name in calls]
    for number, death in enumerate(deaths):
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
    assert died == len(deaths)


def test_killed_at_random_moments_again_and_again(spawn, reference, tmp_path):
    """Runs killed at random moments of their lives, and resumed, until there were 20 kills; every run that gets through is compared."""
    path_of_reference, life, _ = reference
    dice = random.Random(0)
    kills, through, runs = 0, 0, 0
    path = tmp_path / "0"
    while kills < 20 or not through:
        started = time.monotonic()
        child = spawn(path)
        child.join(dice.uniform(0.05, 0.95) * life if kills < 20 else 120)
        if child.exitcode is None:
            child.kill()
            child.join()
            kills += 1
        else:
            assert child.exitcode == 0
            life = time.monotonic() - started  # as fast as the machine is now
        assert_never_under_reports(path)
        if (path / "privacy.json").exists():
            if not (path / "checkpoint").exists():  # else killed before the erasure: see test_secrets_left_by_a_crash
                assert_same_result(path, path_of_reference)
                through += 1
            runs += 1
            path = tmp_path / str(runs)
        assert time.monotonic() - BEGUN < 1500, "the machine is too slow for this test"


BEGUN = time.monotonic()


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
