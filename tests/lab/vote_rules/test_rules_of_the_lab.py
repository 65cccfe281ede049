"""What each rule of the lab spends, in which order, what it answers, and that its bill covers what
it does.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpfy_lab.vote_rules.rules import (
    ExponentialVotes,
    LaplaceVotes,
    NoisyScores,
    SampledVotes,
    StableVotes,
    stability,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "prediction"))

from electorate import OpenPurse

from dpfy.core import events as ev
from dpfy.core.errors import BudgetExceeded, InvalidInput, Unsupported
from dpfy.core.values import Bound, Bounded
from dpfy.prediction.rules import LAB, moved, rule_of

VOTES = np.array([40, 30, 3, 2])


def ask(counts):
    return lambda bits: moved(np.asarray(counts))


def test_each_rule_is_found_by_its_name():
    assert [rule_of(name).name for name in LAB] == list(LAB)


@pytest.mark.parametrize(
    "rule", [LaplaceVotes(4, 0.5), ExponentialVotes(4, 0.5), SampledVotes(4, 5.0, 0.5)]
)
def test_each_rule_spends_what_it_says_before_it_draws(rule):
    purse = OpenPurse()
    rule.answer(ask(VOTES), purse)
    assert purse.asked == ["answer"] == list(rule.kinds)
    empty = OpenPurse(dict.fromkeys(rule.kinds, 0))
    with pytest.raises(BudgetExceeded):
        rule.answer(ask(VOTES), empty)
    assert empty.asked == []


def test_bills_are_those_of_all_releases():
    assert LaplaceVotes(4, 0.5).bill({"answer": 2}) == ev.Composed(
        (ev.Repeated(ev.EpsilonDelta(0.5), 2),)
    )
    assert ExponentialVotes(4, 0.5).kinds == {"answer": ev.BoundedRange(0.5)}
    assert SampledVotes(4, 5.0, 0.25).kinds == {
        "answer": ev.PoissonSampled(0.25, ev.NoisyArgmax(5.0, 4))
    }
    assert StableVotes(4, 1.0, 1e-7, 100, 3).bill(
        {"question": 100, "unstable": 3}
    ) == ev.EpsilonDelta(1.0, 1e-7)
    with pytest.raises(InvalidInput, match="at most 100"):
        StableVotes(4, 1.0, 1e-7, 100, 3).bill({"question": 101, "unstable": 3})


@pytest.mark.parametrize(
    ("rule", "kind"), [(LaplaceVotes(3, 1.0), "laplace"), (ExponentialVotes(3, 1.0), "exponential")]
)
def test_no_answer_is_more_than_exp_epsilon_times_as_likely_on_a_neighbour(rule, kind):
    """Found by drawing, at a confidence of 1 - 1e-6; noise for half of what a moved vote does would
    be found.
    """
    times = 10_000
    here, there = np.array([10, 9, 9]), np.array([11, 8, 9])
    purse = OpenPurse(name=kind)
    counts = [
        np.bincount([rule.answer(ask(v), purse) for _ in range(times)], minlength=3)
        for v in (here, there)
    ]
    far = stats.norm.isf(1e-6 / 6)
    for a, b in zip(*counts, strict=True):
        assert abs(math.log(a / b)) <= rule.epsilon + far * math.sqrt(1 / a + 1 / b)
    twice = OpenPurse(name=f"{kind} too little")
    loose = type(rule)(3, 2 * rule.epsilon)  # half the noise
    found = [
        np.bincount([loose.answer(ask(v), twice) for _ in range(times)], minlength=3)
        for v in (here, there)
    ]
    assert any(
        abs(math.log(a / b)) > rule.epsilon + far * math.sqrt(1 / a + 1 / b)
        for a, b in zip(*found, strict=True)
    )


def test_stability_is_the_number_of_units_before_one_more_can_change_the_winner():
    for counts in (
        [5, 0],
        [5, 1],
        [5, 2],
        [5, 3],
        [5, 4],
        [5, 5],
        [9, 1, 1],
        [1, 1, 1],
        [30, 11, 2],
    ):
        held = np.array(counts)
        far = stability(held)
        assert held.argmax() == _after(held, far) or far == 0
        if held.sum() >= far + 1:
            assert _could_change(held, far + 1)
        for a in range(len(held)):
            for b in range(len(held)):
                if a != b and held[a]:
                    other = held.copy()
                    other[a] -= 1
                    other[b] += 1
                    assert abs(stability(other) - far) <= 1


def _after(counts, changes):
    """The winner after the worst so many changes that move votes from the first to another."""
    winners = set()
    for b in range(len(counts)):
        if b != counts.argmax():
            other = counts.copy()
            moved_votes = min(changes, other[counts.argmax()])
            other[counts.argmax()] -= moved_votes
            other[b] += moved_votes
            winners.add(int(other.argmax()))
    return winners.pop() if len(winners) == 1 else -1


def _could_change(counts, changes):
    first = counts.argmax()
    for b in range(len(counts)):
        if b != first:
            other = counts.copy()
            moved_votes = min(changes, other[first])
            other[first] -= moved_votes
            other[b] += moved_votes
            if other[b] >= other[first]:
                return True
    return False


def test_stable_votes_answer_exactly_and_refuse_at_most_what_was_agreed():
    rule = StableVotes(3, 2.0, 1e-6, 1000, 3)
    assert rule.threshold > 20
    purse = OpenPurse({"question": 1000, "unstable": 3}, "stable")
    sure = np.array([3 * rule.threshold, 10, 0])
    assert [rule.answer(ask(sure), purse) for _ in range(200)] == [0] * 200
    assert purse.spent == {"question": 200}
    assert [rule.answer(ask([50, 50, 0]), purse) for _ in range(3)] == [None] * 3
    with pytest.raises(BudgetExceeded, match="unstable"):
        rule.answer(ask([50, 50, 0]), purse)


def test_a_tie_is_never_answered_as_stable():
    """The chance over all questions is at most delta_used, 0.02 here: 0.02 of 400 rounds is 8; 25
    would be a chance of 1e-6.
    """
    rule = StableVotes(2, 2.0, 0.02, 50, 50)
    broken = 0
    for round_ in range(400):
        purse = OpenPurse({"question": 50, "unstable": 50}, f"round {round_}")
        broken += any(rule.answer(ask([30, 30]), purse) is not None for _ in range(50))
    assert broken < 25


def test_noisy_scores_have_the_noise_of_their_bound():
    rule = NoisyScores(2, 2.0, 1.0)
    purse = OpenPurse(name="scores")
    scores = Bounded(np.array([0.5, 0.0]), Bound(l2=0.25))
    found = [rule.answer(lambda bits: scores, purse) for _ in range(5000)]
    for factor, held in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        chance = stats.norm.cdf(0.5 / (2.0 * 0.25 * factor * math.sqrt(2)))
        assert (stats.binomtest(found.count(0), 5000, chance).pvalue > 1e-4) == held
    with pytest.raises(Unsupported, match="l2"):
        rule.answer(lambda bits: Bounded(np.array([0.5, 0.0]), Bound()), purse)
