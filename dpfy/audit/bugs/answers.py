"""Mistakes of private answers: voters that share people, answers and checks that nobody paid for,
an epsilon of the votes at hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug


class PartInstead:
    """The real part in all that a mistake does not change."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def overlapping(parts: Any) -> Any:
    """Every owner's records go to two voters, to have more to learn from."""

    def teach(x: Any, y: Any, *, owners: Any, **more: Any) -> Any:
        twice = np.concatenate(
            [[f"{name}" for name in owners], [f"{name} again" for name in owners]]
        )
        return parts.teach(np.concatenate([x, x]), np.concatenate([y, y]), owners=twice, **more)

    return replace(parts, teach=teach)


def by_record(parts: Any) -> Any:
    """Records are dealt out one by one, whoever owns them."""

    def teach(x: Any, y: Any, *, owners: Any, **more: Any) -> Any:
        return parts.teach(
            x, y, owners=[f"{name} {place % 2}" for place, name in enumerate(owners)], **more
        )

    return replace(parts, teach=teach)


class BilledAfter(PartInstead):
    """A release is written down when the next one is asked for: the last one never was if the
    process dies.
    """

    def spend(self, kind: str) -> Any:
        """The bits first, the bill later."""
        writes, self.real._take = (
            self.real._take,
            lambda kind: self.real.taken.update({kind: self.real._next[kind] + 1}),
        )
        try:
            return self.real.spend(kind)
        finally:
            self.real._take = writes


class Forgetting(PartInstead):
    """A restart begins with the whole budget again."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        real.taken = dict.fromkeys(real.taken, 0)
        real._next = dict(real.taken)


class FreeChecks(PartInstead):
    """Whether the voters agree is looked at with noise that was not paid for."""

    def answer(self, ask: Any, purse: Any) -> Any:
        """By a purse that hands out bits for checks for nothing."""
        return self.real.answer(ask, FreeOf(purse, "check"))


class FreeOf(PartInstead):
    """A purse that hands out one kind of bits, or all but the first, for nothing."""

    def __init__(self, real: Any, kind: str, after: int = 0) -> None:
        super().__init__(real)
        self.kind, self.after, self.count = kind, after, 0

    def spend(self, kind: str) -> Any:
        """The bits."""
        self.count += 1
        return (
            self.real.same(f"free {self.count}")
            if kind == self.kind and self.count > self.after
            else self.real.spend(kind)
        )


class Empty(PartInstead):
    """A memory of answers that never has any."""

    def __contains__(self, key: str) -> bool:
        return False


def own_epsilon(parts: Any) -> Any:
    """The card tells how closely the voters agree, as an epsilon of these votes would."""

    def finish(predictor: Any) -> Path:
        features = np.eye(predictor.voters.features, dtype=np.float32)
        lead = float(np.square(np.diff(predictor.voters.votes(features), axis=1)).mean())
        predictor.folder.tell(predictor.claim.name, epsilon_of_these_votes=round(1 / (1 + lead), 6))
        return Path(parts.finish(predictor))

    return replace(parts, finish=finish)


class WithPrivate(PartInstead):
    """Private records are among the unlabelled inputs that the student learns from, since more of
    them help; the card says nothing.
    """

    def __init__(self, real: Any, private: Any) -> None:
        super().__init__(real)
        self.private = private

    def learn(self, lesson: Any) -> Any:
        """From public inputs and these."""
        import torch

        inputs = torch.cat([lesson.inputs, torch.from_numpy(self.private[: len(lesson.inputs)])])
        return self.real.learn(
            replace(
                lesson,
                inputs=inputs,
                coordinates=np.tile(lesson.coordinates, (2, 1))[: len(inputs)],
            )
        )


def of_these_votes(parts: Any) -> Any:
    """The bound of the votes at hand gets the noise that is made for its smooth form."""

    def smooth(asked: Any, votes: Any, beta: float) -> Any:
        plain = float(np.log(asked._total(*asked.places(votes), 0)))
        return replace(parts.smooth(asked, votes, beta), value=plain)

    return replace(parts, smooth=smooth)


def half_as_far(parts: Any) -> Any:
    """Two voters are taken to do what one can."""

    def smooth(asked: Any, votes: Any, beta: float) -> Any:
        places = asked.places(votes)
        reached = [
            np.log(asked._total(*places, moved // 2)) - beta * moved
            for moved in range(asked.voters + 1)
        ]
        return replace(parts.smooth(asked, votes, beta), value=float(max(reached)))

    return replace(parts, smooth=smooth)


def without_slack(parts: Any) -> Any:
    """What came out of the noise is stated as it is."""
    return replace(parts, stated=lambda claim, released, slack: parts.stated(claim, released, 0.0))


BUGS = (
    Bug(
        "bill-not-smooth",
        "an epsilon of the votes at hand gets noise for less than a voter can move it",
        "smooth bill",
        prediction=of_these_votes,
    ),
    Bug(
        "bill-half-the-distance",
        "the smooth bound of votes looks half as far as voters reach",
        "smooth bill",
        prediction=half_as_far,
    ),
    Bug(
        "bill-noise-not-covered",
        "the bill of votes is stated without room for its noise",
        "stated bill",
        prediction=without_slack,
    ),
    Bug(
        "student-private-inputs",
        "the student learns from private records without saying so",
        "student",
        prediction=lambda parts: replace(
            parts, student=lambda learner, private: WithPrivate(learner, private)
        ),
    ),
    Bug(
        "answers-overlap", "every person is known to two voters", "one vote", prediction=overlapping
    ),
    Bug(
        "answers-by-record",
        "the records of a person are dealt to several voters",
        "one vote",
        prediction=by_record,
    ),
    Bug(
        "answers-billed-after",
        "an answer is written down after it was made",
        "paid before",
        prediction=lambda parts: replace(parts, purse=BilledAfter),
    ),
    Bug(
        "answers-restart",
        "a restart forgets what was spent",
        "paid before",
        prediction=lambda parts: replace(parts, purse=Forgetting),
    ),
    Bug(
        "answers-free-check",
        "the check before an answer is not billed",
        "checks paid",
        prediction=lambda parts: replace(parts, rule=FreeChecks),
    ),
    Bug(
        "answers-cached-twice",
        "a question that was answered is billed again",
        "asked again",
        prediction=lambda parts: replace(parts, cache=Empty),
    ),
    Bug(
        "answers-cached-never",
        "a question that was answered gets new noise for nothing",
        "asked again",
        prediction=lambda parts: replace(
            parts, cache=Empty, purse=lambda real: FreeOf(real, "answer", after=1)
        ),
    ),
    Bug(
        "answers-own-epsilon",
        "an epsilon of the votes at hand is on the card",
        "published epsilon",
        prediction=own_epsilon,
    ),
)
