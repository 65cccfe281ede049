"""The noise of a run meets one computation: whoever copies a run, puts an old part of it back,
deletes one or forks it is refused.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import storage
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.report.verify import verify
from dpfy.runs import holder
from dpfy.runs.folder import finish_erasure
from dpfy.runs.run import Run
from dpfy.training import TrainingRun
from dpfy.training.integrity import journal
from dpfy.training.run import complete

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
sys.path.insert(0, str(Path(__file__).parent))
import count
import forge
import small

STEPS = 8
BUDGET = RenyiFilter(60.0, 1e-3)


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    """The progress is written down at every step, however short."""
    monkeypatch.setattr(journal, "RARELY", 0)


def plain(net, x, y):
    return functional.cross_entropy(net(x), y, reduction="none")


def other(net, x, y):
    return plain(net, x, y) + net(x).square().mean(1)


def train(path, losses=plain, *, die=None, every=1e9, ledger=None, at=None, clean=False):
    """Train, or resume; what was released at each step. `at` is called before each step."""
    torch.set_num_threads(1)
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = {}
    run = dpfy.Run(
        path,
        resume=True,
        checkpoint_every=every,
        ledger=ledger,
        budget=None if ledger is None else BUDGET,
    )
    training = dpfy.PrivateTraining(net, optimizer, small.data(), small.plan(STEPS), run)

    def look(*_):
        seen[training.steps_done] = torch.cat(
            [p.grad.reshape(-1).clone() for p in net.parameters()]
        )

    optimizer.register_step_pre_hook(look)
    try:
        with training:
            for x, y in training.batches():
                if at is not None:
                    at(training)
                training.step(losses(net, x, y))
                if training.steps_done == die:
                    if not clean:
                        training._status.reason = "killed"  # nothing is written any more
                    raise Killed
    except Killed:
        pass
    return seen


def forget_recording(run):
    """Only what keeps noise apart may refuse here, not the comparison of code."""
    (run / "checkpoint" / "watch.json").unlink(missing_ok=True)


def refused(run, error=DpfyError, match=None, ledger=None):
    """Another loss releases nothing."""
    forget_recording(run)
    released = {}
    with pytest.raises(error, match=match):
        released = train(run, other, ledger=ledger)
    assert released == {}
    assert not (run / "privacy.json").exists()


@pytest.mark.parametrize("when", ["before the first step", "in the middle", "with a checkpoint"])
def test_1_a_copied_folder_is_refused_and_the_original_goes_on(tmp_path, when):
    run, copy = tmp_path / "run", tmp_path / "copy"
    if when == "before the first step":
        with TrainingRun(dpfy.Run(run), small.plan(STEPS)):
            shutil.copytree(run, copy)
    else:
        train(run, die=4, every=0.0 if when == "with a checkpoint" else 1e9)
        shutil.copytree(run, copy)
    refused(copy, Unsupported, "copied or restored")
    assert train(run)
    assert all(f.holds for f in verify(run))


def test_2_a_backup_of_the_folder_that_is_put_back_is_refused(tmp_path):
    run = tmp_path / "run"
    train(run, die=3, every=0.0)
    shutil.copytree(run, tmp_path / "backup")
    train(run, die=6, every=0.0)
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "backup", run)
    refused(run, Unsupported, "copied or restored")


def restored(run, die, every, how):
    """A backup at step 3, made while the run goes on, that is written over the folder after its
    death.
    """
    backup = run.parent / "backup"

    def copied(training):
        if training.steps_done == 3 and not backup.exists():
            shutil.copytree(run, backup)

    first = train(run, die=die, every=every, at=copied)
    if how == "mirrored":
        for file in set((run / "checkpoint").iterdir()):
            if not (backup / "checkpoint" / file.name).exists():
                file.unlink()
    shutil.copytree(backup, run, dirs_exist_ok=True, copy_function=shutil.copy2)
    return first


@pytest.mark.parametrize("how", ["over it", "mirrored"])
@pytest.mark.parametrize("every", [0.0, 1e9], ids=["checkpoints", "journal"])
def test_3_a_backup_that_is_written_over_the_folder_is_refused(tmp_path, every, how):
    """Every file keeps its inode, or gets the name that it had; with the ledger of the run, which
    knows nothing of later steps.
    """
    restored(tmp_path / "run", 6, every, how)
    refused(tmp_path / "run", Corrupt)


@pytest.mark.parametrize("how", ["copied", "renamed"])
def test_4_an_old_checkpoint_is_refused(tmp_path, how):
    run = tmp_path / "run"
    train(run, die=3, every=0.0)
    state, old = run / "checkpoint" / "state.safetensors", tmp_path / "old"
    if how == "copied":
        shutil.copy2(state, old)
    else:
        os.link(state, old)
    train(run, die=6, every=0.0)
    if how == "copied":
        shutil.copy2(old, state)
    else:
        os.replace(old, state)
    refused(run, Corrupt, "is a copy" if how == "copied" else "an older one was put in its place")


def test_5_a_deleted_journal_is_refused(tmp_path):
    run = tmp_path / "run"
    train(run, die=5)
    (run / "checkpoint" / "steps.jsonl").unlink()
    refused(run, Corrupt, r"steps\.jsonl: is missing")


def test_6_an_emptied_or_shortened_journal_is_refused(tmp_path):
    for number, kept in enumerate((0, 2)):
        run = tmp_path / str(number)
        train(run, die=5)
        file = run / "checkpoint" / "steps.jsonl"
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:kept]))
        refused(run, Corrupt, f"does not hold step {kept}")


def test_7_a_deleted_progress_is_refused(tmp_path):
    run = tmp_path / "run"
    train(run, die=5)
    for file in (run / "checkpoint").glob("reached-*"):
        file.unlink()
    refused(run, Corrupt, "reached-.*is missing")


@pytest.mark.parametrize(
    "lost", [["state.safetensors"], ["state.safetensors", "steps.jsonl"], ["secret.json"]]
)
def test_8_a_deleted_checkpoint_is_refused(tmp_path, lost):
    run = tmp_path / "run"
    train(run, die=5)
    for name in lost:
        (run / "checkpoint" / name).unlink()
    refused(run, Corrupt, "is missing")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_9_with_a_deleted_ledger_the_secret_is_not_used_again(tmp_path, shared, all_of_it):
    """Without the run's own ledger it looks as if nothing had been reserved: a new secret is drawn,
    or the run is refused.
    """
    run, people = tmp_path / "run", tmp_path / "people.jsonl" if shared else None
    first = train(run, die=5, ledger=people)
    secret = json.loads((run / "checkpoint" / "secret.json").read_text())["secret"]
    for file in [*run.glob("ledger*"), *((run / "checkpoint").glob("s[t]*") if all_of_it else ())]:
        file.unlink()
    if shared or not all_of_it:
        refused(run, Corrupt, ledger=people)
        return
    forget_recording(run)
    again = train(run, other, die=5)
    assert json.loads((run / "checkpoint" / "secret.json").read_text())["secret"] != secret
    assert not torch.equal(first[0], again[0])
    for step in first:  # independent noise: the difference is as large as noise of its own
        assert (first[step] - again[step]).std() > small.plan(STEPS).scale * 0.5 / 20


def test_10_a_fork_makes_no_step_and_leaves_the_run_alone(tmp_path):
    """Whatever the child calls, the parent ends as if there had been no child."""
    run, told = tmp_path / "run", tmp_path / "told"

    def fork(training):
        if training.steps_done != 3 or told.exists():
            return
        told.write_text("")
        child = os.fork()
        if child == 0:
            outcomes = []
            for call in (
                lambda: training.step(torch.zeros(3, requires_grad=True)),
                training.save,
                training.finish,
                lambda: training.folder.bind("x", b"y"),
                lambda: training.folder.begin("training"),
                training.folder.abandon,
                lambda: training.folder.permit.check(4, training.folder.permit.event),
                lambda: training.private_step(training.state, None),
            ):
                try:
                    call()
                    outcomes.append("done")
                except Unsupported as error:
                    outcomes.append(
                        "forked process" if "in a forked process" in str(error) else str(error)
                    )
            training.__exit__(None, None, None)
            told.write_text(json.dumps(outcomes))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    whole = train(run, at=fork)
    assert json.loads(told.read_text()) == ["forked process"] * 8
    assert sorted(whole) == list(range(STEPS))
    assert all(f.holds for f in verify(run))


def test_10_a_fork_that_leaves_before_the_first_step_does_not_undo_the_run(tmp_path):
    run = tmp_path / "run"
    with TrainingRun(dpfy.Run(run), small.plan(STEPS)) as folder:
        child = os.fork()
        if child == 0:
            folder.__exit__(ValueError, ValueError(), None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        folder.begin("training")
    assert (run / "checkpoint" / "secret.json").is_file()


def test_10_workers_that_read_data_may_fork(tmp_path):
    """A loader with forked workers is no other process of the run."""
    net = small.model()
    x, y = small.data()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y),
        batch_size=20,
        num_workers=2,
        multiprocessing_context="fork",
    )
    with dpfy.PrivateTraining(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        loader,
        small.plan(3),
        dpfy.Run(tmp_path / "run"),
    ) as training:
        for batch in training.batches():
            training.step(plain(net, *batch))
    assert all(f.holds for f in verify(tmp_path / "run"))


def test_11_with_a_shared_ledger_a_run_is_completed_once(tmp_path, monkeypatch):
    """Also where no file can be told from a copy of it: a snapshot of the whole disk, put back."""
    monkeypatch.setattr(storage, "identity", lambda handle: "alike")
    run, copy, people = tmp_path / "run", tmp_path / "copy", tmp_path / "people.jsonl"
    train(run, die=4, ledger=people)
    shutil.copytree(run, copy)
    train(run, ledger=people)
    assert list(Ledger.read(people).book.ended.values()) == [
        Ledger.read(run / "ledger.jsonl").book.finish["card"]
    ]
    refused(copy, InvalidInput, "was completed", ledger=people)
    assert all(f.holds for f in verify(run, ledger=people))


def test_11_two_copies_that_are_completed_at_the_same_time_are_one_completion(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(storage, "identity", lambda handle: "alike")
    run, copy, people = tmp_path / "run", tmp_path / "copy", tmp_path / "people.jsonl"
    train(run, die=4, ledger=people, clean=True)
    shutil.copytree(run, copy)

    def first(training):
        if training.steps_done == STEPS - 1:
            train(run, ledger=people)

    forget_recording(copy)
    with pytest.raises(InvalidInput, match="was completed"):
        train(copy, other, ledger=people, at=first)
    assert not (copy / "privacy.json").exists()
    assert not (copy / "model.safetensors").exists()


def test_11_the_shared_ledger_knows_the_folder(tmp_path, monkeypatch):
    """A copy whose own files were made to look right (by an earlier version of the library, say) is
    found by the data set's ledger.
    """
    run, copy, people = tmp_path / "run", tmp_path / "copy", tmp_path / "people.jsonl"
    train(run, die=4, ledger=people)
    shutil.copytree(run, copy)
    secret = copy / "checkpoint" / "secret.json"
    held = json.loads(secret.read_text())
    del held["file"]
    secret.write_text(json.dumps(held))

    def unplaced(bodies):
        for body in bodies:
            body.pop("place", None)

    forge.rechain(copy / "ledger.jsonl", unplaced)
    refused(copy, Unsupported, r"people\.jsonl says was started in another folder", ledger=people)
    assert train(run, ledger=people)


@pytest.mark.parametrize("moment", ["own ledger", "shared ledger"])
def test_11_a_crash_at_the_end_is_mended_in_both_ledgers(tmp_path, monkeypatch, moment):
    run, people = tmp_path / "run", tmp_path / "people.jsonl"
    name = "end" if moment == "own ledger" else None
    with monkeypatch.context() as patch:
        if name:
            patch.setattr(Ledger, "end", lambda *_: (_ for _ in ()).throw(Killed()))
        else:
            from dpfy.runs import folder

            patch.setattr(folder, "publish", lambda *_: (_ for _ in ()).throw(Killed()))
        train(run, ledger=people)
    assert not (run / "privacy.json").exists()
    net = small.model()
    place = dpfy.Run(run, resume=True, ledger=people, budget=BUDGET)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dpfy.fit(
        net,
        small.data(),
        plan=small.plan(STEPS),
        optimizer=optimizer,
        loss="cross_entropy",
        run=place,
    )
    assert list(Ledger.read(people).book.ended.values()) == [
        Ledger.read(run / "ledger.jsonl").book.finish["card"]
    ]
    assert all(f.holds for f in verify(run, ledger=people))


ELSEWHERE = """
import sys
from dpfy.core import storage
from dpfy.runs import holder
storage.fcntl.flock = lambda handle, how: None  # a file system that keeps locks to itself
storage._try = lambda *_: None
if {other}:
    holder.machine = lambda: dict(host="elsewhere", installation="b", boot="b")
sys.path[:0] = {paths}
import test_reused_noise as here
try:
    print(len(here.train({run!r}, here.other)))
except here.DpfyError as error:
    print(type(error).__name__, error)
"""


def elsewhere(run, other=True):
    """What another machine says that resumes a run with another loss."""
    paths = [str(Path(__file__).parent)]
    code = ELSEWHERE.format(other=other, paths=paths, run=str(run))
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_12_another_machine_waits_for_the_one_that_holds_the_folder(tmp_path):
    """Two machines on a file system whose locks do not reach from one to the other."""
    run, seen = tmp_path / "run", []

    def ask(training):
        if training.steps_done == 4:
            seen.append(elsewhere(run))

    train(run, at=ask)
    assert len(seen) == 1
    assert seen[0].startswith("Busy")
    assert "is using it; wait" in seen[0]
    assert all(f.holds for f in verify(run))


def test_12_a_machine_whose_folder_was_taken_over_stops(tmp_path, monkeypatch):
    """It was asleep for longer than the lease: the other one went on, and what this one would
    release is refused.
    """
    monkeypatch.setattr(holder, "EVERY", 0.0)
    run = tmp_path / "run"

    def sleep(training):
        if training.steps_done == 4:
            file = run / "checkpoint" / holder.HOLDER
            os.utime(file, (0, 0))
            with monkeypatch.context() as patch:
                patch.setattr(
                    holder,
                    "machine",
                    lambda: {"host": "elsewhere", "installation": "b", "boot": "b"},
                )
                holder.Holder.take(file, "run")

    with pytest.raises(Unsupported, match="another machine has taken over"):
        train(run, at=sleep, every=0.0)
    assert not (run / "privacy.json").exists()


@pytest.mark.parametrize("how", ["crash", "restart", "another container", "left"])
def test_the_same_machine_goes_on_at_once(tmp_path, monkeypatch, how):
    """After a crash, a restart, and in another container on the same machine; another machine after
    a clean end.
    """
    run, mine = tmp_path / "run", holder.machine()
    assert {key for key, value in mine.items() if value} >= {"host", "boot"}
    changed = {
        "crash": {},
        "restart": {"boot": "another"},
        "another container": {"host": "another", "installation": ""},
        "left": {"host": "another", "installation": "another", "boot": "another"},
    }[how]
    if how == "left":
        train(run, die=3, clean=True)
    else:
        child = os.fork()
        if child == 0:
            train(
                run,
                at=lambda training: (
                    training.steps_done == 3 and os.kill(os.getpid(), signal.SIGKILL)
                ),
            )
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert (run / "checkpoint" / holder.HOLDER).is_file()
    monkeypatch.setattr(holder, "machine", lambda: mine | changed)
    monkeypatch.setattr(journal, "boot", lambda: (mine | changed)["boot"])
    assert sorted(train(run))[-1] == STEPS - 1
    assert all(f.holds for f in verify(run))


def test_a_folder_may_be_renamed_and_change_hands(tmp_path):
    """Neither another name, nor other modes and times, make a copy of a folder."""
    whole = tmp_path / "a" / "run"
    first = train(whole, die=4, every=0.0)
    (tmp_path / "a").rename(tmp_path / "b")
    run = (tmp_path / "b" / "run").rename(tmp_path / "b" / "moved")
    for file in [run, *run.rglob("*")]:
        file.chmod(0o755 if file.is_dir() else 0o640)
        os.utime(file, (0, 0))
    again = train(run)
    assert all(torch.equal(first[step], again[step]) for step in first.keys() & again.keys())
    assert all(f.holds for f in verify(run))


def test_after_a_restart_unsynced_lines_of_the_journal_may_be_lost(tmp_path, monkeypatch):
    """A loss of power takes what was not on the disk yet: the run goes on, from its checkpoint."""
    run = tmp_path / "run"
    train(run, die=5)
    file = run / "checkpoint" / "steps.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    monkeypatch.setattr(journal, "boot", lambda: "another start of the machine")
    assert sorted(train(run)) == list(range(STEPS))


def test_a_release_that_lost_what_it_was_bound_to_is_refused(tmp_path, monkeypatch):
    """Any release of a run folder: bound.json deleted, or put back as it was before the data was
    bound.
    """
    claim = count.LaplaceCount(2.0, delta=1e-6)
    for number, how in enumerate(("deleted", "put back")):
        run = tmp_path / str(number)
        before = None
        with RunFolderOf(run, claim) as folder:
            before = (folder.secrets / "bound.json").read_bytes()
            folder.bind("count", b"37")
            folder.begin(claim.name)
        bound = run / "checkpoint" / "bound.json"
        bound.unlink() if how == "deleted" else bound.write_bytes(before)
        with (
            RunFolderOf(run, claim, resume=True) as folder,
            pytest.raises(Corrupt, match=r"bound\.json"),
        ):
            folder.bind("count", b"38")


def RunFolderOf(run, claim, resume=False):
    from dpfy.runs.folder import RunFolder

    return RunFolder(Run(run, resume=resume), claim)


def test_killed_at_random_and_resumed_the_bits_are_the_same(tmp_path):
    """Whatever is refused above, a run that is killed anywhere and resumed by the same computation
    ends as one that was not.
    """
    dice = random.Random(7)
    context = multiprocessing.get_context("fork")
    whole = train_fixed(tmp_path / "whole")
    kills = 0
    for number in range(4):
        run = tmp_path / str(number)
        while not (run / "privacy.json").exists():
            child = context.Process(
                target=train_until, args=(run, dice.random(), dice.choice([0.0, 1e9]))
            )
            child.start()
            child.join(300)
            assert child.exitcode in (0, -signal.SIGKILL)
            kills += child.exitcode != 0
        finish_erasure(run)
        assert (run / "model.safetensors").read_bytes() == whole
        assert all(f.holds for f in verify(run))
    assert kills >= 3


def train_fixed(run, every=1e9):
    torch.set_num_threads(1)
    net = small.model()
    place = dpfy.Run(run, resume=True, seed=5, checkpoint_every=every)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if not complete(place, small.plan(STEPS)):
        with dpfy.PrivateTraining(
            net, optimizer, small.data(), small.plan(STEPS), place
        ) as training:
            for x, y in training.batches():
                training.step(plain(net, x, y))
    return (Path(run) / "model.safetensors").read_bytes()


def train_until(run, moment, every):
    """Resume; die before one of the next calls of the operating system, where `moment` says."""
    calls, death = 0, int(moment * 130)

    def counted(real):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == death:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in small.BOUNDARIES:
        setattr(os, name, counted(getattr(os, name)))
    train_fixed(run, every=every)
