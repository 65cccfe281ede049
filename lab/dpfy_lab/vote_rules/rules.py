"""Rules for private answers whose noise nobody plans: they are stated as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.mechanisms import integers
from dpfy.mechanisms.additive import GaussianMechanism
from dpfy.mechanisms.choice import Exponential, NoisyMax
from dpfy.mechanisms.histogram import laplace_threshold
from dpfy.mechanisms.mechanism import drawable
from dpfy.mechanisms.votes import counted
from dpfy.prediction.rules import (
    ANSWER,
    QUESTION,
    UNSTABLE,
    Ask,
    Counts,
    GaussianVotes,
    PaidReleases,
    Rule,
)


@dataclass(frozen=True)
class SampledVotes(GaussianVotes):
    """Noisy votes of a sample in which each unit is present with probability `rate`, by itself and
    anew for every question.

    Nobody learns who was in it (Zhu, Yu, Chandraker & Wang 2020, for nearest neighbours).
    """

    rate: float
    name: ClassVar[str] = "sampled"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.sampling_rate("rate", check.positive("rate", self.rate))

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """The arg-max on a sample."""
        return {ANSWER: events.PoissonSampled(self.rate, self._argmax.event)}

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The winner among those who were drawn."""
        bits = purse.spend(ANSWER)
        return self._argmax.winner(counted(ask(bits), self.classes), bits)

    @property
    def words(self) -> str:
        """In words."""
        return (
            f"{super().words}, among units of which each takes part with probability "
            f"{self.rate:g}, drawn again for every question"
        )


@dataclass(frozen=True)
class NoisyScores(Rule):
    """The class with the largest score, after Gaussian noise of `noise_multiplier` times what one
    unit moves all scores by.

    For a learner whose predictions hardly depend on any one unit, trained anew for every question
    on a sample at `rate` where that is below 1 (Dwork & Feldman 2018: stability and subsampling in
    place of aggregation).
    """

    noise_multiplier: float
    rate: float
    name: ClassVar[str] = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.sampling_rate("rate", check.positive("rate", self.rate))
        _ = self._noise

    @property
    def _noise(self) -> GaussianMechanism:
        return GaussianMechanism(self.noise_multiplier)

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """All scores with noise; that only the class of the largest leaves is not counted on."""
        return {ANSWER: events.PoissonSampled(self.rate, self._noise.event)}

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The class of the largest noisy score."""
        bits = purse.spend(ANSWER)
        scores = ask(bits)
        laid = self._noise.grid(scores.bound, self.classes).lay(scores)
        grid, counts = laid.value.grid, laid.value.counts
        noise = self._noise.draw(counts.size, self._noise.parameter(grid, laid.bound), bits)
        return int(np.argmax(counts.ravel() + noise))

    @property
    def words(self) -> str:
        """In words."""
        drawn = (
            f", learnt from a sample at rate {self.rate:g} for every question"
            if self.rate < 1
            else ""
        )
        noise = (
            f"Gaussian noise of {self.noise_multiplier:g} times what one unit moves the scores by"
        )
        return f"the class with the largest score{drawn}, with {noise}"


@dataclass(frozen=True)
class LaplaceVotes(Rule):
    """The class with most votes after two-sided geometric noise of scale 2 / `epsilon`: LNMax
    (Papernot et al. 2017).
    """

    epsilon: float
    name: ClassVar[str] = "laplace"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.epsilon("epsilon", self.epsilon)

    @property
    def _choice(self) -> NoisyMax | Exponential:
        return NoisyMax(self.epsilon, noise="laplace")

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """Pure epsilon."""
        return {ANSWER: self._choice.event}

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The winner."""
        counts = counted(ask(None), self.classes)
        return self._choice._index(
            counts, 2, purse.spend(ANSWER)
        )  # one count falls by 1, another rises by 1

    @property
    def words(self) -> str:
        """In words."""
        return (
            f"the class with most votes, each count with two-sided geometric noise of scale "
            f"{2 / self.epsilon:g}"
        )


@dataclass(frozen=True)
class ExponentialVotes(LaplaceVotes):
    """A class with probability proportional to exp(`epsilon` / 2 times its votes): Gumbel noise on
    every count.
    """

    name: ClassVar[str] = "exponential"

    @property
    def _choice(self) -> NoisyMax | Exponential:
        return Exponential(self.epsilon)

    @property
    def words(self) -> str:
        """In words."""
        return f"a class with probability proportional to exp({self.epsilon / 2:g} times its votes)"


@dataclass(frozen=True)
class StableVotes(Rule):
    """The class with most votes itself, where many units would have to change before another one
    had (Bassily, Thakkar & Thakurta 2018).

    Whether the distance to another winner is large enough is asked by the sparse vector technique:
    `unstable` of `questions` may turn out not to be, and are refused; all others are answered
    without noise, and cost nothing more.

    Proof. One unit moves the distance d by at most 1, so that telling on which side of a noisy
    threshold each d with noise lies costs `epsilon` (Lyu, Su & Li 2017: two-sided geometric noise
    of scale 1 / e1 on the threshold and 2 `unstable` / e2 on each d, e1 + e2 = `epsilon`). Where d
    is 0 a neighbour may have another winner. Such a question counts as stable only if the
    threshold's noise is -w1 or less, or its own w2 or more. The chance that one of these happens,
    over all questions, is at most `delta_used`. Else all winners that are told are those of the
    neighbour too.
    """

    epsilon: float
    delta_used: float
    questions: int
    unstable: int
    name: ClassVar[str] = "stable"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.epsilon("epsilon", self.epsilon)
        check.delta("delta_used", self.delta_used)
        check.integer("questions", self.questions, most=1 << 32)
        check.integer("unstable", self.unstable, most=1 << 20)
        for part in self._split:
            drawable("epsilon", self.epsilon, 1 / part)

    @property
    def _split(self) -> tuple[Fraction, Fraction]:
        """The rates of the noise of the threshold and of a question, by the ratio of least
        variance.
        """
        first = Fraction(self.epsilon) * Fraction(1 / (1 + (2 * self.unstable) ** (2 / 3)))
        return first, (Fraction(self.epsilon) - first) / (2 * self.unstable)

    @property
    def threshold(self) -> int:
        """The distance from which on a question counts as stable, before noise."""
        first, second = self._split
        half = Fraction(self.delta_used) / 2
        return laplace_threshold(first, half) + laplace_threshold(second, half / self.questions)

    @property
    def kinds(self) -> Mapping[str, events.Event]:
        """Questions, and those that turn out to be unstable; the bill is one for all of them."""
        return {QUESTION: events.Nothing(), UNSTABLE: events.Nothing()}

    def bill(self, most: Mapping[str, int]) -> events.Event:
        """One for the whole stream, which may not be longer than the rule says."""
        if most[QUESTION] > self.questions or most[UNSTABLE] > self.unstable:
            raise InvalidInput(
                "questions",
                dict(most),
                f"must be at most {self.questions}, {self.unstable} of them unstable",
            )
        return events.EpsilonDelta(self.epsilon, self.delta_used)

    def answer(self, ask: Ask, purse: PaidReleases) -> int | None:
        """The winner, if it is far from changing."""
        counts = counted(ask(None), self.classes)
        purse.need(QUESTION, UNSTABLE)
        first, second = self._split
        bar = self.threshold + int(integers.laplace(1, 1 / first, purse.same("threshold"))[0])
        if stability(counts) + int(integers.laplace(1, 1 / second, purse.spend(QUESTION))[0]) > bar:
            return int(counts.argmax())
        purse.spend(UNSTABLE)
        return None

    @property
    def words(self) -> str:
        """In words."""
        return (
            f"the class with most votes, where by the sparse vector technique {self.threshold} "
            f"units or so would have to change for "
            f"another; {self.unstable} questions may be refused"
        )


def stability(counts: Counts) -> int:
    """How many units may change before one more can change which class has most votes: each changes
    the lead by 2 at most.
    """
    first, second = np.sort(counts)[::-1][:2]
    return max(0, math.ceil((int(first) - int(second)) / 2) - 1)
