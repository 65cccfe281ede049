"""Mistakes of private answers: voters that share people, answers and checks that nobody paid for,
an epsilon of the given votes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dpfy_lab.checks.prediction import (
    ASKED_AGAIN,
    CHECKS_PAID,
    NUMBER_NOISE,
    ONE_MICROBATCH,
    ONE_NUMBER,
    ONE_VOTE,
    PAID_BEFORE,
    PUBLISHED,
    SMOOTH_BILL,
    STATED_BILL,
    STUDENT,
    TEACHER_ALONE,
    TEACHER_TOLD,
)
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

HOME = "dpfy.prediction"
VOTES = "dpfy_lab.data_dependent"
TEACH, PURSE = f"{HOME}.voters.teach", f"{HOME}.predictor.ReservedSteps"
REMEMBERS = f"{HOME}.predictor.AnswerCache.__contains__"
SMOOTH = f"{VOTES}.margins.QuestionMargins.smooth"


@mistake(
    "bill-not-smooth",
    "an epsilon of the given votes gets noise for less than a voter can move it",
    SMOOTH_BILL,
    SMOOTH,
)
def _(real: Any, self: Any, votes: Any, beta: float) -> Any:
    plain = float(np.log(self._total(*self.places(votes), 0)))
    return replace(real(self, votes, beta), value=plain)


@mistake(
    "bill-half-the-distance",
    "the smooth bound of votes looks half as far as voters reach",
    SMOOTH_BILL,
    SMOOTH,
)
def _(real: Any, self: Any, votes: Any, beta: float) -> Any:
    places = self.places(votes)
    reached = [
        np.log(self._total(*places, moved // 2)) - beta * moved for moved in range(self.voters + 1)
    ]
    return replace(real(self, votes, beta), value=float(max(reached)))


@mistake(
    "bill-noise-not-covered",
    "the charge of votes is given without room for its noise",
    STATED_BILL,
    f"{VOTES}.vote_bill.VoteBill.stated",
)
def _(real: Any, self: Any, released: float, slack: float) -> Any:
    return real(self, released, 0.0)


@mistake(
    "student-private-inputs",
    "the student learns from private records without saying so",
    STUDENT,
)
def _(patch: Patch) -> None:
    private: list[Any] = []

    def train_student(
        real: Any, place: Any, claim: Any, held: Any, *more: Any, **named: Any
    ) -> Any:
        private[:] = [held[0]]
        return real(place, claim, held, *more, **named)

    def learn(real: Any, self: Any, lesson: Any) -> Any:
        own = torch.from_numpy(private[0][: len(lesson.inputs)])
        inputs = torch.cat([lesson.inputs, own])
        places = np.tile(lesson.coordinates, (2, 1))[: len(inputs)]
        return real(self, replace(lesson, inputs=inputs, coordinates=places))

    patch.around(f"{HOME}.pate.train_student", train_student)
    patch.around(f"{HOME}.student.SemiSupervised.learn", learn)


@mistake(
    "microbatches-charged-once",
    "clipped means of microbatches are charged as if a record moved them by the norm",
    ONE_MICROBATCH,
    "dpfy_lab.microbatches.clipped_means",
)
def _(real: Any, *given: Any) -> Any:
    total, bound = real(*given)
    return total, replace(bound, l2=bound.l2 / 2, l1=bound.l1 / 2, linf=bound.linf / 2)


@mistake(
    "microbatches-unclipped",
    "each record of a microbatch is clipped by the norm, and the means are not",
    ONE_MICROBATCH,
    "dpfy_lab.microbatches.clipped_means",
)
def _(real: Any, gradients: Any, places: Any, groups: int, norm: float) -> Any:
    total, bound = real(gradients, places, groups, norm)
    sums = sum(gradients[places == group].sum(axis=0) for group in range(groups))
    return total * 0 + sums, bound


@mistake(
    "teacher-mixes",
    "a teacher normalises private records by those beside them",
    TEACHER_ALONE,
    "dpfy.training.distill.Teacher.says",
)
def _(real: Any, self: Any, inputs: Any, temperature: float) -> Any:
    with torch.no_grad():
        return (self.model.train()(inputs) / temperature).softmax(1)


@mistake(
    "teacher-not-told",
    "the report of a student is silent about a teacher without privacy",
    TEACHER_TOLD,
    "dpfy.plan.claim._taught_by",
)
def _(real: Any, teacher: Any) -> str:
    return str(real({**teacher, "protected": True}))


@mistake(
    "numbers-unbounded",
    "a voter's number is not moved into the public range",
    ONE_NUMBER,
    f"{HOME}.regression.NumberVoters.places",
)
def _(real: Any, self: Any, questions: Any) -> Any:
    said = self.waves.of(questions) @ self.weights[:-1] + self.weights[-1]
    return np.rint((said.astype(np.float64) + 1) / 2 * (self.classes - 1)).astype(np.int64)


@mistake(
    "numbers-noise-of-a-mean",
    "numbers get the noise of their mean on their sum",
    NUMBER_NOISE,
    f"{HOME}.rules.NoisyMean.answer",
)
def _(real: Any, self: Any, ask: Any, purse: Any) -> Any:
    return real(replace(self, sigma=self.sigma / self.voters), ask, purse)


@mistake(
    "numbers-by-record",
    "the records of a person are dealt to several voters of numbers",
    ONE_NUMBER,
    f"{HOME}.regression.teach_numbers",
)
def _(real: Any, x: Any, y: Any, *, owners: Any, **more: Any) -> Any:
    return real(x, y, owners=[f"{n} {place % 2}" for place, n in enumerate(owners)], **more)


@mistake("answers-overlap", "every person is known to two voters", ONE_VOTE, TEACH)
def _(real: Any, x: Any, y: Any, *, owners: Any, **more: Any) -> Any:
    twice = [f"{name}" for name in owners] + [f"{name} again" for name in owners]
    return real(np.concatenate([x, x]), np.concatenate([y, y]), owners=twice, **more)


@mistake(
    "answers-by-record", "the records of a person are dealt to several voters", ONE_VOTE, TEACH
)
def _(real: Any, x: Any, y: Any, *, owners: Any, **more: Any) -> Any:
    return real(x, y, owners=[f"{n} {place % 2}" for place, n in enumerate(owners)], **more)


@mistake(
    "answers-billed-after",
    "an answer is written down after it was made",
    PAID_BEFORE,
    f"{PURSE}._take",
)
def _(real: Any, self: Any, kind: str) -> None:
    # The one that would write it is never asked for if the process dies.
    self.taken = self.taken | {kind: self._next[kind] + 1}


@mistake("answers-restart", "a restart forgets what was spent", PAID_BEFORE, f"{PURSE}._read")
def _(real: Any, self: Any, due: bool) -> Any:
    return dict.fromkeys(real(self, due), 0)


class FreeOf:
    """Reserved steps that hand out the bits of one kind for nothing."""

    def __init__(self, real: Any, kind: str) -> None:
        self.real, self.kind, self.count = real, kind, itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def spend(self, kind: str) -> Any:
        """The bits."""
        free = kind == self.kind
        return self.real.same(f"free {next(self.count)}") if free else self.real.spend(kind)


@mistake(
    "answers-free-check",
    "the check before an answer is not charged",
    CHECKS_PAID,
    f"{HOME}.rules.ConfidentVotes.answer",
)
def _(real: Any, self: Any, ask: Any, purse: Any) -> Any:
    return real(self, ask, FreeOf(purse, "check"))


@mistake(
    "answers-cached-twice", "a question that was answered is charged again", ASKED_AGAIN, REMEMBERS
)
def _(real: Any, self: Any, key: str) -> bool:
    return False


@mistake(
    "answers-cached-never",
    "a question that was answered gets new noise for nothing",
    ASKED_AGAIN,
)
def _(patch: Patch) -> None:
    count = itertools.count()

    def spend(real: Any, self: Any, kind: str) -> Any:
        number = next(count)
        return self.same(f"free {number}") if number else real(self, kind)

    patch.around(REMEMBERS, lambda real, self, key: False)
    patch.around(f"{PURSE}.spend", spend)


@mistake(
    "answers-own-epsilon",
    "an epsilon of the given votes is in the report",
    PUBLISHED,
    f"{HOME}.predictor.PrivatePredictor.finish",
)
def _(real: Any, self: Any) -> Any:
    questions = np.eye(self.voters.features, dtype=np.float32)
    lead = float(np.square(np.diff(self.voters.votes(questions), axis=1)).mean())
    self.folder.tell(self.claim.name, epsilon_of_these_votes=round(1 / (1 + lead), 6))
    return real(self)
