"""What answers told about the votes at hand, made private: a number that may be published, with a
bill of its own (docs/smooth-votes.md).

The bound of `margins` is computed from private votes. What is released is its smooth form's
logarithm, which one voter moves by at most beta, with Gaussian noise; what is stated is that number
and as much more as covers the noise, but for a chance that is part of delta.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np

import dpfy
from dpfy.accounting.rdp import to_epsilon
from dpfy.core import check, events, storage
from dpfy.core.claim import STATED, YES, Assumption, register
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bounded, Permit
from dpfy.mechanisms.additive import GaussianMechanism
from dpfy.mechanisms.histogram import gaussian_tail
from dpfy.prediction.claim import VoteClaim, VotesRelease
from dpfy.report import card
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.run import Run
from dpfy_lab.data_dependent.margins import LARGEST_MOVE, MOST_VOTERS, ROUNDED, QuestionMargins

BILL = "bill.json"
STEEPNESS = 1.2
"""Beta in moves of one vote over sigma: about how fast a bound falls with the lead, where most of
it comes from.
"""
MOST_QUESTIONS = 10**7
MEANING = (
    "This epsilon is about these votes and their neighbours alone. It is not (epsilon, "
    "delta)-differential privacy, which is a promise for "
    "all data: that is the guarantee of the answers."
)
"""What must stand beside every epsilon of the votes at hand."""
WORDS = (
    "What the answers told about one voter, bounded for the votes at hand: a number computed from "
    "private votes, released with "
    "noise of its own, which is charged. It is about these votes and their neighbours, not about "
    "other data. What holds for all "
    "data is in the report of the answers. " + MEANING
)


@register
@dataclass(frozen=True)
class VoteBill(VotesRelease):
    """The bill of the votes at hand on `queries` questions, sanitised: Gaussian noise on a
    logarithm that one voter moves by `beta`.

    The fields up to `threshold` are those of the answers. `order` is the Rényi order of the bound;
    `chance`, a part of delta, is that of a statement below the truth.
    """

    queries: int
    voters: int
    classes: int
    sigma: float
    check_sigma: float
    threshold: float
    order: float
    beta: float
    noise_multiplier: float
    chance: float

    kind: ClassVar[str] = "vote-bill"
    purpose: ClassVar[str] = "statistics"
    artefacts: ClassVar[tuple[str, ...]] = (BILL,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("queries", self.queries, most=MOST_QUESTIONS)
        check.integer("voters", self.voters, most=MOST_VOTERS)
        check.integer("classes", self.classes, least=2, most=4096)
        check.positive("sigma", self.sigma)
        check.nonnegative("check_sigma", self.check_sigma)
        check.real("threshold", self.threshold)
        if not 1 < check.real("order", self.order) <= LARGEST_MOVE * self.sigma:
            raise InvalidInput(
                "order",
                self.order,
                f"must be above 1 and at most {LARGEST_MOVE:g} of sigma ({self.sigma:g})",
            )
        if not 0 < check.real("beta", self.beta) <= 1:
            raise InvalidInput("beta", self.beta, "must be above 0 and at most 1")
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        if not 0 < check.real("chance", self.chance) < self.delta:
            raise InvalidInput(
                "chance",
                self.chance,
                f"must be above 0 and below delta ({self.delta:g}), of which it is a part",
            )
        if self.adjacency is Adjacency.REPLACE_ONE:
            rule = (
                "must be add-or-remove-one or zero-out: a replaced unit may leave one voter for "
                "another, and change two"
            )
            raise InvalidInput("adjacency", self.adjacency.value, rule)

    @classmethod
    def of(
        cls,
        answers: VoteClaim,
        *,
        noise_multiplier: float = 4.0,
        order: float | None = None,
        beta: float | None = None,
    ) -> Self:
        """For the answers of a claim by noisy votes. What is not stated follows from the claim, and
        so is public.
        """
        if answers.rule not in ("gaussian", "confident"):
            raise Unsupported(
                f"a charge of the votes at hand for the rule {answers.rule!r}",
                "use the rule gaussian or confident",
            )
        if answers.rule == "gaussian" and answers.answers < answers.queries:
            raise Unsupported(
                "a charge of votes where not all questions are answered",
                "ask as many questions as there are answers",
            )
        checks = 0.0 if not answers.check_sigma else 0.5 / answers.check_sigma**2
        ties = (answers.queries * checks + answers.answers / answers.sigma**2) * 2 / math.pi
        rate = (
            ties / 3
            # votes at hand tell less than ties: how much less is a guess, which costs little where
            # it is wrong
        )
        best = min(1 + math.sqrt(-math.log(answers.delta) / rate), LARGEST_MOVE * answers.sigma)
        return cls(
            answers.queries,
            answers.voters,
            answers.classes,
            answers.sigma,
            answers.check_sigma,
            answers.threshold,
            order=round(best, 2) if order is None else order,
            beta=float(f"{min(1.0, STEEPNESS / answers.sigma):.4g}") if beta is None else beta,
            noise_multiplier=noise_multiplier,
            chance=answers.delta / 10,
            unit=answers.unit,
            adjacency=answers.adjacency,
            delta=answers.delta,
        )

    def fitting(self, answers: VoteClaim) -> Self:
        """This claim, if it is about these answers; else it is refused."""
        for name in ("queries", "voters", "classes", "sigma", "check_sigma", "threshold"):
            if getattr(self, name) != getattr(answers, name):
                raise InvalidInput(
                    f"charge.{name}",
                    getattr(self, name),
                    f"must be {getattr(answers, name)}, as of the answers",
                )
        return self

    @property
    def event(self) -> events.Event:
        """One Gaussian number."""
        return events.Gaussian(self.noise_multiplier)

    @property
    def questions(self) -> QuestionMargins:
        """What bounds the votes."""
        return QuestionMargins(
            self.order, self.sigma, self.voters, self.classes, self.check_sigma, self.threshold
        )

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """One voter, and a smooth bound."""
        who = f"one {self.unit.name} changes what one of {self.voters} voters says, and no other"
        smooth = (
            "every question counts as what it may become when voters change, discounted by how "
            "many must"
        )
        return [
            Assumption(
                "voters",
                who,
                "as in the report of the answers; every voter votes once on a question",
                YES,
            ),
            Assumption(
                "questions",
                "which questions are asked does not depend on private records",
                "as the caller says",
                STATED,
            ),
            Assumption(
                "smoothness",
                f"one voter moves the released logarithm by at most {self.beta:g}",
                smooth,
                YES,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the card."""
        return {
            "title": "What the answers told about these votes",
            "words": WORDS,
            "accounting_of_votes": "depends on the data, sanitised: smooth bound, Gaussian noise, "
            "charged here",
            "queries": self.queries,
            "voters": self.voters,
            "classes": self.classes,
            "order": self.order,
            "beta": self.beta,
            "chance_too_small": self.chance,
        }

    def stated(self, released: float, slack: float) -> dict[str, Any]:
        """From a released logarithm to what is published: post-processing."""
        worst = self.queries * float(self.questions.table.max())
        renyi = min(math.exp(min(released + slack, 700.0)) * ROUNDED, worst)
        orders, rest = np.array([self.order]), self.delta - self.chance
        number = self.order / (2 * self.noise_multiplier**2)
        return {
            "order": self.order,
            "renyi": renyi,
            "delta": self.delta,
            "epsilon_of_these_answers": to_epsilon(orders, np.array([renyi]), rest),
            "epsilon_with_this_number": to_epsilon(orders, np.array([renyi + number]), rest),
            "meaning": MEANING,
        }

    def release(self, folder: RunFolder, votes: Any) -> None:
        """One bill in a folder that has reserved it. Votes of a wrong shape, or that are not one of
        every voter, are refused.
        """
        held = np.ascontiguousarray(votes, dtype=np.float64)
        if held.shape != (self.queries, self.classes):
            raise InvalidInput(
                "votes",
                f"shape {held.shape}",
                f"must be {self.queries} questions by {self.classes} classes",
            )
        if (
            not (held.sum(axis=1) == self.voters).all()
            or (held < 0).any()
            or (held != np.rint(held)).any()
        ):
            raise InvalidInput(
                "votes",
                "other sums",
                f"must be whole counts of {self.voters} votes on every question, one of each voter",
            )
        folder.bind(self.name, held.tobytes())
        found = self.questions.smooth(held, self.beta)
        told = self.stated(*noised(self, found, folder.begin(self.name), folder.randomness))
        folder.write(BILL, json.dumps(told, indent=1).encode())
        folder.tell(self.name, **told)


def release_vote_bill(place: Run, claim: VoteBill, votes: Callable[[], Any]) -> dict[str, Any]:
    """Release the bill of votes into a run folder. `votes` opens them, a row of counts for each
    question, when the claim is reserved.

    Guarantees: the claim is reserved before votes are read. What leaves is a Gaussian release of a
    number that one voter moves by at most beta. With the stated chance over its noise at most, the
    statement is below what the answers tell about one voter of these votes.
    """
    if complete(place, claim):
        return stated(place.path)
    with RunFolder(place, claim) as folder:
        claim.release(folder, votes())
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        folder.finish(
            card.Facts(
                {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed},
                releases=1,
            )
        )
    return stated(place.path)


def noised(
    claim: VoteBill, found: Bounded[float], permit: Permit, randomness: Randomness
) -> tuple[float, float]:
    """The mechanism: a smooth logarithm with noise; and by how much, which is public, the noise
    makes it too small but for the chance.
    """
    mechanism = GaussianMechanism(claim.noise_multiplier)
    grid = mechanism.grid(found.bound)
    laid = grid.lay(found)
    slack = math.ldexp(
        steps_below(mechanism.parameter(grid, laid.bound), claim.chance), grid.exponent
    )
    return float(mechanism.release(laid, permit, randomness).value), slack


def steps_below(parameter: int, chance: float) -> int:
    """By how many steps noise of this parameter, and rounding to a step, take off more only with
    this chance.
    """
    steps = math.ceil(-NormalDist().inv_cdf(chance) * parameter) + 1
    while gaussian_tail((steps - 1) / parameter) > chance:
        steps += max(1, parameter >> 20)
    return steps + 1


def stated(run: Path | str) -> dict[str, Any]:
    """What a finished run published, with what it means."""
    found: dict[str, Any] = storage.parsed_json(
        BILL, storage.content(BILL, Path(run) / BILL, most=storage.MOST_DATA)
    )
    return found
