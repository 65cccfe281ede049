"""Columns as cells: every value finds its cell and comes back from it; no cell raises, and none
changes how another is read.
"""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_people import SCHEMA

from dpfy.core.errors import InvalidInput
from dpfy.synthetic.columns import BinnedColumn, ListedColumn, table_column
from dpfy.synthetic.domain import Domain
from dpfy.tables import Category, Date, Label, Number

MISSING = ("", "?")
COLUMNS = [
    table_column(column, MISSING)
    for column in (
        Number("whole", 0, 9),
        Number("wide", -5, 2000, bins=7, required=True),
        Number("real", 0.5, 3.25, bins=5, fill=1.0),
        Number("edges", 0, 100, bins=[0, 1, 10, 100]),
        Number("log", 0, 99999, bins=20, transform="log1p"),
        Number("fine", 0.0, 1e-9, bins=3),
        Category("words", ["a", "b", "?"]),
        Label("label", ["no", "yes"], required=True),
        Date("days", "2023-12-30", "2024-03-02", every="day"),
        Date("weeks", "2023-12-30", "2024-03-02", every="week"),
        Date("months", date(2020, 2, 5), date(2021, 1, 31)),
        Date("years", "1999-06-01", "2003-01-01", every="year", required=True),
        Date("filled", "2020-01-01", "2020-12-31", fill="2020-05-05"),
    )
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: c.name)
def test_values_drawn_in_a_cell_lie_in_it(column):
    """Every cell, 300 times."""
    codes = np.tile(np.arange(column.cells), 300)
    written = column.written(codes, np.random.default_rng(0))
    assert (column.codes(written) == codes).all()
    assert len({column.label(cell) for cell in range(column.cells)}) == column.cells
    assert len(column.centres) == column.known


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: c.name)
@given(
    cells=st.lists(
        st.one_of(
            st.text(max_size=8), st.integers(), st.floats(), st.none(), st.booleans(), st.dates()
        ),
        max_size=20,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_cell_raises_and_none_changes_another(column, cells):
    together = column.codes(cells)
    assert ((together >= 0) & (together < column.cells)).all()
    assert together.tolist() == [int(column.codes([cell])[0]) for cell in cells]
    backwards = column.codes(cells[::-1])[::-1]
    assert (together == backwards).all()


def code(column, text):
    return int(column.codes([text])[0])


def test_what_has_no_cell_of_its_own():
    whole, wide, real, edges, _, _, words, label, *_ = COLUMNS
    assert [code(whole, text) for text in ("0", "9", "12", "-3", "inf", "4.7", "x", "", None)] == [
        0,
        9,
        9,
        0,
        9,
        4,
        10,
        10,
        10,
    ]
    assert code(wide, "?") == 0  # required: counts as the first cell
    assert code(real, "") == code(real, "1.0")
    assert [code(edges, text) for text in ("0", "1", "9", "10", "100", "101")] == [0, 1, 1, 2, 2, 2]
    assert [code(words, text) for text in ("a", "?", "", "zzz")] == [
        0,
        2,
        3,
        3,
    ]  # listed, although it is how missing cells are written
    assert [code(label, text) for text in ("no", "yes", "", "maybe")] == [0, 1, 0, 0]


def test_dates_are_binned_by_the_calendar():
    months = COLUMNS[10]
    assert months.known == 12
    assert [
        code(months, text)
        for text in (
            "2020-02-05",
            "2020-02-29",
            "2020-03-01T10:00",
            "2021-01-31",
            "1990-01-01",
            "soon",
        )
    ] == [0, 0, 1, 11, 0, 12]
    weeks = COLUMNS[9]
    assert [date.fromisoformat(weeks.shown(edge)).weekday() for edge in weeks.edges[1:-1]] == [
        0
    ] * (weeks.known - 1)


def test_whole_numbers_are_never_split_and_bins_are_never_empty():
    rng = np.random.default_rng(1)
    for _ in range(50):
        low = int(rng.integers(-50, 50))
        high = low + int(rng.integers(1, 300))
        bins = int(rng.integers(1, high - low + 2))
        column = table_column(Number("n", low, high, bins=bins), MISSING)
        first, last = column.ends
        assert (first <= last).all()
        assert first[0] == low
        assert last[-1] == high
        assert (first[1:] == last[:-1] + 1).all()


def test_a_schema_becomes_a_domain():
    domain = Domain.parse(SCHEMA, "people.toml")
    assert domain.names == ("age", "job", "grade", "since", "rich")
    assert domain.sizes == (8, 4, 3, 3, 2)
    assert domain.ignored == {"id"}
    assert domain.cells((0, 4)) == 16
    assert isinstance(domain.columns[0], BinnedColumn)
    assert isinstance(domain.columns[1], ListedColumn)
    assert "age: 8 bins from 18 to 80" in str(domain)
    other = Domain.parse(SCHEMA.replace("bins = 8", "bins = 9"), "people.toml")
    assert str(other) != str(domain)


def test_the_packaged_schema_is_a_domain():
    domain = Domain.given("adult")
    assert len(domain.columns) == 13
    assert domain.columns[domain.names.index("capital_gain")].cells < 40


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("bins = 8", "bins = 1000000000000"), "columns.age.bins"),
        (("bins = 8", "bins = 200"), "at most the 63 whole numbers"),
        (("bins = 8", "bins = [18, 20]"), "must begin and end with the range"),
        (("range = [18, 80]", "range = [80, 18]"), "columns.age.range"),
        (
            ('categories = ["clerk", "nurse", "cook"]', 'categories = ["a", "a"]'),
            "columns.job.categories",
        ),
        (('categories = ["clerk", "nurse", "cook"]', 'categories = "?"'), "is a draft"),
        (('kind = "label"', 'kind = "lable"'), "columns.rich.kind"),
        (("ordered = true", "orderd = true"), "columns.grade.orderd"),
        (("required = true", "required = 1"), "required"),
        (('every = "year"', 'every = "hour"'), "columns.since.every"),
        (
            ('range = ["2020-01-01", "2021-12-31"]', 'range = ["2020-01-01", "yesterday"]'),
            "must be two dates",
        ),
        (
            ('range = ["2020-01-01", "2021-12-31"]', 'range = ["2022-01-01", "2021-12-31"]'),
            "must end after it begins",
        ),
        (("ignore = true", "ignore = false"), "columns.id.ignore"),
    ],
)
def test_bad_schemas_are_refused_in_words(change, words):
    assert change[0] in SCHEMA
    with pytest.raises(InvalidInput, match=words):
        Domain.parse(SCHEMA.replace(*change), "people.toml")


def test_no_columns_at_all():
    with pytest.raises(InvalidInput, match="columns"):
        Domain.parse("[columns.id]\nignore = true\n", "x.toml")
