"""Voters know their own units alone: nearest records, stable scores."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dpfy_lab.vote_rules.neighbours import NearestVoters, NeighbourVotes
from dpfy_lab.vote_rules.rules import SampledVotes
from dpfy_lab.vote_rules.stable_scores import TOLERANCE, StableScores, fitted, objective, within

sys.path.insert(0, str(Path(__file__).parents[2] / "prediction"))

from electorate import SECRET, OpenPurse, records

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.mechanisms.exact import Bits
from dpfy.prediction.voters import shards

X, Y = records(200, seed=8)
ASKED = records(25, seed=9)[0]


def apart(one: np.ndarray, other: np.ndarray) -> int:
    """How many votes differ, at most, over all questions."""
    return int(np.abs(one - other).sum(axis=1).max())


def nearest(x: np.ndarray, y: np.ndarray, places: np.ndarray) -> np.ndarray:
    return NearestVoters(x, y, 4, places, 15).votes(ASKED)


def test_one_unit_moves_one_vote_of_nearest_records():
    places = shards(len(X), 15, SECRET)
    whole = nearest(X, Y, places)
    assert (whole.sum(axis=1) == 15).all()
    for unit in range(0, 200, 9):
        left = np.arange(200) != unit
        assert apart(nearest(X[left], Y[left], places[left]), whole) <= 2
        wild = X.copy()
        wild[unit] = 1e6
        label = Y.copy()
        label[unit] = 3
        assert apart(nearest(wild, label, places), whole) <= 2


def test_votes_of_nearest_records_are_those_of_a_loop_over_voters():
    places = shards(len(X), 15, SECRET)
    found = np.zeros((len(ASKED), 4), int)
    for voter in range(15):
        x, y = X[places == voter].astype(np.float64), Y[places == voter]
        for row, question in enumerate(ASKED.astype(np.float64)):
            said = int(y[np.argmin(((x - question) ** 2).sum(axis=1))]) if len(y) else 0
            found[row, said] += 1
    assert (nearest(X, Y, places) == found).all()
    none = np.zeros(0, np.int64)
    assert (NearestVoters(X[:0], Y[:0], 4, none, 3).votes(ASKED)[:, 0] == 3).all()


def test_neighbours_one_record_moves_one_vote_also_where_there_are_few():
    for count, rows in ((7, 200), (7, 7), (7, 5), (7, 1)):
        held = NeighbourVotes(X[:rows], Y[:rows], 4, count)
        whole = np.array([a(None).value for a in held.asked(ASKED)])
        assert (whole.sum(axis=1) == count).all()
        for unit in range(0, rows, max(1, rows // 6)):
            left = np.arange(rows) != unit
            other = NeighbourVotes(X[:rows][left], Y[:rows][left], 4, count)
            assert apart(np.array([a(None).value for a in other.asked(ASKED)]), whole) <= 2
    nearest = np.argsort(((X - ASKED[0]) ** 2).sum(axis=1), kind="stable")[:7]
    assert (
        NeighbourVotes(X, Y, 4, 7).asked(ASKED)[0](None).value
        == np.bincount(Y[nearest], minlength=4)
    ).all()


def test_the_distance_of_a_record_does_not_depend_on_the_others():
    """Sums of floats do, in their last digits: with them this fails."""
    rng = np.random.default_rng(4)
    x, asked = (rng.normal(size=(n, 37)).astype(np.float32) for n in (101, 9))
    y = rng.integers(0, 3, 101)
    whole = NeighbourVotes(x, y, 3, 5)._distances(asked)
    for kept in (np.arange(101) != 17, np.arange(101) < 3, np.arange(101) >= 50):
        assert (NeighbourVotes(x[kept], y[kept], 3, 5)._distances(asked) == whole[:, kept]).all()
        assert (
            NeighbourVotes(x[kept], y[kept], 3, 5)._distances(asked[:1]) == whole[:1, kept]
        ).all()
    steps = (
        np.rint(x.astype(np.float64) * 4096).astype(int),
        np.rint(asked.astype(np.float64) * 4096).astype(int),
    )
    exact = [
        [
            sum(a * a - 2 * a * b for a, b in zip(r.tolist(), q.tolist(), strict=True))
            for r in steps[0]
        ]
        for q in steps[1]
    ]
    assert (whole == np.array(exact)).all()
    for wrong in (np.full_like(x, np.nan), x.astype(np.float64)):
        with pytest.raises(InvalidInput, match="x"):
            NeighbourVotes(wrong, y, 3, 5)


def test_samples_of_neighbours_are_drawn_anew_for_every_answer():
    held = NeighbourVotes(X, Y, 4, 9, 0.3)
    ask = held.asked(ASKED[:1])[0]
    with pytest.raises(Unsupported, match="sampled"):
        ask(None)
    drawn = {tuple(ask(Bits(SECRET, "sample", k)).value) for k in range(40)}
    assert len(drawn) > 5
    assert tuple(ask(Bits(SECRET, "sample", 3)).value) == tuple(
        ask(Bits(SECRET, "sample", 3)).value
    )
    rule = SampledVotes(4, 2.0, 0.3)
    assert rule.answer(ask, OpenPurse(name="neighbours")) in range(4)


def test_scores_move_by_no_more_than_their_bound():
    held = StableScores(X, Y, 4, 3.0)
    before = np.array([a(None).value for a in held.asked(ASKED)])
    for unit in range(0, 200, 23):
        left = np.arange(200) != unit
        after = np.array(
            [a(None).value for a in StableScores(X[left], Y[left], 4, 3.0).asked(ASKED)]
        )
        assert np.linalg.norm(after - before, axis=1).max() <= held.moved.l2
    far = np.vstack([X, 1e4 * np.ones((1, 6), np.float32)])
    after = np.array(
        [a(None).value for a in StableScores(far, np.append(Y, 1), 4, 3.0).asked(ASKED)]
    )
    moved = np.linalg.norm(after - before, axis=1).max()
    assert moved <= held.moved.l2
    tiny = StableScores(X[:1], Y[:1], 4, 3.0), StableScores(X[:0], Y[:0], 4, 3.0)
    one, none = (s.asked(within(X[:1]).astype(np.float32))[0](None).value for s in tiny)
    assert (
        0.3 * held.moved.l2 < np.linalg.norm(one - none) <= held.moved.l2
    )  # the bound is not far from what is reached


def test_learners_come_as_close_to_their_minimum_as_is_billed():
    x, targets = within(X), np.eye(4)[Y]
    for strength in (0.05, 1.0, 50.0):
        weights = fitted(x, targets, strength)
        assert np.linalg.norm(objective(weights, x, targets, strength)[1]) <= TOLERANCE
    step = 1e-6
    value, gradient = objective(weights, x, targets, 1.0)
    nudged = weights.copy()
    nudged[1, 2] += step
    assert (objective(nudged, x, targets, 1.0)[0] - value) / step == pytest.approx(
        gradient[1, 2], rel=1e-3, abs=1e-4
    )
    assert np.linalg.norm(within(1e5 * X), axis=1).max() <= 1
