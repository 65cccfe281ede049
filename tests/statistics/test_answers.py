"""The answers of a query as a table of text, as HTML, as a frame and as a picture."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dpfy.core.errors import InvalidInput
from dpfy.statistics.answer import Answer
from dpfy.statistics.answers import MOST_ROWS, Answers

NOTE = "words of fewer than 9 records after noise are not shown"
FOUND = Answers(
    [
        Answer("mean(age) by sex", 41.25, 0.5, (40.0, 42.5), {"sex": "f"}),
        Answer("mean(age) by sex", 38.5, 0.25, (38.0, 39.0), {"sex": "<m>"}),
        Answer('mode("job by day") by sex', "nurse", None, None, {"sex": "f"}, "at most 3 fewer"),
        Answer("top(code)", 30, 1.0, (28, 32), {"code": "A1"}, NOTE),
        Answer("top(code)", 12, 1.0, (10, 14), {"code": "B2"}, NOTE),
    ]
)


def test_the_table_as_text():
    assert repr(FOUND) == str(FOUND)
    lines = str(FOUND).splitlines()
    assert lines[0].split() == ["sex", "code", "answer", "95%", "interval", "standard", "error"]
    assert lines[1].split() == ["mean(age)", "f", "41.25", "40", "to", "42.5", "0.5"]
    assert lines[3].startswith('mode("job by day")  f')
    assert lines[3].endswith("at most 3 fewer")
    assert str(FOUND).count(NOTE) == 1
    assert lines[4].endswith("(1)")
    assert lines[5].endswith("(1)")
    assert lines[-1] == f"(1) {NOTE}"
    assert str(Answers()) == "no answers"


def test_a_long_table_is_cut_where_it_is_shown_and_nowhere_else():
    many = Answers(Answer("count() by x", k, place={"x": str(k)}) for k in range(MOST_ROWS + 7))
    assert "... and 7 more" in str(many)
    assert len(str(many).splitlines()) == MOST_ROWS + 2
    assert len(many.lines()) == MOST_ROWS + 8
    assert len(many.to_frame()) == MOST_ROWS + 7
    assert isinstance(many[:2], Answers)
    assert many[3].value == 3


def test_html_shows_the_same_cells_and_no_markup_of_the_data():
    shown = FOUND._repr_html_()
    assert "<m>" not in shown
    assert "&lt;m&gt;" in shown
    assert len(re.findall("<tr>", shown)) == 6
    assert shown.count(NOTE) == 1


def test_a_frame():
    frame = FOUND.to_frame()
    assert list(frame.columns) == [
        "statistic",
        "sex",
        "code",
        "value",
        "low",
        "high",
        "standard_error",
        "note",
    ]
    assert frame["low"][0] == 40.0
    assert frame["high"][4] == 14
    assert frame["value"][2] == "nurse"
    assert np.isnan(frame["standard_error"][2])
    taken = Answers([Answer("count() by value", 3, place={"value": "x"})]).to_frame()
    assert list(taken.columns)[1:3] == ["value (group)", "value"]


def test_a_plot():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = FOUND.plot("top(code)")
    assert [bar.get_height() for bar in axes.patches] == [30, 12]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["A1", "B2"]
    (bars,) = axes.collections
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [[28, 32], [10, 14]]
    both = FOUND.plot()
    assert len(both) == 2, "what is no number is not drawn"
    _, mine = pyplot.subplots()
    assert FOUND.plot("mean(age) by sex", mine) is mine
    pyplot.close("all")
    with pytest.raises(InvalidInput, match="must be one of"):
        FOUND.plot("count()")
    with pytest.raises(InvalidInput, match="must hold numbers"):
        FOUND[2:3].plot()
    with pytest.raises(InvalidInput, match="one for each statistic"):
        FOUND.plot(axes=mine)
