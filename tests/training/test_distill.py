"""Smaller models: pruned, quantised and distilled files verify, and a student's report says whose
data its epsilon covers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import dpfy
from dpfy.cli.app import main
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.training.distill import Teacher, derived, distil, distil_privately, prune, quantise

torch.manual_seed(0)
X = torch.randn(300, 6)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
PUBLIC = torch.randn(200, 6)
PLAN = dpfy.dpsgd(records=300, batch_size=60, steps=12, clip_norm=1.0).with_noise(1.0, delta=1e-3)


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model, path = net(16), tmp_path_factory.mktemp("runs") / "teacher"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    dpfy.fit(model, (X, Y), plan=PLAN, optimizer=optimizer, run=dpfy.Run(path, seed=1))
    return path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def fine(run: Path) -> bool:
    return all(finding.holds for finding in dpfy.verify(run))


@torch.no_grad()
def agree(one: nn.Module, other: nn.Module) -> float:
    return float((one(PUBLIC).argmax(1) == other(PUBLIC).argmax(1)).double().mean())


def test_pruned_and_quantised_files_verify_and_say_what_they_should(run: Path) -> None:
    released = dpfy.load(run, net(16)).requires_grad_(False)
    assert prune(run, 0.25).name == "pruned.safetensors"
    small = quantise(run)
    assert small.stat().st_size < (run / "model.safetensors").stat().st_size
    assert fine(run)
    pruned = derived(run, "pruned.safetensors", net(16))
    assert int((pruned[0].weight == 0).sum()) == 24
    largest = released[0].weight.abs() > released[0].weight.abs().median()
    assert torch.equal(pruned[0].weight[largest], released[0].weight[largest])
    rounded = derived(run, "quantised.safetensors", net(16).requires_grad_(False))
    error = (rounded[0].weight - released[0].weight).abs().max()
    assert float(error) <= float(released[0].weight.abs().max()) / 254 * 1.001
    assert agree(released, rounded) > 0.95


def test_a_student_of_public_data_is_a_derived_file(run: Path) -> None:
    teacher, student = Teacher.of(run, net(16)), net(4)
    with torch.no_grad():  # it teaches as it was released, whatever became of it
        teacher.model[0].weight.fill_(7.0)
    file = distil(teacher, student, PUBLIC, public="drawn here", steps=300, learning_rate=0.02)
    assert fine(run)
    again = derived(run, file.name, net(4))
    assert agree(again, student) == 1.0
    assert agree(again, Teacher.of(run, net(16)).model) > 0.8
    assert Ledger.read(run / "ledger.jsonl").book.derived[file.name]["public"] == "drawn here"
    file.write_bytes(file.read_bytes()[:-4] + b"0000")
    assert not fine(run)
    with pytest.raises(Corrupt, match="hash"):
        derived(run, file.name, net(4))


def taught(teacher: Teacher, path: Path, resume: bool = False) -> dpfy.Released:
    torch.manual_seed(2)
    student = net(4)
    return distil_privately(
        teacher,
        student,
        X,
        plan=PLAN,
        optimizer=torch.optim.SGD(student.parameters(), lr=0.1),
        run=dpfy.Run(path, seed=2, resume=resume),
    )


def test_the_report_of_a_private_student_says_whose_data_each_epsilon_covers(
    run: Path, tmp_path: Path
) -> None:
    own = taught(Teacher.of(run, net(16)), tmp_path / "student")
    said = " ".join(own.report["warnings"])
    assert "the records that the student was trained on, and no others" in said
    digest = json.loads((run / "privacy.json").read_text())["digest"]
    assert f"teacher's own report (digest {digest[:16]})" in said
    assert own.epsilon <= PLAN.guarantee().epsilon(1e-3) + 1e-9
    assert fine(tmp_path / "student")
    again = taught(Teacher.of(run, net(16)), tmp_path / "student", resume=True)
    assert again.report["digest"] == own.report["digest"]
    none = taught(Teacher.without_report(net(8)), tmp_path / "other")
    assert "the teacher's data are not protected" in " ".join(none.report["warnings"])
    assert fine(tmp_path / "other")


def test_a_teacher_says_the_same_about_a_record_whoever_stands_beside_it() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).train()
    teacher = Teacher.without_report(model)
    assert torch.equal(teacher.says(X[:5], 2.0)[2], teacher.says(X[2:3], 2.0)[0])


def test_a_teacher_whose_run_was_changed_is_refused(run: Path) -> None:
    report = run / "report.md"
    report.write_text(report.read_text() + "x")
    with pytest.raises(InvalidInput, match="verify"):
        Teacher.of(run, net(16))


def test_bad_settings_are_one_line(run: Path) -> None:
    teacher = Teacher.of(run, net(16))
    for change, field in (
        ({"temperature": 0}, "temperature"),
        ({"steps": 0}, "steps"),
        ({"public": "two\nlines"}, "public"),
    ):
        with pytest.raises(InvalidInput, match=field) as found:
            distil(teacher, net(4), PUBLIC, **{"public": "here", "steps": 1} | change)
        assert "\n" not in str(found.value)
    with pytest.raises(InvalidInput, match="not protected"):
        distil(Teacher.without_report(net(4)), net(4), PUBLIC, public="here")
    with pytest.raises(InvalidInput, match="share"):
        prune(run, 1.5)
    with pytest.raises(InvalidInput, match="derived file"):
        derived(run, "model.safetensors", net(16))


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--prune", "0.5"], 0),
        (["--quantise"], 0),
        (["--quantise", "--prune", "0.5"], 2),
        (["--quantise", "--how", "so"], 2),
        ([], 2),
    ],
)
def test_the_command_line(run: Path, words: list[str], status: int, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "derive", str(run), *words])
    assert int(ended.value.code or 0) == status
    assert status == 0 or capsys.readouterr().err.count("\n") == 1
    assert fine(run)
