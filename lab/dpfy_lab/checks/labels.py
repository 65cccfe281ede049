"""Checks of releases of labels: how well answers tell which of two labels a record has, whether
anything but answers uses labels, and how often.

Statistical ones have a false-alarm rate below 1e-6 each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from dpfy.audit.bounds import log_ratio
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.labels.audit import CLASSES, METHODS, Asked, answered, coins, log_likelihoods
from dpfy.labels.claim import PATE_FM, PROJECTION
from dpfy.labels.method import LabelMethod
from dpfy.labels.questions import PriorResponse, SealedLabels, Values
from dpfy_lab.selftest.mistake import Found, check

RECORDS, FEW, EPSILON = 12_000, 300, 1.0


def _seen(labels: Values) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """For each way to answer for single labels, what an attacker sees of each label."""
    for name, method in METHODS.items():
        _, asked = answered(method, labels, EPSILON)
        told = log_likelihoods(asked, len(labels))
        yield name, np.rint(4 * told / EPSILON).astype(np.int64)
    yield "randomized response with a prior", _with_prior(labels)


def _with_prior(labels: Values) -> NDArray[np.int64]:
    """Answers among classes 0 and 2, where half of the labels are 1."""
    rows = np.arange(len(labels))
    order = np.tile(np.array([0, 2, 1], np.int16), (len(labels), 1))
    question = PriorResponse(rows, EPSILON, order, np.full(len(labels), 2, np.int16))
    taken = SealedLabels(labels, len(labels), CLASSES).take(rows)
    permit = mock_permit(question.event, 1)
    answers = question.answer(taken, permit, Randomness.for_tests(6), 0)
    return np.asarray(answers, np.int64)


@check("label inference")
def INFERENCE() -> Found:
    """Nothing that is seen of a record is more than exp(epsilon) times as likely for one label as
    for another.
    """
    labels = coins(RECORDS)
    for name, seen in _seen(labels):
        if (found := log_ratio(seen[labels == 0], seen[labels == 1])) > EPSILON:
            return (
                f"{name}: answers tell two labels apart with epsilon at least {found:.3f}, claimed "
                f"{EPSILON:g}"
            )
    return None


@check("labels replayed")
def REPLAYED() -> Found:
    """The answers of some labels, replayed on others: what is asked and what is learnt must be the
    same.
    """
    one = coins(FEW)
    for name, method in (
        METHODS | {name: LabelMethod(name) for name in (PROJECTION, PATE_FM)}
    ).items():
        models, asked = [], list[Asked]()
        for labels in (one, 1 - one):
            model, seen = answered(method, labels, 3.0, asked[0] if asked else None)
            models.append(model)
            asked.append(seen)
        first, second = ([question.public() for question, _ in seen] for seen in asked)
        pairs = zip(*(model.state_dict().values() for model in models), strict=True)
        if first != second:
            return f"{name}: what is asked depends on labels, not on answers alone"
        if not all(torch.equal(a, b) for a, b in pairs):
            return f"{name}: what is learnt depends on labels, not on answers alone"
    return None


@check("labels once")
def ONCE() -> Found:
    """A label takes part in one question."""
    for name, method in METHODS.items():
        _, asked = answered(method, coins(FEW), EPSILON)
        most = int(np.bincount(np.concatenate([question.rows for question, _ in asked])).max())
        if most > 1:
            return f"{name}: a label took part in {most} questions, and is charged for one"
    return None


CHECKS = (INFERENCE, REPLAYED, ONCE)
