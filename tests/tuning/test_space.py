"""What is searched: words to ranges, draws that are even where they say so, and one line for
everything else.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpfy.core.errors import InvalidInput
from dpfy.tuning.space import FloatRange, IntegerRange, ListedValues, Space, choice, log_range


@pytest.mark.parametrize(
    ("word", "due"),
    [
        ("0.05..5 log", FloatRange(0.05, 5.0, True)),
        (" -1 .. 2.5e1 ", FloatRange(-1.0, 25.0)),
        ("1..8 whole", IntegerRange(1, 8)),
        ("[256, 512]", ListedValues((256, 512))),
        ('["a", "b"]', ListedValues(("a", "b"))),
        ("[true, false]", ListedValues((True, False))),
        ([[1, 2], [3]], ListedValues(((1, 2), (3,)))),
        (FloatRange(0.0, 1.0), FloatRange(0.0, 1.0)),
    ],
)
def test_words_are_read_and_written_back(word, due):
    space = Space.read({"x": word})
    assert space.dimensions == {"x": due}
    assert Space.read(space.words()) == space


@pytest.mark.parametrize(
    "word",
    ["1", "a..b", "1..", "..1", "2..1", "0..1 log", "-1..1 "
                                                    "log", "1.5..2 whole", "1..1", "[]", "{}", "", "1..2 sqrt", "[1, 1]", "[nan]",  # noqa: E501
     "1e400..1e401", 5, None, {"low": 1}, "1..99999999999999999999 whole"],
)  # fmt: skip
def test_what_is_no_range_is_one_line_that_names_it(word):
    with pytest.raises(InvalidInput, match=r"search\.x|range|low|high"):
        Space.read({"x": word})


def test_a_space_has_names_and_not_too_many():
    for wrong in ({}, {f"x{i}": "0..1" for i in range(65)}, {"a\nb": "0..1"}):
        with pytest.raises(InvalidInput):
            Space.read(wrong)


def test_draws_are_even_independent_and_a_function_of_their_generator():
    space = Space(
        {
            "rate": log_range(0.01, 100.0),
            "width": IntegerRange(3, 7),
            "kind": choice("a", "b", "c"),
            "share": FloatRange(0.2, 0.6),
        }
    )
    rows = [space.draw(np.random.default_rng([1, n])) for n in range(3000)]
    assert rows[:5] == [space.draw(np.random.default_rng([1, n])) for n in range(5)]
    logs = np.array([math.log(row["rate"]) for row in rows])
    assert stats.kstest(logs, stats.uniform(math.log(0.01), math.log(1e4)).cdf).pvalue > 1e-6
    assert stats.kstest(logs, stats.uniform(math.log(0.01), 1.5 * math.log(1e4)).cdf).pvalue < 1e-6
    assert stats.kstest([row["share"] for row in rows], stats.uniform(0.2, 0.4).cdf).pvalue > 1e-6
    for name, values in (("width", range(3, 8)), ("kind", "abc")):
        counts = [sum(row[name] == value for row in rows) for value in values]
        assert stats.chisquare(counts).pvalue > 1e-6
    assert abs(np.corrcoef(logs, [row["share"] for row in rows])[0, 1]) < 0.1
    assert all(
        float(f"{row['rate']:.6g}") == row["rate"] and 0.01 <= row["rate"] <= 100 for row in rows
    )


def test_places_of_settings_lie_between_their_ends():
    space = Space.read({"rate": "0.01..100 log", "width": "3..7 whole", "kind": ["a", "b", "c"]})
    assert space.at({"rate": 0.01, "width": 3, "kind": "a"}) == [0.0, 0.0, 0.0]
    assert space.at({"rate": 1.0, "width": 5, "kind": "b"}) == [0.5, 0.5, 0.5]
    assert space.at({"rate": 100.0, "width": 7, "kind": "c"}) == [1.0, 1.0, 1.0]
    assert [axis["high"] for axis in space.axes()] == ["100", "7", "c"]
