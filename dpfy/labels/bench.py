"""Releases of labels as the self-test of the audit sees them, with parts that a mistake may
replace; and the label-inference audit.

Labels are drawn by fair coins between two classes. Whoever attacks sees every answer, knows the law
of each, and guesses the coins.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.labels import evidence
from dpfy.labels.asking import LabelQuestions
from dpfy.labels.claim import ALIBI, LP_MST, PATE_FM, PROJECTION, RR
from dpfy.labels.kernel import KernelSettings
from dpfy.labels.learners import KernelLearner, Learner
from dpfy.labels.learning import LabelSetup, learn
from dpfy.labels.method import LabelMethod
from dpfy.labels.questions import NoisyOneHot, PriorResponse, Question, Response
from dpfy.labels.sealed import SealedLabels, Values
from dpfy.runs.folder import Place, RunFolder

Reals = NDArray[np.float64]
Outcomes = NDArray[np.int64]
CLASSES, RECORDS, FEW = 3, 12_000, 300
SMALL = KernelSettings(near=4, wide=4, landmarks=40, directions=30)
METHODS = {name: LabelMethod(name) for name in (RR, LP_MST, ALIBI)}
LAWS: dict[type[Question], Callable[[Any, Any], evidence.LabelLikelihood]] = {
    Response: evidence.of_responses,
    PriorResponse: evidence.of_prior_responses,
    NoisyOneHot: evidence.of_noisy_one_hot,
}
"""How an attacker reads the answers to a question."""


@dataclass(frozen=True)
class Parts:
    """What a mistake may replace: where labels lie, what learns (a mistake may give it labels), how
    questions are set up and asked.
    """

    sealed: type[SealedLabels] = SealedLabels
    learner: Callable[[Values], Learner] = lambda labels: KernelLearner(SMALL)
    setup: type[LabelSetup] = LabelSetup
    question: Callable[[Question], Question] = lambda question: question


Asked = list[tuple[Question, NDArray[Any]]]


def features(records: int) -> Tensor:
    """Public ones, which tell nothing about coins."""
    return torch.randn(records, 4, generator=torch.Generator().manual_seed(0))


def run(
    parts: Parts, method: LabelMethod, labels: Values, epsilon: float, replayed: Asked | None = None
) -> tuple[nn.Module, Asked]:
    """A fit as it is, or with a mistake: its model, and what was asked and answered. With
    `replayed`, those answers are given.
    """
    claim = method.claim(len(labels), CLASSES, epsilon, 1e-5)
    with (
        tempfile.TemporaryDirectory(prefix="dpfy-labels-") as place,
        RunFolder(Place(Path(place) / "run", seed=5), claim) as folder,
    ):
        asking, asked = (
            LabelQuestions(folder, claim, parts.sealed(labels, len(labels), CLASSES)),
            Asked(),
        )

        def ask(question: Question) -> NDArray[Any]:
            answers = (
                asking(parts.question(question)) if replayed is None else replayed[len(asked)][1]
            )
            asked.append((question, answers))
            return answers

        with torch.no_grad():
            model = learn(
                parts.setup(claim, method, features(len(labels)), parts.learner(labels)), ask
            )
        folder.begin(claim.name)
    return model, asked


def coins(records: int, seed: int = 7) -> Values:
    """Labels, 0 or 1."""
    return np.random.default_rng(seed).integers(0, 2, records).astype(np.int64)


def log_likelihoods(asked: Asked, records: int) -> Reals:
    """For each record, how much likelier all its answers together are under class 1 than under
    class 0.
    """
    found = np.zeros(records)
    for question, answers in asked:
        table = np.maximum(LAWS[type(question)](question, answers).likelihood, 1e-300)
        found[question.rows] += np.log(table[:, 1] / table[:, 0])
    return found


def label_answers(
    change: Callable[[Any], Any], epsilon: float = 1.0
) -> Iterator[tuple[str, float, Outcomes, Outcomes]]:
    """For each way to answer for single labels: its name, epsilon, and what an attacker sees of
    labels of class 0, and of class 1.
    """
    labels = coins(RECORDS)
    for name, method in METHODS.items():
        _, asked = run(change(Parts()), method, labels, epsilon)
        seen = np.rint(4 * log_likelihoods(asked, RECORDS) / epsilon).astype(np.int64)
        yield name, epsilon, seen[labels == 0], seen[labels == 1]
    said = _with_prior(change(Parts()), labels, epsilon)
    yield "randomized response with a prior", epsilon, said[labels == 0], said[labels == 1]


def _with_prior(parts: Parts, labels: Values, epsilon: float) -> Outcomes:
    """Answers among classes 0 and 2, where half of the labels are 1."""
    claim = LabelMethod(LP_MST, stages=1).claim(len(labels), CLASSES, epsilon, 1e-5)
    order = np.tile(np.array([0, 2, 1], np.int16), (len(labels), 1))
    question = PriorResponse(
        np.arange(len(labels)), epsilon, order, np.full(len(labels), 2, np.int16)
    )
    with (
        tempfile.TemporaryDirectory(prefix="dpfy-labels-") as place,
        RunFolder(Place(Path(place) / "run", seed=6), claim) as folder,
    ):
        return np.asarray(
            LabelQuestions(folder, claim, parts.sealed(labels, len(labels), CLASSES))(
                parts.question(question)
            ),
            np.int64,
        )


def labels_replayed(change: Callable[[Any], Any]) -> Iterator[tuple[str, bool, bool]]:
    """For each method, with the answers of one set of labels replayed on another: the same
    questions? the same model?
    """
    one = coins(FEW)
    for name, method in (
        METHODS | {name: LabelMethod(name) for name in (PROJECTION, PATE_FM)}
    ).items():
        models, asked = [], list[Asked]()
        for labels in (one, 1 - one):
            model, seen = run(change(Parts()), method, labels, 3.0, asked[0] if asked else None)
            models.append(model)
            asked.append(seen)
        pairs = zip(*(model.state_dict().values() for model in models), strict=True)
        same = [[question.public() for question, _ in seen] for seen in asked]
        yield name, same[0] == same[1], all(torch.equal(a, b) for a, b in pairs)


def labels_asked(change: Callable[[Any], Any]) -> Iterator[tuple[str, int]]:
    """For each method, in how many questions a label took part at most."""
    for name, method in METHODS.items():
        _, asked = run(change(Parts()), method, coins(FEW), 1.0)
        yield name, int(np.bincount(np.concatenate([question.rows for question, _ in asked])).max())


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
    _, asked = run(Parts(), method, labels, epsilon)
    return log_likelihoods(asked, records), labels.astype(np.bool_)
