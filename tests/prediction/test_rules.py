"""What each rule spends, in which order, what it answers, and that its bill covers what it does."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from electorate import OpenPurse

from dpfy import accounting
from dpfy.core import events as ev
from dpfy.core.errors import BudgetExceeded, InvalidInput
from dpfy.prediction.claim import AnswersClaim
from dpfy.prediction.rules import RULES, ConfidentVotes, GaussianVotes, moved

VOTES = np.array([40, 30, 3, 2])


def ask(counts):
    return lambda bits: moved(np.asarray(counts))


def test_each_rule_spends_what_it_says_before_it_draws():
    for rule, kinds in (
        (GaussianVotes(4, 5.0), ["answer"]),
        (ConfidentVotes(4, 5.0, 1.0, 10.0), ["check", "answer"]),
        (ConfidentVotes(4, 5.0, 1.0, 75.0), ["check"]),
    ):
        purse = OpenPurse()
        rule.answer(ask(VOTES), purse)
        assert purse.asked == kinds
        assert set(kinds) <= set(rule.kinds)
        empty = OpenPurse(dict.fromkeys(rule.kinds, 0))
        with pytest.raises(BudgetExceeded):
            rule.answer(ask(VOTES), empty)
        assert empty.asked == []


def test_a_check_is_not_spent_where_its_answer_could_not_be_paid_for():
    purse = OpenPurse({"check": 5, "answer": 0})
    with pytest.raises(BudgetExceeded, match="answer"):
        ConfidentVotes(4, 5.0, 1.0, 10.0).answer(ask(VOTES), purse)
    assert purse.asked == []


def test_bills_are_those_of_all_releases():
    assert GaussianVotes(4, 5.0).bill({"answer": 7}) == ev.Composed(
        (ev.Repeated(ev.NoisyArgmax(5.0, 4), 7),)
    )
    assert ConfidentVotes(4, 5.0, 9.0, 30.0).bill({"check": 20, "answer": 7}) == ev.Composed(
        (ev.Repeated(ev.NoisyThreshold(9.0), 20), ev.Repeated(ev.NoisyArgmax(5.0, 4), 7))
    )


def test_claims_say_what_their_rule_needs_and_nothing_else():
    claim = AnswersClaim(
        "confident", 3, 50, 200, 120, sigma=8.0, check_sigma=12.0, threshold=30.0, delta=1e-6
    )
    assert claim.most == {"check": 200, "answer": 120}
    assert claim.releases == 320
    assert [claim.first_step(kind) for kind in claim.most] == [0, 200]
    assert AnswersClaim.from_json(claim.to_json()) == claim
    assert claim.tool == ConfidentVotes(3, 8.0, 12.0, 30.0)
    assert accounting.epsilon(claim.event, 1e-6) > 0
    assert set(RULES) == {"gaussian", "confident", "mean"}
    for wrong, message in (
        ({"rule": "loudest"}, "rule"),
        ({"answers": 201}, "answers"),
        ({"epsilon": 1.0}, "says nothing"),
        ({"sigma": 0.0}, "sigma"),
        ({"voters": 0}, "voters"),
        ({"adjacency": "replace-one"}, "two votes"),
        ({"classes": 1}, "classes"),
        ({"threshold": math.inf}, "threshold"),
    ):
        fields = {
            "rule": "confident",
            "classes": 3,
            "voters": 50,
            "queries": 200,
            "answers": 120,
            "sigma": 8.0,
        }
        fields |= {"check_sigma": 12.0, "threshold": 30.0} | wrong
        with pytest.raises(InvalidInput, match=message):
            AnswersClaim(**fields)
