"""Every question answers by the law that it states, and costs what the law costs; labels are handed
out once.
"""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
from scipy import stats

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import mock_permit
from dpfy.labels import method
from dpfy.labels.questions import (
    HALF_L2,
    BinResponse,
    Counts,
    NoisyOneHot,
    PriorResponse,
    Projection,
    Response,
    SealedLabels,
)

N, K = 20_000, 5
ALARM = 1e-6
ROWS = np.arange(N)


def asked(question, labels, seed=1):
    permit = mock_permit(question.event, 1, adjacency=Adjacency.REPLACE_ONE)
    return question.answer(np.asarray(labels, np.int64), permit, Randomness.for_tests(seed), 0)


def prior_response(epsilon):
    order = np.tile(np.array([3, 1, 4, 0, 2], np.int16), (N, 1))
    return PriorResponse(ROWS, epsilon, order, np.full(N, 3, np.int16))


RESPONSES = {
    "rr": (lambda epsilon: Response(ROWS, epsilon, K), method.of_responses),
    "prior": (prior_response, method.of_prior_responses),
}


@pytest.mark.parametrize("name", RESPONSES)
@pytest.mark.parametrize("label", [0, 1, 3])
def test_answers_follow_the_law_that_evidence_states(name, label):
    """Chi-square, false alarms 1e-6; the laws of 2/3 and 3/2 of epsilon are rejected. A label
    outside of the prior tells nothing.
    """
    make, law_of = RESPONSES[name]
    counts = np.bincount(asked(make(1.2), np.full(N, label)), minlength=K)
    for epsilon, fits in ((1.2, True), (0.8, False), (1.8, False)):
        said = np.resize(np.arange(K), N)
        law = law_of(make(epsilon), said).likelihood[:K, label]
        named = [y for y in range(K) if counts[y] or law[y] > 0]
        if name == "prior":
            named = [1, 3, 4]
            assert counts[[0, 2]].sum() == 0
        expected = law[named] / law[named].sum() * N
        p = stats.chisquare(counts[named], expected).pvalue
        outside = name == "prior" and label == 0
        assert (p > ALARM) == (fits or outside), (epsilon, counts, expected)


@pytest.mark.parametrize("name", RESPONSES)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_no_answer_is_more_than_exp_epsilon_likelier_under_one_label(name, epsilon):
    make, law_of = RESPONSES[name]
    law = law_of(make(epsilon), np.resize(np.array([1, 3, 4]), N)).likelihood[:3]
    assert (law.max(axis=1) / law.min(axis=1)).max() == pytest.approx(math.exp(epsilon), rel=1e-9)


def test_prior_responses_of_every_size_keep_the_label_as_often_as_they_say():
    rng = np.random.default_rng(2)
    order = np.argsort(rng.random((N, K)), axis=1).astype(np.int16)
    sizes = rng.integers(1, K + 1, N).astype(np.int16)
    labels = order[np.arange(N), rng.integers(0, K, N) % sizes].astype(
        np.int64
    )  # inside of the prior
    kept = asked(PriorResponse(ROWS, 1.0, order, sizes), labels) == labels
    for size in range(1, K + 1):
        due, at = math.e / (math.e + size - 1), sizes == size
        assert stats.binomtest(int(kept[at].sum()), int(at.sum()), due).pvalue > ALARM


def noise_of(question, labels, truth):
    return (asked(question, labels) - truth).ravel()


def test_scales_of_noise():
    """Each accepts its own scale and rejects 2/3 and 3/2 of it, false alarms 1e-6."""
    labels = np.resize(np.arange(K), N)
    one_hot = np.eye(K)[labels]
    groups, matrix = (
        np.arange(N, dtype=np.int32) % 400,
        np.full((N, 1000), 1 / math.sqrt(1000), np.float32),
    )
    cells = np.zeros((400, K))
    np.add.at(cells, (groups, labels), 1)
    truth = matrix.astype(np.float64).T @ one_hot
    laplace, gauss = lambda x: np.abs(x).mean(), lambda x: math.sqrt((x**2).mean())
    rate = math.exp(-0.5)
    for noise, due, measure, relative in (
        (noise_of(NoisyOneHot(ROWS, 1.0, K), labels, one_hot), 2.0, laplace, 1.0),
        (
            noise_of(Counts(ROWS, 1.0, K, groups, 400), labels, cells),
            2 * rate / (1 - rate**2),
            laplace,
            1.1,
        ),
        (
            noise_of(Projection(ROWS, 3.0, K, matrix), labels, truth),
            3.0 * HALF_L2,
            gauss,
            1 / math.sqrt(2),
        ),
    ):
        tolerance = 4.9 * relative / math.sqrt(len(noise))  # two-sided, 1e-6
        for factor, fits in ((1.0, True), (2 / 3, False), (1.5, False)):
            assert (abs(measure(noise) / (factor * due) - 1) < tolerance) == fits, (
                due,
                measure(noise),
                factor,
            )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6, math.nan, math.inf])
def test_a_replaced_label_moves_a_projection_by_what_its_noise_is_for(scale):
    """Whatever the matrix holds: rows are clipped to length one, those that are not finite add
    nothing.
    """
    rng = np.random.default_rng(3)
    matrix = (rng.normal(size=(50, 7)) * scale).astype(np.float32)
    labels = rng.integers(0, K, 50)
    other = labels.copy()
    other[4] = (labels[4] + 1) % K
    found = [asked(Projection(np.arange(50), 1e-3, K, matrix), y, seed=9) for y in (labels, other)]
    assert np.linalg.norm(found[0] - found[1]) <= 2 * HALF_L2 * (1 + 1e-6)  # the same noise in both


def test_bins_are_answered_by_randomized_response():
    question = BinResponse(ROWS, 1.0, np.array([0, 0, 1, 2], np.int16), 3)
    counts = np.bincount(asked(question, np.full(N, 2)), minlength=3)
    due = np.array([1.0, math.e, 1.0]) / (math.e + 2) * N
    assert stats.chisquare(counts, due).pvalue > ALARM
    assert (asked(BinResponse(ROWS, 1.0, np.zeros(4, np.int16), 1), np.full(N, 2)) == 0).all()


def test_labels_are_handed_out_once():
    opened = []
    held = SealedLabels(lambda: opened.append(1) or np.arange(10) % 3, 10, 3)
    assert opened == []
    assert held.take(np.array([1, 4])).tolist() == [1, 1]
    assert held.take(np.array([0, 2])).tolist() == [0, 2]
    assert opened == [1]
    for again in (np.array([4, 5]), np.array([3, 3])):
        with pytest.raises(InvalidInput, match="one question, once"):
            held.take(again)
    assert held.take(np.array([3, 5, 6, 7, 8, 9])).tolist() == [0, 2, 0, 1, 2, 0]
    assert not held._values.any()
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(Unsupported, match="read once"):
            way(held)
    assert "0 not yet taken" in repr(held)


def test_values_raise_nothing_and_shapes_do():
    assert SealedLabels([-7, 99, 1], 3, 3).take(np.arange(3)).tolist() == [0, 2, 1]
    numbers = [math.nan, -math.inf, math.inf, 0.5]
    assert SealedLabels(numbers, 4, 5, (0.0, 1.0)).take(np.arange(4)).tolist() == [0, 0, 4, 2]
    for wrong in (
        np.zeros(3, np.int64),
        np.zeros((4, 2), np.int64),
        np.array(["a"] * 4),
        np.zeros(4),
    ):
        with pytest.raises(InvalidInput, match="labels"):
            SealedLabels(wrong, 4, 3).take(np.arange(4))
