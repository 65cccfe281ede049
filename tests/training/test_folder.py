"""Whose files are whose: a run touches what it made, marks what it makes, and follows no link."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
import torch

import dpfy
from dpfy import accounting
from dpfy.accounting import numeric_limits
from dpfy.core import storage
from dpfy.core.errors import Busy, Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.runs.folder import erase_secrets
from dpfy.runs.mark import Mark, erase_folder
from dpfy.runs.run import Run
from dpfy.training import metrics
from dpfy.training.run import TrainingRun

sys.path.insert(0, str(Path(__file__).parent))
import small


def contents(folder: Path) -> dict[str, object]:
    """Everything in a folder: files by their bytes, links by where they point, folders by name."""
    return {
        str(p.relative_to(folder)): os.readlink(p)
        if p.is_symlink()
        else p.read_bytes()
        if p.is_file()
        else "folder"
        for p in sorted(folder.rglob("*"))
    }


FOREIGN = {
    "a checkpoint folder": {"checkpoint/epoch10.pt": b"weights of a week"},
    "a file named as a secret": {"checkpoint/secret.json": b"{}"},
    "a configuration": {"config.toml": b"[project]\n"},
    "a dotfile": {".git/HEAD": b"ref"},
    "a temporary file": {".0123456789abcdef.part": b"mine"},
    "a plan": {"plan.json": b"{}"},
    "half a mark": {".dpfy-0123": b""},
    "two marks": {".dpfy-0123456789abcdef": b"", ".dpfy-0123456789abcdee": b""},
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_that_is_not_marked_is_not_touched(tmp_path, what, resume):
    folder = tmp_path / "run"
    for name, content in FOREIGN[what].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    before = contents(folder)
    with pytest.raises(DpfyError, match="choose another folder"):
        small.train(Run(folder, resume=resume), steps=2)
    assert contents(folder) == before


def test_an_empty_folder_is_used_and_stays_when_the_input_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    for _ in range(2):
        with pytest.raises(InvalidInput):
            refused(tmp_path / "run")
        assert contents(tmp_path / "run") == {}
    small.train(tmp_path / "run", steps=2)
    with pytest.raises(InvalidInput):
        refused(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def refused(path: Path, **options: object) -> None:
    """A run whose data does not fit its plan."""
    net = small.model()
    x, y = small.data()
    with dpfy.PrivateTraining(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        (x[:100], y[:100]),
        small.plan(),
        Run(path, **options),
    ):
        pass


def test_a_users_own_file_in_checkpoint_survives_the_end_of_the_run(tmp_path):
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(2), tmp_path / "run"
    ) as training:
        (tmp_path / "run" / "checkpoint" / "epoch1.pt").write_bytes(b"mine")
        for x, y in training.batches():
            training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
    left = contents(tmp_path / "run")
    assert {n: c for n, c in left.items() if n.startswith("checkpoint")} == {
        "checkpoint": "folder",
        "checkpoint/epoch1.pt": b"mine",
    }
    assert not any(name.startswith(".") for name in left)


def test_a_finished_folder_without_a_mark_keeps_its_checkpoint_folder(tmp_path):
    small.train(tmp_path / "run", steps=2)
    (tmp_path / "run" / "checkpoint").mkdir()
    (tmp_path / "run" / "checkpoint" / "secret.json").write_bytes(b"a file of the user's")
    before = contents(tmp_path / "run")
    erase_secrets(tmp_path / "run")
    small.train(Run(tmp_path / "run", resume=True), steps=2)
    assert contents(tmp_path / "run") == before


def test_one_folder_is_marked_once(tmp_path, monkeypatch):
    """The second of two processes that find a folder empty at the same time does not get it."""
    (tmp_path / "run").mkdir()
    first = Mark.make(tmp_path / "run")
    with pytest.raises(Busy, match="another process"):
        Mark.make(tmp_path / "run")
    assert Mark.find(tmp_path / "run") == first


def test_a_mark_of_another_run_is_refused(tmp_path):
    TrainingRun(Run(tmp_path / "run"), small.plan()).close()
    mark = Mark.find(tmp_path / "run")
    mark.file.rename(tmp_path / "run" / ".dpfy-0123456789abcdef")
    before = contents(tmp_path / "run")
    with pytest.raises(Corrupt, match="another run"):
        TrainingRun(Run(tmp_path / "run", resume=True), small.plan())
    assert contents(tmp_path / "run") == before


PLANTED = ["ledger.jsonl", "metrics.jsonl", "plan.json", "report.html", ".report.html.part", "checkpoint/lock", "checkpoint/x",  # noqa: E501
           "checkpoint/state.safetensors", "checkpoint/secret.json"]  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_links_in_a_run_folder_are_refused_and_not_followed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_bytes(b"a reader's own file")
    TrainingRun(Run(tmp_path / "run"), small.plan()).close()
    place = tmp_path / "run" / name
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    with pytest.raises(InvalidInput, match="a link, pipe or device"):
        TrainingRun(Run(tmp_path / "run", resume=True), small.plan())
    assert victim.read_bytes() == b"a reader's own file"


def test_a_checkpoint_folder_that_is_a_link_is_refused(tmp_path):
    TrainingRun(Run(tmp_path / "run"), small.plan()).close()
    (tmp_path / "run" / "checkpoint").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoint").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="is a link"):
        TrainingRun(Run(tmp_path / "run", resume=True), small.plan())
    Mark.find(tmp_path / "run").erase_secrets()
    assert contents(tmp_path / "elsewhere") == before


def test_erasing_follows_no_link_and_spares_other_names(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    (tmp_path / "soft").symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("soft", "hard", "folder", "pipe", "nothing"):
        storage.erase(tmp_path / name)
    assert contents(tmp_path) == {"victim": b"keep", "folder": "folder"}


def test_a_folder_of_secrets_is_zeros_on_the_disk_before_anything_is_unlinked(
    tmp_path, monkeypatch
):
    secret, victim = tmp_path / "secret", tmp_path / "victim"
    (secret / "inner").mkdir(parents=True)
    victim.write_bytes(b"keep")
    (secret / "soft").symlink_to(tmp_path)
    os.link(victim, secret / "hard")
    for name in ("a", "b", "inner/c"):
        (secret / name).write_bytes(b"x" * 3000)
    (secret / "empty").touch()
    synced, unlink, sync = dict[int, bytes](), os.unlink, os.fdatasync

    def noted(handle):
        sync(handle)
        synced[os.fstat(handle).st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()

    def checked(path):
        held = os.lstat(path)
        if stat.S_ISREG(held.st_mode) and held.st_nlink == 1 and held.st_size:
            assert synced[held.st_ino] == bytes(3000), "unlinked before its zeros were on the disk"
        unlink(path)

    monkeypatch.setattr(os, "fdatasync", noted)
    monkeypatch.setattr(os, "unlink", checked)
    erase_folder(secret)
    monkeypatch.undo()
    assert len(synced) == 3
    assert contents(tmp_path) == {"victim": b"keep"}
    erase_folder(secret)


def test_a_write_replaces_a_link_and_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    (tmp_path / "file").symlink_to(victim)
    storage.write_atomically(tmp_path / "file", b"new")
    assert contents(tmp_path) == {"victim": b"keep", "file": b"new"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        storage.write_atomically(tmp_path / "folder", b"new")
    monkeypatch.setattr(
        os,
        "write",
        lambda handle, view: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(OSError, match="No space"):
        storage.write_atomically(tmp_path / "file", b"newer")
    monkeypatch.undo()
    assert contents(tmp_path) == {"victim": b"keep", "file": b"new", "folder": "folder"}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_metrics_are_appended_to_plain_files_only(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    (tmp_path / "run").mkdir()
    if kind == "link":
        (tmp_path / "run" / "metrics.jsonl").symlink_to(victim)
    else:
        os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(Corrupt, match="plain file"):
        metrics.append(tmp_path / "run", {"step": 1})
    assert victim.read_bytes() == b"keep"


def forgotten_reduction(path: Path, ledger: Path) -> None:
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = Run(path, ledger=ledger)
    with dpfy.PrivateTraining(net, optimizer, small.data(), small.plan(), run) as training:
        for x, y in training.batches():
            training.step(torch.nn.functional.cross_entropy(net(x), y))


def test_a_loss_that_is_refused_before_anything_was_released_costs_nothing(tmp_path):
    for _ in range(2):
        with pytest.raises(InvalidInput, match='reduction="none"'):
            forgotten_reduction(tmp_path / "run", tmp_path / "people.jsonl")
        assert not (tmp_path / "run").exists()
    assert Ledger.read(tmp_path / "people.jsonl").permits() == []


def test_a_failure_after_the_first_step_keeps_the_bill(tmp_path):
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = Run(tmp_path / "run", ledger=tmp_path / "people.jsonl")

    def fail_at_the_second_step() -> None:
        with dpfy.PrivateTraining(net, optimizer, small.data(), small.plan(), run) as training:
            for x, y in training.batches():
                if training.steps_done == 1:
                    raise RuntimeError("mine")
                training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))

    with pytest.raises(RuntimeError, match="mine"):
        fail_at_the_second_step()
    assert len(Ledger.read(tmp_path / "people.jsonl").permits()) == 1
    assert (tmp_path / "run" / "checkpoint" / "secret.json").is_file()


def test_giving_up_twice_is_giving_up_once(tmp_path):
    folder = TrainingRun(Run(tmp_path / "run", ledger=tmp_path / "people.jsonl"), small.plan())
    problem = InvalidInput("x", 1, "no")
    for _ in range(3):
        folder.__exit__(InvalidInput, problem, None)
    assert not (tmp_path / "run").exists()
    assert Ledger.read(tmp_path / "people.jsonl").permits() == []


def test_another_plan_does_not_undo_a_run_that_has_not_begun(tmp_path):
    """A refusal may only undo what the refused run itself made."""
    TrainingRun(Run(tmp_path / "run"), small.plan()).close()
    before = contents(tmp_path / "run")
    for run, plan in (
        (Run(tmp_path / "run", resume=True), small.plan(7)),
        (Run(tmp_path / "run"), small.plan()),
    ):
        with pytest.raises(InvalidInput, match=r"different plan|unfinished run"):
            TrainingRun(run, plan)
        assert contents(tmp_path / "run") == before


def test_what_a_crash_left_half_written_is_destroyed_on_resume(tmp_path):
    TrainingRun(Run(tmp_path / "run", seed=1), small.plan()).close()
    for name in (".0123456789abcdef.part", "checkpoint/.0123456789abcdee.part"):
        (tmp_path / "run" / name).write_bytes(b"half a secret")
    small.train(Run(tmp_path / "run", resume=True))
    assert not [
        name
        for name in contents(tmp_path / "run")
        if name.endswith(".part") or name.startswith("checkpoint")
    ]


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "file/run", "dangling", "surrogate\ud800/x"])
def test_a_folder_that_cannot_be_is_one_line(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DpfyError):
        TrainingRun(Run(tmp_path / path), small.plan())
    assert sorted(p.name for p in tmp_path.iterdir())[:2] == ["dangling", "file"]


@pytest.mark.parametrize(("noise", "delta"), [(2.0, 1e-250), (1e-5, 1e-3)])
def test_a_plan_that_cannot_be_billed_leaves_nothing(tmp_path, noise, delta):
    """What accounting refuses is refused before the folder is made and before anything is
    reserved.
    """
    with pytest.raises(InvalidInput):
        TrainingRun(
            Run(tmp_path / "run", ledger=tmp_path / "people.jsonl"),
            dpfy.dpsgd(small.RECORDS, 20, steps=2).with_noise(noise, delta=delta),
        )
    assert contents(tmp_path) == {}


def test_an_evaluation_that_cannot_be_billed_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        numeric_limits, "MOST_NOISE", 10.0
    )  # a limit of accounting that nobody checks before it
    with pytest.raises(InvalidInput, match="noise_multiplier: got 11"):
        TrainingRun(Run(tmp_path / "run"), small.plan(), evaluation=11.0)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("stopping", [None, [2]])
@pytest.mark.parametrize("accountant", ["tight", "rdp"])
def test_accounting_is_asked_nothing_new_once_a_step_is_made(
    tmp_path, monkeypatch, accountant, stopping
):
    """The card of a finished run holds figures that were computed before its folder was made: no
    limit can strand it half-way.
    """
    plan = dpfy.dpsgd(small.RECORDS, 20, steps=5, stopping=stopping).with_noise(
        2.0, delta=1e-3, accountant=accountant
    )
    net = small.model()

    def refuse(*_: object, **__: object) -> None:
        raise InvalidInput("steps", 5, "asked too late")

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad:  # a step, and not the rehearsal of the evaluation before it
            monkeypatch.setattr(accounting, "curve", refuse)
            monkeypatch.setattr(accounting, "epsilon", refuse)
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = dpfy.fit(
        net,
        small.data(),
        plan=plan,
        optimizer=optimizer,
        loss=loss,
        run=tmp_path / "run",
        evaluation=dpfy.PublicTest(small.held_out()),
        stop=None if stopping is None else lambda rows: True,
    )
    assert (result.run / "privacy.json").is_file()
    assert result.epsilon == metrics.rows(result.run)[-1]["epsilon"]


def _in_a_loop(net, data, plan, optimizer, folder):
    with dpfy.PrivateTraining(net, optimizer, data, plan, folder):
        pass


def _in_one_call(net, data, plan, optimizer, folder):
    dpfy.fit(net, data, plan=plan, optimizer=optimizer, run=folder)


@pytest.mark.parametrize("train", [_in_a_loop, _in_one_call])
def test_an_opened_folder_trains_by_the_plan_it_reserved_and_by_no_other(tmp_path, train):
    """The ledger of an opened folder bills its own plan: less noise than that must not be made
    under its permit.
    """
    net, recipe = torch.nn.Linear(4, 2), dpfy.dpsgd(records=200, batch_size=40, steps=5)
    data, optimizer = (
        (torch.randn(200, 4), torch.zeros(200, dtype=torch.long)),
        torch.optim.SGD(net.parameters(), lr=0.1),
    )
    folder = TrainingRun(Run(tmp_path / "run"), recipe.with_noise(4.0, delta=1e-3))
    with pytest.raises(InvalidInput, match="plan: got"):
        train(net, data, recipe.with_noise(0.1, delta=1e-3), optimizer, folder)
    folder.close()
