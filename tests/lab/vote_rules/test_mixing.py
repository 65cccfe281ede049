"""Tokens from members that are mixed with a public model: the ratio that is billed is never
exceeded, and nearly reached.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "prediction"))

from electorate import OpenPurse
from scipy import stats

from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput
from dpfy.core.values import Bound, Bounded
from dpfy.prediction.claim import AnswersClaim
from dpfy.prediction.rules import rule_of
from dpfy_lab.vote_rules.mixing import SLACK, MixedTokens


def rows(rng: np.random.Generator, members: int, tokens: int) -> np.ndarray:
    """Chances, some of them far from the public ones."""
    return rng.dirichlet(np.full(tokens, 0.2), members + 1)


@pytest.mark.parametrize("seed", range(8))
def test_no_chance_changes_by_more_than_is_billed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    members, tokens = int(rng.integers(2, 40)), int(rng.integers(2, 30))
    rule = MixedTokens(tokens, members, float(rng.uniform(0.01, 1.5)))
    held = rows(rng, members, tokens)
    one = rule.mixed(held)
    assert one.sum() == pytest.approx(1, abs=1e-9)
    for member in range(1, members + 1):
        for other in (rows(rng, 1, tokens)[1], held[0], np.eye(tokens)[0], np.eye(tokens)[-1]):
            neighbour = held.copy()
            neighbour[member] = other
            assert np.abs(np.log(rule.mixed(neighbour) / one)).max() <= rule.epsilon - SLACK + 1e-9


def test_the_bill_is_nearly_reached() -> None:
    """All others are as far below the public chance as they may be, and the unit's own member is
    above it, or below too.
    """
    rule = MixedTokens(2, 10, 0.5)
    held = np.vstack([[0.01, 0.99], np.tile([0.0, 1.0], (10, 1))])
    other = held.copy()
    other[1] = [1.0, 0.0]
    assert math.log(rule.mixed(other)[0] / rule.mixed(held)[0]) == pytest.approx(0.5, abs=1e-3)


def test_members_that_are_close_are_left_as_they_are_and_draws_follow_their_mean() -> None:
    rule = MixedTokens(3, 4, 1.0)
    held = np.array(
        [[0.5, 0.3, 0.2], [0.35, 0.45, 0.2], [0.3, 0.4, 0.3], [0.4, 0.4, 0.2], [0.4, 0.3, 0.3]]
    )
    assert rule.mixed(held) == pytest.approx(held[1:].mean(axis=0), abs=1e-6)
    purse = OpenPurse(name="tokens")
    drawn = np.bincount(
        [rule.answer(lambda bits: Bounded(held, Bound(linf=1.0)), purse) for _ in range(3000)],
        minlength=3,
    )
    assert stats.chisquare(drawn, 3000 * held[1:].mean(axis=0)).pvalue > 1e-4
    assert stats.chisquare(drawn, 3000 * held[0]).pvalue < 1e-6
    assert purse.spent == {"answer": 3000}


def test_what_is_no_chance_is_refused() -> None:
    rule = MixedTokens(3, 4, 1.0)
    for wrong in (np.ones((4, 3)), -np.ones((5, 3)), np.full((5, 3), np.nan)):
        with pytest.raises(InvalidInput, match="chances"):
            rule.answer(lambda bits, wrong=wrong: Bounded(wrong, Bound(linf=1.0)), OpenPurse())
    for change in ({"voters": 1}, {"epsilon": 1e-6}, {"classes": 1}):
        with pytest.raises(InvalidInput):
            MixedTokens(**({"classes": 3, "voters": 4, "epsilon": 1.0} | change))
    claim = AnswersClaim("mixed", 5, 10, 7, 7, epsilon=0.5, delta=1e-6)
    assert claim.event == ev.Composed((ev.Repeated(ev.EpsilonDelta(0.5), 7),))
    assert claim.tool == rule_of("mixed")(5, 10, 0.5)


def test_the_example_writes_and_verifies(tmp_path: Path) -> None:
    file = Path(__file__).parents[3] / "examples" / "private_tokens.py"
    command = [sys.executable, str(file), "--run", str(tmp_path / "run"), "--words", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "verified: True"
