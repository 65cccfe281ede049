"""Stopping and resuming from the command line: what was stopped goes on, what is not there is
refused, nothing falls back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from calls import call, refused

from dpfy.audit import job as audit_job
from dpfy.cli import interrupt
from dpfy.core.ledger import Ledger
from dpfy.runs import folder
from dpfy.runs.mark import Mark
from dpfy.training import config, job
from dpfy.training.loop import PrivateTraining
from dpfy.training.run import TrainingRun

FAST = [
    "--data",
    "digits",
    "--records",
    "1438",
    "--model",
    "linear",
    "--delta",
    "1e-4",
    "--batch-size",
    "200",
    "--steps",
    "5",
]


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("verb", [["train"], ["audit", "train"]])
def test_nothing_to_resume(capsys, tmp_path, verb):
    assert "holds no run to resume" in refused(
        capsys, *verb, "--resume", "--out", tmp_path / "nosuchrun"
    )
    assert names(tmp_path) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text('[data]\nkind = "digits"\n')
    assert "holds no run to resume" in refused(
        capsys, *verb, "--resume", "--out", tmp_path / "mine"
    )
    assert names(tmp_path) == ["mine", "mine/config.toml"]


def test_a_configuration_does_not_make_a_run_to_resume(capsys, tmp_path):
    (tmp_path / "job.toml").write_text('[data]\nkind = "digits"\n[model]\nname = "linear"\n')
    line = refused(
        capsys, "train", tmp_path / "job.toml", "--resume", "--out", tmp_path / "nosuchrun"
    )
    assert "holds no run to resume" in line
    assert names(tmp_path) == ["job.toml"]


@pytest.mark.parametrize("until", ["_take", "_write_down"])
def test_a_run_stopped_before_its_configuration_was_stored(capsys, tmp_path, monkeypatch, until):
    def killed(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, until, killed)
        settings = config.make(
            {}, {"data.kind": "digits", "privacy.delta": 1e-4, "model.name": "linear"}
        )
        with pytest.raises(Killed):
            job.run(settings, tmp_path / "run")
    assert Mark.find(tmp_path / "run") is not None
    assert "start it again without --resume" in refused(
        capsys, "train", "--resume", "--out", tmp_path / "run"
    )
    status, out, _ = call(capsys, "train", *FAST, "--out", tmp_path / "run", "--json")
    assert (status, json.loads(out)["steps"]) == (0, 5)
    assert not [name for name in names(tmp_path / "run") if name.startswith((".", "checkpoint"))]


def test_killed_while_erasing(capsys, tmp_path, monkeypatch):
    """The stored configuration is overwritten with zeros already: the run is finished all the
    same.
    """

    def half(folder):
        (folder / "checkpoint" / "config.toml").write_bytes(bytes(100))
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folder, "erase_secrets", half)
        with pytest.raises(Killed):
            job.run(
                config.make(
                    {}, {"data.kind": "digits", "model.name": "linear", "training.steps": 2}
                ),
                tmp_path / "run",
            )
    status, out, _ = call(capsys, "train", "--resume", "--out", tmp_path / "run", "--json")
    assert (status, json.loads(out)["steps"]) == (0, 2)
    assert not [name for name in names(tmp_path / "run") if name.startswith((".", "checkpoint"))]


def stop_at(monkeypatch, step: int, problem: BaseException) -> None:
    """Training is stopped by `problem` when it has made so many steps."""
    real = PrivateTraining._update

    def update(self, total):
        if self.steps_done == step:
            raise problem
        real(self, total)

    monkeypatch.setattr(PrivateTraining, "_update", update)


@pytest.mark.parametrize(("problem", "status"), [(KeyboardInterrupt(), 130)])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_run_says_how_it_goes_on(
    capsys, tmp_path, monkeypatch, problem, status, as_json
):
    folder = tmp_path / "my run"
    with monkeypatch.context() as patch:
        stop_at(patch, 3, problem)
        code, out, err = call(
            capsys, "train", *FAST, "--out", folder, *(["--json"] if as_json else [])
        )
    assert code == status
    assert f"dpfy train --resume --out '{folder}'" in err.splitlines()[-1]
    assert ("error" in json.loads(out)) if as_json else out == ""
    code, out, _ = call(capsys, "train", "--resume", "--out", folder, "--json")
    assert (code, json.loads(out)["steps"]) == (0, 5)


def test_an_interruption_before_the_run_began_says_so(capsys, tmp_path, monkeypatch):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "plan_of", interrupted)
    code, _, err = call(capsys, "train", *FAST, "--out", tmp_path / "run")
    assert code == 130
    assert "before the run began" in err
    assert names(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_with_one_line_and_the_status_of_the_shell(tmp_path, number, status):
    command = [
        sys.executable,
        "-P",
        "-m",
        "dpfy",
        "train",
        *FAST[:-1],
        "100000",
        "--out",
        str(tmp_path / "run"),
        "--set",
        "runtime.checkpoint_every=0",
    ]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    hung = time.monotonic() + 1800
    while not (tmp_path / "run" / "checkpoint" / "state.safetensors").exists():
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < hung, "the child hung: no checkpoint in half an hour"
        time.sleep(0.1)
    child.send_signal(number)
    _, err = child.communicate(timeout=1800)
    assert child.returncode == status
    assert err.splitlines()[-1] == (
        "dpfy: interrupted; the run goes on, to the same bits and at no more cost, with: "
        f"dpfy train --resume --out {tmp_path / 'run'}"
    )


def test_an_interruption_that_python_dropped_is_raised_again(tmp_path, monkeypatch):
    """What is raised inside a destructor is printed and forgotten; the run must end all the
    same.
    """

    class Careless:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    def dropped() -> None:
        with interrupt.resumable(tmp_path / "run", "dpfy train"):
            thing = Careless()
            del thing
            for _ in range(100_000):  # until it is raised again; the end is for when it never is
                time.sleep(0.01)

    monkeypatch.setattr(interrupt, "AGAIN", 0.2)
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: None)
    with pytest.raises(interrupt.Interrupted, match="start it again") as stopped:
        dropped()
    assert stopped.value.code == 143


@pytest.mark.parametrize("attack", ["white-box", "final-model"])
def test_an_audited_training_is_resumed_to_the_same_bits(capsys, tmp_path, monkeypatch, attack):
    flags = {
        "data.kind": "digits",
        "model.name": "linear",
        "training.steps": 6,
        "training.batch_size": 300.0,
    }
    flags |= {"audit.canaries": 50, "audit.attack": attack}
    audit_job.train(audit_job.read(None, flags), tmp_path / "whole", seed=3)
    settings = [
        "audit",
        "train",
        "--data",
        "digits",
        "--model",
        "linear",
        "--canaries",
        50,
        "--steps",
        6,
        "--batch-size",
        300,
    ]
    with monkeypatch.context() as patch:
        stop_at(patch, 4, KeyboardInterrupt())
        code, _, err = call(
            capsys,
            *settings,
            "--attack",
            attack,
            "--insecure-seed",
            3,
            "--out",
            tmp_path / "cut",
            "--json",
        )
    assert code == 130
    assert f"dpfy audit train --resume --out {tmp_path / 'cut'}" in err
    assert "dpfy audit train --resume" in refused(
        capsys, "train", "--resume", "--out", tmp_path / "cut"
    )
    assert "unfinished" in refused(capsys, "audit", "run", tmp_path / "cut")
    assert "give --out alone" in refused(
        capsys, "audit", "train", "--resume", "--out", tmp_path / "cut", "--epsilon", 1
    )
    for _ in range(2):  # the second time it is finished
        audit_job.resume(tmp_path / "cut")
        whole, cut = (audit_job.evidence(tmp_path / name) for name in ("whole", "cut"))
        for name in ("included", "projections", "margins"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(cut, name))
        assert names(tmp_path / "cut") == names(tmp_path / "whole")
        same = "model.safetensors"
        assert (tmp_path / "cut" / same).read_bytes() == (tmp_path / "whole" / same).read_bytes()


def test_a_refused_audited_training_leaves_nothing(capsys, tmp_path):
    ledger = tmp_path / "people.jsonl"
    (tmp_path / "job.toml").write_text(
        f'[data]\nkind = "npz"\npath = "{tmp_path}/none.npz"\nclasses = 2\n[privacy]\nrecords = '
        f"100\ndelta = 1e-4\n"
        f'[ledger]\npath = "{ledger}"\n'
    )
    assert "data file" in refused(
        capsys, "audit", "train", tmp_path / "job.toml", "--out", tmp_path / "run"
    )
    assert (
        {"job.toml", "people.jsonl"}
        <= set(names(tmp_path))
        <= {"job.toml", "people.jsonl", "people.jsonl.head"}
    )
    assert Ledger.read(ledger).permits() == []


def test_updates_that_are_missing_are_found(capsys, tmp_path, monkeypatch):
    settings = [
        "audit",
        "train",
        "--data",
        "digits",
        "--model",
        "linear",
        "--canaries",
        50,
        "--steps",
        4,
        "--batch-size",
        300,
    ]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, KeyboardInterrupt())
        (tmp_path / "job.toml").write_text("[runtime]\ncheckpoint_every = 0.0\n")
        call(
            capsys,
            "audit",
            "train",
            tmp_path / "job.toml",
            *settings[2:],
            "--out",
            tmp_path / "run",
        )
    (tmp_path / "run" / "checkpoint" / "updates.f64").write_bytes(b"")
    assert "fewer updates" in refused(
        capsys, "audit", "train", "--resume", "--out", tmp_path / "run"
    )
