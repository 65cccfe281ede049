"""How votes become an answer: which releases a question may make, what each is billed, and what
leaves.

A rule is public and holds no data. It is given the votes on one question, of which one unit moves
one, and a purse, from which it spends what was paid for: the random bits of one release of a kind.
Where none of that kind is left the purse fails. What a rule returns is all that leaves. Votes come
from a function of these bits, since some are those of a sample that is drawn anew for every
release.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events, plugins
from dpfy.core.values import Bounded
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.votes import MOVED, GaussianArgmax, GaussianThreshold, counted

ANSWER, CHECK, QUESTION, UNSTABLE = "answer", "check", "question", "unstable"
Counts = NDArray[np.int64]


Ask = Callable[[Bits | None], Bounded[Any]]
"""The votes (or scores) on one question. They depend on the bits of a release only where each has a
sample of its own.
"""


class PaidReleases(Protocol):
    """What was paid for."""

    def spend(self, kind: str) -> Bits:
        """The random bits of one more release of a kind, which is spent from now on;
        `BudgetExceeded` where none is left.
        """

    def need(self, *kinds: str) -> None:
        """`BudgetExceeded` where none is left of one of these kinds."""

    def same(self, name: str) -> Bits:
        """The random bits of what is drawn once for all questions: the same whenever they are asked
        for.
        """


@dataclass(frozen=True)
class Rule(ABC):
    """From the votes on one question to an answer. `kinds` are the releases that it makes, in their
    order, with what each is billed.
    """

    classes: int
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check.integer("classes", self.classes, least=2, most=1 << 20)

    @property
    @abstractmethod
    def kinds(self) -> Mapping[str, events.Event]:
        """One release of each kind."""

    @abstractmethod
    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The class that is answered, or None where the voters do not agree enough.

        Guarantees: every release is spent before its noise is drawn, and nothing but the answer
        depends on the votes.
        """

    @property
    @abstractmethod
    def words(self) -> str:
        """The rule in words, for the card."""

    def bill(self, most: Mapping[str, int]) -> events.Event:
        """What so many releases of each kind cost together, however the questions are chosen."""
        return events.Composed(
            tuple(events.Repeated(event, most[kind]) for kind, event in self.kinds.items())
        )


@dataclass(frozen=True)
class GaussianVotes(Rule):
    """The class with most votes after Gaussian noise of `sigma` votes on each count: GNMax
    (Papernot et al. 2018).
    """

    sigma: float
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._argmax

    @property
    def _argmax(self) -> GaussianArgmax:
        return GaussianArgmax(self.sigma, self.classes)

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """The arg-max alone."""
        return {ANSWER: self._argmax.event}

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The winner."""
        counts = counted(ask(None), self.classes)
        return self._argmax.winner(counts, purse.spend(ANSWER))

    @property
    def words(self) -> str:
        """In words."""
        return f"the class with most votes, each count with Gaussian noise of {self.sigma:g} votes"


@dataclass(frozen=True)
class ConfidentVotes(GaussianVotes):
    """The same, asked only where the largest count, with Gaussian noise of `check_sigma` votes, is
    above `threshold`: Confident-GNMax.
    """

    check_sigma: float
    threshold: float
    name: ClassVar[str] = "confident"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._check

    @property
    def _check(self) -> GaussianThreshold:
        return GaussianThreshold(self.check_sigma, self.threshold)

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """A check for every question, an arg-max for those that pass."""
        return {CHECK: self._check.event, **super().kinds}

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The winner, if the voters agree enough."""
        counts = counted(ask(None), self.classes)
        purse.need(CHECK, ANSWER)
        if not self._check.above(int(counts.max()), purse.spend(CHECK)):
            return None
        return self._argmax.winner(counts, purse.spend(ANSWER))

    @property
    def words(self) -> str:
        """In words."""
        check = (
            f"where the largest count, with Gaussian noise of {self.check_sigma:g} votes, is above "
            f"{self.threshold:g}"
        )
        return f"{super().words}; {check}, and no answer elsewhere"


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (GaussianVotes, ConfidentVotes)}
"""The rules whose noise `dpfy.prediction.plan` finds. Others are of plug-ins."""
LAB = ("sampled", "laplace", "exponential", "stable", "scores", "mixed")
"""The rules of the distribution dpfy-lab."""


def rule_of(name: str) -> type[Rule]:
    """The rule called `name`, of dpfy or of a plug-in.

    Raises:
        InvalidInput: There is none; the known ones are listed.
        Unsupported: It is one of dpfy-lab, which is not installed.
    """
    found: type[Rule] = plugins.choose(plugins.VOTE_RULES, "rule", name, RULES, LAB)
    return found


def moved(counts: Counts) -> Bounded[Counts]:
    """Votes of voters of whom each unit belongs to one."""
    return Bounded(counts, MOVED)
