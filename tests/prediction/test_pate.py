"""PATE to a released student: disjoint parts, votes that are paid for, a student of public inputs
and answers alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Unit
from dpfy.models.config import ModelConfig
from dpfy.prediction import pate, student
from dpfy.prediction.diffusion import DiffusionMap, DiffusionSettings
from dpfy.prediction.networks import NetworkTraining
from dpfy.prediction.pate import GraphTeachers, coordinates, student_claim, train_student
from dpfy.prediction.student import Lesson, SemiSupervised
from dpfy.prediction.voters import shards
from dpfy.runs.run import Run

ROW = {"data": "made-up", "used_for": "a student", "provenance": "drawn here"}
SECRET = Randomness.for_tests(3)
LEARNER = SemiSupervised(epochs=6, joining=3, batch_size=16)
QUICK = {"learner": LEARNER, "teachers": GraphTeachers(directions=8)}


def rows(
    count: int, seed: int, classes: int = 3, features: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, count)
    x = rng.normal(size=(count, features)).astype(np.float32)
    x[np.arange(count), y] += 5
    return x, y


X, Y = rows(400, 1)
PUBLIC, TRUTH = rows(120, 2)
ASKED = torch.from_numpy(PUBLIC)


def claim(answers: int = 40, **more) -> pate.StudentAnswersClaim:
    return student_claim(2.0, 1e-6, teachers=40, classes=3, answers=answers, **more)


def place(path: Path, **more) -> Run:
    return Run(path, public_data=(ROW,), **more)


def test_from_private_records_to_a_student_that_is_verified(tmp_path):
    found = train_student(place(tmp_path / "run", seed=1), claim(), (X, Y), ASKED, **QUICK)
    fresh, truth = rows(500, 3)
    assert (
        float(
            (
                student.chances(found.model, torch.from_numpy(fresh)).argmax(1).numpy() == truth
            ).mean()
        )
        > 0.9
    )
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    assert found.report["guarantee"]["epsilon"] <= 2.0
    assert found.report["public_data"] == [ROW]
    section = next(part for part in found.report["sections"] if part["name"] == "student")
    assert (section["answered"], section["public_inputs"], section["made"]) == (
        40,
        120,
        {"answer": 40},
    )
    assert {row["what"] for row in section["assumptions"]} >= {
        "voters",
        "features",
        "votes",
        "student",
    }
    assert len(set(found.rows.tolist())) == 40
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if not p.name.startswith("ledger")) == [
        "answers.json", "model.safetensors", "privacy.json", "report.html", "report.md",
    ]  # fmt: skip
    again = pate.load(tmp_path / "run")
    assert again.answers == found.answers
    (tmp_path / "run" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(Corrupt, match="hash"):
        pate.load(tmp_path / "run")


def test_confident_answers_of_networks_and_of_owners(tmp_path):
    training = NetworkTraining(
        ModelConfig("mlp", hidden=(8,)), steps=30, batch_size=8, learning_rate=0.5
    )
    stated = claim(answers=20, queries=60, threshold=0.7, unit=Unit("user"))
    found = train_student(
        place(tmp_path / "run", seed=1),
        stated,
        (X, Y),
        ASKED,
        teachers=training,
        learner=LEARNER,
        owners=np.arange(400) // 2,
    )
    said = [label for label in found.answers if label is not None]
    assert len(found.answers) == 60
    assert 0 < len(said) <= 20
    right = [
        label == TRUTH[row]
        for row, label in zip(found.rows, found.answers, strict=True)
        if label is not None
    ]
    assert np.mean(right) > 0.8
    assert "networks (mlp)" in json.dumps(found.report["sections"])
    assert "for one user" in found.statement


def test_nothing_is_read_before_it_is_paid_for_and_what_is_refused_leaves_nothing(tmp_path):
    book = tmp_path / "people.jsonl"
    seen: list[int] = []

    def private() -> tuple[np.ndarray, np.ndarray]:
        seen.append(len(Ledger.read(book).permits()))
        raise InvalidInput("file", "x", "is not there")

    with pytest.raises(InvalidInput, match="is not there"):
        train_student(place(tmp_path / "run", ledger=book), claim(), private, ASKED, **QUICK)
    assert seen == [1]
    assert not (tmp_path / "run").exists()
    for private_, public, message in (
        ((X, Y + 1), ASKED, "outside of the public"),
        ((X, Y), ASKED[:, :3], "as the records"),
        ((X, Y), ASKED[:30], "number of public inputs"),
        ((X, Y), ASKED * torch.nan, "finite"),
    ):
        with pytest.raises(InvalidInput, match=message):
            train_student(place(tmp_path / "run"), claim(), private_, public, **QUICK)
        assert not (tmp_path / "run").exists()
    with pytest.raises(InvalidInput, match="must declare the public inputs"):
        train_student(Run(tmp_path / "run"), claim(), (X, Y), ASKED, **QUICK)
    with pytest.raises(InvalidInput, match="whose each record is"):
        train_student(place(tmp_path / "run"), claim(unit=Unit("user")), (X, Y), ASKED, **QUICK)
    with pytest.raises(InvalidInput, match="rule"):
        pate.StudentAnswersClaim("stable", 3, 40, 10, 10, epsilon=1.0, delta_used=1e-7, unstable=2)


def test_no_teacher_follows_the_records_of_another_to_the_last_bit():
    known = DiffusionMap(ASKED, DiffusionSettings(directions=8))
    places = shards(len(X), 10, SECRET)
    whole = coordinates(known, X, places)
    for unit in (0, 57, 399):
        left = np.arange(len(X)) != unit
        others = places != places[unit]
        assert (
            coordinates(known, X[left], places[left])[others[left]] == whole[left][others[left]]
        ).all()
    assert whole == pytest.approx(known.of(torch.from_numpy(X)), abs=1e-4)


@pytest.mark.parametrize("kind", ["graph", "networks"])
def test_records_of_an_owner_go_to_one_teacher(kind):
    """All records of one class have one owner: so one teacher has seen it, and the others hardly
    ever say it.
    """
    owners = np.where(Y == 2, "one", np.arange(400).astype(str))
    training = NetworkTraining(ModelConfig("linear"), steps=30, batch_size=8, learning_rate=0.5)
    means = training if kind == "networks" else GraphTeachers(8)

    class Folder:
        randomness = SECRET

    said = []
    for given in (owners, None):
        school = pate._School(claim(), (X, Y), ASKED, means, given)
        said.append(school.taught(Folder()).made.votes(school.questions)[:, 2])  # type: ignore[arg-type]
    assert said[1].max() > 20
    assert said[0].sum() < said[1].sum() / 3
    if kind == "graph":
        assert said[0].max() <= 1


def test_coordinates_follow_the_shape_of_the_data():
    """Two moons of public points: three labels tell them apart, and a point off the data takes its
    neighbours' side.
    """
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, 200)
    moons = np.concatenate(
        [
            np.stack([np.cos(angle), np.sin(angle)], 1),
            np.stack([1 - np.cos(angle), 0.4 - np.sin(angle)], 1),
        ]
    )
    points = torch.from_numpy(moons + rng.normal(scale=0.04, size=moons.shape)).float()
    # Lengths are divided out, so give each point a constant to be told apart by.
    points = torch.cat([points, torch.ones(400, 1)], 1)
    known = DiffusionMap(points, DiffusionSettings(whitening=0.0, neighbours=8, directions=12))
    truth = np.repeat([0, 1], 200)
    lesson = Lesson(points, known.own, np.array([0, 60, 210, 333]), np.array([0, 0, 1, 1]), 2)
    assert float((lesson.completed().argmax(1).numpy() == truth).mean()) > 0.75
    assert known.of(points) == pytest.approx(known.own, abs=0.5)
    assert known.own.shape == (400, 12)


def test_the_student_is_a_function_of_its_lesson_alone():
    known = DiffusionMap(ASKED, DiffusionSettings(directions=8))
    lesson = Lesson(ASKED, known.own, np.arange(30), TRUTH[:30], 3)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, other = (student.to_bytes(LEARNER.learn(lesson), (5,), 3) for _ in range(2))
    assert one == other
    assert torch.equal(torch.random.get_rng_state(), before)
    assert student.of_bytes(one, "model")[1:] == ((5,), 3)
    with pytest.raises(Corrupt, match="student"):
        student.of_bytes(one[:40], "model")
    with pytest.raises(InvalidInput, match="must be a network of"):
        student.to_bytes(torch.nn.Linear(5, 3), (5,), 3)


def test_doubtful_inputs_join_with_the_class_the_network_gives_them(monkeypatch):
    """Half of the inputs are left out at first; at the end most take part, and no answer was
    changed.
    """
    seen: list[int] = []
    real = student.functional.cross_entropy

    def counted(found, goals, **more):
        seen.append(len(goals))
        return real(found, goals, **more)

    monkeypatch.setattr(student.functional, "cross_entropy", counted)
    known = DiffusionMap(ASKED, DiffusionSettings(directions=8))
    lesson = Lesson(ASKED, known.own, np.arange(60), TRUTH[:60], 3)
    SemiSupervised(epochs=10, joining=8, batch_size=120, doubtful=0.5, confident=0.6).learn(lesson)
    assert seen[:8] == [60] * 8
    assert seen[-1] > 80


def test_images_are_moved_by_a_little_and_each_by_itself():
    torch.manual_seed(0)
    dot = torch.zeros(200, 1, 28, 28)
    dot[:, :, 12:16, 12:16] = 1.0
    found = student.moved(dot)
    grid = torch.arange(28.0)
    middle = (found.sum((1, 2)) * grid).sum(1) / found.sum((1, 2, 3))
    assert float((middle - 13.5).abs().max()) < 5
    assert 0.5 < float(middle.std()) < 3
    assert len({round(float(m), 4) for m in middle}) > 190


KILLED = """
import sys, os, signal
sys.path[:0] = [{tests!r}]
import test_pate as t
real = t.SemiSupervised.learn
def learn(self, lesson):
    os.kill(os.getpid(), signal.SIGKILL)
t.SemiSupervised.learn = learn
t.train_student(t.place(t.Path({run!r}), seed=1), t.claim(), (t.X, t.Y), t.ASKED, **t.QUICK)
"""


def test_a_killed_run_goes_on_and_pays_nothing_twice(tmp_path):
    run = tmp_path / "run"
    code = KILLED.format(tests=str(Path(__file__).parent), run=str(run))
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], env=os.environ, capture_output=True, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL
    assert not (run / "model.safetensors").exists()
    with pytest.raises(InvalidInput, match="other data"):
        train_student(place(run, resume=True, seed=1), claim(), (X[::-1].copy(), Y), ASKED, **QUICK)
    found = train_student(place(run, resume=True, seed=1), claim(), (X, Y), ASKED, **QUICK)
    whole = train_student(place(tmp_path / "whole", seed=1), claim(), (X, Y), ASKED, **QUICK)
    assert found.answers == whole.answers
    assert all(finding.holds for finding in dpfy.verify(run))
