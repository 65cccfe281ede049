from __future__ import annotations

import pytest

from dpfy.core.errors import DpfyError
from dpfy.data.schema import Category, Label, Number, parse

LABEL = '[columns.y]\nkind = "label"\nclasses = ["a", "b"]\n'
NUMBER = '[columns.x]\nkind = "number"\nrange = [0, 1]\n'


def test_a_schema_keeps_the_order_of_its_columns() -> None:
    text = (
        LABEL
        + '[columns.c]\nkind = "category"\ncategories = ["u", "v"]\n'
        + NUMBER
        + "[columns.id]\nignore = true\n"
    )
    schema = parse(text, "s.toml")
    assert schema.features == (Category("c", ("u", "v")), Number("x", (0.0, 1.0)))
    assert schema.label == Label("y", ("a", "b"))
    assert schema.names == {"c", "x", "y", "id"}
    assert schema.width == 3
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
            r"columns.x.kind: got 'numeric'; must be one of number, category, label",
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
        parse(text, "s.toml")
    assert "\n" not in str(caught.value)
