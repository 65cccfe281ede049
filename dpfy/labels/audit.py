"""The label-inference audit: labels are drawn by fair coins between two classes, and anyone who sees every
answer, and knows how it was drawn, guesses the coins.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.labels.claim import ALIBI, LP_MST, RR
from dpfy.labels.kernel import KernelSettings
from dpfy.labels.learners import KernelLearner
from dpfy.labels.learning import LabelQuestions, LabelSetup, learn
from dpfy.labels.method import (
    LabelLikelihood,
    LabelMethod,
    of_noisy_one_hot,
    of_prior_responses,
    of_responses,
)
from dpfy.labels.questions import (
    NoisyOneHot,
    PriorResponse,
    Question,
    Response,
    SealedLabels,
    Values,
)
from dpfy.runs.folder import RunFolder
from dpfy.runs.run import Run

Reals = NDArray[np.float64]
Asked = list[tuple[Question, NDArray[Any]]]
"""What was asked, and answered."""
CLASSES = 3
SMALL = KernelSettings(near=4, wide=4, landmarks=40, directions=30)
METHODS = {name: LabelMethod(name) for name in (RR, LP_MST, ALIBI)}
"""Those that answer for single labels."""
LAWS: dict[type[Question], Callable[[Any, Any], LabelLikelihood]] = {
    Response: of_responses,
    PriorResponse: of_prior_responses,
    NoisyOneHot: of_noisy_one_hot,
}
"""How an attacker reads the answers to a question."""


def features(records: int) -> Tensor:
    """Public ones, which tell nothing about coins."""
    return torch.randn(records, 4, generator=torch.Generator().manual_seed(0))


def coins(records: int, seed: int = 7) -> Values:
    """Labels, 0 or 1."""
    return np.random.default_rng(seed).integers(0, 2, records).astype(np.int64)


def answered(
    method: LabelMethod, labels: Values, epsilon: float, replayed: Asked | None = None
) -> tuple[nn.Module, Asked]:
    """A fit on these labels: its model, and what was asked and answered. With `replayed`, those
    answers are given instead of fresh ones.
    """
    claim = method.claim(len(labels), CLASSES, epsilon, 1e-5)
    with (
        tempfile.TemporaryDirectory(prefix="dpfy-labels-") as place,
        RunFolder(Run(Path(place) / "run", seed=5), claim) as folder,
    ):
        asking, asked = (
            LabelQuestions(folder, claim, SealedLabels(labels, len(labels), CLASSES)),
            Asked(),
        )

        def ask(question: Question) -> NDArray[Any]:
            answers = asking(question) if replayed is None else replayed[len(asked)][1]
            asked.append((question, answers))
            return answers

        with torch.no_grad():
            model = learn(
                LabelSetup(claim, method, features(len(labels)), KernelLearner(SMALL)), ask
            )
        folder.begin(claim.name)
    return model, asked


def log_likelihoods(asked: Asked, records: int) -> Reals:
    """For each record, how much likelier all its answers together are under class 1 than under
    class 0.
    """
    found = np.zeros(records)
    for question, answers in asked:
        table = np.maximum(LAWS[type(question)](question, answers).likelihood, 1e-300)
        found[question.rows] += np.log(table[:, 1] / table[:, 0])
    return found


def inferred(
    method: LabelMethod, epsilon: float, records: int, seed: int
) -> tuple[Reals, NDArray[np.bool_]]:
    """Scores for the coins of so many labels, from the answers of one run; and the coins."""
    if method.name not in METHODS:
        raise Unsupported(
            f"a label-inference audit of {method.name}",
            f"audit {', '.join(METHODS)}, which answer for single labels",
        )
    labels = coins(records, seed)
    _, asked = answered(method, labels, epsilon)
    return log_likelihoods(asked, records), labels.astype(np.bool_)
