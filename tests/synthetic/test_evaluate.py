"""Evaluation: figures that mean what they say, and words that say whether they may be published."""

from __future__ import annotations

import numpy as np
import pytest
from made_up_people import SCHEMA, people

from dpfy.core.errors import InvalidInput
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.evaluate import LEARNERS, NOT_PRIVATE, PUBLIC, closest, evaluate, lines
from dpfy.synthetic.page import page

DOMAIN = Domain.parse(SCHEMA, "people.toml")
FINE = Domain.parse(SCHEMA.replace("bins = 8\n", ""), "people.toml")


def test_a_copy_is_perfect_and_caught():
    """A table that is the records: no distance, every row is a copy, and the membership attack
    finds it.
    """
    found = evaluate(people(400), people(400), schema=FINE, holdout=people(400, 7)).to_json()
    assert found["private"] == NOT_PRIVATE
    assert all(found["marginals"][k]["mean_l1"] == 0 for k in "123")
    assert found["correlations"]["largest"] == 0
    near = found["disclosure"]
    assert near["copies"] == 1.0
    assert near["closer_to_real"] > 0.55
    assert near["membership_auroc"] > 0.55
    fresh = evaluate(people(400), people(400, 3), schema=FINE, holdout=people(400, 7)).to_json()[
        "disclosure"
    ]
    assert abs(fresh["membership_auroc"] - 0.5) < 0.06
    assert abs(fresh["closer_to_real"] - 0.5) < 0.06


def test_nothing_in_common_is_the_largest_distance():
    low = people(100) | {"age": ["20"] * 100}
    high = people(100) | {"age": ["70"] * 100}
    found = evaluate(low, high, schema=DOMAIN, degree=2, public=True).to_json()
    assert found["private"] == PUBLIC
    assert found["marginals"]["1"]["largest_l1"] == pytest.approx(2.0)
    assert found["marginals"]["1"]["worst"][0]["columns"] == ["age"]
    assert set(found["marginals"]) == {"1", "2"}
    assert found["learners"] == {}


def test_learners_tell_good_rows_from_scrambled_ones():
    records = people(1500)
    rng = np.random.default_rng(0)
    scrambled = records | {"rich": [records["rich"][k] for k in rng.permutation(1500)]}
    found = evaluate(records, people(1500, 2), schema=DOMAIN, target="rich", degree=1).to_json()
    worse = evaluate(
        records, scrambled, schema=DOMAIN, target="rich", degree=1, holdout=people(300, 4)
    ).to_json()
    for name in LEARNERS:
        assert found["learners"][name]["trained_on_synthetic"]["auroc"] > 0.8
        assert found["learners"][name]["trained_on_real"]["auroc"] > 0.8
        assert worse["learners"][name]["trained_on_synthetic"]["auroc"] < 0.65
    text = "\n".join(lines(found))
    assert "NOT PRIVATE" in text
    assert "random forest" in text
    shown = page(found)
    assert shown.startswith("<!doctype html>")
    assert 'class="warning"' in shown
    assert "<script" not in shown


def test_the_closest_record_against_brute_force():
    rng = np.random.default_rng(1)
    rows, others = rng.integers(0, 3, (40, 5)), rng.integers(0, 3, (60, 5))
    due = [min(int((row != other).sum()) for other in others) for row in rows]
    assert closest(rows, others, block=7).tolist() == due


def test_bad_requests_are_refused_in_words():
    with pytest.raises(InvalidInput, match="at least one row"):
        evaluate(people(0), people(5), schema=DOMAIN)
    with pytest.raises(InvalidInput, match="target"):
        evaluate(people(5), people(5), schema=DOMAIN, target="wage")
    same = people(50) | {"rich": ["yes"] * 50}
    with pytest.raises(InvalidInput, match="at least two values"):
        evaluate(same, people(50), schema=DOMAIN, target="rich")
