"""A way to release labels and to learn from the answers, as one value; and the claim it makes.

What answers say about labels: for each record, how likely its answer is under each class. All of
it is post-processing.

Every way of answering becomes one table, likelihood[i, y] = P(answer of i | label y), up to a
factor for each row. What a model is trained on follows from the table alone:

- plain: the likeliest class, as if it were the label;
- backward: targets that equal the one-hot label in the mean, so that every loss that is linear in
  its target is unbiased (Natarajan et al. 2013; Patrini et al. 2017, backward correction). They may
  be negative. For randomized response over all classes;
- posterior: Bayes' rule with a prior, equal chances or those of a model (Malek Esmaeili et al.
  2021);
- forward: the loss is that of the answer under the model, -log sum over y of likelihood[i, y] p(y |
  x) (Patrini et al. 2017, forward).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.accounting import calibrate
from dpfy.core import check, events
from dpfy.core.check import interval
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency
from dpfy.labels.claim import (
    ALIBI,
    BINS,
    CLUSTERS,
    GAUSSIAN,
    LP_MST,
    METHODS,
    PATE_FM,
    PROJECTION,
    RR,
    LabelClaim,
    LabelResponses,
    LabelSums,
)
from dpfy.labels.questions import NoisyOneHot, PriorResponse, Response

Reals = NDArray[np.float64]
PLAIN, BACKWARD, POSTERIOR, FORWARD = CORRECTIONS = ("plain", "backward", "posterior", "forward")


@dataclass(frozen=True)
class LabelLikelihood:
    """The table of likelihoods; `unbiased` targets where there are any."""

    likelihood: Reals
    unbiased: Reals | None = None

    @property
    def classes(self) -> int:
        """How many columns."""
        return self.likelihood.shape[1]

    def posterior(self, prior: Reals) -> Reals:
        """P(label | answer) for a prior, one for all or one a record."""
        joint = self.likelihood * np.maximum(prior, 1e-9)
        return np.asarray(joint / joint.sum(axis=1, keepdims=True))

    def targets(self, correction: str, prior: Reals | None = None) -> Reals:
        """What a loss is taken to; under `forward` the likelihoods themselves."""
        if check.one_of("correction", correction, CORRECTIONS) == FORWARD:
            return self.likelihood
        if correction == PLAIN:
            return np.eye(self.classes)[self.likelihood.argmax(axis=1)]
        if correction == BACKWARD:
            if self.unbiased is None:
                raise Unsupported(
                    "backward correction of answers other than randomized response",
                    "use posterior or forward",
                )
            return self.unbiased
        return self.posterior(np.full(self.classes, 1 / self.classes) if prior is None else prior)


def of_responses(question: Response, answers: NDArray[np.int64]) -> LabelLikelihood:
    """Of randomized response over all outcomes."""
    changed, said = question.mechanism.noise_parameter, np.eye(question.outcomes)[answers]
    likelihood = (1 - changed) * said + changed / question.outcomes
    return LabelLikelihood(
        likelihood, (said - changed / question.outcomes) / (1 - changed) if changed < 1 else None
    )


def of_prior_responses(question: PriorResponse, answers: NDArray[np.int64]) -> LabelLikelihood:
    """Of randomized response among the first outcomes of a prior: what lies outside of them is as
    likely as 1 / k.
    """
    outcomes = question.order.shape[1]
    named = np.zeros((len(answers), outcomes), np.bool_)
    place = np.arange(outcomes)[None, :] < question.sizes[:, None]
    np.put_along_axis(named, question.order.astype(np.int64), place, axis=1)
    size = question.sizes[:, None].astype(np.float64)
    grown = math.exp(min(question.epsilon, 700.0))
    said = np.arange(outcomes)[None, :] == answers[:, None]
    return LabelLikelihood(
        np.where(named, np.where(said, grown, 1.0) / (grown + size - 1), 1 / size)
    )


def of_noisy_one_hot(question: NoisyOneHot, answers: NDArray[np.float32]) -> LabelLikelihood:
    """Of Laplace noise on one-hot labels: exp(-|answer - one-hot|_1 / scale)."""
    scale = question.mechanism.noise_multiplier
    told = answers.astype(np.float64)
    gain = (np.abs(told) - np.abs(told - 1)) / scale
    return LabelLikelihood(np.exp(gain - gain.max(axis=1, keepdims=True)))


def joined(
    parts: list[LabelLikelihood], rows: list[NDArray[np.int64]]
) -> tuple[LabelLikelihood, NDArray[np.int64]]:
    """Evidence of several questions as one, with the records it is about."""
    unbiased = [part.unbiased for part in parts if part.unbiased is not None]
    whole = np.concatenate(unbiased) if len(unbiased) == len(parts) else None
    return LabelLikelihood(
        np.concatenate([part.likelihood for part in parts]), whole
    ), np.concatenate(rows)


STEPS = 256
"""Of the grid on which numbers are read."""
READS: Mapping[str, tuple[str, ...]] = {
    RR: ("correction", "rounds"),
    LP_MST: ("stages", "correction", "rounds"),
    ALIBI: ("correction", "rounds"),
    BINS: ("stages", "span"),
    CLUSTERS: ("clusters",),
    PROJECTION: (),
    PATE_FM: ("teachers", "asked", "rounds"),
}
"""Which fields each method reads. A field set for a method that ignores it is an error."""
AUTO = "auto"


@dataclass(frozen=True)
class LabelMethod:
    """How labels are released, and how answers are read.

    `stages`: parts of the records that are asked one after the other, the later ones with a prior
    from the earlier. `correction`: what is made of noisy labels (`dpfy.labels.method`); auto is
    unbiased targets for randomized response and Bayes' rule for others. `rounds`: how often the
    model is learnt, each time with the prior of the one before (iterative ALIBI). `clusters`: of
    the features. `span`: the public least and largest number, for labels that are numbers.
    `teachers` share the labels, and vote on `asked` records; what is not given follows from public
    numbers.
    """

    name: str = PROJECTION
    stages: int | None = None
    correction: str = AUTO
    rounds: int = 1
    clusters: int = 256
    span: tuple[float, float] | None = None
    teachers: int | None = None
    asked: int | None = None

    def __post_init__(self) -> None:
        check.one_of("method", self.name, METHODS)
        if self.stages is not None:
            check.integer("stages", self.stages)
        for name, least in (("teachers", 2), ("asked", 1)):
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name), least=least, most=1 << 20)
        check.one_of("correction", self.correction, (AUTO, *CORRECTIONS))
        check.integer("rounds", self.rounds, most=100)
        check.integer("clusters", self.clusters, most=1 << 16)
        for name, field in self.__dataclass_fields__.items():
            if name not in ("name", *READS[self.name]) and getattr(self, name) != field.default:
                known = ", ".join(READS[self.name]) or "no other field"
                raise InvalidInput(
                    name, getattr(self, name), f"{self.name} does not read it (it reads: {known})"
                )
        if self.name == BINS:
            if self.span is None:
                raise InvalidInput(
                    "span",
                    None,
                    "must be given for rr-on-bins: the public least and largest label, as (low, "
                    "high)",
                )
            object.__setattr__(self, "span", interval("span", self.span))

    @classmethod
    def of(cls, given: LabelMethod | str) -> LabelMethod:
        """A method, or one by its name."""
        return (
            given if isinstance(given, LabelMethod) else cls(check.one_of("method", given, METHODS))
        )

    @property
    def parts(self) -> int:
        """How many stages: two, where nothing is said and there can be more than one."""
        return self.stages or (2 if self.name in (LP_MST, BINS) else 1)

    @property
    def corrected(self) -> str:
        """The correction that is meant."""
        if self.correction != AUTO:
            return self.correction
        return BACKWARD if self.name == RR and self.rounds == 1 else POSTERIOR

    def claim(self, records: int, classes: int, epsilon: float, delta: float) -> LabelClaim:
        """What is promised for labels of so many records: pure epsilon, but for Gaussian sums,
        which take delta.
        """
        check.epsilon("epsilon", epsilon)
        outcomes = STEPS if self.name == BINS else classes
        for name in ("teachers", "asked"):
            if (getattr(self, name) or 0) > records:
                raise InvalidInput(
                    name, getattr(self, name), f"must be at most the number of records ({records})"
                )
        if self.name in GAUSSIAN:
            check.delta("delta", delta)
            noise = calibrate.noise(
                events.Gaussian, epsilon, delta, adjacency=Adjacency.REPLACE_ONE
            )
            return LabelSums(
                self.name,
                outcomes,
                noise_multiplier=noise,
                delta=delta,
                accountant="tight",
                records=records,
            )
        kind = LabelSums if self.name == CLUSTERS else LabelResponses
        return kind(self.name, outcomes, self.parts, epsilon=epsilon, records=records)

    def told(self) -> dict[str, Any]:
        """Its settings, for the report: those that it reads."""
        found: dict[str, Any] = {name: getattr(self, name) for name in READS[self.name]}
        found |= {"correction": self.corrected} if "correction" in found else {}
        found |= {"span": list(self.span)} if self.span is not None else {}
        return {key: value for key, value in found.items() if key != "stages"}
