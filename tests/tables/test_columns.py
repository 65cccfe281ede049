"""Columns and cells: what each cell becomes, whatever library it comes from."""

from __future__ import annotations

import math
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas
import pyarrow
import pytest

from dpfy.core.errors import InvalidInput
from dpfy.tables import Category, Date, Label, Number, OpenColumn, PrivateTable, Schema, Text
from dpfy.tables.table import owner_names


class Hostile:
    """An object that raises whatever is asked of it."""

    def __str__(self) -> str:
        raise RuntimeError("secret")

    __float__ = __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("secret")

    def __hash__(self) -> int:
        raise RuntimeError("secret")


AGE = Number("age", 0, 100)
NAN = math.nan


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("40", 40.0),
        (" 40 ", 40.0),
        ("-3", 0.0),
        ("1e400", 100.0),
        ("-1e400", 0.0),
        (10**400, 100.0),
        (-(10**400), 0.0),
        ("inf", 100.0),
        (-math.inf, 0.0),
        ("", NAN),
        (None, NAN),
        ("?", NAN),
        ("abc", NAN),
        ("$1,234.50", NAN),
        ("1_0", NAN),
        (NAN, NAN),
        ("nan", NAN),
        (b"\xff", NAN),
        (Decimal("12.5"), 12.5),
        (Fraction(1, 2), 0.5),
        ({}, NAN),
        ([1], NAN),
        (1j, NAN),
        (date(2020, 1, 1), NAN),
        (Hostile(), NAN),
        (True, 1.0),
        ("7" * 10**6, 100.0),
        ("\0", NAN),
        ("\ud800", NAN),
    ],
)
def test_a_number(cell: object, number: float) -> None:
    for beside in ("50", 50, None):
        found = AGE.read([cell, beside])
        assert found[0] == number or (math.isnan(number) and math.isnan(found[0]))


@pytest.mark.parametrize(
    ("cell", "place"),
    [("clerk", 0), (" nurse ", 1), ("pilot", 2), ("", 2), (None, 2), (NAN, 2), (5, 2), (True, 2)]
    + [(Hostile(), 2), ({}, 2), (b"clerk", 2), ("\ud800", 2), ("\0clerk", 2)],
)
def test_a_category(cell: object, place: int) -> None:
    job = Category("job", ["clerk", "nurse"])
    for beside in ("clerk", 5, None, True):
        assert job.read([beside, cell])[1] == place


def test_equal_cells_of_different_types_are_read_each_by_itself() -> None:
    one = Category("one", ["1", "True"])
    assert one.read([1, True, 1.0, "1", np.float32(1)]).tolist() == [0, 1, 0, 0, 0]
    assert one.read([True]).tolist() == [1]


@pytest.mark.parametrize(
    ("cell", "day"),
    [
        ("2020-01-01", 0.0),
        ("2020-03-01T10:00", 60.0),
        (date(2020, 1, 2), 1.0),
        (datetime(2020, 1, 2, 23, 59), 1.0),
        (pandas.Timestamp("2020-01-02"), 1.0),
        ("2019-01-01", 0.0),
        ("2030-01-01", 731.0 - 1),
        ("31.12.2020", NAN),
        ("2020-13-01", NAN),
        ("", NAN),
        (None, NAN),
        (pandas.NaT, NAN),
        ("287000-01-01", NAN),
        (20200101, NAN),
    ],
)
def test_a_date(cell: object, day: float) -> None:
    found = Date("when", "2020-01-01", "2021-12-31").read([cell, "2020-02-01"])
    assert found[0] == day or (math.isnan(day) and math.isnan(found[0]))


def test_dates_of_arrays_are_read_as_those_of_text() -> None:
    when = Date("when", "2020-01-01", "2021-12-31", fill="2020-01-03")
    texts = ["2020-05-06", "1999-01-01", "", "2021-12-31"]
    days = np.array(["2020-05-06", "1999-01-01", "NaT", "2021-12-31"], "datetime64[ns]")
    arrow = pyarrow.array([date(2020, 5, 6), date(1999, 1, 1), None, date(2021, 12, 31)])
    far = pyarrow.array([int(1e8)], pyarrow.int32()).cast(pyarrow.date32())
    expected = when.read(texts).tolist()
    assert expected == [126.0, 0.0, 2.0, 730.0]
    for held in (days, pandas.Series(days), arrow, pyarrow.chunked_array([arrow])):
        assert when.read(held).tolist() == expected
    assert when.read(far).tolist() == [730.0]


def test_the_parts_of_a_date() -> None:
    when = Date("when", "2020-01-01", "2021-12-31", parts=["weekday", "year", "month"])
    assert when.parts == ("year", "month", "weekday")
    assert [c.name for c in when.part_columns()] == ["when_year", "when_month", "when_weekday"]
    found = when.read(["2021-11-30", "", "2020-01-01"])
    assert when.part("year", found).tolist()[::2] == [2021.0, 2020.0]
    assert when.part("month", found).tolist() == [10, 12, 0]
    assert when.part("weekday", found).tolist() == [1, 7, 2]  # Tuesday, none, Wednesday
    assert date(2021, 11, 30).weekday() == 1


SOURCES = {
    "list": lambda cells: {"x": cells},
    "object array": lambda cells: {"x": np.array(cells, object)},
    "pandas": lambda cells: pandas.DataFrame({"x": pandas.Series(cells, dtype=object)}),
    "pandas strings": lambda cells: pandas.DataFrame({"x": pandas.Series(cells, dtype="string")}),
    "pandas categories": lambda cells: pandas.DataFrame({"x": pandas.Categorical(cells)}),
    "arrow": lambda cells: pyarrow.table({"x": cells}),
    "arrow chunks": lambda cells: pyarrow.table(
        {"x": pyarrow.chunked_array([cells[:1], cells[1:]])}
    ),
    "arrow dictionary": lambda cells: pyarrow.table(
        {"x": pyarrow.array(cells).dictionary_encode()}
    ),
}
WORDS = ["b", " a ", None, "", "z", "b", "?", "1.5", "-7", "1e999", "2020-02-03"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "column",
    [
        Number("x", 0, 2),
        Category("x", ["a", "b"], fill="b"),
        Date("x", "2020-01-01", "2020-12-31"),
        Text("x"),
    ],
    ids=lambda c: c.kind,
)
def test_every_source_reads_a_cell_alike(source: str, column: object) -> None:
    def read(table: object) -> list[object]:
        held = PrivateTable(table, Schema((column,), missing=("", "?")))  # type: ignore[arg-type]
        return [None if v != v else v for v in held.read("x").tolist()]

    assert read(SOURCES[source](WORDS)) == read({"x": WORDS})


def test_polars_is_read_as_the_others() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"x": WORDS, "n": list(range(len(WORDS)))})
    table = PrivateTable(frame, [Category("x", ["a", "b"]), Number("n", 0, 5)])
    assert table.codes("x").tolist() == Category("x", ["a", "b"]).read(WORDS).tolist()
    assert table.numbers("n").tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5]


def test_fill_drop_and_unfit() -> None:
    table = PrivateTable(
        {
            "age": ["5", "x", "200", ""],
            "job": ["a", "?", "c", "a"],
            "y": ["low", "high", "low", "medium"],
        },
        Schema(
            (
                Number("age", 0, 100, fill=7),
                Category("job", ["a", "b"], drop=True),
                Label("y", ["low", "high"]),
            ),
            missing=("", "?"),
        ),
    )
    assert table.numbers("age").tolist() == [5, 7, 100, 7]
    assert table.unfit("age").tolist() == [False, True, True, True]
    assert table.unfit("job").tolist() == [False, True, True, False]
    left_out, with_label = table.left_out(), table.left_out("y")
    assert left_out is not None
    assert with_label is not None
    assert left_out.tolist() == [False, True, False, False]
    assert with_label.tolist() == [False, True, False, True]


def test_owners_are_told_apart_whatever_they_are_called() -> None:
    table = PrivateTable(
        {"who": ["a", "a\0", "a ", None, "", "A" * 10**6, "\ud800"]}, OpenColumn("who"), "who"
    )
    assert table.owners is not None
    assert table.owners.tolist() == [0, 1, 0, -1, -1, 2, 3]
    left_out = table.left_out()
    assert left_out is not None
    assert left_out.tolist() == [False, False, False, True, True, False, False]
    names = owner_names(table.cells("who")).tolist()
    assert names[0] == names[2] == "a"
    assert names[3:5] == ["", ""]
    assert len(set(names)) == 5
    assert max(map(len, names)) == 64


def test_a_strict_schema_names_column_and_row() -> None:
    columns = (Number("age", 0, 100), Category("job", ["a"], fill="a"))
    held = {"age": ["5", "6", "101"], "job": ["a", "", "a"]}
    table = PrivateTable(held, Schema(columns, strict=True))
    assert table.codes("job").tolist() == [0, 0, 0]
    with pytest.raises(InvalidInput, match="column age, row 3: got 'a cell that does not fit'"):
        table.numbers("age")
    assert PrivateTable(held, Schema(columns)).numbers("age").tolist() == [5, 6, 100]


def test_no_repr_shows_a_value() -> None:
    table = PrivateTable({"age": ["4711"]}, [AGE], owner="age")
    table.numbers("age")
    assert "4711" not in repr(table) + str(table)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Number("x", 1, 0), r"columns.x.range: got \[1, 0\]; low must be less"),
        (lambda: Number("x", 0, 1, fill=2), r"columns.x.fill: got 2.0; must lie in the range"),
        (lambda: Number("x", 0, 1, fill=1, drop=True), "columns.x.drop: .*must not stand beside"),
        (lambda: Number("x", -1, 1, transform="log1p"), "above -1"),
        (lambda: Category("x", []), "must name at least 1"),
        (lambda: Category("x", ["a"], buckets=0), "columns.x.buckets"),
        (lambda: Category("x", ["(other)"]), "must not be listed"),
        (lambda: Label("x", ["a"]), "must name at least 2"),
        (lambda: Label("x", ["a", "b"], fill="c"), "columns.x.fill: got 'c'"),
        (lambda: Date("x", "2020-01-02", "2020-01-01"), "must end after it begins"),
        (lambda: Date("x", "soon", "2020-01-01"), "columns.x.range: got 'soon'; must be two dates"),
        (lambda: Date("x", "2020-01-01", "2021-01-01", parts=["hour"]), "columns.x.parts"),
        (lambda: Date("x", "2020-01-01", "2021-01-01", fill="1999-01-01"), "must lie from"),
        (lambda: Text("x", buckets=-1), "columns.x.buckets"),
        (lambda: Number(3, 0, 1), "must have words for names"),  # type: ignore[arg-type]
    ],
)
def test_a_column_that_contradicts_itself_is_refused(build: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()  # type: ignore[operator]
