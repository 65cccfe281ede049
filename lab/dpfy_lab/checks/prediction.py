"""Checks of private answers: one unit moves one vote, and each release is paid for before it is
made, once. They use no chance.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dpfy
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.prediction import pate, regression
from dpfy.prediction import voters as voting
from dpfy.prediction.claim import AnswersClaim
from dpfy.prediction.predictor import PrivatePredictor
from dpfy.prediction.student import SemiSupervised
from dpfy.runs.run import Run
from dpfy.training import distill
from dpfy_lab import microbatches
from dpfy_lab.checks.published import published, temporary
from dpfy_lab.data_dependent import vote_bill
from dpfy_lab.data_dependent.margins import QuestionMargins
from dpfy_lab.data_dependent.vote_bill import VoteBill
from dpfy_lab.selftest.mistake import Found, check
from dpfy_lab.selftest.patch import patching

SECRET = Randomness.for_tests(71)
VOTERS, OWNERS, FEATURES = 12, 60, 5
QUESTIONS, BUDGET, AGAIN = 20, 30, 40
"""QuestionMargins of a session, answers that are paid for, and how often one question is asked."""
DECLARED = {"data": "made-up inputs", "used_for": "a student", "provenance": "drawn at random"}


def _people() -> tuple[Any, Any, Any]:
    """Two records of each owner, in two classes, and whose they are."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2 * OWNERS, FEATURES)).astype(np.float32)
    return x, rng.integers(0, 2, 2 * OWNERS), np.repeat(np.arange(OWNERS), 2)


def _asked(count: int, seed: int = 0) -> Any:
    """QuestionMargins."""
    return np.random.default_rng([6, seed]).normal(size=(count, FEATURES)).astype(np.float32)


def _laplace(answers: int) -> AnswersClaim:
    return AnswersClaim("laplace", 2, VOTERS, answers, answers, epsilon=0.1, delta=1e-6)


def _opened(
    folder: Path, claim: AnswersClaim, *, resume: bool = False, factor: float = 1.0
) -> PrivatePredictor:
    """A service. `factor` scales the records: voters of other data."""
    x, y, owners = _people()
    shape: dict[str, Any] = {"voters": VOTERS, "classes": 2, "randomness": SECRET}
    voters = voting.teach(factor * x, y, owners=owners, **shape)
    return PrivatePredictor(Run(folder, resume=resume), claim, voters, block=4)


@check("one vote")
def ONE_VOTE() -> Found:
    """An owner who leaves moves one vote: one count falls by 1, another rises by 1."""
    x, y, owners = _people()
    shape: dict[str, Any] = {"voters": VOTERS, "classes": 2, "randomness": SECRET}
    questions = _asked(60)
    whole = voting.teach(x, y, owners=owners, **shape).votes(questions)
    for owner in range(0, OWNERS, 4):
        kept = owners != owner
        without = voting.teach(x[kept], y[kept], owners=owners[kept], **shape).votes(questions)
        if (moved := int(np.abs(whole - without).sum(axis=1).max())) > 2:
            return f"one owner moves counts by {moved} in all, where one vote moves them by 2"
    return None


@check("paid before")
def PAID_BEFORE() -> Found:
    """When noise is drawn the disk says so already; over restarts no more is released than was paid
    for.
    """
    seen: list[int] = []

    def spend(real: Any, self: Any, kind: str) -> Any:
        """Note what the disk says may have been made when bits are handed out."""
        bits = real(self, kind)
        held = json.loads(self.file.read_text()) if self.file.is_file() else {}
        seen.append(sum(number for number in held.values() if isinstance(number, int)))
        return bits

    with temporary() as folder, patching() as patch:
        patch.around("dpfy.prediction.predictor.ReservedSteps.spend", spend)
        for session in range(3):
            with _opened(folder, _laplace(BUDGET), resume=bool(session)) as predictor:
                predictor.answer_all(_asked(QUESTIONS, session))
    for number, durable in enumerate(seen, 1):
        if durable < number:
            return (
                f"noise of release {number} was drawn while the disk said that {durable} may have "
                f"been made"
            )
    if len(seen) <= BUDGET:
        return None
    return f"{len(seen)} releases were made, {BUDGET} were paid for"


@check("checks paid")
def CHECKS_PAID() -> Found:
    """Whether voters agree is a release too, also where the answer is none."""
    settings: dict[str, Any] = {"sigma": 2.0, "check_sigma": 1.0, "threshold": 10.0 * VOTERS}
    claim = AnswersClaim("confident", 2, VOTERS, BUDGET, BUDGET, delta=1e-6, **settings)
    with temporary() as folder, _opened(folder, claim) as predictor:
        predictor.answer_all(_asked(QUESTIONS))
        counted = claim.most["check"] - predictor.left()["check"]
    if counted == QUESTIONS:
        return None
    return f"{QUESTIONS} questions were checked for agreement, {counted} checks were paid for"


@check("asked again")
def ASKED_AGAIN() -> Found:
    """The same question is answered alike, and paid for once."""
    claim = _laplace(2 * AGAIN)
    with temporary() as folder, _opened(folder, claim) as predictor:
        different = len({predictor.answer(_asked(1)[0]).label for _ in range(AGAIN)})
        paid = claim.answers - predictor.left()["answer"]
    if different > 1 and paid < different:
        return f"one question had {different} different answers, {paid} of them paid for"
    return None if paid == 1 else f"one question was paid for {paid} times"


@check("published epsilon")
def PUBLISHED() -> Found:
    """The report of a service is the same whatever its voters know, until an answer was given."""
    told = []
    for factor in (1.0, -1.0):
        with temporary() as folder, _opened(folder, _laplace(4), factor=factor) as predictor:
            told.append(published(predictor.finish()))
    if told[0] == told[1]:
        return None
    return "the report says something that depends on the votes and was not made private"


@check("smooth charge")
def SMOOTH_BILL() -> Found:
    """What gets noise in the accounting of given votes is moved by one voter by at most what the
    noise is made for.
    """
    asked = QuestionMargins(3.0, 4.0, VOTERS, 2)
    found = [asked.smooth([(VOTERS - n, n)] * QUESTIONS, 0.1) for n in range(VOTERS + 1)]
    moved = max(abs(a.value - b.value) for a, b in itertools.pairwise(found))
    made_for = min(part.bound.l2 for part in found)
    if moved <= made_for:
        return None
    return (
        f"one voter moves the charge of votes by {moved:.3g}, its noise is made for {made_for:.3g}"
    )


@check("given charge")
def STATED_BILL() -> Found:
    """What is stated about given votes is not below the truth (the chance that it is, one in a
    million, does not show).
    """
    answers = AnswersClaim("gaussian", 2, VOTERS, QUESTIONS, QUESTIONS, sigma=8.0, delta=1e-5)
    claim = VoteBill.of(answers, order=3.0)
    votes = [(VOTERS // 2, VOTERS // 2)] * QUESTIONS
    found, true = claim.questions.smooth(votes, claim.beta), claim.questions.renyi(votes)
    below = 0
    for seed in range(AGAIN):
        permit, secret = mock_permit(claim.event, 1), Randomness.for_tests(seed)
        released = vote_bill.noised(claim, found, permit, secret)
        below += not true <= claim.stated(*released)["renyi"]
    return f"{below} of {AGAIN} charges of votes were given below the truth" if below else None


@check("student")
def STUDENT() -> Found:
    """A student is the same whatever the private records are, where its teachers answer alike."""
    rng = np.random.default_rng(9)
    sides = np.where(np.arange(80) % 2, 3.0, -3.0)[:, None]
    spread = np.repeat(sides[:40], FEATURES, axis=1)
    public = torch.from_numpy((spread + rng.normal(size=spread.shape)).astype(np.float32))
    claim = pate.StudentAnswersClaim("gaussian", 2, 4, 12, 12, sigma=0.1, delta=1e-6)
    made, answers = [], []
    for other in (0.0, 1.0):
        x = (sides + other + rng.normal(size=(80, FEATURES))).astype(np.float32)
        with temporary() as folder:
            run = Run(folder, seed=4, public_data=(DECLARED,))
            private, learner = (x, np.arange(80) % 2), SemiSupervised(epochs=2)
            found = pate.train_student(run, claim, private, public, learner=learner)
            made.append((found.run / pate.STUDENT_MODEL).read_bytes())
            answers.append(found.answers)
    if answers[0] != answers[1]:
        return "teachers that must agree did not, so that nothing could be compared"
    if made[0] == made[1]:
        return None
    return "the student depends on private records beside the answers that were paid for"


@check("one number")
def ONE_NUMBER() -> Found:
    """An owner who leaves moves the sum of numbers by at most the public range."""
    x, _, owners = _people()
    y = 5 * x[:, 0].astype(np.float64)
    shape: dict[str, Any] = {"voters": VOTERS, "low": 0.0, "high": 1.0, "randomness": SECRET}
    questions = 40 * _asked(60)
    whole = regression.teach_numbers(x, y, owners=owners, **shape)
    for owner in range(0, OWNERS, 4):
        kept = owners != owner
        without = regression.teach_numbers(x[kept], y[kept], owners=owners[kept], **shape)
        sums = (made.places(questions).sum(axis=1) for made in (whole, without))
        if (moved := int(np.abs(next(sums) - next(sums)).max())) > whole.classes - 1:
            return f"one owner moves a sum by {moved} places of {whole.classes - 1}"
    return None


@check("noise of numbers")
def NUMBER_NOISE() -> Found:
    """Answers that are numbers have the noise that is charged: that of a sum, over all voters."""
    claim = AnswersClaim("mean", 4097, 100, 400, 400, sigma=5.0, low=0.0, high=1.0, delta=1e-6)
    middle = regression.NumberVoters(np.zeros((FEATURES + 101, 100), np.float32), 0.0, 1.0)
    with temporary() as folder, PrivatePredictor(Run(folder, seed=8), claim, middle) as predictor:
        said = np.array([answer.label for answer in predictor.answer_all(_asked(400))])
    found, due = float(said.std()), claim.sigma / claim.voters
    if found > 0.8 * due:  # within a fifth: four standard errors of 400 answers and more
        return None
    return f"answers have noise of {found:.3g} of the range, where {due:.3g} is charged"


@check("teacher of one record")
def TEACHER_ALONE() -> Found:
    """What a teacher says about a private record does not depend on the other records."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.BatchNorm1d(4))
    teacher = distill.Teacher.without_report(net)
    x = torch.from_numpy(_asked(8))
    other = torch.cat([x[:1], 3 * x[1:]])
    if torch.equal(teacher.says(x, 1.0)[0], teacher.says(other, 1.0)[0]):
        return None
    return "what the teacher says about a record depends on other private records"


@check("teacher told")
def TEACHER_TOLD() -> Found:
    """The report of a student says that the data of a teacher without a report are not
    protected.
    """
    net, teacher = torch.nn.Linear(FEATURES, 2), torch.nn.Linear(FEATURES, 2)
    plan = dpfy.dpsgd(records=40, batch_size=10, steps=2, clip_norm=1.0).with_noise(1.0, delta=1e-3)
    with temporary() as folder:
        found = distill.distil_privately(
            distill.Teacher.without_report(teacher),
            net,
            torch.from_numpy(_asked(40)),
            plan=plan,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            run=Run(folder, seed=3),
        )
        told = " ".join(found.report["warnings"])
    if "teacher's data are not protected" in told:
        return None
    return "the report of a student does not say that the teacher's data are not protected"


@check("one microbatch")
def ONE_MICROBATCH() -> Found:
    """One record moves the sum of clipped means of groups by at most what is charged, twice the
    norm.
    """
    rows = np.array([[(-1.0) ** (k + 1) * 2 * k] for k in range(40)])
    places = microbatches.coins(41, 20, np.random.default_rng(3))
    whole, bound = microbatches.clipped_means(np.concatenate([[[0.0]], rows]), places, 20, 1.0)
    without, _ = microbatches.clipped_means(rows, places[1:], 20, 1.0)
    turned = [microbatches.clipped_means(np.array(part), np.zeros(len(part), int), 1, 1.0)[0]
              for part in ([[1.0]], [[1.0], [-9.0]])]  # fmt: skip
    moved = max(float(abs(whole - without)[0]), float(abs(turned[0] - turned[1])[0]))
    if moved <= bound.l2 * (1 + 1e-9):
        return None
    return f"one record moves clipped means by {moved:.3g}, where {bound.l2:.3g} is charged"


CHECKS = (
    ONE_MICROBATCH,
    TEACHER_ALONE,
    TEACHER_TOLD,
    ONE_NUMBER,
    NUMBER_NOISE,
    ONE_VOTE,
    PAID_BEFORE,
    CHECKS_PAID,
    ASKED_AGAIN,
    PUBLISHED,
    SMOOTH_BILL,
    STATED_BILL,
    STUDENT,
)
