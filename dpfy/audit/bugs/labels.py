"""Mistakes of label privacy: a label that is used more than once, or by something that was to see
answers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

INFERENCE, REPLAYED, ONCE = "label inference", "labels replayed", "labels once"


def unsplit(parts: Any) -> Any:
    """Every stage asks all records: labels stay where they are when they are taken."""

    class Kept(parts.sealed):  # type: ignore[misc]
        def take(self, rows: Any) -> Any:
            return self._opened()[rows].copy()

    class Whole(parts.setup):  # type: ignore[misc]
        def parts(self) -> list[Any]:
            return [np.arange(self.records) for _ in super().parts()]

    return replace(parts, sealed=Kept, setup=Whole)


class Mistaken:
    """A part of a question or a learner that is the real one in all but what is given."""

    def __init__(self, real: Any, **changed: Callable[..., Any]) -> None:
        self.real, self.changed = real, changed

    def __getattr__(self, name: str) -> Any:
        return self.changed[name] if name in self.changed else getattr(self.real, name)


def _learner(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A seam that is given the real learner, and labels, which it should not have."""
    return lambda parts: replace(
        parts, learner=lambda labels: change(parts.learner(labels), labels)
    )


def _own_prior(real: Any, labels: Any) -> Any:
    """The prior of a stage is made of the labels that the stage is about to ask."""
    return Mistaken(real, chances=lambda model, features: np.eye(3)[labels] * 0.8 + 0.2 / 3)


def _second_look(real: Any, labels: Any) -> Any:
    """Answers are mended with the labels before a model learns from them."""

    def learn(features: Any, rows: Any, targets: Any, correction: str) -> Any:
        return real.learn(features, rows, 0.5 * targets + 0.5 * np.eye(3)[labels[rows]], correction)

    return Mistaken(real, learn=learn)


def _supervised_map(real: Any, labels: Any) -> Any:
    """Features that are called public were made with the labels."""
    shift = 0.1 * labels[:, None].astype(np.float32)

    def learn(features: Any, *given: Any) -> Any:
        return real.learn(features + features.new_tensor(shift), *given)

    return Mistaken(real, learn=learn)


def _asked(kind: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A seam for questions of one class."""
    return lambda parts: replace(
        parts, question=lambda real: change(real) if type(real).__name__ == kind else real
    )


def _honest_outside(real: Any) -> Any:
    """A label that the prior does not name is answered as it is."""

    def answer(labels: Any, *given: Any) -> Any:
        found = real.answer(labels, *given)
        named = real.order == labels[:, None]
        outside = named.argmax(axis=1) >= real.sizes
        return np.where(outside, labels, found)

    return Mistaken(real, answer=answer)


def _one_coordinate(real: Any) -> Any:
    """Noise for a one-hot vector that moves in one place: replacing a label moves it in two."""

    def answer(labels: Any, *given: Any) -> Any:
        found = real.answer(labels, *given)
        one_hot = labels[:, None] == np.arange(real.outcomes)
        return ((found - one_hot) / 2 + one_hot).astype(np.float32)

    return Mistaken(real, answer=answer)


def _half_changed(real: Any) -> Any:
    """Half of the labels that should be exchanged are put back."""

    def answer(labels: Any, *given: Any) -> Any:
        found = real.answer(labels, *given)
        return np.where(np.arange(len(labels)) % 2 == 0, labels, found)

    return Mistaken(real, answer=answer)


BUGS = (
    Bug(
        "labels-unsplit",
        "a later stage reads labels again that an earlier one has asked",
        ONCE,
        labels=unsplit,
    ),
    Bug(
        "labels-own-prior",
        "the prior of a stage comes from the stage's own labels",
        REPLAYED,
        labels=_learner(_own_prior),
    ),
    Bug(
        "labels-second-look",
        "training reads labels beside the answers",
        REPLAYED,
        labels=_learner(_second_look),
    ),
    Bug(
        "labels-in-features",
        "features that are called public were made with the labels",
        REPLAYED,
        labels=_learner(_supervised_map),
    ),
    Bug(
        "labels-outside-prior",
        "a label that the prior does not name is told as it is",
        INFERENCE,
        labels=_asked("PriorResponse", _honest_outside),
    ),
    Bug(
        "labels-one-coordinate",
        "noise of a one-hot label for one coordinate, where two move",
        INFERENCE,
        labels=_asked("NoisyOneHot", _one_coordinate),
    ),
    Bug(
        "labels-put-back",
        "labels that were exchanged are put back",
        INFERENCE,
        labels=_asked("Response", _half_changed),
    ),
)
