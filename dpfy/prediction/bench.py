"""Private answers as the self-test of the audit sees them: which parts a mistake may replace, and
what an observer would count.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfy.core.ledger_rules import rehearsal
from dpfy.core.randomness import Randomness
from dpfy.mechanisms.bits import Bits
from dpfy.prediction.claim import AnswersClaim
from dpfy.prediction.margins import QuestionMargins
from dpfy.prediction.predictor import PrivatePredictor
from dpfy.prediction.teaching import teach
from dpfy.prediction.vote_bill import VoteBill, noised
from dpfy.prediction.voters import LinearVoters
from dpfy.runs.folder import Place
from dpfy.runs.mark import SPENT

SECRET = Randomness.for_tests(71)
VOTERS, OWNERS, FEATURES = 12, 60, 5
QUESTIONS, BUDGET, AGAIN = 20, 30, 40
"""Questions of a session, answers that are paid for, and how often one question is asked."""

OF_A_RUN = ("digest", "files", "ledger", "provenance")
"""Parts of a card that name its run: times, random names, hashes."""


def as_it_is(part: Any) -> Any:
    """The part that is shipped."""
    return part


@dataclass(frozen=True)
class Parts:
    """What a mistake may replace. `teach` makes voters; `student` is given what a student learns
    by, and private records, which it must not use; `smooth` and `stated` bound the bill of votes
    and publish it; the others are given the real part of an open predictor.
    """

    teach: Callable[..., LinearVoters] = teach
    rule: Callable[[Any], Any] = as_it_is
    purse: Callable[[Any], Any] = as_it_is
    cache: Callable[[Any], Any] = as_it_is
    finish: Callable[[PrivatePredictor], Path] = PrivatePredictor.finish
    student: Callable[[Any, Any], Any] = lambda learner, private: learner
    smooth: Callable[..., Any] = QuestionMargins.smooth
    stated: Callable[..., dict[str, float]] = VoteBill.stated


Change = Callable[[Parts], Parts]


class Watched:
    """A purse that notes, whenever random bits are handed out, how many were and how many the disk
    says may have been.
    """

    def __init__(self, real: Any, file: Path, seen: list[tuple[int, int]]) -> None:
        self.real, self._file, self._seen = real, file, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def spend(self, kind: str) -> Bits:
        """As the real one."""
        bits: Bits = self.real.spend(kind)
        held = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self._seen.append(
            (len(self._seen) + 1, sum(v for v in held.values() if isinstance(v, int)))
        )
        return bits


def people() -> tuple[Any, Any, Any]:
    """Two records of each owner, in two classes, and whose they are."""
    rng = np.random.default_rng(5)
    owners = np.repeat(np.arange(OWNERS), 2)
    return (
        rng.normal(size=(2 * OWNERS, FEATURES)).astype(np.float32),
        rng.integers(0, 2, 2 * OWNERS),
        owners,
    )


def asked(count: int, seed: int = 0) -> Any:
    """Questions."""
    return np.random.default_rng([6, seed]).normal(size=(count, FEATURES)).astype(np.float32)


def opened(
    folder: Path, claim: AnswersClaim, parts: Parts, *, resume: bool = False, loud: float = 1.0
) -> PrivatePredictor:
    """A predictor with the parts of a mistake in it. `loud` scales the records: voters of other
    data.
    """
    x, y, owners = people()
    voters = parts.teach(loud * x, y, voters=VOTERS, classes=2, owners=owners, randomness=SECRET)
    made = PrivatePredictor(Place(folder, resume=resume), claim, voters, block=4)
    made.rule, made.purse, made._cache = (
        parts.rule(made.rule),
        parts.purse(made.purse),
        parts.cache(made._cache),
    )
    return made


def votes_moved(change: Change) -> int:
    """By how much the counts of a question change at most, in all, when one owner leaves."""
    parts, (x, y, owners) = change(Parts()), people()
    shape = {"voters": VOTERS, "classes": 2, "randomness": SECRET}
    questions, most = asked(60), 0
    whole = parts.teach(x, y, owners=owners, **shape).votes(questions)
    for owner in range(0, OWNERS, 4):
        kept = owners != owner
        without = parts.teach(x[kept], y[kept], owners=owners[kept], **shape).votes(questions)
        most = max(most, int(np.abs(whole - without).sum(axis=1).max()))
    return most


def answer_bills(change: Change) -> tuple[int, list[tuple[int, int]]]:
    """What is paid for in all; and for every release, over two restarts, its number and how many
    the disk said might be made by then.
    """
    claim = AnswersClaim("laplace", 2, VOTERS, BUDGET, BUDGET, epsilon=0.1, delta=1e-6)
    seen: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as place:
        folder, parts = Path(place) / "run", change(Parts())
        for session in range(3):
            with opened(folder, claim, parts, resume=bool(session)) as predictor:
                predictor.purse = Watched(predictor.purse, folder / "checkpoint" / SPENT, seen)  # type: ignore[assignment]
                predictor.answer_all(asked(QUESTIONS, session))
    return BUDGET, seen


def checks_counted(change: Change) -> tuple[int, int]:
    """Questions on which voters were asked whether they agree, and how many such checks were taken
    from what was paid for.
    """
    claim = AnswersClaim(
        "confident",
        2,
        VOTERS,
        BUDGET,
        BUDGET,
        sigma=2.0,
        check_sigma=1.0,
        threshold=float(10 * VOTERS),
        delta=1e-6,
    )
    with (
        tempfile.TemporaryDirectory() as place,
        opened(Path(place) / "run", claim, change(Parts())) as predictor,
    ):
        predictor.answer_all(asked(QUESTIONS))
        return QUESTIONS, claim.most["check"] - predictor.left()["check"]


def asked_again(change: Change) -> tuple[int, int]:
    """One question, asked many times: how many different answers there were, and how many were paid
    for.
    """
    claim = AnswersClaim("laplace", 2, VOTERS, 2 * AGAIN, 2 * AGAIN, epsilon=0.1, delta=1e-6)
    with (
        tempfile.TemporaryDirectory() as place,
        opened(Path(place) / "run", claim, change(Parts())) as predictor,
    ):
        found = {predictor.answer(asked(1)[0]).label for _ in range(AGAIN)}
        return len(found), claim.answers - predictor.left()["answer"]


def students(change: Change) -> tuple[bytes, bytes, bool]:
    """Students of two sets of private records whose teachers give the same answers, as files; and
    whether the answers were the same.
    """
    from dpfy.prediction import pate

    rng, parts = np.random.default_rng(9), change(Parts())
    sides = np.where(np.arange(80) % 2, 3.0, -3.0)[:, None]
    public = (np.repeat(sides[:40], FEATURES, axis=1) + rng.normal(size=(40, FEATURES))).astype(
        np.float32
    )
    claim = pate.StudentAnswersClaim("gaussian", 2, 4, 12, 12, sigma=0.1, delta=1e-6)
    declared = {"data": "made-up inputs", "used_for": "a student", "provenance": "drawn at random"}
    made, answers = [], []
    for other in (0.0, 1.0):
        x = (sides + other + rng.normal(size=(80, FEATURES))).astype(np.float32)
        learner = parts.student(pate.SemiSupervised(epochs=2), x)
        with tempfile.TemporaryDirectory() as place:
            run = Place(Path(place) / "run", seed=4, public_data=(declared,))
            found = pate.train_student(
                run, claim, (x, np.arange(80) % 2), torch.from_numpy(public), learner=learner
            )
            made.append((found.run / pate.STUDENT_MODEL).read_bytes())
            answers.append(found.answers)
    return made[0], made[1], answers[0] == answers[1]


def bill_moved(change: Change) -> tuple[float, float]:
    """By how much one voter moves at most what the bill of votes gets its noise for, and for what
    the noise is made.
    """
    asked, parts = QuestionMargins(3.0, 4.0, VOTERS, 2), change(Parts())
    found = [parts.smooth(asked, [(VOTERS - n, n)] * QUESTIONS, 0.1) for n in range(VOTERS + 1)]
    return max(abs(a.value - b.value) for a, b in itertools.pairwise(found)), min(
        part.bound.l2 for part in found
    )


def bills_stated(change: Change) -> tuple[int, int]:
    """How many bills of votes were stated, and how many of them were below the truth."""
    parts = change(Parts())
    claim = VoteBill.of(
        AnswersClaim("gaussian", 2, VOTERS, QUESTIONS, QUESTIONS, sigma=8.0, delta=1e-5), order=3.0
    )
    votes = [(VOTERS // 2, VOTERS // 2)] * QUESTIONS
    found, true = claim.questions.smooth(votes, claim.beta), claim.questions.renyi(votes)
    below = 0
    for seed in range(AGAIN):
        released = noised(claim, found, rehearsal(claim.event, 1), Randomness.for_tests(seed))
        below += not true <= parts.stated(claim, *released)["renyi"]
    return AGAIN, below


def cards(change: Change) -> tuple[str, str]:
    """What the cards of two services say about their releases, of other data and before any
    answer.
    """
    claim, told = AnswersClaim("laplace", 2, VOTERS, 4, 4, epsilon=0.1, delta=1e-6), []
    parts = change(Parts())
    for loud in (1.0, -1.0):
        with (
            tempfile.TemporaryDirectory() as place,
            opened(Path(place) / "run", claim, parts, loud=loud) as predictor,
        ):
            card = json.loads((parts.finish(predictor) / "privacy.json").read_text())
            told.append(
                json.dumps(
                    {name: part for name, part in card.items() if name not in OF_A_RUN},
                    sort_keys=True,
                )
            )
    return told[0], told[1]
