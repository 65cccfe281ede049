"""What answers say about labels: for each record, how likely its answer is under each class. All of
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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import Unsupported
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
