from __future__ import annotations

from pathlib import Path

import pytest

from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.tables import Category, Date, Label, Number, OpenColumn, Schema, Text
from dpfy.tables.schema import training_schema

LABEL = '[columns.y]\nkind = "label"\nclasses = ["a", "b"]\n'
NUMBER = '[columns.x]\nkind = "number"\nrange = [0, 1]\n'


def test_a_schema_keeps_the_order_of_its_columns() -> None:
    text = (
        LABEL
        + '[columns.c]\nkind = "category"\ncategories = ["u", "v"]\n'
        + NUMBER
        + "[columns.id]\nignore = true\n"
    )
    schema = Schema.parse(text, "s.toml", labelled=True)
    assert schema.features == (Category("c", ("u", "v")), Number("x", 0.0, 1.0))
    assert schema.label == Label("y", ("a", "b"))
    assert schema.names == {"c", "x", "y", "id"}
    assert schema.ignored == {"id"}
    assert schema.missing == ("",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("columns = ", "s.toml: not valid TOML"),
        ("", "columns: got None; s.toml must describe at least one column"),
        ("colums = 1\n" + NUMBER + LABEL, r"did you mean 'columns'"),
        (NUMBER, "columns: got '0 columns of kind label'; must hold exactly one label"),
        (NUMBER + LABEL + LABEL.replace(".y", ".z"), "got '2 columns of kind label'"),
        (LABEL, "columns: got 'no feature'"),
        (
            LABEL + NUMBER.replace("[0, 1]", "[1, 0]"),
            r"columns.x.range: got \[1, 0\]; low must be less than high",
        ),
        (
            LABEL + NUMBER.replace("[0, 1]", "[0, inf]"),
            r"columns.x.range\[1\]: got inf; must be a finite number",
        ),
        (LABEL + NUMBER.replace("[0, 1]", "[0]"), "columns.x.range: .*must be two numbers"),
        (
            LABEL + NUMBER.replace('"number"', '"numeric"'),
            r"columns.x.kind: got 'numeric'; must be one of number, category, date, text, label",
        ),
        (LABEL + "[columns.x]\nrange = [0, 1]\n", "columns.x.kind: got None"),
        (
            LABEL + '[columns.x]\nkind = "number"\n',
            "columns.x.range: got None; must be given for a number",
        ),
        (LABEL + NUMBER + "rnage = 1\n", r"columns.x.rnage: got 'rnage'; .*did you mean 'range'"),
        (
            LABEL + NUMBER + 'scale = "std"\n',
            "columns.x.scale: got 'std'; must be one of symmetric, unit",
        ),
        (
            LABEL + NUMBER + "fill = 2\n",
            r"columns.x.fill: got 2.0; must lie in the range \[0.0, 1.0\]",
        ),
        (
            LABEL + NUMBER.replace("[0, 1]", "[-1, 1]") + 'transform = "log1p"\n',
            "must lie above -1 for log1p",
        ),
        (
            LABEL + '[columns.c]\nkind = "category"\ncategories = ["u", "u"]\n',
            "must not name one word twice",
        ),
        (LABEL + '[columns.c]\nkind = "category"\ncategories = []\n', "must name at least 1"),
        (
            LABEL + '[columns.c]\nkind = "category"\ncategories = [1, 2]\n',
            "must be a list of words in quotes",
        ),
        (
            LABEL + '[columns.c]\nkind = "category"\ncategories = ["u"]\nfill = "w"\n',
            "columns.c.fill: got 'w'; must be one of u, other",
        ),
        (
            LABEL.replace('["a", "b"]', '["a"]') + NUMBER,
            "columns.y.classes: .*must name at least 2",
        ),
        (
            LABEL + NUMBER + "[columns.id]\nignore = false\n",
            "columns.id.ignore: got False; must be true and stand alone",
        ),
        (
            LABEL + NUMBER + '[columns.id]\nignore = true\nkind = "number"\n',
            "must be true and stand alone",
        ),
        (
            LABEL + NUMBER + "[columns]\nid = 3\n",
            "columns.id: got 3; must be a section with a kind",
        ),
        ("columns = {x = 3}\n", "columns.x: got 3; must be a section with a kind"),
        ("missing = 3\n" + LABEL + NUMBER, "missing: got 3; must be a list of words"),
    ],
)
def test_a_bad_schema_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(DpfyError, match=message) as caught:
        Schema.parse(text, "s.toml", labelled=True)
    assert "\n" not in str(caught.value)


WHOLE = """
missing = ["", "?"]
strict = true
[columns.age]
kind = "number"
range = [0, 120]
fill = 40
scale = "unit"
bins = [0, 18, 120]
[columns.pay]
kind = "number"
range = [0, 1e6]
transform = "log1p"
bins = 20
drop = true
required = true
[columns.job]
kind = "category"
categories = ["clerk", "nurse"]
fill = "other"
ordered = true
[columns.code]
kind = "category"
categories = ["A1", "B2", "C3"]
buckets = 2
[columns.seen]
kind = "date"
range = ["2020-01-01", 2023-12-31]
every = "week"
parts = ["year", "weekday"]
fill = 2021-01-01
[columns.note]
kind = "text"
buckets = 16
[columns.other]
kind = "text"
[columns.id]
ignore = true
[columns.y]
kind = "label"
classes = ["low", "high"]
fill = "low"
[[constraints]]
rule = "age >= 18"
when = "job = 'nurse'"
"""


def test_one_file_says_everything_and_is_written_back() -> None:
    schema = Schema.parse(WHOLE, "s.toml", labelled=True)
    assert schema.columns == (
        Number("age", 0, 120, fill=40, scale="unit", bins=(0, 18, 120)),
        Number("pay", 0, 1e6, transform="log1p", bins=20, drop=True, required=True),
        Category("job", ["clerk", "nurse"], fill="other", ordered=True),
        Category("code", ["A1", "B2", "C3"], buckets=2),
        Date("seen", "2020-01-01", "2023-12-31", every="week", parts=("year", "weekday"), fill="2021-01-01"),
        Text("note", buckets=16),
        Text("other"),
        OpenColumn("id"),
        Label("y", ["low", "high"], fill="low"),
    )  # fmt: skip
    assert schema.strict
    assert (schema.ignored, schema.label.name) == ({"id", "other"}, "y")
    assert {"seen_year", "seen_weekday"} < set(schema.named)
    assert Schema.parse(schema.to_toml(), "again") == schema


def test_a_schema_of_whatever_describes_one(tmp_path: Path) -> None:
    columns = [Number("x", 0, 1), Label("y", ["a", "b"])]
    (tmp_path / "s.toml").write_text(LABEL + NUMBER)
    made = Schema.of(columns)
    assert made == Schema.of(made) == Schema.of({c.name: c for c in columns})
    assert set(Schema.of(str(tmp_path / "s.toml")).columns) == set(columns)
    assert Schema.of(tmp_path / "s.toml") == Schema.of(str(tmp_path / "s.toml"))
    assert Schema.of("adult").label == Label("income", ["<=50K", ">50K"])
    with pytest.raises(InvalidInput, match="does not exist"):
        Schema.of("adlut")
    with pytest.raises(InvalidInput, match="must name at least one column, each once"):
        Schema.of([Number("x", 0, 1), Text("x")])
    with pytest.raises(InvalidInput, match="must be a TOML file"):
        Schema.of(["x"])


def test_the_example_is_a_schema() -> None:
    example = Path(__file__).parents[2] / "examples" / "people.schema.toml"
    assert training_schema(example).label.classes == ("low", "high")
