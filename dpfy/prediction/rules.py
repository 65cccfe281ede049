"""How votes become an answer: which releases a question may make, what each is charged, and what
leaves.

A rule is public and holds no data. It is given the votes on one question, of which one unit moves
one, and a purse, from which it spends what was paid for: the random bits of one release of a kind.
Where none of that kind is left the purse fails. What a rule returns is all that leaves. Votes come
from a function of these bits, since some are those of a sample that is drawn again for every
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
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound, Bounded
from dpfy.mechanisms.additive import GaussianMechanism
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
    order, with what each is charged.
    """

    classes: int
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check.integer("classes", self.classes, least=2, most=1 << 20)

    @property
    @abstractmethod
    def kinds(self) -> Mapping[str, events.Event]:
        """One release of each kind."""

    def says(self, answer: int) -> Any:
        """What an answer stands for: the class itself."""
        return answer

    def describe(self) -> dict[str, Any]:
        """What an answer may be, for the report."""
        return {"classes": self.classes}

    @abstractmethod
    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The class that is answered, or None where the voters do not agree enough.

        Guarantees: every release is spent before its noise is drawn, and only the answer
        depends on the votes.
        """

    @property
    @abstractmethod
    def words(self) -> str:
        """The rule in words, for the report."""

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


@dataclass(frozen=True)
class NoisyMean(Rule):
    """The mean of the numbers that `voters` say, with Gaussian noise of `sigma` times what one of
    them can move their sum by.

    Numbers are places on a public grid of `classes` points from `low` to `high`, and so is the
    answer.
    """

    voters: int
    sigma: float
    low: float
    high: float
    name: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.interval("low, high", [self.low, self.high])
        _ = self._noise

    @property
    def _noise(self) -> GaussianMechanism:
        return GaussianMechanism(self.sigma)

    @property
    def moved(self) -> Bound:
        """What one voter does to the sum of places: from one end of the grid to the other."""
        return Bound.scalar(float(self.classes - 1))

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """One noisy sum."""
        return {ANSWER: self._noise.event}

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The place of the noisy mean."""
        total = ask(None)
        if total.bound.finite("l2", "a mean of numbers") > self.moved.l2:
            rule = f"must be at most {self.moved.l2:g}: one voter moves one number"
            raise InvalidInput("bound.l2", total.bound.l2, rule)
        bits, noise = purse.spend(ANSWER), self._noise
        laid = noise.grid(self.moved).lay(Bounded(np.asarray([total.value]), self.moved))
        grid = laid.value.grid
        drawn = noise.draw(1, noise.parameter(grid, laid.bound), bits)
        mean = float(grid.values(laid.value.counts + drawn)[0]) / self.voters
        return round(min(max(mean, 0.0), self.classes - 1.0))

    def says(self, answer: int) -> float:
        """The number at a place of the grid."""
        return self.low + (self.high - self.low) * answer / (self.classes - 1)

    def describe(self) -> dict[str, Any]:
        """The range of the numbers, and the points of its grid."""
        return {"low": self.low, "high": self.high, "points": self.classes}

    @property
    def words(self) -> str:
        """In words."""
        return (
            f"the mean of the voters' numbers from {self.low:g} to {self.high:g}; their sum has "
            f"Gaussian noise of {self.sigma:g} times this range"
        )


RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (GaussianVotes, ConfidentVotes, NoisyMean)
}
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
