"""Answers that are paid for: before they are computed, once, durably, and never more than were
reserved.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from electorate import records, voters

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core.errors import BudgetExceeded, Busy, Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.prediction import predictor as predictors
from dpfy.prediction.claim import AnswersClaim
from dpfy.prediction.predictor import PrivatePredictor, ReservedSteps
from dpfy.runs.mark import ANSWERED, SPENT
from dpfy.runs.run import Run

CLAIM = AnswersClaim("gaussian", 4, 30, 50, 50, sigma=6.0, delta=1e-6)
QUESTIONS = records(300, seed=3)[0]


def opened(
    path: Path, claim: AnswersClaim = CLAIM, *, resume: bool = False, block: int = 8, **more: object
) -> PrivatePredictor:
    return PrivatePredictor(Run(path, resume=resume, **more), claim, voters(), block=block)  # type: ignore[arg-type]


def spent(path: Path) -> int:
    return int(json.loads((path / "checkpoint" / SPENT).read_text())["answer"])


def test_answers_are_right_more_often_than_not_and_each_is_paid_for_once(tmp_path: Path) -> None:
    x, y = records(40, seed=5)
    with opened(tmp_path / "run") as predictor:
        found = predictor.answer_all(x)
        assert np.mean([a.label == b for a, b in zip(found, y, strict=True)]) > 0.8
        assert all(answer.paid for answer in found)
        assert predictor.left() == {"answer": 10}
        again = predictor.answer_all(x[::-1])
        assert [a.label for a in again[::-1]] == [a.label for a in found]
        assert not any(answer.paid for answer in again)
        assert predictor.left() == {"answer": 10}
        same = predictor.answer_all(np.repeat(QUESTIONS[:1], 5, axis=0))
        assert [a.paid for a in same] == [True] + [False] * 4
        assert predictor.answer(-QUESTIONS[0] * 0).label == predictor.answer(QUESTIONS[0] * 0).label
        assert predictor.left() == {"answer": 8}


def test_when_nothing_is_left_the_answer_is_a_refusal(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as predictor:
        found = predictor.answer_all(QUESTIONS)
        assert sum(a.paid for a in found) == 50
        refused = found[50:]
        assert all(a.label is None and not a.paid and "used" in a.why_not for a in refused)
        assert (
            predictor.answer(QUESTIONS[3]).label == found[3].label
        )  # what was answered is still known
        assert predictor.answer(QUESTIONS[299]).label is None
        assert spent(tmp_path / "run") == 50


def test_the_bill_is_durable_before_noise_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = predictors.source

    def watched(event, permit, randomness, step):
        seen.append(
            (
                step,
                spent(tmp_path / "run"),
                bool(Ledger.read(tmp_path / "run" / "ledger.jsonl").book.begun),
            )
        )
        return real(event, permit, randomness, step)

    monkeypatch.setattr(predictors, "source", watched)
    with opened(tmp_path / "run") as predictor:
        predictor.answer_all(QUESTIONS[:20])
    assert [step for step, _, _ in seen] == list(range(20))
    assert all(paid > step and begun for step, paid, begun in seen)


def test_a_write_that_fails_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "run") as predictor:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        drawn: list[int] = []
        real = predictors.source
        monkeypatch.setattr(
            predictors, "source", lambda *given: (drawn.append(given[-1]), real(*given))[1]
        )
        monkeypatch.setattr(predictors, "write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            predictor.answer(QUESTIONS[0])
        assert not drawn
        monkeypatch.undo()
        assert predictor.answer(QUESTIONS[0]).paid


def test_a_restarted_service_goes_on_after_what_may_have_been_used(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as predictor:
        before = predictor.answer_all(QUESTIONS[:11])
    assert spent(tmp_path / "run") == 16
    with opened(tmp_path / "run", resume=True) as predictor:
        assert predictor.left() == {"answer": 34}  # what was left of the block is lost
        assert [a.label for a in predictor.answer_all(QUESTIONS[:11])] == [a.label for a in before]
        assert predictor.left() == {"answer": 34}
        steps = predictor.purse.permit.__dict__.get("_spent", set())
        predictor.answer(QUESTIONS[20])
        assert predictor.purse.permit.__dict__["_spent"] - steps == {16}


def test_no_address_of_noise_is_used_twice_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    real = predictors.source
    monkeypatch.setattr(
        predictors, "source", lambda *given: (steps.append(given[-1]), real(*given))[1]
    )
    for k in range(5):
        with opened(tmp_path / "run", resume=bool(k), block=4) as predictor:
            predictor.answer_all(QUESTIONS[7 * k : 7 * k + 7])
    assert len(steps) == len(set(steps)) == 35
    assert max(steps) < 50


def dies_at(module: object, name: str, at: int, run: Path, rows: np.ndarray) -> int:
    """How many answers a process gives that is killed (SIGKILL) when it calls something for the
    so-manieth time.
    """
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        calls, real = 0, getattr(module, name)

        def dying(*given: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        setattr(module, name, dying)
        with opened(run, resume=True) as predictor:
            for row in rows:
                if predictor.answer(row).paid:
                    os.write(write, b"x")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        received = len(pipe.read())
    os.waitpid(child, 0)
    return received


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (predictors, "write_atomically"),
        (predictors, "source"),
        (predictors, "Prediction"),
        (predictors.AnswerCache, "put"),
        (os, "fsync"),
    ],
    ids=lambda v: str(v),
)
def test_killed_at_any_moment_no_more_is_answered_than_was_paid_for(
    tmp_path: Path, module: object, name: str
) -> None:
    """Before a block is written, before noise is drawn, before an answer is remembered or leaves,
    in the middle of a write.
    """
    received, run = 0, tmp_path / "run"
    with opened(run):
        pass
    for round_, at in enumerate((1, 2, 5, 9, 3, 7)):
        received += dies_at(module, name, at, run, QUESTIONS[30 * round_ :][:30])
        assert received <= (spent(run) if (run / "checkpoint" / SPENT).is_file() else 0) <= 50
    with opened(run, resume=True) as predictor:
        received += sum(a.paid for a in predictor.answer_all(QUESTIONS[200:]))
        assert received <= 50
        assert predictor.left() == {"answer": 0}
    assert received >= 3


def test_all_is_reserved_before_the_first_answer_in_every_ledger(tmp_path: Path) -> None:
    budget = RenyiFilter(8.0, 1e-5)
    with opened(tmp_path / "run", ledger=tmp_path / "people.jsonl", budget=budget) as predictor:
        shared = Ledger.read(tmp_path / "people.jsonl")
        assert [p.event for p in shared.permits()] == [CLAIM.event]
        assert shared.book.begun
        predictor.answer(QUESTIONS[0])
    with pytest.raises(BudgetExceeded, match="budget is epsilon 8"):
        opened(tmp_path / "second", ledger=tmp_path / "people.jsonl", budget=budget)
    assert not (tmp_path / "second").exists()


def test_the_finished_folder_verifies_and_holds_no_secret(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as predictor:
        predictor.answer_all(QUESTIONS[:20])
        assert sorted(os.listdir(tmp_path / "run" / "checkpoint")) == sorted(
            ["bound.json", "holder.json", "secret.json", ANSWERED, SPENT]
        )
        for name in (ANSWERED, SPENT):
            assert (tmp_path / "run" / "checkpoint" / name).stat().st_mode & 0o777 == 0o600
        folder = predictor.finish()
    assert all(finding.holds for finding in dpfy.verify(folder))
    assert not (folder / "checkpoint").exists()
    card = json.loads((folder / "privacy.json").read_text())
    section = card["sections"][0]
    assert section["made"] == {"answer": 20}
    assert "B6" in json.dumps(card["boundary"])
    assert section["accounting_of_votes"].startswith("independent of the data")
    with pytest.raises(InvalidInput, match="finished"):
        opened(tmp_path / "run", resume=True)


def test_other_voters_another_claim_and_a_second_process_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as predictor:
        predictor.answer(QUESTIONS[0])
        with pytest.raises(Busy):
            opened(tmp_path / "run", resume=True)
    other = type(voters(30))(voters(30).weights + 1, voters(30).biases)
    with pytest.raises(InvalidInput, match="other data"):
        PrivatePredictor(Run(tmp_path / "run", resume=True), CLAIM, other)
    with pytest.raises(InvalidInput, match=r"sigma|claim"):
        opened(
            tmp_path / "run",
            AnswersClaim("gaussian", 4, 30, 50, 50, sigma=7.0, delta=1e-6),
            resume=True,
        )
    with pytest.raises(InvalidInput, match="voters"):
        opened(tmp_path / "new", AnswersClaim("gaussian", 4, 31, 50, 50, sigma=6.0, delta=1e-6))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"answer": 51}',
        b'{"answer": -1}',
        b'{"answer": true}',
        b'{"answers": 3}',
        b"[3]",
    ],
)
def test_a_damaged_count_is_refused(tmp_path: Path, content: bytes) -> None:
    with opened(tmp_path / "run") as predictor:
        predictor.answer(QUESTIONS[0])
    (tmp_path / "run" / "checkpoint" / SPENT).write_bytes(content)
    with pytest.raises(Corrupt, match="spent"):
        opened(tmp_path / "run", resume=True)


def test_what_is_no_question_spends_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as predictor:
        for wrong in (
            [[1.0]],
            [["a"] * 6],
            [[float("nan")] * 6],
            [[1.0] * 5],
            3.0,
            [[[1.0] * 6]],
            [[1e300] * 6],
            [],
            None,
        ):
            with pytest.raises(InvalidInput, match="inputs"):
                predictor.answer_all(wrong)
        assert predictor.left() == {"answer": 50}


def test_a_line_that_a_crash_cut_short_is_dropped_and_paid_for_again(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as predictor:
        predictor.answer_all(QUESTIONS[:3])
    file = tmp_path / "run" / "checkpoint" / ANSWERED
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with opened(tmp_path / "run", resume=True) as predictor:
        assert [a.paid for a in predictor.answer_all(QUESTIONS[:3])] == [False, False, True]
    assert len(file.read_bytes().splitlines()) == 3


def test_a_purse_hands_out_every_step_of_its_claim_once(tmp_path: Path) -> None:
    claim = AnswersClaim(
        "confident", 4, 30, 20, 10, sigma=6.0, check_sigma=6.0, threshold=15.0, delta=1e-6
    )
    with PrivatePredictor(Run(tmp_path / "run"), claim, voters(), block=3) as predictor:
        purse: ReservedSteps = predictor.purse
        for kind, most in claim.most.items():
            for _ in range(most):
                purse.spend(kind)
            with pytest.raises(BudgetExceeded, match=kind):
                purse.spend(kind)
        assert purse.permit.__dict__["_spent"] == set(range(30))


@pytest.mark.parametrize("how", ["deleted", "put back", "written over"])
def test_what_was_spent_cannot_be_taken_back(tmp_path: Path, how: str) -> None:
    """Without the file of what was spent, or with an earlier one, other questions would be answered
    with the same noise.
    """
    with opened(tmp_path / "run") as predictor:
        file, before = tmp_path / "run" / "checkpoint" / SPENT, tmp_path / "before"
        os.link(file, before)
        predictor.answer_all(QUESTIONS[:20])
    if how == "deleted":
        file.unlink()
    elif how == "put back":
        shutil.copy2(before, tmp_path / "copy")
        os.replace(tmp_path / "copy", file)
    else:
        file.write_bytes(before.read_bytes())
    with pytest.raises(Corrupt, match=r"spent\.json: is (missing|a copy)"):
        opened(tmp_path / "run", resume=True)


def test_a_folder_that_never_answered_is_resumed(tmp_path: Path) -> None:
    opened(tmp_path / "run").folder.close()
    with opened(tmp_path / "run", resume=True) as predictor:
        assert predictor.answer(QUESTIONS[0]).paid
