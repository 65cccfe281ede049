"""Voters know their own units alone: shards, class means, ridge regressions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))

from electorate import SECRET, records, voters

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.prediction.voters import LinearVoters, class_means, ridge, shards, tally, teach

X, Y = records(200, seed=8)
ASKED = records(25, seed=9)[0]


def apart(one: np.ndarray, other: np.ndarray) -> int:
    """How many votes differ, at most, over all questions."""
    return int(np.abs(one - other).sum(axis=1).max())


def test_shards_are_even_and_a_unit_that_comes_or_goes_moves_nobody_else():
    places = shards(20_000, 25, SECRET)
    assert stats.chisquare(np.bincount(places, minlength=25)).pvalue > 1e-4
    assert (shards(19_999, 25, SECRET) == places[:-1]).all()
    assert (shards(20_000, 25, Randomness.for_tests(12)) != places).mean() > 0.9


def test_all_records_of_an_owner_go_to_one_voter_whoever_else_is_there():
    owners = np.array([f"person {k // 3}" for k in range(3000)])
    places = shards(3000, 40, SECRET, owners)
    assert all(len(set(places[owners == name])) == 1 for name in np.unique(owners)[:50])
    without = owners != "person 7"
    assert (shards(int(without.sum()), 40, SECRET, owners[without]) == places[without]).all()
    assert stats.chisquare(np.bincount(places[::3], minlength=40)).pvalue > 1e-4
    with pytest.raises(InvalidInput, match="one for each"):
        shards(10, 4, SECRET, ["a"])
    with pytest.raises(InvalidInput, match="voters"):
        shards(10, 1, SECRET)


def made(kind: str, x: np.ndarray, y: np.ndarray, places: np.ndarray) -> np.ndarray:
    return {"means": class_means, "ridge": ridge}[kind](x, y, places, 15, 4).votes(ASKED)


@pytest.mark.parametrize("kind", ["means", "ridge"])
def test_one_unit_moves_one_vote(kind):
    places = shards(len(X), 15, SECRET)
    whole = made(kind, X, Y, places)
    assert (whole.sum(axis=1) == 15).all()
    for unit in range(0, 200, 9):
        left = np.arange(200) != unit
        assert apart(made(kind, X[left], Y[left], places[left]), whole) <= 2
        wild = X.copy()
        wild[unit] = 1e6
        label = Y.copy()
        label[unit] = 3
        assert apart(made(kind, wild, label, places), whole) <= 2


def test_votes_are_those_of_a_loop_over_voters():
    places = shards(len(X), 15, SECRET)
    found = np.zeros((len(ASKED), 4), int)
    for voter in range(15):
        x, y = X[places == voter].astype(np.float64), Y[places == voter]
        known = sorted(set(y.tolist()))
        means = [x[y == c].sum(axis=0) / ((y == c).sum() + 1.0) for c in known]
        for row, question in enumerate(ASKED.astype(np.float64)):
            far = [((question - mean) ** 2).sum() for mean in means]
            found[row, known[int(np.argmin(far))] if known else 0] += 1
    assert (made("means", X, Y, places) == found).all()


@pytest.mark.parametrize("rows", [40, 200])
def test_ridge_voters_solve_their_own_regression(rows):
    """By least squares on rows with the root of the strength below them; more records than
    features, and fewer.
    """
    x, y = X[:rows, : 6 if rows == 200 else None], Y[:rows]
    held = ridge(x, y, np.zeros(rows, np.int64), 2, 4, 3.0)
    wide = np.hstack([x.astype(np.float64), np.ones((rows, 1))])
    stacked = np.vstack([wide, np.sqrt(3.0) * np.eye(7)])
    due = np.linalg.lstsq(stacked, np.vstack([np.eye(4)[y] - 0.25, np.zeros((7, 4))]), rcond=None)[
        0
    ]
    assert held.weights[:, 0] == pytest.approx(due[:-1], abs=1e-6)
    assert held.biases[0] == pytest.approx(due[-1], abs=1e-6)
    few = ridge(x[:4], y[:4], np.zeros(4, np.int64), 2, 4, 3.0)
    due = np.linalg.solve(
        wide[:4].T @ wide[:4] + 3 * np.eye(7), wide[:4].T @ (np.eye(4)[y[:4]] - 0.25)
    )
    assert few.weights[:, 0] == pytest.approx(due[:-1], abs=1e-6)
    assert not held.weights[:, 1].any()


def test_a_voter_without_records_says_the_first_class():
    none = np.zeros(0, np.int64)
    assert (class_means(X[:0], Y[:0], none, 3, 4).votes(ASKED)[:, 0] == 3).all()
    assert tally(np.zeros((0, 3), int), 4).shape == (0, 4)


def test_voters_are_kept_as_private_files(tmp_path):
    held = voters()
    held.save(tmp_path / "v", labels=["a", "b", "c", "d"])
    for file in (tmp_path / "v").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "v").stat().st_mode & 0o777 == 0o700
    again, about = LinearVoters.load(tmp_path / "v")
    assert about["labels"] == ["a", "b", "c", "d"]
    assert again.fingerprint() == held.fingerprint()
    assert (again.votes(ASKED) == held.votes(ASKED)).all()
    content = (tmp_path / "v" / "voters.npy").read_bytes()
    (tmp_path / "v" / "voters.npy").write_bytes(content[:-1] + b"x")
    with pytest.raises(Corrupt, match="voters"):
        LinearVoters.load(tmp_path / "v")


def test_teaching_refuses_what_is_no_table():
    for x, y, message in (
        (X, Y[:-1], "one class"),
        (X, Y.astype(float), "whole number"),
        (X, Y + 1, "outside of the public"),
    ):
        with pytest.raises(InvalidInput, match=message):
            teach(x, y, voters=5, classes=4)
    found = teach(X, Y, voters=5, classes=4, owners=np.arange(200) // 2)
    assert (found.count, found.classes, found.features) == (5, 4, 6)


@pytest.mark.parametrize("cell", [np.nan, np.inf, -np.inf])
def test_a_feature_that_is_no_number_counts_as_0_and_raises_no_error(cell):
    odd, plain = X.copy(), X.copy()
    odd[0, 0], plain[0, 0] = cell, 0.0
    made = [
        teach(rows, Y, voters=5, classes=4, randomness=Randomness.for_tests(1))
        for rows in (odd, plain)
    ]
    assert made[0].fingerprint() == made[1].fingerprint()


def test_more_voters_than_memory_holds_are_refused_before_they_are_made():
    with pytest.raises(
        InvalidInput,
        match=r"voters: got 778032; must be at most \d+ with \d+ features and 10 classes",
    ):
        teach(np.zeros((20, 64)), np.zeros(20, int), voters=778_032, classes=10)
