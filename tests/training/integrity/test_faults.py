"""A run killed at any moment resumes to the same bits, and its ledger never claims less than was
released.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dpfy
from dpfy import accounting
from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.report.verify import verify
from dpfy.runs.mark import Mark

sys.path.insert(0, str(Path(__file__).parents[1]))
import small


@pytest.fixture(scope="module")
def spawn():
    """Start a child from a clean server process that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "dpfy.training.fit",
            "dpfy.accounting.tight.accountant",
            "dp_accounting",
            "scipy.special",
        ]
    )

    def start(path: Path, death: tuple[str, int] | None = None, tally: Path | None = None):
        child = context.Process(
            target=small.train_in_child, args=(str(path), death, tally and str(tally))
        )
        child.start()
        return ended(child)

    return start


def ended(child):
    """The exit status of a child once it has ended. The deadline is for children that never do."""
    child.join(3600)
    assert child.exitcode is not None, "a child hung: it did not end in an hour"
    return child.exitcode


@pytest.fixture(scope="module")
def told(spawn):
    """Start a child that tells when it comes to an event of its life (0: the last one, with its
    number). Who hears of it may kill.
    """
    context = multiprocessing.get_context("forkserver")

    def start(path: Path, event: int):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=small.train_and_tell, args=(str(path), event, theirs))
        child.start()
        theirs.close()
        try:
            return child, ours.recv_bytes()
        except EOFError:  # it ended before
            return child, None

    return start


@pytest.fixture(scope="module")
def reference(spawn, tmp_path_factory):
    """The uninterrupted run: its folder, and how often it called each os function."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert spawn(path, tally=path.parent / "calls.json") == 0
    return path, json.loads((path.parent / "calls.json").read_text())


def assert_never_under_reports(path: Path) -> None:
    """If anything was released or could be released from what is on disk, the whole plan is in the
    ledger.
    """
    released = [
        f
        for f in (
            path / "checkpoint" / "state.safetensors",
            path / "model.safetensors",
            path / "privacy.json",
        )
        if f.exists()
    ]
    if released:
        ledger = Ledger.open(path / "ledger.jsonl")
        assert ledger.guarantee(accounting.accountant("rdp")).epsilon(
            1e-3
        ) >= small.plan().guarantee("rdp").epsilon(1e-3)


def assert_same_result(path: Path, reference: Path) -> None:
    assert (path / "model.safetensors").read_bytes() == (
        reference / "model.safetensors"
    ).read_bytes()
    ours, theirs = (json.loads((p / "privacy.json").read_text()) for p in (path, reference))
    assert ours["guarantee"] == theirs["guarantee"]
    assert (path / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert not (path / "checkpoint").exists()
    assert all(f.holds for f in verify(path)), verify(path)


@pytest.mark.parametrize(
    "every", [pytest.param(8, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_killed_inside_writes(spawn, reference, tmp_path, every):
    """Torn writes, before and after a sync, before a rename: in secret, ledger, checkpoint, model
    and card, from first to last.
    """
    path_of_reference, calls = reference
    died = 0
    deaths = [("write", n) for n in (2, 4, 5, 6)] + [("fsync", 1), ("fsync", 7), ("replace", 4)]
    deaths += [
        (name, calls[name] - back)
        for name, back in (("write", 0), ("write", 2), ("write", 4), ("fsync", 3), ("replace", 1))
    ]
    deaths += [(name, calls[name] // 2) for name in calls]
    deaths = deaths[::every]
    for number, death in enumerate(deaths):
        path = tmp_path / str(number)
        status = spawn(path, death)
        died += status == -signal.SIGKILL
        assert status in (0, -signal.SIGKILL)
        assert_never_under_reports(path)
        if not (path / "privacy.json").exists():
            assert spawn(path) == 0, death
            assert_same_result(path, path_of_reference)
    assert died == len(deaths)


@pytest.mark.parametrize("wanted", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_again_and_again(spawn, told, reference, tmp_path, wanted):
    """Runs killed at random moments of their lives, and resumed, until there were enough kills;
    every run that gets through is compared.

    A moment is an event of the child's own life, so a slow machine changes nothing; the kill comes
    from outside, a little later.
    """
    path_of_reference, _ = reference
    child, last = told(tmp_path / "life", 0)
    assert ended(child) == 0
    life = int(last)
    dice = random.Random(0)
    kills, through, runs = 0, 0, 0
    path = tmp_path / "0"
    while kills < wanted or not through:
        child, heard = told(path, int(dice.uniform(0.05, 0.95) * life) if kills < wanted else -1)
        if heard is not None:
            child.kill()
        status = ended(child)
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        assert_never_under_reports(path)
        if (path / "privacy.json").exists():
            if not (
                path / "checkpoint"
            ).exists():  # else killed before the erasure: see test_secrets_left_by_a_crash
                assert_same_result(path, path_of_reference)
                through += 1
            runs += 1
            path = tmp_path / str(runs)


@pytest.mark.parametrize(
    "every", [pytest.param(100, id="ends"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_killed_at_every_call_of_the_operating_system(spawn, tmp_path, every):
    """From the mark to the end of the erasure: a run killed before any call is resumed to the same
    bits and leaves a clean folder.
    """
    context = multiprocessing.get_context("forkserver")
    child = context.Process(
        target=small.die_at_every_call, args=(str(tmp_path), every, str(tmp_path / "answer"))
    )
    child.start()
    assert ended(child) == 0
    answer = json.loads((tmp_path / "answer").read_text())
    assert answer["wrong"] == []
    assert answer["killed"] == answer["deaths"] >= 70


def test_secrets_left_by_a_crash_are_erased_on_resume(tmp_path, monkeypatch):
    """A crash after the card, before and inside the erasure: resuming completes it and returns the
    finished run; so does the job.
    """
    from dpfy.runs import folder
    from dpfy.training import config, job

    class Crash(BaseException):
        pass

    def crash(*arguments: object) -> None:
        raise Crash

    flags = {
        "data.kind": "digits",
        "privacy.records": 1437,
        "model.name": "linear",
        "training.steps": 2,
        "privacy.delta": 1e-4,
    }
    settings = config.make({}, flags)
    for number, place in enumerate(
        [(folder, "erase_secrets"), (storage, "_zero"), (Mark, "remove")]
    ):
        ours, theirs = tmp_path / f"library {number}", tmp_path / f"job {number}"
        with monkeypatch.context() as patch:
            patch.setattr(*place, crash)
            for start in (
                lambda: small.train(dpfy.Run(ours, seed=1), steps=2),  # noqa: B023
                lambda: job.run(settings, theirs, seed=1),  # noqa: B023
            ):
                with pytest.raises(Crash):
                    start()
        for path in (ours, theirs):
            assert Mark.find(path) is not None
        result = small.train(dpfy.Run(ours, resume=True), steps=2)
        card = json.loads((ours / "privacy.json").read_text())
        assert (result.utility, result.epsilon) == (
            card["sections"][0]["utility"],
            card["guarantee"]["epsilon"],
        )
        outcome = job.run(settings, theirs, resume=True)
        assert outcome.card == json.loads((theirs / "privacy.json").read_text())
        for path in (ours, theirs):
            assert not [p.name for p in path.iterdir() if p.name.startswith(".") or p.is_dir()]
            assert all(f.holds for f in verify(path)), verify(path)


def test_a_result_returned_again_gives_the_model_its_released_weights(tmp_path):
    small.train(dpfy.Run(tmp_path / "run", seed=1), steps=2)
    released = load_file(tmp_path / "run" / "model.safetensors")
    net = small.model(seed=9)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    run = dpfy.Run(tmp_path / "run", resume=True)
    dpfy.fit(net, small.data(), plan=small.plan(2), optimizer=optimizer, run=run)
    assert all(torch.equal(value, released[name]) for name, value in net.state_dict().items())
    other = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidInput, match="is not the model of this run"):
        dpfy.fit(
            other,
            small.data(),
            plan=small.plan(2),
            optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
            run=run,
        )
    (tmp_path / "run" / "model.safetensors").write_bytes(b"exchanged")
    with pytest.raises(Corrupt, match=r"model\.safetensors"):
        dpfy.fit(net, small.data(), plan=small.plan(2), optimizer=optimizer, run=run)
