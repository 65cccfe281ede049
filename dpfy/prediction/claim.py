"""The claim of answers: by which rule they are made, how many there may be, and what all of them
cost. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpfy.core import check, events
from dpfy.core.claim import STATED, YES, Assumption, Claim, register
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency
from dpfy.prediction.rules import ANSWER, CHECK, QUESTION, UNSTABLE, Rule, rule_of

if TYPE_CHECKING:
    from dpfy.runs.folder import RunFolder

MOST = 10**9


@dataclass(frozen=True)
class VoteClaim(Claim):
    """Answers made from votes of `voters`, of whom one unit makes one say something else; or from
    scores of a stable learner, `voters` 1.

    `rule` is the name of a rule (`dpfy.prediction.rules`), with its own fields below. At most
    `queries` questions are asked, and at most `answers` of them are answered; for the rule "stable"
    `unstable` is how many may be refused instead. Numbers of the rule "mean" lie between `low` and
    `high`.
    """

    rule: str
    classes: int
    voters: int
    queries: int
    answers: int
    sigma: float = 0.0
    check_sigma: float = 0.0
    threshold: float = 0.0
    epsilon: float = 0.0
    delta_used: float = 0.0
    unstable: int = 0
    rate: float = 0.0
    noise_multiplier: float = 0.0
    low: float = 0.0
    high: float = 0.0

    LATER: ClassVar[tuple[str, ...]] = ("low", "high")
    boundary: ClassVar[str] = "B6"
    purpose: ClassVar[str] = "answers"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = rule_of(self.rule)
        check.integer("voters", self.voters, most=1 << 24)
        check.integer("queries", self.queries, most=MOST)
        if check.integer("answers", self.answers, most=MOST) > self.queries:
            raise InvalidInput(
                "answers", self.answers, f"must be at most the number of queries ({self.queries})"
            )
        wanted = {field.name for field in fields(rule)} | {"classes"}
        for name in (
            "sigma",
            "check_sigma",
            "threshold",
            "epsilon",
            "delta_used",
            "unstable",
            "rate",
            "noise_multiplier",
            "low",
            "high",
        ):
            if name not in wanted and getattr(self, name):
                raise InvalidInput(
                    name,
                    getattr(self, name),
                    f"says nothing for the rule {self.rule!r}; leave it out",
                )
        if self.adjacency is Adjacency.REPLACE_ONE:
            words = (
                "must be add-or-remove-one or zero-out: a replaced unit may leave one voter for "
                "another, and move two votes"
            )
            raise InvalidInput("adjacency", self.adjacency.value, words)
        _ = self.tool, self.event

    @property
    def tool(self) -> Rule:
        """The rule itself."""
        named = {"questions": self.queries} | {
            name: getattr(self, name) for name in self.__dataclass_fields__
        }
        kind = rule_of(self.rule)
        return kind(**{field.name: named[field.name] for field in fields(kind)})

    @property
    def most(self) -> dict[str, int]:
        """How many releases of each kind there may be, in their order."""
        limits = {
            CHECK: self.queries,
            ANSWER: self.answers,
            QUESTION: self.queries,
            UNSTABLE: self.unstable,
        }
        return {kind: limits[kind] for kind in self.tool.kinds}

    @property
    def event(self) -> events.Event:
        """The whole charge: that of all releases that may be made."""
        return self.tool.bill(self.most)

    @property
    def releases(self) -> int:
        """Of all kinds."""
        return sum(self.most.values())

    def first_step(self, kind: str) -> int:
        """The step of the first release of a kind; those of a kind follow one another."""
        kinds = list(self.most)
        return sum(self.most[before] for before in kinds[: kinds.index(kind)])

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """A unit belongs to one voter, noise is exact, and the charge is that of the worst votes."""
        return [
            Assumption(
                "voters",
                f"one {self.unit.name} changes what one of {self.voters} voters says, and no other",
                "units were given to voters by chance, each by itself, and each voter was made "
                "from its own alone",
                YES,
            )
            if self.rule != "scores"
            else Assumption(
                "stability",
                f"one {self.unit.name} moves all scores together by at most the given bound",
                "the learner minimises a strongly convex objective, and how far it was from the "
                "minimum was measured and added",
                YES,
            ),
            Assumption(
                "features",
                "what all voters have in common (features, architecture, settings) was not learnt "
                "from the private records",
                "it is code, or was made from the public data that is declared",
                STATED,
            ),
            Assumption(
                "votes",
                "the charge holds whatever the votes are",
                "it was not computed from the votes",
                YES,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the report."""
        return {
            "title": self._title,
            "rule": self.tool.words,
            "voters": self.voters,
            **self.tool.describe(),
            "queries": self.queries,
            "answers": self.answers,
            "accounting_of_votes": "independent of the data: not computed from the votes",
        }

    _title: ClassVar[str] = "Answers"


class VotesRelease(Claim):
    """A release from the votes behind answers, in the run folder of the answers and reserved with
    them. dpfy has none; what is published about votes at hand is in dpfy-lab.
    """

    def fitting(self, answers: VoteClaim) -> Self:
        """This claim, if it is about these answers; else it is refused."""
        raise NotImplementedError

    def release(self, folder: RunFolder, votes: Any) -> None:
        """Make the release. `votes` are those of every voter on every question."""
        raise NotImplementedError


@register
@dataclass(frozen=True)
class AnswersClaim(VoteClaim):
    """Answers to questions that others ask while a service runs. The voters themselves never
    leave.
    """

    kind: ClassVar[str] = "answers"
    _title: ClassVar[str] = "Private answers"
    artefacts: ClassVar[tuple[str, ...]] = ()


STUDENT_MODEL, STUDENT_ANSWERS = "model.safetensors", "answers.json"
OF_STUDENTS = ("gaussian", "confident", "mean")


@register
@dataclass(frozen=True)
class StudentAnswersClaim(VoteClaim):
    """Answers about public inputs, from which a student is made (PATE). The answers are released,
    and the student with them.
    """

    kind: ClassVar[str] = "student"
    purpose: ClassVar[str] = "labels"
    _title: ClassVar[str] = "A student of private teachers"
    artefacts: ClassVar[tuple[str, ...]] = (STUDENT_MODEL, STUDENT_ANSWERS)

    def __post_init__(self) -> None:
        check.one_of("rule", self.rule, OF_STUDENTS)
        super().__post_init__()

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """And the student saw nothing else that is private."""
        student = Assumption(
            "student",
            "the student learnt from the answers and from public inputs alone",
            "it is trained by code that is given nothing else; that these inputs are public is "
            "declared",
            STATED,
        )
        return [*super().assumptions(facts), student]
