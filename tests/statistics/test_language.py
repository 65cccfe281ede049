"""The language of queries reads back what it writes, and says in one line what is wrong."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from dpfy.core.errors import InvalidInput
from dpfy.statistics.language import AnyOf, Condition, Query, StatisticCall, parse


def test_a_query():
    found = parse(
        'mean(age), quantile("hours per week", 0.25, .5, step=1e-1) by sex, race where income = '
        "'>50K' and age>=-3.5"
    )
    assert found.asks == (
        StatisticCall("mean", ("age",)),
        StatisticCall("quantile", ("hours per week", 0.25, 0.5), (("step", 0.1),)),
    )
    assert found.by == ("sex", "race")
    assert found.where == (Condition("income", "=", ">50K"), Condition("age", ">=", -3.5))


def test_each_statistic_is_a_query_of_its_own_that_reads_back():
    text = (
        'mean(age), table(sex, "odd, name"), histogram(x, 1, 2.5, bins=3) by sex where c != '
        '"it\'s" and d < 1e-7'
    )
    reads_back(parse(text))


def reads_back(whole):
    for ask, written in zip(whole.asks, whole.texts, strict=True):
        assert parse(written) == Query((ask,), whole.by, whole.where, whole.level)


def test_other_spellings_are_the_same_query():
    assert parse("avg(age), count(*)") == parse("mean(age), count()")
    assert parse("COUNT(distinct patient)") == parse("distinct(patient)")
    assert parse("count(distinct 'the patient')").asks == (
        StatisticCall("distinct", ("the patient",)),
    )
    with pytest.raises(InvalidInput, match="twice"):
        parse("avg(age), mean(age)")


def test_or_binds_less_than_and_and_parentheses_most():
    a, b, c = (Condition(name, "=", 1.0) for name in "abc")
    assert parse("count() where a = 1 or b = 1 and c = 1").where == (AnyOf(((a,), (b, c))),)
    assert parse("count() where (a = 1 or b = 1) and c = 1").where == (AnyOf(((a,), (b,))), c)
    assert parse("count() where ((a = 1) and (b = 1 and c = 1))").where == (a, b, c)
    assert parse("count() where a in (1, 'x', y)").where == (Condition("a", "in", (1.0, "x", "y")),)


def test_groups_of_bins_and_the_level_of_confidence():
    found = parse("mean(age) by sex, bins(age, 0, 50, 100), top('a word') where x > 1 level 0.9")
    assert found.by == (
        "sex",
        StatisticCall("bins", ("age", 0.0, 50.0, 100.0)),
        StatisticCall("top", ("a word",)),
    )
    assert found.level == 0.9
    assert found.columns == {"age", "sex", "a word", "x"}
    assert parse("count() by level where level = 3 level 0.99").by == ("level",)
    reads_back(found)
    for text in ("count() level 0.4", "count() level 1", "count() level x", "count() level"):
        with pytest.raises(InvalidInput, match="query"):
            parse(text)


def test_deep_and_long_conditions_are_refused():
    for text in (
        f"count() where {'(' * 900}a = 1{')' * 900}",
        "count() where " + " or ".join(["a = 1"] * 9),
        f"count() where a in ({','.join(['1'] * 101)})",
        "count() where (a = 1",
        "count() where a in 1",
        "count() where a in ()",
    ):
        with pytest.raises(InvalidInput, match="query"):
            parse(text)


def test_no_text_does_anything_but_parse_or_refuse():
    marks = [
        "(",
        ")",
        ",",
        "=",
        "<",
        ">=",
        "by",
        "where",
        "and",
        "or",
        "in",
        "level",
        "distinct",
        "count",
        "*",
        "a = 1",
        "mean",
        "age",
        "1",
        "-2.5e3",
        "'a b'",
        '"',
        "\\",
        ";",
        "\n",
        "é",
        "\0",
    ]
    source = random.Random(7)
    beginnings = ["", "", "count() by ", "count() where ", "count() where (a = 1 or "]
    parsed = 0
    for _ in range(6000):
        text = source.choice(beginnings) + source.choice(["", " "]).join(
            source.choice(marks) for _ in range(source.randrange(1, 9))
        )
        with suppress(InvalidInput):
            reads_back(parse(text))
            parsed += 1
    assert parsed > 20
