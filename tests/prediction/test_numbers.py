"""Private numbers: one voter moves the sum by at most the public range, the noise is what is
charged, and a student learns from released answers and public inputs alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy import accounting
from dpfy.cli.app import main
from dpfy.core import events as ev
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Unit
from dpfy.core.values import Bound, Bounded
from dpfy.mechanisms.exact import Bits
from dpfy.prediction import (
    AnswersClaim,
    PrivatePredictor,
    load,
    number_claim,
    plan,
    teach_numbers,
    train_number_student,
)
from dpfy.prediction.regression import NumberVoters, Waves, number_student
from dpfy.prediction.rules import NoisyMean
from dpfy.prediction.voters import shards
from dpfy.runs.run import Run

SECRET = Randomness.for_tests(5)
ROW = {"data": "made-up", "used_for": "a student", "provenance": "drawn here"}
WAVES = Waves(count=8)


def cli(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
    return x, 10 + 6 * x[:, 0] - 3 * x[:, 1] + rng.normal(0, 0.3, count)


def taught(x: np.ndarray, y: np.ndarray, **more) -> NumberVoters:
    shape = {"voters": 40, "low": 0, "high": 20, "waves": WAVES, "randomness": SECRET}
    return teach_numbers(x, y, **shape, **more)


class Purse:
    """Bits of one release after another, for nothing."""

    def __init__(self) -> None:
        self.step = 0

    def need(self, *kinds: str) -> None: ...

    def spend(self, kind: str) -> Bits:
        self.step += 1
        return Bits(SECRET, "numbers", self.step)


@pytest.mark.parametrize("seed", range(3))
def test_one_owner_moves_the_sum_by_at_most_the_range_whatever_they_have(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rows(200, seed)
    owners = np.arange(200) // 3
    y[owners == 7] = rng.choice([1e30, -1e30, np.nan, np.inf])
    x[owners == 7] *= 1e15
    kept = owners != 7
    questions = rows(50, 9)[0]
    whole = taught(x, y, owners=owners).places(questions)
    without = taught(x[kept], y[kept], owners=owners[kept]).places(questions)
    assert np.count_nonzero((whole != without).any(axis=0)) <= 1
    assert np.abs(whole.sum(1) - without.sum(1)).max() <= NumberVoters.classes - 1
    assert whole.min() >= 0
    assert whole.max() <= NumberVoters.classes - 1


def test_each_voter_is_what_its_own_records_make() -> None:
    x, y = rows(200, 1)
    places = shards(200, 40, SECRET)
    whole = taught(x, y)
    own = np.flatnonzero(places == 3)
    wide = np.hstack([WAVES.of(x[own]), np.ones((len(own), 1))]).astype(np.float64)
    goal = np.clip(y[own], 0, 20) / 10 - 1
    due = np.linalg.solve(wide.T @ wide + 0.1 * np.eye(wide.shape[1]), wide.T @ goal)
    np.testing.assert_allclose(whole.weights[:, 3], due, rtol=1e-3, atol=1e-4)


def test_the_noise_of_an_answer_is_what_is_charged() -> None:
    rule = NoisyMean(4097, voters=1000, sigma=5.0, low=0.0, high=1.0)
    assert rule.kinds == {"answer": ev.Gaussian(5.0)}
    total = Bounded(2048 * 1000, rule.moved)
    purse = Purse()
    drawn = np.array([rule.says(rule.answer(lambda bits: total, purse)) for _ in range(2000)])
    due = 5.0 / 1000  # of the range
    assert abs(drawn.std() / due - 1) < 5 / np.sqrt(2 * len(drawn)) + 0.01
    assert abs(drawn.mean() - 0.5) < 5 * due / np.sqrt(len(drawn))


def test_a_sum_that_one_voter_moves_further_is_refused_before_it_is_paid_for() -> None:
    rule, purse = NoisyMean(11, voters=5, sigma=1.0, low=0.0, high=1.0), Purse()
    with pytest.raises(InvalidInput, match="one voter"):
        rule.answer(lambda bits: Bounded(3, Bound.scalar(11.0)), purse)
    assert purse.step == 0


def test_answers_stay_in_the_range_and_the_claim_says_it(tmp_path: Path) -> None:
    claim = plan.numbers(4.0, 1e-5, voters=40, low=0, high=20, answers=30)
    again = AnswersClaim.from_json(json.loads(json.dumps(claim.to_json())))
    assert again == claim
    assert 3.9 < accounting.epsilon(claim.event, 1e-5) <= 4.0
    x, y = rows(2000, 1)
    asked = rows(30, 2)[0]
    with PrivatePredictor(Run(tmp_path / "run"), claim, taught(x, y)) as predictor:
        said = np.array([answer.label for answer in predictor.answer_all(asked)])
        assert [a.label for a in predictor.answer_all(asked)] == said.tolist()
        assert predictor.left() == {"answer": 0}
        folder = predictor.finish()
    assert said.min() >= 0
    assert said.max() <= 20
    section = json.loads((folder / "privacy.json").read_text())["sections"][0]
    assert (section["low"], section["high"], section["points"]) == (0.0, 20.0, 4097)
    assert all(finding.holds for finding in dpfy.verify(folder))


def test_claims_of_classes_are_written_as_before() -> None:
    claim = AnswersClaim("gaussian", 3, 40, 10, 10, sigma=5.0)
    assert not {"low", "high"} & set(claim.to_json())
    with pytest.raises(InvalidInput, match="low"):
        AnswersClaim("gaussian", 3, 40, 10, 10, sigma=5.0, low=-1.0)


def test_a_student_of_numbers_is_verified_and_depends_on_its_answers_alone(tmp_path: Path) -> None:
    x, y = rows(4000, 1)
    public, truth = rows(200, 2)
    claim = number_claim(8.0, 1e-5, teachers=200, low=0, high=20, answers=100, unit=Unit("user"))
    place = Run(tmp_path / "run", seed=1, public_data=(ROW,))
    owners = np.arange(4000)
    found = train_number_student(place, claim, lambda: (x, y, owners), public, waves=WAVES)
    said = found.model(torch.from_numpy(public)).numpy()
    assert float(np.sqrt(np.mean((said - truth) ** 2))) < 0.5 * truth.std()
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    again = number_student(public[found.rows], found.answers, 0.0, 20.0, WAVES)
    assert again.to_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert torch.equal(
        load(tmp_path / "run").model(torch.from_numpy(public)), torch.from_numpy(said)
    )
    (tmp_path / "run" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(Corrupt, match="hash"):
        load(tmp_path / "run")


def written(folder: Path) -> tuple[Path, Path, Path]:
    rng = np.random.default_rng(0)
    schema = '[columns.age]\nkind = "number"\nrange = [18, 90]\n'
    schema += '[columns.charge]\nkind = "number"\nrange = [0, 1500]\n'
    lines = [f"{a},{10 * a}" for a in rng.integers(18, 90, 2000)]
    people, rows_of, toml = folder / "people.csv", folder / "public.csv", folder / "s.toml"
    people.write_text("\n".join(["age,charge", *lines, "?,?"]))
    rows_of.write_text("\n".join(["age", *map(str, rng.integers(18, 90, 60))]))
    toml.write_text(schema)
    return people, rows_of, toml


def test_the_command_line_teaches_serves_and_predicts(tmp_path: Path, capsys) -> None:
    people, public, schema = written(tmp_path)
    table = [str(people), "--schema", str(schema), "--target", "charge"]
    voters, service, student = (str(tmp_path / name) for name in ("voters", "runs", "student"))
    assert cli(["serve", "teach", *table, "--voters", "50", "--out", voters]) == 0
    paid = ["--answers", "5", "--epsilon", "4"]
    assert cli(["serve", "start", voters, *paid, "--out", service, "--finish"]) == 0
    given = ["--public", str(public), "--provenance", "drawn here", "--teachers", "50"]
    made = [*table, *given, "--answers", "50", "--epsilon", "8", "--out", student]
    assert cli(["serve", "student", *made, "--insecure-seed", "1"]) == 0
    assert cli(["verify", service, student]) == 0
    capsys.readouterr()
    assert cli(["predict", student, str(public), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["predictions"]
    ages = np.array([float(a) for a in public.read_text().splitlines()[1:]])
    assert np.corrcoef(said, ages)[0, 1] > 0.9


def test_a_service_of_a_data_set_says_numbers(tmp_path: Path) -> None:
    people, _, schema = written(tmp_path)
    data = dpfy.Dataset(people, schema=schema)
    run = Run(tmp_path / "run", seed=3)
    with dpfy.serve(data, epsilon=20.0, delta=1e-5, answers=2, target="charge", run=run) as service:
        old, young = (service.answer({"age": age}).label for age in (80, 30))
    assert 0 <= young < old <= 1500
    assert service.released.epsilon <= 20


BAD = {
    "--target": ["--target", "nothing"],
    "--schema": ["--target", "charge"],
    "range": ["--target", "age", "--at-most", "3"],
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_taught_is_one_line(case: str, tmp_path: Path, capsys) -> None:
    people, _, schema = written(tmp_path)
    more = [] if case == "--schema" else ["--schema", str(schema)]
    out = ["--out", str(tmp_path / "v")]
    assert cli(["serve", "teach", str(people), *more, *BAD[case], *out]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "v").exists()


def test_what_python_refuses() -> None:
    x, y = rows(20, 1)
    for change, field in (
        ({"low": 2, "high": 1}, "low, high"),
        ({"voters": 1}, "voters"),
        ({"strength": 0}, "strength"),
    ):
        with pytest.raises(InvalidInput, match=field):
            teach_numbers(x, y, **{"voters": 4, "low": 0, "high": 1} | change)
    hostile, plain = x.copy(), x.copy()
    hostile[0], plain[0] = np.nan, 0.0
    made = [
        teach_numbers(rows, y, voters=4, low=0, high=1, randomness=Randomness.for_tests(1))
        for rows in (hostile, plain)
    ]
    assert np.array_equal(made[0].weights, made[1].weights)  # no cell raises an error
    data = dpfy.Dataset({"age": [1.0]}, schema=[dpfy.Number("age", 0, 2), dpfy.Text("note")])
    with pytest.raises(InvalidInput, match="kind number"):
        dpfy.serve(data, epsilon=1.0, delta=1e-5, answers=2, target="note")
    with pytest.raises(InvalidInput, match="queries"):
        dpfy.serve(data, epsilon=1.0, delta=1e-5, answers=2, target="age", queries=3)
