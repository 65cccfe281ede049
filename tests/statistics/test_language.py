"""The language of queries reads back what it writes, and says in one line what is wrong."""

from __future__ import annotations

import random
from contextlib import suppress

from dpfy.core.errors import InvalidInput
from dpfy.statistics.language import Condition, Query, StatisticCall, parse


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
    whole = parse(text)
    for ask, written in zip(whole.asks, whole.texts, strict=True):
        assert parse(written) == Query((ask,), whole.by, whole.where)


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
    for _ in range(3000):
        text = source.choice(["", " "]).join(
            source.choice(marks) for _ in range(source.randrange(1, 9))
        )
        with suppress(InvalidInput):
            assert isinstance(parse(text), Query)
