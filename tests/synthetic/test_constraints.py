"""Rules that hold for every record: which cells can be, and values within cells that obey them."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest

from dpfy.core.errors import InvalidInput
from dpfy.synthetic.constraints import within_bins
from dpfy.synthetic.domain import Domain

TEXT = """
[columns.age]
kind = "number"
range = [0, 99]
bins = 10
[columns.start]
kind = "date"
range = ["2020-01-01", "2021-12-31"]
[columns.end]
kind = "date"
range = ["2020-01-01", "2021-12-31"]
every = "year"
[columns.degree]
kind = "category"
categories = ["none", "school", "college"]
ordered = true
[columns.job]
kind = "category"
categories = ["doctor", "cook"]
required = true
"""


def domain(*rules: str) -> Domain:
    text = TEXT + "".join(f"[[constraints]]\n{rule}\n" for rule in rules)
    return Domain.parse(text, "x.toml")


def allowed(held: Domain) -> np.ndarray:
    return held.constraints[0].allowed(held.columns)


def test_a_number_and_a_value():
    assert (
        allowed(domain('rule = "age >= 18"')).tolist() == [False] + [True] * 10
    )  # the bin from 10 to 19 holds 18; missing can be
    assert allowed(domain('rule = "age > 19"')).tolist() == [False] * 2 + [True] * 9
    assert allowed(domain('rule = "age = 35"')).sum() == 2
    assert allowed(domain('rule = "age != 35"')).all()  # no bin holds 35 alone


def test_two_dates():
    mask = allowed(domain('rule = "end >= start"'))
    assert mask.shape == (25, 3)
    assert mask[:12, 0].all()
    assert not mask[12:24, 0].any()
    assert mask[:, 1].all()
    assert mask[24].all()  # missing
    turned = allowed(domain('rule = "start <= end"'))
    assert (turned == mask).all()


def test_words_in_order_and_conditions():
    mask = allowed(domain("rule = \"degree >= 'college'\"\nwhen = \"job = 'doctor'\""))
    assert mask.tolist() == [[False, True], [False, True], [True, True], [True, True]]
    same = allowed(domain("rule = \"job = 'cook'\"\nwhen = \"degree < 'college'\""))
    assert (same == mask).all()


def test_a_condition_on_bins_counts_only_where_it_holds_for_all_values():
    mask = allowed(domain('rule = "job = \'cook\'"\nwhen = "age < 18"'))
    assert mask[:, 0].tolist() == [False] + [True] * 10  # of the bin from 10 to 19 some are 18


def test_values_within_their_cells_obey_the_rules():
    held = domain(
        'rule = "age >= 18"',
        'rule = "end > start"',
        "rule = \"degree >= 'college'\"\nwhen = \"job = 'doctor'\"",
    )
    rng = np.random.default_rng(3)
    codes = np.stack([rng.integers(0, size, 4000) for size in held.sizes], axis=1)
    for rule in held.constraints:
        codes = codes[rule.allowed(held.columns)[tuple(codes[:, v] for v in rule.clique)]]
    assert len(codes) > 500
    age, start, end, _, _ = within_bins(held.columns, held.constraints, codes, rng)
    assert all(int(value) >= 18 for value in age if value)
    assert all(
        date.fromisoformat(b) > date.fromisoformat(a)
        for a, b in zip(start, end, strict=True)
        if a and b
    )
    again = [
        column.codes(values)
        for column, values in zip(held.columns, (age, start, end), strict=False)
    ]
    assert all(
        (found == codes[:, v]).all() for v, found in enumerate(again)
    )  # nobody left his cell


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ('rule = "age >= 200"', "forbids every combination"),
        ('rule = "wage >= 3"', "must be a column"),
        ('rule = "age + 3"', "must be a column"),
        ('rule = "age >= old"', "must be a value that age can have"),
        ("rule = \"job >= 'cook'\"", "has no order"),
        ("rule = \"job = 'king'\"", "must be one of"),
        ('rule = "age >= start"', "two different columns"),
        ('rule = "age >= age"', "two different columns"),
        ('when = "age > 3"', "constraints.1.rule"),
        ('rule = "age >= 3"\nif = "x"', "constraints.1.if"),
    ],
)
def test_bad_rules_are_refused_in_words(rule, words):
    if "200" in rule:  # numbers beyond the range: the missing cell alone would be left
        rule_domain = TEXT.replace('kind = "number"', 'kind = "number"\nrequired = true')
        with pytest.raises(InvalidInput, match=words):
            Domain.parse(rule_domain + f"[[constraints]]\n{rule}\n", "x.toml")
        return
    with pytest.raises(InvalidInput, match=words):
        domain(rule)


def test_constraints_must_be_sections():
    with pytest.raises(InvalidInput, match="constraints"):
        Domain.parse('constraints = "age > 3"\n' + TEXT, "x.toml")
