"""Where labels and questions meet: the one place that holds labels, once, under the permit of their
claim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.labels.claim import ANSWERS, LabelClaim
from dpfy.labels.questions import Question
from dpfy.labels.sealed import SealedLabels
from dpfy.runs.folder import RunFolder

Ask = Callable[[Question], NDArray[Any]]
"""All that a method is given of labels: a question in, its answers out."""


class LabelQuestions:
    """Asks the labels of an opened run what its claim allows, and keeps the answers in its folder.

    Guarantees: a question costs what the claim reserved for it, or is refused before a label is
    read. Each label answers one question, once; answers that the folder holds already, after a
    crash, are taken from there, and their labels are not read again. What the noise of a step meets
    is bound before it is made.
    """

    def __init__(self, folder: RunFolder, claim: LabelClaim, labels: SealedLabels) -> None:
        self._folder, self.claim, self._labels = folder, claim, labels
        self.asked = 0
        self._held = self._found()

    def __call__(self, question: Question) -> NDArray[Any]:
        """The answers to the next question."""
        step, name = self.asked, self.claim.name
        if step >= self.claim.releases:
            raise InvalidInput(
                "question", step + 1, f"is one more than was reserved ({self.claim.releases})"
            )
        if question.event != self.claim.event:
            raise InvalidInput(
                "question",
                repr(question.event),
                f"must cost what was reserved, {self.claim.event!r}",
            )
        self.asked = step + 1
        if f"answers.{step}" in self._held:
            if not np.array_equal(self._held[f"rows.{step}"], question.rows):
                raise InvalidInput(
                    "resume labels",
                    f"question {step + 1}",
                    "must be asked of the records it was asked of before",
                )
            return self._held[f"answers.{step}"]
        labels = self._labels.take(question.rows)
        self._folder.bind(f"{name} {step}", question.public() + labels.tobytes())
        permit = self._folder.begin(name)
        found = np.ascontiguousarray(question.answer(labels, permit, self._folder.randomness, step))
        self._held |= {
            f"answers.{step}": found,
            f"rows.{step}": np.ascontiguousarray(question.rows),
        }
        self._folder.write(ANSWERS, save(self._held))
        return found

    def _found(self) -> dict[str, NDArray[Any]]:
        """What was answered before a crash."""
        file = self._folder.path / ANSWERS
        if not file.is_file():
            return {}
        try:
            return dict(load(storage.content(ANSWERS, file, most=storage.MOST_DATA)))
        except InvalidInput:
            raise
        except Exception:  # the reader raises types of its own
            raise Corrupt(ANSWERS, "does not hold answers: the run cannot be resumed") from None
