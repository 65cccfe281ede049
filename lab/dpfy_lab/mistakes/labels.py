"""Mistakes of label privacy: a label that is used more than once, or by something that was to see
answers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpfy_lab.checks.labels import INFERENCE, ONCE, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

HOME = "dpfy.labels"
LEARNER, QUESTIONS = f"{HOME}.learners.KernelLearner", f"{HOME}.questions"


@mistake("labels-unsplit", "a later stage reads labels again that an earlier one has asked", ONCE)
def _(patch: Patch) -> None:
    def take(real: Any, self: Any, rows: Any) -> Any:
        return self._opened()[rows].copy()

    def parts(real: Any, self: Any) -> Any:
        return [np.arange(self.records) for _ in real(self)]

    patch.around(f"{HOME}.questions.SealedLabels.take", take)
    patch.around(f"{HOME}.learning.LabelSetup.parts", parts)


def learner(name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """A method of the learner that is given the private labels too: `change(real, labels, ...)`."""

    def apply(patch: Patch) -> None:
        labels: list[Any] = []

        def sealed(real: Any, self: Any, given: Any, *more: Any) -> None:
            labels[:] = [np.array(given)]
            real(self, given, *more)

        patch.around(f"{HOME}.questions.SealedLabels.__init__", sealed)
        patch.around(f"{LEARNER}.{name}", lambda real, *given: change(real, labels[0], *given))

    return apply


def own_prior(real: Any, labels: Any, self: Any, model: Any, features: Any) -> Any:
    """The prior is made of the labels that the stage is about to ask."""
    return np.eye(3)[labels] * 0.8 + 0.2 / 3


def second_look(
    real: Any, labels: Any, self: Any, features: Any, rows: Any, targets: Any, correction: str
) -> Any:
    """Answers are mended with the labels before a model learns from them."""
    return real(self, features, rows, 0.5 * targets + 0.5 * np.eye(3)[labels[rows]], correction)


def supervised_map(real: Any, labels: Any, self: Any, features: Any, *given: Any) -> Any:
    """Features are shifted by the labels."""
    shift = 0.1 * labels[:, None].astype(np.float32)
    return real(self, features + features.new_tensor(shift), *given)


mistake("labels-own-prior", "the prior of a stage comes from the stage's own labels", REPLAYED)(
    learner("chances", own_prior)
)
mistake("labels-second-look", "training reads labels beside the answers", REPLAYED)(
    learner("learn", second_look)
)
mistake(
    "labels-in-features", "features that are called public were made with the labels", REPLAYED
)(learner("learn", supervised_map))


@mistake(
    "labels-outside-prior",
    "a label that the prior does not name is told as it is",
    INFERENCE,
    f"{QUESTIONS}.PriorResponse.answer",
)
def _(real: Any, self: Any, labels: Any, *given: Any) -> Any:
    found = real(self, labels, *given)
    outside = (self.order == labels[:, None]).argmax(axis=1) >= self.sizes
    return np.where(outside, labels, found)


@mistake(
    "labels-one-coordinate",
    "noise of a one-hot label for one coordinate, where two move",
    INFERENCE,
    f"{QUESTIONS}.NoisyOneHot.answer",
)
def _(real: Any, self: Any, labels: Any, *given: Any) -> Any:
    found = real(self, labels, *given)
    one_hot = labels[:, None] == np.arange(self.outcomes)
    return ((found - one_hot) / 2 + one_hot).astype(np.float32)


@mistake(
    "labels-put-back",
    "labels that were exchanged are put back",
    INFERENCE,
    f"{QUESTIONS}.Response.answer",
)
def _(real: Any, self: Any, labels: Any, *given: Any) -> Any:
    return np.where(np.arange(len(labels)) % 2 == 0, labels, real(self, labels, *given))
