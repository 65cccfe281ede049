"""`dpfy train` and `dpfy verify` as a user meets them: exit status, one line, one JSON object,
nothing half-written.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from calls import call, refused

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


def test_what_auto_chose_and_what_is_left_of_the_budget_are_printed(capsys, tmp_path):
    given = [*FAST, "--epsilon", 2, "--mechanism", "auto", "--out", tmp_path / "run"]
    given += ["--ledger", tmp_path / "people.jsonl", "--budget-epsilon", 8]
    status, out, _ = call(capsys, "train", *given)
    assert status == 0
    (line,) = (line for line in out.splitlines() if line.startswith("mechanism auto chose "))
    kind = json.loads((tmp_path / "run" / "plan.json").read_text())["recipe"]["strategy"]["kind"]
    assert {"identity": "dp-sgd", "banded": "band-mf"}.get(kind, kind) in line
    assert "; this run states 2.000, and the budget counts more, since " in out
    assert "mechanism auto" not in call(capsys, "train", *FAST, "--out", tmp_path / "other")[1]


def test_train_then_verify(capsys, tmp_path):
    status, out, _ = call(
        capsys, "train", *FAST, "--epsilon", 3, "--out", tmp_path / "run", "--json"
    )
    summary = json.loads(out)
    assert status == 0
    assert 2.9 < summary["epsilon"] <= 3
    assert {
        "run",
        "epsilon",
        "delta",
        "test_accuracy",
        "steps",
        "seconds",
        "unit",
        "adjacency",
        "accountant",
    } <= set(summary)
    status, out, _ = call(capsys, "verify", tmp_path / "run", "--json")
    assert status == 0
    assert json.loads(out)["verified"] is True
    model = tmp_path / "run" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    status, out, _ = call(capsys, "verify", tmp_path / "run")
    assert status == 1
    assert "FAILED" in out
    assert "model.safetensors" in out


def test_train_tells_a_person_what_it_did(capsys, tmp_path):
    status, out, _ = call(capsys, "train", *FAST, "--epsilon", 2, "--out", tmp_path / "run")
    assert status == 0
    for part in (
        "accuracy on held-out data",
        "-differential privacy for one example",
        "add-or-remove-one",
        "model.safetensors",
        "dpfy verify",
    ):
        assert part in out


def test_config_file_and_flags(capsys, tmp_path):
    config = tmp_path / "job.toml"
    config.write_text(
        '[data]\nkind = "digits"\n[model]\nname = "mlp"\nhidden = [8]\n[privacy]\nepsilon = '
        "1.0\ndelta = 1e-4\nrecords = 1438\n"
        "[training]\nbatch_size = 100\nepochs = 1\n"
    )
    status, out, _ = call(
        capsys,
        "train",
        config,
        "--steps",
        3,
        "--set",
        "privacy.noise_multiplier=4",
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert status == 0
    assert json.loads(out)["steps"] == 3
    assert json.loads(out)["noise_multiplier"] == 4


BAD = [
    (["--epsilon", 0], "privacy.epsilon: got 0.0; must be greater than 0"),
    (["--epsilon", -1], "privacy.epsilon"),
    (["--epsilon", "nan"], "privacy.epsilon"),
    (["--delta", 0], "privacy.delta"),
    (["--delta", 1], "privacy.delta"),
    (["--delta", "1e-3"], "below 1/records"),
    (["--records", "9" * 5000], "privacy.records: got '999"),
    (["--batch-size", 5000], "batch_size"),
    (["--steps", 0], "training.steps"),
    (["--clip-norm", 0], "training.clip_norm"),
    (["--clip-norm", "1e308"], "training.clip_norm"),
    (["--learning-rate", "1e308"], "training.learning_rate"),
    (["--learning-rate", "1e-320"], "training.learning_rate"),
    (["--batch-size", "1e-320"], "batch_size"),
    (["--set", "data.test=secret"], "data.test"),
    (["--set", "privacy.test_noise=3"], "goes with data.test"),
    (["--data", "digit"], "did you mean 'digits'"),
    (["--model", "resnet"], "model.name"),
    (["--set", "training.optimizer=sgdd"], "did you mean 'sgd'"),
    (["--set", "privacy.accountant=moments"], "privacy.accountant"),
    (["--set", "privacy.adjacency=bounded"], "privacy.adjacency"),
    (["--set", "runtime.engine=fast"], "runtime.engine"),
    (["--device", "quantum"], "runtime.device"),
    (["--budget", 3], "needs ledger.path"),
    (["--epsilon", "three"], "--epsilon"),
    (["--epsilom", 3], "--epsilom"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(map(str, a)) for a, _ in BAD])
def test_bad_flags(capsys, tmp_path, arguments, said):
    assert said in refused(capsys, "train", *FAST, "--out", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[privacy]\nepsilom = 1.0\n", "did you mean 'epsilon'"),
        ("[privcy]\nepsilon = 1.0\n", "did you mean 'privacy'"),
        ("epsilon = 1.0\n", "epsilon"),
        ("privacy = 3\n", "must be a section"),
        ("[privacy\n", "is not TOML"),
        ("[privacy]\nepsilon = 1\nnoise_multiplier = 2\n", "not both"),
        ("[training]\nepochs = 1\nsteps = 2\n", "not both"),
        ('[privacy]\nepsilon = "one"\n', "privacy.epsilon"),
        ("[runtime]\npad = 1\n", "runtime.pad"),
        ("[data]\nkind = []\n", "data.kind"),
        ('[data]\nkind = {a = 1}\nschema = ["s.toml"]\n', "data.kind"),
        ('[data]\nkind = "csv"\nschema = {}\n', "data.schema"),
        ("[model]\nname = [1]\n", "model.name"),
        ("[privacy]\nrecords = []\nepsilon = {}\n", "privacy.epsilon"),
    ],
)
def test_bad_config(capsys, tmp_path, text, said):
    (tmp_path / "job.toml").write_text(text)
    assert said in refused(capsys, "train", tmp_path / "job.toml", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_config(capsys, tmp_path):
    assert "none.toml'; does not exist" in refused(
        capsys, "train", tmp_path / "none.toml", "--out", tmp_path / "run"
    )


def idx(images: int, labels: int, size: int = 4) -> tuple[bytes, bytes]:
    body = bytes(range(size * size)) * images
    return struct.pack(">IIII", 2051, images, size, size) + body, struct.pack(
        ">II", 2049, labels
    ) + bytes(i % 3 for i in range(labels))


@pytest.mark.parametrize(
    "damage", ["missing", "truncated", "foreign", "labels", "mismatch", "torn gzip"]
)
def test_bad_data_files(capsys, tmp_path, damage):
    """Each is one line that names the file; nothing is left, not even a reservation."""
    images, labels = idx(30, 30)
    if damage == "truncated":
        images = images[:-5]
    elif damage == "foreign":
        images = b"PK\x03\x04" + images
    elif damage == "labels":
        labels = labels[:-1] + b"\x09"
    elif damage == "mismatch":
        labels = idx(30, 29)[1]
    elif damage == "torn gzip":
        images = gzip.compress(images)[:-9]
    if damage != "missing":
        (tmp_path / "images").write_bytes(images)
    (tmp_path / "labels").write_bytes(labels)
    (tmp_path / "job.toml").write_text(
        f'[data]\nkind = "idx"\npath = "{tmp_path}/images"\nlabels_path = '
        f'"{tmp_path}/labels"\nclasses = 3\ntest_fraction = 0.2\n'
        "[privacy]\nrecords = 24\ndelta = 1e-3\nepsilon = 3\n[model]\nname = "
        '"linear"\n[training]\nsteps = 2\n'
    )
    line = refused(capsys, "train", tmp_path / "job.toml", "--out", tmp_path / "run")
    assert "images" in line or "labels" in line
    assert not (tmp_path / "run").exists()


def test_own_data_needs_its_public_size(capsys, tmp_path):
    (tmp_path / "job.toml").write_text('[data]\nkind = "npz"\npath = "x.npz"\nclasses = 2\n')
    assert "privacy.records" in refused(
        capsys, "train", tmp_path / "job.toml", "--out", tmp_path / "run"
    )


def test_a_folder_with_another_plan(capsys, tmp_path):
    from dpfy.training import config, job
    from dpfy.training.run import TrainingRun

    flags = {
        "data.kind": "digits",
        "privacy.records": 1438,
        "privacy.delta": 1e-4,
        "training.steps": 5,
        "model.name": "linear",
    }
    settings = config.make({}, flags)
    plan = job.plan_of(settings)
    TrainingRun(job.run_of(settings, plan, tmp_path / "run", False, None), plan).close()
    line = refused(capsys, "train", *FAST, "--out", tmp_path / "run", "--resume", "--epsilon", 1)
    assert "different plan" in line
    assert "resume it" in refused(
        capsys,
        "train",
        "--data",
        "digits",
        "--records",
        1438,
        "--model",
        "linear",
        "--delta",
        1e-4,
        "--steps",
        5,
        "--out",
        tmp_path / "run",
    )


def test_resume_needs_no_arguments_but_the_folder(capsys, tmp_path):
    """The configuration is kept with the secrets of an unfinished run."""
    from dpfy.training import config, job
    from dpfy.training.run import TrainingRun

    flags = {
        "data.kind": "digits",
        "privacy.records": 1438,
        "privacy.delta": 1e-4,
        "training.steps": 5,
        "model.name": "linear",
    }
    settings = config.make({}, flags)
    plan = job.plan_of(settings)
    TrainingRun(job.run_of(settings, plan, tmp_path / "run", False, None), plan).close()
    status, out, _ = call(capsys, "train", "--resume", "--out", tmp_path / "run", "--json")
    assert status == 0
    assert json.loads(out)["steps"] == 5
    assert "--out" in refused(capsys, "train", "--resume")


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "dpfy", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_two_processes_cannot_spend_the_same_budget(tmp_path):
    """Both ask for 2 out of 3 at the same time: one gets it, the other exit status 2 and a
    sentence. (20 times in the slow test.)
    """
    race(tmp_path, 3)


@pytest.mark.slow
def test_two_processes_cannot_spend_the_same_budget_20_times(tmp_path):
    race(tmp_path, 20)


def race(folder: Path, times: int) -> None:
    for number in range(times):
        ledger = str(folder / f"{number}.jsonl")

        def ask(
            name: str, ledger: str = ledger, number: int = number
        ) -> subprocess.CompletedProcess[str]:
            out = str(folder / f"{number}-{name}")
            return shell(
                "train",
                *FAST,
                "--epsilon",
                "2",
                "--ledger",
                ledger,
                "--budget",
                "3",
                "--out",
                out,
                "--json",
            )

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(ask, ["a", "b"]))
        assert sorted(r.returncode for r in results) == [0, 2], [r.stderr for r in results]
        loser = next(r for r in results if r.returncode == 2)
        assert "the budget is epsilon 3" in loser.stderr
        assert set(json.loads(loser.stdout)) == {"error"}
        assert (
            len([p for p in folder.iterdir() if p.is_dir() and p.name.startswith(f"{number}-")])
            == 1
        )


def test_help_teaches(capsys):
    for verb in ("train", "verify", "account", "calibrate"):
        status, out, _ = call(capsys, verb, "--help")
        assert status == 0
        assert len(out) > 400
